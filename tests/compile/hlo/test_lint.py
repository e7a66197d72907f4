"""A bad module for each rule, and none for any program of ours."""

from dataclasses import replace

import pytest
from hlo_modules import (
    F32,
    FAMILIES,
    computation,
    dimension_numbers,
    instruction,
    loop,
    lowered,
    module,
    one_instruction,
    parameter,
    shape,
    text,
)
from null_compiler import a_program

from nxbucket.compile.hlo import compiler
from nxbucket.compile.hlo import lint as rules
from nxbucket.compile.hlo.lint import Finding, lint
from nxbucket.compile.hlo.module import read_module
from nxbucket.compile.hlo.wire import packed
from nxbucket.compile.program import Phase
from nxbucket.toolkit.errors import CompileError


def found(payload: bytes) -> list[Finding]:
    return lint(read_module(payload))


def only(payload: bytes) -> Finding:
    (finding,) = found(payload)
    return finding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("segment", [None, 64])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_programs_break_no_rule(
    family: str, phase: Phase, segment: int | None, dtype: str
) -> None:
    shapes = {"max_blocks": 8, "num_kv_blocks": 17, "kv_segment_size": segment}
    program = a_program(phase, 8, FAMILIES[family], dtype=dtype, **shapes)
    assert lint(read_module(lowered(program)), program.signature) == []


def test_an_opcode_of_somebody_else() -> None:
    finding = only(one_instruction("sort"))
    assert (finding.severity, finding.rule, finding.instruction) == ("error", "opcode", "sort.2")
    assert "comparators" in finding.message
    assert "NCC_EUOC002" in only(one_instruction("cholesky")).message


def test_a_custom_call() -> None:
    finding = only(one_instruction("custom-call", F32, F32, text(28, "xla.sdy.Sharding")))
    assert finding.rule == "custom-call"
    assert "xla.sdy.Sharding" in finding.message


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        *(("s64", "EVRF035"), ("u64", "ESFH002"), ("f64", "known issues"), ("c64", "EVRF004")),
        *(("f8e4m3fn", "EVRF051"), ("f8e4m3fnuz", "EVRF005"), ("f4e2m1fn", "ESPP004")),
        *(("u8", "not a type of our lowering"),),
    ],
)
def test_a_type_of_somebody_else(dtype: str, code: str) -> None:
    finding = only(one_instruction("convert", shape(dtype, 4)))
    assert finding.rule == "dtype"
    assert code in finding.message


def test_a_dynamic_shape() -> None:
    assert only(one_instruction("negate", shape("f32", 4, dynamic=True))).rule == "static-shape"


def test_ids_that_do_not_fit_or_have_gaps() -> None:
    far = module(computation(1, parameter(1 << 32, 0, F32), root=1 << 32))
    assert "31 bits" in only(far).message
    gap = module(computation(1, parameter(3, 0, F32), root=3))
    assert only(gap).message == "ids go from 3 to 3, not from 1 to 1"


def test_an_integer_dot() -> None:
    square = shape("s32", 2, 2)
    numbers = dimension_numbers(30, f1=[1], f2=[0])
    made = module(
        computation(
            1, parameter(1, 0, square), instruction(2, "dot", square, (1, 1), (), numbers), root=2
        )
    )
    assert only(made).rule == "integer-dot"


@pytest.mark.parametrize("made", [loop(step=2), loop(direction="GE"), loop(direction="LE")])
def test_a_loop_that_is_not_counted(made: bytes) -> None:
    assert only(made).rule == "static-loop"


def test_a_counted_loop_is_fine() -> None:
    assert found(loop()) == []


def test_a_reduce_of_two_arrays() -> None:
    pair = shape("tuple", parts=[shape(), shape()])
    numbers = [instruction(i, "add", shape(), (1, 2)) for i in (3,)]
    reducer = computation(1, parameter(1, 0, shape()), parameter(2, 1, shape()), *numbers, root=3)
    entry = computation(
        2,
        parameter(4, 0, F32),
        parameter(5, 1, shape()),
        instruction(6, "reduce", pair, (4, 4, 5, 5), (1,)),
        root=6,
    )
    assert only(module(reducer, entry)).rule == "variadic-reduce"


def scatter(dtype: str, combiner: str, iota: int = 3) -> bytes:
    """Rows 0 to iota - 1 of 4, replaced or combined."""
    number = shape(dtype)
    combine = instruction(3, combiner, number, (1, 2))
    combining = combiner != "parameter"
    reducer = computation(
        1,
        parameter(1, 0, number),
        parameter(2, 1, number),
        *([combine] if combining else []),
        root=3 if combining else 2,
    )
    first = 4 if combining else 3
    entry = computation(
        2,
        parameter(first, 0, shape(dtype, 4)),
        instruction(first + 1, "iota", shape("s32", iota), (), (), packed(14, [0])),
        instruction(first + 2, "reshape", shape("s32", iota, 1), (first + 1,)),
        parameter(first + 3, 1, shape(dtype, iota)),
        instruction(
            first + 4,
            "scatter",
            shape(dtype, 4),
            (first, first + 2, first + 3),
            (1,),
            dimension_numbers(48, f2=[0], f3=[0], f4=[1]),
        ),
        root=first + 4,
    )
    return module(reducer, entry)


def test_a_scatter_that_combines_integers() -> None:
    assert found(scatter("s32", "parameter")) == []
    assert found(scatter("f32", "add")) == []
    assert only(scatter("s32", "add")).rule == "integer-scatter"
    assert only(scatter("pred", "or")).rule == "integer-scatter"


def test_an_iota_that_leaves_what_it_indexes() -> None:
    finding = only(scatter("f32", "parameter", iota=5))
    assert finding.rule == "index-bounds"
    assert "0 to 4 into a dimension of 4 (NCC_EVRF031" in finding.message


def test_a_loop_that_counts_beyond_what_it_indexes() -> None:
    from hlo_mutants import PROGRAMS, mutants_of

    payload = lowered(PROGRAMS["prefill, segments, window"])
    (longer,) = (m for m in mutants_of(payload) if m.kind == "loop bound" and "+1" in m.change)
    finding = only(longer.apply(payload))
    assert (finding.rule, finding.message[:41]) == (
        "index-bounds",
        "indices from 0 to 4 into a dimension of 4",
    )


def test_aliases() -> None:
    def aliased(*aliases: tuple[int, int, int], of: bytes = F32) -> set[str]:
        body = computation(1, parameter(1, 0, of), instruction(2, "negate", F32, (1,)), root=2)
        return {f"{f.rule}: {f.message}" for f in found(module(body, aliases=aliases))}

    assert aliased((0, 0, 2)) == set()
    assert aliased((0, 0, 1)) == {
        "alias: the alias of parameter 0 is a may-alias: a copy is allowed"
    }
    assert aliased((0, 0, 2), (0, 0, 2)) == {
        "alias: output 0 is aliased 2 times",
        "alias: parameter 0 is aliased 2 times",
    }
    assert any("there are 1 outputs" in said for said in aliased((1, 0, 2)))
    wrong = aliased((0, 0, 2), of=shape("f32", 5))
    assert wrong == {"alias: output 0, f32[4], cannot be parameter 0, f32[5]"}


def test_a_layout() -> None:
    turned = shape("f32", 2, 3, minor_to_major=[0, 1])
    bad = found(module(computation(1, parameter(1, 0, turned), root=1)))
    assert [str(f) for f in bad] == [
        "parameter 0 is not row-major [layout]",
        "output 0 is not row-major [layout]",
    ]
    rows = shape("f32", 2, 3, minor_to_major=[1, 0])
    assert found(module(computation(1, parameter(1, 0, rows), root=1))) == []


def test_a_large_value_is_a_warning_with_the_keys_that_mend_it() -> None:
    finding = only(one_instruction("broadcast", shape("f32", 4, 1 << 28), F32, packed(14, [0])))
    assert (finding.severity, finding.rule) == ("warning", "large-temporary")
    assert "kv_segment_size_buckets" in finding.message


def test_the_signature_is_compared() -> None:
    program = a_program()
    read = read_module(lowered(program))
    for other in (
        replace(program, size=17),
        replace(program, dtype="bfloat16"),
        replace(program, num_kv_blocks=10),
        a_program("decode", 4),
    ):
        assert {f.rule for f in lint(read, other.signature)} == {"signature"}


def test_a_program_that_breaks_a_rule_does_not_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "OPCODES", rules.OPCODES - {"rsqrt"})
    with pytest.raises(CompileError, match=r"prefill_s16: .*rsqrt is not among .* and 2 more"):
        compiler.lower_to_hlo(a_program())


def test_a_finding_reads_as_a_sentence() -> None:
    assert str(Finding("error", "opcode", "no", "sort.2")) == "sort.2: no [opcode]"
