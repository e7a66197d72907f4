"""Pictures of one list of buckets and the steps it is for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nxbucket.compile.program import Phase
from nxbucket.toolkit.choice.workload import Sizes, Use
from nxbucket.toolkit.report.drawing import (
    Box,
    Sample,
    above,
    boxes,
    dress,
    key,
    key_rows,
    marker,
    spread,
    text_width,
    x_ticks,
    y_ticks,
)
from nxbucket.toolkit.report.numbers import (
    linear_ticks,
    percent,
    power_of_two_ticks,
    tick_percent,
    whole,
)
from nxbucket.toolkit.report.svg import COLOURS, SMALL, Canvas

UNIT = {"prefill": "tokens", "decode": "sequences"}
LINEAR_TO = 64
"""Up to it every size has a bar of its own; sizes beyond are binned, eight bins to an octave."""
BINS_PER_OCTAVE = 8


@dataclass(frozen=True)
class Bin:
    """Sizes from `first` to `last`, and their share of all tokens computed."""

    first: int
    last: int
    share: float


@dataclass(frozen=True)
class Distribution:
    phase: Phase
    bins: tuple[Bin, ...]
    is_linear: bool
    low: float
    high: float
    """Of the axis."""
    left_out: float
    """Share of the tokens in smaller steps than the axis shows."""


def distribution(phase: Phase, sizes: Sizes, buckets: Sequence[int]) -> Distribution:
    total = sum(size * count for size, count in sizes.items()) or 1
    high = max(buckets[-1], max(sizes, default=1))
    if high <= LINEAR_TO:
        bins = tuple(Bin(n, n, n * sizes.get(n, 0) / total) for n in range(1, high + 1))
        return Distribution(phase, bins, True, 0.4, high + 0.6, 0.0)
    ordered = sorted(sizes)
    before = list(accumulate(size * sizes[size] / total for size in ordered))
    # Where the first two thousandths of the tokens end; the smallest bucket stays in sight.
    start = next((s for s, share in zip(ordered, before, strict=True) if share > 0.002), ordered[0])
    start = min(start, max(1, buckets[0] // 2), high // 2)
    low = 2 ** max(0, math.floor(math.log2(start)))
    octaves = math.log2(high / low)
    edges = [
        round(high * 2 ** (-i / BINS_PER_OCTAVE))
        for i in range(math.ceil(octaves * BINS_PER_OCTAVE) + 1)
    ]
    edges = sorted({max(low - 1, edge) for edge in edges} | {low - 1})
    shares = [0.0] * (len(edges) - 1)
    left_out = 0.0
    at = 0
    for size in ordered:
        if size < low:
            left_out += size * sizes[size] / total
            continue
        while edges[at + 1] < size:
            at += 1
        shares[at] += size * sizes[size] / total
    bins = tuple(
        Bin(left + 1, right, share)
        for left, right, share in zip(edges, edges[1:], shares, strict=False)
    )
    return Distribution(phase, bins, False, low * 0.97, high * 1.03, left_out)


def paint_distribution(
    width: int, sizes: Distribution, chosen: Sequence[int], powers: Sequence[int]
) -> Canvas:
    """Bars for the tokens, lines for the bucket edges, the chosen ones with their numbers."""
    narrow = width < 600
    left, right, phase = 52, width - 24, sizes.phase
    span = right - left
    behind = 0.5 if sizes.is_linear else 0.0
    first, last = (end if sizes.is_linear else math.log2(end) for end in (sizes.low, sizes.high))
    edges = [max(sizes.low, bucket + behind) for bucket in chosen]
    ats = edges if sizes.is_linear else [math.log2(edge) for edge in edges]
    places = [left + span * (at - first) / (last - first) for at in ats]
    texts = [whole(b) for b in chosen]
    widths = [text_width(text, SMALL) + 10 for text in texts]
    middles = spread(places, widths, left - 20, width)
    samples = [
        Sample("chosen bucket", phase, width=2.2, upright=True),
        Sample("power of two", "muted", dash=(0, (1.5, 2)), upright=True),
        Sample("tokens in steps of this size", fill=f"{phase}-soft", outline=phase),
    ]
    key_height = 18 * key_rows(width, samples)
    top = key_height + 40
    bottom = top + (190 if narrow else 240)
    canvas = Canvas(width, bottom + 46)
    key(canvas, 0, 0, width, samples)
    axes = canvas.axes(left, top, right, bottom)
    if not sizes.is_linear:
        axes.set_xscale("log", base=2)
    axes.set_xlim(sizes.low, sizes.high)
    tallest = sorted((b.share for b in sizes.bins), reverse=True)
    # A full chunk may hold most of the tokens; it is cut, and says how high it is.
    cut = tallest[0] > 2.5 * tallest[1] > 0 if len(tallest) > 1 else False
    ceiling = 1.25 * tallest[1] if cut else (1.06 * tallest[0] or 1.0)
    axes.set_ylim(0, ceiling)
    dress(axes)
    pad = 0.42 if sizes.is_linear else 0.5
    drawn = [b for b in sizes.bins if b.share]
    boxes(
        axes,
        (Box(max(b.first - pad, sizes.low), 0, b.last + pad, min(b.share, ceiling)) for b in drawn),
        f"{phase}-soft",
        outline=phase,
    )
    for power in powers:
        if power >= sizes.low:
            axes.axvline(
                power + behind, color=COLOURS["muted"], linewidth=1, linestyle=(0, (1.5, 2))
            )
    for bucket, place, text, middle in zip(chosen, places, texts, middles, strict=True):
        if bucket < sizes.low:
            continue
        axes.axvline(bucket + behind, color=COLOURS[phase], linewidth=2.2)
        if middle is not None:
            canvas.line([middle, place], [top - 15, top], phase, linewidth=1)
            canvas.text(middle, top - 18, text, phase, anchor="center", size=SMALL, bold=True)
    if cut:
        highest = max(sizes.bins, key=lambda b: b.share)
        axes.annotate(
            f"{percent(highest.share)} ↑",
            (highest.first, ceiling),
            xytext=(-6, -14),
            textcoords="offset points",
            ha="right",
            fontsize=SMALL,
            color=COLOURS["ink"],
            bbox={"facecolor": COLOURS["surface"], "edgecolor": "none", "pad": 1.5},
        )
    most = max(3, int(span / 46))
    if sizes.is_linear:
        ticks = [float(t) for t in linear_ticks(1, sizes.high, most) if t >= 1 and t == int(t)]
        ticks = [1.0, *(t for t in ticks if t > 1 + sizes.high / most)]
    else:
        ticks = power_of_two_ticks(sizes.low, sizes.high, most)
    x_ticks(axes, ticks, whole)
    y_ticks(axes, linear_ticks(0, ceiling, 5), tick_percent)
    canvas.text(
        (left + right) / 2,
        bottom + 40,
        f"{UNIT[phase]} in a step",
        "muted",
        anchor="center",
        size=SMALL,
    )
    return canvas


@dataclass(frozen=True)
class Point:
    """A list beside the curve."""

    name: str
    programs: int
    share: float
    marker: str
    colour: str
    hollow: bool


POINT_STYLE = {
    "chosen": ("o", False),
    "powers of two": ("s", False),
    "percentiles": ("^", True),
    "now": ("D", True),
}


def points_of(phase: Phase, lists: dict[str, Use]) -> list[Point]:
    points = []
    for name, use in lists.items():
        shape, hollow = POINT_STYLE.get(name, ("v", True))
        colour = phase if name == "chosen" else "ink"
        points.append(Point(name, len(use.buckets), use.padding_share, shape, colour, hollow))
    return points


def paint_curve(width: int, phase: Phase, curve: Sequence[Use], points: Sequence[Point]) -> Canvas:
    """Padding against the number of programs; the lists beside it are named at the right."""
    narrow = width < 600
    samples = [Sample("best list of that many programs", phase, width=2)]
    if narrow:
        samples += [
            Sample(f"{p.name}: {percent(p.share)}", p.colour, marker=p.marker, hollow=p.hollow)
            for p in points
        ]
    names = [f"{p.name}: {percent(p.share)}" for p in points]
    most = max(len(curve), *(p.programs for p in points))
    top = 18 * key_rows(width, samples) + 26
    bottom = top + (200 if narrow else 250)
    left, right = 52.0, width - 24.0
    at = [(p.programs - 0.5) / most for p in points]
    if not narrow:
        # Names stand to the right of their points, where the curve is below them.
        needs = [16 + text_width(name, SMALL) for name in names]
        right = min(right, *(left + (width - left - n) / x for n, x in zip(needs, at, strict=True)))
    canvas = Canvas(width, bottom + 46)
    key(canvas, 0, 0, width, samples)
    canvas.text(0, top - 8, "padding, of all tokens computed", "muted", size=SMALL)
    axes = canvas.axes(left, top, right, bottom)
    shares = [use.padding_share for use in curve]
    ceiling = 1.08 * max(0.01, *shares, *(p.share for p in points))
    axes.set_xlim(0.5, most + 0.5)
    axes.set_ylim(0, ceiling)
    dress(axes)
    axes.plot(range(1, len(curve) + 1), shares, color=COLOURS[phase], linewidth=2, clip_on=False)
    axes.plot(
        range(1, len(curve) + 1),
        shares,
        clip_on=False,
        **marker(".", phase, size=6),  # type: ignore[arg-type]
    )
    for point in points:
        axes.plot(
            [point.programs],
            [point.share],
            clip_on=False,
            zorder=5,
            **marker(point.marker, point.colour, point.hollow, 9),  # type: ignore[arg-type]
        )
    if not narrow:
        wanted = [bottom - (bottom - top) * p.share / ceiling - 6 for p in points]
        for point, name, place, y in zip(points, names, at, above(wanted, 17), strict=True):
            x = left + (right - left) * place + 12
            canvas.text(x, y, name, point.colour, size=SMALL, bold=point.name == "chosen")
    ticks = linear_ticks(1, most, max(3, int((right - left) / 40)))
    x_ticks(axes, sorted({1.0, *(t for t in ticks if t >= 2 and t == int(t))}), whole)
    y_ticks(axes, linear_ticks(0, ceiling, 6), tick_percent)
    canvas.text(
        (left + right) / 2,
        bottom + 40,
        "programs in the list",
        "muted",
        anchor="center",
        size=SMALL,
    )
    return canvas


@dataclass(frozen=True)
class Score:
    """A row of dots: a list on requests it has not seen."""

    name: str
    share: float
    colour: str
    marker: str
    hollow: bool


def paint_scores(width: int, groups: Sequence[tuple[str, Sequence[Score]]]) -> Canvas:
    narrow = width < 600
    left = 20 if narrow else 200
    right = width - 72
    row = 40 if narrow else 24
    most = max((s.share for _, scores in groups for s in scores), default=0.0) or 0.01
    rows = sum(len(scores) for _, scores in groups)
    height = 30 * len(groups) + row * rows + 46
    canvas = Canvas(width, height)
    y = 0
    ticks = linear_ticks(0, most, 5 if narrow else 7)
    span = right - left
    for tick in ticks:
        x = left + span * tick / most
        canvas.line([x, x], [26, height - 40], "rule")
        canvas.text(x, height - 22, tick_percent(tick), "muted", anchor="center", size=SMALL)
    canvas.text(left, height - 4, "padding, of all tokens computed", "muted", size=SMALL)
    for heading, scores in groups:
        canvas.text(0, y + 18, heading, bold=True, size=SMALL)
        y += 30
        for score in scores:
            base = y + (row - 8 if narrow else 12)
            x = left + span * score.share / most
            canvas.text(left if narrow else 0, y + (14 if narrow else 16), score.name, size=SMALL)
            canvas.line([left, x], [base, base], score.colour, linewidth=2.5)
            canvas.line(
                [x], [base], score.colour, **marker(score.marker, score.colour, score.hollow)
            )
            canvas.text(x + 10, base + 4, percent(score.share), size=SMALL)
            y += row
    return canvas
