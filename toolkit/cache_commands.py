"""`nxbucket cache`: what is in the local artifact cache, whether it is sound, and what may go."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, examples
from nxbucket.toolkit.errors import UsageError
from nxbucket.toolkit.quantities import bytes_of, seconds_of

if TYPE_CHECKING:
    from nxbucket.compile.cache import ArtifactCache
    from nxbucket.compile.manifest import Manifest
    from nxbucket.compile.store import Store

app = typer.Typer(
    help="Look after the artifact cache.", no_args_is_help=True, rich_markup_mode=None
)

CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="The cache folder; without it NXBUCKET_CACHE_DIR or the user's cache folder. A model "
        "file's artifacts.cache is to be named here.",
        show_default=False,
    ),
]

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="STORE",
        help="The shared store, s3://bucket/prefix or a folder. No model file is read for it.",
        show_default=False,
    ),
]


@app.command(
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


@app.command("show", epilog=examples("nxbucket cache show 3f9a"))
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


@app.command(
    "verify",
    epilog=examples(
        "nxbucket cache verify",
        "nxbucket cache verify --cache-dir /srv/nxbucket",
        "nxbucket cache verify --repair --remote s3://bucket/artifacts",
    ),
)
def cache_verify(
    cache_dir: CacheDir = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Take what is corrupt from --remote again; drop what is not to be had there, so "
            "that the next compile builds it.",
        ),
    ] = False,
    remote: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Check every entry, and size and sha256 of every blob. Exit 1 if anything stays wrong."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.cache import Corrupt
        from nxbucket.compile.repair import repair_entry
        from nxbucket.compile.sound import sound_lookup

        cache = open_cache(cache_dir)
        store = _existing_store(remote)
        found = {key: sound_lookup(cache, key) for key in cache.all_keys()}
        corrupt = {key: f.reason for key, f in found.items() if isinstance(f, Corrupt)}
        mended = {}
        if repair:
            cache.prepare()
            mended = {key: repair_entry(cache, key, store) for key in corrupt}
        left = [key for key in corrupt if mended.get(key, "left").startswith("left")]
        if as_json:
            output.print_json(
                {
                    "ok": not left,
                    "cache_dir": str(cache.root),
                    "entries": len(found),
                    "corrupt": [
                        {"key": k, "reason": reason, "repair": mended.get(k)}
                        for k, reason in corrupt.items()
                    ],
                }
            )
        else:
            for key, reason in corrupt.items():
                done = f" ({mended[key]})" if key in mended else ""
                output.print_data(f"{key}: {reason}{done}")
            how = "" if repair or not corrupt else "; --repair --remote STORE mends them"
            done = f", {len(corrupt) - len(left)} mended" if repair else ""
            output.print_note(
                f"{cache.root}: {len(found)} entries, {len(corrupt)} corrupt{done}{how}"
            )
        if left:
            raise typer.Exit(1)


@app.command(
    "gc",
    epilog=examples(
        "nxbucket cache gc --lock prod/model.lock --lock dev/model.lock --dry-run",
        "nxbucket cache gc --older-than 30d --max-size 50GiB",
        "nxbucket cache gc --remote s3://bucket/artifacts --lock model.lock --grace 1d",
    ),
)
def cache_gc(
    cache_dir: CacheDir = None,
    lock: Annotated[
        list[Path] | None,
        typer.Option(
            "--lock", help="Keep what this lock names; may be repeated.", show_default=False
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Remove what was not made or used for this long, such as 30d.",
            show_default=False,
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size",
            metavar="SIZE",
            help="Remove the least recently used until the rest fits, such as 50GiB.",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace",
            metavar="AGE",
            help="Leave alone what is younger. Default: 1h, and 1d with --remote.",
            show_default=False,
        ),
    ] = None,
    remote: StoreOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove artifacts that no lock names, that are old, or that are too many.

    What a running compile, push or server of this host holds stays, and so does what is younger
    than the grace age. With --remote, that store is swept instead of the local cache.
    """
    with output.errors_as_json(as_json):
        from nxbucket.compile.gc import Limits, collect_cache, collect_store, named_by
        from nxbucket.compile.lockfile import read_lock
        from nxbucket.compile.remote import YOUNG_S
        from nxbucket.compile.transfers import Transfer

        if not lock and older_than is None and max_size is None:
            raise UsageError(
                "without --lock, --older-than or --max-size everything would go",
                hint="name the locks whose artifacts stay, or a limit",
            )
        store = _existing_store(remote)
        limits = Limits(
            seconds_of(grace or ("1d" if remote else "1h"), "--grace"),
            None if older_than is None else seconds_of(older_than, "--older-than"),
            None if max_size is None else bytes_of(max_size, "--max-size"),
        )
        if store is not None and limits.grace_s < 2 * YOUNG_S:
            raise UsageError(
                f"--grace is {grace}: in a shared store, pushes rely on what is younger than 2h",
                hint="--grace 2h or longer",
            )
        for path in lock or ():
            if not path.is_file():
                raise UsageError(f"no such file: {path}", hint="--lock names a lock file")
        reachable = named_by(map(read_lock, lock or ()))
        if store is not None:
            where = store.location
            transfer = Transfer(say=output.print_note)
            collected = collect_store(store, reachable, limits, dry_run=dry_run, transfer=transfer)
        else:
            cache = open_cache(cache_dir)
            cache.prepare()
            where = str(cache.root)
            collected = collect_cache(cache, reachable, limits, dry_run=dry_run)
        if as_json:
            output.print_json(
                {
                    "ok": not collected.failed,
                    "where": where,
                    "dry_run": dry_run,
                    "freed_bytes": collected.freed_bytes,
                    "removed": [asdict(r) for r in collected.removed],
                    "kept": collected.kept,
                    "failed": collected.failed,
                }
            )
        else:
            rows = [(r.kind, r.name, str(r.size_bytes), r.why) for r in collected.removed]
            output.print_table([("kind", "name", "bytes", "why"), *rows])
            for reason in collected.failed:
                output.print_warning(f"not removed: {reason}")
            kept = ", ".join(f"{n} {why}" for why, n in sorted(collected.kept.items())) or "none"
            would = "would free" if dry_run else "freed"
            output.print_note(
                f"{where}: {would} {collected.freed_bytes} bytes; entries kept: {kept}"
            )
        if collected.failed:
            raise typer.Exit(1)


def _existing_store(remote: str | None) -> "Store | None":
    """For commands that take what a store lacks for lost. Raises UsageError for no folder."""
    from nxbucket.compile.store import DirectoryStore, open_store

    store = None if remote is None else open_store(remote)
    if isinstance(store, DirectoryStore) and not store.root.is_dir():
        raise UsageError(f"{store.root} is no folder", hint="--remote names the folder of a store")
    return store


def open_cache(cache_dir: Path | None) -> "ArtifactCache":
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
