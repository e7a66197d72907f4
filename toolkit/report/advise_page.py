"""The report of `advise`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from nxbucket.toolkit.buckets import get_bucket_for_count
from nxbucket.toolkit.choice.advise import Advice
from nxbucket.toolkit.choice.holdout import Holdout
from nxbucket.toolkit.choice.workload import Sizes, Use
from nxbucket.toolkit.report.bucket_figure import Bar, Panel, paint_buckets
from nxbucket.toolkit.report.numbers import count, percent, seconds, whole
from nxbucket.toolkit.report.page import Plot, Section, Table, render_page
from nxbucket.toolkit.report.size_figures import (
    UNIT,
    Score,
    distribution,
    paint_curve,
    paint_distribution,
    paint_scores,
    points_of,
)
from nxbucket.toolkit.report.svg import draw

_HEADING = {"prefill": "Prefill: prompt tokens per step", "decode": "Decode: sequences per step"}
_LINE = {
    "tokens": "The line is the best that a list of so many programs can do; where it is flat, "
    "further programs cost compile time and memory for nothing.",
    "time": "The line is the padding of the lists that take the least time: another list may pad "
    "less and take longer.",
}
_NAMES = {"powers_of_two": "powers of two", "percentiles": "percentiles", "now": "now"}


def advise_report(
    prefill: Advice,
    decode: Advice | None,
    holdouts: Sequence[Holdout],
    facts: Sequence[tuple[str, str]],
    title: str,
    notes: Sequence[str] = (),
) -> str:
    """`facts`: name and value, for the top of the page. Raises EnvironmentProblem without
    matplotlib."""
    phases = [prefill] if decode is None else [prefill, decode]
    sections = [Section("The lists", [_lists(advice) for advice in phases])]
    for advice in phases:
        sections.append(Section(_HEADING[advice.phase], list(_plots(advice))))
    if holdouts:
        sections.append(Section("On requests the lists have not seen", [_scores(holdouts)]))
    return render_page("advise", title, facts, notes, sections)


def _all_lists(advice: Advice) -> dict[str, Use]:
    others = {_NAMES.get(name, name): use for name, use in advice.compared.items()}
    return {"chosen": advice.best, **others}


def _lists(advice: Advice) -> Table:
    rows = []
    for name, use in _all_lists(advice).items():
        rows.append(
            (
                name,
                whole(len(use.buckets)),
                percent(use.padding_share),
                whole(use.executed),
                seconds(advice.time_s(use)),
                _shown(use.buckets),
            )
        )
    head = (
        *(advice.phase, "programs", "padding", "tokens computed"),
        *("time, by the cost model", "buckets"),
    )
    return Table(head, rows, ends_in_words=True)


def _shown(buckets: Sequence[int]) -> str:
    if len(buckets) <= 12:
        return ", ".join(map(str, buckets))
    return f"{', '.join(map(str, buckets[:5]))}, …, {', '.join(map(str, buckets[-5:]))}"


def _plots(advice: Advice) -> Iterator[Plot]:
    phase, sizes = advice.phase, advice.sizes.counts
    lists = _all_lists(advice)
    chosen, powers = advice.best, lists["powers of two"]
    unit = UNIT[phase]

    bins = distribution(phase, sizes, chosen.buckets)
    left_out = ""
    if bins.left_out:
        left_out = (
            f" Smaller steps than the axis shows hold {percent(bins.left_out)} of the tokens."
        )
    yield Plot(
        "How long the steps are, and where the buckets end",
        draw(
            f"{phase}-sizes",
            f"Distribution of {phase} step sizes with the edges of the chosen buckets",
            lambda width: paint_distribution(width, bins, chosen.buckets, powers.buckets),
        ),
        f"Height is the share of all {phase} tokens that are in steps of about that many {unit}. "
        "A step is padded to the next line on its right, so a good line stands just behind a "
        f"hill.{left_out}",
        Table(
            (f"{unit} in a step", "share of the tokens"),
            [
                (
                    whole(b.first) if b.first == b.last else f"{b.first:,} to {b.last:,}",
                    percent(b.share),
                )
                for b in bins.bins
                if b.share
            ],
        ),
    )

    points = points_of(phase, lists)
    yield Plot(
        "What one more program is worth",
        draw(
            f"{phase}-curve",
            f"Padding against the number of {phase} programs",
            lambda width: paint_curve(width, phase, advice.curve, points),
        ),
        f"{_LINE[advice.minimizes]} The chosen list has {len(chosen.buckets)} and pads "
        f"{percent(chosen.padding_share)}; powers of two have {len(powers.buckets)} and pad "
        f"{percent(powers.padding_share)}.",
        Table(
            ("programs", "padding", "buckets"),
            [
                (whole(n), percent(use.padding_share), _shown(use.buckets))
                for n, use in enumerate(advice.curve, 1)
            ],
            ends_in_words=True,
        ),
    )

    panels = [_panel(advice, name, lists[name]) for name in ("chosen", "powers of two")]
    yield Plot(
        "What each bucket computes",
        draw(
            f"{phase}-buckets",
            f"Real tokens and padding of each {phase} bucket",
            lambda width: paint_buckets(width, panels, "tokens computed", count),
        ),
        "A bar is all that a bucket computes for this workload; its hatched end is padding. Both "
        "sides have the same scale.",
        Table(
            ("list and bucket", "steps", "real tokens", "padding", "padding share"),
            [
                (f"{name}: {bucket}", *cells)
                for name in ("chosen", "powers of two")
                for bucket, cells in _cells(sizes, lists[name].buckets)
            ],
        ),
    )


def _by_bucket(sizes: Sizes, buckets: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Steps and real tokens."""
    steps: dict[int, int] = defaultdict(int)
    real: dict[int, int] = defaultdict(int)
    for size, times in sizes.items():
        bucket = get_bucket_for_count(size, buckets)
        steps[bucket] += times
        real[bucket] += size * times
    return {bucket: (steps[bucket], real[bucket]) for bucket in buckets}


def _panel(advice: Advice, name: str, use: Use) -> Panel:
    bars = []
    for bucket, (steps, real) in _by_bucket(advice.sizes.counts, use.buckets).items():
        padding = bucket * steps - real
        note = f"{percent(padding / (bucket * steps))} padding" if steps else "not used"
        bars.append(Bar(whole(bucket), real, padding, note))
    return Panel(f"{name}: {percent(use.padding_share)} padding", advice.phase, bars)


def _cells(sizes: Sizes, buckets: Sequence[int]) -> Iterator[tuple[int, tuple[str, ...]]]:
    for bucket, (steps, real) in _by_bucket(sizes, buckets).items():
        padding = bucket * steps - real
        share = percent(padding / (bucket * steps)) if steps else "–"
        yield bucket, (whole(steps), whole(real), whole(padding), share)


def _scores(holdouts: Sequence[Holdout]) -> Plot:
    groups = []
    rows = []
    for score in holdouts:
        dots = [
            Score("chosen on the first half", score.fitted.padding_share, score.phase, "o", False),
            Score("best, had it been known", score.best.padding_share, "muted", "o", True),
            Score("powers of two", score.powers_of_two.padding_share, "ink", "s", False),
        ]
        groups.append((score.phase, dots))
        rows += [(f"{score.phase}: {dot.name}", percent(dot.share)) for dot in dots]
    first = holdouts[0]
    return Plot(
        "Chosen on the first half, scored on the second",
        draw(
            "holdout",
            "Padding on the second half of the trace",
            lambda width: paint_scores(width, groups),
        ),
        f"The lists were chosen again on the first {whole(first.fitted_on)} requests and then met "
        f"the other {whole(first.scored_on)}. The closer the first dot is to the second, the more "
        "the lists can be trusted with requests to come.",
        Table(("list", "padding"), rows),
    )
