"""The protobuf wire format: enough to read and rewrite a message without its generated classes.

Source: protobuf.dev, "Encoding". A message is a list of fields in the order they stand in, so what
is not touched comes out byte for byte as it was.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are no protobuf message."""


class Field(NamedTuple):
    """`value` is an int for VARINT, the bytes as they stand for every other wire type."""

    number: int
    wire_type: int
    value: int | bytes


def read_message(payload: bytes) -> list[Field]:
    """Raises WireError for bytes that are no message."""
    return list(iter_fields(payload))


def iter_fields(payload: bytes) -> Iterator[Field]:
    """The fields one by one: a reader of bytes it does not trust keeps only what it knows."""
    at = 0
    while at < len(payload):
        tag, at = _read_varint(payload, at)
        number, wire_type = tag >> 3, tag & 7
        value: int | bytes
        if wire_type == VARINT:
            value, at = _read_varint(payload, at)
        else:
            size, at = _size_of(wire_type, payload, at)
            if at + size > len(payload):
                raise WireError(f"field {number} ends behind the message")
            value, at = payload[at : at + size], at + size
        if number == 0:
            raise WireError("a field has number 0")
        yield Field(number, wire_type, value)


def write_message(fields: Iterable[Field]) -> bytes:
    out = bytearray()
    for number, wire_type, value in fields:
        out += varint(number << 3 | wire_type)
        if isinstance(value, int):
            out += varint(value)
            continue
        if wire_type == BYTES:
            out += varint(len(value))
        out += value
    return bytes(out)


def varint(value: int) -> bytes:
    if value < 0:
        value += 1 << 64  # protobuf's two's complement for int64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_packed(payload: bytes) -> list[int]:
    """A packed repeated field of varints."""
    values, at = [], 0
    while at < len(payload):
        value, at = _read_varint(payload, at)
        values.append(value)
    return values


def packed(number: int, values: Iterable[int]) -> Field:
    return Field(number, BYTES, b"".join(map(varint, values)))


def _size_of(wire_type: int, payload: bytes, at: int) -> tuple[int, int]:
    if wire_type == BYTES:
        return _read_varint(payload, at)
    if wire_type in (FIXED64, FIXED32):
        return 8 if wire_type == FIXED64 else 4, at
    raise WireError(f"wire type {wire_type}")


def _read_varint(payload: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(payload) or shift > 63:
            raise WireError("a varint without an end")
        byte = payload[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
