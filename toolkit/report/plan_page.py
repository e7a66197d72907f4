"""The report of `plan`."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

from nxbucket.toolkit.plan_report import (
    PlannedRow,
    PlanReport,
    hbm_bytes,
    human_bytes,
    memory_warning,
    padding_hint,
)
from nxbucket.toolkit.report.numbers import large, seconds, whole
from nxbucket.toolkit.report.page import Plot, Section, Table, render_page
from nxbucket.toolkit.report.plan_figures import Part, Program, State, paint_memory, paint_programs
from nxbucket.toolkit.report.svg import draw

_WORDS: dict[State, str] = {"miss": "missing"}


def plan_page(
    report: PlanReport,
    facts: Sequence[tuple[str, str]] = (),
    title: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """`facts` and `notes` come on top of what the report itself says. Raises EnvironmentProblem
    without matplotlib."""
    spec = report.spec
    own_notes = (
        memory_warning(spec, report.memory, report.available_bytes),
        padding_hint(spec),
        None if report.lacks is None else report.lacks.message,
    )
    return render_page(
        "plan",
        title or f"{len(report.rows)} programs for {spec.model}",
        [*_facts(report), *facts],
        [*(note for note in own_notes if note is not None), *notes],
        [
            Section("Programs", [_programs(report)]),
            Section("Memory of a rank", [_memory(report)]),
        ],
    )


def _facts(report: PlanReport) -> list[tuple[str, str]]:
    spec = report.spec
    states = Counter(_state(row) for row in report.rows)
    facts = [
        ("Model file", str(spec.path)),
        ("Model", str(spec.model)),
        ("Target", report.target),
        ("In the cache", ", ".join(f"{n} {_WORDS.get(s, s)}" for s, n in states.items())),
        (
            "KV cache",
            f"{report.kv_tokens:,} tokens: {report.kv_requests:,} of the longest requests",
        ),
    ]
    if not report.unknown and report.missing and report.compile_s is not None:
        facts.append(("To compile", f"about {seconds(report.compile_s)}, one at a time"))
    return facts


def _state(row: PlannedRow) -> State:
    return cast(State, "unknown" if row.found is None else row.cache)


def _programs(report: PlanReport) -> Plot:
    programs = [
        Program(
            row.name,
            "prefill" if row.name.startswith("prefill") else "decode",
            _state(row),
            row.cost.flops,
            row.cost.io_bytes,
            row.compile_s,
            row.compile_s_from == "estimated",
        )
        for row in report.rows
    ]
    timed = any(program.compile_s is not None for program in programs)
    return Plot(
        "What each program costs",
        draw(
            "programs",
            "FLOPs, bytes in and out, and compile time of each program",
            lambda width: paint_programs(width, programs),
        ),
        "A row is a program. FLOPs and bytes are those of one step, on axes where each mark is "
        "several times the one before. "
        + (
            "Compile time is what was recorded, or an estimate from what was."
            if timed
            else "Nothing says yet how long a compile takes here."
        ),
        Table(
            ("program", "cache", "FLOPs", "bytes in and out", "compile time"),
            [
                (
                    row.name,
                    _state(row),
                    large(row.cost.flops),
                    whole(row.cost.io_bytes),
                    _compile_time(row),
                )
                for row in report.rows
            ],
        ),
    )


def _compile_time(row: PlannedRow) -> str:
    if row.compile_s is None:
        return "–"
    return f"{'~' if row.compile_s_from == 'estimated' else ''}{seconds(row.compile_s)}"


def _memory(report: PlanReport) -> Plot:
    memory = report.memory
    hbm = hbm_bytes(report.spec)
    room, name = (report.available_bytes, "free on this host")
    if hbm is not None:
        room, name = hbm, "HBM of a rank"
    parts = [
        Part("weights", memory.weight_bytes, "muted", None),
        Part("KV cache", memory.kv_cache_bytes, "idle", "////"),
        Part("in and out of a step", memory.io_bytes, "surface", None),
    ]
    caption = "Everything that a rank holds while it serves, but for a program's working memory."
    if room:
        left = room - memory.total_bytes
        caption += (
            f" {human_bytes(left)} are left for that."
            if left >= 0
            else f" It is {human_bytes(-left)} too much."
        )
    rows = [(part.name, whole(part.amount), human_bytes(part.amount)) for part in parts]
    rows.append(("all", whole(memory.total_bytes), human_bytes(memory.total_bytes)))
    if room:
        rows.append((name, whole(room), human_bytes(room)))
    return Plot(
        "What a rank holds",
        draw(
            "memory",
            f"Memory of a rank against the {name}",
            lambda width: paint_memory(width, parts, room or None, name),
        ),
        caption,
        Table(("part", "bytes", ""), rows),
    )
