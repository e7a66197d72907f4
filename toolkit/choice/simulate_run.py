"""`nxbucket simulate`, from its options to its scenarios."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from nxbucket.serve.policy import DEFAULT_MAX_CONSECUTIVE_PREFILLS, check_buckets
from nxbucket.toolkit.buckets import (
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
    show,
)
from nxbucket.toolkit.choice.deployments import deployment_of
from nxbucket.toolkit.choice.inputs import (
    NO_LIMITS,
    LimitOptions,
    check_servers,
    costs_of,
    counting,
    find_model_file,
    note_on_file,
    note_on_target,
    server_of,
    times_of,
    trace_of,
)
from nxbucket.toolkit.choice.replay import Deployment
from nxbucket.toolkit.choice.simulator import Simulation, simulate
from nxbucket.toolkit.choice.step_times import StepTimes
from nxbucket.toolkit.choice.trace import Trace, share_of
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
    servers: int = 1


@dataclass(frozen=True)
class Simulated:
    trace: Trace
    times: list[StepTimes]
    """One per simulation: a roofline is a model's."""
    simulations: list[Simulation]
    notes: list[str]


def run_simulations(options: SimulateOptions) -> Simulated:
    """Raises UsageError, TraceError, SpecError."""
    costs = costs_of(options.costs)
    files: list[Path | None] = [*options.model_files]
    if not files:
        files.append(find_model_file(None, options.limits))
    check_servers(options.servers)
    trace = share_of(trace_of(options.trace, options.requests), options.servers)
    notes = [*note_on_file(bool(options.model_files), files[0]), *trace.notes]
    scenarios: list[tuple[Deployment, StepTimes]] = []
    for file in files:
        server = server_of(file, options.limits)
        times = times_of(costs, options.costs, options.roofline, server.spec)
        if server.spec is not None:
            notes += note_on_target(costs, server.spec.target)
        base = replace(deployment_of(server.limits, trace, server.lists), name=server.name)
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
        if sentence := simulations[-1].overload:
            notes.append(f"{scenario.name}: {sentence}")
    return Simulated(trace, [times for _, times in scenarios], simulations, notes)


def _varied(base: Deployment, options: SimulateOptions) -> list[Deployment]:
    """`base` with each combination of what is given; its own where nothing is."""
    tokens, seqs = base.max_num_batched_tokens, base.max_num_seqs
    prefill = [
        _list(text, "--prefill-buckets", get_default_num_batched_tokens_buckets(tokens))
        for text in options.prefill_lists
    ] or [base.prefill_buckets]
    decode = [
        _list(text, "--decode-buckets", get_default_num_seqs_buckets(seqs))
        for text in options.decode_lists
    ] or [base.decode_buckets]
    consecutive = list(options.max_consecutive_prefills) or [DEFAULT_MAX_CONSECUTIVE_PREFILLS]
    if any(count < 0 for count in consecutive):
        raise UsageError("--max-consecutive-prefills is below 0", hint="0 is no limit")
    varied = []
    for prefill_list, decode_list, count in product(prefill, decode, consecutive):
        given = []
        if len(prefill) > 1:
            given.append(f"prefill {','.join(map(str, prefill_list))}")
        if len(decode) > 1:
            given.append(f"decode {','.join(map(str, decode_list))}")
        if len(consecutive) > 1:
            given.append(f"max_consecutive_prefills {count}")
        of_model = [base.name] if len(options.model_files) > 1 or not given else []
        varied.append(
            replace(
                base,
                name="; ".join([*of_model, *given]),
                prefill_buckets=prefill_list,
                decode_buckets=decode_list,
                max_consecutive_prefills=count,
            )
        )
    return varied


def _list(text: str, option: str, default: Sequence[int]) -> tuple[int, ...]:
    hint = f"{option} {','.join(map(str, default))}"
    try:
        sizes = [int(part) for part in text.strip("[] ").replace(",", " ").split()]
    except ValueError:
        message = f"{option} {show(text)} is no list of whole numbers"
        raise UsageError(message, hint=hint) from None
    last_is = "the most that a step takes here"
    try:
        return check_buckets(option, sizes, default[-1], last_is)
    except ValueError as err:
        raise UsageError(str(err), hint=hint) from None
