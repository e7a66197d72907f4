"""Reads the tar archive of a NEFF as a stream, in memory, and believes nothing it says.

Nothing is written to disk. Python's tarfile would do for a friend's archive; it also follows links,
takes extended headers of any length into memory, and has no limit on what a small file unpacks to.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 512
READ_BYTES = 1 << 20
MAX_MEMBERS = 100_000
MAX_NAME_BYTES = 64 << 10
MAX_READ_BYTES = 128 << 20
"""Of one member that is read, not skipped: def.json lists every buffer and DMA queue of a graph."""
MAX_UNPACKED_BYTES = 64 << 30
MAX_UNPACKED_RATIO = 200
FREE_UNPACKED_BYTES = 256 << 20
"""Below this much any ratio is fine: a small NEFF of zeroes is no bomb."""

FILE, FOLDER, LONG_NAME, LONG_LINK, EXTENDED, GLOBAL = b"0", b"5", b"L", b"K", b"x", b"g"
LINKS = {b"1": "a hard link", b"2": "a symbolic link"}


class MalformedNeff(Exception):
    """The file is no whole NEFF. The text says why, to follow the file's name."""


@dataclass(frozen=True)
class Member:
    """A file of the archive. `payload` is there where the reader asked for it."""

    name: str
    size_bytes: int
    payload: bytes | None = None


def is_gzip(start: bytes) -> bool:
    return start.startswith(b"\x1f\x8b")


def read_members(
    payload: BinaryIO, size_bytes: int, wanted: Callable[[str], bool]
) -> Iterator[Member]:
    """The archive's files in order; those whose names are `wanted` come with their bytes.

    `payload` stands at the archive's first byte; `size_bytes` is the archive's length in the file.
    Raises MalformedNeff.
    """
    stream = _Unpacked(payload, size_bytes)
    seen: set[str] = set()
    long_name: bytes | None = None
    headers = 0
    while (header := stream.read(BLOCK)).strip(b"\0"):
        headers += 1
        if headers > MAX_MEMBERS:
            raise MalformedNeff(f"its archive has more than {MAX_MEMBERS} members")
        kind, size = _checked_header(header)
        if kind in (LONG_NAME, EXTENDED):
            if size > MAX_NAME_BYTES:
                raise MalformedNeff("its archive has a name that does not end")
            extra = stream.read_padded(size)
            if kind == LONG_NAME:
                long_name = extra.rstrip(b"\0")
            elif (path := _extended_path(extra)) is not None:
                long_name = path
            continue
        if kind in (GLOBAL, LONG_LINK):
            stream.skip_padded(size)
            continue
        name = _checked_name(long_name if long_name is not None else _header_name(header))
        long_name = None
        if kind in LINKS:
            raise MalformedNeff(f"its archive holds {LINKS[kind]}, {name!r}")
        if kind == FOLDER:
            continue
        if kind not in (FILE, b"\0", b"7"):
            raise MalformedNeff(f"{name!r} in its archive is no plain file")
        if name in seen:
            raise MalformedNeff(f"its archive holds {name!r} twice")
        seen.add(name)
        if not wanted(name):
            stream.skip_padded(size)
            yield Member(name, size)
            continue
        if size > MAX_READ_BYTES:
            raise MalformedNeff(f"{name} in its archive has {size} bytes")
        yield Member(name, size, stream.read_padded(size))
    # A tar ends in two empty blocks; a compressed one also in its own checksum.
    stream.drain()


def _checked_header(header: bytes) -> tuple[bytes, int]:
    """Type and size."""
    if len(header) < BLOCK:
        raise MalformedNeff("its archive is cut off")
    declared = _number(header[148:156])
    if declared != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
        raise MalformedNeff("its archive is no tar, or damaged")
    return header[156:157], _number(header[124:136])


def _number(field: bytes) -> int:
    """Octal text, or GNU's base-256 for what octal has no room for."""
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    else:
        text = field.strip(b" \0")
        try:
            value = int(text, 8) if text else 0
        except ValueError:
            value = -1
    if not 0 <= value < 1 << 62:
        raise MalformedNeff("its archive is no tar, or damaged")
    return value


def _header_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0]
    # Only POSIX archives have a prefix; GNU's use those bytes for times.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _extended_path(records: bytes) -> bytes | None:
    """`path` of a pax header, whose records read `<length> <key>=<value>\\n`."""
    for record in records.split(b"\n"):
        key, separator, value = record.partition(b" ")[2].partition(b"=")
        if separator and key == b"path":
            return value
        if separator and key == b"size":
            raise MalformedNeff("its archive has a member of more than 8 GiB")
    return None


def _checked_name(raw: bytes) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise MalformedNeff("its archive has a name that is no text") from None
    while name.startswith("./"):
        name = name[2:]
    parts = name.rstrip("/").split("/")
    if name in ("", ".") or name == "/":
        return "."
    if name.startswith("/") or ".." in parts or not name.isprintable():
        raise MalformedNeff(f"its archive has a member named {name[:100]!r}")
    return name.rstrip("/")


class _Unpacked:
    """The archive's bytes, gunzipped where they are gzipped, up to a limit."""

    def __init__(self, source: BinaryIO, size_bytes: int) -> None:
        self._source = source
        self._left = size_bytes
        self._limit = min(
            MAX_UNPACKED_BYTES, max(FREE_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size_bytes)
        )
        self._buffer = bytearray()
        self._start = self._take(READ_BYTES)
        self._gunzip = zlib.decompressobj(31) if is_gzip(self._start) else None
        self._unpacked_bytes = 0

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end."""
        while len(self._buffer) < size and (chunk := self._next()):
            self._buffer += chunk
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def read_padded(self, size: int) -> bytes:
        taken = self.read(size)
        self.skip(-size % BLOCK)
        if len(taken) < size:
            raise MalformedNeff("its archive is cut off")
        return taken

    def skip_padded(self, size: int) -> None:
        self.skip(size + -size % BLOCK)

    def skip(self, size: int) -> None:
        while size:
            if not self._buffer:
                self._buffer += self._next()
            if not self._buffer:
                raise MalformedNeff("its archive is cut off")
            dropped = min(size, len(self._buffer))
            del self._buffer[:dropped]
            size -= dropped

    def drain(self) -> None:
        """To the end of a compressed stream, where its checksum is."""
        self._buffer.clear()
        while self._gunzip is not None and not self._gunzip.eof and self._next():
            pass
        if self._gunzip is not None and not self._gunzip.eof:
            raise MalformedNeff("its archive is cut off")

    def _next(self) -> bytes:
        if self._gunzip is None:
            chunk = self._start or self._take(READ_BYTES)
            self._start = b""
        else:
            chunk = self._decompressed(self._gunzip)
        self._unpacked_bytes += len(chunk)
        if self._unpacked_bytes > self._limit:
            raise MalformedNeff(f"its archive unpacks to more than {self._limit} bytes")
        return chunk

    def _decompressed(self, gunzip: "zlib._Decompress") -> bytes:
        while not gunzip.eof:
            packed = gunzip.unconsumed_tail or self._start or self._take(READ_BYTES)
            self._start = b""
            try:
                chunk = gunzip.decompress(packed, READ_BYTES)
            except zlib.error as err:
                raise MalformedNeff(f"its archive does not unpack: {err}") from None
            if chunk or not packed:
                return chunk
        return b""

    def _take(self, size: int) -> bytes:
        chunk = self._source.read(min(size, self._left))
        self._left -= len(chunk)
        return chunk
