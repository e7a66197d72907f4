"""`nxbucket cache`: what is in the local artifact cache, whether it is sound, and what may go."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, examples
from nxbucket.toolkit.errors import UsageError

if TYPE_CHECKING:
    from nxbucket.compile.cache import ArtifactCache
    from nxbucket.compile.manifest import Manifest

app = typer.Typer(
    help="Look after the artifact cache.", no_args_is_help=True, rich_markup_mode=None
)

CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="The cache folder; without it NXBUCKET_CACHE_DIR or the user's cache folder.",
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
        cache = _open_cache(cache_dir)
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

        cache = _open_cache(cache_dir)
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
    epilog=examples("nxbucket cache verify", "nxbucket cache verify --cache-dir /srv/nxbucket"),
)
def cache_verify(cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """Check every entry, and size and sha256 of every blob. Exit 1 if anything is wrong."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.cache import Corrupt

        cache = _open_cache(cache_dir)
        found = {key: cache.lookup(key) for key in cache.all_keys()}
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


def _open_cache(cache_dir: Path | None) -> "ArtifactCache":
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
