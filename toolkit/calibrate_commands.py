"""`nxbucket calibrate`: measures costs.json, which choosing buckets goes by."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, ModelFile, Remote, examples, model_or_lock_file
from nxbucket.toolkit.errors import EnvironmentProblem, NxbucketError, UsageError
from nxbucket.toolkit.whole_file import write_whole

if TYPE_CHECKING:
    from nxbucket.toolkit.choice.costs import Costs

app = typer.Typer(rich_markup_mode=None)

COSTS_FILE = Path("costs.json")
BUSY_LOAD = 0.5


@app.command(
    epilog=examples(
        "nxbucket calibrate",
        "nxbucket calibrate model.yaml --output costs.json",
        "nxbucket calibrate model.yaml --json | jq .costs.decode.step_s",
    )
)
def calibrate(
    model_yaml: ModelFile = None,
    costs_file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The costs file to write.")
    ] = COSTS_FILE,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Measure how long a step of each program takes on this host, and write it down.

    A step is timed as a server runs it: scheduling, program, sampling, output. What each program
    took to compile, and its size, come from the cache. Measure on a host that does nothing else.
    """
    with output.errors_as_json(as_json):
        from nxbucket.serve.calibrate import calibrate as measure

        file = model_or_lock_file(model_yaml)
        check_folder(costs_file)

        def check(target: str) -> None:
            check_not_of_another(costs_file, target)
            warn_if_busy()

        costs = measure(file, remote=remote, check=check, note=output.print_note)
        write_costs(costs, costs_file)
        if as_json:
            output.print_json(
                {"ok": True, "file": str(costs_file), "costs": costs.model_dump(mode="json")}
            )
        else:
            output.print_data(f"wrote {costs_file}")


def warn_if_busy() -> None:
    """One busy core is enough: threads of a program wait for the slowest of them."""
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        output.print_warning(
            f"this host is busy (load {load:.1f}), and steps will look longer than they are"
        )


def check_folder(costs_file: Path) -> None:
    """Raises UsageError now rather than after minutes of measuring."""
    if costs_file.is_dir():
        raise UsageError(f"{costs_file} is a folder", hint=f"--output {costs_file / COSTS_FILE}")
    if not costs_file.parent.is_dir():
        raise UsageError(
            f"no such folder: {costs_file.parent}", hint=f"mkdir -p {costs_file.parent}"
        )


def check_not_of_another(costs_file: Path, target: str) -> None:
    """Raises UsageError where the file holds another target's costs: a person may have written
    those, from a device that is not here."""
    from nxbucket.toolkit.choice.costs import read_costs

    if not costs_file.exists():
        return
    try:
        there = read_costs(costs_file)
    except NxbucketError as err:
        raise UsageError(
            f"{costs_file} is there, and is no costs file: {err.message}",
            hint="name another file with --output",
        ) from err
    if there.target != target:
        raise UsageError(
            f"{costs_file} has the costs of {there.target}, and what is locked here is for "
            f"{target}",
            hint="name another file with --output",
        )


def write_costs(costs: "Costs", file: Path) -> None:
    """Whole or not at all. Raises EnvironmentProblem if it cannot be written."""
    text = json.dumps(costs.model_dump(mode="json"), indent=2) + "\n"
    try:
        write_whole(file, text.encode())
    except OSError as err:
        raise EnvironmentProblem(
            f"{file}: cannot be written: {err.strerror or err}",
            hint="name a file in a writable folder with --output",
        ) from err
