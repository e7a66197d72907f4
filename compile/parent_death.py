"""A child that does not outlive its parent, however that dies."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies, kill -9 included. Linux only."""
    _at_parent_death(signal.SIGKILL)


@contextmanager
def group_dies_with_parent() -> Iterator[None]:
    """While another program runs for this process, which leads its group: take all of it along.

    SIGKILL would end this process alone, and a compiler that runs for hours would live on, with
    children of its own. The handler runs only while Python does: a wait for a process is that.
    """
    leads = os.getpgid(0) == os.getpid()
    if not leads or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    _at_parent_death(signal.SIGTERM)
    try:
        yield
    finally:
        die_with_parent()
        signal.signal(signal.SIGTERM, before)


def _at_parent_death(signal_number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
