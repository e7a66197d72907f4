"""Bound programs: which one runs, what a smoke run finds, what a lock's faults are called."""

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import ARCHITECTURE, Shapes, eager
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.key import key_inputs
from nxbucket.compile.lockfile import Lock, LockedProgram, LockedTarget
from nxbucket.compile.manifest import BlobRole, Manifest
from nxbucket.compile.program import Bucket, BucketProgram
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.compile.toolchain import Toolchain
from nxbucket.serve.binding import BoundArtifacts, load_artifacts
from nxbucket.serve.executable import HostMemory
from nxbucket.serve.loaders import CpuExecutable, CpuLoader
from nxbucket.serve.served import Served
from nxbucket.toolkit.architecture import Rope
from nxbucket.toolkit.errors import BindError

SHAPES = Shapes(prefill=(4, 8), decode=(1, 2), block_size=4, max_blocks=5, num_kv_blocks=11)
PROGRAMS = SHAPES.programs(ARCHITECTURE, "float32")
TARGET = "cpu-x86-64-v3"


def bound(
    weights: dict[str, Tensor] | None = None,
    load: Callable[[BucketProgram], CpuExecutable] = eager,
    dtype: str = "float32",
) -> tuple[BoundArtifacts, dict[str, Tensor]]:
    """Programs bound to a KV cache of random numbers, and that cache."""
    programs = SHAPES.programs(ARCHITECTURE, dtype)
    artifacts = BoundArtifacts({p.bucket: load(p) for p in programs})
    kv_cache = {
        t.name: torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(
            getattr(torch, dtype)
        )
        for t in artifacts.signature.of_role("kv_cache")
    }
    artifacts.bind(HostMemory(kv_cache, weights or random_weights(dtype)))
    return artifacts, kv_cache


def random_weights(dtype: str = "float32") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, dtype))
        for spec in weight_specs(ARCHITECTURE)
    }


# Choice


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True),
    count=st.integers(1, 70),
)
def test_the_smallest_program_that_holds_the_count_is_chosen(sizes: list[int], count: int) -> None:
    # The order in which programs were loaded does not matter.
    for phase in ("prefill", "decode"):
        shapes = Shapes(prefill=tuple(sizes), decode=tuple(sizes))
        programs = shapes.programs(ARCHITECTURE, "float32")
        artifacts = BoundArtifacts({p.bucket: eager(p) for p in programs})
        fitting = [size for size in sizes if size >= count]
        if fitting:
            assert artifacts.bucket_for(phase, count) == (phase, min(fitting), None)
        else:
            with pytest.raises(RuntimeError, match=f"no {phase} program for {count}"):
                artifacts.bucket_for(phase, count)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    contexts=st.lists(st.integers(1, 4), max_size=4, unique=True),
    rows=st.integers(1, 10),
    longest=st.integers(1, 20),
)
def test_the_smallest_batch_and_then_the_shortest_context_is_chosen(
    sizes: list[int], contexts: list[int], rows: int, longest: int
) -> None:
    lengths = [4 * n for n in contexts]
    shapes = Shapes(decode=tuple(sizes), contexts=tuple(lengths), max_blocks=5)
    programs = shapes.programs(ARCHITECTURE, "float32")
    artifacts = BoundArtifacts({p.bucket: eager(p) for p in programs})
    fitting = [
        (p.size, p.context_len or 20)
        for p in programs
        if p.phase == "decode" and p.size >= rows and (p.context_len or 20) >= longest
    ]
    if not fitting:
        assert rows > max(sizes)
        with pytest.raises(RuntimeError, match=f"no decode program for {rows}"):
            artifacts.decode_bucket(rows, longest)
        return
    chosen = artifacts.decode_bucket(rows, longest)
    assert (chosen.size, chosen.context_len or 20) == min(fitting)
    assert artifacts.max_blocks(chosen) == min(fitting)[1] // 4
    assert chosen in artifacts.executables


@pytest.mark.parametrize(
    ("longest", "name"),
    [
        (1, "decode_b2_ctx8"),
        (7, "decode_b2_ctx8"),
        (8, "decode_b2_ctx8"),
        (9, "decode_b2_ctx16"),
        (16, "decode_b2_ctx16"),
        (17, "decode_b2"),
        (20, "decode_b2"),
    ],
)
def test_a_context_bucket_holds_exactly_its_own_length(longest: int, name: str) -> None:
    shapes = Shapes(decode=(1, 2), contexts=(8, 16), max_blocks=5, block_size=4)
    programs = shapes.programs(ARCHITECTURE, "float32")
    artifacts = BoundArtifacts({p.bucket: eager(p) for p in programs})
    assert artifacts.decode_bucket(2, longest).name == name


def test_smoke_runs_cover_programs_of_every_context_and_segment() -> None:
    shapes = dataclasses.replace(SHAPES, contexts=(4, 12), segment=8)
    ran: list[str] = []

    def load(program: BucketProgram) -> CpuExecutable:
        executable = eager(program)
        function = executable.function

        def recorded(*tensors: Tensor) -> Tensor:
            ran.append(program.name)
            return function(*tensors)

        executable.function = recorded
        return executable

    programs = shapes.programs(ARCHITECTURE, "float32")
    artifacts = BoundArtifacts({p.bucket: load(p) for p in programs})
    kv_cache = {
        t.name: torch.full(t.shape, float("nan")) for t in artifacts.signature.of_role("kv_cache")
    }
    artifacts.bind(HostMemory(kv_cache, random_weights()))
    artifacts.smoke(ARCHITECTURE.vocab_size)
    assert ran == [p.name for p in programs]
    assert "decode_b2_ctx12" in ran


def test_a_bucket_that_is_not_bound_does_not_run() -> None:
    artifacts, _ = bound()
    with pytest.raises(KeyError):
        artifacts.run(Bucket("prefill", 5), {})


def test_executions_are_counted_by_program_and_smoke_runs_are_not() -> None:
    artifacts, _ = bound()
    artifacts.smoke(ARCHITECTURE.vocab_size)
    assert artifacts.executions == {
        "prefill_s4": 0,
        "prefill_s8": 0,
        "decode_b1": 0,
        "decode_b2": 0,
    }
    inputs = {
        t.name: torch.ones(t.shape, dtype=torch.int32) for t in PROGRAMS[1].signature.inputs[:6]
    }
    assert artifacts.run(Bucket("prefill", 8), inputs).shape == (1, ARCHITECTURE.vocab_size)
    assert artifacts.executions["prefill_s8"] == 1
    assert sum(artifacts.executions.values()) == 1


def test_the_length_of_a_block_table_is_the_signatures() -> None:
    artifacts, _ = bound()
    for bucket in artifacts.executables:
        assert artifacts.max_blocks(bucket) == SHAPES.max_blocks


# Smoke


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_smoke_run_writes_only_the_scratch_slot(dtype: str) -> None:
    artifacts, kv_cache = bound(dtype=dtype)
    before = {name: kv.clone() for name, kv in kv_cache.items()}
    artifacts.smoke(ARCHITECTURE.vocab_size)
    for name, kv in kv_cache.items():
        changed = (kv != before[name]).flatten(0, 1).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [0]


def test_a_smoke_run_passes_with_nan_all_over_the_cache() -> None:
    artifacts, kv_cache = bound()
    for kv in kv_cache.values():
        kv.fill_(float("nan"))
    artifacts.smoke(ARCHITECTURE.vocab_size)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [spec.name for spec in weight_specs(ARCHITECTURE)])
def test_a_weight_full_of_nan_is_caught_by_the_smoke_run(name: str, value: float) -> None:
    weights = random_weights()
    weights[name].fill_(value)
    artifacts, _ = bound(weights)
    with pytest.raises(BindError) as caught:
        artifacts.smoke(ARCHITECTURE.vocab_size)
    assert "prefill_s4 fails its smoke run" in caught.value.message
    assert caught.value.hint is not None
    assert "NaN" in caught.value.hint


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "damage", [lambda x: x / 0, lambda x: x[:, 1:], lambda x: torch.cat([x, x])]
)
def test_one_program_with_a_wrong_output_is_named(
    phase: str, damage: Callable[[Tensor], Tensor]
) -> None:
    wrong = "decode_b2" if phase == "decode" else "prefill_s8"

    def load(program: BucketProgram) -> CpuExecutable:
        executable = eager(program)
        if (program.phase, program.name[-1]) == (
            phase,
            PROGRAMS[-1 if phase == "decode" else 1].name[-1],
        ):
            function = executable.function
            executable.function = lambda *tensors: damage(function(*tensors))
        return executable

    artifacts, _ = bound(load=load)
    with pytest.raises(BindError, match=f"{wrong} fails its smoke run"):
        artifacts.smoke(ARCHITECTURE.vocab_size)


# A lock's artifacts


class EagerLoader(CpuLoader):
    """A loader that runs programs eagerly; a blob holds nothing but the program's name."""

    def check_host(self, manifest: Manifest) -> None:
        if manifest.toolchain["march"] != "x86-64-v3":
            raise BindError(f"{manifest.program}: another host", hint="-")

    def load(self, blobs: Mapping[BlobRole, Path], manifest: Manifest) -> CpuExecutable:
        [program] = [p for p in PROGRAMS if p.name == blobs["program"].read_text()]
        assert program.name == manifest.program
        return eager(program)


def published(tmp_path: Path, march: str = "x86-64-v3") -> Served:
    """A cache that holds all four programs, and a lock that names them."""
    cache = ArtifactCache(tmp_path / "cache")
    cache.prepare()
    locked = []
    versions = {"torch": torch.__version__, "march": march}
    for program in PROGRAMS:
        staged = tmp_path / "cache" / "tmp" / "staged"
        staged.write_text(program.name)
        manifest = Manifest(
            key_kind="input",
            program=program.name,
            target=TARGET,
            inputs=key_inputs(program, Toolchain(TARGET, versions)),
            graph_key="0" * 64,
            signature=program.signature,
            blobs=(cache.add_blob(staged),),
            toolchain=versions,
            lower_s=0.0,
            compile_s=0.0,
            peak_rss_bytes=0,
            log_sha256="0" * 64,
        )
        cache.publish(manifest)
        locked.append(
            LockedProgram(
                program.name,
                program.phase,
                program.size,
                program.context_len,
                manifest.key,
                manifest.graph_key,
                manifest.blobs,
            )
        )
    target = LockedTarget(
        SHAPES.prefill, SHAPES.decode, (), (), SHAPES.num_kv_blocks, versions, tuple(locked)
    )
    spec = {"dtype": "float32", "block_size": SHAPES.block_size, "max_model_len": 20}
    lock = Lock(spec, ARCHITECTURE.as_json(), None, {TARGET: target})
    return Served(tmp_path / "model.lock", cache, TARGET, lock)


def refusal(served: Served) -> BindError:
    with pytest.raises(BindError) as caught:
        load_artifacts(served, EagerLoader())
    return caught.value


def changed(served: Served, **fields: Any) -> Served:
    """With another first program in the lock, or other fields of the lock itself."""
    lock = served.lock
    if "architecture" in fields or "spec" in fields:
        return dataclasses.replace(served, lock=dataclasses.replace(lock, **fields))
    first, *rest = served.locked.programs
    programs = (dataclasses.replace(first, **fields), *rest)
    target = dataclasses.replace(served.locked, programs=programs)
    return dataclasses.replace(served, lock=dataclasses.replace(lock, targets={TARGET: target}))


def test_a_lock_that_names_another_buckets_artifact_is_refused(tmp_path: Path) -> None:
    served = published(tmp_path)
    other = served.locked.programs[1]
    fields = {"key": other.key, "graph_key": other.graph_key, "blobs": other.blobs}
    message = refusal(changed(served, **fields)).message
    assert "prefill_s4 is another program than the lock describes: program.size: 8 -> 4" in message


def test_a_lock_pieced_together_from_two_models_is_refused(tmp_path: Path) -> None:
    served = published(tmp_path)
    # The shapes are the same, so nothing else would notice: only the text would be wrong.
    other = dataclasses.replace(ARCHITECTURE, rope=Rope("default", 500.0))
    message = refusal(changed(served, architecture=other.as_json())).message
    assert "architecture.rope.theta: 10000.0 -> 500.0" in message


def test_a_program_under_another_name_is_refused(tmp_path: Path) -> None:
    served = published(tmp_path)
    assert "prefill_s4 has another name" in refusal(changed(served, name="x\x1b[31m")).message


def test_every_program_of_the_lock_is_loaded(tmp_path: Path) -> None:
    artifacts = load_artifacts(published(tmp_path), EagerLoader())
    assert list(artifacts.executables) == [p.bucket for p in PROGRAMS]
    assert artifacts.signature == PROGRAMS[0].signature


def test_all_faults_are_listed_with_the_command_that_mends_them(tmp_path: Path) -> None:
    served = published(tmp_path)
    cache, programs = served.cache, served.locked.programs
    cache.entry_path(programs[0].key).unlink()
    cache.blob_path(programs[1].blobs[0].digest).write_text("prefill_s9")
    other = dataclasses.replace(programs[2], blobs=programs[3].blobs)
    target = dataclasses.replace(served.locked, programs=(*programs[:2], other, programs[3]))
    error = refusal(
        dataclasses.replace(served, lock=dataclasses.replace(served.lock, targets={TARGET: target}))
    )
    assert "prefill_s4 is missing" in error.message
    assert "prefill_s8 is corrupt" in error.message
    assert "sha256 differs" in error.message
    assert "decode_b1 has other bytes than the lock names" in error.message
    assert "decode_b2" not in error.message
    assert str(cache.root) in error.message
    assert error.hint == f"nxbucket compile {tmp_path / 'model.yaml'}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "0 bytes, 9 expected"), ("decode_b", "8 bytes, 9 expected"), (None, "missing")],
)
def test_a_cut_or_lost_blob_is_corrupt(tmp_path: Path, content: str | None, reason: str) -> None:
    served = published(tmp_path)
    path = served.cache.blob_path(served.locked.programs[2].blobs[0].digest)
    path.unlink()
    if content is not None:
        path.write_text(content)
    message = refusal(served).message
    assert "decode_b1 is corrupt" in message
    assert f"{path}: {reason}" in message


def test_an_entry_of_another_key_or_of_no_json_is_corrupt(tmp_path: Path) -> None:
    served = published(tmp_path)
    first, second = (served.cache.entry_path(p.key) for p in served.locked.programs[:2])
    second.write_bytes(first.read_bytes())
    first.write_text("{")
    message = refusal(served).message
    assert "prefill_s4 is corrupt" in message
    assert "prefill_s8 is corrupt" in message


def test_an_empty_cache_misses_every_program(tmp_path: Path) -> None:
    served = published(tmp_path)
    shutil.rmtree(served.cache.root)
    message = refusal(served).message
    assert all(f"{program.name} is missing" in message for program in PROGRAMS)


def test_a_program_for_another_host_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    assert "another host" in refusal(published(tmp_path, march="x86-64-v4")).message
