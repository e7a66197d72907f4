"""Bytes on their way: a bar on a terminal, a line now and then elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_S = 10.0


@contextmanager
def byte_progress(what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Yields what is told of more bytes, from several threads; negative ones were for nothing."""
    if not sys.stderr.isatty():
        yield _Lines(what, total_bytes).more
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    lock = threading.Lock()
    with bar:
        task = bar.add_task(what, total=total_bytes)

        def more(num_bytes: int) -> None:
            with lock:
                bar.advance(task, num_bytes)

        yield more


class _Lines:
    """One line on stderr every LINE_S while it lasts: a short transfer has none."""

    def __init__(self, what: str, total_bytes: int | None) -> None:
        self._what = what
        self._of = "" if total_bytes is None else f" of {total_bytes / 1e6:.0f}"
        self._done = 0
        self._said_s = time.monotonic()
        self._lock = threading.Lock()

    def more(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if time.monotonic() - self._said_s < LINE_S:
                return
            self._said_s = time.monotonic()
            sys.stderr.write(f"{self._what}: {self._done / 1e6:.0f}{self._of} MB\n")
            sys.stderr.flush()
