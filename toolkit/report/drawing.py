"""What the pictures have in common: axes, keys, labels that keep out of each other's way."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxbucket.toolkit.report.numbers import Format
from nxbucket.toolkit.report.svg import COLOURS, SMALL, TEXT, Canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as MplPath

DASHES: tuple[object, ...] = (
    "solid",
    (0, (6, 2)),
    (0, (1.5, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (3, 1.5)),
    (0, (8, 2, 1.5, 2, 1.5, 2)),
)
"""One for each of the colours s1 to s6."""


def text_width(text: str, size: float = TEXT) -> float:
    """No less than any of the page's fonts needs."""
    return size * sum(0.36 if c in " .,:;|il'" else 1.0 if c in "mwMW~%@" else 0.63 for c in text)


def dress(axes: "Axes", *, left: bool = False) -> None:
    """No box: a line to stand on, and a faint grid."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(left and side == "left")
    for side in ("bottom", "left"):
        axes.spines[side].set_color(COLOURS["muted"])
        axes.spines[side].set_linewidth(1)
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(
        which="both", colors=COLOURS["muted"], labelsize=SMALL, length=4, width=1, pad=4
    )
    axes.tick_params(axis="y", which="both", length=0)
    axes.minorticks_off()


def x_ticks(axes: "Axes", ticks: Sequence[float], show: Format, *, grid: bool = False) -> None:
    axes.set_xticks(ticks, [show(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    if grid:
        axes.grid(axis="x", color=COLOURS["rule"], linewidth=1)


def y_ticks(axes: "Axes", ticks: Sequence[float], show: Format) -> None:
    axes.set_yticks(ticks, [show(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color=COLOURS["rule"], linewidth=1)


@dataclass(frozen=True)
class Box:
    """Rectangles as one path: ten thousand of them stay small."""

    left: float
    bottom: float
    right: float
    top: float


def boxes(
    axes: "Axes",
    given: Iterable[Box],
    fill: str,
    *,
    hatch: str | None = None,
    hatch_colour: str | None = None,
    outline: str | None = None,
) -> None:
    from matplotlib.patches import PathPatch

    path = _path_of(given)
    if path is None:
        return
    axes.add_patch(
        PathPatch(
            path,
            facecolor=COLOURS[fill],
            edgecolor=COLOURS[hatch_colour or outline or fill],
            linewidth=0.8 if outline else 0,
            hatch=hatch,
        )
    )


def _path_of(given: Iterable[Box]) -> "MplPath | None":
    from matplotlib.path import Path as MplPath

    points: list[tuple[float, float]] = []
    for box in given:
        points += [
            (box.left, box.bottom),
            (box.left, box.top),
            (box.right, box.top),
            (box.right, box.bottom),
            (box.left, box.bottom),
        ]
    line = [MplPath.MOVETO, MplPath.LINETO, MplPath.LINETO, MplPath.LINETO, MplPath.CLOSEPOLY]
    return MplPath(points, line * (len(points) // 5)) if points else None


@dataclass(frozen=True)
class Sample:
    """An entry of a key. A box if it has a fill, else a line or a marker."""

    text: str
    colour: str = "ink"
    fill: str | None = None
    hatch: str | None = None
    hatch_colour: str | None = None
    outline: str | None = None
    dash: object = "solid"
    width: float = 1.6
    marker: str | None = None
    hollow: bool = False
    upright: bool = False
    """The line stands, as in the picture."""


def key_rows(width: float, samples: Sequence[Sample]) -> int:
    return 1 + max((row for _, row in _flow(width, samples)), default=0)


def _flow(width: float, samples: Sequence[Sample]) -> list[tuple[float, int]]:
    places, x, row = [], 0.0, 0
    for sample in samples:
        needs = 24 + text_width(sample.text, SMALL)
        if x and x + needs > width:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += needs + 16
    return places


def key(canvas: Canvas, left: float, top: float, right: float, samples: Sequence[Sample]) -> None:
    """A line of samples with their names, or as many as it takes: 18 pixels each."""
    from matplotlib.patches import Rectangle

    for sample, (start, row) in zip(samples, _flow(right - left, samples), strict=True):
        x, base = left + start, top + 18 * row + 13
        if sample.fill is not None:
            canvas.figure.add_artist(
                Rectangle(
                    (x / canvas.width, 1 - (base + 1) / canvas.height),
                    18 / canvas.width,
                    11 / canvas.height,
                    facecolor=COLOURS[sample.fill],
                    edgecolor=COLOURS[sample.hatch_colour or sample.outline or sample.fill],
                    linewidth=0.8 if sample.outline else 0,
                    hatch=sample.hatch,
                )
            )
        elif sample.marker is not None:
            canvas.line(
                [x + 9],
                [base - 4],
                sample.colour,
                **marker(sample.marker, sample.colour, sample.hollow),
            )
        elif sample.upright:
            canvas.line(
                [x + 9, x + 9],
                [base + 2, base - 11],
                sample.colour,
                linestyle=sample.dash,
                linewidth=sample.width,
            )
        else:
            canvas.line(
                [x, x + 18],
                [base - 4, base - 4],
                sample.colour,
                linestyle=sample.dash,
                linewidth=sample.width,
            )
        canvas.text(x + 24, base, sample.text, size=SMALL)


def marker(shape: str, colour: str, hollow: bool = False, size: float = 8) -> dict[str, object]:
    return {
        "marker": shape,
        "markersize": size,
        "markeredgewidth": 1.6,
        "markeredgecolor": COLOURS[colour],
        "markerfacecolor": COLOURS["surface" if hollow else colour],
        "linestyle": "none",
    }


def badge(axes: "Axes", x: float, y: float, letter: str, colour: str) -> None:
    """A letter in a circle, on the curve it names."""
    axes.text(
        x,
        y,
        letter,
        ha="center",
        va="center_baseline",
        fontsize=10,
        fontweight="bold",
        color=COLOURS[colour],
        bbox={
            "boxstyle": "circle,pad=0.22",
            "facecolor": COLOURS["surface"],
            "edgecolor": COLOURS[colour],
            "linewidth": 1.2,
        },
        zorder=10,
    )


def spread(
    places: Sequence[float], widths: Sequence[float], low: float, high: float
) -> list[float | None]:
    """Middles for labels in one row, as near to their ascending places as keeps them apart.

    None for those that there is no room for: every second one, or more, counted from the last.
    """
    stride = 1
    while sum(widths[::-stride]) > high - low and stride < len(widths):
        stride += 1
    kept = sorted(range(len(places) - 1, -1, -stride))
    found: list[float | None] = [None] * len(places)
    # What pushes each other becomes a block, which stands where its labels want it on average.
    blocks: list[tuple[float, int, float]] = []
    """Sum of the wanted left ends of the block, labels, width."""
    for i in kept:
        left = min(max(places[i] - widths[i] / 2, low), high - widths[i])
        block = (left, 1, widths[i])
        while blocks and _left(blocks[-1]) + blocks[-1][2] > _left(block):
            wanted, count, width = blocks.pop()
            block = (wanted + block[0] - block[1] * width, count + block[1], width + block[2])
        blocks.append(block)
    order = iter(kept)
    # The ends of the row hold, whatever the average says.
    limit = high
    lefts = []
    for block in reversed(blocks):
        limit = min(_left(block), limit - block[2])
        lefts.append(limit)
    before = low
    for block, left in zip(blocks, reversed(lefts), strict=True):
        x = max(left, before)
        for _ in range(block[1]):
            i = next(order)
            found[i] = x + widths[i] / 2
            x += widths[i]
        before = x
    return found


def _left(block: tuple[float, int, float]) -> float:
    return block[0] / block[1]


def above(places: Sequence[float], distance: float) -> list[float]:
    """Base lines, moved up as little as keeps them `distance` from each other."""
    moved = list(places)
    limit = math.inf
    for i in sorted(range(len(places)), key=lambda i: -places[i]):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - distance
    return moved
