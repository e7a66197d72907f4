"""A Reporter that keeps what it was told."""

import threading
from collections.abc import Sequence

from nxbucket.compile.cache import LockHolder
from nxbucket.compile.eta import Eta
from nxbucket.compile.outcome import Outcome, PlannedProgram


class Recorder:
    """`most_running`: how many programs were compiled at a time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def planned(self, programs: Sequence[PlannedProgram]) -> None:
        self.lines.append(f"planned {len(programs)}")

    def begins(self, eta: Eta) -> None:
        self.eta = eta
        self.lines.append(f"begins {eta.at_the_start()}")

    def started(self, planned: PlannedProgram, place: str | None = None) -> None:
        with self._lock:
            self.lines.append(f"started {planned.name}")
            self.running += 1
            self.most_running = max(self.running, self.most_running)

    def waiting(self, planned: PlannedProgram, holder: LockHolder | None) -> None:
        with self._lock:
            self.lines.append(f"waiting {planned.name} {holder.pid if holder else None}")

    def finished(self, outcome: Outcome) -> None:
        with self._lock:
            self.lines.append(f"{outcome.status} {outcome.name}")
            self.running -= outcome.status != "hit"

    def noted(self, sentence: str) -> None:
        with self._lock:
            self.lines.append(f"noted {sentence}")
