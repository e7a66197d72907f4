"""`nxbucket compile`."""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import GraphsOnly, Json, ModelFile, Remote, examples, model_file
from nxbucket.toolkit.errors import CompileError, UsageError
from nxbucket.toolkit.plan_commands import print_plan_of
from nxbucket.toolkit.store_commands import remote_of

if TYPE_CHECKING:
    from nxbucket.compile.build import Shard
    from nxbucket.compile.executor import MakeExecutor
    from nxbucket.compile.store import Store
    from nxbucket.toolkit.spec import DeploySpec

app = typer.Typer(rich_markup_mode=None)


EXIT_CODES = """

\b
Exit codes, for CI:
  0    every program is there, and the lock names them
  1    a program did not compile, or the model file, cache or store is at fault
  2    wrong usage
  3    this host lacks something: a compiler, a package, a permission, a Ray cluster
  130  interrupted (Ctrl-C); what is finished stays
"""


@app.command(
    epilog=examples(
        "nxbucket compile --dry-run",
        "nxbucket compile model.yaml",
        "nxbucket compile model.yaml --jobs 4 --timeout-s 3600 --max-rss-gib 24 --json",
        "nxbucket compile model.yaml --shard 2/4 --push --junit compile.xml",
        "nxbucket compile model.yaml --executor ray --remote s3://bucket/prefix",
        "nxbucket compile model.yaml --emulate",
    )
    + EXIT_CODES
)
def compile(
    model_yaml: ModelFile = None,
    jobs: Annotated[
        str,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N|auto",
            help="Programs compiled at a time; auto: what cores and free memory carry.",
        ),
    ] = "auto",
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout-s", min=1, help="Give a program up after this long.", show_default=False
        ),
    ] = None,
    max_rss_gib: Annotated[
        float | None,
        typer.Option(
            "--max-rss-gib",
            min=0.01,
            help="Stop a compile whose processes hold more memory than this. It is tried once "
            "more, alone.",
            show_default=False,
        ),
    ] = None,
    remote: Remote = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not ask artifacts.remote for what is missing.")
    ] = False,
    push: Annotated[
        bool, typer.Option("--push", help="Put each artifact into the remote once it is there.")
    ] = False,
    locked: Annotated[
        bool,
        typer.Option(
            "--locked",
            help="Take only the bytes that the lock names, and compile nothing; exit 1 if some are "
            "to be had nowhere.",
        ),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Look after part I of N only, as one of N jobs; then `nxbucket lock`.",
            show_default=False,
        ),
    ] = None,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast/--keep-going",
            help="Begin no other program once one has failed. Default: go on with the others.",
        ),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(
            "--junit",
            metavar="FILE",
            help="Write a JUnit XML report, one test for each program; on failure and Ctrl-C, too.",
            show_default=False,
        ),
    ] = None,
    executor: Annotated[
        Literal["local", "ray"],
        typer.Option(
            "--executor", help="Compile on this host, or on a Ray cluster, which needs a remote."
        ),
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="HOST:PORT",
            help="The cluster. Default: RAY_ADDRESS, or the cluster that this host is part of.",
            show_default=False,
        ),
    ] = None,
    ray_cpus_per_job: Annotated[
        float,
        typer.Option(
            "--ray-cpus-per-job", min=0.1, help="Cores that each program's task asks for."
        ),
    ] = 1.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, as `nxbucket plan` does, and stop.")
    ] = False,
    emulate: GraphsOnly = False,
    as_json: Json = False,
) -> None:
    """Compile one program for each entry of both bucket lists, and write the lock file.

    What the cache or the remote holds is not compiled again. Ctrl-C is safe: finished programs
    stay, and the same command goes on where it stopped.
    """
    if dry_run:
        print_plan_of(model_yaml, as_json, emulate=emulate)
        return
    with output.errors_as_json(as_json):
        from nxbucket.compile.build import build, take_locked
        from nxbucket.compile.cache import ArtifactCache, choose_cache
        from nxbucket.compile.compiler import compiler_for
        from nxbucket.compile.cost import memory_of
        from nxbucket.compile.executor import PoolOptions
        from nxbucket.compile.host_memory import available_bytes
        from nxbucket.compile.outcome import Reporter
        from nxbucket.compile.plan import plan_programs
        from nxbucket.compile.pool import local_pool
        from nxbucket.toolkit.compile_report import print_report
        from nxbucket.toolkit.junit import JUnitReporter
        from nxbucket.toolkit.plan_report import memory_warning
        from nxbucket.toolkit.progress import reporter
        from nxbucket.toolkit.spec import load_spec

        if locked and (push or shard is not None or executor != "local"):
            raise UsageError(
                "--locked compiles and pushes nothing: --push, --shard and --executor do not go "
                "with it",
                hint="nxbucket push puts into the remote what the lock names",
            )
        part = None if shard is None else _shard(shard)
        num_jobs = _jobs(jobs)
        spec = load_spec(model_file(model_yaml))
        for note in spec.notes:
            output.print_note(note)
        if spec.model_commit is not None:
            output.print_note(f"{spec.model} at commit {spec.model_commit}")
        _check_checkpoint(spec)
        choice = choose_cache(spec.artifacts.cache)
        cache, compiler = ArtifactCache(choice.root), compiler_for(spec, emulate=emulate)
        output.print_note(f"cache {choice.root} ({choice.origin})")
        store = None if offline else remote_of(spec, remote)
        if push and offline:
            raise UsageError(
                "--push and --offline do not go together", hint="leave one of them out"
            )
        if push and store is None:
            raise UsageError(
                "--push without a remote to push to",
                hint="set artifacts.remote in the model file, or give --remote",
            )
        make_executor: MakeExecutor = local_pool
        if executor == "ray":
            make_executor = _ray(store, ray_address, ray_cpus_per_job)
        memory = memory_of(plan_programs(spec))
        if warning := memory_warning(spec, memory, available_bytes()):
            output.print_warning(warning)
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            progress: Reporter = stack.enter_context(reporter())
            if junit is not None:
                progress = stack.enter_context(JUnitReporter(progress, junit, str(spec.path)))
            if locked:
                report = take_locked(spec, cache, compiler, progress, store, emulate=emulate)
            else:
                max_rss_bytes = None if max_rss_gib is None else int(max_rss_gib * (1 << 30))
                options = PoolOptions(
                    num_jobs, timeout_s, store, push, not fail_fast, max_rss_bytes
                )
                report = build(spec, cache, compiler, progress, options, part, make_executor)
        print_report(report, spec, choice, time.monotonic() - start, as_json)
        if report.failed:
            raise typer.Exit(CompileError.exit_code)


def _jobs(text: str) -> int | None:
    """None for `auto`."""
    if text == "auto":
        return None
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise UsageError(f"--jobs is {text!r}", hint="a number of programs at a time, or auto")


def _ray(store: "Store | None", address: str | None, cpus_per_job: float) -> "MakeExecutor":
    if store is None:
        raise UsageError(
            "--executor ray without a remote: it is where the nodes put what they compile",
            hint="set artifacts.remote in the model file, or give --remote",
        )
    from nxbucket.compile.ray_executor import RayOptions, ray_executor

    return ray_executor(RayOptions(address, cpus_per_job))


def _shard(text: str) -> "Shard":
    from nxbucket.compile.build import Shard

    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return Shard(int(index), int(count))
    raise UsageError(f"--shard is {text!r}", hint="part I of N, counted from 1: --shard 2/4")


def _check_checkpoint(spec: "DeploySpec") -> None:
    """Raises ModelError for weights that a server would refuse after an hour of compiling."""
    from nxbucket.compile.checkpoint import check_checkpoint, has_weights

    if has_weights(spec.model_dir):
        check_checkpoint(spec.model_dir, spec.architecture)
    else:
        output.print_note(f"{spec.model_dir} has no weights: compiling from config.json alone")
