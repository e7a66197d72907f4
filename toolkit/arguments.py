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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def examples(*commands: str) -> str:
    """The end of a command's help text. \\b keeps its lines apart."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def model_file(given: Path | None) -> Path:
    """The model file a command works on."""
    if given is not None:
        return given
    beside = Path(DEFAULT_MODEL_FILE)
    if not beside.exists():
        raise UsageError(
            f"no {DEFAULT_MODEL_FILE} in {Path.cwd()}",
            hint="name the model file: nxbucket validate path/to/model.yaml",
        )
    return beside
