"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from nxbucket.toolkit.errors import UsageError

DEFAULT_MODEL_FILE = "model.yaml"

ModelFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL_YAML",
        help=f"The model file; {DEFAULT_MODEL_FILE} in the current directory when left out.",
        show_default=False,
    ),
]
Emulate = Annotated[
    bool,
    typer.Option(
        "--emulate",
        help="Run a Neuron target's graphs, those that neuronx-cc is given, on this host's "
        "processor: correct, not fast.",
    ),
]
GraphsOnly = Annotated[
    bool,
    typer.Option(
        "--emulate",
        help="Of a Neuron target the graphs alone, for `serve --emulate` and `generate --emulate`; "
        "needs no neuronx-cc.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

Remote = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="STORE",
        help="The shared store, s3://bucket/prefix or a folder; wins over artifacts.remote.",
        show_default=False,
    ),
]

Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Write the pictures, as one HTML file.",
        show_default=False,
    ),
]


def examples(*commands: str) -> str:
    """The end of a command's help text. \\b keeps its lines apart."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def model_or_lock_file(given: Path | None) -> Path:
    """For commands that serve: the lock stands for the model file beside it."""
    return given if given is not None and given.suffix == ".lock" else model_file(given)


def model_file(given: Path | None) -> Path:
    """The model file a command works on. Raises UsageError for a lock file."""
    if given is not None:
        if given.suffix == ".lock":
            # The lock's own name is derived from this: it would be written over the model file.
            raise UsageError(
                f"{given} is a lock file; this command takes the model file",
                hint=f"name the model file: {given.with_suffix('.yaml')}",
            )
        return given
    beside = Path(DEFAULT_MODEL_FILE)
    if not beside.exists():
        raise UsageError(
            f"no {DEFAULT_MODEL_FILE} in {Path.cwd()}",
            hint="name the model file: nxbucket validate path/to/model.yaml",
        )
    return beside
