"""`nxbucket inspect`: what a file is and holds."""

from pathlib import Path
from typing import Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, examples
from nxbucket.toolkit.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@app.command(
    epilog=examples(
        "nxbucket inspect program.hlo", "nxbucket inspect program.hlo --json | jq .opcodes"
    )
)
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An HLO file.")],
    as_json: Json = False,
) -> None:
    """Say what an HLO holds: opcodes, FLOPs, bytes, aliases, and what Neuron would refuse.

    Exit 1 if it breaks a rule; docs/hlo.md lists them.
    """
    with output.errors_as_json(as_json):
        if not file.is_file():
            raise UsageError(f"{file} is no file", hint="name an .hlo file")
        _inspect_hlo(file, as_json)


def _inspect_hlo(path: Path, as_json: bool) -> None:
    from nxbucket.toolkit.inspect_report import describe_hlo, print_hlo

    described = describe_hlo(path)
    if as_json:
        output.print_json(described)
    else:
        print_hlo(described)
    if not described["ok"]:
        raise typer.Exit(1)
