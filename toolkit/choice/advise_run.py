"""`nxbucket advise`, from its options to its report."""

from dataclasses import dataclass, replace
from pathlib import Path

from nxbucket.toolkit.buckets import (
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)
from nxbucket.toolkit.choice.advise import (
    MAX_REPLAYED,
    Budget,
    Goal,
    Limits,
    Minimizes,
    ProgramCosts,
    advise,
    chunks_of_trace,
    grid_of,
    hold_out,
    replayed_for_batches,
)
from nxbucket.toolkit.choice.advise_report import AdviceReport
from nxbucket.toolkit.choice.costs import Costs, Curve
from nxbucket.toolkit.choice.inputs import (
    NO_LIMITS,
    LimitOptions,
    costs_of,
    find_model_file,
    limits_of,
    times_of,
    trace_of,
)
from nxbucket.toolkit.choice.metrics_reader import read_metrics
from nxbucket.toolkit.choice.price import (
    UNKNOWN,
    CompileSeconds,
    Lists,
    from_cache,
    from_costs_file,
    price_of,
)
from nxbucket.toolkit.choice.simulator import Deployment
from nxbucket.toolkit.choice.step_times import StepTimes
from nxbucket.toolkit.choice.workload import Sizes, chunk_sizes_of_server, chunked
from nxbucket.toolkit.errors import TraceError, UsageError
from nxbucket.toolkit.spec import DeploySpec

MAX_PROGRAMS = 256


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
    api_key: str | None = None


@dataclass(frozen=True)
class _Workload:
    source: str
    chunks: Sizes
    batches: Sizes | None
    batches_from: str
    requests: int | None = None
    refused: int = 0
    notes: tuple[str, ...] = ()


def make_advice(options: AdviseOptions) -> tuple[AdviceReport, DeploySpec | None]:
    """Raises UsageError, TraceError, SpecError, EnvironmentProblem."""
    _check(options)
    file = find_model_file(options.model_yaml, options.limits)
    limits, spec = limits_of(file, options.limits)
    costs = costs_of(options.costs)
    times = times_of(costs, options.costs, options.roofline, spec)
    running = None
    if spec is not None and not options.limits.given():
        running = Deployment.of(spec, spec.path.name)
    seconds = from_costs_file(costs) or _recorded(spec)
    goal = _goal(options, limits, times, costs, seconds, running)
    trace = None
    if options.trace is not None:
        trace = trace_of(options.trace, options.requests)
        chunks, refused = chunks_of_trace(trace, limits)
        replay = replayed_for_batches(trace, limits, times, running)
        how = "unknown: the trace has no arrival times, or no output lengths"
        batches: Sizes | None = None
        if replay is not None:
            replayed = min(len(trace), MAX_REPLAYED)
            lists = "the model file's lists" if running is not None else "powers of two"
            how = f"simulated, {replayed:,} requests with {lists}; step times {times.source}"
            batches = replay.batch_sizes or None
            if batches is None:
                how = "none: each answer is one token, which the prefill yields"
        work = _Workload(trace.name, chunks, batches, how, len(trace), refused, trace.notes)
    else:
        assert options.metrics is not None
        work = _of_server(options.metrics, options.api_key, limits)
    prefill, decode = advise(goal, work.chunks, work.batches, running)
    holdouts = [] if trace is None else hold_out(goal, trace, running)
    notes = list(work.notes)
    if times.is_assumed and decode is not None and trace is not None:
        notes.append(
            "decode batches rest on assumed step times; --costs, or --roofline with a model file, "
            "replaces them"
        )
    report = AdviceReport(
        source=work.source,
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
    if spec is not None and not options.limits.given():
        now, then = _lists_of(spec), {a.phase: a.best.buckets for a in report.advices}
        contexts = spec.neuron_config.decode_context_length_buckets or ()
        report = replace(report, price=price_of(now, {**now, **then}, contexts, seconds))
    return report, spec


def _lists_of(spec: DeploySpec) -> Lists:
    neuron = spec.neuron_config
    return {"prefill": neuron.num_batched_tokens_buckets, "decode": neuron.num_seqs_buckets}


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
    for name, value in (
        ("--max-programs", options.max_programs),
        ("--max-decode-programs", options.max_decode_programs),
    ):
        if value is not None and not 1 <= value <= MAX_PROGRAMS:
            raise UsageError(f"{name} is {value}", hint=f"1 to {MAX_PROGRAMS}")
    if options.grid is not None and options.grid < 1:
        raise UsageError(f"--grid is {options.grid}", hint="1 or more, e.g. 128")
    minutes = options.max_compile_minutes
    if minutes is not None and not 0 < minutes < 1e6:
        raise UsageError(f"--max-compile-minutes is {minutes}", hint="more than 0")


def _goal(
    options: AdviseOptions,
    limits: Limits,
    times: StepTimes,
    costs: Costs | None,
    seconds: CompileSeconds,
    running: Deployment | None,
) -> Goal:
    prefill_now = get_default_num_batched_tokens_buckets(limits.max_num_batched_tokens)
    decode_now = get_default_num_seqs_buckets(limits.max_num_seqs)
    if running is not None:
        prefill_now, decode_now = list(running.prefill_buckets), list(running.decode_buckets)
    most = options.max_programs
    budget = Budget(
        most or len(prefill_now),
        options.max_decode_programs or most or len(decode_now),
        None if options.max_compile_minutes is None else 60 * options.max_compile_minutes,
        options.max_program_bytes,
    )
    if budget.max_compile_s is not None and (seconds.prefill is None or seconds.decode is None):
        raise UsageError(
            f"--max-compile-minutes: {seconds.source}",
            hint='--costs FILE with {"prefill": {"compile_s": {"128": 500, "8192": 2700}}, …}, or '
            "a model file whose cache holds a compiled program",
        )
    memory: list[Curve | None] = [None, None]
    if budget.max_program_bytes is not None:
        if costs is None or not (costs.prefill.program_bytes and costs.decode.program_bytes):
            raise UsageError(
                "--max-program-memory: nothing says how much a program takes",
                hint='--costs FILE with "program_bytes" of both phases; `nxbucket inspect` shows '
                "a NEFF's",
            )
        memory = [
            Curve.rising(costs.prefill.program_bytes),
            Curve.rising(costs.decode.program_bytes),
        ]
    minimizes: Minimizes = options.minimize or ("tokens" if times.is_assumed else "time")
    if minimizes == "time" and times.is_assumed:
        raise UsageError(
            "--minimize time: no step has a time",
            hint="--costs FILE, or --roofline trn2 with a model file",
        )
    return Goal(
        limits,
        budget,
        options.grid or grid_of(() if running is None else running.prefill_buckets),
        minimizes,
        times,
        ProgramCosts(seconds.prefill, memory[0]),
        ProgramCosts(seconds.decode, memory[1]),
    )


def _of_server(source: str, api_key: str | None, limits: Limits) -> _Workload:
    metrics = read_metrics(source, api_key=api_key)
    chunks, metric = chunk_sizes_of_server(metrics, limits.max_num_batched_tokens)
    if not chunks:
        raise TraceError(
            f"{source} has no prefill step and no prompt yet",
            hint="ask again when the server has had a day of its usual requests",
        )
    notes = []
    if not metric.startswith("nxbucket"):
        notes.append(
            f"{metric} counts prompts in wide bins, over which they are spread evenly: the lists "
            "are as good as that; a trace, or an nxbucket server, says it exactly"
        )
    batches, how = None, f"unknown: {source} does not count them"
    if metrics.batch_seqs is not None and metrics.batch_seqs.count:
        batches = _at_most(metrics.batch_seqs.spread(), limits.max_num_seqs)
        how = f"nxbucket_decode_batch_seqs of {source}"
    return _Workload(f"{source} ({metric})", chunks, batches, how, notes=tuple(notes))


def _at_most(sizes: Sizes, most: int) -> Sizes:
    """A server that ran larger batches would split them among its seats now."""
    return chunked(sizes, most)
