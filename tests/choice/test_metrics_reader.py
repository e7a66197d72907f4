"""A server's metrics, from a URL and from a file, and what is said when there are none."""

import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nxbucket.toolkit.choice.metrics_reader import SizeHistogram, read_metrics
from nxbucket.toolkit.errors import EnvironmentProblem, NxbucketError, TraceError, UsageError


def histogram(name: str, cumulative: dict[str, int], total: float, labels: str = "") -> str:
    comma = "," if labels else ""
    lines = [f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{{labels}{comma}le="{le}"}} {n}.0' for le, n in cumulative.items()]
    lines += [f"{name}_count{{{labels}}} {cumulative['+Inf']}.0", f"{name}_sum{{{labels}}} {total}"]
    return "\n".join(lines) + "\n"


def vllm(name: str, engine: int, cumulative: dict[str, int], total: float) -> str:
    return histogram(name, cumulative, total, f'engine="{engine}",model_name="tiny"')


CHUNKS = histogram("nxbucket_prefill_chunk_tokens", {"64.0": 2, "128.0": 5, "+Inf": 5}, 450.0)
SEQS = histogram("nxbucket_decode_batch_seqs", {"1.0": 7, "2.0": 7, "+Inf": 7}, 7.0)
PROMPTS = vllm("vllm:request_prompt_tokens", 0, {"1.0": 0, "200.0": 2, "+Inf": 3}, 700.0) + vllm(
    "vllm:request_prompt_tokens", 1, {"1.0": 1, "200.0": 2, "+Inf": 2}, 150.0
)
COMPUTED = vllm(
    "vllm:request_prefill_kv_computed_tokens", 0, {"1.0": 0, "200.0": 3, "+Inf": 3}, 90.0
)
OURS = (
    CHUNKS
    + SEQS
    + "# TYPE nxbucket_program_executions_total counter\n"
    + 'nxbucket_program_executions_total{program="prefill_s128"} 5.0\n'
    + 'nxbucket_program_executions_total{program="decode_b1"} 7.0\n'
    + histogram(
        "nxbucket_prefill_padding_tokens", {"64.0": 3, "+Inf": 5}, 190.0, labels='bucket="128"'
    )
    + histogram("nxbucket_decode_padding_seqs", {"0.0": 7, "+Inf": 7}, 0.0, labels='bucket="1"')
)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str | bytes], str]:
    def save(content: str | bytes) -> str:
        file = tmp_path / "metrics.txt"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(file)

    return save


Save = Callable[[str | bytes], str]


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow/metrics":
            self.server.released.wait()  # type: ignore[attr-defined]
            return
        if self.path == "/moved/metrics":
            self.send_response(302)
            self.send_header("Location", "/metrics?from=moved")
            self.end_headers()
            return
        has_key = self.headers.get("Authorization") == "Bearer secret"
        if self.path == "/metrics?from=moved":
            status, body = (500, b"the key came along") if has_key else (200, OURS.encode())
        elif self.path == "/guarded/metrics":
            status, body = (200, OURS.encode()) if has_key else (401, b"{}")
        else:
            pages = {"/metrics": OURS, "/web/metrics": "<!doctype html><p>hello</p>"}
            status, body = (200, pages[self.path].encode()) if self.path in pages else (404, b"")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from threading import Event

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.released = Event()  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_our_server_tells(url: str) -> None:
    read = read_metrics(url)
    assert read.source == url
    assert read.chunk_tokens == SizeHistogram((64, 128), (2, 3), 450.0)
    assert read.batch_seqs == SizeHistogram((1, 2), (7, 0), 7.0)
    assert read.prompt_tokens is None and read.prompt_tokens_metric is None
    assert read.executions == {"prefill_s128": 5, "decode_b1": 7}
    assert read.prefill_padding == {128: (5, 190)}
    assert read.decode_padding == {1: (7, 0)}
    assert read_metrics(f"{url}/metrics").executions == read_metrics(f"{url}/").executions


def test_engines_are_added_up(saved: Save) -> None:
    read = read_metrics(saved(PROMPTS))
    assert read.prompt_tokens == SizeHistogram((1, 200), (1, 3), 850.0, beyond=1)
    assert read.prompt_tokens_metric == "vllm:request_prompt_tokens"
    assert read.chunk_tokens is None and read.batch_seqs is None


def test_what_the_prefix_cache_had_is_left_out_where_that_is_told(saved: Save) -> None:
    read = read_metrics(saved(PROMPTS + COMPUTED))
    assert read.prompt_tokens_metric == "vllm:request_prefill_kv_computed_tokens"
    assert read.prompt_tokens is not None and read.prompt_tokens.total == 90
    nothing = COMPUTED.replace(" 3.0", " 0.0").replace(" 90.0", " 0.0")
    assert read_metrics(saved(PROMPTS + nothing)).prompt_tokens_metric == (
        "vllm:request_prompt_tokens"
    )


def test_bounds_that_are_no_whole_numbers_are_rounded_down(saved: Save) -> None:
    text = vllm("vllm:request_prompt_tokens", 0, {"0.5": 0, "2.5": 3, "+Inf": 3}, 6.0)
    assert read_metrics(saved(text)).prompt_tokens == SizeHistogram((0, 2), (0, 3), 6.0)


def test_the_key_goes_to_the_server_and_not_where_it_redirects(url: str) -> None:
    assert read_metrics(f"{url}/guarded", api_key="secret").executions
    assert read_metrics(f"{url}/moved", api_key="secret").executions
    with pytest.raises(TraceError, match="answers 401") as caught:
        read_metrics(f"{url}/guarded", api_key="wrong")
    assert "VLLM_API_KEY" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/nowhere", "answers 404"),
        ("/web", "is no text of Prometheus metrics"),
        ("/slow", "no answer within 0.2 s"),
    ],
)
def test_other_answers_are_told_apart(path: str, sentence: str, url: str) -> None:
    with pytest.raises(TraceError, match=sentence) as caught:
        read_metrics(url + path, timeout_s=0.2)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("http://127.0.0.1:1", "nothing listens there"),
        ("http://127.0.0.1:port", "port"),
        ("http://", "no host given"),
        ("http://[1", "is no URL"),
        ("http://a b/", "URL can't contain control characters"),
        ("127.0.0.1:8000", "no such file"),
        ("a\0b", "is no file name"),
        ("x" * 300, "cannot be read"),
        (".", "cannot be read: Is a directory"),
    ],
)
def test_what_cannot_be_asked_has_a_sentence(source: str, sentence: str) -> None:
    with pytest.raises(NxbucketError) as caught:
        read_metrics(source)
    assert isinstance(caught.value, TraceError | UsageError)
    assert sentence in caught.value.message
    assert caught.value.hint


def test_an_address_without_http_is_told_how_to_be_one() -> None:
    with pytest.raises(UsageError) as caught:
        read_metrics("127.0.0.1:8000")
    assert str(caught.value.hint).endswith("http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "no metrics of nxbucket or vLLM"),
        ("# TYPE x counter\nx_total 1.0\n", "no metrics of nxbucket or vLLM"),
        (b"\xff\xfe", "it is not UTF-8"),
        ("vllm:x{\n", "is no text of Prometheus metrics"),
        (CHUNKS.replace(" 2.0", " 0.0").replace(" 5.0", " 0.0"), "has served nothing yet"),
        (PROMPTS.partition("vllm:request_prompt_tokens_sum")[0], "_sum is missing"),
        (CHUNKS.replace('{le="+Inf"} 5.0', '{le="256"} 5.0'), "le=+Inf is missing"),
        (CHUNKS.replace(" 2.0", " 9.0"), "its counts descend"),
        (CHUNKS.replace(" 2.0", " 2.5"), "2.5 is no count"),
        (CHUNKS.replace(" 2.0", " NaN"), "nan is no count"),
        (CHUNKS.replace('"64.0"', '"x"'), "le=x is no size"),
        (CHUNKS.replace('"64.0"', '"-64.0"'), "le=-64.0 is no size"),
        (CHUNKS.replace(" 450.0", " NaN"), "the sum of its sizes is nan"),
        (OURS.replace('bucket="128"', 'bucket="x"'), "its buckets are no sizes"),
        (histogram("nxbucket_decode_batch_seqs", {"+Inf": 1}, 1.0), "no bound but infinity"),
    ],
)  # fmt: skip
def test_a_text_that_is_not_whole_is_refused(
    content: str | bytes, sentence: str, saved: Save
) -> None:
    with pytest.raises(TraceError) as caught:
        read_metrics(saved(content))
    assert sentence in caught.value.message
    assert caught.value.hint


LINES = st.sampled_from([*OURS.splitlines(), *PROMPTS.splitlines(), "# EOF", "vllm:a{", "}", '"'])


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=100), st.lists(LINES).map(lambda x: "\n".join(x).encode())))
@example(b'vllm:a{le="\\')
def test_no_text_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any-metrics"
    file.write_bytes(content)
    try:
        read_metrics(str(file))
    except TraceError as err:
        assert err.hint


def test_without_the_library_the_mend_is_told(saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with pytest.raises(EnvironmentProblem) as caught:
        read_metrics(saved(OURS))
    assert "pip install prometheus-client" in str(caught.value.hint)


# Spreading


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5000)), min_size=1, max_size=20),
)
def test_a_spread_adds_up_and_stays_in_its_bins(bins: list[tuple[int, int]]) -> None:
    counts = dict(bins)
    bounds = sorted(counts)
    spread = SizeHistogram(tuple(bounds), tuple(counts[b] for b in bounds), 0.0).spread()
    assert all(count > 0 for count in spread.values())
    low = min(0, bounds[0] - 1)
    for bound in bounds:
        inside = [spread.get(size, 0) for size in range(low + 1, bound + 1)]
        assert sum(inside) == counts[bound]
        assert max(inside) - min(inside) <= 1
        low = bound
    assert sum(spread.values()) == sum(counts.values())


def test_a_spread_is_even() -> None:
    wide = SizeHistogram((10, 100_000), (0, 3), 0.0)
    assert wide.spread() == {10 + 33330: 1, 10 + 66660: 1, 100_000: 1}
    assert SizeHistogram((4,), (6,), 0.0).spread() == {1: 1, 2: 2, 3: 1, 4: 2}
