"""The canonical bytes of an HloModuleProto: equal for equal graphs, in any process and order.

What XLA writes has ids of 64 bits, a module id counted per process, and source lines. Neuron's
tools read ids as 32 bits (pytorch/xla#9685), and a cache key must not hold the rest. So ids are
counted from 1 through the module, names are made from them, metadata goes, and the KV cache's
aliases are put in from the signature. Source of the field numbers: xla/service/hlo.proto and
xla/xla_data.proto.
"""

from collections.abc import Iterator, Mapping

from nxbucket.compile.hlo.wire import (
    BYTES,
    VARINT,
    Field,
    packed,
    read_message,
    read_packed,
    write_message,
)
from nxbucket.compile.signature import ProgramSignature

MODULE_NAME = b"nxbucket"

# HloModuleProto
NAME, ENTRY_NAME, COMPUTATION, PROGRAM_SHAPE, MODULE_ID, ENTRY_ID = 1, 2, 3, 4, 5, 6
ALIAS, STACK_FRAMES, BUFFER_DONOR, FRONTEND_ATTRIBUTES = 8, 17, 18, 19
# HloComputationProto
COMPUTATION_NAME, INSTRUCTION, COMPUTATION_ID, ROOT_ID = 1, 2, 5, 6
# HloInstructionProto
INSTRUCTION_NAME, OPCODE, METADATA = 1, 2, 7
INSTRUCTION_ID, OPERAND_IDS, CONTROL_IDS, CALLED_IDS = 35, 36, 37, 38
# ProgramShapeProto
PARAMETER_NAME = 3

MODULE_FIELDS = {*range(NAME, ENTRY_ID + 1), STACK_FRAMES}
EMPTY_MODULE_FIELDS = {ALIAS, BUFFER_DONOR, FRONTEND_ATTRIBUTES}
COMPUTATION_FIELDS = {COMPUTATION_NAME, INSTRUCTION, 4, COMPUTATION_ID, ROOT_ID}
PLAIN_INSTRUCTION_FIELDS = {3, 8, 9, 13, 14, 17, 30, 33, 34, 48, 51, 63, 72}
"""Shape, literal, parameter number, tuple index, dimensions, slices, dot, gather (two), scatter,
precision, comparison (two): they hold no id of this module."""
EMPTY_INSTRUCTION_FIELDS = {68, 82}
"""Frontend attributes and statistics, of which XLA writes empty ones."""

MUST_ALIAS = 2
"""xla::Kind::MUST_ALIAS: the output is the parameter's buffer, not maybe so."""


class UnknownFieldError(ValueError):
    """XLA wrote a field that may hold ids: renumbering could break it without a sign."""


def canonical_module(raw: bytes, signature: ProgramSignature) -> bytes:
    """`raw` as XLA serialises a module; its parameters and outputs are `signature`'s, in order."""
    module = read_message(raw)
    module = [f for f in module if f.value or f.number not in EMPTY_MODULE_FIELDS]
    _check({f.number for f in module}, MODULE_FIELDS, "HloModuleProto")
    computations = [read_message(_bytes(f)) for f in module if f.number == COMPUTATION]
    computation_ids = {_int(c, COMPUTATION_ID): i for i, c in enumerate(computations, 1)}
    instruction_ids = {
        _int(read_message(_bytes(f)), INSTRUCTION_ID): i
        for i, f in enumerate((f for c in computations for f in c if f.number == INSTRUCTION), 1)
    }
    entry = computation_ids[_int(module, ENTRY_ID)]
    written = iter(
        write_message(_computation(c, i, entry, computation_ids, instruction_ids))
        for i, c in enumerate(computations, 1)
    )
    return write_message(_module(module, written, entry, signature))


def _module(
    module: list[Field], computations: Iterator[bytes], entry: int, signature: ProgramSignature
) -> Iterator[Field]:
    for field in module:
        match field.number:
            case 1:
                yield Field(NAME, BYTES, MODULE_NAME)
            case 2:
                yield Field(ENTRY_NAME, BYTES, b"main")
            case 3:
                yield Field(COMPUTATION, BYTES, next(computations))
            case 4:
                yield Field(PROGRAM_SHAPE, BYTES, _program_shape(_bytes(field), signature))
            case 6:
                yield Field(ENTRY_ID, VARINT, entry)
            case 5 | 17:
                pass  # A counter of the process; source lines.
    yield Field(ALIAS, BYTES, _aliases(signature))


def _computation(
    computation: list[Field],
    number: int,
    entry: int,
    computation_ids: Mapping[int, int],
    instruction_ids: Mapping[int, int],
) -> Iterator[Field]:
    _check({f.number for f in computation}, COMPUTATION_FIELDS, "HloComputationProto")
    for field in computation:
        match field.number:
            case 1:
                name = "main" if number == entry else f"computation.{number}"
                yield Field(COMPUTATION_NAME, BYTES, name.encode())
            case 2:
                fields = _instruction(read_message(_bytes(field)), computation_ids, instruction_ids)
                yield Field(INSTRUCTION, BYTES, write_message(fields))
            case 5:
                yield Field(COMPUTATION_ID, VARINT, number)
            case 6:
                yield Field(ROOT_ID, VARINT, instruction_ids[_value(field)])
            case _:
                yield field


def _instruction(
    instruction: list[Field],
    computation_ids: Mapping[int, int],
    instruction_ids: Mapping[int, int],
) -> Iterator[Field]:
    own_id = instruction_ids[_int(instruction, INSTRUCTION_ID)]
    opcode = next(_bytes(f) for f in instruction if f.number == OPCODE)
    for field in instruction:
        match field.number:
            case 1:
                yield Field(INSTRUCTION_NAME, BYTES, opcode + b".%d" % own_id)
            case 35:
                yield Field(INSTRUCTION_ID, VARINT, own_id)
            case 36 | 37:
                yield packed(field.number, (instruction_ids[i] for i in _ids(field)))
            case 38:
                yield packed(CALLED_IDS, (computation_ids[i] for i in _ids(field)))
            case 7:
                pass  # Source lines.
            case 2:
                yield field
            case number if number in EMPTY_INSTRUCTION_FIELDS and not field.value:
                pass
            case _:
                _check({field.number}, PLAIN_INSTRUCTION_FIELDS, opcode.decode())
                yield field


def _program_shape(raw: bytes, signature: ProgramSignature) -> bytes:
    """Parameters under the signature's names, which a person reading the module looks for."""
    fields = [f for f in read_message(raw) if f.number != PARAMETER_NAME]
    names = [Field(PARAMETER_NAME, BYTES, t.name.encode()) for t in signature.inputs]
    return write_message([*fields, *names])


def _aliases(signature: ProgramSignature) -> bytes:
    """HloInputOutputAliasProto: each updated tensor is its input's own buffer."""
    positions = {t.name: i for i, t in enumerate(signature.inputs)}
    entries = [
        Field(
            1,
            BYTES,
            write_message(
                [packed(1, [i]), Field(2, VARINT, positions[t.alias]), Field(4, VARINT, MUST_ALIAS)]
            ),
        )
        for i, t in enumerate(signature.outputs)
        if t.alias is not None
    ]
    return write_message(entries)


def _check(numbers: set[int], known: set[int], where: str) -> None:
    if odd := sorted(numbers - known):
        raise UnknownFieldError(
            f"{where} has field {odd[0]}, which this lowering does not know; jaxlib is pinned "
            "because of this"
        )


def _ids(field: Field) -> list[int]:
    return [field.value] if isinstance(field.value, int) else read_packed(field.value)


def _int(message: list[Field], number: int) -> int:
    return next(_value(f) for f in message if f.number == number)


def _value(field: Field) -> int:
    assert isinstance(field.value, int)
    return field.value


def _bytes(field: Field) -> bytes:
    assert isinstance(field.value, bytes)
    return field.value
