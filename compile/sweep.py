"""The note that says a gc sweeps a store, which has no locks.

A push that relies on a blob from long ago waits until no sweep runs, and then looks whether it is
still there. The sweeper renews its note while it goes on; one that was not renewed for STALE_S is
a dead one's.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator

from nxbucket.compile.store import Content, Store
from nxbucket.compile.subprocess_job import Stopped
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import StoreError

NAME = "gc/running.json"
MAX_NOTE_BYTES = 1 << 10
RENEW_S = 10.0
STALE_S = 120.0
POLL_S = 0.5


class Sweep:
    """Held by the one who sweeps. `goes_on` before each removal."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._note = b""
        self._renewed_s = 0.0

    def begin(self) -> bool:
        """False if another sweeps; a dead one's place is taken."""
        found = self._store.read(NAME, MAX_NOTE_BYTES)
        if found is not None and _is_fresh(found):
            return False
        return self._write(None if found is None else found.tag)

    def goes_on(self) -> None:
        """Raises StoreError if another sweep has taken over: this one seemed dead to it."""
        if time.monotonic() - self._renewed_s < RENEW_S:
            return
        found = self._store.read(NAME, MAX_NOTE_BYTES)
        if found is None or found.payload != self._note or not self._write(found.tag):
            raise StoreError(
                f"{self._store.location}: another gc has taken over, as this one stood still",
                hint="let it end; a gc can be run again at any time",
            )

    def end(self) -> None:
        found = self._store.read(NAME, MAX_NOTE_BYTES)
        if found is not None and found.payload == self._note:
            self._store.delete(NAME)

    def _write(self, replacing: str | None) -> bool:
        self._note = json.dumps(
            {
                "renewed": time.time(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "token": os.urandom(8).hex(),
            }
        ).encode()
        self._renewed_s = time.monotonic()
        return self._store.put(NAME, self._note, replacing=replacing)


@contextlib.contextmanager
def sweeping(store: Store, transfer: Transfer) -> Iterator[Sweep]:
    """One sweep of a store at a time."""
    sweep = Sweep(store)
    while not sweep.begin():
        wait_for_sweep(store, transfer)
    try:
        yield sweep
    finally:
        sweep.end()


def wait_for_sweep(store: Store, transfer: Transfer) -> None:
    """Until no living gc sweeps `store`. Raises Stopped."""
    said = False
    while (found := store.read(NAME, MAX_NOTE_BYTES)) is not None and _is_fresh(found):
        if not said:
            transfer.say(f"waiting for a gc of {store.location} to end: {_holder(found)}")
            said = True
        if transfer.stop.wait(POLL_S):
            raise Stopped


def _holder(found: Content) -> str:
    note = json.loads(found.payload)
    return f"pid {note.get('pid')!r} on {note.get('host')!r}"


def _is_fresh(found: Content) -> bool:
    try:
        age_s = time.time() - float(json.loads(found.payload)["renewed"])
    except (ValueError, TypeError, LookupError):
        return False
    return -STALE_S < age_s < STALE_S
