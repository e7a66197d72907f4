"""`nxbucket advise`, `simulate`, `drift` as a person runs them; no engine, no compiler."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_here import cli_here
from example_model import example_in
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from server_metrics import metrics_text

from nxbucket.toolkit.choice.step_times import of_roofline
from nxbucket.toolkit.spec import load_spec

Run = Callable[..., tuple[int, str, str]]
PREFILL, DECODE = (32, 64, 128), (1, 2, 4)
"""The example's lists."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        return cli_here(monkeypatch, capsys, *arguments)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return example_in(tmp_path)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "requests.csv"
    rows = [f"{i / 10:.1f},{20 + 37 * i % 90},{1 + i % 9}" for i in range(200)]
    file.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return file


def of(run: Run, *arguments: str, code: int = 0) -> Any:
    returned, out, err = run(*arguments, "--json")
    assert returned == code, err or out
    return json.loads(out)


ADVISE = ("advise", "--trace", "azure_conv_2023", "--max-num-batched-tokens", "8192")


def test_the_json_of_advise(run: Run) -> None:
    found = of(run, *ADVISE, "--max-programs", "7", "--grid", "128")
    assert found["prefill"]["buckets"] == [256, 512, 1152, 1408, 2688, 4224, 8192]
    assert found["prefill"]["padding_share"] <= 0.1431
    assert found["decode"]["buckets"][-1] == 8
    assert set(found["holdout"]) == {"prefill", "decode"}
    assert [point["programs"] for point in found["curve"]] == list(range(1, 13))
    shares = [point["prefill"]["padding_share"] for point in found["curve"]]
    assert shares == sorted(shares, reverse=True)
    assert found["curve"][6]["prefill"]["buckets"] == found["prefill"]["buckets"]
    assert found["requests"] == 19366


def test_the_yaml_of_advise_is_the_same_on_every_run(run: Run) -> None:
    first, second = (run(*ADVISE, "--max-programs", "4") for _ in range(2))
    assert first == second
    code, out, err = first
    assert code == 0, err
    lists = yaml.safe_load(out)["neuron_config"]
    assert len(lists["num_batched_tokens_buckets"]) == 4


def test_write_puts_the_lists_into_the_model_file_and_the_comments_stay(
    run: Run, model: Path, requests: Path
) -> None:
    before = model.read_text()
    arguments = ("advise", str(model), "--trace", str(requests), "--max-programs", "2")
    found = of(run, *arguments, "--write")
    after = yaml.safe_load(model.read_text())["neuron_config"]
    assert after["num_batched_tokens_buckets"] == found["prefill"]["buckets"]
    assert after["num_seqs_buckets"] == found["decode"]["buckets"]
    assert found["to_compile"]["dropped"]
    comments = [line for line in before.splitlines() if line.lstrip().startswith("#")]
    assert [line for line in model.read_text().splitlines() if line in comments] == comments
    assert run("validate", str(model))[0] == 0
    assert "has these lists already" in run(*arguments, "--write")[2]
    again = of(run, *arguments)
    assert again["to_compile"]["new"] == again["to_compile"]["dropped"] == []


def test_write_with_other_limits_is_refused(run: Run, model: Path, requests: Path) -> None:
    code, _, err = run(
        "advise", str(model), "--trace", str(requests), "--write", "--max-num-seqs", "2"
    )
    assert code == 2
    assert "--write, and --max-num-seqs is not the model file's" in err


def test_without_a_model_file_or_limits_the_hint_says_what_to_give(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("advise", "--trace", "azure_conv_2023")
    assert code == 2
    assert "--max-num-batched-tokens" in err


def test_a_roofline_is_flops_over_peak_or_bytes_over_bandwidth(model: Path) -> None:
    """By hand, from config.json and Trainium2's figures at LNC 2: a quarter of the chip."""
    config = json.loads((model.parent / "model" / "config.json").read_text())
    spec = load_spec(model)
    hidden, layers, vocab = (config[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    per_layer = (
        2 * hidden * hidden
        + 2 * hidden * kv_heads * head_dim
        + 3 * hidden * config["intermediate_size"]
    )
    flops_per_s, bytes_per_s = 667e12 / 4, 2.9e12 / 4
    context = spec.max_blocks_per_seq * spec.block_size
    item = {"float32": 4, "bfloat16": 2}[spec.dtype]
    times = of_roofline(spec, "trn2")

    tokens = 1 << 16
    flops = 2 * (
        tokens * layers * per_layer + hidden * vocab + layers * 2 * tokens * hidden * context
    )
    assert times.prefill_s(tokens) == pytest.approx(flops / flops_per_s, rel=1e-6)
    table = 1 if config.get("tie_word_embeddings") else 2
    weights = layers * (per_layer + 2 * hidden) + hidden + table * hidden * vocab
    read = weights - (table - 1) * hidden * vocab + 2 * layers * kv_heads * head_dim * context
    assert times.decode_s(1) == pytest.approx(item * read / bytes_per_s, rel=1e-6)


def test_a_roofline_replaces_the_assumed_times(run: Run, model: Path, requests: Path) -> None:
    found = of(run, "advise", str(model), "--trace", str(requests), "--roofline", "trn2")
    assert found["minimizes"] == "time"
    assert found["step_times"].startswith("roofline of one rank of Trainium2 at LNC 2")
    assert found["notes"] == []
    code, _, err = run("advise", str(model), "--trace", str(requests), "--roofline", "gpu")
    assert code == 2
    assert "no such target" in err


def test_a_costs_file_that_is_wrong_names_the_key(run: Run, model: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    wrong = {
        '{"format": 1': "costs.json:1:13: not JSON",
        '{"format": 1, "target": "t", "source": "s", "prefil": {}}': "did you mean prefill?",
        '{"format": 1, "target": "t", "source": "s", "decode": {"step_s": {"1": -2}}}': (
            "decode.step_s.1"
        ),
        '{"format": 2, "target": "t", "source": "s"}': "format",
        '{"format": 1, "source": "s"}': "target: is missing",
        '{"format": 1, "target": "t", "source": "a\\nb: c"}': "source: text on one line",
        '{"format": 1, "target": "t", "source": "s", "decode": {"step_s": {"x": 1}}}': (
            "decode.step_s.x: a bucket's size is wanted"
        ),
        '{"format": 1, "target": "t", "source": "s", "decode": {"step_s": {"1": true}}}': (
            "decode.step_s.1: a number of seconds is wanted"
        ),
        "[]": "the file",
    }
    for text, sentence in wrong.items():
        costs.write_text(text)
        code, _, err = run(
            "advise", str(model), "--trace", "azure_code_2023", "--costs", str(costs)
        )
        assert code == 2
        assert sentence in err, err


COSTS = {
    "format": 1,
    "target": "cpu-x86-64-v4",
    "source": "the test",
    "prefill": {
        "step_s": {"32": 0.01, "128": 0.03},
        "compile_s": {"32": 60, "128": 60},
        "program_bytes": {"128": 1 << 20},
    },
    "decode": {
        "step_s": {"1": 0.01, "4": 0.012},
        "compile_s": {"1": 60},
        "program_bytes": {"1": 1 << 20},
    },
}


def costs_file(tmp_path: Path, **changes: Any) -> str:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({**COSTS, **changes}))
    return str(file)


def test_budgets_of_minutes_and_memory(
    run: Run, model: Path, requests: Path, tmp_path: Path
) -> None:
    costs = costs_file(tmp_path)
    base = ("advise", str(model), "--trace", str(requests), "--costs", costs, "--grid", "8")
    for budget in (("--max-compile-minutes", "4"), ("--max-program-memory", "4MiB")):
        found = of(run, *base, "--max-programs", "5", "--minimize", "tokens", *budget)
        assert len(found["prefill"]["buckets"]) + len(found["decode"]["buckets"]) == 4
    code, _, err = run(*base, "--max-compile-minutes", "1.5")
    assert code == 2
    assert "the last entries alone (128 and 4) take 2.00 minutes of compiling" in err
    text = run(*base, "--max-compile-minutes", "4")[1]
    assert yaml.safe_load(text)["neuron_config"].keys() == {
        "num_batched_tokens_buckets",
        "num_seqs_buckets",
    }


def test_costs_of_another_target_are_used_and_said(
    run: Run, model: Path, requests: Path, tmp_path: Path
) -> None:
    costs = costs_file(tmp_path, target="trn2-lnc2")
    for command in ("advise", "simulate"):
        found = of(run, command, str(model), "--trace", str(requests), "--costs", costs)
        assert (
            "the costs are those of trn2-lnc2, and what is looked at is for cpu" in found["notes"]
        )


def test_a_changed_limit_keeps_the_list_that_still_fits(
    run: Run, model: Path, requests: Path
) -> None:
    found = of(run, "simulate", str(model), "--trace", str(requests), "--max-num-seqs", "8")
    (scenario,) = found["scenarios"]
    assert scenario["num_batched_tokens_buckets"] == list(PREFILL)
    assert scenario["num_seqs_buckets"] == [1, 2, 4, 8]
    assert scenario["name"].endswith("with powers of two (decode)")
    same = of(run, "simulate", str(model), "--trace", str(requests), "--max-num-seqs", "4")
    assert same["scenarios"][0]["num_seqs_buckets"] == list(DECODE)


def test_vllms_own_metrics_give_a_prefill_list_and_a_note(
    run: Run, model: Path, tmp_path: Path
) -> None:
    registry = CollectorRegistry()
    prompts = Histogram(
        "vllm:request_prompt_tokens", "", buckets=(1, 2, 5, 10, 20, 50, 100, 200), registry=registry
    )
    for length in (15, 40, 90, 150, 700, 800):
        prompts.observe(length)
    file = tmp_path / "metrics.txt"
    file.write_text(generate_latest(registry).decode())
    found = of(run, "advise", str(model), "--metrics", str(file))
    assert found["prefill"]["buckets"][-1] == 128
    assert found["decode"] is None
    assert any("wide bins" in note for note in found["notes"])
    assert any("2 of 6 prompts are above its last bin" in note for note in found["notes"])
    assert found["prefill"]["steps"] > 2 * 700 // 128


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("arrival_s,prompt_tokens\n0,-5\n", ":2"),
        ("arrival_s,prompt_tokens\n1,5\n0,5\n", ":3"),
        ("a,b\n1,2\n", ":1"),
        ("prompt_tokens\nNaN\n", ":2"),
        ("prompt_tokens\n1000000000000\n", ":2"),
    ],
)
def test_a_bad_trace_is_told_with_its_line(
    run: Run, tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    code, out, err = run("advise", "--trace", str(file), "--max-num-batched-tokens", "1024")
    assert (code, out) == (1, "")
    assert sentence in err
    assert "hint:" in err
    assert "Traceback" not in err


def test_simulate_compares_lists_and_policies(run: Run, requests: Path) -> None:
    arguments = ("--trace", str(requests), "--max-num-batched-tokens", "128")
    found = of(
        run,
        "simulate",
        *arguments,
        *("--prefill-buckets", "32,128", "--prefill-buckets", "128"),
        *("--max-consecutive-prefills", "0", "--max-consecutive-prefills", "8"),
    )
    scenarios = found["scenarios"]
    assert len(scenarios) == 4
    assert [s["num_batched_tokens_buckets"] for s in scenarios] == [[32, 128]] * 2 + [[128]] * 2
    assert [s["max_consecutive_prefills"] for s in scenarios] == [0, 8, 0, 8]
    assert scenarios[0]["prefill"]["padding_share"] < scenarios[2]["prefill"]["padding_share"]
    assert {s["requests"] for s in scenarios} == {200}
    code, out, _ = run("simulate", *arguments)
    assert code == 0
    assert "TTFT p50 / p95 / p99" in out


@pytest.mark.parametrize(
    ("text", "costs", "sentence"),
    [
        ("prompt_tokens\n5\n", {}, "no arrival times: it cannot be replayed"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,2\n90000000000,5,2\n", {}, "centuries"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,900000\n", {"1": 999999}, "centuries"),
    ],
)
def test_what_cannot_be_replayed_is_told(
    run: Run, tmp_path: Path, text: str, costs: dict[str, float], sentence: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    steps: dict[str, Any] = {"step_s": costs or {"1": 0.01}}
    given = costs_file(tmp_path, prefill=steps, decode=steps)
    limits = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4")
    for command in ("simulate", "advise"):
        if command == "advise" and "cannot be replayed" in sentence:
            continue
        code, _, err = run(command, "--trace", str(file), *limits, "--costs", given)
        assert code == 1
        assert sentence in err


def test_a_server_that_cannot_keep_up_is_said_and_a_share_of_the_traffic_helps(run: Run) -> None:
    chat = ("--trace", "azure_conv_2023", "--max-num-batched-tokens", "8192", "--requests", "4000")
    found = of(run, "simulate", *chat)
    assert any("the server cannot keep up" in note for note in found["notes"])
    shared = of(run, "simulate", *chat, "--servers", "4")
    assert shared["scenarios"][0]["requests"] == 1000
    assert not any("cannot keep up" in note for note in shared["notes"])
    advised = of(run, "advise", *chat)
    assert any("--servers 2 looks at a share" in note for note in advised["notes"])
    fewer = of(run, "advise", *chat, "--servers", "4")
    assert fewer["prefill"] == advised["prefill"], "lengths are those of all"
    assert fewer["decode"]["steps"] < advised["decode"]["steps"]
    assert run("simulate", *chat, "--servers", "0")[0] == 2


def test_the_model_file_here_counts_beside_an_option(
    run: Run, model: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    found = of(run, "advise", "--trace", str(requests), "--max-num-batched-tokens", "64")
    assert found["limits"] == {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "max_model_len": found["limits"]["max_model_len"],
    }
    assert "now" in found["decode"]["compared"]


def test_a_servers_counters_say_nothing_of_longer_steps(
    run: Run, model: Path, tmp_path: Path
) -> None:
    code, _, err = run(
        *("advise", str(model), "--metrics", metrics_file(tmp_path, GOOD)),
        *("--max-num-batched-tokens", "256"),
    )
    assert code == 2
    assert "cuts prompts into steps of 128 tokens at most" in err


def test_columns_that_mean_nothing_are_named_where_something_is_missing(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("when,prompt_len,answer\n0,5,2\n")
    found = of(run, "advise", "--trace", str(file), "--max-num-batched-tokens", "64")
    assert "there is no arrival_s and output_tokens; not used: when, answer" in found["notes"]


def test_simulate_takes_model_files(run: Run, model: Path, requests: Path) -> None:
    found = of(run, "simulate", str(model), "--trace", str(requests), "--requests", "50")
    (scenario,) = found["scenarios"]
    assert scenario["num_batched_tokens_buckets"] == list(PREFILL)
    assert scenario["requests"] == 50


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prefill-buckets", "32,64"), "must be 128"),
        (("--max-num-seqs", "200"), "is above --max-num-batched-tokens 128"),
        (("--prefill-buckets", "a,b"), "no list of whole numbers"),
        (("--decode-buckets", "4,2,8"), "must ascend"),
        (("--max-consecutive-prefills", "-1"), "below 0"),
        (("--max-consecutive-prefills", "1") * 17, "at most 16"),
    ],
)
def test_scenarios_that_cannot_be(
    run: Run, requests: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(
        "simulate", "--trace", str(requests), "--max-num-batched-tokens", "128", *arguments
    )
    assert code == 2
    assert sentence in err


@pytest.fixture
def locked(run: Run, model: Path) -> Path:
    code, _, err = run("compile", str(model))
    assert code == 0, err
    return model.with_suffix(".lock")


GOOD = ({30: 3000, 60: 2000, 120: 1000}, {1: 1500, 2: 1500, 4: 1500})
BAD = ({70: 5000, 128: 10}, {3: 5000})
"""Chunks just above a bucket, batches of three."""


def metrics_file(tmp_path: Path, steps: tuple[dict[int, int], dict[int, int]]) -> str:
    file = tmp_path / "metrics.txt"
    file.write_text(metrics_text(*steps, PREFILL, DECODE))
    return str(file)


def test_lists_that_fit_have_not_drifted(run: Run, locked: Path, tmp_path: Path) -> None:
    found = of(run, "drift", "--metrics", metrics_file(tmp_path, GOOD), "--lock", str(locked))
    assert not found["drifted"]
    assert found["prefill"]["now"]["padding_share"] == pytest.approx(
        1 - (30 * 3000 + 60 * 2000 + 120 * 1000) / (32 * 3000 + 64 * 2000 + 128 * 1000), abs=1e-6
    )
    assert found["diff"] == ""


def test_lists_that_have_drifted_are_exit_code_4_and_a_diff(
    run: Run, locked: Path, tmp_path: Path
) -> None:
    arguments = ("drift", "--metrics", metrics_file(tmp_path, BAD), "--lock", str(locked))
    found = of(run, *arguments, "--grid", "8", code=4)
    assert found["drifted"]
    assert found["prefill"]["best"]["buckets"] == [72, 128]
    assert found["prefill"]["saving"] == pytest.approx(
        1 - (72 * 5000 + 128 * 10) / (128 * 5010), abs=1e-6
    )
    assert found["decode"]["best"]["buckets"] == [3, 4]
    assert found["to_compile"]["new"] == ["prefill_s72", "decode_b3"]
    assert found["to_compile"]["dropped"] == [
        "prefill_s32",
        "prefill_s64",
        "decode_b1",
        "decode_b2",
    ]
    assert found["to_compile"]["compile_s"] is not None
    code, out, _ = run(*arguments, "--grid", "8")
    assert code == 4
    assert out.startswith("drifted: other lists would save 5.00 % or more of a phase")
    assert "-  num_batched_tokens_buckets: [32, 64, 128]" in out
    assert "+  num_batched_tokens_buckets: [72, 128]" in out
    assert of(run, *arguments, "--grid", "8", "--threshold", "0.5")["drifted"] is False


def test_bins_that_are_wider_than_the_grid_promise_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bins of 256 tokens: that all steps of the first are of 256 cannot be seen, and must not be
    taken for 128."""
    model = example_in(tmp_path / "wide", max_model_len="16384", max_num_batched_tokens="16384")
    config = model.parent / "model" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "max_position_embeddings": 16384}))
    text = model.read_text().replace("[32, 64, 128]", "[256, 512, 16384]")
    model.write_text(text)
    code, _, err = run("compile", str(model))
    assert code == 0, err
    file = tmp_path / "metrics.txt"
    file.write_text(metrics_text({256: 5000, 300: 5}, {4: 2000}, (256, 512, 16384), DECODE))
    lock = str(model.with_suffix(".lock"))
    for grid in ((), ("--grid", "64")):
        found = of(run, "drift", "--metrics", str(file), "--lock", lock, *grid)
        assert not found["drifted"]
        assert found["prefill"]["saving"] == 0


def test_time_is_what_counts_where_it_is_known(run: Run, locked: Path, tmp_path: Path) -> None:
    """Steps that take as long whatever their size: padding costs nothing."""
    flat = {"step_s": {"1": 0.01}}
    costs = costs_file(tmp_path, prefill=flat, decode=flat)
    arguments = ("drift", "--metrics", metrics_file(tmp_path, BAD), "--lock", str(locked))
    found = of(run, *arguments, "--grid", "8", "--costs", costs)
    assert found["minimizes"] == "time"
    assert not found["drifted"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--threshold", "2"), "a share from 0 to 1"),
        (("--max-programs", "-3"), "--max-programs is -3"),
        (("--max-programs", "0"), "--max-programs is 0"),
        (("--grid", "0"), "--grid is 0"),
        (("--target", "trn2-lnc2"), "has no target trn2-lnc2"),
    ],
)
def test_what_drift_cannot_take(
    run: Run, locked: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run(
        "drift", "--metrics", metrics_file(tmp_path, BAD), "--lock", str(locked), *arguments
    )
    assert code == 2
    assert sentence in err + out


def test_a_few_steps_decide_nothing(run: Run, locked: Path, tmp_path: Path) -> None:
    few = metrics_file(tmp_path, ({70: 500}, {3: 500}))
    found = of(run, "drift", "--metrics", few, "--lock", str(locked))
    assert not found["drifted"]
    assert not found["prefill"]["enough_steps"]
    assert found["verdict"] == "undecided: fewer than 1000 steps"


def test_counters_that_contradict_each_other_decide_nothing(
    run: Run, locked: Path, tmp_path: Path
) -> None:
    ours, theirs = (
        metrics_text(chunks, {3: 5000}, PREFILL, DECODE).splitlines(keepends=True)
        for chunks in ({70: 5000}, {70: 90})
    )
    name = "nxbucket_prefill_chunk_tokens"
    mixed = [line for line in ours if name not in line] + [line for line in theirs if name in line]
    file = tmp_path / "mixed.txt"
    file.write_text("".join(mixed))
    code, _, err = run("drift", "--metrics", str(file), "--lock", str(locked))
    assert code == 1
    assert "contradicts itself" in err


def test_a_threshold_of_nothing_needs_a_saving(run: Run, locked: Path, tmp_path: Path) -> None:
    arguments = ("drift", "--metrics", metrics_file(tmp_path, GOOD), "--lock", str(locked))
    assert not of(run, *arguments, "--threshold", "0")["drifted"]


def test_a_server_of_another_lock_is_refused(run: Run, locked: Path, tmp_path: Path) -> None:
    file = tmp_path / "metrics.txt"
    file.write_text(metrics_text({70: 9}, {3: 9}, (100, 128), DECODE))
    code, _, err = run("drift", "--metrics", str(file), "--lock", str(locked))
    assert code == 1
    assert "started from another lock" in err


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    text = metrics_text(*BAD, PREFILL, DECODE)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            if self.path == "/metrics":
                self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_advise_and_drift_ask_a_running_server(run: Run, locked: Path, url: str) -> None:
    drifted = of(run, "drift", "--metrics", url, "--lock", str(locked), "--grid", "8", code=4)
    model = locked.with_suffix(".yaml")
    found = of(run, "advise", str(model), "--metrics", url, "--grid", "8")
    assert found["prefill"]["buckets"] == drifted["prefill"]["best"]["buckets"]
    assert found["decode"]["buckets"] == drifted["decode"]["best"]["buckets"]
    assert found["holdout"] is None
    assert found["decode_batches_from"].startswith("nxbucket_decode_batch_seqs")
