"""From the words of the command line to a workload, a server's limits, and costs.

`advise` and `simulate` share these: with a model file its limits count, and an option says what
they would be otherwise; without one, the options are all there is.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nxbucket.toolkit.arguments import DEFAULT_MODEL_FILE
from nxbucket.toolkit.choice.costs import Costs, read_costs
from nxbucket.toolkit.choice.step_times import ASSUMED, StepTimes, from_costs, of_roofline
from nxbucket.toolkit.choice.trace import Trace, part_of
from nxbucket.toolkit.choice.trace_reader import find_trace, read_trace
from nxbucket.toolkit.choice.workload import Lists, ServerLimits
from nxbucket.toolkit.errors import UsageError
from nxbucket.toolkit.spec import DeploySpec, load_spec

DEFAULT_MAX_NUM_SEQS = 8
MAX_LIMIT = 1 << 24
MAX_ENTRIES = 256
"""Of a list."""


@dataclass(frozen=True)
class LimitOptions:
    """Those of the command line; None is left out."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None

    def given(self) -> list[str]:
        return [name for name, value in vars(self).items() if value is not None]

    def check(self) -> None:
        """Raises UsageError."""
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and seqs > tokens:
            raise UsageError(
                f"--max-num-seqs {seqs} is above --max-num-batched-tokens {tokens}",
                hint="vLLM takes no such server: a decode step has a token of each sequence",
            )
        for name in self.given():
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            if not 1 <= value <= MAX_LIMIT:
                raise UsageError(f"{option} is {value}", hint=f"1 to {MAX_LIMIT}")


NO_LIMITS = LimitOptions()


def find_model_file(given: Path | None, options: LimitOptions) -> Path | None:
    """None for a workload looked at without a model. Raises UsageError if nothing has limits."""
    if given is not None:
        return given
    beside = Path(DEFAULT_MODEL_FILE)
    if beside.exists():
        return beside
    if options.max_num_batched_tokens is not None:
        return None
    raise UsageError(
        f"no {DEFAULT_MODEL_FILE} in {Path.cwd()}, and no limits",
        hint="name the model file, or give --max-num-batched-tokens (and --max-num-seqs)",
    )


def note_on_file(given: bool, file: Path | None) -> list[str]:
    """A model file that nobody named counts all the same, as in every command."""
    if given or file is None:
        return []
    return [f"limits and lists are those of {file} here, where no option says otherwise"]


@dataclass(frozen=True)
class Server:
    """What is advised or simulated. `lists`: of the model file, those that its limits still fit.

    `as_it_is`: a model file's, with no limit changed.
    """

    name: str
    limits: ServerLimits
    lists: Lists
    spec: DeploySpec | None = None
    as_it_is: bool = False


def server_of(file: Path | None, options: LimitOptions) -> Server:
    """Raises UsageError and what `load_spec` does."""
    options.check()
    if file is None:
        assert options.max_num_batched_tokens is not None
        tokens = options.max_num_batched_tokens
        if options.max_model_len is not None:
            tokens = min(tokens, options.max_model_len)
        seqs = options.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        return Server("powers of two", ServerLimits(tokens, seqs, options.max_model_len), {})
    spec = load_spec(file)
    model_len = options.max_model_len or spec.max_model_len
    seqs = options.max_num_seqs or spec.max_num_seqs
    tokens = min(options.max_num_batched_tokens or spec.max_num_batched_tokens, model_len)
    same_kv = (model_len, seqs) == (spec.max_model_len, spec.max_num_seqs)
    limits = ServerLimits(
        tokens,
        seqs,
        model_len,
        block_size=spec.block_size,
        num_kv_blocks=spec.num_kv_blocks if same_kv else None,
        enable_prefix_caching=spec.enable_prefix_caching,
    )
    own = lists_of(spec)
    last = {"prefill": tokens, "decode": seqs}
    lists: Lists = {phase: sizes for phase, sizes in own.items() if sizes[-1] == last[phase]}
    changed = [phase for phase in own if phase not in lists]
    name = f"{file} with powers of two ({', '.join(changed)})" if changed else str(file)
    return Server(name, limits, lists, spec, as_it_is=same_kv and not changed)


def lists_of(spec: DeploySpec) -> Lists:
    neuron = spec.neuron_config
    return {"prefill": neuron.num_batched_tokens_buckets, "decode": neuron.num_seqs_buckets}


def check_entries(option: str, value: int | None) -> None:
    """Raises UsageError."""
    if value is not None and not 1 <= value <= MAX_ENTRIES:
        raise UsageError(f"{option} is {value}", hint=f"1 to {MAX_ENTRIES}")


def check_grid(grid: int | None) -> None:
    """Raises UsageError."""
    if grid is not None and grid < 1:
        raise UsageError(f"--grid is {grid}", hint="1 or more, e.g. 128")


def check_servers(servers: int) -> None:
    """Raises UsageError."""
    if servers < 1:
        raise UsageError(f"--servers is {servers}", hint="1 or more")


def trace_of(given: str, requests: int | None) -> Trace:
    """A file, or a shipped trace by its name; the first `requests` rows if that is not None."""
    if requests is not None and requests < 1:
        raise UsageError(f"--requests is {requests}", hint="1 or more")
    with counting("reading") as progress:
        trace = read_trace(find_trace(given), progress)
    return trace if requests is None else part_of(trace, range(min(requests, len(trace))))


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """A spinner with a count, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed:,.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda count: shown.update(task, completed=count)


def costs_of(file: Path | None) -> Costs | None:
    return None if file is None else read_costs(file)


def note_on_target(costs: Costs | None, target: str) -> list[str]:
    """A costs file of another target is used all the same: a person may know why."""
    if costs is None or costs.target.partition("-")[0] == target.partition("-")[0]:
        return []
    return [f"the costs are those of {costs.target}, and what is looked at is for {target}"]


def times_of(
    costs: Costs | None, file: Path | None, roofline: str | None, spec: DeploySpec | None
) -> StepTimes:
    """Of the costs file, else a roofline, else assumed. Raises UsageError."""
    if roofline is not None:
        if costs is not None and (costs.prefill.step_s or costs.decode.step_s):
            raise UsageError(
                f"--roofline, and {file} has step times too", hint="leave one of them out"
            )
        if spec is None:
            raise UsageError(
                "--roofline needs a model file: FLOPs and bytes are the model's",
                hint=f"nxbucket advise model.yaml --roofline {roofline} ...",
            )
        return of_roofline(spec, roofline)
    if costs is not None and (costs.prefill.step_s or costs.decode.step_s):
        return from_costs(costs, str(file))
    return ASSUMED
