"""The report of `simulate`."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from nxbucket.compile.program import Phase
from nxbucket.serve.policy import BucketUse, padding_share
from nxbucket.toolkit.choice.simulate_report import QUANTILES, quantile
from nxbucket.toolkit.choice.simulator import Simulation
from nxbucket.toolkit.report.bucket_figure import Bar, Panel, paint_buckets
from nxbucket.toolkit.report.numbers import percent, seconds, tick_percent, whole
from nxbucket.toolkit.report.page import Plot, Section, Table, render_page
from nxbucket.toolkit.report.replay_numbers import (
    Cumulative,
    Strip,
    Windows,
    cumulative,
    cumulative_of_times,
    first_steps,
    letter_of,
    windows,
)
from nxbucket.toolkit.report.svg import Picture, draw
from nxbucket.toolkit.report.time_figures import (
    TOGETHER,
    Named,
    paint_cumulative,
    paint_strip,
    paint_timeline,
)

_TIMES: dict[str, tuple[str, Callable[[Simulation], "array[float]"]]] = {
    "ttft": ("Time to the first token", lambda s: s.ttft_s),
    "tpot": ("Time per token after the first", lambda s: s.tpot_s),
    "latency": ("Time to the last token", lambda s: s.latency_s),
}
_SHORT = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


def simulate_report(
    simulations: Sequence[Simulation],
    facts: Sequence[tuple[str, str]],
    title: str,
    notes: Sequence[str] = (),
) -> str:
    """One scenario or several, in the order they are to be compared in. Raises EnvironmentProblem
    without matplotlib."""
    scenarios = [(letter_of(i), simulation) for i, simulation in enumerate(simulations)]
    sections = [
        Section("Side by side", [_summary(scenarios), *_letters(scenarios)]),
        Section("How long requests took", list(_times(scenarios))),
        Section("What the time went into", list(_timelines(scenarios))),
        Section("Bucket use", [_buckets(*scenario) for scenario in scenarios]),
        Section("The queue", [_queue(scenarios)]),
    ]
    return render_page("simulate", title, facts, notes, sections)


Scenarios = Sequence[tuple[str, Simulation]]


def _called(letter: str, simulation: Simulation) -> str:
    return f"{letter}: {simulation.deployment.name}"


def _letters(scenarios: Scenarios) -> list[str]:
    if len(scenarios) == 1:
        return []
    return ["Each scenario keeps its letter in all pictures."]


def _summary(scenarios: Scenarios) -> Table:
    rows: list[list[str]] = []
    for name, (_, times_of) in _TIMES.items():
        ordered = [sorted(times_of(s)) for _, s in scenarios]
        for level in QUANTILES:
            found = [quantile(values, level) for values in ordered]
            cells = ["–" if value is None else seconds(value) for value in found]
            rows.append([f"{_SHORT[name]} p{level}", *cells])
    each: dict[str, Callable[[Simulation], str]] = {
        "output tokens per second": lambda s: f"{s.output_tokens_per_s:,.1f}",
        "requests per second": lambda s: f"{s.requests_per_s:,.2f}",
        "prefill padding": lambda s: _padding_share(s.stats.prefill),
        "decode padding": lambda s: _padding_share(s.stats.decode),
        "prefill, of all time": lambda s: _share_of_time(s, "prefill"),
        "decode, of all time": lambda s: _share_of_time(s, "decode"),
        "idle, of all time": lambda s: _share_of_time(s, "idle"),
        "queue, mean": lambda s: f"{s.queue_mean:,.2f}",
        "queue, longest": lambda s: whole(s.queue_max),
        "requests served": lambda s: whole(len(s.rows)),
        "requests refused": lambda s: whole(s.refused),
        "programs": lambda s: whole(
            len(s.deployment.prefill_buckets) + len(s.deployment.decode_buckets)
        ),
    }
    rows += [[name, *(show(s) for _, s in scenarios)] for name, show in each.items()]
    return Table(["", *(_called(*scenario) for scenario in scenarios)], rows)


def _padding_share(uses: Mapping[int, BucketUse]) -> str:
    return percent(padding_share(uses)) if any(use.real for use in uses.values()) else "–"


def _share_of_time(simulation: Simulation, phase: str) -> str:
    return percent(simulation.phase_s.get(phase, 0.0) / (simulation.end_s or 1.0))


def _times(scenarios: Scenarios) -> Iterator[Plot | str]:
    for name, (heading, times_of) in _TIMES.items():
        found = [(letter, cumulative(times_of(s))) for letter, s in scenarios]
        curves = [Named(letter, curve) for letter, curve in found if curve is not None]
        if not curves:
            yield f"{heading}: there is none."
            continue
        yield Plot(
            f"{heading} ({_SHORT[name]})",
            _drawn(name, f"Cumulative distribution of {_SHORT[name]}", curves, heading),
            "The height of a curve is the share of the requests that took no longer. Further left "
            f"is better. {_dotted(curves)}",
            _quantiles(curves, seconds),
        )


def _dotted(curves: Sequence[Named]) -> str:
    return "" if len(curves) > TOGETHER else "The dotted lines are at 95 % and 99 %."


def _drawn(
    name: str, label: str, curves: Sequence[Named], unit: str, *, is_count: bool = False
) -> Picture:
    return draw(name, label, lambda width: paint_cumulative(width, curves, unit, is_count=is_count))


_TABLE_LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


def _quantiles(curves: Sequence[Named], show: Callable[[float], str]) -> Table:
    return Table(
        ["no more than", *(named.letter for named in curves)],
        [
            [f"{100 * level:g} %", *(show(named.curve.at(level)) for named in curves)]
            for level in _TABLE_LEVELS
        ],
    )


def _timelines(scenarios: Scenarios) -> Iterator[Plot | str]:
    for letter, simulation in scenarios:
        most = 120 if len(scenarios) <= TOGETHER else 72
        made, strip = windows(simulation.timeline, most), first_steps(simulation.timeline)
        name = _called(letter, simulation)
        if made is None or strip is None:
            yield f"{name}: nothing was computed."
            continue
        yield _timeline(letter, name, made)
        yield _strip(letter, name, strip)


def _timeline(letter: str, name: str, made: Windows) -> Plot:
    length = seconds(made.edges[1])
    return Plot(
        f"{name}: phases",
        draw(
            f"timeline-{letter}",
            f"Share of time in prefill, decode and idle, and the queue, of scenario {letter}",
            lambda width: paint_timeline(width, made),
        ),
        f"Each column is {length}. Above: what it was spent on. Below: how many requests waited. "
        "A queue that grows while nothing is idle is more traffic than the server can take.",
        Table(
            ("from", "prefill", "decode", "idle", "waiting, mean", "waiting, longest"),
            [
                (
                    seconds(start),
                    *(percent(made.shares[phase][i]) for phase in ("prefill", "decode", "idle")),
                    f"{made.queue_mean[i]:,.2f}",
                    whole(made.queue_max[i]),
                )
                for i, start in enumerate(made.edges[:-1])
            ],
        ),
    )


def _strip(letter: str, name: str, strip: Strip) -> Plot:
    return Plot(
        f"{name}: the first {seconds(strip.end)}, step by step",
        draw(
            f"strip-{letter}",
            f"The first steps of scenario {letter}, one by one",
            lambda width: paint_strip(width, strip),
        ),
        "A box is a step; decode steps in which nothing changed are one box. While a prefill runs, "
        "decoding requests get no token: the gaps in their lane.",
        Table(
            ("phase", "boxes", "time", "longest"),
            [
                (
                    phase,
                    whole(len(steps)),
                    seconds(sum(end - start for start, end in steps)),
                    seconds(max((end - start for start, end in steps), default=0.0)),
                )
                for phase, steps in strip.steps.items()
            ],
        ),
    )


_PHASES: tuple[Phase, Phase] = ("prefill", "decode")


def _buckets(letter: str, simulation: Simulation) -> Plot:
    total = simulation.end_s or 1.0
    panels, rows = [], []
    for phase in _PHASES:
        uses = simulation.stats.prefill if phase == "prefill" else simulation.stats.decode
        spent = simulation.bucket_s.get(phase, {})
        bars = []
        for bucket, use in uses.items():
            share = spent.get(bucket, 0.0) / total
            computed = use.real + use.padding
            padding = use.padding / computed if computed else 0.0
            note = f"{percent(padding)} padding" if use.executions else "not used"
            bars.append(Bar(whole(bucket), share * (1 - padding), share * padding, note))
            rows.append(
                (
                    f"{phase} {bucket}",
                    whole(use.executions),
                    percent(share),
                    seconds(spent.get(bucket, 0.0)),
                    whole(use.real),
                    whole(use.padding),
                )
            )
        unit = "tokens" if phase == "prefill" else "sequences"
        panels.append(Panel(f"{phase}, by bucket in {unit}", phase, bars))
    return Plot(
        _called(letter, simulation),
        draw(
            f"buckets-{letter}",
            f"Share of time and padding of each bucket, scenario {letter}",
            lambda width: paint_buckets(width, panels, "share of all time", tick_percent),
        ),
        "A bar is the time that steps of a bucket took; its hatched end is as much of it as was "
        "padding.",
        Table(("bucket", "steps", "of all time", "time", "real tokens", "padding"), rows),
    )


def _queue(scenarios: Scenarios) -> Plot | str:
    found: list[tuple[str, Cumulative | None]] = [
        (letter, cumulative_of_times(s.queue_s)) for letter, s in scenarios
    ]
    curves = [Named(letter, curve) for letter, curve in found if curve is not None]
    if not curves or not any(s.queue_max for _, s in scenarios):
        return "No request ever waited for a seat."
    return Plot(
        "Requests waiting",
        _drawn(
            "queue",
            "Cumulative distribution of the length of the queue over time",
            curves,
            "requests waiting",
            is_count=True,
        ),
        "The height of a curve is the share of the time in which no more requests waited. A curve "
        "that begins high at the left is a server with room to spare.",
        _quantiles(curves, whole),
    )
