"""`nxbucket verify-hlo` and `nxbucket inspect` as a person types them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_here import cli_here
from hlo_modules import SEGMENTED, loop, lowered, one_instruction
from null_compiler import model_file

from nxbucket.compile.hlo import compiler, lowering, verify
from nxbucket.compile.program import BucketProgram
from nxbucket.toolkit import hlo_report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model_file(tmp_path, prefill=(128,), decode=(1,), num_hidden_layers=2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_is_verified(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = cli_here(monkeypatch, capsys, "verify-hlo")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows[:3]] == ["program", "prefill_s128", "decode_b1"]
    assert float(rows[1][2]) < 1e-4
    assert "opcodes" in out and "scatter" in out
    assert "prefill_s128: verified" in err
    assert rows[0][4:6] == ["large", "scores"]
    for row in rows[1:3]:
        difference, of, limit = row[4:7]
        assert float(difference) < float(limit) == 1e-2
        assert of == "of"
    assert "2 of 2 programs equal eager torch within 0.0001 in float32 on XLA:CPU, and" in err
    assert "and within 0.01 in the " in err
    assert "Warning" not in err


def test_json_has_every_case(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--json", "--program", "decode_b1", "--layers", "1", "--seed", "3")
    code, out, _ = cli_here(monkeypatch, capsys, "verify-hlo", "model.yaml", *arguments)
    report = json.loads(out)
    assert (code, report["ok"], report["seed"]) == (0, True, 3)
    assert (report["layers"], report["of_layers"]) == (1, 2)
    (program,) = report["programs"]
    assert program["name"] == "decode_b1"
    assert len(program["sha256"]) == 64
    assert program["findings"] == []
    assert program["low_precision"] is None
    assert max(c["logits"] for c in program["cases"]) <= program["max_difference"] < 1e-3


def test_a_plan_of_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model_file(tmp_path, prefill=(128,), decode=(1,), extra="dtype: bfloat16\n")
    arguments = ("verify-hlo", str(file), "--json", "--program", "decode_b1")
    code, out, _ = cli_here(monkeypatch, capsys, *arguments)
    (program,) = json.loads(out)["programs"]
    assert code == 0
    assert program["dtype"] == "bfloat16"
    assert 0 < program["low_precision"]["logits"] <= 1.5 * program["low_precision"]["eager_logits"]


def test_a_wrong_module_exits_1_and_says_where(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cosines(program: BucketProgram) -> bytes:
        from hlo_mutants import mutants_of

        payload = lowering.lower(program)
        found = (m for m in mutants_of(payload) if m.change == "sine -> cosine")
        return next(found).apply(payload)

    monkeypatch.setattr(verify, "lower", cosines)
    arguments = ("verify-hlo", "--program", "decode_b1")
    code, _, err = cli_here(monkeypatch, capsys, *arguments)
    assert code == 1
    assert "decode_b1: FAILED" in err
    assert "warning: decode_b1: all at the end: lengths 128: " in err
    assert " is " in err and ", not " in err
    assert "more cases differ" in err
    assert "0 of 1 programs equal" in err
    code, out, _ = cli_here(monkeypatch, capsys, *arguments, "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_an_unknown_program_exits_2_with_the_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli_here(monkeypatch, capsys, "verify-hlo", "--program", "decode_b9")
    assert code == 2
    assert "has no program decode_b9" in err
    assert "it has prefill_s128, decode_b1" in err


def test_more_layers_than_there_are_is_a_usage_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli_here(monkeypatch, capsys, "verify-hlo", "--layers", "99")
    assert code == 2
    assert f"--layers 99: the model of {folder / 'model.yaml'} has 2 layers" in err
    assert "hint: give 1 to 2, or leave --layers out" in err


def test_without_jax_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "LOWERING_PACKAGES", ("torch", "no-jax-here"))
    code, _, err = cli_here(monkeypatch, capsys, "verify-hlo")
    assert code == 3
    assert "pip install 'nxbucket[hlo]'" in err


def test_too_little_memory_names_the_layers_that_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nxbucket.compile.hlo.scope import first_layers, memory_bytes
    from nxbucket.compile.plan import plan_programs
    from nxbucket.toolkit.spec import load_spec

    largest = max(map(memory_bytes, plan_programs(load_spec(folder / "model.yaml"))))
    monkeypatch.setattr(hlo_report, "available_bytes", lambda: largest - 1)
    code, _, err = cli_here(monkeypatch, capsys, "verify-hlo")
    assert code == 3
    assert "hint: nxbucket verify-hlo model.yaml --layers 1: the first 1 of its 2 layers" in err
    monkeypatch.setattr(hlo_report, "available_bytes", lambda: 1000)
    code, _, err = cli_here(monkeypatch, capsys, "verify-hlo")
    assert "not even one layer fits" in err
    assert first_layers(plan_programs(load_spec(folder / "model.yaml"))[0], 1)


def test_ctrl_c_ends_it_without_a_traceback(folder: Path) -> None:
    code = "from nxbucket.toolkit.cli import main; main()"
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code, "verify-hlo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stderr is not None
        assert "prefill_s128" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    assert time.monotonic() - started < 30


# inspect


def test_inspect_says_what_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.hlo"
    file.write_bytes(lowered(SEGMENTED))
    code, out, _ = cli_here(monkeypatch, capsys, "inspect", str(file))
    assert code == 0
    assert "1, of 4 rounds" in out
    assert "key.0" in out
    assert "lint: 0 errors, 0 warnings" in out
    code, out, _ = cli_here(monkeypatch, capsys, "inspect", str(file), "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["kind"]) == (0, True, "hlo")
    assert report["aliases"][0] == {"output": 1, "parameter": "key.0", "must": True}
    assert report["loops"][0]["rounds"] == 4
    assert report["opcodes"]["while"] == 1


@pytest.mark.parametrize(
    ("payload", "rule"), [(one_instruction("sort"), "opcode"), (loop(step=2), "static-loop")]
)
def test_inspect_exits_1_on_a_rule_that_is_broken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    payload: bytes,
    rule: str,
) -> None:
    file = tmp_path / "program.hlo"
    file.write_bytes(payload)
    code, out, _ = cli_here(monkeypatch, capsys, "inspect", str(file))
    assert code == 1
    assert f"[{rule}]" in out
    assert "lint: 1 errors" in out


def test_inspect_of_something_else_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.hlo"
    file.write_bytes(lowered(SEGMENTED)[:5000])
    code, _, err = cli_here(monkeypatch, capsys, "inspect", str(file))
    assert code == 1
    assert f"error: {file}: not an HloModuleProto: " in err
    assert cli_here(monkeypatch, capsys, "inspect", str(tmp_path / "none"))[0] == 2
