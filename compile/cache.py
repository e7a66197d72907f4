"""The artifact cache on a local disk: immutable blobs by content, entries by key.

    blobs/sha256/<2>/<64 hex>     the bytes
    entries/<2>/<64 hex>.json     a Manifest, under an input key or a graph key
    locks/  logs/  tmp/           of this host only

Readers trust an entry and nothing else, and check size and sha256 of every blob before they use it.
A publisher stages in tmp/ on the same filesystem, syncs, renames the blobs, and the entry last: a
crash at any point leaves either no entry or a whole artifact.
"""

import contextlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import platformdirs

from nxbucket.compile.canonical import file_sha256
from nxbucket.compile.key import manifest_fault
from nxbucket.compile.leases import SHARED_MODE, publishing
from nxbucket.compile.manifest import MAX_ENTRY_BYTES, Blob, BlobRole, Manifest, is_digest
from nxbucket.toolkit.errors import CacheError, EnvironmentProblem

NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "fuse.sshfs", "fuse.s3fs", "9p"}


@dataclass(frozen=True)
class Hit:
    manifest: Manifest


@dataclass(frozen=True)
class Miss:
    pass


@dataclass(frozen=True)
class Corrupt:
    """There is an entry, but it or a blob of it cannot be used. `reason` names the file."""

    reason: str


Lookup = Hit | Miss | Corrupt


@dataclass(frozen=True)
class LockHolder:
    """Who holds a key's lock, as written for people. The lock itself is the kernel's."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, for {max(0, time.time() - self.since):.0f} s"


@dataclass(frozen=True)
class CacheChoice:
    """Where the cache is, and which setting said so."""

    root: Path
    origin: str


def choose_cache(from_model_file: Path | None) -> CacheChoice:
    """NXBUCKET_CACHE_DIR, else the model file's artifacts.cache, else the user's cache folder.

    Never a made-up temporary folder: `compile` and `serve` must find the same one.
    """
    from_environment = os.environ.get("NXBUCKET_CACHE_DIR")
    if from_environment:
        try:
            root = Path(from_environment).expanduser().absolute()
        except RuntimeError as err:
            raise EnvironmentProblem(
                f"NXBUCKET_CACHE_DIR is {from_environment}, and there is no such home folder",
                hint="give it without `~`",
            ) from err
        return CacheChoice(root, "NXBUCKET_CACHE_DIR")
    if from_model_file is not None:
        return CacheChoice(from_model_file, "artifacts.cache")
    try:
        path = Path(platformdirs.user_cache_dir("nxbucket"))
    except RuntimeError:
        path = Path("~")
    # Releases of platformdirs differ: one raises, another leaves the `~` in.
    if not path.is_absolute():
        raise EnvironmentProblem(
            "no home folder to keep the artifact cache in",
            hint="set NXBUCKET_CACHE_DIR, or artifacts.cache in the model file",
        )
    return CacheChoice(path, "the user's cache folder")


class ArtifactCache:
    """One cache folder. Reading needs no write access; publishing takes `lock(key)` first."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # Reading

    def lookup(self, key: str, *, hashed: bool = True) -> Lookup:
        """Hit only if the entry is well formed, belongs to `key` and every blob verifies.

        Not `hashed`, by its size alone: for who reads and hashes the blobs afterwards.
        """
        path = self.entry_path(key)
        try:
            manifest = self._read_entry(path)
        except FileNotFoundError:
            return Miss()
        except (CacheError, OSError) as err:
            return Corrupt(f"{path}: {err}")
        if fault := manifest_fault(manifest, key):
            return Corrupt(f"{path}: {fault}")
        for blob in manifest.blobs:
            reason = self.check_blob(blob, hashed=hashed)
            if reason:
                return Corrupt(reason)
        return Hit(manifest)

    def entry(self, key: str) -> Manifest | str:
        """The manifest under `key`, or why there is none to be had. Blobs are not read."""
        try:
            return self._read_entry(self.entry_path(key))
        except (CacheError, OSError) as err:
            return f"{self.entry_path(key)}: {err}"

    def check_blob(self, blob: Blob, *, hashed: bool = True) -> str | None:
        """None if size and sha256 are right, else what is wrong with which file."""
        path = self.blob_path(blob.digest)
        try:
            found = path.lstat()
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                return f"{path}: is no plain file"  # a link's target can change behind our back
            if size != blob.size_bytes:
                return f"{path}: {size} bytes, {blob.size_bytes} expected"
            if (found.st_mode | path.parent.stat().st_mode) & stat.S_IWOTH:
                return f"{path}: everybody on this host can write to it: chmod -R o-w {self.root}"
            if hashed and file_sha256(path) != blob.digest:
                return f"{path}: sha256 differs from its name"
        except FileNotFoundError:
            return f"{path}: missing"
        except OSError as err:
            return f"{path}: {err.strerror or err}"
        return None

    def has_entry(self, key: str) -> bool:
        return self.entry_path(key).is_file()

    def all_keys(self) -> list[str]:
        """Every key that has an entry file, sorted."""
        names = (p.stem for p in self.root.glob("entries/??/*.json"))
        return sorted(name for name in names if is_digest(name))

    def manifests(self) -> dict[str, Manifest]:
        """Every entry that can be read, by key. Blobs are not."""
        entries = {key: self.entry(key) for key in self.all_keys()}
        return {key: e for key, e in entries.items() if isinstance(e, Manifest) and e.key == key}

    def blob_path(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest[:2] / digest

    def entry_path(self, key: str) -> Path:
        return self.root / "entries" / key[:2] / f"{key}.json"

    def log_path(self, key: str) -> Path:
        return self.root / "logs" / f"{key}.log"

    def failed_hlo_path(self, key: str) -> Path:
        """What the compiler was given, if it failed at `key` the last time."""
        return self.root / "logs" / f"{key}.hlo"

    @staticmethod
    def _read_entry(path: Path) -> Manifest:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CacheError("entry is not a plain file")  # reading a pipe would wait for ever
        with path.open("rb") as f:
            payload = f.read(MAX_ENTRY_BYTES + 1)
        if len(payload) > MAX_ENTRY_BYTES:
            raise CacheError(f"entry is larger than {MAX_ENTRY_BYTES} bytes")
        return Manifest.from_json(payload)

    def check_private(self) -> None:
        """Raises CacheError if anybody on this host could change what was just verified.

        Artifacts are native code: whoever can write them runs as whoever serves them.
        """
        for name in ("", "blobs", "blobs/sha256", "entries"):
            path = self.root / name
            try:
                mode = path.stat().st_mode
            except OSError:
                continue  # Not there, or unreadable: whoever needs it says so.
            if mode & stat.S_IWOTH:
                raise CacheError(
                    f"{path} can be written by everybody on this host, and artifacts are code",
                    hint=f"chmod o-w {path}, then nxbucket cache verify",
                )

    # Writing

    def prepare(self) -> None:
        """Make the folders, or say why this cannot be a cache to write to."""
        self.check_private()
        with self.writing():
            filesystem = filesystem_type(self.root)
            if filesystem in NETWORK_FILESYSTEMS:
                raise CacheError(
                    f"{self.root} is on {filesystem}, where locks and renames are not reliable",
                    hint="put the cache on a local disk: artifacts.cache or NXBUCKET_CACHE_DIR",
                )
            for name in ("blobs/sha256", "entries", "locks", "logs", "tmp"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root / "tmp"):
                pass

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A full disk, a missing permission or a stray file in the way, as a CacheError."""
        try:
            yield
        except OSError as err:
            raise CacheError(
                f"{self.root}: cannot write to the artifact cache: {err}",
                hint="mend that, or choose another folder: artifacts.cache or NXBUCKET_CACHE_DIR",
            ) from err

    @contextlib.contextmanager
    def lock(self, key: str, *, blocking: bool = True) -> Iterator[bool]:
        """Hold `key`'s lock; yields False if it is taken and `blocking` is false.

        The kernel releases it when the holder dies, however it dies.
        """
        lock = filelock.FileLock(
            self.root / "locks" / f"{key}.lock", blocking=blocking, mode=SHARED_MODE
        )
        taken = False
        with self.writing():
            try:
                lock.acquire()
            except filelock.Timeout:
                taken = True
        if taken:
            yield False
            return
        holder = self.root / "locks" / f"{key}.json"
        try:
            note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            with self.writing():
                holder.write_text(json.dumps(note))
            yield True
        finally:
            with contextlib.suppress(OSError):
                holder.unlink(missing_ok=True)
            lock.release()

    def lock_holder(self, key: str) -> LockHolder | None:
        """Who says they hold `key`'s lock; None if nobody does (or the note is unreadable)."""
        try:
            raw = json.loads((self.root / "locks" / f"{key}.json").read_text())
            return LockHolder(int(raw["pid"]), str(raw["host"]), float(raw["since"]))
        except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return None

    @contextlib.contextmanager
    def work_dir(self, key: str) -> Iterator[Path]:
        """An empty folder in tmp/ for one job. Call with `lock(key)` held.

        What killed jobs of the same key left behind goes first.
        """
        parent = self.root / "tmp" / key
        shutil.rmtree(parent, ignore_errors=True)
        with self.writing():
            # It may still be there: a killed job's compiler can be writing its last files to it.
            parent.mkdir(parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(dir=parent))
        try:
            yield path
        finally:
            shutil.rmtree(parent, ignore_errors=True)

    def add_blob(self, staged: Path, role: BlobRole = "program") -> Blob:
        """Move `staged` (in a `work_dir`) to its content address.

        A file already there is kept if it verifies: other entries may point at it.
        """
        blob = Blob(role, file_sha256(staged), staged.stat().st_size)
        with self.writing():
            if self.check_blob(blob) is None:
                # Young again: gc may not take it before the entry that is about to name it.
                with contextlib.suppress(PermissionError):
                    os.utime(self.blob_path(blob.digest))
            else:
                _sync(staged)
                target = self.blob_path(blob.digest)
                target.parent.mkdir(parents=True, exist_ok=True)
                staged.replace(target)
                _sync(target.parent)
        return blob

    def adopt_blob(self, staged: Path, blob: Blob) -> None:
        """Move a file whose size and sha256 were just found to be `blob`'s to its address.

        Not synced: it is a copy, and the store has the other.
        """
        with self.writing():
            target = self.blob_path(blob.digest)
            target.parent.mkdir(parents=True, exist_ok=True)
            staged.replace(target)

    def publish(self, manifest: Manifest) -> None:
        """Write the entry, atomically, over any older one. Its blobs must be in place."""
        with self.writing(), publishing(self.root):
            for blob in manifest.blobs:
                reason = self.check_blob(blob)
                if reason:
                    raise CacheError(f"not published: {reason}")
            self._write_entry(manifest, _sync)

    def publish_copy(self, manifest: Manifest) -> None:
        """`publish`, of what was pulled and verified just now. A power cut may lose it."""
        with self.writing(), publishing(self.root):
            for blob in manifest.blobs:
                if not self.blob_path(blob.digest).is_file():
                    raise CacheError(f"not published: {self.blob_path(blob.digest)}: missing")
            self._write_entry(manifest, lambda _: None)

    def _write_entry(self, manifest: Manifest, sync: Callable[[Path], None]) -> None:
        path = self.entry_path(manifest.key)
        # Not a NamedTemporaryFile: only its owner could read it, and others serve from this cache.
        staged = self.root / "tmp" / f"entry-{os.urandom(8).hex()}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(manifest.to_json())
            sync(staged)
            staged.replace(path)
            sync(path.parent)
        finally:
            staged.unlink(missing_ok=True)

    def mark_used(self, key: str) -> None:
        """For gc, which takes first what was not used for longest."""
        with contextlib.suppress(OSError):
            os.utime(self.entry_path(key))

    def link(self, graph_entry: Manifest, inputs: dict[str, object]) -> Manifest:
        """Publish an input-key entry that points at a graph-key entry's blobs."""
        linked = replace(graph_entry, key_kind="input", inputs=inputs)
        self.publish(linked)
        return linked


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def filesystem_type(path: Path) -> str | None:
    """The type of the mount that holds `path` (or its nearest existing parent)."""
    existing = next(p for p in (path, *path.parents) if p.exists()).resolve()
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    best, best_type = Path("/"), None
    for line in mounts:
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = Path(fields[1].replace("\\040", " "))
        if existing.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, best_type = mount, fields[2]
    return best_type
