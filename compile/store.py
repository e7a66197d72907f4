"""Where artifacts are shared between hosts: a folder or an S3 bucket, behind one small protocol.

    blobs/sha256/<2>/<64 hex>     the bytes
    entries/<2>/<64 hex>.json     a Manifest

The names and the rules are the local cache's (cache.py): blobs are immutable and go up first, the
entry last and only if nobody was faster, and nothing is trusted before it is verified. Reading
never lists: every name follows from a key or a digest.
"""

import contextlib
import errno
import hashlib
import importlib.util
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol

import filelock

from nxbucket.compile.canonical import file_sha256
from nxbucket.compile.leases import SHARED_MODE
from nxbucket.compile.manifest import MAX_ENTRY_BYTES
from nxbucket.toolkit.errors import CacheError, EnvironmentProblem, StoreError
from nxbucket.toolkit.store_address import is_folder

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 1 << 20
S3_PACKAGES = ("obstore", "botocore", "tenacity")
Progress = Callable[[int], None]
"""Told how many more bytes have gone through."""


class OddObject(StoreError):
    """What stands under a name can be no object of ours: the rest of the store may be fine."""


@dataclass(frozen=True)
class StoredObject:
    name: str
    size_bytes: int
    modified_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Content:
    """A small object, whole. `tag` says which version this is, for `put(..., replacing=tag)`."""

    payload: bytes
    tag: str


class Store(Protocol):
    """Names are relative, with slashes. Every method raises StoreError with what, where and why.

    Absence is an answer, not an error; a refusal (no permission) is never taken for absence.
    """

    @property
    def location(self) -> str:
        """As a person wrote it, for messages."""

    def read(self, name: str, limit_bytes: int) -> Content | None:
        """The object, if it is no larger; None if there is none."""

    def fetch(self, name: str, into: Path, limit_bytes: int, progress: Progress) -> str | None:
        """Write the object to the file `into`; the sha256 of what was written, None if there is
        none."""

    def age_s(self, name: str, size_bytes: int, sha256: str) -> float | None:
        """Seconds since the object was written; None unless there is one of this size (and sha256,
        where the store knows it)."""

    def upload(self, name: str, path: Path, sha256: str, progress: Progress) -> None:
        """Put a file under a name made of its own sha256: twice the same does no harm.

        Raises CacheError, and puts nothing, if its bytes are others.
        """

    def put(self, name: str, payload: bytes, *, replacing: str | None) -> bool:
        """Write a small object where there is none, or over the version `replacing`; else False.

        The very same bytes there already are as good: they may be ours, of an attempt whose answer
        got lost.
        """

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """In no particular order; what vanishes meanwhile may be missing or listed."""

    def delete(self, name: str) -> None:
        """Absent already is as good."""


def open_store(location: str) -> Store:
    """`s3://bucket/prefix`, or a folder.

    Raises StoreError for a location that is neither, EnvironmentProblem without the client for S3.
    """
    if location.startswith("s3://"):
        missing = [name for name in S3_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise EnvironmentProblem(
                f"{location} needs {' and '.join(missing)}, not installed here",
                hint="pip install 'nxbucket[s3]'",
            )
        from nxbucket.compile.s3 import S3Store

        return S3Store(location)
    if not is_folder(location):
        raise StoreError(
            f"{location!r}: no store has this kind of address",
            hint="s3://bucket/prefix, or the path of a folder",
        )
    try:
        return DirectoryStore(Path(location).expanduser().absolute())
    except RuntimeError as err:
        raise StoreError(f"{location}: {err}", hint="give the path without `~`") from err


def files_below(folder: Path) -> Iterator[Path]:
    """Every file, for who removes what is not listed: a folder that cannot be read is an OSError.

    So is one behind a link, which a reader follows and a listing does not.
    """

    def fail(err: OSError) -> None:
        if not isinstance(err, FileNotFoundError):
            raise err

    for root, folders, files in os.walk(folder, onerror=fail):
        for name in folders:
            if Path(root, name).is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "a link instead of a folder", name)
        yield from (Path(root, name) for name in files)


class DirectoryStore:
    """A plain folder, on a shared disk or a mounted drive. The same layout as the local cache."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def location(self) -> str:
        return str(self.root)

    def read(self, name: str, limit_bytes: int) -> Content | None:
        with self._said(name):
            path = self._path(name)
            try:
                self._check_regular(path)
                with path.open("rb") as f:
                    payload = f.read(limit_bytes + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if len(payload) > limit_bytes:
            raise OddObject(
                f"{path}: larger than {limit_bytes} bytes, which no entry is: remove it there, and "
                "push again"
            )
        return Content(payload, hashlib.sha256(payload).hexdigest())

    def fetch(self, name: str, into: Path, limit_bytes: int, progress: Progress) -> str | None:
        with self._said(name):
            path = self._path(name)
            try:
                self._check_regular(path)
                source = path.open("rb")
            except (FileNotFoundError, NotADirectoryError):
                return None
            with source, disk_said(into), into.open("wb") as target:
                return copy(_chunks(source), target.write, limit_bytes, progress)

    def age_s(self, name: str, size_bytes: int, sha256: str) -> float | None:
        with self._said(name):
            path = self._path(name)
            try:
                found = path.stat()
                same = found.st_size == size_bytes and file_sha256(path) == sha256
                return max(0.0, time.time() - found.st_mtime) if same else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def upload(self, name: str, path: Path, sha256: str, progress: Progress) -> None:
        with disk_said(path):
            source = path.open("rb")
        with source, self._said(name), self._staged(name) as staged:
            with staged.open("wb") as target:
                if copy(_chunks(source), target.write, None, progress) != sha256:
                    raise other_bytes(path)
                target.flush()
                os.fsync(target.fileno())
            staged.replace(self._path(name))

    def put(self, name: str, payload: bytes, *, replacing: str | None) -> bool:
        with self._said(name), self._staged(name) as staged, self._writing(name):
            current = self.read(name, MAX_ENTRY_BYTES)
            if (None if current is None else current.tag) != replacing:
                return current is not None and current.payload == payload
            with staged.open("wb") as target:
                target.write(payload)
                target.flush()
                os.fsync(target.fileno())
            staged.replace(self._path(name))
            return True

    def list(self, prefix: str) -> Iterator[StoredObject]:
        with self._said(prefix):
            for path in files_below(self._path(prefix)):
                try:
                    found = path.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    name = path.relative_to(self.root).as_posix()
                    yield StoredObject(name, found.st_size, found.st_mtime)

    def delete(self, name: str) -> None:
        with self._said(name):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        assert parts and ".." not in parts and not name.startswith("/"), name
        return self.root.joinpath(*parts)

    @staticmethod
    def _check_regular(path: Path) -> None:
        """A link could point anywhere, and reading a pipe would wait for ever."""
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OddObject(f"{path} is not a plain file: remove it, and push again")

    @contextlib.contextmanager
    def _staged(self, name: str) -> Iterator[Path]:
        """A file beside the target's folder: on the same filesystem, under a name of its own."""
        target = self._path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
        try:
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """One writer of an entry at a time. The lock file stays: removing it would be a race."""
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(locks / f"{PurePosixPath(name).stem}.put", mode=SHARED_MODE):
            yield

    @contextlib.contextmanager
    def _said(self, name: str) -> Iterator[None]:
        # A push makes the folder, but not the way there: that is a disk that is not mounted.
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is no folder", hint="name the folder of a store")
        if not self.root.parent.is_dir():
            raise StoreError(
                f"{self.root}: there is no {self.root.parent}",
                hint="mount the disk, mend the path, or make the folder",
            )
        try:
            yield
        except OSError as err:
            raise StoreError(
                f"{self.root / name}: {err.strerror or err}",
                hint=f"check that {self.root} is mounted, and its owner and mode",
            ) from err


def copy(
    chunks: "Iterable[Buffer]",
    write: Callable[[memoryview], object],
    limit_bytes: int | None,
    progress: Progress,
) -> str:
    """The sha256 of what was copied, in hex.

    Stops one byte past the limit: what is larger than its entry says is wrong anyway.
    """
    digest = hashlib.sha256()
    left = None if limit_bytes is None else limit_bytes + 1
    for chunk in chunks:
        taken = memoryview(chunk)[:left]
        digest.update(taken)
        write(taken)
        progress(len(taken))
        if left is not None:
            left -= len(taken)
            if left == 0:
                break
    return digest.hexdigest()


@contextlib.contextmanager
def disk_said(path: Path) -> Iterator[None]:
    """The local side of a transfer."""
    try:
        yield
    except OSError as err:
        raise CacheError(
            f"{path}: {err.strerror or err}",
            hint="check the local disk, and what else works on it",
        ) from err


def other_bytes(path: Path) -> CacheError:
    return CacheError(
        f"{path}: sha256 differs from its name; not pushed",
        hint="nxbucket compile builds it again",
    )


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(CHUNK_BYTES), b"")


class ReadOnlyStore:
    """Another store, of which nothing is changed: for hosts that only serve."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read = store.read
        self.fetch = store.fetch
        self.age_s = store.age_s
        self.list = store.list

    @property
    def location(self) -> str:
        return self._store.location

    def upload(self, name: str, path: Path, sha256: str, progress: Progress) -> None:
        raise self._refusal(name)

    def put(self, name: str, payload: bytes, *, replacing: str | None) -> bool:
        raise self._refusal(name)

    def delete(self, name: str) -> None:
        raise self._refusal(name)

    def _refusal(self, name: str) -> StoreError:
        return StoreError(f"{self.location} is only read here, and {name} was to be written")
