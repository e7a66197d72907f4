"""What a person sees while programs compile: a live table on a terminal, plain lines elsewhere."""

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nxbucket.compile.cache import LockHolder
from nxbucket.compile.eta import Eta
from nxbucket.compile.outcome import Outcome, PlannedProgram

if TYPE_CHECKING:
    from rich.progress import TaskID


class PlainReporter:
    """One line on stderr for each thing that happens."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._total = self._done = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "PlainReporter":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def planned(self, programs: Sequence[PlannedProgram]) -> None:
        self._total = len(programs)

    def begins(self, eta: Eta) -> None:
        self._say(f"note: {eta.at_the_start()}")

    def started(self, planned: PlannedProgram, place: str | None = None) -> None:
        self._say(f"{planned.name}: compiling{_on(place)}")

    def waiting(self, planned: PlannedProgram, holder: LockHolder | None) -> None:
        with self._lock:
            if planned.name in self._waiting:
                return
            self._waiting.add(planned.name)
        self._say(f"{planned.name}: being compiled by {holder or 'another process'}; waiting")

    def finished(self, outcome: Outcome) -> None:
        with self._lock:
            self._done += 1
            done = self._done
        self._say(f"{describe(outcome)} [{done} of {self._total}]")

    def noted(self, sentence: str) -> None:
        self._say(sentence)

    def _say(self, line: str) -> None:
        # One write: print's second one, of the line's end, can come after another thread's first.
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class LiveReporter(PlainReporter):
    """rich's progress display on stderr: a row for each running program, n of m below."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            SpinnerColumn,
            Task,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.text import Text

        class Left(ProgressColumn):
            """Of the whole build, in its row."""

            def render(self, task: Task) -> Text:
                return Text(left() if task.fields.get("overall") else "")

        def left() -> str:
            return "" if self._eta is None else self._eta.left()

        self._eta: Eta | None = None
        self._progress: Progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Left(),
            console=Console(stderr=True),
            transient=True,
        )
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> "LiveReporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def planned(self, programs: Sequence[PlannedProgram]) -> None:
        super().planned(programs)
        self._overall = self._progress.add_task("programs", total=len(programs), overall=True)

    def begins(self, eta: Eta) -> None:
        super().begins(eta)
        self._eta = eta

    def started(self, planned: PlannedProgram, place: str | None = None) -> None:
        with self._lock:
            # The second try of one that failed has a row already.
            if planned.name not in self._rows:
                label = f"{planned.name} compiling{_on(place)}"
                self._rows[planned.name] = self._progress.add_task(label, total=1)

    def finished(self, outcome: Outcome) -> None:
        with self._lock:
            row = self._rows.pop(outcome.name, None)
        if row is not None:
            self._progress.remove_task(row)
        super().finished(outcome)
        self._progress.advance(self._overall)

    def _say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _on(place: str | None) -> str:
    return "" if place is None else f" on {place}"


def describe(outcome: Outcome) -> str:
    """One line on how a program came out."""
    took = "" if outcome.status == "hit" else f" in {outcome.wall_s:.1f} s"
    damage = f"was corrupt ({outcome.detail}), " if outcome.detail else ""
    words = {
        "hit": "hit",
        "pulled": f"pulled from the remote{took}",
        "compiled": f"compiled{took}",
        "adopted": f"compiled{took}, but another host's bytes were in the remote first: taken",
        "skipped": "not begun: another program failed",
        "reused": f"{damage}same graph as an artifact in the cache, reused{took}",
        "rebuilt": f"{damage}compiled again{took}",
        "failed": f"FAILED{took}: {outcome.what_failed}; log: {outcome.log_path}",
        "unpushed": f"FAILED: {outcome.what_failed}",
    }
    return f"{outcome.name}: {words[outcome.status]}"


def reporter() -> PlainReporter:
    return LiveReporter() if sys.stderr.isatty() else PlainReporter()
