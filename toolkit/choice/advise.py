"""The bucket lists that serve a workload best, what they save, and how far that can be trusted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nxbucket.toolkit.buckets import (
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)
from nxbucket.toolkit.choice.costs import Curve, Phase
from nxbucket.toolkit.choice.simulator import Deployment, Simulation, simulate
from nxbucket.toolkit.choice.solver import Axis, best_lists, best_within, steps_by_candidate
from nxbucket.toolkit.choice.step_times import StepTimes
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.workload import (
    Sizes,
    Use,
    chunk_sizes,
    percentile_list,
    rounded_up,
    use_of,
)
from nxbucket.toolkit.errors import TraceError, UsageError

CURVE_PROGRAMS = 12
"""How far the curve goes, at least."""
MAX_CANDIDATES = 1 << 14
MAX_REPLAYED = 20_000
"""Requests of a trace that are replayed for the decode batches: minutes of traffic, in a second."""
NS = 1_000_000_000

Minimizes = Literal["tokens", "time"]


@dataclass(frozen=True)
class Limits:
    """Of the server that the lists are for."""

    max_num_batched_tokens: int
    """No step is longer: min(max_num_batched_tokens, max_model_len)."""
    max_num_seqs: int
    max_model_len: int | None = None
    block_size: int = 32
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class ProgramCosts:
    """What the programs of one list take of the budgets, by bucket."""

    compile_s: Curve | None = None
    program_bytes: Curve | None = None


@dataclass(frozen=True)
class Budget:
    """`max_compile_s` and `max_program_bytes` are for the programs of both lists together."""

    max_prefill_programs: int
    max_decode_programs: int
    max_compile_s: float | None = None
    max_program_bytes: int | None = None


@dataclass(frozen=True)
class Goal:
    """What is made least, over which lists, under which budget."""

    limits: Limits
    budget: Budget
    grid: int
    """Prefill buckets but the last are multiples of it, in tokens."""
    minimizes: Minimizes
    times: StepTimes
    prefill_costs: ProgramCosts = ProgramCosts()
    decode_costs: ProgramCosts = ProgramCosts()


@dataclass(frozen=True)
class Advice:
    """One list: the best, and others beside it."""

    phase: Phase
    sizes: Sizes
    best: Use
    curve: tuple[Use, ...]
    """The best lists of at most 1, 2, … programs, whatever else the budget allows."""
    compared: dict[str, Use]
    step_s: Callable[[int], float]

    def time_s(self, use: Use) -> float:
        """Of all steps, by the cost model."""
        sizes = _steps_in(self.sizes, use.buckets)
        return sum(count * self.step_s(bucket) for bucket, count in sizes.items())


def _steps_in(sizes: Sizes, buckets: Sequence[int]) -> dict[int, int]:
    return dict(zip(buckets, steps_by_candidate(sizes, buckets), strict=True))


def advise(
    goal: Goal,
    chunks: Sizes,
    batches: Sizes | None,
    running: Deployment | None = None,
) -> tuple[Advice, Advice | None]:
    """The best prefill and decode list; no decode list where `batches` are unknown.

    `running`: lists to compare with. Raises UsageError if no list keeps the budget.
    """
    limits, budget = goal.limits, goal.budget
    prefill = _axis(goal, "prefill", chunks)
    axes = [prefill]
    if batches is not None:
        axes.append(_axis(goal, "decode", batches))
    has_budget = budget.max_compile_s is not None or budget.max_program_bytes is not None
    if has_budget:
        chosen = _within_budget(goal, axes)
    else:
        chosen = [best_lists(axis)[-1].buckets for axis in axes]
    advice = [
        Advice(
            "prefill",
            chunks,
            use_of(chunks, chosen[0]),
            _curve(goal, "prefill", chunks),
            {
                "powers_of_two": use_of(
                    chunks, get_default_num_batched_tokens_buckets(limits.max_num_batched_tokens)
                ),
                "percentiles": use_of(
                    chunks,
                    percentile_list(
                        chunks,
                        budget.max_prefill_programs,
                        goal.grid,
                        limits.max_num_batched_tokens,
                    ),
                ),
                **({} if running is None else {"now": use_of(chunks, running.prefill_buckets)}),
            },
            goal.times.prefill_s,
        )
    ]
    if batches is None:
        return advice[0], None
    decode = Advice(
        "decode",
        batches,
        use_of(batches, chosen[1]),
        _curve(goal, "decode", batches),
        {
            "powers_of_two": use_of(batches, get_default_num_seqs_buckets(limits.max_num_seqs)),
            "percentiles": use_of(
                batches,
                percentile_list(batches, budget.max_decode_programs, 1, limits.max_num_seqs),
            ),
            **({} if running is None else {"now": use_of(batches, running.decode_buckets)}),
        },
        goal.times.decode_s,
    )
    return advice[0], decode


def _axis(goal: Goal, phase: Phase, sizes: Sizes, programs: int | None = None) -> Axis:
    """Buckets between two sizes that occur are left out: costs never fall with size, so the lower
    end of such a gap does as well."""
    is_prefill = phase == "prefill"
    limits, budget = goal.limits, goal.budget
    last = limits.max_num_batched_tokens if is_prefill else limits.max_num_seqs
    grid = goal.grid if is_prefill else 1
    candidates = sorted({min(last, rounded_up(size, grid)) for size in sizes} | {last})
    if len(candidates) > MAX_CANDIDATES:
        raise UsageError(
            f"--grid {grid} leaves {len(candidates)} sizes to choose from; at most "
            f"{MAX_CANDIDATES} are searched",
            hint=f"a coarser grid, e.g. --grid {rounded_up(last // MAX_CANDIDATES + 1, 16)}",
        )
    step_s = goal.times.prefill_s if is_prefill else goal.times.decode_s
    if goal.minimizes == "tokens":
        costs = tuple(candidates)
    else:
        costs = tuple(round(step_s(bucket) * NS) for bucket in candidates)
    most = budget.max_prefill_programs if is_prefill else budget.max_decode_programs
    return Axis(
        tuple(candidates),
        costs,
        steps_by_candidate(sizes, candidates),
        min(programs or most, len(candidates)),
        tuple(tuple(_used(goal, phase, bucket)) for bucket in candidates),
    )


def _used(goal: Goal, phase: Phase, bucket: int) -> list[int]:
    """Milliseconds and bytes, of what has a budget."""
    costs = goal.prefill_costs if phase == "prefill" else goal.decode_costs
    used = []
    if goal.budget.max_compile_s is not None:
        assert costs.compile_s is not None
        used.append(round(1000 * costs.compile_s(bucket)))
    if goal.budget.max_program_bytes is not None:
        assert costs.program_bytes is not None
        used.append(round(costs.program_bytes(bucket)))
    return used


def _within_budget(goal: Goal, axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    budget = goal.budget
    budgets = []
    if budget.max_compile_s is not None:
        budgets.append(round(1000 * budget.max_compile_s))
    if budget.max_program_bytes is not None:
        budgets.append(budget.max_program_bytes)
    chosen = best_within(axes, budgets)
    if chosen is None:
        least = [sum(amounts) for amounts in zip(*(axis.used[-1] for axis in axes), strict=True)]
        needs = []
        if budget.max_compile_s is not None:
            needs.append(f"{least.pop(0) / 60_000:.1f} minutes of compiling")
        if budget.max_program_bytes is not None:
            needs.append(f"{least.pop(0) / (1 << 30):.2f} GiB of device memory")
        last = " and ".join(str(axis.candidates[-1]) for axis in axes)
        raise UsageError(
            f"no list keeps the budget: the last buckets alone ({last}) take {', '.join(needs)}",
            hint="raise the budget, or lower max_num_batched_tokens",
        )
    return [choice.buckets for choice in chosen]


def _curve(goal: Goal, phase: Phase, sizes: Sizes) -> tuple[Use, ...]:
    most = goal.budget.max_prefill_programs
    if phase == "decode":
        most = goal.budget.max_decode_programs
    axis = _axis(goal, phase, sizes, max(CURVE_PROGRAMS, most))
    return tuple(use_of(sizes, choice.buckets) for choice in best_lists(axis))


@dataclass(frozen=True)
class Holdout:
    """Lists chosen on the first half of a trace, on the second half, which they have not seen."""

    phase: Phase
    fitted_on: int
    """Requests."""
    scored_on: int
    fitted: Use
    best: Use
    """What the second half's own best lists would have made of it."""
    powers_of_two: Use


def deployment_of(limits: Limits, trace: Trace, prefill: Sequence[int] = ()) -> Deployment:
    """A server of these limits, with the default lists."""
    longest = limits.max_model_len
    if longest is None:
        assert trace.output_tokens is not None
        longest = max(map(sum, zip(trace.prompt_tokens, trace.output_tokens, strict=True))) + 1
        longest = max(longest, limits.max_num_batched_tokens)
    blocks_per_seq = -(-longest // limits.block_size)
    return Deployment(
        name="powers of two",
        prefill_buckets=tuple(
            prefill or get_default_num_batched_tokens_buckets(limits.max_num_batched_tokens)
        ),
        decode_buckets=tuple(get_default_num_seqs_buckets(limits.max_num_seqs)),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=longest,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks or limits.max_num_seqs * blocks_per_seq + 1,
        enable_prefix_caching=limits.enable_prefix_caching,
    )


def part_of(trace: Trace, rows: range) -> Trace:
    """Some rows as a trace of its own, its clock starting with its first request."""
    part = slice(rows.start, rows.stop)
    arrivals = trace.arrival_s[part] if trace.arrival_s is not None else None
    if arrivals:
        first = arrivals[0]
        for i, arrival in enumerate(arrivals):
            arrivals[i] = arrival - first
    return replace(
        trace,
        prompt_tokens=trace.prompt_tokens[part],
        output_tokens=None if trace.output_tokens is None else trace.output_tokens[part],
        arrival_s=arrivals,
        cached_tokens=None if trace.cached_tokens is None else trace.cached_tokens[part],
        max_tokens=None if trace.max_tokens is None else trace.max_tokens[part],
    )


def replayed_for_batches(
    trace: Trace, limits: Limits, times: StepTimes, running: Deployment | None
) -> Simulation | None:
    """A replay whose decode batches are counted; None if the trace cannot be replayed.

    With the lists that run now, or powers of two: the batches depend on how long steps take, and so
    on the lists, but little.
    """
    if not trace.can_be_replayed:
        return None
    first = part_of(trace, range(min(len(trace), MAX_REPLAYED)))
    return simulate(first, running or deployment_of(limits, first), times)


def hold_out(goal: Goal, trace: Trace, running: Deployment | None) -> list[Holdout]:
    """Empty for a trace too short to be halved."""
    if len(trace) < 2:
        return []
    half = len(trace) // 2
    parts = [part_of(trace, range(half)), part_of(trace, range(half, len(trace)))]
    limits = goal.limits
    chunks = [
        chunk_sizes(part, limits.max_num_batched_tokens, limits.max_model_len).chunks
        for part in parts
    ]
    if not all(chunks):
        return []
    replays = [replayed_for_batches(part, limits, goal.times, running) for part in parts]
    batches = [None if replay is None else replay.batch_sizes for replay in replays]
    if not all(batches):
        batches = [None, None]
    fitted, best = (advise(goal, c, b) for c, b in zip(chunks, batches, strict=True))
    scores = [_holdout(fitted[0], best[0], half, len(trace) - half)]
    if fitted[1] is not None and best[1] is not None:
        scores.append(_holdout(fitted[1], best[1], half, len(trace) - half))
    return scores


def _holdout(fitted: Advice, best: Advice, fitted_on: int, scored_on: int) -> Holdout:
    return Holdout(
        fitted.phase,
        fitted_on,
        scored_on,
        use_of(best.sizes, fitted.best.buckets),
        best.best,
        best.compared["powers_of_two"],
    )


DEFAULT_GRID = 128
"""Tokens. What Neuron's kernels tile by, and what AWS's own lists are multiples of."""


def grid_of(buckets: Sequence[int]) -> int:
    """The default grid: the power of two, up to 128, that all `buckets` but the last are on."""
    grid = DEFAULT_GRID
    while any(bucket % grid for bucket in buckets[:-1]):
        grid //= 2
    return grid


def chunks_of_trace(trace: Trace, limits: Limits) -> tuple[Sizes, int]:
    """Prefill steps by size, and prompts that the server would refuse. Raises TraceError."""
    prompts = chunk_sizes(trace, limits.max_num_batched_tokens, limits.max_model_len)
    if not prompts.chunks:
        raise TraceError(
            f"{trace.name}: each of its {len(trace)} prompts is as long as max_model_len "
            f"{limits.max_model_len} or longer: a server refuses them all",
            hint="raise max_model_len, or give another trace",
        )
    return prompts.chunks, prompts.refused
