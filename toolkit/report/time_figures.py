"""Pictures of replays: how long requests took, and what the time went into."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nxbucket.toolkit.report.drawing import (
    DASHES,
    Box,
    Sample,
    badge,
    boxes,
    dress,
    key,
    key_rows,
    x_ticks,
    y_ticks,
)
from nxbucket.toolkit.report.numbers import (
    Format,
    linear_ticks,
    log_ticks,
    second_ticks,
    seconds,
    tick_percent,
    whole,
)
from nxbucket.toolkit.report.replay_numbers import Cumulative, Strip, Windows
from nxbucket.toolkit.report.svg import COLOURS, SMALL, Canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOGETHER = 6
"""Curves that can be told from each other in one picture; more get a picture each."""
WIDE_SPREAD = 12
"""From there on an axis is logarithmic."""

Scale = Literal["linear", "log", "log1p"]


@dataclass(frozen=True)
class Named:
    letter: str
    curve: Cumulative


@dataclass(frozen=True)
class Range:
    """`floor`: where the shares begin; above 0 where every curve begins high."""

    scale: Scale
    low: float
    high: float
    floor: float = 0.0


def range_of(curves: Sequence[Named], *, is_count: bool = False) -> Range:
    low = min(c.curve.at(0.01) for c in curves)
    high = max(c.curve.values[-1] for c in curves)
    if is_count:
        # Nobody waits for most of the time: that part of the axis would be empty.
        floor = math.floor(9.99 * min(c.curve.shares[0] for c in curves)) / 10
        return Range("log1p" if high > 60 else "linear", 0.0, max(1.0, high), floor)
    if low > 0 and high / low > WIDE_SPREAD:
        return Range("log", low * 0.9, high * 1.1)
    return Range("linear", 0.0, high * 1.03 or 1.0)


def paint_cumulative(
    width: int, curves: Sequence[Named], unit: str, *, is_count: bool = False
) -> Canvas:
    """All in one picture, each with its letter, or a picture each before the span of them all."""
    span = range_of(curves, is_count=is_count)
    show: Format = whole if is_count else seconds
    if len(curves) > TOGETHER:
        return _many(width, curves, span, show, unit)
    narrow = width < 600
    left, right, top = 52, width - 24, 12
    bottom = top + (220 if narrow else 280)
    canvas = Canvas(width, bottom + 46)
    axes = canvas.axes(left, top, right, bottom)
    _dress_cumulative(axes, span, show, right - left)
    for number, named in enumerate(curves):
        colour = f"s{number % 6 + 1}"
        _curve(axes, named.curve, span, colour, DASHES[number % 6], 2.0)
    for number, named in enumerate(curves):
        # Each at heights of its own, so that letters never lie on each other.
        floor = max(span.floor, named.curve.shares[0] if is_count else 0.0)
        for turn in (0, 1):
            place = (0.5 + number + turn * len(curves)) / (2 * len(curves))
            level = floor + (1 - floor) * (0.1 + 0.8 * place)
            at = _shown(named.curve.at(level), span)
            badge(axes, at, level, named.letter, f"s{number % 6 + 1}")
    canvas.text((left + right) / 2, bottom + 40, unit, "muted", anchor="center", size=SMALL)
    return canvas


def _many(width: int, curves: Sequence[Named], span: Range, show: Format, unit: str) -> Canvas:
    columns = 2 if width < 600 else 4
    rows = -(-len(curves) // columns)
    gap, left, height, below = 30, 44, 96, 44
    cell = (width - left - 16 - gap * (columns - 1)) / columns
    samples = [
        Sample("this one", "ink", width=2),
        Sample("between the best and the worst of all", fill="idle", outline="muted"),
    ]
    head = 18 * key_rows(width, samples) + 8
    canvas = Canvas(width, round(head + rows * (height + below) + 6))
    key(canvas, 0, 0, width, samples)
    levels = (*(i / 40 for i in range(40)), 0.99, 1.0)
    best = [min(c.curve.at(level) for c in curves) for level in levels]
    worst = [max(c.curve.at(level) for c in curves) for level in levels]
    for number, named in enumerate(curves):
        row, column = divmod(number, columns)
        x = left + column * (cell + gap)
        y = head + row * (height + below) + 14
        axes = canvas.axes(x, y, x + cell, y + height)
        _dress_cumulative(axes, span, show, cell, names=column == 0)
        axes.fill_betweenx(
            levels,
            [_shown(v, span) for v in best],
            [_shown(v, span) for v in worst],
            facecolor=COLOURS["idle"],
            edgecolor=COLOURS["muted"],
            linewidth=0.6,
        )
        values = tuple(named.curve.at(level) for level in levels)
        _curve(axes, Cumulative(values, levels), span, "ink", "solid", 2.0)
        axes.text(
            0.97,
            0.08,
            named.letter,
            transform=axes.transAxes,
            ha="right",
            fontsize=14,
            fontweight="bold",
            color=COLOURS["ink"],
        )
    canvas.text(width / 2, canvas.height - 4, unit, "muted", anchor="center", size=SMALL)
    return canvas


def _shown(value: float, span: Range) -> float:
    if span.scale == "log1p":
        return value + 1
    return max(value, span.low) if span.scale == "log" else value


def _curve(
    axes: "Axes", curve: Cumulative, span: Range, colour: str, dash: object, width: float
) -> None:
    values = [_shown(v, span) for v in curve.values]
    axes.plot(
        [values[0], *values],
        [span.floor, *curve.shares],
        color=COLOURS[colour],
        linestyle=dash,
        linewidth=width,
        drawstyle="steps-post" if span.scale != "log" and len(values) < 40 else "default",
        clip_on=False,
    )


def _dress_cumulative(
    axes: "Axes", span: Range, show: Format, width: float, *, names: bool = True
) -> None:
    most = max(2, int(width / 62))
    if span.scale == "linear":
        axes.set_xlim(span.low, span.high)
        is_count = show is whole
        ticks = (
            [t for t in linear_ticks(span.low, span.high, most) if t == int(t)]
            if is_count
            else second_ticks(span.low, span.high, most)
        )
    elif span.scale == "log":
        axes.set_xscale("log")
        axes.set_xlim(span.low, span.high)
        ticks = log_ticks(span.low, span.high, most)
    else:
        axes.set_xscale("log")
        axes.set_xlim(0.95, (span.high + 1) * 1.05)
        ticks = [t + 1 for t in (0.0, *log_ticks(10, span.high, most - 1))]
    axes.set_ylim(span.floor, 1 + 0.02 * (1 - span.floor))
    dress(axes)
    x_ticks(axes, ticks, (lambda t: show(t - 1)) if span.scale == "log1p" else show)
    levels = linear_ticks(span.floor, 1, 5 if width > 200 else 3, steps=(1, 2, 2.5, 5))
    y_ticks(axes, levels, tick_percent if names else lambda _: "")
    for level in (0.95, 0.99) if width > 200 else ():
        axes.axhline(level, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (2, 3)))


def paint_timeline(width: int, made: Windows) -> Canvas:
    narrow = width < 600
    samples = [
        Sample("prefill", fill="prefill-fill"),
        Sample("decode", fill="decode-fill"),
        Sample("idle", fill="idle", outline="muted"),
    ]
    left, right = 52, width - 24
    top = 18 * key_rows(width, samples) + 10
    middle = top + (100 if narrow else 120)
    second = middle + 34
    bottom = second + 60
    canvas = Canvas(width, bottom + 46)
    key(canvas, 0, 0, width, samples)
    edges = made.edges
    upper = canvas.axes(left, top, right, middle)
    lower = canvas.axes(left, second, right, bottom)
    floor = [0.0] * (len(edges) - 1)
    boxes(upper, [Box(0, 0, edges[-1], 1)], "idle")
    for name, fill in (("prefill", "prefill-fill"), ("decode", "decode-fill")):
        ceiling = [min(1.0, f + s) for f, s in zip(floor, made.shares[name], strict=True)]
        _steps(upper, edges, floor, ceiling, fill)
        floor = ceiling
    upper.set_ylim(0, 1)
    longest = max(made.queue_max)
    _steps(lower, edges, [0.0] * len(floor), [float(n) for n in made.queue_max], "idle", "muted")
    _steps(lower, edges, [0.0] * len(floor), list(made.queue_mean), "ink")
    lower.set_ylim(0, max(1.0, longest * 1.05))
    ticks = second_ticks(0, edges[-1], max(3, int((right - left) / 66)))
    for axes in (upper, lower):
        axes.set_xlim(0, edges[-1])
        dress(axes)
        x_ticks(axes, ticks, seconds)
    upper.tick_params(labelbottom=False)
    y_ticks(upper, (0, 0.5, 1), tick_percent)
    upper.grid(False)
    y_ticks(lower, [t for t in linear_ticks(0, max(1, longest), 3) if t == int(t)], whole)
    canvas.text(
        0, second - 10, "requests waiting: longest (outline) and mean (solid)", "muted", size=SMALL
    )
    canvas.text(
        (left + right) / 2,
        bottom + 40,
        "time since the first request",
        "muted",
        anchor="center",
        size=SMALL,
    )
    return canvas


def _steps(
    axes: "Axes",
    edges: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    fill: str,
    outline: str | None = None,
) -> None:
    axes.fill_between(
        edges,
        [*low, low[-1]],
        [*high, high[-1]],
        step="post",
        facecolor=COLOURS[fill],
        edgecolor=COLOURS[outline or fill],
        linewidth=0.8 if outline else 0,
    )


def paint_strip(width: int, strip: Strip) -> Canvas:
    """Two lanes, a box for each step; below, who waits."""
    narrow = width < 600
    left, right = 62, width - 24
    lane = 26
    canvas = Canvas(width, 4 + 2 * lane + 52)
    axes = canvas.axes(left, 4, right, 4 + 2 * lane)
    axes.set_xlim(0, strip.end or 1.0)
    axes.set_ylim(0, 2)
    dress(axes, left=True)
    for number, name in enumerate(("decode", "prefill")):
        pixel = (strip.end or 1.0) / (right - left)
        # What is thinner than a pixel and a half could not be seen, and a rim would hide it.
        steps = [(start, max(end, start + 1.5 * pixel)) for start, end in strip.steps[name]]
        for is_thin in (False, True):
            boxes(
                axes,
                (
                    Box(start, number + 0.15, end, number + 0.85)
                    for start, end in steps
                    if (end - start < 4 * pixel) == is_thin
                ),
                f"{name}-fill",
                outline=None if is_thin else "surface",
            )
        canvas.text(0, 4 + lane * (1.5 - number) + 4, name, name, size=SMALL, bold=True)
    axes.set_yticks([])
    ticks = linear_ticks(0, strip.end or 1.0, 4 if narrow else 9)
    x_ticks(axes, ticks, seconds)
    canvas.text(
        (left + right) / 2,
        4 + 2 * lane + 42,
        f"time, from {seconds(strip.start)} on" if strip.start else "time since the first request",
        "muted",
        anchor="center",
        size=SMALL,
    )
    return canvas
