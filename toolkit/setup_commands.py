"""`nxbucket init` and `nxbucket doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import DEFAULT_MODEL_FILE, Json, ModelFile, examples

app = typer.Typer(rich_markup_mode=None)


@app.command(
    epilog=examples(
        "nxbucket init ./models/llama-3.2-1b",
        "nxbucket init meta-llama/Llama-3.2-1B --output llama.yaml",
        "nxbucket init meta-llama/Llama-3.1-8B-Instruct --instance trn2.48xlarge",
        "nxbucket init ./my-tinyllama --profile tinyllama-1.1b-one-block",
    )
)
def init(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder with config.json, or a hub id (org/name)."),
    ],
    file: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        DEFAULT_MODEL_FILE
    ),
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
    instance: Annotated[
        str | None,
        typer.Option(
            "--instance",
            metavar="INSTANCE",
            help="What it will run on, e.g. trn2.48xlarge, or a target such as trn2. Without it "
            "the file is for target cpu.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME",
            help="Start from this one of `nxbucket profiles ls`, or from a file; without it the "
            "best match of model and instance.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a commented model file, with bucket lists that fit the model.

    Limits and lists are those of a profile that was published for the model, as far as they hold
    today; what was taken from it is said.
    """
    with output.errors_as_json(as_json):
        from nxbucket.compile.cost import memory_of
        from nxbucket.compile.host_memory import available_bytes
        from nxbucket.compile.plan import plan_programs
        from nxbucket.toolkit.init import write_model_file
        from nxbucket.toolkit.plan_report import memory_warning

        notes: list[str] = []
        spec = write_model_file(
            model, file, force=force, instance=instance, profile=profile, say=notes.append
        )
        buckets = spec.neuron_config
        programs = len(buckets.num_batched_tokens_buckets) + len(buckets.num_seqs_buckets)
        if as_json:
            output.print_json(
                {
                    "ok": True,
                    "file": str(spec.path),
                    "model_commit": spec.model_commit,
                    "programs": programs,
                    "notes": [*notes, *spec.notes],
                    "config": spec.resolved(),
                }
            )
            return
        output.print_data(str(spec.path))
        memory = memory_of(plan_programs(spec))
        if warning := memory_warning(spec, memory, available_bytes()):
            output.print_warning(warning)
        for note in (*notes, *spec.notes):
            output.print_note(note)
        output.print_note(f"{programs} programs; next: nxbucket compile {file}")


@app.command(
    epilog=examples(
        "nxbucket doctor",
        "nxbucket doctor model.yaml --json | jq '.checks[] | select(.status != \"ok\")'",
    )
)
def doctor(model_yaml: ModelFile = None, as_json: Json = False) -> None:
    """Look for what would keep this host from compiling and serving, and say how to mend it.

    With a model file (or a model.yaml here) its lock, artifacts and memory are checked too. Exit
    code 0 if no check fails, 1 if one does, 3 if a tool or a package is missing.
    """
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.doctor import Status, examine, exit_code

        file = model_yaml
        if file is None and Path(DEFAULT_MODEL_FILE).exists():
            file = Path(DEFAULT_MODEL_FILE)
        checks = examine(file)
        code = exit_code(checks)
        if as_json:
            output.print_json({"ok": code == 0, "checks": [check.as_json() for check in checks]})
        else:
            output.print_table([(c.status, c.name, c.message) for c in checks])
            for c in checks:
                if c.status != Status.OK and c.mend:
                    output.print_hint(f"{c.name}: {c.mend}")
        if code:
            raise typer.Exit(code)
