"""The header of a safetensors file: which tensors it says it holds, checked against its bytes.

A parser of our own, with nothing but the standard library, because `compile` checks a checkpoint
before torch is imported, and because what is read here may be hostile: no byte of a tensor is read,
nothing is allocated that the file does not have, and what does not add up is refused.

    8 bytes, little endian: length of the header; JSON; the tensors' bytes
    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {…}}
"""

import json
import os
import stat
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from nxbucket.toolkit.architecture import MAX_HEADER_BYTES
from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.errors import ModelError

MAX_SIZE = 1 << 48
"""Of one dimension or offset: no disk holds more, and products stay small."""
MAX_DIMENSIONS = 8

DTYPE_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64},
    **{"U64": 64, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8},
    **{"F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
TORCH_NAMES = {
    **{"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "BOOL": "bool"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. `dtype` is torch's name for it, where there is one."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Raises ModelError, naming the file, for what is no safetensors file or lies about itself."""
    try:
        raw, data_bytes = _read(file)
        if not isinstance(raw, dict):
            raise _Refused("its header is no JSON object")
        metadata = raw.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise _Refused("__metadata__ is no object of strings")
        spans = {name: _span(name, entry) for name, entry in raw.items()}
        _check_cover(spans, data_bytes)
    except _Refused as err:
        hint = "fetch it again"
        raise ModelError(f"{file}: not a safetensors file: {err}", hint=hint) from None
    return {
        name: StoredTensor(file, name, TORCH_NAMES.get(e["dtype"], e["dtype"]), tuple(e["shape"]))
        for name, e in raw.items()
    }


class _Refused(Exception):
    """What is wrong with the file, as the end of a sentence."""


def _read(file: Path) -> tuple[Any, int]:
    """The header, and how many bytes follow it."""
    try:
        # A pipe without a writer would block an ordinary open.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as err:
        raise _Refused(getattr(err, "strerror", None) or str(err)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _Refused("a directory" if stat.S_ISDIR(status.st_mode) else "no regular file")
    size = status.st_size
    with os.fdopen(descriptor, "rb") as stream:
        first = stream.read(8)
        if size < 8:
            raise _Refused(f"{size} bytes, too short for a header")
        length = int.from_bytes(first, "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise _Refused(_instead(first) or _too_long(length, size))
        content = stream.read(length)
    if not content.startswith(b"{"):
        raise _Refused("its header is no JSON object")
    try:
        return json.loads(content.decode(), object_pairs_hook=_object), size - 8 - length
    except UnicodeDecodeError:
        raise _Refused("its header is not UTF-8") from None
    except json.JSONDecodeError as err:
        raise _Refused(f"its header is not JSON: {str(err)[:100]}") from None
    except (ValueError, RecursionError):
        raise _Refused("its header has a number too long or is nested too deep") from None


def _instead(first: bytes) -> str | None:
    """What a file that begins so is, where it is something we know."""
    beginnings = {
        b"PK\x03\x04": "a pickle in a zip archive, which is never read",
        b"version ": "a Git LFS pointer, and the file it stands for was not fetched",
        b"<": "an HTML page",
    }
    if first[0] == 0x80 and first[1] <= 5:
        return "a pickle, which is never read"
    return next((what for start, what in beginnings.items() if first.startswith(start)), None)


def _too_long(length: int, size: int) -> str:
    if length > MAX_HEADER_BYTES:
        return f"a header of {length} bytes, the most is {MAX_HEADER_BYTES}"
    return f"a header of {length} bytes in a file of {size}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _Refused(f"{show(twice)} is in its header twice")
    return found


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Begin and end of a tensor's bytes, as many as its dtype and shape need."""
    shown = show(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _Refused(f"{shown} has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _Refused(f"{shown} has an unknown dtype, {show(str(dtype), 20)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _Refused(f"{shown} has a shape that is none")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Refused(f"{shown} has data_offsets that are none")
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise _Refused(f"{shown} is {dtype} {shape} and has {end - begin} bytes")
    return begin, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= MAX_SIZE for v in values
    )


def _check_cover(spans: dict[str, tuple[int, int]], data_bytes: int) -> None:
    """Every byte belongs to exactly one tensor."""
    reached = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != reached:
            what = "overlaps the one before" if begin < reached else "leaves a gap before it"
            raise _Refused(f"{show(name)} {what} (byte {begin}, {reached} expected)")
        reached = end
    if reached != data_bytes:
        what = "truncated" if reached > data_bytes else "too long"
        raise _Refused(f"{what}: {data_bytes} bytes of tensors, its header says {reached}")
