"""A replay, made small enough to draw: quantiles, windows of time, the first steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxbucket.toolkit.choice.simulator import PHASES, Timeline

if TYPE_CHECKING:
    from array import array

    import numpy as np

BODY = tuple(i / 100 for i in range(100))
TAIL = (0.995, 0.999, 1.0)
LEVELS = (*BODY, *TAIL)


def letter_of(number: int) -> str:
    """A, B, … Z, then A2."""
    turn, letter = divmod(number, 26)
    return chr(ord("A") + letter) + (str(turn + 1) if turn else "")


@dataclass(frozen=True)
class Cumulative:
    """The share of all that is at most `values[i]`."""

    values: tuple[float, ...]
    shares: tuple[float, ...]

    def at(self, share: float) -> float:
        """The least value that this share does not exceed."""
        for value, reached in zip(self.values, self.shares, strict=True):
            if reached >= share - 1e-12:
                return value
        return self.values[-1]


def cumulative(values: "array[float]") -> Cumulative | None:
    """By nearest rank; None of nothing."""
    import numpy as np

    if not values:
        return None
    ordered = np.sort(np.frombuffer(values, dtype=np.float64))
    ranks = np.ceil(np.array(LEVELS) * len(ordered)).astype(int) - 1
    picked = ordered[np.clip(ranks, 0, len(ordered) - 1)]
    return Cumulative(tuple(picked.tolist()), LEVELS)


def cumulative_of_times(spent: Mapping[int, float], most: int = 150) -> Cumulative | None:
    """Of a length by the time it lasted. Of thousands of lengths those stay that are a good step on
    from the one before, in either direction: no more than `most`."""
    total = sum(spent.values())
    if not total:
        return None
    values: list[float] = []
    shares: list[float] = []
    reached = 0.0
    ordered = sorted(spent)
    step = 0.0 if len(ordered) <= most else 2 / (most - 2)
    for value in ordered:
        reached += spent[value] / total
        if (
            not values
            or value == ordered[-1]
            or reached >= shares[-1] + step
            or value >= values[-1] + step * ordered[-1]
        ):
            values.append(float(value))
            shares.append(min(1.0, reached))
    shares[-1] = 1.0
    return Cumulative(tuple(values), tuple(shares))


@dataclass(frozen=True)
class Windows:
    """Equal parts of the time: what each was spent on, and how long the queue was."""

    edges: tuple[float, ...]
    shares: dict[str, tuple[float, ...]]
    queue_mean: tuple[float, ...]
    queue_max: tuple[int, ...]


def windows(timeline: Timeline, most: int = 120) -> Windows | None:
    import numpy as np

    size = len(timeline.start_s)
    end = timeline.end_s[-1] if size else 0.0
    if not end > 0:
        return None
    starts, ends = np.frombuffer(timeline.start_s), np.frombuffer(timeline.end_s)
    phases = np.frombuffer(timeline.phase, dtype=np.uint8)
    waiting = np.frombuffer(timeline.waiting, dtype=np.int32)
    spent = ends - starts
    edges = np.linspace(0.0, end, most + 1)
    length = end / most
    # Steps follow one another, so what was spent until any moment is a line through their ends.
    times = np.concatenate(([0.0], ends))

    def per_window(amounts: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> list[float]:
        until = np.concatenate(([0.0], np.cumsum(amounts)))
        found = np.diff(np.interp(edges, times, until)) / length
        return [float(value) for value in found]

    shares = {
        name: tuple(
            min(1.0, max(0.0, v)) for v in per_window(np.where(phases == number, spent, 0.0))
        )
        for number, name in enumerate(PHASES)
    }
    firsts = np.searchsorted(ends, edges[:-1], side="right")
    lasts = np.searchsorted(starts, edges[1:], side="left")
    longest = [
        int(waiting[first : max(last, first + 1)].max()) if first < size else 0
        for first, last in zip(firsts, lasts, strict=True)
    ]
    mean = tuple(max(0.0, v) for v in per_window(spent * waiting))
    return Windows(tuple(edges.tolist()), shares, mean, tuple(longest))


@dataclass(frozen=True)
class Strip:
    """Steps one by one: when they began and ended, by phase."""

    start: float
    end: float
    steps: dict[str, tuple[tuple[float, float], ...]]
    queue: tuple[tuple[float, int], ...]
    """When it came to be that long."""


def first_steps(timeline: Timeline, most_steps: int = 120, most_s: float = 5.0) -> Strip | None:
    """From the first that computes something."""
    first = next((i for i, phase in enumerate(timeline.phase) if phase), None)
    if first is None:
        return None
    start = timeline.start_s[first]
    last = first
    size = len(timeline.phase)
    while last < size and last - first < most_steps and timeline.start_s[last] < start + most_s:
        last += 1
    end = min(timeline.end_s[last - 1], start + most_s)
    steps: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    queue = []
    for i in range(first, last):
        name = PHASES[timeline.phase[i]]
        queue.append((timeline.start_s[i] - start, timeline.waiting[i]))
        if name in steps:
            stop = min(timeline.end_s[i], end)
            steps[name].append((timeline.start_s[i] - start, stop - start))
    return Strip(start, end - start, {name: tuple(s) for name, s in steps.items()}, tuple(queue))
