"""`nxbucket serve` and `nxbucket generate`."""

from dataclasses import asdict
from typing import Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import (
    Emulate,
    Json,
    ModelFile,
    Remote,
    examples,
    model_or_lock_file,
)

app = typer.Typer(rich_markup_mode=None)


@app.command(
    epilog=examples(
        "nxbucket serve",
        "nxbucket serve model.yaml -- --port 8000 --api-key secret",
        "nxbucket serve model.yaml --emulate",
    )
)
def serve(
    context: typer.Context,
    model_yaml: ModelFile = None,
    emulate: Emulate = False,
    remote: Remote = None,
    locked: Annotated[
        bool,
        typer.Option(
            "--locked",
            help="Only the bytes that the lock names. It is always so; a script may say it.",
        ),
    ] = True,
) -> None:
    """Start vLLM's OpenAI server, bound to the artifacts that model.lock names.

    It never compiles. Artifacts that the cache lacks are pulled from the remote, and verified. The
    weights of a hub id are fetched at the commit that the lock names. What stands after `--` goes
    to `vllm serve`.
    """
    from nxbucket.serve.launcher import serve as serve_lock

    passed_on = context.obj or []
    serve_lock(model_or_lock_file(model_yaml), passed_on, emulate=emulate, remote=remote)


@app.command(
    epilog=examples(
        'nxbucket generate --prompt "Four score"',
        'nxbucket generate model.yaml --prompt "Four score" --max-tokens 40 --json',
    )
)
def generate(
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue.")],
    model_yaml: ModelFile = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Stop after this many tokens.")
    ] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")] = 0.0,
    emulate: Emulate = False,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Continue one prompt with the programs that model.lock names, without a server."""
    with output.errors_as_json(as_json):
        from nxbucket.serve.offline import generate as generate_text

        file = model_or_lock_file(model_yaml)
        result = generate_text(
            file, prompt, max_tokens, temperature, emulate=emulate, remote=remote
        )
        if as_json:
            output.print_json({"ok": True, **asdict(result)})
        else:
            output.print_data(result.text)
