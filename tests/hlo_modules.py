"""Small modules written by hand, right and wrong, and the modules of small programs."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from null_compiler import ARCHITECTURE, a_program

from nxbucket.compile.hlo import canonical
from nxbucket.compile.hlo.module import DTYPES
from nxbucket.compile.hlo.wire import BYTES, VARINT, Field, packed, write_message
from nxbucket.compile.program import BucketProgram

TYPES = {name: number for number, name in DTYPES.items()}

WINDOWED = replace(ARCHITECTURE, family="mistral", sliding_window=40, windowed_layers=(0,))
FAMILIES = {
    "llama": ARCHITECTURE,
    "mistral": WINDOWED,
    "qwen2": replace(ARCHITECTURE, family="qwen2", qkv_bias=True),
    "qwen3": replace(ARCHITECTURE, family="qwen3", qk_norm=True),
}


@functools.cache
def lowered(program: BucketProgram) -> bytes:
    from nxbucket.compile.hlo.verify import lower_quietly

    return lower_quietly(program)


SEGMENTED = a_program(
    architecture=WINDOWED, block_size=8, max_blocks=8, num_kv_blocks=17, kv_segment_size=16
)


def text(number: int, value: str) -> Field:
    return Field(number, BYTES, value.encode())


def shape(
    dtype: str = "f32",
    *dims: int,
    parts: Sequence[bytes] = (),
    minor_to_major: Sequence[int] = (),
    dynamic: bool = False,
) -> bytes:
    layout = Field(5, BYTES, write_message([packed(1, minor_to_major)]))
    return write_message(
        [
            Field(2, VARINT, TYPES[dtype]),
            packed(3, dims),
            *(Field(4, BYTES, part) for part in parts),
            *([layout] if minor_to_major else []),
            *([packed(6, [1])] if dynamic else []),
        ]
    )


def instruction(
    number: int,
    opcode: str,
    of: bytes,
    operands: Sequence[int] = (),
    called: Sequence[int] = (),
    *more: Field,
) -> Field:
    return Field(
        canonical.INSTRUCTION,
        BYTES,
        write_message(
            [
                text(canonical.INSTRUCTION_NAME, f"{opcode}.{number}"),
                text(canonical.OPCODE, opcode),
                Field(3, BYTES, of),
                *more,
                Field(canonical.INSTRUCTION_ID, VARINT, number),
                packed(canonical.OPERAND_IDS, operands),
                packed(canonical.CALLED_IDS, called),
            ]
        ),
    )


def parameter(number: int, position: int, of: bytes) -> Field:
    return instruction(number, "parameter", of, (), (), Field(9, VARINT, position))


def integer(number: int, value: int) -> Field:
    literal = Field(8, BYTES, write_message([packed(4, [value])]))
    return instruction(number, "constant", shape("s32"), (), (), literal)


def part(number: int, of: bytes, operand: int, index: int) -> Field:
    return instruction(number, "get-tuple-element", of, (operand,), (), Field(13, VARINT, index))


def dimension_numbers(field: int, **values: Sequence[int]) -> Field:
    numbers = [packed(int(key[1:]), value) for key, value in values.items()]
    return Field(field, BYTES, write_message(numbers))


def computation(number: int, *instructions: Field, root: int) -> Field:
    return Field(
        canonical.COMPUTATION,
        BYTES,
        write_message(
            [
                text(canonical.COMPUTATION_NAME, f"computation.{number}"),
                *instructions,
                Field(canonical.COMPUTATION_ID, VARINT, number),
                Field(canonical.ROOT_ID, VARINT, root),
            ]
        ),
    )


def module(*computations: Field, aliases: Sequence[tuple[int, int, int]] = ()) -> bytes:
    """The last computation is the entry. An alias: output, parameter, kind."""
    entries = [
        Field(
            1,
            BYTES,
            write_message([packed(1, [out]), Field(2, VARINT, given), Field(4, VARINT, kind)]),
        )
        for out, given, kind in aliases
    ]
    return write_message(
        [
            text(canonical.NAME, "made"),
            *computations,
            Field(canonical.ENTRY_ID, VARINT, len(computations)),
            Field(canonical.ALIAS, BYTES, write_message(entries)),
        ]
    )


F32 = shape("f32", 4)


def one_instruction(opcode: str, of: bytes = F32, given: bytes = F32, *more: Field) -> bytes:
    """parameter -> opcode."""
    return module(
        computation(1, parameter(1, 0, given), instruction(2, opcode, of, (1,), (), *more), root=2)
    )


def loop(bound: int = 3, start: int = 0, step: int = 1, direction: str = "LT") -> bytes:
    """while (counter < bound) counter += step, and one value carried along."""
    state = shape("tuple", parts=[shape("s32"), F32])
    body = computation(
        1,
        parameter(1, 0, state),
        part(2, shape("s32"), 1, 0),
        integer(3, step),
        instruction(4, "add", shape("s32"), (2, 3)),
        part(5, F32, 1, 1),
        instruction(6, "tuple", state, (4, 5)),
        root=6,
    )
    condition = computation(
        2,
        parameter(7, 0, state),
        part(8, shape("s32"), 7, 0),
        integer(9, bound),
        instruction(10, "compare", shape("pred"), (8, 9), (), text(63, direction)),
        root=10,
    )
    entry = computation(
        3,
        parameter(11, 0, F32),
        integer(12, start),
        instruction(13, "tuple", state, (12, 11)),
        instruction(14, "while", state, (13,), (1, 2)),
        part(15, F32, 14, 1),
        root=15,
    )
    return module(body, condition, entry)
