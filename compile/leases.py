"""Who uses which entries of a cache right now, so that gc leaves them alone.

A lease is a file in the cache's `leases/` that names keys, and is locked for as long as its process
lives: the kernel lets go when the process ends, however it ends, and the next gc clears the file
away. `publishing` and `collecting` are the two sides of one lock: a publisher moves blobs into
place and then writes the entry that names them, and no gc looks in between.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from nxbucket.toolkit.errors import CacheError

SHARED_MODE = 0o666
"""Of lock files, which stay: whoever may write to the folder may compile the same program later."""


@contextlib.contextmanager
def lease(root: Path, keys: Iterable[str]) -> Iterator[None]:
    """Hold `keys`. In a cache that this user cannot write to it does nothing.

    May be held by many processes at once, and entered more than once.
    """
    folder = root / "leases"
    path = folder / f"{os.getpid()}-{os.urandom(6).hex()}.json"
    # Not a lease before it is locked and says what it holds: a gc would clear it away.
    unfinished = path.with_suffix(".new")
    try:
        folder.mkdir(mode=0o777, exist_ok=True)
        fd = _open_shared(unfinished, os.O_EXCL | os.O_RDWR)
    except OSError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            os.write(fd, json.dumps(sorted(set(keys))).encode())
            unfinished.replace(path)
        yield
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(fd)


def leased_keys(root: Path) -> set[str]:
    """Keys that some living process holds. Leases of the dead are removed."""
    held: set[str] = set()
    for path in root.glob("leases/*.json"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held |= _keys_of(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)
    return held


def _keys_of(path: Path) -> set[str]:
    with contextlib.suppress(OSError, ValueError):
        return {key for key in json.loads(path.read_text()) if isinstance(key, str)}
    return set()


@contextlib.contextmanager
def publishing(root: Path) -> Iterator[None]:
    """Around moving blobs into place and writing their entry. Many may at once."""
    with _sweep_lock(root, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def collecting(root: Path) -> Iterator[None]:
    """Around finding what nothing names and removing it. Waits for whoever is publishing."""
    with _sweep_lock(root, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def _sweep_lock(root: Path, kind: int) -> Iterator[None]:
    path = root / "locks" / "sweep"
    try:
        fd = _open_shared(path, os.O_RDONLY)
    except OSError as err:
        raise CacheError(
            f"{path}: {err.strerror or err}",
            hint="mend that, or choose another folder: artifacts.cache or NXBUCKET_CACHE_DIR",
        ) from err
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


def _open_shared(path: Path, flags: int) -> int:
    """Made if it is not there, for every user of the cache: whatever the umask says."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, SHARED_MODE)
    with contextlib.suppress(OSError):  # not ours, and its owner has done it
        os.fchmod(fd, SHARED_MODE)
    return fd
