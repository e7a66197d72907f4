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
from server_metrics import metrics_text

from nxbucket.toolkit.choice.trace_reader import find_trace, read_trace

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
        "[]": "the file",
    }
    for text, sentence in wrong.items():
        costs.write_text(text)
        code, _, err = run(
            "advise", str(model), "--trace", "azure_code_2023", "--costs", str(costs)
        )
        assert code == 2
        assert sentence in err, err


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


def test_simulate_takes_model_files(run: Run, model: Path, requests: Path) -> None:
    found = of(run, "simulate", str(model), "--trace", str(requests), "--requests", "50")
    (scenario,) = found["scenarios"]
    assert scenario["num_batched_tokens_buckets"] == list(PREFILL)
    assert scenario["requests"] == 50


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prefill-buckets", "32,64"), "must be 128"),
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
    assert "-  num_batched_tokens_buckets: [32, 64, 128]" in out
    assert "+  num_batched_tokens_buckets: [72, 128]" in out
    assert of(run, *arguments, "--grid", "8", "--threshold", "0.5")["drifted"] is False


def test_a_few_steps_decide_nothing(run: Run, locked: Path, tmp_path: Path) -> None:
    few = metrics_file(tmp_path, ({70: 500}, {3: 500}))
    found = of(run, "drift", "--metrics", few, "--lock", str(locked))
    assert not found["drifted"]
    assert not found["prefill"]["enough_steps"]


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


def test_shipped_traces_are_what_their_names_say() -> None:
    assert len(read_trace(find_trace("azure_code_2023"))) == 8819
    assert len(read_trace(find_trace("mooncake_synthetic"))) == 3993
