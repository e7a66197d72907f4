"""Many artifacts on their way at once."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.store import Progress
from nxbucket.compile.subprocess_job import Stopped

A = TypeVar("A")
B = TypeVar("B")

TRANSFERS = 16
POLL_S = 0.2


@dataclass(frozen=True)
class Transfer:
    """What a transfer tells, and how it is told to end.

    `progress`: of bytes that have gone through. `say`: why it waits. `stop`: waits no longer.
    """

    progress: Progress = lambda _: None
    say: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)


def in_parallel(act: Callable[[A], B], on: Iterable[A], transfer: Transfer) -> list[B]:
    """Results in order. An error or an interrupt leaves out what has not begun, and stops waits."""
    pool = concurrent.futures.ThreadPoolExecutor(TRANSFERS)
    try:
        return [future.result() for future in [pool.submit(act, each) for each in on]]
    except BaseException:
        transfer.stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def lock_of(cache: ArtifactCache, key: str, name: str, transfer: Transfer) -> Iterator[None]:
    """`cache.lock(key)`, saying who has it if somebody has. Raises Stopped."""
    said = False
    while True:
        with cache.lock(key, blocking=False) as held:
            if held:
                yield
                return
        if not said:
            holder = cache.lock_holder(key) or "another process"
            transfer.say(f"{name}: being compiled by {holder}; waiting")
            said = True
        if transfer.stop.wait(POLL_S):
            raise Stopped
