"""One tar file for a host without a network, and tar files that are none of ours."""

import concurrent.futures
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from artifacts import contents, faults, manifest_of, new_cache, put_artifact

from nxbucket.compile.cache import ArtifactCache, Hit, Miss
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.pack import Unpacked, pack, unpack
from nxbucket.compile.remote import blob_name, entry_name
from nxbucket.toolkit.errors import CacheError


def nobody(_: int) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return new_cache(tmp_path / "cache")


@pytest.fixture
def other(tmp_path: Path) -> ArtifactCache:
    return new_cache(tmp_path / "other")


def test_what_was_packed_is_unpacked(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path
) -> None:
    manifests = [put_artifact(cache, bytes([i]) * 100_000, graph=str(i)) for i in range(3)]
    told: list[int] = []
    size = pack(cache, [m.key for m in manifests[:2]], tmp_path / "a.tar", told.append)
    assert size == (tmp_path / "a.tar").stat().st_size
    assert sum(told) == sum(m.size_bytes for m in manifests[:2])
    keys = sorted(m.key for m in manifests[:2])
    assert unpack(tmp_path / "a.tar", other, nobody) == Unpacked(keys, [])
    for manifest in manifests[:2]:
        assert other.lookup(manifest.key) == Hit(manifest)
        assert contents(other, manifest) == contents(cache, manifest)
    assert other.lookup(manifests[2].key) == Miss()
    assert unpack(tmp_path / "a.tar", other, nobody)


def test_the_same_artifacts_give_the_same_file(cache: ArtifactCache, tmp_path: Path) -> None:
    keys = [put_artifact(cache, bytes([i]), graph=str(i)).key for i in range(3)]
    pack(cache, keys, tmp_path / "a.tar", nobody)
    pack(cache, keys[::-1], tmp_path / "b.tar", nobody)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_nothing_is_packed_that_is_not_whole(cache: ArtifactCache, tmp_path: Path) -> None:
    manifest = put_artifact(cache)
    cache.blob_path(manifest.blobs[0].digest).write_bytes(b"x")
    for key in (manifest.key, "d" * 64):
        with pytest.raises(CacheError, match="not packed"):
            pack(cache, [key], tmp_path / "a.tar", nobody)
    assert not list(tmp_path.glob("*.tar*"))


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, payload: bytes = b"", kind: bytes = tarfile.REGTYPE) -> Member:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(payload)
    return info, payload


def write(path: Path, *members: Member, mode: str = "w:") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for info, payload in members:
            tar.addfile(info, io.BytesIO(payload))
    return path


def linked(name: str, target: str, kind: bytes) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def parts(cache: ArtifactCache) -> tuple[Manifest, Member, list[Member]]:
    manifest = put_artifact(cache)
    blobs = [
        member(blob_name(b.digest), cache.blob_path(b.digest).read_bytes()) for b in manifest.blobs
    ]
    return manifest, member(entry_name(manifest.key), manifest.to_json()), blobs


HOSTILE: dict[str, tuple[Callable[[Manifest, Member, list[Member]], list[Member]], str]] = {
    "absolute path": (lambda m, e, b: [member("/etc/cron.d/x", b"x")], "neither"),
    "parent folder": (lambda m, e, b: [member("../../x", b"x")], "neither"),
    "parent inside": (lambda m, e, b: [member(f"entries/../{e[0].name}", e[1])], "neither"),
    "a link as blob": (
        lambda m, e, b: [e, linked(b[0][0].name, "/etc/passwd", tarfile.SYMTYPE)],
        "no plain file",
    ),
    "a hard link": (
        lambda m, e, b: [e, linked(b[0][0].name, "/etc/passwd", tarfile.LNKTYPE)],
        "no plain file",
    ),
    "a device": (lambda m, e, b: [linked("blobs/x", "", tarfile.CHRTYPE)], "no plain file"),
    "a pipe": (lambda m, e, b: [linked("entries/x", "", tarfile.FIFOTYPE)], "no plain file"),
    "a folder": (lambda m, e, b: [linked("entries", "", tarfile.DIRTYPE)], "no plain file"),
    "a stray file": (lambda m, e, b: [member("README", b"hello")], "neither"),
    "a blob first": (lambda m, e, b: [b[0], e], "no entry before it"),
    "an unnamed blob": (
        lambda m, e, b: [e, *b, member(blob_name("f" * 64), b"x")],
        "no entry before it",
    ),
    "a blob too large": (
        lambda m, e, b: [e, member(b[0][0].name, b[0][1] + b"x")],
        "its entry",
    ),
    "other bytes": (
        lambda m, e, b: [e, member(b[0][0].name, bytes(len(b[0][1])))],
        "another sha256",
    ),
    "no blobs": (lambda m, e, b: [e], "missing"),
    "one blob": (lambda m, e, b: [e, b[0]], "missing"),
    "an entry under another key": (
        lambda m, e, b: [member(entry_name("a" * 64), e[1]), *b],
        "holds the entry of key",
    ),
    "an entry that is none": (lambda m, e, b: [member(e[0].name, b"{}"), *b], "is no entry"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_file_that_is_none_of_ours_leaves_no_entry(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path, how: str
) -> None:
    make, reason = HOSTILE[how]
    archive = write(tmp_path / "hostile.tar", *make(*parts(cache)))
    with pytest.raises(CacheError, match=reason) as caught:
        unpack(archive, other, nobody)
    assert str(archive) in caught.value.message
    assert other.all_keys() == []
    assert faults(other) == {}
    assert not (tmp_path / "x").exists()


def test_a_compressed_file_is_refused(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path
) -> None:
    _, entry, blobs = parts(cache)
    archive = write(tmp_path / "a.tar.gz", entry, *blobs, mode="w:gz")
    with pytest.raises(CacheError, match="no tar file of ours"):
        unpack(archive, other, nobody)


def test_a_sparse_file_is_refused(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path
) -> None:
    """A few bytes that claim to be a terabyte."""
    _, entry, blobs = parts(cache)
    info = tarfile.TarInfo(blobs[0][0].name)
    info.type = tarfile.GNUTYPE_SPARSE
    info.size = 1 << 40
    archive = tmp_path / "sparse.tar"
    write(archive, entry)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    archive.write_bytes(archive.read_bytes()[: 512 * 20] + bytes(header))
    with pytest.raises(CacheError):
        unpack(archive, other, nobody)
    assert other.all_keys() == []


@pytest.mark.parametrize("cut", [0, 1, 511, 600, 5000])
def test_a_file_cut_short_is_refused_and_the_whole_one_completes(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path, cut: int
) -> None:
    manifest = put_artifact(cache, b"x" * 4000)
    pack(cache, [manifest.key], tmp_path / "a.tar", nobody)
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:cut])
    with pytest.raises(CacheError):
        unpack(tmp_path / "cut.tar", other, nobody)
    assert other.all_keys() == []
    unpack(tmp_path / "a.tar", other, nobody)
    assert other.lookup(manifest.key) == Hit(manifest)


def test_entries_of_a_size_that_none_have_are_refused(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxbucket.compile.pack.MAX_ENTRY_BYTES", 100)
    _, entry, blobs = parts(cache)
    archive = write(tmp_path / "a.tar", entry, *blobs)
    with pytest.raises(CacheError, match="larger than entries are"):
        unpack(archive, other, nobody)


def test_an_entry_of_the_wrong_manifest_is_refused(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path
) -> None:
    manifest, _, blobs = parts(cache)
    swapped = manifest_of(*manifest.blobs, graph="7")
    archive = write(tmp_path / "a.tar", member(entry_name(manifest.key), swapped.to_json()), *blobs)
    with pytest.raises(CacheError, match="holds the entry of key"):
        unpack(archive, other, nobody)


def test_other_bytes_that_were_here_give_way_and_are_told_of(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path
) -> None:
    """A host that no network reaches moves to a new lock this way."""
    theirs, ours = put_artifact(cache, b"theirs"), put_artifact(other, b"ours")
    assert theirs.key == ours.key
    pack(cache, {theirs.key}, tmp_path / "a.tar", nobody)
    assert unpack(tmp_path / "a.tar", other, nobody) == Unpacked([ours.key], [ours.program])
    assert unpack(tmp_path / "a.tar", other, nobody) == Unpacked([ours.key], [])
    assert other.lookup(ours.key) == Hit(theirs)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [8 << 40, 1 << 62])
def test_a_header_is_not_believed_what_it_claims(
    other: ArtifactCache, tmp_path: Path, kind: bytes, size: int
) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, size
    archive = tmp_path / "a.tar"
    archive.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + b"\0" * 10_240)
    with pytest.raises(CacheError, match="is no plain file"):
        unpack(archive, other, nobody)


def test_two_at_once_unpack_the_same(
    cache: ArtifactCache, other: ArtifactCache, tmp_path: Path
) -> None:
    manifest = put_artifact(cache, os.urandom(3_000_000))
    pack(cache, {manifest.key}, tmp_path / "a.tar", lambda _: None)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: unpack(tmp_path / "a.tar", other, lambda _: None), range(4))
        assert [done.keys for done in results] == [[manifest.key]] * 4
    assert other.lookup(manifest.key) == Hit(manifest)


@pytest.mark.parametrize("name", ["", "file/a.tar", "n" * 300])
def test_a_place_where_no_file_can_be_is_explained(
    cache: ArtifactCache, tmp_path: Path, name: str
) -> None:
    manifest = put_artifact(cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        pack(cache, {manifest.key}, tmp_path / name, lambda _: None)
