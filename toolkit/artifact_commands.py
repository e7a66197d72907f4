"""`nxbucket compile` and `nxbucket cache`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import GraphsOnly, Json, ModelFile, examples, model_file
from nxbucket.toolkit.errors import CompileError, UsageError
from nxbucket.toolkit.plan_commands import print_plan_of

if TYPE_CHECKING:
    from nxbucket.compile.build import BuildReport, Shard
    from nxbucket.compile.cache import ArtifactCache, CacheChoice
    from nxbucket.compile.manifest import Manifest
    from nxbucket.toolkit.spec import DeploySpec

app = typer.Typer(rich_markup_mode=None)
cache_app = typer.Typer(
    help="Look at the artifact cache.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")

CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="The cache folder; without it NXBUCKET_CACHE_DIR or the user's cache folder.",
        show_default=False,
    ),
]


@app.command(
    epilog=examples(
        "nxbucket compile --dry-run",
        "nxbucket compile model.yaml",
        "nxbucket compile model.yaml --jobs 4 --timeout-s 3600 --json",
        "nxbucket compile model.yaml --emulate",
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
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Compile part I of N only, as one of N jobs; the one that finds all the others' "
            "in the cache writes the lock.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, as `nxbucket plan` does, and stop.")
    ] = False,
    emulate: GraphsOnly = False,
    as_json: Json = False,
) -> None:
    """Compile one program for each entry of both bucket lists, and write the lock file.

    What the cache holds is not compiled again. Ctrl-C is safe: finished programs stay, and the same
    command goes on where it stopped.
    """
    if dry_run:
        print_plan_of(model_yaml, as_json, emulate=emulate)
        return
    with output.errors_as_json(as_json):
        from nxbucket.compile.build import build
        from nxbucket.compile.cache import ArtifactCache, choose_cache
        from nxbucket.compile.compiler import compiler_for
        from nxbucket.compile.cost import memory_of
        from nxbucket.compile.host_memory import available_bytes
        from nxbucket.compile.plan import plan_programs
        from nxbucket.toolkit.plan_report import memory_warning
        from nxbucket.toolkit.progress import reporter
        from nxbucket.toolkit.spec import load_spec

        part = None if shard is None else _shard(shard)
        spec = load_spec(model_file(model_yaml))
        for note in spec.notes:
            output.print_note(note)
        if spec.model_commit is not None:
            output.print_note(f"{spec.model} at commit {spec.model_commit}")
        _check_checkpoint(spec)
        choice = choose_cache(spec.artifacts.cache)
        cache, compiler = ArtifactCache(choice.root), compiler_for(spec, emulate=emulate)
        output.print_note(f"cache {choice.root} ({choice.origin})")
        memory = memory_of(plan_programs(spec))
        if warning := memory_warning(spec, memory, available_bytes()):
            output.print_warning(warning)
        start = time.monotonic()
        with reporter() as progress:
            report = build(
                spec, cache, compiler, progress, jobs=jobs, timeout_s=timeout_s, shard=part
            )
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
    from nxbucket.compile.explain import compile_command
    from nxbucket.compile.targets import HLO_TARGET

    rows = [("program", "status", "seconds", "bytes", "key")]
    for o in report.outcomes:
        size = str(o.manifest.size_bytes) if o.manifest else "-"
        rows.append((o.name, o.status, f"{o.wall_s:.1f}", size, o.planned.key))
    output.print_table(rows)
    for o in report.failed:
        output.print_warning(f"{o.name}: the compiler {o.detail}; its log, {o.log_path}, ends:")
        output.print_indented(o.log_tail)
        if o.hlo_path is not None:
            output.print_note(f"{o.name}: the HLO it was given is {o.hlo_path}")
        if o.hint is not None:
            output.print_hint(f"{o.name}: {o.hint}")
    if report.failed:
        again = compile_command(spec.path, emulate=report.toolchain.target == HLO_TARGET)
        output.print_error(
            CompileError(
                f"{len(report.failed)} of {len(report.outcomes)} programs did not compile; "
                f"{report.lock_file} is as it was",
                hint=f"mend what the logs say; `{again}` builds only these",
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
            f"{len(report.others)} programs of other shards are not in the cache, so "
            f"{report.lock_file} is as it was"
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
                "hlo": str(o.hlo_path) if o.hlo_path else None,
            }
            for o in report.outcomes
        ],
    }


@cache_app.command(
    "ls",
    epilog=examples(
        "nxbucket cache ls",
        "nxbucket cache ls --json | jq '.entries[] | select(.compile_s > 60)'",
    ),
)
def cache_ls(cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """List the entries, without reading the blobs."""
    with output.errors_as_json(as_json):
        cache = open_cache(cache_dir)
        entries = [(key, cache.entry(key)) for key in cache.all_keys()]
        if as_json:
            output.print_json(
                {
                    "ok": True,
                    "cache_dir": str(cache.root),
                    "entries": [
                        {"key": key, "reason": e} if isinstance(e, str) else _brief(key, e)
                        for key, e in entries
                    ],
                }
            )
            return
        rows = [("key", "kind", "program", "target", "bytes", "compile s")]
        for key, e in entries:
            if isinstance(e, str):
                rows.append((key, "corrupt", e, "-", "-", "-"))
            else:
                rows.append(
                    (key, e.key_kind, e.program, e.target, str(e.size_bytes), f"{e.compile_s:.1f}")
                )
        output.print_table(rows)


@cache_app.command("show", epilog=examples("nxbucket cache show 3f9a"))
def cache_show(
    key: Annotated[str, typer.Argument(help="A key, or its first digits.")],
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Print one entry in full: the inputs of its key, signature, blobs, toolchain, timings."""
    with output.errors_as_json(as_json):
        import json

        cache = open_cache(cache_dir)
        matching = [k for k in cache.all_keys() if k.startswith(key)]
        if len(matching) != 1:
            raise UsageError(
                f"{len(matching)} entries of {cache.root} have a key that begins with {key!r}",
                hint="nxbucket cache ls prints the keys; give more digits",
            )
        entry = cache.entry(matching[0])
        if isinstance(entry, str):
            raise UsageError(entry, hint="nxbucket cache verify, then nxbucket compile")
        output.print_json({"ok": True, "key": matching[0], **json.loads(entry.to_json())})


@cache_app.command(
    "verify",
    epilog=examples("nxbucket cache verify", "nxbucket cache verify --cache-dir /srv/nxbucket"),
)
def cache_verify(cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """Check every entry, and size and sha256 of every blob. Exit 1 if anything is wrong."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.cache import Corrupt
        from nxbucket.compile.sound import sound_lookup

        cache = open_cache(cache_dir)
        found = {key: sound_lookup(cache, key) for key in cache.all_keys()}
        corrupt = {key: f.reason for key, f in found.items() if isinstance(f, Corrupt)}
        if as_json:
            output.print_json(
                {
                    "ok": not corrupt,
                    "cache_dir": str(cache.root),
                    "entries": len(found),
                    "corrupt": [{"key": k, "reason": reason} for k, reason in corrupt.items()],
                }
            )
        else:
            for key, reason in corrupt.items():
                output.print_data(f"{key}: {reason}")
            output.print_note(f"{cache.root}: {len(found)} entries, {len(corrupt)} corrupt")
        if corrupt:
            raise typer.Exit(1)


def open_cache(cache_dir: Path | None) -> "ArtifactCache":
    """The one a command works on. Raises UsageError if there is none yet."""
    from nxbucket.compile.cache import ArtifactCache, choose_cache

    cache = ArtifactCache(cache_dir.absolute() if cache_dir else choose_cache(None).root)
    if not cache.root.is_dir():
        raise UsageError(
            f"no artifact cache at {cache.root}",
            hint="nxbucket compile makes one; --cache-dir names another",
        )
    return cache


def _brief(key: str, entry: "Manifest") -> dict[str, Any]:
    return {
        "key": key,
        "kind": entry.key_kind,
        "program": entry.program,
        "target": entry.target,
        "graph_key": entry.graph_key,
        "size_bytes": entry.size_bytes,
        "compile_s": entry.compile_s,
    }
