"""Numbers as people read them, and the places on an axis that deserve one."""

import math
from collections.abc import Callable, Iterator, Sequence

Format = Callable[[float], str]


def whole(value: float) -> str:
    return f"{round(value):,}"


def percent(share: float) -> str:
    """One digit behind the point, and never 0.0 % for what is more."""
    value = 100 * share
    return "< 0.1 %" if 0 < value < 0.05 else f"{value:,.1f} %"


def tick_percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def seconds(value: float) -> str:
    """12 ms, 3.4 s, 12 min, 5 h."""
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 1e-3:
        return f"{1e6 * value:.3g} µs" if value else "0 s"
    if value < 0.9995:
        return f"{1e3 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.3g} min"
    return f"{value / 3600:,.3g} h"


def count(value: float) -> str:
    """1,240, 12.4 k, 3.1 M."""
    if abs(value) < 9999.5:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:.3g} P"


def large(value: float) -> str:
    """FLOPs: 1.14 T."""
    return count(value) if value >= 9999.5 else f"{value:.3g}"


def data_size(value: float) -> str:
    """0, 512 bytes, 64 KiB, 0.98 MiB, 23.5 GiB."""
    if value < 1000:
        return f"{value:.3g} bytes" if value else "0"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1024:,.3g} TiB"


def linear_ticks(
    low: float, high: float, most: int, *, steps: Sequence[float] = (1, 2, 5)
) -> list[float]:
    """Round numbers between the two, no more than `most`."""
    if not high > low:
        return [low]
    for step in _round_steps((high - low) / max(1, most), steps):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [i * step for i in range(first, last + 1)]
    raise AssertionError("steps grow without end")


def _round_steps(least: float, steps: Sequence[float]) -> Iterator[float]:
    exponent = math.floor(math.log10(least))
    while True:
        for step in steps:
            if step * 10.0**exponent >= least * 0.999:
                yield step * 10.0**exponent
        exponent += 1


_TIME_STEPS = (1, 2, 5, 10, 15, 30)


def second_ticks(low: float, high: float, most: int) -> list[float]:
    """As linear_ticks, but 15 and 30 where minutes or hours are counted."""
    for unit in (3600.0, 60.0):
        if high - low >= 2 * unit:
            span = (high - low) / unit
            step = next((s for s in _TIME_STEPS if span / s <= most - 1), None)
            if step is None:
                return [unit * t for t in linear_ticks(low / unit, high / unit, most)]
            first = math.ceil(low / unit / step - 1e-9)
            return [
                unit * step * i for i in range(first, math.floor(high / unit / step + 1e-9) + 1)
            ]
    return linear_ticks(low, high, most)


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2, 5, 10 …, or fewer to a decade, or not every decade."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**exponent for exponent in range(first, last + 1) for step in steps]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) <= most:
            return ticks
    stride = math.ceil(len(ticks) / most)
    return ticks[::-stride][::-1]


def power_of_two_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / most))
    # Counted from the end: the largest is the one that matters.
    return sorted(2.0**exponent for exponent in range(last, first - 1, -stride))
