"""`nxbucket serve`: vLLM's own OpenAI server, in this process, bound to a lock's artifacts."""

import gc
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxbucket.compile.leases import lease
from nxbucket.serve.engine_args import check_platform, locked_args, preflight
from nxbucket.serve.served import Served, resolve
from nxbucket.toolkit.errors import UsageError
from nxbucket.toolkit.refusals import refused_serve_argument
from nxbucket.toolkit.spec import DeploySpec


def serve(
    path: Path, vllm_args: list[str], *, emulate: bool = False, remote: str | None = None
) -> None:
    """Blocks until the server ends. `vllm_args` are the user's own, after `--`.

    Everything that can be found wrong is found before vLLM is imported, which takes seconds.
    Raises SpecError, LockError, BindError, ModelError, UsageError, EnvironmentProblem.
    """
    spec, served = resolve(path, emulate=emulate)
    refuse_overrides(vllm_args)
    keys = [program.key for program in served.locked.programs]
    with lease(served.cache.root, keys):
        preflight(spec, served, remote=remote)
        with (
            lease(served.cache.root, keys),  # again: a pull may only now have made the cache
            tempfile.TemporaryDirectory(prefix="nxbucket-metrics-") as metrics_dir,
        ):
            # Fresh for every run, and set before anything imports prometheus_client.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics_dir
            _run_vllm(spec, served, vllm_args)


def _run_vllm(spec: DeploySpec, served: Served, vllm_args: list[str]) -> None:
    signal.signal(signal.SIGINT, _abandon_start)
    # Hundreds of thousands of objects survive these imports; looking for garbage among them while
    # they come in costs a second or two of the start.
    gc.disable()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    gc.enable()
    check_platform()
    cli_env_setup()  # type: ignore[no-untyped-call]
    parser = FlexibleArgumentParser(prog="nxbucket serve --")  # type: ignore[no-untyped-call]
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    engine = locked_args(spec, served)
    model = engine.pop("model")
    argv = ["serve", model, *flags(engine), *flags(spec.serve), *vllm_args]
    args = parser.parse_args(argv)
    if spec.async_scheduling is None:
        # Only where the executor lets the scheduler run ahead of the step in progress.
        args.async_scheduling = args.distributed_executor_backend == "mp"
    configure_logging_from_args(args)
    command.validate(args)
    command.cmd(args)


def _abandon_start(*_: object) -> None:
    """Ctrl-C before the server is up; then vLLM's own handler is in place.

    As an exception it would come up inside some import or callback, and some of those swallow it.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(130)


def flags(arguments: dict[str, Any]) -> Iterator[str]:
    """{"enforce_eager": True, "port": 8000} -> --enforce-eager --port 8000, as vLLM spells them."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        elif isinstance(value, dict):
            yield from (f"--{flag}", json.dumps(value))
        else:
            yield f"--{flag}={value}"


def refuse_overrides(vllm_args: list[str]) -> None:
    """Raises UsageError for an argument that would change a program's shape or ask for what is not
    built, naming the key of model.yaml to edit."""
    for i, argument in enumerate(vllm_args):
        if not argument.startswith("-") or argument == "-":
            continue
        name, equals, value = argument.partition("=")
        if not equals and i + 1 < len(vllm_args) and not vllm_args[i + 1].startswith("--"):
            value = vllm_args[i + 1]
        refusal = refused_serve_argument(name, value)
        if refusal is not None:
            message, hint = refusal
            raise UsageError(message, hint=hint)
