"""Traces as people have them, and what is said of those that cannot be read."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nxbucket.toolkit.choice.trace import MAX_TOKENS, Trace
from nxbucket.toolkit.choice.trace_file import BLOCK_BYTES
from nxbucket.toolkit.choice.trace_reader import find_trace, read_trace, shipped_traces
from nxbucket.toolkit.errors import NxbucketError, TraceError, UsageError

Write = Callable[[str | bytes], Path]

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes) -> Path:
        file = tmp_path / "trace.csv"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    return write


def columns(trace: Trace) -> list[list[float] | None]:
    of = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens)
    return [None if column is None else list(column) for column in of]


TWO = [[0.0, 1.5], [374, 396], [44, 0]]


# What is read


@pytest.mark.parametrize(
    "content",
    [
        HEADER + "0,374,44\n1.5,396,0\n",
        HEADER + "0,374,44\n1.5,396,0",
        HEADER + "10,374,44\n11.5,396,0\n",
        HEADER.upper() + "0,374,44\n\n1.5,396,0\n\n",
        "\ufeff# made by hand\n\n# twice\r\n" + HEADER + "0, 374 ,44\r\n1.5, 396, 0\r\n",
        '"Arrival_S",Model,"prompt tokens",OUTPUT-TOKENS\n0,"a, ""b""\nc",374,"44"\n1.5,d,396,0\n',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,396,0\n",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n5,-1,2,ChatGPT,374,44,418,Conversation log\n"
        "6.5,-1,2,GPT-4,396,0,396,API log\n",
        "timestamp_ms,input_length,output_length\n1700000000000,374,44\n1700000001500,396,0\n",
        '{"arrival_s": 3, "prompt_tokens": 374, "output_tokens": 44}\n\n'
        '{"arrival_s": 4.5, "prompt_tokens": 396, "output_tokens": 0}\n',
        '{"timestamp": 1000, "input_length": 374, "output_length": 44, "hash_ids": [1]}\n'
        '{"timestamp": 2500, "input_length": 396, "output_length": 0, "hash_ids": [1, 2]}\n',
        '{"ts": "2026-11-30T10:00:00Z", "input_tokens": 374, "completion_tokens": 44}\n'
        '{"ts": "2026-11-30T11:00:01.5+01:00", "input_tokens": 396, "completion_tokens": 0}\n',
    ],
    ids=[
        "ours", "no-last-newline", "shifted", "capitals-and-blank-lines", "bom-comments-crlf",
        "quoted", "azure", "burstgpt", "milliseconds", "jsonl", "mooncake", "time-zones",
    ],
)  # fmt: skip
def test_one_trace_in_many_forms(content: str, write: Write) -> None:
    assert columns(read_trace(write(content))) == TWO


def test_gzip_is_known_by_its_first_bytes(write: Write) -> None:
    assert (
        columns(read_trace(write(gzip.compress((HEADER + "0,374,44\n1.5,396,0\n").encode()))))
        == TWO
    )


def test_the_prompts_length_is_all_that_is_needed(write: Write) -> None:
    trace = read_trace(write("prompt_len\n5\n7\n"))
    assert columns(trace) == [None, [5, 7], None]
    assert not trace.can_be_replayed
    assert trace.name == "trace.csv"


def test_cached_and_allowed_tokens_are_kept(write: Write) -> None:
    trace = read_trace(write("prompt_tokens,cached_tokens,max_tokens\n9,8,100\n9,0,200\n"))
    assert trace.cached_tokens is not None and list(trace.cached_tokens) == [8, 0]
    assert trace.max_tokens is not None and list(trace.max_tokens) == [100, 200]


def test_responses_of_openais_api_are_a_trace(write: Write) -> None:
    def response(created: int, details: object) -> str:
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": details}
        return json.dumps({"id": "x", "created": created, "choices": [], "usage": usage})

    trace = read_trace(write(f"{response(1700000000, None)}\n{response(1700000002, None)}\n"))
    assert columns(trace) == [[0, 2], [9, 9], [4, 4]]
    assert trace.cached_tokens is None
    # vLLM leaves the details out where the cache had nothing.
    trace = read_trace(write(f"{response(1, None)}\n{response(2, {'cached_tokens': 8})}\n"))
    assert trace.cached_tokens is not None and list(trace.cached_tokens) == [0, 8]


def test_milliseconds_are_told(write: Write) -> None:
    trace = read_trace(write('{"timestamp": 1, "input_length": 3, "hash_ids": []}\n'))
    assert trace.notes == ("timestamp was read as milliseconds",)


def test_progress_counts_rows(write: Write) -> None:
    seen: list[int] = []
    rows = "".join(f"{i},{i + 1},2\n" for i in range(100_000))
    trace = read_trace(write(HEADER + rows), seen.append)
    assert len(trace) == seen[-1] == 100_000
    assert seen == sorted(seen) and len(seen) > 3
    assert columns(trace)[:2] == [list(range(100_000)), list(range(1, 100_001))]


ROWS = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(1, MAX_TOKENS), st.integers(0, MAX_TOKENS)),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, int, int]],
    newline: str,
    as_json: bool,
) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    lines = [f"{micros / 1e6:.6f},{prompt},{output}" for micros, prompt, output in rows]
    if as_json:
        keys = HEADER.strip().split(",")
        lines = [json.dumps(dict(zip(keys, (r[0] / 1e6, *r[1:]), strict=True))) for r in rows]
    file = tmp_path_factory.mktemp("rows") / "t"
    head = [] if as_json else [HEADER.strip()]
    file.write_bytes(newline.join([*head, *lines]).encode())
    trace = read_trace(file)
    assert list(trace.prompt_tokens) == [row[1] for row in rows]
    assert trace.output_tokens is not None
    assert list(trace.output_tokens) == [row[2] for row in rows]
    assert trace.arrival_s == pytest.approx([(row[0] - rows[0][0]) / 1e6 for row in rows])


def many(last: str) -> str:
    """A file of several blocks whose last row is `last`."""
    rows = (f"{i},{i % 4000 + 1},{i % 300}\n" for i in range(60_000))
    content = HEADER + "".join(rows)
    assert len(content) > 2 * BLOCK_BYTES
    return content + last


def test_rows_read_by_the_block_are_those_read_one_by_one(write: Write) -> None:
    at_once = read_trace(write(many("")))
    one_by_one = read_trace(write(re.sub(r"(?m)^(\d+),", r'"\1",', many(""))))
    assert columns(at_once) == columns(one_by_one)


# What is refused

FAULTS = [
    ("", "is empty"),
    ("\n  \n# nothing\n", "is empty"),
    (HEADER, "has no rows of requests"),
    (HEADER + "\n\n", "has no rows of requests"),
    ("a,b\n1,2\n", ":1: no column is the prompt's length; found: a, b"),
    ("# x\n\na,b\n1,2\n", ":3: no column is the prompt's length; found: a, b"),
    ("0,374,44\n1,2,3\n", ":1: there is no header: the first line is 0, 374, 44"),
    ("prompt_tokens;output_tokens\n1;2\n", ":1: the columns are separated by ';'"),
    ("prompt_tokens,Input Tokens\n1,2\n", "'prompt_tokens' and 'Input Tokens' both are"),
    (HEADER + "0,1,1\n1,2\n", ":3: the row has 2 fields and the header 3"),
    (HEADER + "0,1,1\n1,2,3,4\n", ":3: the row has 4 fields and the header 3"),
    (HEADER + "0,x,1\n", ":2: prompt_tokens is x, a number wanted"),
    (HEADER + "0,,1\n", ":2: prompt_tokens is empty"),
    (HEADER + "0,nan,1\n", ":2: prompt_tokens is nan, a number wanted"),
    (HEADER + "nan,1,1\n", ":2: arrival_s is nan, a number wanted"),
    (HEADER + "inf,1,1\n", ":2: arrival_s is inf, a number wanted"),
    (HEADER + "-1,1,1\n", ":2: arrival_s is -1, which is negative"),
    (HEADER + "1e400,1,1\n", ":2: arrival_s is 1e400: no time in seconds"),
    (HEADER + "1700000000000,1,1\n", ":2: arrival_s is 1700000000000: no time in seconds"),
    (HEADER + "0,-5,1\n", ":2: prompt_tokens is -5, which is negative"),
    (HEADER + "0,5,-1\n", ":2: output_tokens is -1, which is negative"),
    (HEADER + "0,5.5,1\n", ":2: prompt_tokens is 5.5, and a token has no fractions"),
    (HEADER + "0,1e3,1\n", ":2: prompt_tokens is 1e3, plain digits wanted"),
    (HEADER + "0,1_000,1\n", ":2: prompt_tokens is 1_000, a number wanted"),
    (HEADER + "0,٣,1\n", ":2: prompt_tokens is ٣, a number wanted"),
    (HEADER + "0,0,1\n", ":2: prompt_tokens is 0"),
    (HEADER + "0,1000000000000,1\n", ":2: prompt_tokens is 1000000000000, more than any"),
    (HEADER + f"0,{'9' * 9000},1\n", ":2: prompt_tokens is 9999999999"),
    (HEADER + "5,1,1\n\n3,1,1\n", ":4: arrival_s goes back by 2 s after line 2: the rows are not"),
    ("prompt_tokens,cached_tokens\n5,6\n", ":2: cached_tokens is 6, of a prompt of 5"),
    ("ts,prompt_len\n2026-11-30 10:00:00,1\n5,1\n", ":3: ts is 5, a date and time wanted"),
    ("ts,prompt_len\n2026-13-30 10:00:00,1\n", ":2: ts is 2026-13-30 10:00:00, a date and time"),
    (
        "ts,prompt_len\n2026-11-30 10:00:00,1\n2026-11-30 10:00:00Z,1\n",
        "some rows have a time zone, some not",
    ),
    (HEADER + '0,"1,1\n', ":2: not CSV: unexpected end of data"),
    (HEADER + '0,"1"x,1\n', ":2: not CSV: "),
    ("prompt_tokens\n1\r2\n", "not CSV: new-line character seen in unquoted field"),
    ("[\n", ":1: this is a JSON list"),
    ("{\n", ":1: column 2: not JSON: Expecting property name"),
    ('{"a": 1}\n', ":1: no key is the prompt's length; found: a"),
    ('{"input_len": 1}\n7\n', ":2: no JSON object"),
    ('{"input_len": NaN}\n', ":1: input_len is nan, a number wanted"),
    ('{"input_len": 1.5}\n', ":1: input_len is 1.5, and a token has no fractions"),
    ('{"input_len": 12.0}\n', ":1: input_len is 12.0, and a token has no fractions"),
    ('{"input_len": true}\n', ":1: input_len is boolean true, a number wanted"),
    ('{"input_len": null}\n', ":1: input_len is null, a number wanted"),
    ('{"input_len": [1]}\n', ":1: input_len is a list, a number wanted"),
    ('{"input_len": 1' + "0" * 5000 + "}\n", ":1: JSON that cannot be read"),
    ('{"input_len": ' + "[" * 100_000 + "\n", ":1: JSON that cannot be read"),
    ('{"ts": 1' + "0" * 400 + ', "input_len": 1}\n', ":1: ts is integer 10"),
    ('{"input_len": 1}\n{"input_len": 1, "ts": 5}\n', ":2: the row has ts, and line 1 has not"),
    ('{"input_len": 1, "ts": 5}\n{"input_len": 1}\n', ":2: the row has no ts, and line 1 has"),
    (
        '{"usage": {"prompt_tokens": 1}}\n{"error": {"code": 400}}\n',
        ":2: no key is the prompt's length; found: error",
    ),
    (
        '{"input_len": 1, "usage": {"prompt_tokens": 1}}\n',
        "'input_len' and 'usage.prompt_tokens' both are prompt_tokens",
    ),
    (HEADER.encode("utf-16"), "is UTF-16 text, UTF-8 wanted"),
    (HEADER.encode("utf-16-le"), ":1: there is a null byte"),
    (b"PAR1" + bytes(50), "is a Parquet file"),
    (HEADER.encode() + b"0,1,\xff\n", ":2: byte 0xff is not UTF-8 text"),
    (HEADER.encode() + b"0,1,1\n\0\n", ":3: there is a null byte"),
    (gzip.compress(b"prompt_len\n" + b"5\n" * 99)[:-12], "the gzip data is cut short or damaged"),
    (gzip.compress(HEADER.encode()) + b"junk", "the gzip data is cut short or damaged"),
    (
        "INFO 11-30 10:00:00 [r.py:1] Received request cmpl-1: params: SamplingParams(n=1)\n",
        ":1: this is vLLM's log as text",
    ),
    (many("59999,1,\n"), ":60002: output_tokens is empty"),
    (many("59998,1,1\n"), ":60002: arrival_s goes back by 1 s after line 60001"),
    (many("59999,0,1\n"), ":60002: prompt_tokens is 0"),
    (many("59999,200000000,1\n"), ":60002: prompt_tokens is 200000000, more than any"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "sentence"), FAULTS, ids=[repr(f[1])[:60] for f in FAULTS])
def test_a_fault_has_its_place_and_what_mends_it(
    content: str | bytes, sentence: str, write: Write
) -> None:
    file = write(content)
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert caught.value.message.startswith(str(file))
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_unsorted_rows_name_sort_and_the_column(write: Write) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write("prompt_len,ts\n1,5\n1,4\n"))
    assert "sort -t, -k2,2g" in str(caught.value.hint)
    with pytest.raises(TraceError) as caught:
        read_trace(write('{"input_len": 1, "ts": 5}\n{"input_len": 1, "ts": 4}\n'))
    assert "jq -sc 'sort_by(.ts)[]'" in str(caught.value.hint)


def test_a_missing_file_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="no file name"):
        read_trace(Path("a\0b"))


def test_a_folder_and_an_unreadable_file_are_told_apart(tmp_path: Path, write: Write) -> None:
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / ("x" * 300))
    file = write(HEADER)
    file.chmod(0)
    if not os.access(file, os.R_OK):  # root may read anything
        with pytest.raises(TraceError, match="cannot be read: Permission denied"):
            read_trace(file)


PIECES = st.sampled_from(
    [b"prompt_tokens", b"arrival_s", b"ts", b",", b"\n", b"\r", b'"', b"1", b"0.5", b"{", b"}",
     b'{"prompt_tokens": ', b'"ts": ', b'"message": "',
     b"Received request a: params: SamplingParams(",
     b"# ", b"\xef\xbb\xbf", b"[", b"2026-11-30 10:00:00", b"e", b"-", b"\x1f\x8b", b"NaN"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=40).map(b"".join)))
@example(b"prompt_tokens\n1\n \n")
@example(b'{"message": "Received request a: params: SamplingParams()"}\n')
def test_no_bytes_end_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "anything"
    for form in (content, gzip.compress(content)):
        file.write_bytes(form)
        try:
            assert len(read_trace(file)) > 0
        except (TraceError, UsageError) as err:
            assert err.hint


# Sizes


def test_a_million_rows_take_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "large.csv"
    block = "".join(f"{{0}}.{i:04d},{i % 7000 + 1},{i % 500}\n" for i in range(10_000))
    with file.open("w") as out:
        out.write(HEADER)
        for second in range(100):
            out.write(block.replace("{0}", str(second)))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nxbucket.toolkit.choice.trace_reader import read_trace\n"
        "assert len(read_trace(Path(sys.argv[1]))) == 1_000_000\n"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)\n"
        "print(Path('/proc/self/status').read_text())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Not ru_maxrss: that begins with what the process that forked this one had.
    peak = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert peak is not None and int(peak[1]) < 120 * 1024


# What is shipped


@pytest.mark.parametrize(
    ("name", "rows", "longest"),
    [
        ("azure_code_2023", 8819, 7437),
        ("azure_conv_2023", 19366, 14050),
        ("mooncake_synthetic", 3993, 191378),
    ],
)
def test_shipped_traces_are_found_by_name(name: str, rows: int, longest: int) -> None:
    trace = read_trace(find_trace(name))
    assert (len(trace), max(trace.prompt_tokens)) == (rows, longest)
    assert trace.can_be_replayed
    assert name in shipped_traces()


def test_a_file_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("azure_conv_2023").write_text("prompt_len\n1\n")
    assert find_trace("azure_conv_2023") == Path("azure_conv_2023")


@pytest.mark.parametrize("given_name", ["azure_conv", "nothing", "x" * 5000, "a\0b"])
def test_an_unknown_trace_names_those_that_are_shipped(given_name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_trace(given_name)
    assert "mooncake_synthetic" in str(caught.value.hint)
    if given_name == "azure_conv":
        assert "did you mean azure_conv_2023?" in str(caught.value.hint)
    assert isinstance(caught.value, NxbucketError) and caught.value.exit_code == 2


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    writer = subprocess.Popen(["sh", "-c", f"printf 'prompt_len\\n5\\n7\\n' > {fifo}"])
    assert list(read_trace(fifo).prompt_tokens) == [5, 7]
    assert writer.wait() == 0


# vLLM's log


def log_line(message: str, **fields: object) -> str:
    return json.dumps({"asctime": "2026-11-30 10:00:00,000", **fields, "message": message}) + "\n"


def request_lines(
    name: str, prompt: int, answer: int | None, second: int, max_tokens: int = 64
) -> str:
    at = {"asctime": f"2026-11-30 10:00:{second:02d},500"}
    lines = log_line(
        f"Request {name} details: prompt: 'prompt_token_ids: [1', prompt_token_ids: "
        f"{list(range(prompt))}, prompt_embeds shape: None.",
        **at,
    )
    params = f"SamplingParams(n=1, stop=[], max_tokens={max_tokens}, min_tokens=0)"
    lines += log_line(f"Received request {name}: params: {params}, lora_request: None.", **at)
    if answer is not None:
        ids = list(range(answer))
        lines += log_line(f"Generated response {name} details: output_token_ids: {ids}")
        lines += log_line(f"Generated response {name}: output: 'x', finish_reason: stop")
    return lines


def test_a_log_is_joined_by_request_id_and_put_in_order(write: Write) -> None:
    content = (
        "Triton is installed\n"
        + log_line("non-default args: {'model': 'x'}")
        + request_lines("chatcmpl-b", 7, 3, second=9)
        + request_lines("chatcmpl-a", 5, None, second=7)
        + "INFO:     127.0.0.1:1 - GET /health\n"
        + log_line("Received request tok-1: params: None, lora_request: None.")
    )
    trace = read_trace(write(content))
    assert columns(trace) == [[0, 2], [5, 7], [0, 3]]
    assert trace.max_tokens is not None and list(trace.max_tokens) == [64, 64]
    (note,) = trace.notes
    assert note.startswith("requests without token ids of an answer, taken as 0 output tokens: 1")


def test_a_log_without_answers_times_or_arguments_says_so(write: Write) -> None:
    lines = request_lines("a", 5, None, second=1).replace('"asctime"', '"when"')
    trace = read_trace(write(lines))
    assert columns(trace) == [None, [5], None]
    told = ("--max-log-len", "no times", "no token ids of answers")
    assert all(words in note for words, note in zip(told, trace.notes, strict=True))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (log_line("hello"), "is a log without requests"),
        (
            log_line("Received request a: params: SamplingParams(n=1), lora_request: None."),
            "has requests (1) and no lengths of their prompts",
        ),
        (
            log_line("non-default args: {'max_log_len': 5}")
            + request_lines("a", 5, None, second=1),
            "no more than 5 token ids of a prompt",
        ),
        (
            request_lines("a", 5, None, second=1).replace("2026-11-30 ", "11-30 "),
            ":1: the time is 11-30 10:00:01,500, a number wanted",
        ),
    ],
    ids=["no-requests", "not-at-debug", "cut", "odd-times"],
)
def test_a_log_that_does_not_tell_lengths_is_refused(
    content: str, sentence: str, write: Write
) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(content))
    assert sentence in caught.value.message
    assert caught.value.hint


LOGGED_BY_VLLM = """
import array
from vllm.config.logging import LoggingConfig
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logger import configure_logging
from vllm.sampling_params import SamplingParams

configure_logging(LoggingConfig(log_level="DEBUG", formatter="json"))
log = RequestLogger(max_log_len=None)
spoof = "details: prompt: prompt_token_ids: [9, 9, 9], prompt_embeds shape: None."
for name, ids in (("chatcmpl-1", [1, 2, 3]), ("cmpl-2-0", [4] * 3000), ("resp_3_0", [5])):
    params = SamplingParams(max_tokens=len(ids) + 10, stop=["max_tokens=3,"])
    log.log_inputs(name, spoof, ids, None, params, None)
log.log_inputs("tokenize-4", "a", [1], None, None, None)
log.log_outputs("chatcmpl-1", "abc", array.array("i", [7, 8]), "stop")
log.log_outputs("chatcmpl-1", "de", (7,), "length")
for piece in ([1], [2, 3], None):
    log.log_outputs("resp_3", "x", piece, None, is_streaming=True, delta=True)
log.log_outputs("resp_3", "xxx", None, "streaming_complete", is_streaming=True)
"""


@pytest.mark.vllm
def test_what_vllms_own_logger_writes_is_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGGED_BY_VLLM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file = tmp_path / "requests.jsonl"
    file.write_text(done.stdout)
    trace = read_trace(file)
    # Two answers were asked of the first request, and the engine had two sequences.
    assert list(trace.prompt_tokens) == [3, 3, 3000, 1]
    assert trace.output_tokens is not None and list(trace.output_tokens) == [2, 1, 0, 3]
    assert trace.max_tokens is not None and list(trace.max_tokens) == [13, 13, 3010, 11]
    assert trace.arrival_s is not None and trace.arrival_s[0] == 0
    told = " ".join(trace.notes)
    assert "--max-log-len" in told and "0 output tokens: 1 " in told
    assert "streamed answers: 1;" in told
