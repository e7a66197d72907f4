"""Step times: what is sent so that a program runs, and what becomes of the times."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import run_nxbucket

from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.lockfile import Lock, LockedProgram, LockedTarget
from nxbucket.compile.manifest import Blob, Manifest
from nxbucket.compile.program import Bucket
from nxbucket.compile.signature import ProgramSignature
from nxbucket.serve.calibrate import (
    Batch,
    Repeats,
    costs_of,
    decode_batch,
    plan,
    prefill_batch,
    source_sentence,
)
from nxbucket.serve.policy import Limits
from nxbucket.serve.served import Served
from nxbucket.toolkit.calibrate_commands import check_folder, check_not_of_another, write_costs
from nxbucket.toolkit.choice.costs import Costs, PhaseCosts, read_costs
from nxbucket.toolkit.errors import UsageError

COSTS = Costs(format=1, target="cpu-x86-64-v3", source="a test")


def limits(max_model_len: int = 1024, num_blocks: int = 1000, block_size: int = 32) -> Limits:
    return Limits(8, num_blocks, block_size, max_model_len)


def test_a_prefill_is_one_prompt_of_the_buckets_length() -> None:
    assert prefill_batch(64, [64, 128], limits()) == Batch((64,), 1)


def test_a_bucket_of_max_model_len_is_reached_by_one_token_less() -> None:
    assert prefill_batch(1024, [64, 1024], limits()) == Batch((1023,), 1)


def test_a_bucket_that_no_prompt_needs_is_left_out() -> None:
    assert prefill_batch(1024, [1023, 1024], limits()) is None
    assert prefill_batch(1, [1], limits(max_model_len=1)) is None


def test_a_decode_is_as_many_short_requests_with_room_for_every_step() -> None:
    assert decode_batch(4, 31, 0, limits()) == Batch((128,) * 4, 32)


def test_one_request_is_as_long_as_the_program_for_max_model_len_asks() -> None:
    assert decode_batch(3, 31, 512, limits()) == Batch((128, 128, 512), 32)


def test_fewer_steps_are_taken_where_the_longest_leaves_room_for_no_more() -> None:
    batch = decode_batch(1, 31, 1000, limits())
    assert batch == Batch((1000,), 16)


def test_prompts_shrink_to_a_small_cache_and_a_batch_that_never_fits_is_left_out() -> None:
    small = limits(num_blocks=9)
    assert decode_batch(8, 31, 0, small) == Batch((16,) * 8, 16)
    assert decode_batch(8, 31, 0, limits(num_blocks=8)) is None


@given(
    st.integers(1, 16), st.integers(1, 40), st.integers(0, 500),
    st.integers(1, 600), st.integers(2, 200), st.sampled_from([1, 16, 32]),
)  # fmt: skip
def test_a_decode_batch_is_always_admitted_at_once(
    rows: int, steps: int, longest: int, max_model_len: int, num_blocks: int, block_size: int
) -> None:
    room = limits(max_model_len, num_blocks, block_size)
    batch = decode_batch(rows, steps, longest, room)
    if batch is None:
        return
    assert len(batch.prompt_lens) == rows
    assert min(batch.prompt_lens) >= 1
    assert max(batch.prompt_lens) >= longest
    assert max(batch.prompt_lens) + batch.max_tokens <= max_model_len
    assert 2 <= batch.max_tokens <= steps + 1
    assert batch.blocks(room) <= num_blocks - 1


def served(tmp_path: Path, **changes: tuple[int, ...]) -> Served:
    lists = {
        "num_batched_tokens_buckets": (128, 256),
        "num_seqs_buckets": (1, 2),
        "decode_context_length_buckets": (),
        "kv_segment_size_buckets": (),
        **changes,
    }
    locked = LockedTarget(**lists, num_kv_blocks=65, toolchain={}, programs=())
    spec = {"max_num_seqs": 2, "block_size": 32, "max_model_len": 1024}
    lock = Lock(spec, {}, None, {"cpu": locked})
    return Served(tmp_path / "model.lock", ArtifactCache(tmp_path), "cpu", lock)


def test_every_bucket_of_the_lock_is_measured(tmp_path: Path) -> None:
    assert dict(plan(served(tmp_path), Repeats(decode=7))) == {
        Bucket("prefill", 128): Batch((128,), 1),
        Bucket("prefill", 256): Batch((256,), 1),
        Bucket("decode", 1): Batch((128,), 9),
        Bucket("decode", 2): Batch((128, 128), 9),
    }


def test_decodes_run_past_the_shorter_contexts_and_the_source_says_so(tmp_path: Path) -> None:
    contexts = served(tmp_path, decode_context_length_buckets=(256, 512))
    assert dict(plan(contexts, Repeats()))[Bucket("decode", 2)] == Batch((128, 512), 32)
    assert "max_model_len" in source_sentence(contexts, Repeats())
    segments = served(tmp_path, kv_segment_size_buckets=(256,))
    assert dict(plan(segments, Repeats()))[Bucket("decode", 1)] == Batch((992,), 32)
    assert "near max_model_len" in source_sentence(segments, Repeats())


def program(phase: str, size: int, context_len: int | None = None) -> LockedProgram:
    name = Bucket(phase, size, context_len).name  # type: ignore[arg-type]
    blobs = (Blob("hlo", "0" * 64, 7), Blob("program", "1" * 64, 1000 * size))
    return LockedProgram(name, phase, size, context_len, "", "", blobs)  # type: ignore[arg-type]


def manifest(lower_s: float, compile_s: float) -> Manifest:
    nothing = ProgramSignature((), ())
    return Manifest("input", "", "", {}, "", nothing, (), {}, lower_s, compile_s, 0, "")


def test_costs_are_by_bucket_and_those_of_the_program_for_max_model_len() -> None:
    programs = [program("prefill", 64), program("decode", 2, 128), program("decode", 2)]
    manifests = {
        "prefill_s64": manifest(1.0, 2.5),
        "decode_b2_ctx128": manifest(9.0, 9.0),
        "decode_b2": manifest(1.5, 3.0),
    }
    step_s = {Bucket("decode", 2): 0.0123456789}
    costs = costs_of("cpu", "a test", step_s, programs, manifests, "program")
    assert costs.prefill == PhaseCosts(step_s={}, compile_s={64: 3.5}, program_bytes={64: 64000})
    assert costs.decode == PhaseCosts(
        step_s={2: 0.0123457}, compile_s={2: 4.5}, program_bytes={2: 2000}
    )


def test_what_is_written_is_read_back_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    costs = COSTS.model_copy(update={"decode": PhaseCosts(step_s={1: 0.25})})
    write_costs(COSTS, file)
    write_costs(costs, file)
    assert read_costs(file) == costs
    assert list(tmp_path.iterdir()) == [file]


def test_costs_of_another_target_are_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    check_not_of_another(file, "cpu-x86-64-v4")
    write_costs(COSTS, file)
    check_not_of_another(file, "cpu-x86-64-v3")
    with pytest.raises(UsageError, match="has the costs of cpu-x86-64-v3"):
        check_not_of_another(file, "cpu-x86-64-v4")
    file.write_text("{}")
    with pytest.raises(UsageError, match="is no costs file"):
        check_not_of_another(file, "cpu-x86-64-v4")


def test_a_folder_that_is_not_there_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    check_folder(tmp_path / "costs.json")
    with pytest.raises(UsageError, match="no such folder"):
        check_folder(tmp_path / "absent" / "costs.json")
    with pytest.raises(UsageError, match="is a folder"):
        check_folder(tmp_path)


@pytest.mark.engine
def test_every_program_of_the_example_is_measured(
    example: Path, artifact_env: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "costs.json"
    # One thread: a second one waits for its turn where other tests run.
    env = {**artifact_env, "OMP_NUM_THREADS": "1"}
    done = run_nxbucket("calibrate", str(example), "--output", str(file), "--json", env=env)
    assert done.returncode == 0, done.stderr
    costs = read_costs(file)
    assert json.loads(done.stdout) == {
        "ok": True, "file": str(file), "costs": json.loads(file.read_text())
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [file]
    buckets = {"prefill": [32, 64, 128], "decode": [1, 2, 4]}
    for phase, sizes in buckets.items():
        measured = costs.prefill if phase == "prefill" else costs.decode
        for by_size in (measured.step_s, measured.compile_s, measured.program_bytes):
            assert sorted(by_size) == sizes
            assert all(math.isfinite(value) and value > 0 for value in by_size.values())
    lock = json.loads(example.with_suffix(".lock").read_text())
    assert [costs.target] == list(lock["targets"])
    assert "medians of 7 prefill and 30 decode steps" in costs.source
    for name in ("prefill_s128", "decode_b4"):
        assert f"note: {name}: " in done.stderr
