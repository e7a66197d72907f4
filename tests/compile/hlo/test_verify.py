"""Every family, prefill and decode, on XLA:CPU against eager torch. `-rP` prints differences."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hlo_modules import FAMILIES
from hlo_mutants import PROGRAMS, Bench, mutants_of, sample
from null_compiler import ARCHITECTURE, LLAMA3_ROPE, YARN_ROPE, a_program

from nxbucket.compile.hlo.cases import cases_of, edges, kv_before, longest, random_weights
from nxbucket.compile.hlo.compiler import lower_to_hlo
from nxbucket.compile.hlo.scope import first_layers, layers_that_fit, memory_bytes
from nxbucket.compile.hlo.verify import (
    Reference,
    Weights,
    check_low_precision,
    compare,
    verify_program,
)
from nxbucket.compile.program import SCRATCH_SLOT, BucketProgram, Phase
from nxbucket.toolkit.architecture import Architecture, Rope

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES: dict[str, Any] = {"block_size": 8, "max_blocks": 8, "num_kv_blocks": 21}
SEGMENT = {"kv_segment_size": 16}
FORMS = {
    **{name: (arch, "float32") for name, arch in FAMILIES.items()},
    "llama3, tied": (replace(ARCHITECTURE, rope=LLAMA3_ROPE, tie_word_embeddings=True), "float32"),
    "yarn, all biases": (
        replace(ARCHITECTURE, rope=YARN_ROPE, qkv_bias=True, o_bias=True, mlp_bias=True),
        "float32",
    ),
    "mistral, bfloat16": (FAMILIES["mistral"], "bfloat16"),
    "qwen2, float16": (FAMILIES["qwen2"], "float16"),
    "qwen3, bfloat16": (FAMILIES["qwen3"], "bfloat16"),
    "one query head per KV head": (replace(ARCHITECTURE, num_key_value_heads=4), "float32"),
}


@pytest.mark.parametrize("segment", [None, 16], ids=["whole", "segments"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_a_program_equals_eager_torch(form: str, phase: Phase, segment: int | None) -> None:
    arch, dtype = FORMS[form]
    size = 12 if phase == "prefill" else 4
    program = a_program(phase, size, arch, dtype=dtype, **SHAPES, kv_segment_size=segment)
    result = verify_program(program, Weights(program))
    low = result.low_precision
    errors = "" if low is None else f"; {low.logits:.1e}, eager {low.eager_logits:.1e}"
    print(
        f"| {form} | {phase} | {segment} | {len(result.cases)} cases | "
        f"{result.worst.difference:.1e}{errors} |"
    )
    assert result.ok, (result.worst, low)
    assert (low is None) == (dtype == "float32")


def test_two_layers_of_which_one_has_a_window() -> None:
    arch = replace(FAMILIES["mistral"], num_hidden_layers=2, windowed_layers=(1,))
    program = a_program("decode", 4, replace(arch, sliding_window=20), **SHAPES, **SEGMENT)
    assert verify_program(program, Weights(program)).ok


def test_few_blocks_are_shared() -> None:
    program = a_program("decode", 4, block_size=8, max_blocks=8, num_kv_blocks=13)
    assert verify_program(program, Weights(program)).ok
    assert any(len({t[0] for t in c.tables}) < len(c.tables) for c in cases_of(program))


# The cases


def _program(phase: Phase) -> BucketProgram:
    return PROGRAMS[f"{phase}, segments, window"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_cases_reach_every_edge(phase: Phase) -> None:
    program = _program(phase)
    lengths = {n for case in cases_of(program) for n in case.lengths}
    contexts = {n - case.new for case in cases_of(program) for n in case.lengths}
    assert longest(program) == 64
    # Blocks of 8, segments of 16, a window of 20, and the end.
    assert {1, 7, 8, 9, 15, 16, 17, 19, 20, 21, 31, 32, 33, 63, 64} <= set(edges(program))
    assert set(edges(program)) <= lengths
    if phase == "prefill":
        assert {0, 1, *edges(program)} - {64} <= contexts
        assert any(case.new == program.size for case in cases_of(program))


def test_a_decode_has_rows_of_very_different_lengths_and_padding() -> None:
    program = _program("decode")
    cases = cases_of(program)
    assert any({1, 64} <= set(case.lengths) for case in cases)
    padded = [case for case in cases if case.rows < program.size]
    assert padded
    for case in padded:
        assert (case.inputs["slot_mapping"][case.rows :] == SCRATCH_SLOT).all()


def test_tables_end_in_stale_numbers_and_are_out_of_order() -> None:
    program = _program("prefill")
    case = next(c for c in cases_of(program) if 24 < c.lengths[0] < 48)
    table = case.inputs["block_table"].tolist()
    used = -(-case.lengths[0] // program.block_size)
    assert table[:used] != sorted(table[:used])
    assert any(table[used:])


def test_what_no_token_owns_is_poisoned() -> None:
    program = _program("prefill")
    fillers = set()
    for case in cases_of(program):
        cache = kv_before(program, case)["key.0"]
        fillers.add(str(float(cache[0, 0, 0, 0])))
        free = cache.flatten(0, 1)[case.slots]
        assert not (free.isfinite() & (free.abs() < 100)).any()
    assert fillers == {"nan", "inf", "-inf", "10000.0"}


def test_cases_are_the_same_for_the_same_seed() -> None:
    program = _program("decode")
    first, again, other = (cases_of(program, seed) for seed in (1, 1, 2))
    assert [c.name for c in first] == [c.name for c in again] != [c.name for c in other]
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(a.inputs[k], b.inputs[k]) for k in a.inputs)


@pytest.mark.parametrize("hidden", [32, 256])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_near_1(hidden: int, tied: bool) -> None:
    arch = replace(ARCHITECTURE, hidden_size=hidden, tie_word_embeddings=tied)
    program = a_program("decode", 4, arch, **SHAPES)
    weights = random_weights(arch)
    logits = torch.cat([e.logits for e in Reference(program, weights, 0)])
    assert 0.5 < float(logits.std()) < 3


# What it notices


def test_a_slot_that_changes_is_noticed() -> None:
    program = a_program("decode", 4, **SHAPES)
    expected = next(iter(Reference(program, random_weights(ARCHITECTURE), 0)))
    caches = {name: kv.clone() for name, kv in expected.before.items()}
    for name, rows in expected.written.items():
        caches[name].flatten(0, 1)[expected.case.slots] = rows
    assert compare(expected, expected.logits, caches).difference == 0
    caches["value.0"][0, 0] = 5.0
    assert compare(expected, expected.logits, caches).difference == 0, "the scratch slot"
    caches["value.0"][0, 1] = 5.0
    result = compare(expected, expected.logits, caches)
    assert result.difference == float("inf")
    assert str(result.worst).startswith("value.0[1, 0, 0] is 5, not ")


def test_nan_is_noticed_and_the_place_is_named() -> None:
    program = a_program("decode", 4, **SHAPES)
    expected = next(iter(Reference(program, random_weights(ARCHITECTURE), 0)))
    caches = {name: kv.clone() for name, kv in expected.before.items()}
    for name, rows in expected.written.items():
        caches[name].flatten(0, 1)[expected.case.slots] = rows
    logits = expected.logits.clone()
    logits[2, 7] = float("nan")
    result = compare(expected, logits, caches)
    assert (result.worst.tensor, result.worst.index) == ("logits", (2, 7))
    assert result.difference == float("inf")


@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_programs_are_noticed(name: str) -> None:
    """A sample; `mutation_report.py` judges all, and docs/hlo.md has its table."""
    bench = Bench(name, PROGRAMS[name])
    judged = [bench.judge(m) for m in sample(mutants_of(bench.payload), 20, seed=7)]
    assert not [j for j in judged if j.verdict == "survived"]
    assert sum(j.verdict == "cases" for j in judged) >= 12


@pytest.mark.mutation
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_many_wrong_programs_95_percent_are_noticed(name: str) -> None:
    bench = Bench(name, PROGRAMS[name])
    judged = [bench.judge(m) for m in sample(mutants_of(bench.payload), 60, seed=0)]
    caught = sum(j.verdict in ("cases", "lint") for j in judged)
    survived = [j for j in judged if j.verdict == "survived"]
    print(f"| {name} | {caught} caught | {len(survived)} survived |", *survived)
    assert caught + len(survived) >= 40
    assert caught >= 0.95 * (caught + len(survived))


def test_a_16_bit_program_that_is_less_exact_than_torch_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = a_program("decode", 4, dtype="bfloat16", **SHAPES)
    result = verify_program(program, Weights(program))
    low = result.low_precision
    assert low is not None and low.ok
    assert not replace(low, logits=2 * low.eager_logits).ok
    assert not replace(low, kv=2 * low.eager_kv).ok
    assert replace(result, low_precision=replace(low, kv=1.0)).ok is False
    assert all(c.ok for c in result.cases)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_wrong_16_bit_program_is_noticed(phase: Phase, dtype: str) -> None:
    """The bytes of another program, in place of its own: half of its float32 twin is right."""
    program = a_program(phase, 4, dtype=dtype, **SHAPES)
    weights = Weights(program)
    right = lower_to_hlo(program).graph
    assert check_low_precision(right, program, weights, 0, lambda *_: None).ok
    for change in ({"rms_norm_eps": 0.3}, {"rope": Rope("linear", 10000.0, 4.0)}):
        other = replace(program, architecture=replace(program.architecture, **change))
        wrong = lower_to_hlo(other).graph
        assert not check_low_precision(wrong, program, weights, 0, lambda *_: None).ok


# How much of it fits


def _large() -> Architecture:
    return replace(ARCHITECTURE, num_hidden_layers=32, hidden_size=4096, intermediate_size=14336)


def test_fewer_layers_are_a_program_of_their_own() -> None:
    arch = replace(FAMILIES["mistral"], num_hidden_layers=4, windowed_layers=(1, 3))
    shorter = first_layers(a_program(architecture=arch), 2).architecture
    assert (shorter.num_hidden_layers, shorter.windowed_layers) == (2, (1,))
    assert first_layers(a_program(), 9) == a_program()


def test_layers_that_fit_are_the_most_that_fit() -> None:
    program = a_program(architecture=_large())
    whole = memory_bytes(program)
    assert whole > 32 * 4 * 3 * 4096 * 14336
    assert layers_that_fit(program, whole) == 32
    few = layers_that_fit(program, whole // 4)
    assert 0 < few < 32
    assert memory_bytes(first_layers(program, few)) <= whole // 4
    assert memory_bytes(first_layers(program, few + 1)) > whole // 4
    assert layers_that_fit(program, 1000) == 0


def test_no_machine_path_is_in_a_module(tmp_path: Path) -> None:
    from hlo_modules import lowered

    assert str(Path(__file__).parents[3]).encode() not in lowered(a_program())
    assert b"/programs/" not in lowered(a_program())
