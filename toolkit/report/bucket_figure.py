"""Bars for buckets: what was asked for, and the padding on top. Shared by advise and simulate."""

from collections.abc import Sequence
from dataclasses import dataclass

from nxbucket.compile.program import Phase
from nxbucket.toolkit.report.drawing import (
    Box,
    Sample,
    boxes,
    dress,
    key,
    key_rows,
    text_width,
    x_ticks,
)
from nxbucket.toolkit.report.numbers import Format, linear_ticks
from nxbucket.toolkit.report.svg import SMALL, Canvas

ROW = 22


@dataclass(frozen=True)
class Bar:
    """`real` and `padding` in the axis's unit; `note` stands at its end."""

    name: str
    real: float
    padding: float
    note: str


@dataclass(frozen=True)
class Panel:
    title: str
    phase: Phase
    bars: Sequence[Bar]

    @property
    def longest(self) -> float:
        return max((bar.real + bar.padding for bar in self.bars), default=0.0)


def paint_buckets(width: int, panels: Sequence[Panel], unit: str, show: Format) -> Canvas:
    """Panels side by side, or one below the other in a narrow window; all to one scale."""
    narrow = width < 600
    phases = list(dict.fromkeys(panel.phase for panel in panels))
    samples = []
    for phase in phases:
        prefix = f"{phase}: " if len(phases) > 1 else ""
        samples += [
            Sample(f"{prefix}real", fill=f"{phase}-fill"),
            Sample(
                f"{prefix}padding",
                fill=f"{phase}-soft",
                hatch="////",
                hatch_colour=phase,
                outline=phase,
            ),
        ]
    heights = [28 + ROW * len(panel.bars) + 46 for panel in panels]
    top = 18 * key_rows(width, samples) + 12
    body = sum(heights) if narrow else max(heights)
    canvas = Canvas(width, round(top + body))
    key(canvas, 0, 0, width, samples)
    longest = max((panel.longest for panel in panels), default=0.0) or 1.0
    y, x = float(top), 0.0
    column = width if narrow else (width - 32 * (len(panels) - 1)) / len(panels)
    for panel, height in zip(panels, heights, strict=True):
        _panel(canvas, panel, (x, y, x + column), longest, unit, show)
        if narrow:
            y += height
        else:
            x += column + 32
    return canvas


def _panel(
    canvas: Canvas,
    panel: Panel,
    place: tuple[float, float, float],
    longest: float,
    unit: str,
    show: Format,
) -> None:
    x, top, end = place
    canvas.text(x, top + 14, panel.title, bold=True, size=SMALL)
    names = max((text_width(bar.name, SMALL) for bar in panel.bars), default=0)
    notes = max((text_width(bar.note, SMALL) for bar in panel.bars), default=0)
    left, right = x + names + 8, end - notes - 10
    first = top + 28
    bottom = first + ROW * len(panel.bars)
    axes = canvas.axes(left, first, right, bottom)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(panel.bars), 0)
    dress(axes, left=True)
    real, padding = [], []
    for i, bar in enumerate(panel.bars):
        low, high = i + 0.82, i + 0.18
        real.append(Box(0, low, bar.real, high))
        if bar.padding:
            padding.append(Box(bar.real, low, bar.real + bar.padding, high))
        middle = first + ROW * (i + 0.5) + 4
        canvas.text(left - 6, middle, bar.name, anchor="right", size=SMALL)
        stop = left + (right - left) * (bar.real + bar.padding) / longest
        canvas.text(stop + 6, middle, bar.note, "muted", size=SMALL)
    phase = panel.phase
    boxes(axes, padding, f"{phase}-soft", hatch="////", hatch_colour=phase, outline=phase)
    boxes(axes, real, f"{phase}-fill")
    most = max(2, int((right - left) / 62))
    x_ticks(axes, linear_ticks(0, longest, most), show, grid=True)
    axes.set_yticks([])
    canvas.text(left, bottom + 38, unit, "muted", size=SMALL)
