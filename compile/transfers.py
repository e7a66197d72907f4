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
SAY_S = 20.0
"""How long nothing may be heard of a transfer."""


@dataclass(frozen=True)
class Transfer:
    """What a transfer tells, and how it is told to end.

    `progress`: of bytes that have gone through. `say`: why it waits. `stop`: waits no longer.
    """

    progress: Progress = lambda _: None
    say: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)


def in_parallel(act: Callable[[A], B], on: Iterable[A], transfer: Transfer) -> list[B]:
    """Results in order. The first error leaves out what has not begun, and stops what waits.

    After KeyboardInterrupt, requests on their way are not waited for: the process is to end.
    """

    def unless_stopped(each: A) -> B:
        if transfer.stop.is_set():
            raise Stopped
        try:
            return act(each)
        except BaseException:
            transfer.stop.set()
            raise

    pool = concurrent.futures.ThreadPoolExecutor(TRANSFERS, "nxbucket-transfer")
    try:
        futures = [pool.submit(unless_stopped, each) for each in on]
        left = set(futures)
        while left:
            done, left = concurrent.futures.wait(left, SAY_S)
            if not done:
                transfer.say(f"{len(left)} artifacts are still on their way")
        errors = [err for future in futures if (err := future.exception()) is not None]
        for err in sorted(errors, key=lambda err: isinstance(err, Stopped)):
            raise err
        return [future.result() for future in futures]
    except KeyboardInterrupt:
        transfer.stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        if not transfer.stop.is_set():
            pool.shutdown()


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
