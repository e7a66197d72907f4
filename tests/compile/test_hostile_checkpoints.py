"""Checkpoints that were truncated, mixed up, or made to hurt: a sentence each, and nothing else.

Every one is put before `check_checkpoint`, which `compile` and `serve` ask first. Each answer must
name the file or the folder, come fast and in little memory, and execute nothing.
"""

import io
import json
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_compiler import ARCHITECTURE

from nxbucket.compile.checkpoint import check_checkpoint, has_weights
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.compile.safetensors_header import read_header
from nxbucket.toolkit.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
MAX_SECONDS = 5.0
MAX_MEMORY_BYTES = 100 << 20

Header = dict[str, Any]


def entries(names: list[str] | None = None) -> Header:
    """A header of ARCHITECTURE's tensors, or some of them, in float32."""
    header: Header = {}
    begin = 0
    for spec in weight_specs(ARCHITECTURE):
        for i, source in enumerate(spec.sources):
            if names is None or source in names:
                shape = list(spec.source_shape(i))
                end = begin + 4 * prod(shape)
                header[source] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
                begin = end
    return header


NAMES = list(entries())
FIRST, SECOND, LAST = NAMES[0], NAMES[1], NAMES[-1]


def file_of(header: Header | bytes, data_bytes: int | None = None) -> bytes:
    if data_bytes is None:
        assert isinstance(header, dict)
        data_bytes = max((e["data_offsets"][1] for e in header.values()), default=0)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


GOOD = file_of(entries())
DATA_BYTES = entries()[LAST]["data_offsets"][1]
HEADER_BYTES = len(GOOD) - DATA_BYTES - 8


def changed(name: str = FIRST, **fields: Any) -> bytes:
    header = entries()
    header[name] = {**header[name], **fields}
    return file_of(header, DATA_BYTES)


class Payload:
    """Unpickling it writes a file into the current folder, which the tests look for."""

    def __reduce__(self) -> Any:
        return (exec, ("open('executed', 'w').close()",))


def zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100 << 20))
    return buffer.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "one byte": lambda: b"\x00",
    "seven bytes": lambda: GOOD[:7],
    "length alone": lambda: GOOD[:8],
    "cut in the header": lambda: GOOD[: 8 + HEADER_BYTES // 2],
    "cut before the header's last byte": lambda: GOOD[: 7 + HEADER_BYTES],
    "cut at the end of the header": lambda: GOOD[: 8 + HEADER_BYTES],
    "cut in the first tensor": lambda: GOOD[: 8 + HEADER_BYTES + 5],
    "cut in the middle": lambda: GOOD[: len(GOOD) // 2],
    "cut by one byte": lambda: GOOD[:-1],
    "one byte more": lambda: GOOD + b"\x00",
    "zeros": lambda: bytes(4096),
    "header of 10 GB": lambda: struct.pack("<Q", 10 << 30) + GOOD[8:],
    "header of 2**63 bytes": lambda: struct.pack("<Q", 1 << 63) + GOOD[8:],
    "header of 2**64 - 1 bytes": lambda: b"\xff" * 8 + GOOD[8:],
    "header longer than the file": lambda: struct.pack("<Q", len(GOOD)) + GOOD[8:],
    "header shorter than it is": lambda: struct.pack("<Q", HEADER_BYTES - 9) + GOOD[8:],
    "header of no bytes": lambda: bytes(8),
    "header not JSON": lambda: file_of(b"{not json}", 0),
    "header a list": lambda: file_of(b"[]", 0),
    "header a string": lambda: file_of(b'"model"', 0),
    "header null": lambda: file_of(b"null", 0),
    "header not UTF-8": lambda: file_of(b'{"\xff\xfe": 1}', 0),
    "header UTF-16": lambda: file_of("{}".encode("utf-16"), 0),
    "header nested 100,000 deep": lambda: file_of(b'{"a":' * 100_000, 0),
    "header with a list 100,000 deep": lambda: file_of(b'{"a":' + b"[" * 100_000, 0),
    "a number of 10,000 digits": lambda: file_of(b'{"a":' + b"9" * 10_000 + b"}", 0),
    "metadata a list": lambda: file_of(b'{"__metadata__": []}', 0),
    "metadata of numbers": lambda: file_of(b'{"__metadata__": {"a": 1}}', 0),
    "a name twice": lambda: file_of(
        json.dumps(entries()).encode()[:-1]
        + b", "
        + json.dumps({FIRST: entries()[FIRST]}).encode()[1:],
        DATA_BYTES,
    ),
    "an entry that is a list": lambda: file_of({**entries(), FIRST: [1]}, DATA_BYTES),
    "an entry without shape": lambda: file_of({**entries(), FIRST: {"dtype": "F32"}}, DATA_BYTES),
    "an entry with more": lambda: changed(pickle="cos\nsystem\n"),
    "unknown dtype": lambda: changed(dtype="F31"),
    "dtype a number": lambda: changed(dtype=32),
    "dtype a list": lambda: changed(dtype=["F32"]),
    "dtype of another size": lambda: changed(dtype="F64"),
    "shape negative": lambda: changed(shape=[-96, -32]),
    "shape of floats": lambda: changed(shape=[96.0, 32.0]),
    "shape of booleans": lambda: changed(shape=[True, True]),
    "shape null": lambda: changed(shape=None),
    "shape too large for its bytes": lambda: changed(shape=[1 << 40, 32]),
    "shape that overflows 64 bits to the right size": lambda: changed(
        shape=[1 << 32, 1 << 32, 96, 32]
    ),
    "shape of 10,000 dimensions": lambda: changed(shape=[1] * 10_000),
    "shape of 10**30": lambda: changed(shape=[10**30]),
    "offsets of booleans": lambda: changed(data_offsets=[False, 12288]),
    "offsets negative": lambda: changed(data_offsets=[-8, 12280]),
    "offsets backwards": lambda: changed(data_offsets=[12288, 0]),
    "offsets beyond the file": lambda: changed(LAST, data_offsets=[1 << 40, (1 << 40) + 12288]),
    "offsets of three": lambda: changed(data_offsets=[0, 12288, 24576]),
    "offsets a string": lambda: changed(data_offsets="0:12288"),
    "offsets overlapping": lambda: changed(SECOND, data_offsets=[12280, 12408]),
    "every tensor the same bytes": lambda: file_of(
        {n: {**e, "data_offsets": [0, 4 * prod(e["shape"])]} for n, e in entries().items()},
        DATA_BYTES,
    ),
    "a gap between tensors": lambda: file_of(
        {
            n: {**e, "data_offsets": [o + 64 * (n != FIRST) for o in e["data_offsets"]]}
            for n, e in entries().items()
        }
    ),
    "no tensors": lambda: file_of(b"{}", 0),
    "a pickle": lambda: pickle.dumps(Payload(), protocol=2),
    "a pickle of protocol 0": lambda: pickle.dumps(Payload(), protocol=0),
    "a zip bomb": zip_bomb,
    "a git-lfs pointer": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "an HTML page": lambda: b"<!DOCTYPE html><html><body>401 Unauthorized</body></html>",
}


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelError:
    """The refusal, which must be a short sentence with a mend, fast, small and without effects."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(ModelError) as caught:
            check_checkpoint(folder, ARCHITECTURE)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < MAX_SECONDS
    error = caught.value
    assert str(folder) in error.message
    assert error.message.isprintable()
    assert len(error.message) < 2000
    assert error.hint
    assert not list(elsewhere.iterdir())
    return error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


def test_the_file_the_hostile_ones_are_made_from_is_good(folder: Path) -> None:
    (folder / SINGLE).write_bytes(GOOD)
    assert set(check_checkpoint(folder, ARCHITECTURE).tensors) == set(NAMES)


def test_a_header_whose_length_looks_like_a_pickle_is_none(folder: Path) -> None:
    text = json.dumps(entries()).encode()
    for length in (0x0580, 0x1080):
        (folder / SINGLE).write_bytes(file_of(text.ljust(length), DATA_BYTES))
        assert (folder / SINGLE).read_bytes()[0] == 0x80
        check_checkpoint(folder, ARCHITECTURE)


@pytest.mark.parametrize("content", FILES)
def test_a_hostile_file_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (folder / SINGLE).write_bytes(FILES[content]())
    error = answer(folder, monkeypatch)
    print(f"{content}: {error.message.replace(str(folder), '')}")
    # An empty header is a file without tensors; all others are no safetensors files.
    assert ("missing tensors" if content == "no tensors" else SINGLE) in error.message


@pytest.mark.parametrize("content", ["cut by one byte", "header of 10 GB", "a pickle"])
def test_a_hostile_shard_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    write_shards(folder)
    (folder / SHARDS[1]).write_bytes(FILES[content]())
    assert SHARDS[1] in answer(folder, monkeypatch).message


def test_a_file_of_10_gb_with_a_header_of_as_much_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / SINGLE
    file.write_bytes(struct.pack("<Q", (10 << 30) - 8))
    os.truncate(file, 10 << 30)  # sparse
    assert "header" in answer(folder, monkeypatch).message


def test_a_header_of_nothing_but_brackets_is_not_read_into_gigabytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 90 MB of `[],`: within the library's limit, two gigabytes as Python lists.
    text = b'{"a": [' + b"[]," * (30 << 20) + b"[]]}"
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text)
    assert "header" in answer(folder, monkeypatch).message


@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "dangling", "device", "outside"])
def test_what_is_no_file_of_the_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = folder / SINGLE
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        outside = folder.parent / "outside"
        outside.write_bytes(GOOD)
        targets = {"loop": SINGLE, "dangling": "gone", "device": "/dev/zero"}
        path.symlink_to(targets.get(kind, "../outside"))
    assert SINGLE in answer(folder, monkeypatch).message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_read_whatever_their_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder / name).write_bytes(pickle.dumps(Payload()))
    assert has_weights(folder)
    assert "never read" in answer(folder, monkeypatch).message


# The index


def write_shards(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(SHARDS):
        held = NAMES[i::3]
        (folder / shard).write_bytes(file_of(entries(held)))
        weight_map |= dict.fromkeys(held, shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_the_shards_the_lying_indexes_are_made_of_are_good(folder: Path) -> None:
    write_shards(folder)
    assert set(check_checkpoint(folder, ARCHITECTURE).tensors) == set(NAMES)


LIES: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "a tensor in the wrong shard": (lambda m: {**m, FIRST: m[SECOND]}, "stale"),
    "every tensor in one shard": (lambda m: dict.fromkeys(m, SHARDS[0]), "stale"),
    "a tensor that is in no shard": (lambda m: {**m, "ghost": SHARDS[0]}, "ghost"),
    "a shard that is not there": (lambda m: {**m, FIRST: "model-00009.safetensors"}, "00009"),
    "shards of another build": (
        lambda m: {t: f.replace("00003", "00013") for t, f in m.items()},
        "stale",
    ),
    "a path upwards": (lambda m: {**m, FIRST: "../outside"}, "not plain names"),
    "an absolute path": (lambda m: {**m, FIRST: "/etc/passwd"}, "not plain names"),
    "a name of 5000 letters": (lambda m: {**m, FIRST: "x" * 5000}, "not there"),
    "a name with a null byte": (lambda m: {**m, FIRST: "a\0b"}, "not plain names"),
    "a name that clears the screen": (lambda m: {**m, FIRST: "\x1b[2J"}, "not there"),
    "the index itself": (lambda m: {**m, FIRST: INDEX}, INDEX),
    "a file that is a list": (lambda m: {**m, FIRST: [SHARDS[0]]}, "weight_map"),
    "half of the tensors of a shard left out": (lambda m: dict(list(m.items())[:1]), "missing"),
    "no tensors": (lambda m: {}, "missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_index_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    change, says = LIES[lie]
    weight_map = change(write_shards(folder))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    error = answer(folder, monkeypatch)
    print(f"{lie}: {error.message.replace(str(folder), '')}")
    assert says in error.message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"weight_map": ' + b"9" * 10_000 + b"}",
        b" " * (17 << 20),
        pickle.dumps(Payload()),
    ],
    ids=["empty", "cut", "not UTF-8", "deep", "digits", "17 MB", "pickle"],
)
def test_an_index_that_is_none_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    write_shards(folder)
    (folder / INDEX).write_bytes(content)
    assert "not a safetensors index" in answer(folder, monkeypatch).message


@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "dangling"])
def test_an_index_that_is_no_file_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write_shards(folder)
    index = folder / INDEX
    index.unlink()
    if kind == "directory":
        index.mkdir()
    elif kind == "pipe":
        os.mkfifo(index)
    else:
        index.symlink_to(INDEX if kind == "loop" else "gone")
    assert INDEX in answer(folder, monkeypatch).message


@pytest.mark.parametrize("shard", SHARDS)
def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    write_shards(folder)
    (folder / shard).rename(folder.parent / "outside")
    (folder / shard).symlink_to("../outside")
    assert "links out of the folder" in answer(folder, monkeypatch).message


def test_shards_without_their_index_are_not_guessed_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(folder)
    (folder / INDEX).unlink()
    assert INDEX in answer(folder, monkeypatch).message


# Anything


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, len(GOOD) - DATA_BYTES - 1), byte=st.integers(0, 255))
def test_any_byte_of_the_header_changed_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "one-byte.safetensors"
    content = bytearray(GOOD)
    content[place] = byte
    file.write_bytes(content)
    try:
        assert sum(4 * prod(t.shape) for t in read_header(file).values()) == DATA_BYTES
    except ModelError as err:
        assert "not a safetensors file" in err.message


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, as_header: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    file.write_bytes(file_of(content, 0) if as_header else content)
    try:
        read_header(file)
    except ModelError as err:
        assert "not a safetensors file" in err.message
