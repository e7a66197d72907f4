"""`nxbucket drift`: when to change the buckets of a server that runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, examples
from nxbucket.toolkit.choice_commands import CostsFile, Grid

app = typer.Typer(rich_markup_mode=None)

EXIT_DRIFTED = 4


@app.command(
    epilog=examples(
        "nxbucket drift --metrics http://host:8000 --lock model.lock",
        "nxbucket drift --metrics http://host:8000 --lock model.lock --threshold 0.1 --json",
    )
)
def drift(
    metrics: Annotated[
        str,
        typer.Option("--metrics", metavar="URL", help="The server's metrics, or a file of them."),
    ],
    lock: Annotated[
        Path, typer.Option("--lock", metavar="FILE", help="The lock that the server runs.")
    ] = Path("model.lock"),
    threshold: Annotated[
        float,
        typer.Option("--threshold", help="The share of a phase's work worth a change of lists."),
    ] = 0.05,
    max_programs: Annotated[
        int | None,
        typer.Option(
            "--max-programs",
            help="Entries of each list at most; as many as it has now when left out.",
            show_default=False,
        ),
    ] = None,
    grid: Grid = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="The target that the server runs, if the lock has several.",
            show_default=False,
        ),
    ] = None,
    costs: CostsFile = None,
    as_json: Json = False,
) -> None:
    """Compare what a running server's lists waste with what the best lists would.

    For a cron job: exit code 0 if the lists are good, 4 if others would save --threshold of the
    work of prefill or decode; anything else is an error. A phase with fewer than 1000 steps since
    the server started decides nothing.
    """
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.choice.drift import DriftOptions, drift_text, measure_drift

        found = measure_drift(
            DriftOptions(
                metrics=metrics,
                lock=lock,
                target=target,
                threshold=threshold,
                max_programs=max_programs,
                grid=grid,
                costs=costs,
                api_key=os.environ.get("VLLM_API_KEY"),
            )
        )
        if as_json:
            output.print_json(found.as_json())
        else:
            output.print_data(drift_text(found))
        for note in found.notes:
            output.print_note(note)
        if found.drifted:
            raise typer.Exit(EXIT_DRIFTED)
