"""Wrong programs, made from right ones: one small change to an HloModuleProto each.

A mutant keeps every shape, so XLA takes it. `mutants_of` lists all there are of each kind;
`judge` says whether the checks of `verify-hlo` notice.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
from null_compiler import ARCHITECTURE, a_program

from nxbucket.compile.hlo import canonical
from nxbucket.compile.hlo.lint import lint
from nxbucket.compile.hlo.module import Computation, Instruction, Module, read_module
from nxbucket.compile.hlo.verify import (
    Expected,
    Reference,
    Runner,
    Weights,
    compare,
    lower_quietly,
)
from nxbucket.compile.hlo.wire import BYTES, VARINT, Field, packed, read_message, write_message
from nxbucket.compile.program import BucketProgram

SMALL = {"block_size": 8, "max_blocks": 8, "num_kv_blocks": 21}
WINDOWED = replace(
    ARCHITECTURE, family="mistral", qkv_bias=True, sliding_window=20, windowed_layers=(0,)
)
PROGRAMS: dict[str, BucketProgram] = {
    "prefill": a_program("prefill", 12, replace(ARCHITECTURE, qkv_bias=True), **SMALL),
    "prefill, segments, window": a_program("prefill", 12, WINDOWED, **SMALL, kv_segment_size=16),
    "decode": a_program("decode", 4, replace(ARCHITECTURE, qkv_bias=True), **SMALL),
    "decode, segments, window": a_program("decode", 4, WINDOWED, **SMALL, kv_segment_size=16),
}

LITERAL, DIMENSIONS, SLICE, SLICE_START, SLICE_LIMIT = 8, 14, 17, 1, 2
F32S, S32S, PREDS = 8, 4, 2
DIRECTION = 63

Verdict = Literal["lint", "cases", "equivalent", "survived", "refused"]

Edit = Callable[["Editable"], None]


@dataclass(frozen=True)
class Mutant:
    kind: str
    instruction: str
    change: str
    edit: Edit = field(repr=False, compare=False)

    def apply(self, payload: bytes) -> bytes:
        editable = Editable(payload)
        self.edit(editable)
        return editable.written()


class Editable:
    """A module as lists of fields: of itself, of each instruction."""

    def __init__(self, payload: bytes) -> None:
        self.fields = read_message(payload)
        self.computations: list[list[Field | list[Field]]] = []
        for f in self.fields:
            if f.number == canonical.COMPUTATION:
                assert isinstance(f.value, bytes)
                parts: list[Field | list[Field]] = [
                    read_message(p.value)
                    if p.number == canonical.INSTRUCTION and isinstance(p.value, bytes)
                    else p
                    for p in read_message(f.value)
                ]
                self.computations.append(parts)

    def written(self) -> bytes:
        computations = iter(self.computations)
        return write_message(
            Field(f.number, BYTES, write_message(self._flat(next(computations))))
            if f.number == canonical.COMPUTATION
            else f
            for f in self.fields
        )

    @staticmethod
    def _flat(parts: list[Field | list[Field]]) -> Iterator[Field]:
        for part in parts:
            if isinstance(part, list):
                yield Field(canonical.INSTRUCTION, BYTES, write_message(part))
            else:
                yield part

    def instructions(self) -> Iterator[list[Field]]:
        for computation in self.computations:
            yield from (part for part in computation if isinstance(part, list))

    def instruction(self, wanted: int) -> list[Field]:
        for fields in self.instructions():
            if any(f.number == canonical.INSTRUCTION_ID and f.value == wanted for f in fields):
                return fields
        raise KeyError(wanted)

    def set(self, instruction_id: int, number: int, value: int | bytes) -> None:
        fields = self.instruction(instruction_id)
        at = next(i for i, f in enumerate(fields) if f.number == number)
        fields[at] = Field(number, VARINT if isinstance(value, int) else BYTES, value)

    def set_operands(self, instruction_id: int, operands: tuple[int, ...]) -> None:
        self._set_packed(instruction_id, canonical.OPERAND_IDS, operands)

    def set_dimensions(self, instruction_id: int, dimensions: tuple[int, ...]) -> None:
        self._set_packed(instruction_id, DIMENSIONS, dimensions)

    def _set_packed(self, instruction_id: int, number: int, values: tuple[int, ...]) -> None:
        fields = self.instruction(instruction_id)
        at = next(i for i, f in enumerate(fields) if f.number == number)
        fields[:] = [f for i, f in enumerate(fields) if f.number != number or i == at]
        fields[at] = packed(number, values)

    def set_aliases(self, change: Callable[[list[Field]], list[Field]]) -> None:
        at = next(i for i, f in enumerate(self.fields) if f.number == canonical.ALIAS)
        raw = self.fields[at].value
        assert isinstance(raw, bytes)
        self.fields[at] = Field(canonical.ALIAS, BYTES, write_message(change(read_message(raw))))


def mutants_of(payload: bytes) -> list[Mutant]:
    module = read_module(payload)
    made = [m for computation in module.computations for m in _of_computation(module, computation)]
    return [*made, *_of_aliases(module)]


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Every kind in turn, so that a common one does not crowd out the others."""
    chosen = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for same in by_kind.values():
        chosen.shuffle(same)
    picked: list[Mutant] = []
    while len(picked) < count and any(by_kind.values()):
        picked += [same.pop() for same in by_kind.values() if same]
    return picked[:count]


def _of_computation(module: Module, computation: Computation) -> Iterator[Mutant]:
    for instruction in computation.instructions:
        for generate in GENERATORS:
            yield from generate(module, computation, instruction)


def _compare(_: Module, __: Computation, i: Instruction) -> Iterator[Mutant]:
    near = {"LT": "LE", "LE": "LT", "GT": "GE", "GE": "GT", "EQ": "NE", "NE": "EQ"}
    far = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT"}
    for table in (near, far):
        if i.opcode == "compare" and (new := table.get(i.direction)):
            yield Mutant(
                "compare direction",
                i.name,
                f"{i.direction} -> {new}",
                partial(Editable.set, instruction_id=i.id, number=DIRECTION, value=new.encode()),
            )


def _constant(module: Module, _: Computation, i: Instruction) -> Iterator[Mutant]:
    if i.opcode != "constant":
        return

    def changed(e: Editable, by: float) -> None:
        fields = e.instruction(i.id)
        at = next(n for n, f in enumerate(fields) if f.number == LITERAL)
        raw = fields[at].value
        assert isinstance(raw, bytes)
        literal = read_message(raw)
        for n, f in enumerate(literal):
            if f.number == F32S and isinstance(f.value, bytes):
                values = np.frombuffer(f.value, np.float32).copy()
                values[-1] = _other_float(float(values[-1]), by)
                literal[n] = Field(F32S, BYTES, values.tobytes())
            elif f.number == PREDS and isinstance(f.value, bytes):
                literal[n] = Field(PREDS, BYTES, bytes(1 - b for b in f.value))
            elif f.number == PREDS:
                literal[n] = Field(PREDS, VARINT, 1 - int(f.value))
            elif f.number == S32S and i.scalar is not None:
                literal[n] = packed(S32S, [i.scalar + int(by)])
        fields[at] = Field(LITERAL, BYTES, write_message(literal))

    bounds = {
        c.operand(c.root, 1).id
        for c in module.computations
        if c.root.opcode == "compare" and len(c.root.operands) == 2
    }
    for by in (1, -1) if i.shape.dtype != "pred" else (1,):
        kind = "loop bound" if i.id in bounds else "constant"
        yield Mutant(kind, i.name, f"{i.shape} by {by:+}", partial(changed, by=by))


def _other_float(value: float, by: float) -> float:
    if value == 0:
        return 0.5 * by
    if abs(value) == float("inf"):
        return 0.0 if by > 0 else 1.0
    if abs(value) > 1e38:
        return 0.0 if by > 0 else -1.0
    return value * (1 + 0.1 * by)


def _operand_order(_: Module, __: Computation, i: Instruction) -> Iterator[Mutant]:
    turnable = i.opcode in ("subtract", "divide", "concatenate") or i.direction in (
        "LT",
        "LE",
        "GE",
    )
    if not turnable or len(i.operands) != 2:
        return
    if i.operands[0] != i.operands[1]:
        turned = (i.operands[1], i.operands[0])
        yield Mutant("operand order", i.name, "turned", lambda e: e.set_operands(i.id, turned))


def _select(_: Module, __: Computation, i: Instruction) -> Iterator[Mutant]:
    if i.opcode == "select":
        test, x, y = i.operands
        yield Mutant(
            "select branches", i.name, "turned", lambda e: e.set_operands(i.id, (test, y, x))
        )


def _dropped_scatter(_: Module, computation: Computation, i: Instruction) -> Iterator[Mutant]:
    if i.opcode != "scatter":
        return

    def drop(e: Editable) -> None:
        for user in computation.instructions:
            if i.id in user.operands:
                e.set_operands(
                    user.id, tuple(i.operands[0] if o == i.id else o for o in user.operands)
                )

    yield Mutant("dropped scatter", i.name, "its operand in its place", drop)


def _slice(_: Module, computation: Computation, i: Instruction) -> Iterator[Mutant]:
    if i.opcode != "slice":
        return
    size = computation.operand(i, 0).shape.dims

    def shift(e: Editable, axis: int, by: int) -> None:
        fields = e.instruction(i.id)
        at = [n for n, f in enumerate(fields) if f.number == SLICE][axis]
        raw = fields[at].value
        assert isinstance(raw, bytes)
        old = {f.number: f.value for f in read_message(raw)}
        start, limit = (int(old.get(k, 0)) + by for k in (SLICE_START, SLICE_LIMIT))
        new = [Field(SLICE_START, VARINT, start), Field(SLICE_LIMIT, VARINT, limit)]
        fields[at] = Field(SLICE, BYTES, write_message([*new, Field(3, VARINT, 1)]))

    for axis, (whole, part) in enumerate(zip(size, i.shape.dims, strict=True)):
        if part == whole:
            continue
        # Where it starts is not in the text of a module; a shift that leaves it is refused by XLA.
        for by in (1, -1):
            yield Mutant(
                "slice bounds",
                i.name,
                f"axis {axis} by {by:+}",
                partial(shift, axis=axis, by=by),
            )


def _reduce(module: Module, _: Computation, i: Instruction) -> Iterator[Mutant]:
    if i.opcode != "reduce":
        return
    reducer = module.by_id[i.called[0]].root
    others = {"add": "maximum", "maximum": "add", "or": "and"}
    new = others[reducer.opcode]
    yield Mutant(
        "reduce kind",
        i.name,
        f"{reducer.opcode} -> {new}",
        lambda e: e.set(reducer.id, canonical.OPCODE, new.encode()),
    )


def _opcode(_: Module, computation: Computation, i: Instruction) -> Iterator[Mutant]:
    others = {
        **{"add": "subtract", "subtract": "add", "multiply": "add", "divide": "multiply"},
        **{"sine": "cosine", "cosine": "sine", "exponential": "negate", "negate": "exponential"},
        **{"rsqrt": "exponential", "maximum": "add", "and": "or", "or": "and"},
    }
    if (new := others.get(i.opcode)) and len(computation.instructions) > 3:
        yield Mutant(
            "opcode",
            i.name,
            f"{i.opcode} -> {new}",
            lambda e: e.set(i.id, canonical.OPCODE, new.encode()),
        )


def _wiring(_: Module, computation: Computation, i: Instruction) -> Iterator[Mutant]:
    """One operand replaced by another value of its type that stands before."""
    kinds = {"gather": "gather index", "dot": "dot operand", "tuple": "tuple part"}
    for place, operand in enumerate(i.operands):
        if i.opcode == "gather" and place != 1:
            continue
        there = computation.by_id[operand]
        before = [
            other
            for other in computation.instructions[: computation.instructions.index(i)]
            if other.id != operand
            and (other.shape.dtype, other.shape.dims) == (there.shape.dtype, there.shape.dims)
            and not other.shape.is_tuple
        ]
        if i.opcode == "gather":
            before += _reshapes_of_others(computation, there, i)
        for other in (
            {before[0].id: before[0], before[-1].id: before[-1]}.values() if before else ()
        ):
            new = tuple(other.id if n == place else o for n, o in enumerate(i.operands))
            yield Mutant(
                kinds.get(i.opcode, "operand"),
                i.name,
                f"operand {place}: {there.name} -> {other.name}",
                partial(Editable.set_operands, instruction_id=i.id, operands=new),
            )


def _reshapes_of_others(
    computation: Computation, there: Instruction, user: Instruction
) -> list[Instruction]:
    at = computation.instructions.index(user)
    return [
        other
        for other in computation.instructions[:at]
        if other.opcode == "reshape"
        and other.id != there.id
        and (other.shape.dtype, other.shape.dims) == (there.shape.dtype, there.shape.dims)
    ]


def _dimensions(_: Module, computation: Computation, i: Instruction) -> Iterator[Mutant]:
    """Two axes of a transpose or broadcast exchanged, where the shapes still agree."""
    if i.opcode not in ("transpose", "broadcast"):
        return
    size = computation.operand(i, 0).shape.dims
    kind = "transpose permutation" if i.opcode == "transpose" else "broadcast dimensions"
    for a in range(len(i.dimensions)):
        for b in range(a + 1, len(i.dimensions)):
            turned = list(i.dimensions)
            turned[a], turned[b] = turned[b], turned[a]
            if i.opcode == "transpose":
                fits = size[i.dimensions[a]] == size[i.dimensions[b]]
            else:
                fits = False  # XLA wants them to ascend.
            if fits and size[i.dimensions[a]] > 1:
                yield Mutant(
                    kind,
                    i.name,
                    f"axes {a} and {b}",
                    partial(Editable.set_dimensions, instruction_id=i.id, dimensions=tuple(turned)),
                )
    if i.opcode != "broadcast":
        return
    for n, axis in enumerate(i.dimensions):
        for other in range(len(i.shape.dims)):
            fits = other not in i.dimensions and i.shape.dims[other] == size[n]
            moved = tuple(other if k == n else d for k, d in enumerate(i.dimensions))
            if fits and list(moved) == sorted(moved):
                yield Mutant(
                    kind,
                    i.name,
                    f"axis {axis} -> {other}",
                    partial(Editable.set_dimensions, instruction_id=i.id, dimensions=moved),
                )


def _iota(_: Module, __: Computation, i: Instruction) -> Iterator[Mutant]:
    """Another axis of the same size: ours have one axis, so there are none."""
    if i.opcode == "iota":
        (axis,) = i.dimensions
        for other, size in enumerate(i.shape.dims):
            if other != axis and size == i.shape.dims[axis]:
                yield Mutant(
                    "iota dimension",
                    i.name,
                    f"{axis} -> {other}",
                    partial(Editable.set_dimensions, instruction_id=i.id, dimensions=(other,)),
                )


GENERATORS = (
    _compare,
    _constant,
    _operand_order,
    _select,
    _dropped_scatter,
    _slice,
    _reduce,
    _opcode,
    _wiring,
    _dimensions,
    _iota,
)


def _of_aliases(module: Module) -> Iterator[Mutant]:
    def parameter_of(entry: Field) -> Field:
        assert isinstance(entry.value, bytes)
        return next(f for f in read_message(entry.value) if f.number == 2)

    def with_parameter(entry: Field, parameter: Field) -> Field:
        assert isinstance(entry.value, bytes)
        fields = [parameter if f.number == 2 else f for f in read_message(entry.value)]
        return Field(entry.number, BYTES, write_message(fields))

    def swap(entries: list[Field]) -> list[Field]:
        first, second, *rest = entries
        return [
            with_parameter(first, parameter_of(second)),
            with_parameter(second, parameter_of(first)),
            *rest,
        ]

    def without(entries: list[Field], n: int) -> list[Field]:
        return entries[:n] + entries[n + 1 :]

    yield Mutant("alias", "module", "two swapped", lambda e: e.set_aliases(swap))
    for n in range(len(module.aliases)):
        yield Mutant(
            "alias",
            "module",
            f"number {n} dropped",
            partial(Editable.set_aliases, change=partial(without, n=n)),
        )


SHIFT = (
    "the maximum that a softmax subtracts may be any number near the scores: it cancels. (Scores "
    "would have to be below -87 for a maximum of 0 to underflow.)"
)
SHIFTED = "a softmax is the same when all visible scores are larger by one number"
FIRST = (
    "what the running sum starts from is multiplied by exp(-3.4e38 - maximum) = 0 when the first "
    "visible key comes"
)
MASKED_KEY = "a masked key's score is replaced by -inf, whatever finite number the key is"
NO_EMPTY_ROW = "for rows that see no key at all, and every row sees at least its own"

EXPLAINED = (
    ("constant", "constant > select[1] > add[1] > compare[0]", SHIFTED),
    ("constant", "constant > reduce[1] > subtract[1] > exponential", SHIFT),
    ("constant", "constant > reduce[1] > maximum[1] > subtract[1]", SHIFT),
    ("constant", "constant > select[2] > reduce[0] > maximum[1]", SHIFT),
    ("constant", "constant > tuple[1] > while[0]", SHIFT),
    ("tuple part", "tuple > while[0] operand 1:", SHIFT),
    ("constant", "constant > tuple[2] > while[0]", FIRST),
    ("constant", "constant > tuple[3] > while[0]", FIRST),
    ("tuple part", "tuple > while[0] operand 2:", FIRST),
    ("tuple part", "tuple > while[0] operand 3:", FIRST),
    ("constant", "constant > select[2] > multiply[0] > dot[1]", MASKED_KEY),
    (
        "constant",
        "constant > select[2] > dot[1] > select[1] > reduce",
        "a masked key's score is replaced, and its value's weight is 0, whatever finite numbers "
        "they are",
    ),
    ("constant", "constant > compare[1] > not[0] > reduce[0] > select[0]", NO_EMPTY_ROW),
    ("constant", "constant > reduce[1] > select[0] > dot[0]", NO_EMPTY_ROW),
    ("constant", "constant > select[2] > dot[0]", NO_EMPTY_ROW),
    (
        "broadcast dimensions",
        "broadcast > select[0] > reduce[0]",
        "a decode's mask is the same for all heads of a sequence, and both axes are heads",
    ),
    ("operand", "select > dot[1] > select[1] > reduce[0] operand 2:", MASKED_KEY),
    ("operand", "broadcast > select[2] > multiply[0] > dot[1] operand 0: constant", MASKED_KEY),
    ("operand", "broadcast > select[1] > add[1] > compare[0] operand 0: constant", SHIFTED),
    ("operand", "broadcast > select[2] > dot[0] operand 0: constant", NO_EMPTY_ROW),
    ("operand", "select > dot[0] operand 2:", NO_EMPTY_ROW),
    ("operand", "reduce > maximum[1] > subtract[1] > exponential[0]", SHIFT),
    (
        "operand",
        "select > reduce[0] > add[1] > tuple[2] operand 2:",
        "exp(-3.4e38 - maximum) is 0 of itself once a key was visible, and what came before is "
        "multiplied by 0 then",
    ),
)
"""By kind and the start of the role: why a mutant that no case notices computes the same."""


def explained(mutant: Mutant, where: str) -> str | None:
    full = where.split(" > ")
    for kind, start, why in EXPLAINED:
        path, _, operand = start.partition(" operand ")
        wanted = path.split(" > ")
        fits = (
            mutant.kind == kind
            and [
                step if "[" in want else step.split("[")[0]
                for want, step in zip(wanted, full, strict=False)
            ]
            == wanted
        )
        if fits and (not operand or mutant.change.startswith(f"operand {operand}")):
            return why
    return None


@dataclass(frozen=True)
class Judged:
    program: str
    mutant: Mutant
    verdict: Verdict
    by: str
    """The case or rule that noticed, or why it is the same program."""
    amount: float = 0.0


class Bench:
    """One program, its right module, and what eager torch says to all cases."""

    def __init__(self, name: str, program: BucketProgram) -> None:
        self.name = name
        self.program = program
        self.payload = lower_quietly(program)
        self.reference = Reference(program, Weights(program).float32, seed=0)
        self.expected: list[Expected] = list(self.reference)
        self._optimised = self._runner(self.payload).optimised_text()
        self.module = read_module(self.payload)
        self._live = _live(self.module)

    def judge(self, mutant: Mutant) -> Judged:
        payload = mutant.apply(self.payload)
        assert payload != self.payload, mutant
        module = read_module(payload)
        errors = [f for f in lint(module, self.program.signature) if f.severity == "error"]
        if errors:
            return Judged(self.name, mutant, "lint", errors[0].rule)
        try:
            run = self._runner(payload)
        except Exception as err:
            return Judged(self.name, mutant, "refused", str(err).splitlines()[0][:80])
        largest = 0.0
        for expected in self.expected:
            result = compare(expected, *run(expected))
            if not result.ok:
                return Judged(self.name, mutant, "cases", result.name, result.difference)
            largest = max(largest, result.difference)
        if mutant.instruction not in self._live and mutant.instruction != "module":
            return Judged(self.name, mutant, "equivalent", "nothing uses the instruction", largest)
        if run.optimised_text() == self._optimised:
            return Judged(self.name, mutant, "equivalent", "XLA makes the same code of it", largest)
        if _same_value(self.module, module, mutant.instruction):
            return Judged(
                self.name, mutant, "equivalent", "the same value under another name", largest
            )
        where = role(self.module, mutant.instruction)
        if (why := explained(mutant, where)) is not None:
            return Judged(self.name, mutant, "equivalent", why, largest)
        return Judged(self.name, mutant, "survived", where, largest)

    def _runner(self, payload: bytes) -> Runner:
        return Runner(payload, self.program, self.reference.weights, quick=True)


def _same_value(module: Module, changed: Module, name: str) -> bool:
    """Whether the instruction only reads the same value under another name.

    That is: the values before and after come from one instruction through reshapes and broadcasts
    that add no elements.
    """
    for computation, other in zip(module.computations, changed.computations, strict=True):
        before = next((i for i in computation.instructions if i.name == name), None)
        if before is None:
            continue
        after = other.by_id[before.id]
        if replace(after, operands=before.operands) != before or after == before:
            return False
        return all(
            _source(computation, a) == _source(computation, b)
            for a, b in zip(before.operands, after.operands, strict=True)
        )
    return False


def _source(computation: Computation, at: int) -> tuple[int, tuple[int, ...]]:
    """Where a value comes from, and its shape without axes of 1."""
    shape = tuple(n for n in computation.by_id[at].shape.dims if n != 1)
    instruction = computation.by_id[at]
    while instruction.opcode in ("reshape", "broadcast"):
        before = computation.operand(instruction, 0)
        if before.shape.num_elements != instruction.shape.num_elements:
            break
        instruction = before
    return instruction.id, shape


def role(module: Module, name: str) -> str:
    """What an instruction is for: the opcodes that its value goes through, with operand numbers.

    Reshapes, transposes and broadcasts are left out, and so is what comes after four steps. Ids are
    not part of it, so a change of a program elsewhere leaves it as it is.
    """
    for computation in module.computations:
        at = next((i for i in computation.instructions if i.name == name), None)
        if at is not None:
            return _role(computation, at)
    return name


def _role(computation: Computation, at: Instruction) -> str:
    steps = [at.opcode]
    while len(steps) < 5:
        user = next((i for i in computation.instructions if at.id in i.operands), None)
        if user is None:
            break
        if user.opcode not in ("reshape", "transpose", "broadcast"):
            steps.append(f"{user.opcode}[{user.operands.index(at.id)}]")
        at = user
    return " > ".join(steps)


def _live(module: Module) -> set[str]:
    """Names of the instructions that their computation's result depends on."""
    names = set()
    for computation in module.computations:
        wanted = {computation.root_id}
        for instruction in reversed(computation.instructions):
            if instruction.id in wanted:
                wanted.update(instruction.operands)
                names.add(instruction.name)
    return names
