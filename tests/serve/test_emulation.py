"""`--emulate` without an engine: what a lock is served as, what is refused, where the cache is."""

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import ARCHITECTURE, EagerServer, Shapes, eager
from example_model import example_in
from neuron_stand_in import NEFF, Device
from servers import ROOT, run_nxbucket
from torch import Tensor

from fakes import model_folder
from nxbucket.compile import compiler
from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.compiler import CompilerSpec, compiler_for
from nxbucket.compile.hlo.compiler import lower_to_hlo
from nxbucket.compile.lockfile import lock_path, read_lock
from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.serve import emulation, neuron_host
from nxbucket.serve.emulation import EmulatingLoader, jax_problem
from nxbucket.serve.engine_args import preflight
from nxbucket.serve.neuron_device import NeuronLoader
from nxbucket.serve.served import Served, resolve
from nxbucket.serve.xla_programs import XlaMemory, load_module
from nxbucket.toolkit.errors import EnvironmentProblem, LockError, NxbucketError, UsageError
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.spec import load_spec

SHAPES = Shapes(prefill=(4, 8), decode=(2,), block_size=4, max_blocks=5, num_kv_blocks=11)
PROGRAMS = SHAPES.programs(ARCHITECTURE, "float32")


def random_weights(dtype: str = "float32") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, dtype))
        for s in weight_specs(ARCHITECTURE)
    }


def refusal(action: Callable[[], object]) -> NxbucketError:
    with pytest.raises(NxbucketError) as caught:
        action()
    assert caught.value.hint
    return caught.value


# Programs and memory


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    for program in PROGRAMS:
        (folder / program.name).write_bytes(lower_to_hlo(program).payload)
    return {program.name: folder / program.name for program in PROGRAMS}


def emulating(graphs: dict[str, Path]) -> tuple[EagerServer, XlaMemory]:
    held: list[XlaMemory] = []

    def memory(_: Any, weights: dict[str, Tensor]) -> XlaMemory:
        held.append(XlaMemory.of(PROGRAMS[0].signature, weights))
        return held[0]

    def load(program: BucketProgram) -> Any:
        return load_module(program.name, program.signature, graphs[program.name])

    server = EagerServer(
        ARCHITECTURE, random_weights(), SHAPES, filler=None, load=load, memory=memory
    )
    return server, held[0]


def two_sequences(server: EagerServer) -> list[Tensor]:
    first, second = server.start(list(range(1, 12))), server.start([5, 3, 9])
    server.prefill_all(first, 8)
    server.prefill_all(second, 4)
    server.decode_greedily([first, second], 4)
    return [torch.stack(first.logits), torch.stack(second.logits)]


def test_programs_share_one_cache_and_answer_as_the_eager_ones(graphs: dict[str, Path]) -> None:
    ours, _ = emulating(graphs)
    theirs = EagerServer(ARCHITECTURE, random_weights(), SHAPES, load=eager)
    for server in (ours, theirs):
        server.artifacts.smoke(ARCHITECTURE.vocab_size)
    for a, b in zip(two_sequences(ours), two_sequences(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_nan_in_blocks_that_nobody_owns_changes_nothing(graphs: dict[str, Path]) -> None:
    clean, _ = emulating(graphs)
    poisoned, memory = emulating(graphs)
    memory.fill_blocks(range(SHAPES.num_kv_blocks), float("nan"))
    for a, b in zip(two_sequences(clean), two_sequences(poisoned), strict=True):
        assert torch.equal(a, b)


def test_blocks_are_filled_and_copied() -> None:
    for dtype in ("float32", "bfloat16"):
        signature = SHAPES.programs(ARCHITECTURE, dtype)[0].signature
        memory = XlaMemory.of(signature, random_weights(dtype))
        memory.fill_blocks([3, 5], 7.0)
        memory.copy_blocks([(3, 1), (1, 5)])
        for cache in memory.kv_cache.values():
            assert str(cache.dtype) == dtype
            values = [float(cache[i, 0, 0, 0]) for i in range(SHAPES.num_kv_blocks)]
            # All at once: block 5 is what block 1 was.
            assert values == [0, 7, 0, 7, 0, 0, 0, 0, 0, 0, 0]


def test_weights_are_the_checkpoints_own_bytes() -> None:
    weights = {"aligned": torch.ones(64, 64), "bf16": torch.ones(64, 64, dtype=torch.bfloat16)}
    memory = XlaMemory.of(PROGRAMS[0].signature, weights)
    for name, tensor in weights.items():
        assert memory.weights[name].unsafe_buffer_pointer() == tensor.data_ptr()
        assert memory.shapes[name] == (str(tensor.dtype).removeprefix("torch."), (64, 64))


def test_a_run_gives_the_old_cache_up_and_leaves_the_weights(graphs: dict[str, Path]) -> None:
    server, memory = emulating(graphs)
    before = dict(memory.kv_cache)
    server.artifacts.smoke(ARCHITECTURE.vocab_size)
    assert all(array.is_deleted() for array in before.values())
    assert not any(array.is_deleted() for array in memory.kv_cache.values())
    assert not any(array.is_deleted() for array in memory.weights.values())


def test_what_runs_is_compiled_when_it_is_loaded_and_never_again(graphs: dict[str, Path]) -> None:
    before = EmulatingLoader().compiles()
    server, memory = emulating(graphs)
    server.artifacts.smoke(ARCHITECTURE.vocab_size)
    bound = EmulatingLoader().compiles()
    assert bound - before >= len(PROGRAMS)
    two_sequences(server)
    memory.fill_blocks([2], 0.0)
    memory.copy_blocks([(2, 3)])
    assert EmulatingLoader().compiles() == bound


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "bfloat16"}, "parameter 6 (key.0) is f32[11,4,1,4], not bfloat16 [11, 4, 1, 4]"),
        ({"size": 8}, "parameter 0 (input_ids) is s32[4], not int32 [8]"),
        ({"num_kv_blocks": 12}, "parameter 6 (key.0) is f32[11,4,1,4], not float32 [12, 4, 1, 4]"),
        ({"phase": "decode"}, "parameters, not "),
        (
            {"architecture": dataclasses.replace(ARCHITECTURE, vocab_size=14)},
            "output 0 (logits) is f32[1,13], not float32 [1, 14]",
        ),
    ],
)
def test_a_graph_that_is_not_its_signatures_is_refused_before_it_runs(
    graphs: dict[str, Path], change: dict[str, Any], says: str
) -> None:
    other = dataclasses.replace(PROGRAMS[0], **change).signature
    path = graphs["prefill_s4"]
    error = refusal(lambda: load_module("prefill_s4", other, path))
    assert f"prefill_s4: {path} is another graph than its manifest describes" in error.message
    assert says in error.message


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b"no graph" * 9, lambda b: b[:2000]])
def test_bytes_that_are_no_graph_are_refused(
    graphs: dict[str, Path], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "blob"
    path.write_bytes(damage(graphs["prefill_s4"].read_bytes()))
    error = refusal(lambda: load_module("prefill_s4", PROGRAMS[0].signature, path))
    assert f"prefill_s4: {path}" in error.message
    assert error.hint is not None
    assert "compile --emulate" in error.hint


# jax


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, None),
        ({"jax": None, "jaxlib": None}, "jax and jaxlib is not installed"),
        ({"jax": "0.10.2", "jaxlib": None}, "jaxlib is not installed"),
        ({"jax": "0.11.0", "jaxlib": "0.11.0"}, "made for jax and jaxlib 0.10.2; here is jax 0.11"),
    ],
)
def test_another_jax_is_named(versions: dict[str, str | None], says: str | None) -> None:
    problem = jax_problem(versions)
    assert problem is None if says is None else problem is not None and says in problem


def test_the_release_of_jax_is_the_one_that_is_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"jax(?:lib)?==([\d.]+)"', text) == [emulation.JAX_RELEASE] * 2


def test_a_host_without_jax_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "installed_jax", lambda: {"jax": None, "jaxlib": None})
    manifest: Any = None  # what was compiled does not matter
    error = refusal(lambda: EmulatingLoader().check_host(manifest))
    assert isinstance(error, EnvironmentProblem)
    assert error.hint == "pip install 'nxbucket[hlo]'"


# What a lock is served as


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of one model file for trn2 with two programs: nothing compiled, the graphs alone,
    and both the graphs and the stand-in's "NEFFs". Each has a cache of its own."""
    plain = tmp_path_factory.mktemp("plans") / "plain"
    model_folder(plain / "model", num_hidden_layers=1)
    (plain / "model.yaml").write_text(
        "model: ./model\ntarget: trn2\nmax_model_len: 64\nmax_num_seqs: 1\n"
        "max_num_batched_tokens: 16\nblock_size: 32\nartifacts: {cache: ./cache}\n"
        "neuron_config: {num_batched_tokens_buckets: [16], num_seqs_buckets: [1]}\n"
    )
    graphs = copied(plain, plain.with_name("graphs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NXBUCKET_CACHE_DIR", raising=False)
        patch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
        patch.setitem(compiler.FACTORIES, "neuron", "neuron_stand_in:StandInNeuronCompiler")
        compile_here(graphs, emulate=True)
        both = copied(graphs, plain.with_name("both"))
        compile_here(both, emulate=False)
    return {"plain": plain, "graphs": graphs, "both": both}


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def compile_here(folder: Path, *, emulate: bool) -> None:
    spec = load_spec(folder / "model.yaml")
    cache = ArtifactCache(folder / "cache")
    report = build(spec, cache, compiler_for(spec, emulate=emulate), PlainReporter())
    assert not report.failed, report.failed[0].log_tail


@pytest.fixture
def plan(
    request: pytest.FixtureRequest,
    compiled: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A copy of the model file of one of `compiled`, to do with as a test likes."""
    monkeypatch.delenv("NXBUCKET_CACHE_DIR", raising=False)
    return copied(compiled[request.param], tmp_path / "plan") / "model.yaml"


plain = pytest.mark.parametrize("plan", ["plain"], indirect=True)
graphs_alone = pytest.mark.parametrize("plan", ["graphs"], indirect=True)
both_locked = pytest.mark.parametrize("plan", ["both"], indirect=True)


@graphs_alone
def test_emulation_takes_the_graphs_where_nothing_else_is_locked(plan: Path) -> None:
    _, served = resolve(plan, emulate=True)
    assert (served.target, served.emulated, served.runs) == ("hlo", True, "hlo")


@both_locked
def test_emulation_takes_the_devices_artifacts_where_they_are_locked(plan: Path) -> None:
    assert sorted(read_lock(lock_path(plan)).targets) == ["hlo", "trn2-lnc2"]
    _, served = resolve(plan, emulate=True)
    assert (served.target, served.emulated, served.runs) == ("trn2-lnc2", True, "hlo")
    _, served = resolve(plan)
    assert (served.target, served.emulated, served.runs) == ("trn2-lnc2", False, "program")


@both_locked
def test_a_lock_whose_programs_are_elsewhere_is_emulated_from_the_graphs_here(plan: Path) -> None:
    _, served = resolve(plan)
    for program in served.locked.programs:
        served.cache.entry_path(program.key).unlink()
    _, served = resolve(plan, emulate=True)
    assert served.target == "hlo"
    assert len(served.verified_manifests()) == 2
    shutil.rmtree(served.cache.root)
    _, served = resolve(plan, emulate=True)
    assert served.target == "trn2-lnc2"
    assert refusal(served.verified_manifests).hint == f"nxbucket compile {plan} --emulate"


def blobs_of(served: Served, name: str) -> dict[BlobRole, Path]:
    (program,) = [p for p in served.locked.programs if p.name == name]
    return {blob.role: served.cache.blob_path(blob.digest) for blob in program.blobs}


@both_locked
def test_the_same_artifact_is_emulated_and_loaded_on_a_device(plan: Path) -> None:
    _, served = resolve(plan, emulate=True)
    manifest = served.verified_manifests()["decode_b1"]
    blobs = blobs_of(served, "decode_b1")
    assert blobs["program"].read_bytes() == NEFF + blobs["hlo"].read_bytes()
    signature = manifest.signature
    generator = torch.Generator().manual_seed(3)
    weights = {
        t.name: torch.randn(t.shape, generator=generator) for t in signature.of_role("weight")
    }
    inputs = {t.name: torch.ones(t.shape, dtype=torch.int32) for t in signature.of_role("input")}
    device = NeuronLoader(lambda lnc: Device().connected("Executor"), lambda *_: [])
    answers = []
    for loader in (EmulatingLoader(), device):
        program: Any = loader.load(blobs, manifest)
        program.bind(loader.place(signature, weights))
        answers.append(program.run(inputs))
    assert torch.equal(*answers)


@graphs_alone
def test_a_lock_for_emulation_alone_is_not_served_without(plan: Path) -> None:
    error = refusal(lambda: resolve(plan))
    assert isinstance(error, LockError)
    assert "locked for hlo, the graphs without a program" in error.message
    assert error.hint == f"nxbucket serve {plan} --emulate, or nxbucket compile {plan}"
    done = run_nxbucket("generate", str(plan), "--prompt", "a")
    assert f"hint: nxbucket generate --prompt '...' {plan} --emulate, or" in done.stderr


@graphs_alone
def test_where_nothing_is_locked_or_cached_the_command_names_the_flag(plan: Path) -> None:
    text = lock_path(plan).read_text()
    lock = json.loads(text)
    lock["targets"] = {}
    lock_path(plan).write_text(json.dumps(lock))
    error = refusal(lambda: resolve(plan, emulate=True))
    assert "locked for no target; --emulate runs trn2-lnc2, hlo" in error.message
    assert error.hint == f"nxbucket compile {plan} --emulate"
    # And so does what says that the cache lacks something.
    lock_path(plan).write_text(text)
    _, served = resolve(plan, emulate=True)
    shutil.rmtree(served.cache.root)
    assert refusal(served.verified_manifests).hint == f"nxbucket compile {plan} --emulate"


def remove(plan: Path) -> None:
    lock_path(plan).unlink()


def garble(plan: Path) -> None:
    lock_path(plan).write_text("{")


def edit(plan: Path) -> None:
    plan.write_text(plan.read_text().replace("max_model_len: 64", "max_model_len: 96"))


def resize(plan: Path) -> None:
    lock = json.loads(lock_path(plan).read_text())
    lock["targets"]["hlo"]["num_kv_blocks"] += 1
    lock_path(plan).write_text(json.dumps(lock))


@graphs_alone
@pytest.mark.parametrize("spoil", [remove, garble, edit, resize])
def test_every_hint_about_the_lock_names_the_flag_of_the_command(
    plan: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(plan)
    for command in (["serve"], ["generate", "--prompt", "a"]):
        emulated = run_nxbucket(command[0], str(plan), "--emulate", *command[1:])
        assert emulated.returncode == 1
        assert emulated.stderr.splitlines()[-1] == f"hint: nxbucket compile {plan} --emulate"
    without = run_nxbucket("serve", str(plan))
    assert without.stderr.splitlines()[-1] == f"hint: nxbucket compile {plan}"


@graphs_alone
@pytest.mark.parametrize("spoil", [remove, garble, edit])
def test_doctor_names_the_flag_where_there_is_no_compiler(
    plan: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(plan)
    done = run_nxbucket("doctor", str(plan), "--json", env={"PATH": os.defpath})
    (lock,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "lock"]
    assert lock["mend"] == f"nxbucket compile {plan} --emulate"


@graphs_alone
def test_a_damaged_graph_is_found_before_it_is_loaded(plan: Path) -> None:
    _, served = resolve(plan, emulate=True)
    path = blobs_of(served, "decode_b1")["hlo"]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    message = refusal(served.verified_manifests).message
    assert "decode_b1 is corrupt" in message
    assert "prefill_s16" not in message


@both_locked
def test_a_host_without_a_device_is_told_of_emulation(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuron_host, "neuron_devices", list)
    spec, served = resolve(plan)
    for command in ("serve", "generate --prompt '...'"):
        error = refusal(functools.partial(preflight, spec, served, command))
        assert isinstance(error, EnvironmentProblem)
        assert error.hint is not None
        assert f"nxbucket {command} {plan} --emulate" in error.hint


def test_target_cpu_has_nothing_to_emulate(tmp_path: Path) -> None:
    model_file = example_in(tmp_path)
    with pytest.raises(UsageError, match="for target cpu"):
        resolve(model_file, emulate=True)
    with pytest.raises(UsageError):
        compiler_for(load_spec(model_file), emulate=True)
    for command in ("compile", "plan", "explain", "serve"):
        done = run_nxbucket(command, str(model_file), "--emulate")
        assert done.returncode == 2, (command, done.stderr)
        assert "--emulate runs what a Neuron device would on this processor" in done.stderr
        assert "hint: leave --emulate out" in done.stderr


@plain
def test_a_compiler_spec_for_emulation_is_the_lowering(plan: Path) -> None:
    spec = load_spec(plan)
    assert compiler_for(spec, emulate=True) == CompilerSpec(compiler.FACTORIES["hlo"], {})


WITHOUT_HEAVY = """
import sys
from nxbucket.toolkit.cli import main
try:
    main()
finally:
    print([m for m in ("torch", "jax", "jaxlib", "numpy") if m in sys.modules], file=sys.stderr)
"""


@graphs_alone
@pytest.mark.parametrize("command", ["compile", "plan", "explain"])
def test_a_warm_emulation_imports_neither_torch_nor_jax(plan: Path, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEAVY, command, str(plan), "--emulate"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert "prefill_s16" in done.stdout
    assert "miss" not in done.stdout


@both_locked
def test_explain_agrees_with_what_emulation_runs(plan: Path) -> None:
    lock = json.loads(lock_path(plan).read_text())
    del lock["targets"]["hlo"]
    lock_path(plan).write_text(json.dumps(lock))
    cache = ArtifactCache(plan.parent / "cache")
    for key, entry in cache.manifests().items():
        if entry.target == "hlo":
            cache.entry_path(key).unlink()
    done = run_nxbucket("explain", str(plan), "--emulate")
    assert done.returncode == 0, done.stdout
    assert "prefill_s16, decode_b1: hit" in done.stdout
    assert "model.lock: names all of them, for trn2-lnc2" in done.stdout
    assert "note: --emulate runs the graphs in the artifacts of trn2-lnc2" in done.stderr
    # Where a server would refuse, so does explain: the graphs are what is to be made.
    _, served = resolve(plan, emulate=True)
    cache.entry_path(served.locked.programs[0].key).unlink()
    done = run_nxbucket("explain", str(plan), "--emulate")
    assert done.returncode == 1
    assert "model.lock: locked for trn2-lnc2, and not for hlo" in done.stdout
    assert f"to mend it: nxbucket compile {plan} --emulate" in done.stdout


@plain
def test_explain_ends_in_the_command_with_the_flag(plan: Path) -> None:
    done = run_nxbucket("explain", str(plan), "--emulate")
    assert done.returncode == 1
    assert f"to mend it: nxbucket compile {plan} --emulate" in done.stdout
