"""Artifacts as one tar file, for hosts that no network reaches.

The members are the cache's own files under the cache's own names: first every entry, then every
blob. So an unpacker knows the size and sha256 of each blob before it reads one byte of it, takes no
other, and writes entries only when all their blobs are in place. Not compressed: programs are.
"""

import contextlib
import io
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.canonical import file_sha256
from nxbucket.compile.key import manifest_fault
from nxbucket.compile.leases import publishing
from nxbucket.compile.manifest import MAX_ENTRY_BYTES, Blob, Manifest
from nxbucket.compile.remote import blob_name, entry_name
from nxbucket.compile.store import CHUNK_BYTES, Progress
from nxbucket.toolkit.errors import CacheError

ENTRY_NAME = re.compile(r"entries/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json")
BLOB_NAME = re.compile(r"blobs/sha256/([0-9a-f]{2})/(\1[0-9a-f]{62})")
MAX_ENTRIES = 100_000
MAX_ENTRIES_BYTES = 1 << 30


@dataclass(frozen=True)
class Unpacked:
    """`replaced`: programs of which the cache had other bytes."""

    keys: list[str]
    replaced: list[str]


class _PlainFile(tarfile.TarInfo):
    """Stops at the first header that is no plain file's, before tarfile acts on what it claims.

    Long names, pax headers and sparse maps may claim any size; `pack` writes none of them.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise _NotPlain(found)
        return found


class _NotPlain(Exception):
    def __init__(self, member: tarfile.TarInfo) -> None:
        self.member = member


def pack(cache: ArtifactCache, keys: Collection[str], into: Path, progress: Progress) -> int:
    """Write the artifacts of `keys` to the file `into`; its size. The same keys, the same bytes.

    Raises CacheError, before anything is written, if one of them is not whole.
    """
    with contextlib.suppress(OSError):  # what is wrong with the path is said when it is opened
        if not into.name or not stat.S_ISREG(into.lstat().st_mode):
            raise CacheError(f"{into}: is no plain file", hint="name a file, such as artifacts.tar")
    manifests = {}
    for key in sorted(set(keys)):
        found = cache.lookup(key)
        if not isinstance(found, Hit):
            raise CacheError(
                f"not packed: {getattr(found, 'reason', f'{cache.root} has no entry {key}')}",
                hint="nxbucket compile, or nxbucket pull",
            )
        manifests[key] = found.manifest
    blobs = {b.digest: b for m in manifests.values() for b in m.blobs}
    staged = into.with_name(f".{into.name[:100]}.{os.urandom(6).hex()}")
    try:
        with tarfile.open(staged, "w:", format=tarfile.GNU_FORMAT) as tar:
            for key, manifest in manifests.items():
                payload = manifest.to_json()
                tar.addfile(_member(entry_name(key), len(payload)), io.BytesIO(payload))
            for digest, blob in sorted(blobs.items()):
                with cache.blob_path(digest).open("rb") as source:
                    tar.addfile(_member(blob_name(digest), blob.size_bytes), source)
                progress(blob.size_bytes)
        staged.replace(into)
    except OSError as err:
        raise CacheError(
            f"{into}: {err.strerror or err}", hint="check the disk and the path"
        ) from err
    finally:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
    return into.stat().st_size


def _member(name: str, size_bytes: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size_bytes
    return member


def unpack(archive: Path, cache: ArtifactCache, progress: Progress) -> Unpacked:
    """Bring the artifacts of a packed file into the cache.

    A member that is not a plain file under one of the two names, a blob no entry speaks of or of
    another size or sha256, a blob that is missing: CacheError, before any entry is written. What
    the cache had under the same keys gives way, as to a pull of another lock.
    """
    # No gc between the first blob and the last entry.
    with _opened(archive) as tar, publishing(cache.root):
        manifests: dict[str, Manifest] = {}
        wanted: dict[str, Blob] = {}
        entries_bytes = 0
        have: set[str] = set()
        for member in tar:
            if not member.isreg() or member.issparse():
                raise _refused(archive, member, "is no plain file")
            if entry := ENTRY_NAME.fullmatch(member.name):
                entries_bytes += member.size
                too_many = len(manifests) >= MAX_ENTRIES or entries_bytes > MAX_ENTRIES_BYTES
                if too_many or member.size > MAX_ENTRY_BYTES:
                    raise _refused(archive, member, "is larger than entries are")
                key = entry[2]
                manifest = _manifest(archive, tar, member, key)
                manifests[key] = manifest
                wanted.update({b.digest: b for b in manifest.blobs})
            elif blob := BLOB_NAME.fullmatch(member.name):
                _unpack_blob(archive, tar, member, wanted.get(blob[2]), cache, progress)
                have.add(blob[2])
            else:
                raise _refused(archive, member, "is neither an entry nor a blob")
        for digest in sorted(wanted.keys() - have):
            if reason := cache.check_blob(wanted[digest]):
                raise CacheError(f"{archive}: has no {blob_name(digest)}, and {reason}")
        replaced = []
        for key, manifest in manifests.items():
            with cache.lock(key):
                before = cache.entry(key)
                if isinstance(before, Manifest) and before.blobs != manifest.blobs:
                    replaced.append(manifest.program)
                cache.publish(manifest)
    return Unpacked(sorted(manifests), sorted(set(replaced)))


def _unpack_blob(
    archive: Path,
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    blob: Blob | None,
    cache: ArtifactCache,
    progress: Progress,
) -> None:
    if blob is None:
        raise _refused(archive, member, "is a blob that no entry before it speaks of")
    if member.size != blob.size_bytes:
        raise _refused(archive, member, f"has {member.size} bytes, its entry {blob.size_bytes}")
    progress(member.size)
    if cache.check_blob(blob) is None:
        return
    if member.size > shutil.disk_usage(cache.root).free:
        raise _refused(archive, member, f"is larger than what is free on {cache.root}")
    source = tar.extractfile(member)
    assert source is not None
    with cache.lock(blob.digest), cache.work_dir(blob.digest) as work_dir, cache.writing():
        staged = work_dir / "blob"
        with staged.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
        if file_sha256(staged) != blob.digest:
            raise _refused(archive, member, "has another sha256 than its name")
        cache.add_blob(staged, blob.role)


def _manifest(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, key: str) -> Manifest:
    source = tar.extractfile(member)
    assert source is not None
    try:
        manifest = Manifest.from_json(source.read())
    except CacheError as err:
        raise _refused(archive, member, f"is no entry: {err.message}") from err
    if fault := manifest_fault(manifest, key):
        raise _refused(archive, member, fault)
    return manifest


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """Not compressed: what unpacks to a thousand times its size is none of ours."""
    try:
        if not stat.S_ISREG(archive.stat().st_mode):
            raise CacheError(f"{archive}: is no plain file", hint="nxbucket pack writes one")
        with tarfile.open(archive, "r:", tarinfo=_PlainFile) as tar:
            yield tar
    except _NotPlain as err:
        raise _refused(archive, err.member, "is no plain file") from err
    except (tarfile.TarError, EOFError, ValueError) as err:
        raise CacheError(
            f"{archive}: is no tar file of ours: {err}", hint="nxbucket pack writes one"
        ) from err
    except OSError as err:
        raise CacheError(f"{archive}: {err.strerror or err}", hint="check the path") from err


def _refused(archive: Path, member: tarfile.TarInfo, why: str) -> CacheError:
    name = member.name if member.name.isprintable() else ascii(member.name)
    return CacheError(f"{archive}: {name[:200]} {why}; nothing of it is used")
