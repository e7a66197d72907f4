"""`nxbucket simulate`, from its options to its scenarios."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from nxbucket.serve.policy import check_buckets
from nxbucket.toolkit.choice.advise import deployment_of
from nxbucket.toolkit.choice.inputs import (
    NO_LIMITS,
    LimitOptions,
    costs_of,
    counting,
    find_model_file,
    limits_of,
    times_of,
    trace_of,
)
from nxbucket.toolkit.choice.simulator import (
    DEFAULT_MAX_CONSECUTIVE_PREFILLS,
    Deployment,
    Simulation,
    simulate,
)
from nxbucket.toolkit.choice.step_times import StepTimes
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.errors import UsageError

MAX_SCENARIOS = 16


@dataclass(frozen=True)
class SimulateOptions:
    """Each list of `prefill_lists` and so on is a scenario with each of the others."""

    trace: str
    model_files: Sequence[Path] = ()
    limits: LimitOptions = NO_LIMITS
    prefill_lists: Sequence[str] = ()
    decode_lists: Sequence[str] = ()
    max_consecutive_prefills: Sequence[int] = ()
    costs: Path | None = None
    roofline: str | None = None
    requests: int | None = None


@dataclass(frozen=True)
class Simulated:
    trace: Trace
    times: list[StepTimes]
    """One per simulation: a roofline is a model's."""
    simulations: list[Simulation]


def run_simulations(options: SimulateOptions) -> Simulated:
    """Raises UsageError, TraceError, SpecError."""
    costs = costs_of(options.costs)
    files: list[Path | None] = [*options.model_files]
    if not files:
        files.append(find_model_file(None, options.limits))
    trace = trace_of(options.trace, options.requests)
    scenarios: list[tuple[Deployment, StepTimes]] = []
    for file in files:
        limits, spec = limits_of(file, options.limits)
        times = times_of(costs, options.costs, options.roofline, spec)
        if spec is not None and not options.limits.given():
            base = Deployment.of(spec, str(file))
        else:
            base = replace(deployment_of(limits, trace), name=str(file or "powers of two"))
        scenarios += [(scenario, times) for scenario in _varied(base, options)]
    if len(scenarios) > MAX_SCENARIOS:
        raise UsageError(
            f"{len(scenarios)} scenarios: every list with every other; at most {MAX_SCENARIOS}",
            hint="leave some out, or call the command twice",
        )
    simulations = []
    for scenario, times in scenarios:
        with counting(f"replaying {scenario.name}") as progress:
            simulations.append(simulate(trace, scenario, times, progress))
    return Simulated(trace, [times for _, times in scenarios], simulations)


def _varied(base: Deployment, options: SimulateOptions) -> list[Deployment]:
    """`base` with each combination of what is given; its own where nothing is."""
    prefill = [
        _list(text, "--prefill-buckets", base.max_num_batched_tokens, "max_num_batched_tokens")
        for text in options.prefill_lists
    ] or [base.prefill_buckets]
    decode = [
        _list(text, "--decode-buckets", base.max_num_seqs, "max_num_seqs")
        for text in options.decode_lists
    ] or [base.decode_buckets]
    consecutive = list(options.max_consecutive_prefills) or [DEFAULT_MAX_CONSECUTIVE_PREFILLS]
    if any(count < 0 for count in consecutive):
        raise UsageError("--max-consecutive-prefills is below 0", hint="0 is no limit")
    varied = []
    for tokens, seqs, count in product(prefill, decode, consecutive):
        given = []
        if options.prefill_lists:
            given.append(f"prefill {','.join(map(str, tokens))}")
        if options.decode_lists:
            given.append(f"decode {','.join(map(str, seqs))}")
        if options.max_consecutive_prefills:
            given.append(f"max_consecutive_prefills {count}")
        name = base.name
        if given:
            of_model = "" if options.model_files == () else f"{base.name}: "
            name = of_model + "; ".join(given)
        varied.append(
            replace(
                base,
                name=name,
                prefill_buckets=tokens,
                decode_buckets=seqs,
                max_consecutive_prefills=count,
            )
        )
    return varied


def _list(text: str, option: str, last: int, last_is: str) -> tuple[int, ...]:
    try:
        sizes = [int(part) for part in text.strip("[] ").replace(",", " ").split()]
        return check_buckets(option, sizes, last, last_is)
    except ValueError as err:
        said = str(err) if option in str(err) else f"{option} {text!r} is no list of whole numbers"
        raise UsageError(said, hint=f"{option} 128,512,{last}") from None
