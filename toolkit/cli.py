"""The `nxbucket` command: parses arguments, calls the library, turns known errors into text.

Only typer is imported here. Each command imports what it needs, so that `validate` and `--version`
never pay for torch or vLLM.
"""

import difflib
import os
import shlex
import sys
import threading
import traceback
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from nxbucket.toolkit import (
    artifact_commands,
    cache_commands,
    calibrate_commands,
    choice_commands,
    drift_commands,
    hlo_commands,
    inspect_commands,
    output,
    plan_commands,
    profile_commands,
    serving_commands,
    setup_commands,
    store_commands,
)
from nxbucket.toolkit.arguments import Json, ModelFile, examples, model_file
from nxbucket.toolkit.environment import unknown_variables
from nxbucket.toolkit.errors import NxbucketError, UsageError

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: what any Unix filter ends with when its reader has gone."""

# \b keeps the lines of a paragraph apart in the help text.
_EXIT_CODES = """\b
Exit codes:
  0    done
  1    something you can mend: the model file, the cache, a program that did not compile
  2    wrong usage: an unknown option, a file that is not there
  3    this host lacks something: a tool, a device, a permission
  4    drift: other bucket lists would save enough
  130  interrupted (Ctrl-C)
"""

app = typer.Typer(
    name="nxbucket",
    help="Compile LLM bucket programs ahead of time, and serve from them.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Rich help costs a rich import per call and reads [brackets] as markup.
    rich_markup_mode=None,
)


app.add_typer(artifact_commands.app)
app.add_typer(cache_commands.app, name="cache")
app.add_typer(choice_commands.app)
app.add_typer(drift_commands.app)
app.add_typer(calibrate_commands.app)
app.add_typer(plan_commands.app)
app.add_typer(profile_commands.app, name="profiles")
app.add_typer(hlo_commands.app)
app.add_typer(inspect_commands.app)
app.add_typer(serving_commands.app)
app.add_typer(setup_commands.app)
app.add_typer(store_commands.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.print_data(f"nxbucket {version('nxbucket')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@app.command(
    epilog=examples(
        "nxbucket validate",
        "nxbucket validate prod/model.yaml --json | jq .config.neuron_config",
    )
)
def validate(model_yaml: ModelFile = None, as_json: Json = False) -> None:
    """Check a model file and print the effective configuration."""
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.spec import load_spec
        from nxbucket.toolkit.spec_report import print_spec, spec_as_json

        spec = load_spec(model_file(model_yaml))
        if as_json:
            output.print_json(spec_as_json(spec))
        else:
            print_spec(spec)


def _split_at_double_dash(arguments: list[str]) -> tuple[list[str], list[str]]:
    """`serve model.yaml -- --port 80`: what stands after the dashes is vLLM's, word for word.

    Click would take the first of those words for a missing MODEL_YAML. Raises UsageError for an
    option that is not ours in front of them.
    """
    if arguments[:1] != ["serve"]:
        return arguments, []
    at = arguments.index("--") if "--" in arguments else len(arguments)
    ours, passed_on = arguments[:at], arguments[at + 1 :]
    foreign = next((i for i, word in enumerate(ours) if _is_vllms(word)), None)
    if foreign is not None:
        behind = ours[foreign:]
        before = ours[:foreign]
        for i, word in reversed(list(enumerate(behind))):
            if word.partition("=")[0] in SERVE_OPTIONS:
                takes_one = word in SERVE_OPTIONS_WITH_A_VALUE
                before += behind[i : i + 1 + takes_one]
                del behind[i : i + 1 + takes_one]
        meant = shlex.join(["nxbucket", *before, "--", *behind, *passed_on])
        raise UsageError(
            f"nxbucket serve has no option {ours[foreign]}",
            hint=f"arguments of vllm serve go behind --: {meant}",
        )
    return ours, passed_on


SERVE_OPTIONS_WITH_A_VALUE = ("--remote",)
SERVE_OPTIONS = ("--emulate", "--help", "--locked", *SERVE_OPTIONS_WITH_A_VALUE)


def _is_vllms(word: str) -> bool:
    """A slip in an option of ours is left to click, which names the right one."""
    option = word.partition("=")[0]
    return word.startswith("-") and not difflib.get_close_matches(option, SERVE_OPTIONS, cutoff=0.8)


TRANSFER_THREAD = "nxbucket-transfer"
"""How the threads of compile/transfers.py are named."""


def _end_interrupted() -> NoReturn:
    output.print_note("interrupted; what is finished stays")
    if any(t.name.startswith(TRANSFER_THREAD) for t in threading.enumerate()):
        # A request on its way may take minutes to give up, and nothing needs its answer now.
        os._exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_INTERRUPTED)


def main() -> None:
    # A path that the terminal's encoding cannot show must not hide the message it stands in.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        for sentence in unknown_variables(os.environ):
            output.print_warning(sentence)
        try:
            ours, passed_on = _split_at_double_dash(sys.argv[1:])
            app(ours, prog_name="nxbucket", obj=passed_on)
        finally:
            if sys.stdout is not None:  # closed by whoever started us
                sys.stdout.flush()
    except NxbucketError as error:
        if os.environ.get("NXBUCKET_DEBUG") == "1":
            traceback.print_exc()
        output.print_error(error)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == EXIT_INTERRUPTED:  # click's answer to a KeyboardInterrupt
            _end_interrupted()
        raise
    except KeyboardInterrupt:
        _end_interrupted()
    except (BrokenPipeError, output.ReaderGone):
        # Python flushes stdout once more on its way out; there must be something to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
