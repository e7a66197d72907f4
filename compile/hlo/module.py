"""An HloModuleProto, read: computations, instructions, shapes, aliases. No jaxlib, no torch.

So `inspect` answers at once, and bytes from anywhere can be looked at: what XLA's own reader would
abort the process for is a HloError here. Source of the field numbers: xla/service/hlo.proto and
xla/xla_data.proto.

What holds of a Module, because `read_module` checks it: ids are unique, an operand stands before
its user in the same computation, a callee before its caller, numbers of dimensions and operands are
what the opcodes that are looked into need. So every walk over it ends.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nxbucket.compile.hlo import canonical
from nxbucket.compile.hlo.wire import BYTES, VARINT, WireError, iter_fields, read_packed
from nxbucket.toolkit.errors import HloError

DTYPES = {
    **{1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64"},
    **{10: "f16", 11: "f32", 12: "f64", 13: "tuple", 14: "opaque", 15: "c64", 16: "bf16"},
    **{17: "token", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4"},
    **{23: "f8e4m3b11fnuz", 24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 26: "s2", 27: "u2"},
    **{28: "f8e4m3", 29: "f8e3m4", 30: "s1", 31: "u1", 32: "f4e2m1fn", 33: "f8e8m0fnu"},
}
"""xla.PrimitiveType."""

BITS = {
    **{"pred": 8, "tuple": 0, "opaque": 0, "token": 0, "c64": 64, "c128": 128},
    **{name: 8 for name in DTYPES.values() if name.startswith("f8")},
    **{f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{"f4e2m1fn": 4, "f16": 16, "bf16": 16, "f32": 32, "f64": 64},
}

MAX_BYTES = 256 << 20
MAX_RANK = 32
MAX_ELEMENTS = 1 << 62
MAX_TUPLE_DEPTH = 8
NUM_OPERANDS = {"dot": 2, "gather": 2, "scatter": 3, "reshape": 1, "get-tuple-element": 1}
NUM_OPERANDS |= {"while": 1, "iota": 0, "constant": 0, "compare": 2, "broadcast": 1, "convert": 1}
NUM_CALLED = {"while": 2, "scatter": 1, "reduce": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    """An array's, or a tuple's, whose parts are `parts`. `dims` are static unless `dynamic`."""

    dtype: str
    dims: tuple[int, ...] = ()
    parts: tuple["Shape", ...] = ()
    dynamic: bool = False
    row_major: bool = True

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        if self.parts:
            return sum(part.num_bytes for part in self.parts)
        return -(-self.num_elements * BITS[self.dtype] // 8)

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    def arrays(self) -> Iterator["Shape"]:
        """Itself, or a tuple's parts, and theirs."""
        if not self.is_tuple:
            yield self
        for part in self.parts:
            yield from part.arrays()

    def __str__(self) -> str:
        if self.is_tuple:
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class Instruction:
    """`numbers` holds a dot's, gather's or scatter's dimension numbers, by field number."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    parameter: int = 0
    tuple_index: int = 0
    dimensions: tuple[int, ...] = ()
    numbers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    direction: str = ""
    """LT, GE, … of a compare."""
    custom_call_target: str = ""
    scalar: int | None = None
    """The value of an integer constant of one element."""
    literal_bytes: int = 0


@dataclass(frozen=True)
class Computation:
    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root_id: int

    @cached_property
    def by_id(self) -> dict[int, Instruction]:
        return {i.id: i for i in self.instructions}

    @property
    def root(self) -> Instruction:
        return self.by_id[self.root_id]

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.by_id[instruction.operands[index]]

    def parameter(self, number: int) -> Instruction | None:
        found = (i for i in self.instructions if i.opcode == "parameter" and i.parameter == number)
        return next(found, None)


@dataclass(frozen=True)
class Alias:
    """Output `output` is the buffer of entry parameter `parameter`."""

    output: int
    parameter: int
    must: bool


@dataclass(frozen=True)
class Parameter:
    number: int
    name: str
    shape: Shape


@dataclass(frozen=True)
class Module:
    name: str
    computations: tuple[Computation, ...]
    entry_id: int
    parameters: tuple[Parameter, ...]
    outputs: tuple[Shape, ...]
    aliases: tuple[Alias, ...]

    @cached_property
    def by_id(self) -> dict[int, Computation]:
        return {c.id: c for c in self.computations}

    @property
    def entry(self) -> Computation:
        return self.by_id[self.entry_id]

    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations:
            yield from computation.instructions

    @property
    def id_range(self) -> tuple[int, int]:
        ids = [i.id for i in self.instructions()]
        return min(ids), max(ids)


def looks_like_hlo(payload: bytes) -> bool:
    """Whether it starts as a module does, with its name: for a command that takes any file."""
    try:
        first = next(iter_fields(payload[: 1 << 16]), None)
    except WireError:
        return False
    return first is not None and (first.number, first.wire_type) == (canonical.NAME, BYTES)


def read_module(payload: bytes) -> Module:
    """Raises HloError, with a sentence, for anything that is no complete HloModuleProto."""
    if len(payload) > MAX_BYTES:
        raise _wrong(f"{len(payload)} bytes are more than the {MAX_BYTES} that a module may have")
    try:
        return _module(payload)
    except WireError as err:
        raise _wrong(str(err)) from err
    except UnicodeDecodeError as err:
        raise _wrong("a name that is no text") from err


def _wrong(reason: str) -> HloError:
    return HloError(
        f"not an HloModuleProto: {reason}",
        hint="a module is written by `nxbucket compile --emulate`, whole; this file is something "
        "else, or was cut",
    )


def _module(payload: bytes) -> Module:
    name, entry_id = "", 0
    program_shape = aliases = b""
    computations: list[Computation] = []
    callable_ids: set[int] = set()
    seen: set[int] = set()
    for number, value in _fields(payload, "the module"):
        if number == canonical.NAME:
            name = _text(value)
        elif number == canonical.COMPUTATION:
            found = _computation(_raw(value), callable_ids, seen)
            if found.id in callable_ids:
                raise _wrong(f"two computations have the id {found.id}")
            callable_ids.add(found.id)
            computations.append(found)
        elif number == canonical.PROGRAM_SHAPE:
            program_shape = _raw(value)
        elif number == canonical.ENTRY_ID:
            entry_id = _number(value)
        elif number == canonical.ALIAS:
            aliases = _raw(value)
    entry = next((c for c in computations if c.id == entry_id), None)
    if entry is None:
        raise _wrong(
            f"computation {entry_id}, where the program starts, is not in it"
            if computations
            else "it has no computations"
        )
    parameters = _parameters(entry, program_shape)
    root = entry.root.shape
    outputs = root.parts if root.is_tuple else (root,)
    return Module(
        name, tuple(computations), entry_id, parameters, outputs, tuple(_aliases(aliases))
    )


def _computation(payload: bytes, callable_ids: set[int], seen: set[int]) -> Computation:
    own_id = root_id = 0
    name = ""
    instructions: list[Instruction] = []
    local: dict[int, Instruction] = {}
    for number, value in _fields(payload, "a computation"):
        if number == canonical.COMPUTATION_NAME:
            name = _text(value)
        elif number == canonical.INSTRUCTION:
            found = _instruction(_raw(value))
            if found.id in seen:
                raise _wrong(f"two instructions have the id {found.id}")
            _check_references(found, local, callable_ids)
            seen.add(found.id)
            local[found.id] = found
            instructions.append(found)
        elif number == canonical.COMPUTATION_ID:
            own_id = _number(value)
        elif number == canonical.ROOT_ID:
            root_id = _number(value)
    if root_id not in local:
        raise _wrong(
            f"the result of computation {name or own_id}, instruction {root_id}, is not there"
        )
    return Computation(own_id, name, tuple(instructions), root_id)


def _check_references(
    found: Instruction, before: Mapping[int, Instruction], callable_ids: set[int]
) -> None:
    for operand in found.operands:
        if operand not in before:
            raise _wrong(f"{found.name} uses instruction {operand}, which does not stand before it")
    for callee in found.called:
        if callee not in callable_ids:
            raise _wrong(f"{found.name} calls computation {callee}, which does not stand before it")
    wanted = NUM_OPERANDS.get(found.opcode)
    if wanted is not None and len(found.operands) != wanted:
        raise _wrong(f"{found.name} has {len(found.operands)} operands, not {wanted}")
    wanted = NUM_CALLED.get(found.opcode)
    if wanted is not None and len(found.called) != wanted:
        raise _wrong(f"{found.name} calls {len(found.called)} computations, not {wanted}")
    if found.opcode == "get-tuple-element":
        parts = before[found.operands[0]].shape.parts
        if not 0 <= found.tuple_index < len(parts):
            raise _wrong(f"{found.name} takes part {found.tuple_index} of {len(parts)}")
    if found.opcode == "dot":
        for side, fields_of_side in ((0, (1, 3)), (1, (2, 4))):
            rank = len(before[found.operands[side]].shape.dims)
            for number in fields_of_side:
                if any(not 0 <= d < rank for d in found.numbers.get(number, ())):
                    raise _wrong(f"{found.name} names a dimension that its operand does not have")


def _instruction(payload: bytes) -> Instruction:
    kept: dict[str, Any] = {"id": 0, "name": "", "opcode": "", "shape": None}
    lists: dict[str, list[int]] = {"operands": [], "called": [], "dimensions": []}
    repeated = {canonical.OPERAND_IDS: "operands", canonical.CALLED_IDS: "called", 14: "dimensions"}
    single = {canonical.INSTRUCTION_ID: "id", 9: "parameter", 13: "tuple_index"}
    texts = {canonical.INSTRUCTION_NAME: "name", canonical.OPCODE: "opcode"}
    texts |= {28: "custom_call_target", 63: "direction"}
    literal = b""
    for number, value in _fields(payload, "an instruction"):
        if number in repeated:
            lists[repeated[number]] += _numbers(value)
        elif number in single:
            kept[single[number]] = _number(value)
        elif number in texts:
            kept[texts[number]] = _text(value)
        elif number == 3:
            kept["shape"] = _shape(_raw(value))
        elif number == 8:
            literal = _raw(value)
        elif number in (30, 33, 48):
            kept["numbers"] = _dimension_numbers(_raw(value))
    if not kept["opcode"] or kept["shape"] is None:
        raise _wrong(f"instruction {kept['id']} has no opcode or no shape")
    kept["literal_bytes"] = len(literal)
    kept["scalar"] = _scalar(literal, kept["shape"]) if kept["opcode"] == "constant" else None
    kept |= {key: tuple(values) for key, values in lists.items()}
    return Instruction(**kept)


def _dimension_numbers(payload: bytes) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for number, value in _fields(payload, "dimension numbers"):
        found[number] = (*found.get(number, ()), *_numbers(value))
    return found


def _scalar(literal: bytes, shape: Shape) -> int | None:
    """LiteralProto: s32s are field 4, s64s 5, packed; absent when zero is all they say."""
    if shape.num_elements != 1 or shape.dtype not in ("s32", "s64", "u32"):
        return None
    for number, value in _fields(literal, "a constant"):
        if number in (4, 5, 6) and (values := _numbers(value)):
            return values[0]
    return None


def _shape(payload: bytes, depth: int = 0) -> Shape:
    if depth > MAX_TUPLE_DEPTH:
        raise _wrong(f"tuples of tuples more than {MAX_TUPLE_DEPTH} deep")
    dtype, dims = "", []
    parts: list[Shape] = []
    dynamic, row_major = False, True
    for number, value in _fields(payload, "a shape"):
        if number == 2:
            dtype = DTYPES.get(_number(value), "")
        elif number == 3:
            dims += _numbers(value)
        elif number == 4:
            parts.append(_shape(_raw(value), depth + 1))
        elif number == 5:
            row_major = _is_row_major(_raw(value))
        elif number == 6:
            dynamic = dynamic or any(_numbers(value))
    if not dtype:
        raise _wrong("a shape without an element type that is known")
    if len(dims) > MAX_RANK:
        raise _wrong(f"a shape of {len(dims)} dimensions; {MAX_RANK} are the most")
    # An unbounded dimension is written as the smallest int64.
    dynamic = dynamic or any(d < 0 for d in dims)
    dims = [max(d, 0) for d in dims]
    if math.prod(dims) > MAX_ELEMENTS:
        raise _wrong(f"a shape of more than {MAX_ELEMENTS} elements")
    return Shape(dtype, tuple(dims), tuple(parts), dynamic, row_major)


def _is_row_major(layout: bytes) -> bool:
    """LayoutProto's minor_to_major counts down; a shape may come without one."""
    order = [
        n for number, value in _fields(layout, "a layout") if number == 1 for n in _numbers(value)
    ]
    return order == sorted(order, reverse=True)


def _parameters(entry: Computation, program_shape: bytes) -> tuple[Parameter, ...]:
    names = [
        _text(value)
        for number, value in _fields(program_shape, "the program's shape")
        if number == canonical.PARAMETER_NAME
    ]
    found = {i.parameter: i.shape for i in entry.instructions if i.opcode == "parameter"}
    count = sum(i.opcode == "parameter" for i in entry.instructions)
    if sorted(found) != list(range(count)):
        raise _wrong("the program's parameters are not numbered from 0 on, each once")
    if names and len(names) != count:
        raise _wrong(f"{len(names)} names for {count} parameters")
    return tuple(
        Parameter(i, names[i] if names else f"parameter {i}", found[i]) for i in range(count)
    )


def _aliases(payload: bytes) -> Iterator[Alias]:
    for number, value in _fields(payload, "the aliases"):
        if number != 1:
            continue
        output: list[int] = []
        parameter = kind = 0
        for inner, inner_value in _fields(_raw(value), "an alias"):
            if inner == 1:
                output += _numbers(inner_value)
            elif inner == 2:
                parameter = _number(inner_value)
            elif inner == 4:
                kind = _number(inner_value)
        if len(output) > 1:
            raise _wrong("an alias of a part of an output")
        yield Alias(output[0] if output else 0, parameter, kind == canonical.MUST_ALIAS)


def _fields(payload: bytes, where: str) -> Iterator[tuple[int, int | bytes]]:
    try:
        for number, wire_type, value in iter_fields(payload):
            if wire_type in (VARINT, BYTES):
                yield number, value
    except WireError as err:
        raise _wrong(f"{where}: {err}") from err


def _raw(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise _wrong("a number where a message is wanted")
    return value


def _text(value: int | bytes) -> str:
    text = _raw(value).decode()
    return text if text.isprintable() else ascii(text)[1:-1]


def _number(value: int | bytes) -> int:
    """An int64."""
    if not isinstance(value, int):
        raise _wrong("a message where a number is wanted")
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _numbers(value: int | bytes) -> list[int]:
    """A repeated int64, packed or one at a time."""
    return [_number(v) for v in ([value] if isinstance(value, int) else read_packed(value))]
