"""`nxbucket compile`."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, ModelFile, Remote, examples, model_file
from nxbucket.toolkit.errors import CompileError, UsageError
from nxbucket.toolkit.plan_commands import print_plan_of
from nxbucket.toolkit.store_commands import remote_of

if TYPE_CHECKING:
    from nxbucket.compile.build import BuildReport, Shard
    from nxbucket.compile.cache import CacheChoice
    from nxbucket.toolkit.spec import DeploySpec

app = typer.Typer(rich_markup_mode=None)


@app.command(
    epilog=examples(
        "nxbucket compile --dry-run",
        "nxbucket compile model.yaml",
        "nxbucket compile model.yaml --jobs 4 --timeout-s 3600 --json",
    )
)
def compile(
    model_yaml: ModelFile = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Programs compiled at a time. Default: what cores and free memory carry.",
            show_default=False,
        ),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout-s", min=1, help="Give a program up after this long.", show_default=False
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, as `nxbucket plan` does, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile one program for each entry of both bucket lists, and write the lock file.

    What the cache or the remote holds is not compiled again. Ctrl-C is safe: finished programs
    stay, and the same command goes on where it stopped.
    """
    if dry_run:
        print_plan_of(model_yaml, as_json)
        return
    with output.errors_as_json(as_json):
        from nxbucket.compile.build import build, gather
        from nxbucket.compile.cache import ArtifactCache, choose_cache
        from nxbucket.compile.compiler import compiler_for
        from nxbucket.compile.cost import memory_of
        from nxbucket.compile.host_memory import available_bytes
        from nxbucket.compile.lockfile import lock_path, read_lock
        from nxbucket.compile.plan import plan_programs
        from nxbucket.compile.executor import PoolOptions
        from nxbucket.toolkit.plan_report import memory_warning
        from nxbucket.toolkit.progress import reporter
        from nxbucket.toolkit.spec import load_spec

        spec = load_spec(model_file(model_yaml))
        part = None if shard is None else _shard(shard)
        for note in spec.notes:
            output.print_note(note)
        if spec.model_commit is not None:
            output.print_note(f"{spec.model} at commit {spec.model_commit}")
        _check_checkpoint(spec)
        choice = choose_cache(spec.artifacts.cache)
        cache, compiler = ArtifactCache(choice.root), compiler_for(spec)
        output.print_note(f"cache {choice.root} ({choice.origin})")
        store = None if offline else remote_of(spec, remote)
        if push and store is None:
            raise UsageError(
                "--push without a remote to push to",
                hint="set artifacts.remote in the model file, or give --remote",
            )
        memory = memory_of(plan_programs(spec))
        if warning := memory_warning(spec, memory, available_bytes()):
            output.print_warning(warning)
        start = time.monotonic()
        with reporter() as progress:
            if locked:
                lock = read_lock(lock_path(spec.path))
                report = gather(spec, cache, compiler, progress, store, lock)
            else:
                options = PoolOptions(jobs, timeout_s, store, push, not fail_fast)
                report = build(spec, cache, compiler, progress, options, part)
        _print_report(report, spec, choice, time.monotonic() - start, as_json)
        if report.failed:
            raise typer.Exit(CompileError.exit_code)


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


def _print_report(
    report: "BuildReport", spec: "DeploySpec", choice: "CacheChoice", wall_s: float, as_json: bool
) -> None:
    if as_json:
        output.print_json(_report_json(report, spec, choice, wall_s))
        return
    rows = [("program", "status", "seconds", "bytes", "key")]
    for o in report.outcomes:
        size = str(o.manifest.size_bytes) if o.manifest else "-"
        rows.append((o.name, o.status, f"{o.wall_s:.1f}", size, o.planned.key))
    output.print_table(rows)
    for o in report.failed:
        if o.status == "skipped":
            continue
        output.print_warning(f"{o.name}: the compiler {o.detail}; its log, {o.log_path}, ends:")
        output.print_indented(o.log_tail)
        if o.hint is not None:
            output.print_hint(f"{o.name}: {o.hint}")
    if report.failed:
        output.print_error(
            CompileError(
                f"{len(report.failed)} of {len(report.outcomes)} programs did not compile; "
                f"{report.lock_file} is as it was",
                hint=f"mend what the logs say; `nxbucket compile {spec.path}` builds only these",
            )
        )
        return
    for name in report.changed:
        output.print_note(f"{name}: its bytes are new, and the lock names them now")
    before, now = report.previous_commit, spec.model_commit
    if before is not None and now is not None and before != now:
        output.print_note(
            f"{spec.model}: {before[:12]} -> {now[:12]}; the lock names the new commit"
        )
    if report.others:
        output.print_note(
            f"{len(report.others)} programs of other shards are not in this cache, so "
            f"{report.lock_file} is as it was; when all are pushed: nxbucket lock {spec.path}"
        )
        return
    state = "written" if report.lock_written else "unchanged"
    output.print_note(f"{report.lock_file} {state}; {len(rows) - 1} programs in {wall_s:.1f} s")


def _report_json(
    report: "BuildReport", spec: "DeploySpec", choice: "CacheChoice", wall_s: float
) -> dict[str, Any]:
    return {
        "ok": not report.failed,
        "target": report.toolchain.target,
        "toolchain": dict(report.toolchain.versions),
        "cache_dir": str(choice.root),
        "lock": str(report.lock_file),
        "lock_written": report.lock_written,
        "model_commit": spec.model_commit,
        "previous_commit": report.previous_commit,
        "changed": report.changed,
        "others": list(report.others),
        "wall_s": round(wall_s, 3),
        "programs": [
            {
                "name": o.name,
                "status": o.status,
                "key": o.planned.key,
                "graph_key": o.manifest.graph_key if o.manifest else None,
                "digest": o.manifest.blobs[0].digest if o.manifest else None,
                "size_bytes": o.manifest.size_bytes if o.manifest else None,
                "wall_s": round(o.wall_s, 3),
                "detail": o.detail,
                "hint": o.hint,
                "log": str(o.log_path) if o.log_path else None,
            }
            for o in report.outcomes
        ],
    }
