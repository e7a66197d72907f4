"""A bar of bytes while artifacts are on their way: on a terminal only."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Yields what is told of more bytes, from several threads; negative ones were for nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
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
