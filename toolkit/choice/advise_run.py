"""`nxbucket advise`, from its options to its report."""

from dataclasses import dataclass, replace
from pathlib import Path

from nxbucket.toolkit.buckets import get_default_num_seqs_buckets, show
from nxbucket.toolkit.choice.advise import Goal, ListGoal, Minimizes, advise, grid_of, make_goal
from nxbucket.toolkit.choice.advise_report import AdviceReport
from nxbucket.toolkit.choice.costs import Costs, Curve
from nxbucket.toolkit.choice.holdout import batches_of, hold_out, replay_of
from nxbucket.toolkit.choice.inputs import (
    NO_LIMITS,
    LimitOptions,
    Server,
    check_entries,
    check_grid,
    check_servers,
    costs_of,
    counting,
    find_model_file,
    lists_of,
    note_on_file,
    note_on_target,
    server_of,
    times_of,
    trace_of,
)
from nxbucket.toolkit.choice.metrics_reader import SizeHistogram, read_metrics
from nxbucket.toolkit.choice.price import (
    UNKNOWN,
    CompileSeconds,
    Price,
    from_cache,
    from_costs_file,
    price_of,
)
from nxbucket.toolkit.choice.step_times import StepTimes
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.workload import ServerLimits, StepSizes, chunk_sizes, chunked
from nxbucket.toolkit.errors import TraceError, UsageError
from nxbucket.toolkit.spec import DeploySpec


@dataclass(frozen=True)
class AdviseOptions:
    """None is left out."""

    model_yaml: Path | None = None
    trace: str | None = None
    metrics: str | None = None
    requests: int | None = None
    limits: LimitOptions = NO_LIMITS
    max_programs: int | None = None
    max_decode_programs: int | None = None
    max_compile_minutes: float | None = None
    max_program_bytes: int | None = None
    grid: int | None = None
    costs: Path | None = None
    roofline: str | None = None
    minimize: Minimizes | None = None
    servers: int = 1
    api_key: str | None = None


@dataclass(frozen=True)
class _Workload:
    source: str
    chunks: StepSizes
    batches: StepSizes | None
    batches_from: str
    requests: int | None = None
    refused: int = 0
    notes: tuple[str, ...] = ()


def make_advice(options: AdviseOptions) -> tuple[AdviceReport, DeploySpec | None]:
    """Raises UsageError, TraceError, SpecError, EnvironmentProblem."""
    _check(options)
    file = find_model_file(options.model_yaml, options.limits)
    server = server_of(file, options.limits)
    spec = server.spec
    costs = costs_of(options.costs)
    times = times_of(costs, options.costs, options.roofline, spec)
    seconds = from_costs_file(costs) or _recorded(spec)
    goal = _goal(options, server, times, costs, seconds)
    trace = None
    if options.trace is not None:
        trace = trace_of(options.trace, options.requests)
        work = _of_trace(trace, server, times, options.servers)
    else:
        assert options.metrics is not None
        work = _of_server(options.metrics, options.api_key, server.limits)
    with counting("choosing"):
        prefill, decode = advise(goal, work.chunks, work.batches, server.lists)
        holdouts = [] if trace is None else hold_out(goal, trace, server.lists, options.servers)
    notes = [*note_on_file(options.model_yaml is not None, file), *work.notes]
    if spec is not None:
        notes += note_on_target(costs, spec.target)
    if times.is_assumed and decode is not None and trace is not None:
        notes.append(
            "decode batches rest on assumed step times; --costs, or --roofline with a model file, "
            "replaces them"
        )
    report = AdviceReport(
        source=show(work.source, 200),
        requests=work.requests,
        refused=work.refused,
        goal=goal,
        prefill=prefill,
        decode=decode,
        decode_from=work.batches_from,
        holdouts=holdouts,
        price=None,
        notes=notes,
    )
    if spec is not None and server.as_it_is:
        report = replace(report, price=_price(spec, report, seconds))
    return report, spec


def _price(spec: DeploySpec, report: AdviceReport, seconds: CompileSeconds) -> Price:
    now = lists_of(spec)
    then = {advice.phase: advice.best.buckets for advice in report.advices}
    contexts = spec.neuron_config.decode_context_length_buckets or ()
    return price_of(now, {**now, **then}, contexts, seconds)


def _recorded(spec: DeploySpec | None) -> CompileSeconds:
    if spec is None:
        return UNKNOWN
    layers = spec.architecture.num_hidden_layers
    return from_cache(spec.artifacts.cache, spec.target, layers)


def _check(options: AdviseOptions) -> None:
    if (options.trace is None) == (options.metrics is None):
        what = "either --trace or --metrics" if options.trace is None else "one of the two"
        raise UsageError(
            f"{what} is wanted: which requests to choose buckets for",
            hint="--trace requests.csv, a shipped trace (--trace azure_conv_2023), or "
            "--metrics http://host:8000 of a running server; with neither, `nxbucket profiles ls` "
            "has the lists that people run",
        )
    if options.metrics is not None and options.requests is not None:
        raise UsageError(
            "--requests is for a trace; a server's counters are a sum", hint="leave --requests out"
        )
    check_entries("--max-programs", options.max_programs)
    check_entries("--max-decode-programs", options.max_decode_programs)
    check_grid(options.grid)
    check_servers(options.servers)
    minutes = options.max_compile_minutes
    if minutes is not None and not 0 < minutes < 1e6:
        raise UsageError(f"--max-compile-minutes is {minutes}", hint="more than 0")


def _goal(
    options: AdviseOptions,
    server: Server,
    times: StepTimes,
    costs: Costs | None,
    seconds: CompileSeconds,
) -> Goal:
    minimizes: Minimizes = options.minimize or ("tokens" if times.is_assumed else "time")
    if minimizes == "time" and times.is_assumed:
        raise UsageError(
            "--minimize time: no step has a time",
            hint="--costs FILE, or --roofline trn2 with a model file",
        )
    most = options.max_programs
    goal = make_goal(
        server.limits,
        times,
        lists=server.lists,
        max_prefill_entries=most,
        max_decode_entries=options.max_decode_programs or _at_most_as_now(most, server),
        grid=options.grid or grid_of(server.lists.get("prefill", ())),
        minimizes=minimizes,
    )
    prefill, decode = goal.prefill, goal.decode
    if (minutes := options.max_compile_minutes) is not None:
        if seconds.prefill is None or seconds.decode is None:
            raise UsageError(
                f"--max-compile-minutes: {seconds.source}",
                hint='--costs FILE with {"prefill": {"compile_s": {"128": 500, "8192": 2700}}, …}, '
                "or a model file whose cache holds a compiled program",
            )
        prefill = replace(prefill, compile_s=seconds.prefill)
        decode = replace(decode, compile_s=seconds.decode)
        goal = replace(goal, max_compile_s=60 * minutes)
    if (memory := options.max_program_bytes) is not None:
        prefill, decode = _with_memory(costs, prefill, decode)
        goal = replace(goal, max_program_bytes=memory)
    if server.spec is not None:
        contexts = server.spec.neuron_config.decode_context_length_buckets or ()
        decode = replace(decode, programs_per_entry=1 + len(contexts))
    return replace(goal, prefill=prefill, decode=decode)


def _at_most_as_now(most: int | None, server: Server) -> int | None:
    """--max-programs is meant for prefill, where entries save; decode gets no more than it has."""
    if most is None:
        return None
    usual = get_default_num_seqs_buckets(server.limits.max_num_seqs)
    return min(most, len(server.lists.get("decode", usual)))


def _with_memory(
    costs: Costs | None, prefill: ListGoal, decode: ListGoal
) -> tuple[ListGoal, ListGoal]:
    if costs is None or not (costs.prefill.program_bytes and costs.decode.program_bytes):
        raise UsageError(
            "--max-program-memory: nothing says how much a program takes",
            hint='--costs FILE with "program_bytes" of both phases; `nxbucket inspect` shows a '
            "NEFF's",
        )
    return (
        replace(prefill, program_bytes=Curve.rising(costs.prefill.program_bytes)),
        replace(decode, program_bytes=Curve.rising(costs.decode.program_bytes)),
    )


def _of_trace(trace: Trace, server: Server, times: StepTimes, servers: int) -> _Workload:
    prompts = chunk_sizes(trace, server.limits)
    if not prompts.chunks.counts:
        raise TraceError(
            f"{trace.name}: each of its {len(trace)} prompts is as long as max_model_len "
            f"{server.limits.max_model_len} or longer: a server refuses them all",
            hint="raise max_model_len, or give another trace",
        )
    notes = list(trace.notes)
    replay = replay_of(trace, server.limits, times, server.lists, servers)
    batches = batches_of(replay)
    if replay is None:
        missing = "arrival times" if trace.arrival_s is None else "output lengths"
        how = f"unknown: the trace has no {missing}"
    elif batches is None:
        how = "none: each answer is one token, which the prefill yields"
    else:
        lists = "the model file's lists" if "decode" in server.lists else "powers of two"
        share = "" if servers == 1 else f", one of {servers} servers"
        how = f"simulated, {len(replay.rows):,} requests with {lists}{share}; step times "
        how += times.source
        if replay.overload:
            notes.append(
                f"{replay.overload}; decode batches are full for want of room, not by what is "
                f"asked: --servers {2 * servers} looks at a share of the traffic"
            )
    return _Workload(
        trace.name, prompts.chunks, batches, how, len(trace), prompts.refused, tuple(notes)
    )


def _of_server(source: str, api_key: str | None, limits: ServerLimits) -> _Workload:
    metrics = read_metrics(source, api_key=api_key)
    notes = []
    if metrics.chunk_tokens is not None and metrics.chunk_tokens.count:
        metric = "nxbucket_prefill_chunk_tokens"
        sizes = StepSizes.at_bounds(metrics.chunk_tokens)
        cut_at = metrics.chunk_tokens.bounds[-1]
        if limits.max_num_batched_tokens > cut_at:
            raise UsageError(
                f"{source} cuts prompts into steps of {cut_at} tokens at most; how they would be "
                f"cut at {limits.max_num_batched_tokens} cannot be seen there",
                hint="choose by a trace, or leave max_num_batched_tokens as that server has it",
            )
        notes.append(
            "a server counts steps in bins: each stands at its bin's upper end here, and padding "
            "shares are exact, from the server's sums"
        )
    elif metrics.prompt_tokens is not None:
        metric = metrics.prompt_tokens_metric or ""
        lengths = metrics.prompt_tokens.spread()
        notes.append(
            f"{metric} counts prompts in wide bins, over which they are spread evenly: the lists "
            "are as good as that; a trace, or an nxbucket server, says more"
        )
        if beyond := metrics.prompt_tokens.beyond:
            length = _length_beyond(metrics.prompt_tokens, limits.max_model_len)
            lengths[length] = lengths.get(length, 0) + beyond
            notes.append(
                f"{beyond:,} of {metrics.prompt_tokens.count:,} prompts are above its last bin, "
                f"{metrics.prompt_tokens.bounds[-1]} tokens; by the sum of all they are taken for "
                f"{length} each"
            )
        sizes = StepSizes.exactly(lengths)
    else:
        raise TraceError(
            f"{source} has no prefill step and no prompt yet",
            hint="ask again when the server has had a day of its usual requests",
        )
    batches, how = None, f"unknown: {source} does not count them"
    if metrics.batch_seqs is not None and metrics.batch_seqs.count:
        batches = _at_most(StepSizes.at_bounds(metrics.batch_seqs), limits.max_num_seqs)
        how = f"nxbucket_decode_batch_seqs of {source}"
    chunks = _at_most(sizes, limits.max_num_batched_tokens)
    return _Workload(f"{source} ({metric})", chunks, batches, how, notes=tuple(notes))


def _length_beyond(histogram: SizeHistogram, max_model_len: int | None) -> int:
    """The mean of what is above the last bin: what the sum of all leaves for it."""
    below = sum(size * count for size, count in histogram.spread().items())
    mean = round((histogram.total - below) / histogram.beyond)
    longest = mean if max_model_len is None else max_model_len - 1
    return max(histogram.bounds[-1] + 1, min(mean, longest))


def _at_most(sizes: StepSizes, most: int) -> StepSizes:
    """Under a lower limit than the server's, its longer steps would have been several."""
    return replace(sizes, counts=chunked(sizes.counts, most))
