"""What a module does and holds, from its text alone: opcodes, FLOPs, bytes, its largest values.

FLOPs are those of `dot`: 2 * elements of the result * elements summed over, times the rounds of the
loops around it. That is what cost.py counts for a program, padded context included. With segments
this counts more where the last segment reaches beyond the block table (its length is rounded up to
whole segments) and where rows are padded to whole tiles, and nothing less: a static loop always
runs all its rounds.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nxbucket.compile.hlo.module import Computation, Instruction, Module
from nxbucket.toolkit.errors import HloError

NO_BUFFER = {"parameter", "get-tuple-element", "tuple", "while", "reshape", "bitcast"}
MAX_ROUNDS = 1 << 62
MAX_FLOPS = 1 << 100


@dataclass(frozen=True)
class Loop:
    """A `while`. `rounds` is None where it does not follow from the module how many it runs."""

    instruction: Instruction
    rounds: int | None


@dataclass(frozen=True)
class Temporary:
    """A value between parameters and outputs, and in how many instructions one like it stands."""

    instruction: Instruction
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Analysis:
    opcodes: dict[str, int]
    """Instructions of each, most frequent first. Reducers' bodies are counted, too."""
    dtypes: dict[str, int]
    """Results of each element type."""
    flops: int
    loops: list[Loop]
    parameter_bytes: int
    output_bytes: int
    """Aliased ones included."""
    aliased_bytes: int
    constant_bytes: int
    temporaries: list[Temporary]
    """The largest first."""


def analyse(module: Module, num_temporaries: int = 5) -> Analysis:
    """Raises HloError for loops and products that would run for ever."""
    executions, loops = _executions(module)
    flops = sum(
        executions[c.id] * _dot_flops(i, c)
        for c in module.computations
        for i in c.instructions
        if i.opcode == "dot"
    )
    outputs = module.outputs
    return Analysis(
        opcodes=_counted(i.opcode for i in module.instructions()),
        dtypes=_counted(s.dtype for i in module.instructions() for s in i.shape.arrays()),
        flops=flops,
        loops=loops,
        parameter_bytes=sum(p.shape.num_bytes for p in module.parameters),
        output_bytes=sum(s.num_bytes for s in outputs),
        aliased_bytes=sum(
            outputs[a.output].num_bytes for a in module.aliases if 0 <= a.output < len(outputs)
        ),
        constant_bytes=sum(
            i.shape.num_bytes for i in module.instructions() if i.opcode == "constant"
        ),
        temporaries=temporaries(module)[:num_temporaries],
    )


def _counted(values: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


def _dot_flops(dot: Instruction, computation: Computation) -> int:
    """LHS_CONTRACTING_DIMENSIONS is field 1 of DotDimensionNumbers."""
    left = computation.operand(dot, 0).shape
    flops = 2 * dot.shape.num_elements
    for dimension in dot.numbers.get(1, ()):
        flops *= left.dims[dimension]
        if flops > MAX_FLOPS:
            raise HloError(f"{dot.name} would take more than {MAX_FLOPS} FLOPs")
    return flops


def _executions(module: Module) -> tuple[dict[int, int], list[Loop]]:
    """How often each computation runs in one run of the module. A callee stands before its caller.

    A loop whose rounds are unknown counts as one round.
    """
    times = dict.fromkeys((c.id for c in module.computations), 0)
    times[module.entry_id] = 1
    loops = []
    for computation in reversed(module.computations):
        for instruction in computation.instructions:
            each = 1
            if instruction.opcode == "while":
                rounds = loop_rounds(module, computation, instruction)
                loops.append(Loop(instruction, rounds))
                each = 1 if rounds is None else rounds
            for callee in instruction.called:
                times[callee] += times[computation.id] * each
                if times[callee] > MAX_ROUNDS:
                    raise HloError(f"{instruction.name} would run more than {MAX_ROUNDS} times")
    return times, loops[::-1]


def loop_rounds(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """N of a loop that counts one of its values from a constant up to a constant, one at a time.

    That is: the condition is `value < constant`, the body's result has `value + 1` in its place,
    and the loop is entered with a constant there. Anything else is None.
    """
    body, condition = (module.by_id[called] for called in loop.called)
    test = condition.root
    if test.opcode != "compare" or test.direction != "LT":
        return None
    value, bound = (condition.operand(test, side) for side in (0, 1))
    if value.opcode != "get-tuple-element" or bound.scalar is None:
        return None
    if condition.operand(value, 0).opcode != "parameter":
        return None
    place = value.tuple_index
    entered_with = computation.operand(loop, 0)
    if entered_with.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    if place >= min(len(entered_with.operands), len(body.root.operands)):
        return None
    start = computation.operand(entered_with, place).scalar
    if start is None or not _counts_up(body, place):
        return None
    return max(bound.scalar - start, 0)


def _counts_up(body: Computation, place: int) -> bool:
    result = body.operand(body.root, place)
    if result.opcode != "add" or len(result.operands) != 2:
        return False
    for value, step in ((0, 1), (1, 0)):
        counter = body.operand(result, value)
        if (
            counter.opcode == "get-tuple-element"
            and counter.tuple_index == place
            and body.operand(counter, 0).opcode == "parameter"
            and body.operand(result, step).scalar == 1
        ):
            return True
    return False


def temporaries(module: Module) -> list[Temporary]:
    """Values that want a buffer of their own, the largest first; those alike are one entry.

    The rule: the result of every instruction, except
    - parameters, constants, tuples and their parts, and `while`, which hold other values' buffers;
    - `reshape`, the same bytes under another shape;
    - a scatter into an aliased parameter or into a value that a loop carries: it is done in place.
    Nothing is fused and nothing shares memory here, so no entry says how much memory a compiler
    will want; the largest says what it cannot do without if it keeps that value whole.
    """
    found: dict[tuple[str, str], list[Instruction]] = {}
    aliased = {a.parameter for a in module.aliases}
    for computation in module.computations:
        for instruction in computation.instructions:
            skipped = instruction.opcode in NO_BUFFER or instruction.opcode == "constant"
            if skipped or _in_place(instruction, computation, module, aliased):
                continue
            found.setdefault((instruction.opcode, str(instruction.shape)), []).append(instruction)
    listed = [Temporary(same[0], same[0].shape.num_bytes, len(same)) for same in found.values()]
    return sorted(listed, key=lambda t: (-t.num_bytes, t.instruction.id))


def _in_place(
    instruction: Instruction, computation: Computation, module: Module, aliased: set[int]
) -> bool:
    if instruction.opcode != "scatter":
        return False
    at = instruction
    while at.opcode in ("scatter", "reshape", "get-tuple-element"):
        at = computation.operand(at, 0)
    if at.opcode != "parameter":
        return False
    return computation.id != module.entry_id or at.parameter in aliased
