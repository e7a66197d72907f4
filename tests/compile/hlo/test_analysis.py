"""FLOPs against cost.py's, bytes against the signature, loops, and which values are large."""

from dataclasses import replace

import pytest
from hlo_modules import FAMILIES, SEGMENTED, loop, lowered
from null_compiler import ARCHITECTURE, a_program

from nxbucket.compile.cost import cost_of
from nxbucket.compile.hlo.analysis import analyse
from nxbucket.compile.hlo.module import read_module
from nxbucket.compile.program import BucketProgram, Phase


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_the_cost_model(family: str, phase: Phase) -> None:
    program = a_program(phase, 8, FAMILIES[family])
    counted = analyse(read_module(lowered(program))).flops
    assert counted == pytest.approx(cost_of(program).flops, rel=0.01)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_with_segments_the_last_one_is_counted_whole(phase: Phase) -> None:
    # 8 blocks of 32 tokens: 4 segments of 64 are all of it, 3 of 96 are 32 tokens too many.
    whole, over = (
        a_program(phase, 8, max_blocks=8, num_kv_blocks=17, kv_segment_size=size)
        for size in (64, 96)
    )
    assert analyse(read_module(lowered(whole))).flops == cost_of(whole).flops
    arch = ARCHITECTURE
    surplus = 2 * 2 * 8 * arch.num_attention_heads * arch.head_dim * 32
    assert analyse(read_module(lowered(over))).flops == cost_of(over).flops + surplus


def test_a_loop_in_a_loop_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxbucket.compile.programs import segments

    program = a_program(max_blocks=8, num_kv_blocks=17, kv_segment_size=64)
    monkeypatch.setattr(segments, "SCORE_TILE_BYTES", 4096)
    from nxbucket.compile.hlo.verify import lower_quietly

    read = analyse(read_module(lower_quietly(program)))
    assert [x.rounds for x in read.loops] == [4, 4]
    assert read.flops == cost_of(program).flops


@pytest.mark.parametrize(
    ("made", "rounds"),
    [
        (loop(), 3),
        (loop(start=1), 2),
        (loop(start=5), 0),
        (loop(step=2), None),
        (loop(step=0), None),
        (loop(direction="GE"), None),
    ],
)
def test_rounds_follow_from_a_counted_loop_only(made: bytes, rounds: int | None) -> None:
    assert [x.rounds for x in analyse(read_module(made)).loops] == [rounds]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_the_signatures(dtype: str) -> None:
    program = a_program(dtype=dtype)
    read, cost = analyse(read_module(lowered(program))), cost_of(program)
    kv = cost.kv_cache_bytes
    assert read.aliased_bytes == kv
    assert read.parameter_bytes + read.output_bytes - kv == cost.weight_bytes + kv + cost.io_bytes


def _large(program: BucketProgram) -> set[str]:
    found = analyse(read_module(lowered(program)), num_temporaries=1000).temporaries
    return {
        t.instruction.opcode for t in found if t.num_bytes >= cost_of(program).kv_cache_bytes // 2
    }


def test_a_kv_cache_that_is_written_in_place_is_no_temporary() -> None:
    # A cache much larger than anything else.
    assert _large(a_program(num_kv_blocks=500)) == set()
    assert _large(replace(SEGMENTED, num_kv_blocks=2000)) == set()


def test_opcodes_and_dtypes_are_counted() -> None:
    read = analyse(read_module(loop()))
    assert read.opcodes["get-tuple-element"] == 4
    assert read.opcodes["while"] == 1
    assert read.dtypes["pred"] == 1
