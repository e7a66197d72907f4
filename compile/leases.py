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

SHARED_MODE = 0o666


@contextlib.contextmanager
def lease(root: Path, keys: Iterable[str]) -> Iterator[None]:
    """Hold `keys`. In a cache that cannot be written to it does nothing: no gc runs there either.

    May be held by many processes at once, and entered more than once.
    """
    folder = root / "leases"
    path = folder / f"{os.getpid()}-{os.urandom(6).hex()}.json"
    try:
        folder.mkdir(mode=0o777, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, SHARED_MODE)
    except OSError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps(sorted(set(keys))).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(fd)


def leased_keys(root: Path) -> set[str]:
    """Keys that some living process holds. Leases of the dead are removed."""
    held: set[str] = set()
    for path in root.glob("leases/*.json"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held |= _keys_of(path)
        else:
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)
    return held


def _keys_of(path: Path) -> set[str]:
    # Between its creation and its first byte a lease holds nothing yet: its owner looks after it.
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
    fd = os.open(root / "locks" / "sweep", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, SHARED_MODE)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)
