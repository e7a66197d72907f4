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
from nxbucket.toolkit.choice.advise import Limits
from nxbucket.toolkit.choice.costs import Costs, read_costs
from nxbucket.toolkit.choice.step_times import ASSUMED, StepTimes, from_costs, of_roofline
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.trace_reader import find_trace, read_trace
from nxbucket.toolkit.errors import UsageError
from nxbucket.toolkit.spec import DeploySpec, load_spec

DEFAULT_MAX_NUM_SEQS = 8
MOST = 1 << 24


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
        for name in self.given():
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            if not 1 <= value <= MOST:
                raise UsageError(f"{option} is {value}", hint=f"1 to {MOST}")


NO_LIMITS = LimitOptions()


def find_model_file(given: Path | None, options: LimitOptions) -> Path | None:
    """None for a workload looked at without a model. Raises UsageError if nothing has limits."""
    if given is not None:
        return given
    if options.max_num_batched_tokens is not None:
        return None
    beside = Path(DEFAULT_MODEL_FILE)
    if beside.exists():
        return beside
    raise UsageError(
        f"no {DEFAULT_MODEL_FILE} in {Path.cwd()}, and no limits",
        hint="name the model file, or give --max-num-batched-tokens (and --max-num-seqs)",
    )


def limits_of(file: Path | None, options: LimitOptions) -> tuple[Limits, DeploySpec | None]:
    """Raises UsageError and what `load_spec` does."""
    options.check()
    if file is None:
        assert options.max_num_batched_tokens is not None
        longest = options.max_num_batched_tokens
        if options.max_model_len is not None:
            longest = min(longest, options.max_model_len)
        seqs = options.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        return Limits(longest, seqs, options.max_model_len), None
    spec = load_spec(file)
    model_len = options.max_model_len or spec.max_model_len
    seqs = options.max_num_seqs or spec.max_num_seqs
    tokens = min(options.max_num_batched_tokens or spec.max_num_batched_tokens, model_len)
    as_it_is = not options.given()
    limits = Limits(
        tokens,
        seqs,
        model_len,
        block_size=spec.block_size,
        num_kv_blocks=spec.num_kv_blocks if as_it_is else None,
        enable_prefix_caching=spec.enable_prefix_caching,
    )
    return limits, spec


def trace_of(given: str, requests: int | None) -> Trace:
    """A file, or a shipped trace by its name; the first `requests` rows if that is not None."""
    from nxbucket.toolkit.choice.advise import part_of

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
