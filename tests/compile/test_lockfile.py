import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from null_compiler import NULL_TOOLCHAIN, model_file

from nxbucket.compile import lockfile
from nxbucket.compile.key import input_key
from nxbucket.compile.lockfile import (
    Lock,
    LockedProgram,
    LockedTarget,
    changed_programs,
    check_lock,
    lock_path,
    make_lock,
    read_lock,
    write_lock,
)
from nxbucket.compile.manifest import Blob, BlobRole
from nxbucket.compile.plan import plan_programs
from nxbucket.toolkit.errors import LockError
from nxbucket.toolkit.spec import DeploySpec, load_spec

ROLES = get_args(BlobRole)
TARGET = "cpu-null"


@pytest.fixture
def spec(tmp_path: Path) -> DeploySpec:
    return load_spec(model_file(tmp_path))


def locked(spec: DeploySpec, digest: str = "b") -> list[LockedProgram]:
    return [
        LockedProgram(
            program.name,
            program.phase,
            program.size,
            program.context_len,
            input_key(program, NULL_TOOLCHAIN),
            "a" * 64,
            (Blob("program", digest * 64, 10),),
        )
        for program in plan_programs(spec)
    ]


def a_lock(spec: DeploySpec, target: str = TARGET, previous: Lock | None = None) -> Lock:
    return make_lock(spec, target, NULL_TOOLCHAIN.versions, locked(spec), previous)


def test_a_lock_reads_back_exactly(spec: DeploySpec) -> None:
    # B76
    lock, path = a_lock(spec), lock_path(spec.path)
    assert path == spec.path.with_name("model.lock")
    assert write_lock(lock, path)
    assert read_lock(path) == lock
    check_lock(read_lock(path), path, spec)


def test_a_lock_reads_back_exactly_in_another_process(spec: DeploySpec) -> None:
    # B76
    path = lock_path(spec.path)
    write_lock(a_lock(spec), path)
    code = (
        "import sys; from pathlib import Path\n"
        "from nxbucket.compile.lockfile import read_lock, write_lock\n"
        "source, copy = map(Path, sys.argv[1:])\n"
        "print(write_lock(read_lock(source), copy))"
    )
    copy = path.with_name("copy.lock")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(copy)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
    assert copy.read_bytes() == path.read_bytes()


sizes = st.lists(st.integers(1, 1 << 20), max_size=4, unique=True).map(sorted)
texts = st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)
commits = st.text("0123456789abcdef", min_size=40, max_size=40)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def targets(draw: st.DrawFn) -> LockedTarget:
    prefill, decode, contexts, segment = draw(sizes), draw(sizes), draw(sizes), draw(sizes)

    def program(phase: Any, size: int, context: int | None = None) -> LockedProgram:
        blobs = draw(
            st.lists(
                st.builds(Blob, st.sampled_from(ROLES), digests, st.integers(1)),
                min_size=1,
                max_size=2,
                unique_by=lambda blob: blob.role,
            )
        )
        keys = draw(digests), draw(digests)
        return LockedProgram(draw(texts), phase, size, context, *keys, tuple(blobs))

    programs = [program("prefill", n) for n in prefill]
    programs += [program("decode", n, context) for n in decode for context in (*contexts, None)]
    return LockedTarget(
        tuple(prefill),
        tuple(decode),
        tuple(contexts),
        tuple(segment),
        draw(st.integers(1)),
        draw(st.dictionaries(texts, texts, max_size=3)),
        tuple(programs),
    )


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(st.dictionaries(texts, targets(), max_size=2), st.none() | commits)
def test_any_lock_reads_back_exactly(
    spec: DeploySpec, found: dict[str, LockedTarget], commit: str | None
) -> None:
    # B76
    lock = replace(a_lock(spec), targets=found, model_commit=commit)
    path = lock_path(spec.path)
    write_lock(lock, path)
    assert read_lock(path) == lock
    assert not write_lock(read_lock(path), path)


def test_a_lock_with_context_lengths_and_segments_reads_back_exactly(spec: DeploySpec) -> None:
    text = spec.path.read_text().replace(
        "neuron_config:\n",
        "neuron_config:\n  decode_context_length_buckets: [32, 96]\n"
        "  kv_segment_size_buckets: [64]\n",
    )
    spec.path.write_text(text)
    long = load_spec(spec.path)
    lock, path = a_lock(long), lock_path(long.path)
    write_lock(lock, path)
    assert read_lock(path) == lock
    check_lock(lock, path, long)
    [target] = lock.targets.values()
    assert target.decode_context_length_buckets == (32, 96)
    assert target.kv_segment_size_buckets == (64,)
    assert [(p.name, p.context_len) for p in target.programs[3:6]] == [
        ("decode_b1_ctx32", 32),
        ("decode_b1_ctx96", 96),
        ("decode_b1", None),
    ]


def test_writing_the_same_lock_again_touches_nothing(spec: DeploySpec) -> None:
    path = lock_path(spec.path)
    assert write_lock(a_lock(spec), path)
    before = path.stat()
    assert not write_lock(a_lock(spec), path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_a_lock_has_nothing_of_this_host_in_it(spec: DeploySpec) -> None:
    path = lock_path(spec.path)
    write_lock(a_lock(spec), path)
    text = path.read_text()
    for word in (str(spec.path.parent), str(Path.home()), os.uname().nodename, "cache"):
        assert word not in text.replace("prefix_caching", "").replace("kv_cache", "")
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_a_lock_that_cannot_be_written_is_explained_and_leaves_nothing(spec: DeploySpec) -> None:
    path = lock_path(spec.path)
    path.mkdir()
    with pytest.raises(LockError, match="cannot write the lock file"):
        write_lock(a_lock(spec), path)
    assert [p.name for p in path.parent.iterdir() if "tmp" in p.name] == []


def test_two_writers_at_the_same_moment_both_succeed(
    spec: DeploySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lock_path(spec.path)
    real = Path.replace
    lock = a_lock(spec)

    def the_other_is_faster(staged: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", real)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_lock(a_lock(spec, "cpu-other"), path)
        return real(staged, target)

    monkeypatch.setattr(Path, "replace", the_other_is_faster)
    assert write_lock(lock, path)
    assert read_lock(path) == lock


# What a lock was made from


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[32, 64, 128]", "[32, 128]", "neuron_config.num_batched_tokens_buckets"),
        ("max_model_len: 128", "max_model_len: 256", "max_model_len"),
        ("model: llama", "model: llama\ndtype: bfloat16", "dtype"),
        ("model: llama", "model: llama\nblock_size: 64", "block_size"),
        ("model: llama", "model: llama\nnum_gpu_blocks_override: 77", "num_gpu_blocks_override"),
        ("model: llama", "model: llama\ncompiler: {march: x86-64-v3}", "compiler.march"),
    ],
)
def test_a_changed_model_file_is_refused_and_the_key_named(
    spec: DeploySpec, old: str, new: str, named: str
) -> None:
    lock, path = a_lock(spec), lock_path(spec.path)
    text = spec.path.read_text()
    assert old in text
    spec.path.write_text(text.replace(old, new))
    with pytest.raises(LockError) as caught:
        check_lock(lock, path, load_spec(spec.path))
    message = caught.value.message
    assert f"{named}: " in message
    assert " -> " in message
    assert caught.value.hint == f"nxbucket compile {spec.path}"


def test_a_changed_config_json_is_refused_and_the_field_named(spec: DeploySpec) -> None:
    # B67
    lock, path = a_lock(spec), lock_path(spec.path)
    model_file(spec.path.parent, rope_theta=500000.0, rms_norm_eps=1e-6)
    with pytest.raises(LockError) as caught:
        check_lock(lock, path, load_spec(spec.path))
    assert "config.json.rms_norm_eps: 1e-05 -> 1e-06" in caught.value.message
    assert "config.json.rope.theta: 10000.0 -> 500000.0" in caught.value.message


def test_what_decides_no_program_may_change_under_a_lock(spec: DeploySpec) -> None:
    lock, path = a_lock(spec), lock_path(spec.path)
    with spec.path.open("a") as f:
        f.write("enable_prefix_caching: false\nasync_scheduling: false\nserve: {port: 81}\n")
    check_lock(lock, path, load_spec(spec.path))


def test_other_targets_are_kept_while_the_model_file_means_the_same(spec: DeploySpec) -> None:
    first = a_lock(spec, "cpu-x86-64-v3")
    both = a_lock(spec, "cpu-x86-64-v4", previous=first)
    assert set(both.targets) == {"cpu-x86-64-v3", "cpu-x86-64-v4"}
    assert a_lock(spec, "cpu-x86-64-v3", previous=both) == both


def test_other_targets_are_dropped_once_the_model_file_means_something_else(
    spec: DeploySpec,
) -> None:
    first = a_lock(spec, "cpu-x86-64-v3")
    changed = load_spec(model_file(spec.path.parent, prefill=(64, 128)))
    assert set(a_lock(changed, "cpu-x86-64-v4", previous=first).targets) == {"cpu-x86-64-v4"}
    model = load_spec(model_file(spec.path.parent, rms_norm_eps=1e-6))
    assert set(a_lock(model, "cpu-x86-64-v4", previous=first).targets) == {"cpu-x86-64-v4"}


def test_programs_with_new_bytes_are_named(spec: DeploySpec) -> None:
    old = a_lock(spec)
    programs = locked(spec)
    programs[1] = replace(programs[1], blobs=(Blob("program", "e" * 64, 11),))
    new = make_lock(spec, TARGET, NULL_TOOLCHAIN.versions, programs, old)
    assert changed_programs(old, new, TARGET) == [programs[1].name]
    assert changed_programs(None, new, TARGET) == []
    assert changed_programs(old, old, TARGET) == []
    assert changed_programs(a_lock(spec, "cpu-other"), new, TARGET) == []


# Garbage


def test_no_lock_at_all_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="no lock file") as caught:
        read_lock(tmp_path / "model.lock")
    assert caught.value.hint == f"nxbucket compile {tmp_path / 'model.yaml'}"


def rewritten(spec: DeploySpec, change: Callable[[dict[str, Any]], object]) -> Path:
    path = lock_path(spec.path)
    write_lock(a_lock(spec), path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


LOCK_FIELDS = ["format", "spec_digest", *(f.name for f in fields(Lock))]


@pytest.mark.parametrize("name", LOCK_FIELDS)
def test_a_missing_field_of_the_lock_is_an_error(spec: DeploySpec, name: str) -> None:
    with pytest.raises(LockError, match="not a lock file of ours"):
        read_lock(rewritten(spec, lambda raw: raw.pop(name)))


@pytest.mark.parametrize("name", [f.name for f in fields(LockedTarget)])
def test_a_missing_field_of_a_target_is_an_error(spec: DeploySpec, name: str) -> None:
    with pytest.raises(LockError, match="not a lock file of ours"):
        read_lock(rewritten(spec, lambda raw: raw["targets"][TARGET].pop(name)))


@pytest.mark.parametrize("name", [f.name for f in fields(LockedProgram)])
def test_a_missing_field_of_a_program_is_an_error(spec: DeploySpec, name: str) -> None:
    with pytest.raises(LockError, match="not a lock file of ours"):
        read_lock(rewritten(spec, lambda raw: raw["targets"][TARGET]["programs"][0].pop(name)))


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(colour="red"),
        lambda raw: raw.update(format=1),
        lambda raw: raw.update(format=3),
        lambda raw: raw.update(format=True),
        lambda raw: raw.update(model_commit="main"),
        lambda raw: raw.update(model_commit="../" * 14),
        lambda raw: raw["spec"].update(dtype="bfloat16"),
        lambda raw: raw["architecture"].update(colour="red"),
        lambda raw: raw["architecture"].pop("vocab_size"),
        lambda raw: raw["architecture"].update(rope=None),
        lambda raw: raw["architecture"]["rope"].pop("theta"),
        lambda raw: raw["architecture"]["rope"].update(short_factor=5),
        lambda raw: raw["architecture"].update(windowed_layers=5),
        lambda raw: raw["targets"][TARGET]["num_seqs_buckets"].append(3),
        lambda raw: raw["targets"][TARGET]["decode_context_length_buckets"].append(32),
        lambda raw: raw["targets"][TARGET].update(kv_segment_size_buckets=[0]),
        lambda raw: raw["targets"][TARGET].update(kv_segment_size_buckets=None),
        lambda raw: raw["targets"][TARGET]["programs"].pop(),
        lambda raw: raw["targets"][TARGET]["programs"][-1].update(context_len=32),
        lambda raw: raw["targets"][TARGET]["programs"][-1].update(context_len=0),
        lambda raw: raw["targets"][TARGET]["programs"][-1].update(context_len=True),
        lambda raw: raw["targets"][TARGET].update(num_kv_blocks=0),
        lambda raw: raw["targets"][TARGET].update(num_kv_blocks=True),
        lambda raw: raw["targets"][TARGET].update(toolchain={"march": 4}),
        lambda raw: raw["targets"][TARGET]["programs"][0].update(phase="encode"),
        lambda raw: raw["targets"][TARGET]["programs"][0].update(key="../../etc"),
        lambda raw: raw["targets"][TARGET]["programs"][0].update(blobs=[]),
        lambda raw: raw["targets"][TARGET]["programs"][0]["blobs"][0].update(digest="x"),
    ],
)
def test_an_edited_lock_is_refused(
    spec: DeploySpec, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(LockError, match="not a lock file of ours") as caught:
        read_lock(rewritten(spec, change))
    assert caught.value.hint == f"nxbucket compile {spec.path}"


def test_an_edited_spec_is_found_by_its_digest(spec: DeploySpec) -> None:
    path = rewritten(spec, lambda raw: raw["spec"].update(max_num_seqs=5))
    with pytest.raises(LockError, match="`spec` was edited"):
        read_lock(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_garbage_raises_nothing_but_lock_error(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "model.lock"
    path.write_bytes(payload)
    with pytest.raises(LockError):
        read_lock(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_garbage_in_any_one_place_raises_nothing_but_lock_error(
    spec: DeploySpec, data: st.DataObject
) -> None:
    raw = json.loads(json.dumps(lockfile._lock_as_json(a_lock(spec))))
    place: Any = raw
    while isinstance(place, (dict, list)) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()) or not isinstance(place[key], (dict, list)) or not place[key]:
            place[key] = data.draw(json_values)
            break
        place = place[key]
    path = lock_path(spec.path)
    path.write_text(json.dumps(raw))
    try:
        lock = read_lock(path)
    except LockError:
        return
    try:
        check_lock(lock, path, spec)
    except LockError:
        return
    assert spec.architecture.as_json() == lock.architecture


@pytest.mark.parametrize("payload", [b"[" * 100_000, b'{"format": 1, "format": 1}', b"\xff\xfe{}"])
def test_odd_json_raises_nothing_but_lock_error(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "model.lock"
    path.write_bytes(payload)
    with pytest.raises(LockError):
        read_lock(path)


def test_a_lock_above_the_size_limit_is_refused(
    spec: DeploySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lock_path(spec.path)
    write_lock(a_lock(spec), path)
    monkeypatch.setattr(lockfile, "MAX_LOCK_BYTES", 100)
    with pytest.raises(LockError, match="larger than 100 bytes"):
        read_lock(path)


def test_a_folder_in_its_place_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "model.lock"
    path.mkdir()
    with pytest.raises(LockError, match="Is a directory"):
        read_lock(path)
