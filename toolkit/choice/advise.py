"""The bucket lists that serve a workload best, beside lists that people write by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nxbucket.compile.program import Phase
from nxbucket.toolkit.buckets import (
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)
from nxbucket.toolkit.choice.costs import Curve
from nxbucket.toolkit.choice.solver import Axis, Choice, best_lists, best_within, steps_by_candidate
from nxbucket.toolkit.choice.step_times import NS_PER_S, StepTimes
from nxbucket.toolkit.choice.workload import (
    Lists,
    ServerLimits,
    StepSizes,
    Use,
    percentile_list,
    rounded_up,
    use_of,
)
from nxbucket.toolkit.errors import UsageError

CURVE_ENTRIES = 12
"""How far the curve goes, at least."""
MAX_CANDIDATES = 1 << 14
DEFAULT_GRID = 128
"""Tokens. What Neuron's kernels tile by, and what AWS's own lists are multiples of."""

Minimizes = Literal["tokens", "time"]


@dataclass(frozen=True)
class ListGoal:
    """One list to choose. Sizes are in tokens for prefill, in sequences for decode."""

    phase: Phase
    last: int
    """The forced last entry."""
    grid: int
    """The other entries are multiples of it."""
    max_entries: int
    step_s: Callable[[int], float]
    powers_of_two: tuple[int, ...]
    programs_per_entry: int = 1
    """One for each context length, for decode."""
    compile_s: Curve | None = None
    """Of one program, by bucket. Needed under a budget of time."""
    program_bytes: Curve | None = None
    """Of one program, by bucket. Needed under a budget of memory."""


@dataclass(frozen=True)
class Goal:
    """What is made least. Budgets are for all programs of both lists together."""

    limits: ServerLimits
    prefill: ListGoal
    decode: ListGoal
    minimizes: Minimizes
    times: StepTimes
    max_compile_s: float | None = None
    max_program_bytes: int | None = None

    @property
    def budgets(self) -> list[int]:
        """In milliseconds and bytes; only those that there are."""
        seconds, size = self.max_compile_s, self.max_program_bytes
        return [
            *([] if seconds is None else [round(1000 * seconds)]),
            *([] if size is None else [size]),
        ]


def make_goal(
    limits: ServerLimits,
    times: StepTimes,
    *,
    lists: Lists | None = None,
    max_prefill_entries: int | None = None,
    max_decode_entries: int | None = None,
    grid: int = DEFAULT_GRID,
    minimizes: Minimizes = "tokens",
) -> Goal:
    """Without a budget but the number of entries: left out, as many as `lists` have, or powers of
    two."""
    lists = lists or {}
    tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    by_tokens = tuple(get_default_num_batched_tokens_buckets(tokens))
    by_seqs = tuple(get_default_num_seqs_buckets(seqs))
    return Goal(
        limits,
        ListGoal(
            "prefill",
            tokens,
            grid,
            max_prefill_entries or len(lists.get("prefill", by_tokens)),
            times.prefill_s,
            by_tokens,
        ),
        ListGoal(
            "decode",
            seqs,
            1,
            max_decode_entries or len(lists.get("decode", by_seqs)),
            times.decode_s,
            by_seqs,
        ),
        minimizes,
        times,
    )


@dataclass(frozen=True)
class Advice:
    """One list: the best, and others beside it."""

    phase: Phase
    sizes: StepSizes
    best: Use
    curve: tuple[Use, ...]
    """The best lists of at most 1, 2, … entries, whatever the budgets are."""
    compared: dict[str, Use]
    step_s: Callable[[int], float]
    minimizes: Minimizes

    def time_s(self, use: Use) -> float:
        """Of all steps, by the cost model."""
        steps = steps_by_candidate(self.sizes.counts, use.buckets)
        pairs = zip(use.buckets, steps, strict=True)
        return sum(count * self.step_s(bucket) for bucket, count in pairs)

    def cost(self, use: Use) -> float:
        """What was made least: tokens or sequences executed, or seconds."""
        return self.time_s(use) if self.minimizes == "time" else use.executed

    def use_of(self, buckets: Sequence[int]) -> Use:
        return use_of(self.sizes, buckets)


def advise(
    goal: Goal, chunks: StepSizes, batches: StepSizes | None, now: Lists | None = None
) -> tuple[Advice, Advice | None]:
    """The best prefill and decode list; no decode list where `batches` are unknown.

    `now`: lists to compare with; a decode list that is not chosen stays, and counts in the budgets.
    Raises UsageError if no lists keep them.
    """
    now = now or {}
    work = [(goal.prefill, chunks)]
    budgets = goal.budgets
    if batches is not None:
        work.append((goal.decode, batches))
    else:
        kept = now.get("decode", goal.decode.powers_of_two)
        rows = [_used(goal, goal.decode, bucket) for bucket in kept]
        budgets = [b - sum(row[i] for row in rows) for i, b in enumerate(budgets)]
    axes = [_axis(goal, wanted, sizes) for wanted, sizes in work]
    curves = [best_lists(axis) for axis in axes]
    limited = [
        replace(axis, max_programs=min(wanted.max_entries, axis.max_programs))
        for axis, (wanted, _) in zip(axes, work, strict=True)
    ]
    if not budgets:
        pairs = zip(curves, limited, strict=True)
        chosen = [curve[axis.max_programs - 1] for curve, axis in pairs]
    elif found := best_within(limited, budgets):
        chosen = found
    else:
        raise _too_tight(goal, limited, budgets)
    advice = [
        _advice(goal, wanted, sizes, best, curve, now.get(wanted.phase))
        for (wanted, sizes), best, curve in zip(work, chosen, curves, strict=True)
    ]
    return advice[0], advice[1] if len(advice) > 1 else None


def _advice(
    goal: Goal,
    wanted: ListGoal,
    sizes: StepSizes,
    best: Choice,
    curve: Sequence[Choice],
    now: Sequence[int] | None,
) -> Advice:
    by_hand = percentile_list(sizes.counts, wanted.max_entries, wanted.grid, wanted.last)
    compared = {
        "powers_of_two": use_of(sizes, wanted.powers_of_two),
        "percentiles": use_of(sizes, by_hand),
    }
    if now is not None:
        compared["now"] = use_of(sizes, now)
    return Advice(
        wanted.phase,
        sizes,
        use_of(sizes, best.buckets),
        tuple(use_of(sizes, choice.buckets) for choice in curve),
        compared,
        wanted.step_s,
        goal.minimizes,
    )


def _axis(goal: Goal, wanted: ListGoal, sizes: StepSizes) -> Axis:
    """As long as the curve, whatever the list may be.

    Buckets between two sizes that occur are left out: what a step, a compile and a program cost
    never falls with size, so the lower end of such a gap does as well."""
    last, grid = wanted.last, wanted.grid
    candidates = sorted({min(last, rounded_up(size, grid)) for size in sizes.counts} | {last})
    if len(candidates) > MAX_CANDIDATES:
        raise UsageError(
            f"--grid {grid} leaves {len(candidates)} sizes to choose from; at most "
            f"{MAX_CANDIDATES} are searched",
            hint=f"a coarser grid, e.g. --grid {rounded_up(last // MAX_CANDIDATES + 1, 16)}",
        )
    if goal.minimizes == "tokens":
        costs = tuple(candidates)
    else:
        costs = tuple(round(wanted.step_s(bucket) * NS_PER_S) for bucket in candidates)
    return Axis(
        tuple(candidates),
        costs,
        steps_by_candidate(sizes.counts, candidates),
        min(max(CURVE_ENTRIES, wanted.max_entries), len(candidates)),
        tuple(_used(goal, wanted, bucket) for bucket in candidates),
    )


def _used(goal: Goal, wanted: ListGoal, bucket: int) -> tuple[int, ...]:
    """What an entry takes of each budget."""
    used = []
    if goal.max_compile_s is not None:
        assert wanted.compile_s is not None
        used.append(round(1000 * wanted.compile_s(bucket)) * wanted.programs_per_entry)
    if goal.max_program_bytes is not None:
        assert wanted.program_bytes is not None
        used.append(round(wanted.program_bytes(bucket)) * wanted.programs_per_entry)
    return tuple(used)


def _too_tight(goal: Goal, axes: Sequence[Axis], budgets: Sequence[int]) -> UsageError:
    least = [sum(amounts) for amounts in zip(*(axis.used[-1] for axis in axes), strict=True)]
    pairs = list(zip(least, budgets, strict=True))
    sentences = []
    if goal.max_compile_s is not None:
        needed, left = pairs.pop(0)
        sentences.append(
            f"{needed / 60_000:.2f} minutes of compiling, {left / 60_000:.2f} are left"
        )
    if goal.max_program_bytes is not None:
        needed, left = pairs.pop(0)
        sentences.append(f"{needed} bytes of device memory, {left} are left")
    last = " and ".join(str(axis.candidates[-1]) for axis in axes)
    return UsageError(
        f"no list keeps the budget: the last entries alone ({last}) take {'; '.join(sentences)}",
        hint="raise the budget, or lower max_num_batched_tokens",
    )


def grid_of(buckets: Sequence[int]) -> int:
    """The default grid: the power of two, up to 128, that all `buckets` but the last are on."""
    grid = DEFAULT_GRID
    while any(bucket % grid for bucket in buckets[:-1]):
        grid //= 2
    return grid
