"""Whether the lists a server runs are still the right ones: its own counters against its lock."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxbucket.compile.lockfile import Lock, LockedTarget, model_file_of, read_lock
from nxbucket.compile.program import Phase
from nxbucket.toolkit.choice.advise import Advice, Goal, advise, grid_of, make_goal
from nxbucket.toolkit.choice.advise_report import KEY_OF, UNIT_OF, percent
from nxbucket.toolkit.choice.inputs import (
    check_entries,
    check_grid,
    costs_of,
    note_on_target,
    times_of,
)
from nxbucket.toolkit.choice.metrics_reader import ServerMetrics, read_metrics
from nxbucket.toolkit.choice.price import Price, from_cache, from_costs_file, price_of
from nxbucket.toolkit.choice.workload import Lists, ServerLimits, StepSizes, Use
from nxbucket.toolkit.errors import LockError, TraceError, UsageError

MIN_STEPS = 1000
"""Fewer steps of a phase say little about the next ones."""


@dataclass(frozen=True)
class DriftOptions:
    metrics: str
    lock: Path
    target: str | None = None
    threshold: float = 0.05
    max_programs: int | None = None
    grid: int | None = None
    costs: Path | None = None
    api_key: str | None = None


@dataclass(frozen=True)
class PhaseDrift:
    """`saving`: of what is executed now, tokens or sequences, or of its time."""

    phase: Phase
    now: Use
    best: Use
    saving: float

    @property
    def has_evidence(self) -> bool:
        return self.now.steps >= MIN_STEPS


@dataclass(frozen=True)
class Drift:
    """`price` is that of compiling the lists of `phases`."""

    source: str
    lock: Path
    target: str
    minimizes: str
    threshold: float
    phases: list[PhaseDrift]
    price: Price
    notes: list[str]

    @property
    def drifted(self) -> bool:
        return any(
            p.has_evidence and p.saving >= self.threshold and p.saving > 0 for p in self.phases
        )

    @property
    def verdict(self) -> str:
        if self.drifted:
            return f"drifted: other lists would save {percent(self.threshold)} or more of a phase"
        few = [p.phase for p in self.phases if not p.has_evidence]
        if len(few) == len(self.phases):
            return f"undecided: fewer than {MIN_STEPS} steps"
        unknown = f"; {few[0]} has fewer than {MIN_STEPS} steps" if few else ""
        return f"good: no phase would save {percent(self.threshold)}{unknown}"

    @property
    def diff(self) -> str:
        """Of the model file's lines: empty if the lists are the best already."""
        before, after = (_lines(self.phases, which) for which in ("now", "best"))
        lines = difflib.unified_diff(
            before, after, str(model_file_of(self.lock)), "advised", lineterm="", n=1
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "drifted": self.drifted,
            "verdict": self.verdict,
            "metrics": self.source,
            "lock": str(self.lock),
            "target": self.target,
            "minimizes": self.minimizes,
            "threshold": self.threshold,
            **{p.phase: _phase_as_json(p) for p in self.phases},
            "to_compile": self.price.as_json(),
            "diff": self.diff,
            "notes": self.notes,
        }


def _lines(phases: Sequence[PhaseDrift], which: str) -> list[str]:
    lists = [f"  {KEY_OF[p.phase]}: {list(getattr(p, which).buckets)}" for p in phases]
    return ["neuron_config:", *lists]


def _phase_as_json(drift: PhaseDrift) -> dict[str, Any]:
    return {
        "steps": drift.now.steps,
        "enough_steps": drift.has_evidence,
        "now": {**drift.now.as_json(), "executed": drift.now.executed},
        "best": {**drift.best.as_json(), "executed": drift.best.executed},
        "saving": round(drift.saving, 6),
    }


def measure_drift(options: DriftOptions) -> Drift:
    """Raises UsageError, LockError, TraceError, EnvironmentProblem."""
    if not 0 <= options.threshold < 1:
        raise UsageError(
            f"--threshold is {options.threshold}", hint="a share from 0 to 1, e.g. 0.05"
        )
    check_grid(options.grid)
    check_entries("--max-programs", options.max_programs)
    lock = read_lock(options.lock)
    name, target = _target(lock, options)
    metrics = read_metrics(options.metrics, api_key=options.api_key)
    chunks, batches = metrics.chunk_tokens, metrics.batch_seqs
    if chunks is None or batches is None:
        raise TraceError(
            f"{options.metrics} is no nxbucket server's, or that of an older nxbucket: it does not "
            "count the sizes of its steps",
            hint="nxbucket advise --metrics takes what any vLLM server counts",
        )
    _check_lists(options, metrics, name, target)
    if not chunks.count:
        raise TraceError(
            f"{options.metrics}: the server has run no prefill step yet",
            hint="ask again when it has had a day of its usual requests",
        )
    costs = costs_of(options.costs)
    times = times_of(costs, options.costs, None, None)
    now: Lists = {"prefill": target.num_batched_tokens_buckets, "decode": target.num_seqs_buckets}
    goal = make_goal(
        ServerLimits(now["prefill"][-1], now["decode"][-1]),
        times,
        lists=now,
        max_prefill_entries=options.max_programs,
        max_decode_entries=options.max_programs,
        grid=options.grid or grid_of(now["prefill"]),
        minimizes="tokens" if times.is_assumed else "time",
    )
    sizes = StepSizes.at_bounds(batches)
    prefill, decode = advise(goal, StepSizes.at_bounds(chunks), sizes if sizes.counts else None)
    phases = [_phase(goal, prefill, now["prefill"], metrics.prefill_padding)]
    if decode is not None:
        phases.append(_phase(goal, decode, now["decode"], metrics.decode_padding))
    then: Lists = {p.phase: p.best.buckets for p in phases}
    layers = int(lock.architecture["num_hidden_layers"])
    seconds = from_costs_file(costs) or from_cache(None, name, layers)
    contexts = target.decode_context_length_buckets
    return Drift(
        source=options.metrics,
        lock=options.lock,
        target=name,
        minimizes=goal.minimizes,
        threshold=options.threshold,
        phases=phases,
        price=price_of(now, {**now, **then}, contexts, seconds),
        notes=note_on_target(costs, name),
    )


def _target(lock: Lock, options: DriftOptions) -> tuple[str, LockedTarget]:
    names = ", ".join(lock.targets)
    if options.target is None:
        if len(lock.targets) != 1:
            raise UsageError(
                f"{options.lock} has several targets: {names}",
                hint=f"--target {next(iter(lock.targets), 'NAME')}: the one the server runs",
            )
        return next(iter(lock.targets.items()))
    if options.target not in lock.targets:
        raise UsageError(f"{options.lock} has no target {options.target}", hint=f"it has {names}")
    return options.target, lock.targets[options.target]


def _check_lists(
    options: DriftOptions, metrics: ServerMetrics, name: str, target: LockedTarget
) -> None:
    for key, locked, padding, sizes in (
        (
            "num_batched_tokens_buckets",
            target.num_batched_tokens_buckets,
            metrics.prefill_padding,
            metrics.chunk_tokens,
        ),
        (
            "num_seqs_buckets",
            target.num_seqs_buckets,
            metrics.decode_padding,
            metrics.batch_seqs,
        ),
    ):
        seen = {*padding, *((sizes.bounds[-1],) if sizes is not None else ())}
        foreign = sorted(seen - set(locked))
        if foreign:
            raise LockError(
                f"{options.metrics} runs {key} {foreign}, which {options.lock} does not have for "
                f"{name}: the server was started from another lock",
                hint="name the lock it was started from; GET /nxbucket/buckets shows its programs",
            )
        steps = sum(count for count, _ in padding.values())
        counted = 0 if sizes is None else sizes.count
        # A scrape in the middle of a step may see one counter and not yet the other.
        if abs(steps - counted) > max(8, steps // 1000) or (sizes is not None and sizes.beyond):
            raise TraceError(
                f"{options.metrics} contradicts itself: {steps} steps by their padding, {counted} "
                f"by their sizes ({key})",
                hint="ask the server itself; metrics of several servers must not be mixed",
            )


def _phase(
    goal: Goal, advice: Advice, now: Sequence[int], padding: Mapping[int, tuple[int, int]]
) -> PhaseDrift:
    """What runs now is counted exactly by the server. Of another list it is counted at the bounds
    of the server's bins: no less than it would be, so a saving is real."""
    steps = sum(count for count, _ in padding.values())
    executed = sum(bucket * count for bucket, (count, _) in padding.items())
    real = executed - sum(padded for _, padded in padding.values())
    running = Use(tuple(now), steps, real, executed)
    cost: float = executed
    if goal.minimizes == "time":
        cost = sum(advice.step_s(bucket) * count for bucket, (count, _) in padding.items())
    saving = 1 - advice.cost(advice.best) / cost if cost else 0.0
    if saving <= 0:
        return PhaseDrift(advice.phase, running, running, 0.0)
    return PhaseDrift(advice.phase, running, advice.best, saving)


def drift_text(drift: Drift) -> str:
    """A line for each phase, what changing costs, and the diff."""
    lines = [drift.verdict]
    for p in drift.phases:
        few = "" if p.has_evidence else f"; only {p.now.steps} steps, {MIN_STEPS} are wanted"
        of_what = "its time" if drift.minimizes == "time" else f"the {UNIT_OF[p.phase]} it executes"
        lines.append(
            f"{p.phase}: {percent(p.now.padding_share)} padding now, "
            f"{percent(p.best.padding_share)} with the best list; saves {percent(p.saving)} of "
            f"{of_what}{few}"
        )
    lines.append(f"to compile: {drift.price}")
    if drift.diff:
        lines += ["", drift.diff]
    return "\n".join(lines)
