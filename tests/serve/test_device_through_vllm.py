"""vLLM's engine over the loader for a device, with a stand-in of AWS's classes under it."""

import json
from pathlib import Path

import pytest
from example_model import example_in
from neuron_stand_in import StandInNeuronCompiler
from servers import ROOT, python_path, run_nxbucket, run_script

from nxbucket.compile import compiler
from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.compiler import compiler_for
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.spec import load_spec

pytestmark = pytest.mark.engine

LIMITS = {"num_batched_tokens_buckets": "[32, 128]", "num_seqs_buckets": "[1, 4]"}


@pytest.fixture(scope="module")
def device_example(tmp_path_factory: pytest.TempPathFactory, artifact_env: dict[str, str]) -> Path:
    """The example for trn2-lnc2, its "NEFFs" by the stand-in of the compiler."""
    model_file = example_in(tmp_path_factory.mktemp("device"), target="trn2", **LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(ROOT / "tests"))
        name = StandInNeuronCompiler.__name__
        patch.setitem(compiler.FACTORIES, "neuron", f"neuron_stand_in:{name}")
        spec = load_spec(model_file)
        cache = ArtifactCache(Path(artifact_env["NXBUCKET_CACHE_DIR"]))
        report = build(spec, cache, compiler_for(spec), PlainReporter())
    assert report.toolchain.target == "trn2-lnc2"
    assert not report.failed, report.failed[0].log_tail
    return model_file


@pytest.mark.parametrize("route", ["Executor", "SPMDModel"])
def test_it_answers_as_the_emulation_of_the_same_artifacts(
    device_example: Path, artifact_env: dict[str, str], tmp_path: Path, route: str
) -> None:
    prompts = ["Four score and seven", "x" * 200 + "\nFour score and seven", "We the People"]
    cases = [
        {"prompt_token_ids": list(p.encode()), "sampling": {"max_tokens": 25}} for p in prompts
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    answers = []
    for under in (route, "emulate"):
        out = tmp_path / f"{under}.json"
        files = (str(tmp_path / "cases.json"), str(device_example), str(out))
        run_script("on_stand_in.py", *files, under, env=artifact_env)
        answers.append(json.loads(out.read_text()))
    on_device, emulated = answers
    assert on_device["answers"] == emulated["answers"]
    assert bytes(on_device["answers"][0]).decode() == " years ago our fathers br"
    assert on_device["events"][:5] == ["load"] * 4 + ["weights"]
    assert on_device["events"].count("weights") == 1
    assert not emulated["events"]


def test_without_a_device_the_flag_is_named(
    device_example: Path, artifact_env: dict[str, str]
) -> None:
    if list(Path("/dev").glob("neuron[0-9]*")):
        pytest.skip("this host has one")
    named = {"serve": "serve", "generate": "generate --prompt '...'"}
    for command in (["serve"], ["generate", "--prompt", "a"]):
        done = run_nxbucket(command[0], str(device_example), *command[1:], env=artifact_env)
        assert done.returncode == 3
        assert "is for trn2-lnc2, and this host has no Neuron device (/dev/neuron*)" in done.stderr
        emulate = f"nxbucket {named[command[0]]} {device_example} --emulate"
        assert f"hint: serve on a host with one; {emulate} runs the same graphs" in done.stderr
        assert "Traceback" not in done.stderr
