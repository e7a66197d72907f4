"""Finding neuronx-cc, asking it what it is, and what it is given."""

import importlib.metadata
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hlo_stand_in import NeuronCompilerOnly
from neuronx_cc_stand_in import StandIn, install
from null_compiler import a_program, model_file

from nxbucket.compile.canonical import digest_of
from nxbucket.compile.compiler import compiler_for
from nxbucket.compile.hlo.compiler import lower_to_hlo
from nxbucket.compile.key import graph_key_inputs, input_key
from nxbucket.compile.neuron import libneuronxla, neuronx_cc
from nxbucket.compile.neuron.compiler import NeuronCompiler, command_flags
from nxbucket.compile.neuron.neff import check_neff_file
from nxbucket.compile.neuron.neuronx_cc import (
    compiler_environment,
    find_neuronx_cc,
    listed_targets,
    missing_compiler,
    probe,
)
from nxbucket.toolkit.errors import CompileError, EnvironmentProblem
from nxbucket.toolkit.spec import load_spec


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: object) -> Path:
    """The stand-in on PATH; the path of its script."""
    monkeypatch.setenv("PATH", f"{install(folder / 'bin')}{os.pathsep}{os.defpath}")
    for name, value in StandIn(**options).environ().items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)
    return folder / "bin" / "neuronx-cc"


def script(folder: Path, text: str) -> Path:
    path = folder / "neuronx-cc"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("style", ["argparse", "paragraph"])
def test_version_and_targets_are_read_wherever_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str, style: str
) -> None:
    path = stand_in(monkeypatch, tmp_path, version_on=stream, help_style=style)
    assert find_neuronx_cc() == path
    found = probe(path)
    assert (found.path, found.version) == (path, "2.27.5334.0+f702b353")
    assert found.targets == ("inf2", "trn1", "trn1n", "trn2", "trn3")


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("--target {trn1,trn2,\n      inf2}  family", ("trn1", "trn2", "inf2")),
        ("  --target T   one of:\n     trn2\n     trn3pds\n  --verbose", ("trn2", "trn3pds")),
        ("  --target T   e.g. trn1\n", ()),
        ("usage: neuronx-cc compile", ()),
        ("", ()),
    ],
)
def test_the_help_s_list_of_targets(text: str, targets: tuple[str, ...]) -> None:
    assert listed_targets(text) == targets


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh\necho hello\n",
        "#!/bin/sh\necho NeuronX Compiler version 1.0.0\n",
        "#!/bin/sh\nexit 1\n",
        "#!/no/such/interpreter\n",
        "",
    ],
)
def test_what_is_no_neuronx_cc_is_an_environment_problem(tmp_path: Path, text: str) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        probe(script(tmp_path, text))
    assert str(tmp_path) in caught.value.message
    assert 'pip install "neuronx-cc==VERSION"' in (caught.value.hint or "")


def test_a_compiler_that_does_not_answer_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuronx_cc, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(EnvironmentProblem, match="does not answer"):
        probe(script(tmp_path, "#!/bin/sh\nexec sleep 20\n"))


def test_the_placeholder_of_pypi_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "placeholder" not in missing_compiler().message
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.0.0")
    problem = missing_compiler()
    assert "neuronx-cc 1.0.0 is the empty placeholder of PyPI" in problem.message
    assert (problem.hint or "").startswith("pip uninstall -y neuronx-cc; give neuronx-cc")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.27.5334.0+f702b353")
    assert "placeholder" not in missing_compiler().message


def test_the_environment_of_a_compiler_holds_nothing_that_could_decide_bytes() -> None:
    kept = {"PATH": "/bin", "HOME": "/root", "TMPDIR": "/tmp", "LANG": "C"}
    dropped = (
        "LD_PRELOAD", "NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL", "NEURON_LOGICAL_NC_CONFIG",
        "NEURON_FRAMEWORK_DEBUG", "XLA_FLAGS", "PJRT_DEVICE", "PYTHONPATH",
    )  # fmt: skip
    assert compiler_environment({**kept, **dict.fromkeys(dropped, "x")}) == kept


def test_every_default_is_given_on_the_command_line() -> None:
    flags = command_flags("trn3", 2, 3, "all", ["--enable-fast-context-switch"])
    assert flags == [
        "--framework", "XLA", "--target", "trn3", "--lnc", "2", "--auto-cast", "all", "-O3",
        "--model-type", "transformer", "--enable-fast-context-switch",
    ]  # fmt: skip
    for own in (["--model-type=generic"], ["--model-type", "generic"]):
        flags = command_flags("trn1", 1, 1, "none", own)
        assert flags[-len(own) :] == own
        assert "transformer" not in flags


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({"lnc": 1}, "2.27"),
        ({"target": "trn3"}, "2.27"),
        ({"optlevel": 2}, "2.27"),
        ({"auto_cast": "matmult"}, "2.27"),
        ({"flags": ["--enable-fast-context-switch"]}, "2.27"),
        ({"flags": ["--model-type=generic"]}, "2.27"),
        ({}, "2.28"),
    ],
)
def test_what_decides_the_bytes_is_in_both_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], version: str
) -> None:
    def keys(**options: Any) -> set[str]:
        compiler = NeuronCompilerOnly(**{"target": "trn2", "lnc": 2, **options})
        toolchain = compiler.toolchain()
        return {input_key(a_program(), toolchain), digest_of(graph_key_inputs("0", toolchain))}

    stand_in(monkeypatch, tmp_path, version="2.27")
    before = keys()
    assert keys() == before
    stand_in(monkeypatch, tmp_path, version=version)
    assert not keys(**changes) & before


def test_an_unknown_target_names_those_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, targets=("trn1", "inf2"))
    with pytest.raises(CompileError, match="does not compile for trn9; it lists trn1, inf2"):
        NeuronCompilerOnly("trn9", 1).toolchain()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_real_lowering_becomes_a_neff_with_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    pytest.importorskip("jax")
    stand_in(monkeypatch, tmp_path)
    compiler = NeuronCompiler("trn2", 2)
    program = a_program("prefill" if phase == "prefill" else "decode", 4)
    lowered = compiler.lower(program)
    assert lowered.graph == lower_to_hlo(program).graph
    work = tmp_path / "work"
    work.mkdir()
    files = compiler.compile(lowered, work)
    assert files["hlo"].read_bytes() == lowered.graph
    assert check_neff_file(files["program"], "trn2", 2, program.signature) == []
    other = a_program("decode", 8).signature
    assert check_neff_file(files["program"], "trn2", 2, other) != []


LIBRARY = """
import json, os, sys
sys.path.insert(0, {tests!r})
from neuronx_cc_stand_in import entry_sizes, make_neff

def neuron_xla_compile(module_bytes, compiler_flags, input_format="hlo", platform_target=None,
                       cache_key=None, retry_failed_compilation=False, lazy=True, use_cache=True,
                       cache_dir=None, work_dir=None{extra}):
    call = {{"flags": compiler_flags, "target": platform_target, "use_cache": use_cache,
            "work_dir": work_dir, "env": os.environ.get("NEURON_CC_FLAGS")}}
    with open({record!r}, "w") as f:
        json.dump(call, f)
    what = os.environ.get("FAKE_LIBRARY")
    if what == "fail":
        raise RuntimeError("neuronx-cc failed: [ERROR] [NCC_EVRF007] too many")
    if what == "killed":
        raise RuntimeError("[F137] neuronx-cc was forcibly killed")
    if what == "odd":
        raise ValueError("something else")
    if what == "none":
        return None
    inputs, outputs = entry_sizes(module_bytes)
    return make_neff(inputs, outputs, target="cayman", lnc=2)
"""


def install_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, extra: str = ""
) -> Path:
    """A libneuronxla and a neuronx-cc package; the file that its calls are written to."""
    site, record = folder / "site", folder / "call.json"
    site.mkdir(exist_ok=True)
    tests = str(Path(__file__).parents[2])
    (site / "libneuronxla.py").write_text(
        LIBRARY.format(tests=tests, record=str(record), extra=extra)
    )
    for package in ("libneuronxla", "neuronx_cc"):
        info = site / f"{package}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        name = package.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "libneuronxla", raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    return record


@pytest.mark.parametrize("extra", ["", ", create_subdir=False"])
def test_libneuronxla_is_taken_where_no_command_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    record = install_library(tmp_path, monkeypatch, "2.2.8201.0+f46ac1ef", extra)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=/x")
    compiler = NeuronCompilerOnly("trn2", 2, flags=["--tensorizer-options=--a --b"])
    toolchain = compiler.toolchain()
    assert toolchain.versions["route"] == "libneuronxla"
    assert toolchain.versions["libneuronxla"] == "2.2.8201.0+f46ac1ef"
    assert toolchain.target == "trn2-lnc2"
    program = a_program()
    work = tmp_path / "work"
    work.mkdir()
    files = compiler.compile(compiler.lower(program), work)
    assert check_neff_file(files["program"], "trn2", 2, program.signature) == []
    call = json.loads(record.read_text())
    assert (call["target"], call["use_cache"], call["env"]) == ("trn2", False, None)
    assert call["work_dir"] == str(work / "neuronx-cc")
    assert "--lnc 2" in call["flags"]
    assert "'--tensorizer-options=--a --b'" in call["flags"]
    assert os.environ["NEURON_CC_FLAGS"] == "--cache_dir=/x"


@pytest.mark.parametrize(
    ("what", "reason", "retryable"),
    [
        ("fail", "reports NCC_EVRF007", False),
        ("killed", "was killed by SIGKILL", True),
        ("odd", "raised ValueError: something else", False),
        ("none", "returned NoneType", False),
    ],
)
def test_libneuronxla_s_failures_are_told_apart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, reason: str, retryable: bool
) -> None:
    install_library(tmp_path, monkeypatch, "2.2")
    monkeypatch.setenv("FAKE_LIBRARY", what)
    compiler = NeuronCompilerOnly("trn2", 2)
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(CompileError) as caught:
        compiler.compile(compiler.lower(a_program()), work)
    assert reason in caught.value.message
    assert getattr(caught.value, "retryable", None) == retryable
    assert not (work / "program.neff").exists()


def test_a_placeholder_library_and_a_command_beside_a_library_are_no_second_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_library(tmp_path, monkeypatch, "1.0.0")
    assert libneuronxla.find_libneuronxla() is None
    with pytest.raises(EnvironmentProblem, match="is the empty placeholder"):
        NeuronCompilerOnly("trn2", 2).toolchain()
    stand_in(monkeypatch, tmp_path)
    assert NeuronCompilerOnly("trn2", 2).toolchain().versions["route"] == "neuronx-cc"


def test_a_neuron_compile_is_assumed_to_take_more_memory_than_one_for_the_cpu(
    tmp_path: Path,
) -> None:
    memory = {
        target: compiler_for(
            load_spec(model_file(tmp_path, extra=f"target: {target}\n"))
        ).memory_per_job_bytes
        for target in ("cpu", "trn2")
    }
    assert memory == {"cpu": 3 << 30, "trn2": 16 << 30}
