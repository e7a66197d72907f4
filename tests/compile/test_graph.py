"""Graph digests: fixed by golden_graphs.json, and the same wherever they are computed."""

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from null_compiler import ARCHITECTURE, LLAMA3_ROPE, a_program

from nxbucket.compile.canonical import sha256_hex
from nxbucket.compile.cpu import CpuCompiler
from nxbucket.compile.hlo.compiler import LOWERING_VERSION, lower_to_hlo
from nxbucket.compile.program import PROGRAM_VERSION, BucketProgram
from nxbucket.toolkit.architecture import Architecture, Rope

UPDATE = Path(__file__).with_name("update_golden.py")
GOLDEN = json.loads(Path(__file__).with_name("golden_graphs.json").read_text())
Digest = Callable[[BucketProgram], str]


@pytest.fixture(scope="module")
def digest() -> Digest:
    import torch

    if torch.__version__ != GOLDEN["torch"]:
        pytest.skip(f"golden digests are of torch {GOLDEN['torch']}, this is {torch.__version__}")
    compiler = CpuCompiler("x86-64-v3")
    return lambda program: sha256_hex(compiler.lower(program).graph)


def sample() -> dict[str, BucketProgram]:
    namespace = runpy.run_path(str(UPDATE))
    programs: dict[str, BucketProgram] = namespace["sample"]()
    return programs


def lowered_elsewhere(tmp_path: Path, seed: str, *arguments: str) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, str(UPDATE), "--print", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    if found["torch"] != GOLDEN["torch"]:
        pytest.skip(f"golden digests are of torch {GOLDEN['torch']}, this is {found['torch']}")
    return {kind: found[kind] for kind in ("graphs", "hlo")}


def test_no_graph_has_changed_without_a_new_program_version(digest: Digest) -> None:
    found = {name: digest(program) for name, program in sample().items()}
    changed = sorted(n for n in found if found[n] != GOLDEN["graphs"].get(n))
    assert GOLDEN["program_version"] == PROGRAM_VERSION, (
        f"PROGRAM_VERSION is {PROGRAM_VERSION}, golden_graphs.json was written for "
        f"{GOLDEN['program_version']}: run `python tests/compile/update_golden.py`"
    )
    assert not changed, (
        f"the graphs of {', '.join(changed)} are not what golden_graphs.json says. If the change "
        "is meant: bump PROGRAM_VERSION in compile/program.py and run "
        "`python tests/compile/update_golden.py`"
    )
    assert set(found) == set(GOLDEN["graphs"])


def test_a_graph_is_the_same_in_another_process_folder_order_and_hash_seed(tmp_path: Path) -> None:
    names = ["decode-plain", "prefill-llama3", "prefill-bias"]
    backwards = lowered_elsewhere(tmp_path, "4711", "--backwards", *names)
    for kind in ("graphs", "hlo"):
        assert backwards[kind] == {name: GOLDEN[kind][name] for name in names}


def test_every_program_of_the_sample_has_a_graph_of_its_own() -> None:
    assert len(set(GOLDEN["graphs"].values())) == len(GOLDEN["graphs"])
    # What tells these apart from the plain one is in the architecture, and not in the arithmetic.
    assert len(set(GOLDEN["hlo"].values())) == len(GOLDEN["hlo"])


def test_no_hlo_has_changed_without_a_new_lowering_version(digest: Digest) -> None:
    if importlib.metadata.version("jaxlib") != GOLDEN["jaxlib"]:
        pytest.skip(f"golden digests are of jaxlib {GOLDEN['jaxlib']}")
    found = {name: sha256_hex(lower_to_hlo(program).graph) for name, program in sample().items()}
    changed = sorted(n for n in found if found[n] != GOLDEN["hlo"].get(n))
    assert GOLDEN["lowering_version"] == LOWERING_VERSION, (
        f"LOWERING_VERSION is {LOWERING_VERSION}, golden_graphs.json was written for "
        f"{GOLDEN['lowering_version']}: run `python tests/compile/update_golden.py`"
    )
    assert not changed, (
        f"the HLO of {', '.join(changed)} is not what golden_graphs.json says. If the change is "
        "meant: bump LOWERING_VERSION in compile/hlo/compiler.py and run "
        "`python tests/compile/update_golden.py`"
    )


def test_lowering_twice_gives_the_same_graph(digest: Digest) -> None:
    program = a_program("decode", 4)
    assert digest(program) == digest(program) == GOLDEN["graphs"]["decode-plain"]


@pytest.mark.parametrize(
    "architecture",
    [
        replace(ARCHITECTURE, rope=Rope("default", 10001.0)),
        replace(ARCHITECTURE, rms_norm_eps=1.1e-5),
        replace(ARCHITECTURE, vocab_size=97),
        replace(ARCHITECTURE, intermediate_size=65),
    ],
    ids=["theta", "eps", "vocab", "intermediate"],
)
def test_a_number_of_the_architecture_changes_the_graph(
    architecture: Architecture, digest: Digest
) -> None:
    assert digest(a_program("decode", 4, architecture)) != GOLDEN["graphs"]["decode-plain"]


def test_a_factor_of_the_llama3_rope_changes_the_graph(digest: Digest) -> None:
    rope = replace(LLAMA3_ROPE, factor=8.5)
    program = a_program("decode", 4, replace(ARCHITECTURE, rope=rope))
    assert digest(program) != GOLDEN["graphs"]["decode-llama3"]


@pytest.mark.parametrize(
    "change", [{"size": 5}, {"block_size": 64}, {"max_blocks": 5}, {"num_kv_blocks": 10}], ids=str
)
def test_a_shape_changes_the_graph(change: dict[str, int], digest: Digest) -> None:
    changed = replace(a_program("decode", 4), **change)  # type: ignore[arg-type]
    assert digest(changed) != GOLDEN["graphs"]["decode-plain"]


def test_the_graph_does_not_know_the_march(digest: Digest) -> None:
    # It is in the toolchain, so the graph key has it.
    graph = CpuCompiler("x86-64-v4").lower(a_program("decode", 4)).graph
    assert sha256_hex(graph) == GOLDEN["graphs"]["decode-plain"]


def test_the_graph_holds_no_weight_and_no_name_of_this_host() -> None:
    graph = CpuCompiler("x86-64-v3").lower(a_program("decode", 4)).graph
    kinds = [spec["kind"] for spec in json.loads(graph)["inputs"]]
    # One constant, the RoPE table; weights and the KV cache are inputs like the token ids.
    assert kinds.count("USER_INPUT") == len(a_program("decode", 4).signature.inputs)
    assert kinds.count("BUFFER") == len(kinds) - kinds.count("USER_INPUT") == 1
    for word in (str(Path.home()), os.uname().nodename, str(Path(__file__).parents[2])):
        assert word.encode() not in graph


def test_the_kv_cache_is_written_in_place() -> None:
    program = a_program("prefill", 16)
    graph = json.loads(CpuCompiler("x86-64-v3").lower(program).graph)
    targets = [node["target"] for node in graph["nodes"]]
    assert targets.count("aten.index_put_.default") == 2
    assert graph["outputs"] == ["USER_OUTPUT"]
