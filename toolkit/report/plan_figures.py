"""Pictures of a plan: what each program costs, and what a rank holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nxbucket.toolkit.report.drawing import (
    Box,
    Sample,
    boxes,
    dress,
    key,
    key_rows,
    marker,
    text_width,
    x_ticks,
)
from nxbucket.toolkit.report.numbers import (
    Format,
    data_size,
    large,
    linear_ticks,
    log_ticks,
    power_of_two_ticks,
    second_ticks,
    seconds,
)
from nxbucket.toolkit.report.svg import COLOURS, SMALL, Canvas

Phase = Literal["prefill", "decode"]
State = Literal["hit", "miss", "corrupt", "unknown"]
ROW = 22
STATES: dict[State, tuple[str, str, bool]] = {
    "hit": ("s", "ink", False),
    "miss": ("s", "ink", True),
    "corrupt": ("X", "limit", False),
    "unknown": ("_", "muted", True),
}
MARKERS: dict[Phase, str] = {"prefill": "o", "decode": "D"}


@dataclass(frozen=True)
class Program:
    name: str
    phase: Phase
    state: State
    flops: float
    io_bytes: float
    compile_s: float | None
    is_estimated: bool


@dataclass(frozen=True)
class _Column:
    title: str
    values: Sequence[float | None]
    show: Format
    ticks: Callable[[float, float, int], list[float]]
    is_log: bool


def paint_programs(width: int, programs: Sequence[Program]) -> Canvas:
    """A row for each program; the columns stand below each other in a narrow window."""
    narrow = width < 600
    states = dict.fromkeys(p.state for p in programs)
    samples = [
        *(
            Sample(
                f"in the cache: {state}",
                STATES[state][1],
                marker=STATES[state][0],
                hollow=STATES[state][2],
            )
            for state in states
        ),
        *(
            Sample(phase, phase, marker=MARKERS[phase])
            for phase in dict.fromkeys(p.phase for p in programs)
        ),
    ]
    if any(p.is_estimated for p in programs):
        samples.append(
            Sample("estimated", fill="idle", hatch="....", hatch_colour="muted", outline="muted")
        )
    flops, io_bytes = [p.flops for p in programs], [p.io_bytes for p in programs]
    times = [p.compile_s for p in programs]
    columns = [
        _Column("FLOPs of a step", flops, large, log_ticks, True),
        _Column(
            "bytes in and out of a step",
            io_bytes,
            data_size,
            power_of_two_ticks,
            True,
        ),
    ]
    if any(time is not None for time in times):
        columns.append(_Column("compile time", times, seconds, second_ticks, False))
    names = max(text_width(p.name, SMALL) for p in programs)
    left = 24 + names + 6
    top = 18 * key_rows(width, samples) + 12
    height = 26 + ROW * len(programs) + 34
    canvas = Canvas(width, round(top + height * (len(columns) if narrow else 1)))
    key(canvas, 0, 0, width, samples)
    gap = 28
    cell = width - left if narrow else (width - left - gap * (len(columns) - 1)) / len(columns)
    for number, column in enumerate(columns):
        y = top + (number * height if narrow else 0)
        x = left if narrow else left + number * (cell + gap)
        if narrow or number == 0:
            _names(canvas, programs, left, y + 26)
        _column(canvas, programs, column, (x, y, x + cell))
    return canvas


def _names(canvas: Canvas, programs: Sequence[Program], right: float, top: float) -> None:
    for i, program in enumerate(programs):
        base = top + ROW * (i + 0.5) + 4
        shape, colour, hollow = STATES[program.state]
        canvas.line([8], [base - 4], colour, **marker(shape, colour, hollow, 7))
        canvas.text(right - 6, base, program.name, anchor="right", size=SMALL)


def _column(
    canvas: Canvas,
    programs: Sequence[Program],
    column: _Column,
    place: tuple[float, float, float],
) -> None:
    left, y, end = place
    values = [value for value in column.values if value is not None]
    known = [value for value in values if value > 0] or [1.0]
    notes = max(text_width(f"~{column.show(value)}", SMALL) for value in values)
    right = end - notes - 8
    top = y + 26
    bottom = top + ROW * len(programs)
    canvas.text(left, y + 14, column.title, bold=True, size=SMALL)
    axes = canvas.axes(left, top, right, bottom)
    low, high = 0.0, max(known)
    if column.is_log:
        axes.set_xscale("log")
        low, high = min(known) / 3, max(known)
        if high / low < 20:
            low = high / 20
    axes.set_xlim(low, high)
    axes.set_ylim(len(programs), 0)
    dress(axes, left=True)
    for i, (program, value) in enumerate(zip(programs, column.values, strict=True)):
        middle = top + ROW * (i + 0.5)
        if value is None:
            canvas.text(left + 6, middle + 4, "not known", "muted", size=SMALL)
            continue
        at = max(value, low)
        estimated = program.is_estimated and not column.is_log
        if column.is_log:
            # A length means nothing on such an axis: the place of the dot counts.
            axes.plot([low, at], [i + 0.5, i + 0.5], color=COLOURS["rule"], linewidth=1.5)
            shape = marker(MARKERS[program.phase], program.phase, size=7)
            axes.plot([at], [i + 0.5], clip_on=False, **shape)  # type: ignore[arg-type]
        else:
            fill = f"{program.phase}-{'soft' if estimated else 'fill'}"
            boxes(
                axes,
                [Box(0, i + 0.82, at, i + 0.18)],
                fill,
                hatch="////" if estimated else None,
                hatch_colour=program.phase if estimated else None,
                outline=program.phase if estimated else None,
            )
        fraction = _fraction(at, low, high, column.is_log)
        stop = left + (right - left) * fraction + (9 if column.is_log else 5)
        canvas.text(
            stop, middle + 4, f"{'~' if estimated else ''}{column.show(value)}", "muted", size=SMALL
        )
    most = max(2, int((right - left) / (text_width(column.show(high), SMALL) + 22)))
    x_ticks(axes, column.ticks(low, high, most), column.show)
    axes.set_yticks([])


def _fraction(value: float, low: float, high: float, is_log: bool) -> float:
    from math import log

    if is_log:
        return log(value / low) / log(high / low)
    return (value - low) / (high - low or 1.0)


@dataclass(frozen=True)
class Part:
    name: str
    amount: float
    fill: str
    hatch: str | None


def paint_memory(width: int, parts: Sequence[Part], room: float | None, room_name: str) -> Canvas:
    """One bar, its parts named in the key, and the line it must not cross."""
    total = sum(part.amount for part in parts)
    most = max(total, room or 0.0) * 1.02 or 1.0
    samples = [
        Sample(
            f"{part.name}: {data_size(part.amount)}",
            fill=part.fill,
            hatch=part.hatch,
            hatch_colour="ink" if part.hatch else None,
            outline="ink",
        )
        for part in parts
    ]
    if room:
        samples.append(Sample(f"{room_name}: {data_size(room)}", "limit", width=3, upright=True))
    top = 18 * key_rows(width, samples) + 14
    left, right = 24, width - 28
    bottom = top + 52
    canvas = Canvas(width, bottom + 30)
    key(canvas, 0, 0, width, samples)
    axes = canvas.axes(left, top, right, bottom)
    axes.set_xlim(0, most)
    axes.set_ylim(0, 1)
    dress(axes)
    start = 0.0
    for part in parts:
        if part.amount:
            boxes(
                axes,
                [Box(start, 0.2, start + part.amount, 0.8)],
                part.fill,
                hatch=part.hatch,
                hatch_colour="ink" if part.hatch else None,
                outline="ink",
            )
        start += part.amount
    if room:
        axes.axvline(room, color=COLOURS["limit"], linewidth=3, clip_on=False)
    unit = 1024.0 ** int(_power(most))
    count = max(2, int((right - left) / 90))
    x_ticks(axes, [unit * t for t in linear_ticks(0, most / unit, count)], data_size)
    axes.set_yticks([])
    return canvas


def _power(amount: float) -> int:
    power = 0
    while amount >= 1024 and power < 4:
        amount /= 1024
        power += 1
    return power
