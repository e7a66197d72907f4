"""A trace's bytes as blocks of whole lines of text: plain or gzip, UTF-8 with or without a BOM."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from nxbucket.toolkit.errors import TraceError, UsageError

BLOCK_BYTES = 1 << 18
MOST_LINE_BYTES = 1 << 26
"""Bounds the memory that a file without line ends can take."""

GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
KINDS = {
    b"PAR1": ("a Parquet file", "write it as CSV: pandas has read_parquet and to_csv"),
    b"PK\x03\x04": ("a zip or xlsx file", "unpack it, or save the sheet as CSV"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "zstd -d unpacks it; gzip is read as it is"),
    b"\xfd7zXZ": ("compressed with xz", "xz -d unpacks it; gzip is read as it is"),
    b"BZh": ("compressed with bzip2", "bzip2 -d unpacks it; gzip is read as it is"),
}  # fmt: skip


def fault(file: Path, line: int, sentence: str, hint: str) -> TraceError:
    return TraceError(f"{file}:{line}: {sentence}", hint=hint)


@dataclass(frozen=True)
class Block:
    text: str
    """Whole lines; each ends in \\n, the file's last one too."""
    first_line: int

    def numbered_lines(self) -> Iterator[tuple[int, str]]:
        # Not splitlines: U+2028 and its like are no ends of lines here.
        return enumerate(self.text[:-1].split("\n"), self.first_line)


@contextmanager
def open_trace(file: Path) -> Iterator[Iterator[Block]]:
    """Raises UsageError if there is no such file, and TraceError for whatever else is wrong."""
    try:
        with file.open("rb") as raw:
            first = raw.peek(4)[:8]
            if not first.startswith(GZIP):
                yield _blocks(file, cast(BinaryIO, raw))
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield _blocks(file, cast(BinaryIO, unpacked))
    except FileNotFoundError:
        raise UsageError(f"no such file: {file}", hint="name a trace: CSV or JSON lines") from None
    except IsADirectoryError:
        raise TraceError(
            f"{file} is a folder, not a trace", hint="name one file: CSV or JSON lines"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as err:
        raise TraceError(
            f"{file}: the gzip data is cut short or damaged: {err}",
            hint=f"gzip -t {file.name} checks it; copy or pack it again",
        ) from None
    except ValueError as err:  # a null byte in the name
        raise UsageError(f"{str(file)!r} is no file name: {err}", hint="name a trace") from None
    except OSError as err:
        raise TraceError(
            f"{file} cannot be read: {err.strerror or err}", hint="check its path and permissions"
        ) from None


def _blocks(file: Path, raw: BinaryIO) -> Iterator[Block]:
    rest = _without_bom(file, raw.read(BLOCK_BYTES))
    line = 1
    while rest:
        more = raw.read(BLOCK_BYTES)
        if more and len(rest) > MOST_LINE_BYTES:
            raise fault(
                file,
                line,
                f"the line is longer than {MOST_LINE_BYTES >> 20} MiB",
                "a trace has one request per line; is this one?",
            )
        end = rest.rfind(b"\n") + 1 if more else len(rest)
        if end:
            whole = rest[:end] if rest.endswith(b"\n", 0, end) else rest + b"\n"
            yield Block(_decoded(file, whole, line), line)
            line += whole.count(b"\n")
        rest = rest[end:] + more


def _without_bom(file: Path, start: bytes) -> bytes:
    if start.startswith(UTF_16):
        raise TraceError(
            f"{file} is UTF-16 text, UTF-8 wanted",
            hint=f"iconv -f UTF-16 -t UTF-8 {file.name} > utf8.csv",
        )
    for magic, (kind, hint) in KINDS.items():
        if start.startswith(magic):
            raise TraceError(f"{file} is {kind}, not CSV or JSON lines", hint=hint)
    return start.removeprefix(BOM)


def _decoded(file: Path, block: bytes, first_line: int) -> str:
    null = block.find(b"\0")
    if null >= 0:
        raise fault(
            file,
            first_line + block.count(b"\n", 0, null),
            "there is a null byte: a binary file, or UTF-16 text",
            "a trace is CSV or JSON lines, in UTF-8",
        )
    try:
        return block.decode()
    except UnicodeDecodeError as err:
        raise fault(
            file,
            first_line + block.count(b"\n", 0, err.start),
            f"byte 0x{block[err.start]:02x} is not UTF-8 text",
            "save it as UTF-8, or drop the columns of text: numbers are all that is read",
        ) from None


def with_whole_quotes(blocks: Iterator[Block]) -> Iterator[Block]:
    """Joins blocks until no quoted field of a CSV goes on into the next."""
    for block in blocks:
        quotes = block.text.count('"')
        if not quotes % 2:
            yield block
            continue
        parts = [block.text]
        size = len(block.text)
        for more in blocks:
            parts.append(more.text)
            quotes += more.text.count('"')
            size += len(more.text)
            if not quotes % 2 or size > MOST_LINE_BYTES:
                break
        yield Block("".join(parts), block.first_line)


def text_of(block: Block) -> io.StringIO:
    """For csv.reader, which wants to see \\r\\n as it is; a \\r alone ends no line."""
    return io.StringIO(block.text, newline="\n")
