"""How long a build has still to go: from what was recorded of such compiles, and from its own."""

import threading
import time
from collections.abc import Callable, Mapping


class Eta:
    """`expected_s`: of each program that is to be compiled, None where nothing is recorded.

    Programs that are pulled instead take no time worth counting, so it is too long rather than too
    short. Where nothing is recorded, the programs that this build has compiled are the record.
    """

    def __init__(
        self,
        expected_s: Mapping[str, float | None],
        jobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs = jobs
        self._expected_s = dict(expected_s)
        self._started: dict[str, float] = {}
        self._compiled_s: list[float] = []
        self._clock = clock
        self._lock = threading.Lock()

    def started(self, name: str) -> None:
        with self._lock:
            self._started[name] = self._clock()

    def finished(self, name: str, *, compiled: bool) -> None:
        with self._lock:
            self._expected_s.pop(name, None)
            since = self._started.pop(name, None)
            if compiled and since is not None:
                self._compiled_s.append(self._clock() - since)

    def remaining_s(self) -> float | None:
        """None if nothing says."""
        with self._lock:
            now, left = self._clock(), []
            for name, recorded_s in self._expected_s.items():
                expected_s = self._mean_s() if recorded_s is None else recorded_s
                if expected_s is None:
                    return None
                began = self._started.get(name, now)
                left.append(max(0.0, expected_s - (now - began)))
        # No schedule is shorter than its longest job, nor than all jobs spread evenly.
        return max(max(left, default=0.0), sum(left) / self.jobs)

    def _mean_s(self) -> float | None:
        return sum(self._compiled_s) / len(self._compiled_s) if self._compiled_s else None

    @property
    def is_of_something(self) -> bool:
        """Whether anything is to be compiled."""
        return bool(self._expected_s)

    def at_the_start(self) -> str:
        """What a build says when it begins."""
        count = len(self._expected_s)
        programs = "1 program" if count == 1 else f"{count} programs"
        seconds = self.remaining_s()
        if seconds is None:
            return f"{programs} to compile; no record of how long one takes"
        return f"{programs} to compile: ~{duration(max(1.0, seconds))}, by what is recorded"

    def left(self) -> str:
        """What is left, in a few words."""
        seconds = self.remaining_s()
        if seconds is None:
            return "no record of how long one takes"
        return f"~{duration(seconds)} left"


def duration(seconds: float) -> str:
    """42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
