"""`push`, `pull`, `lock`, `diff`, `pack` and `unpack`: artifacts between hosts."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import (
    GraphsOnly,
    Json,
    ModelFile,
    Remote,
    examples,
    model_file,
    model_or_lock_file,
)
from nxbucket.toolkit.cache_commands import CacheDir
from nxbucket.toolkit.errors import LockError, StoreError, UsageError
from nxbucket.toolkit.transfer_progress import byte_progress

if TYPE_CHECKING:
    from nxbucket.compile.cache import ArtifactCache
    from nxbucket.compile.lockfile import Lock
    from nxbucket.compile.manifest import Manifest
    from nxbucket.compile.store import Store
    from nxbucket.toolkit.spec import DeploySpec

app = typer.Typer(rich_markup_mode=None)


def remote_of(spec: "DeploySpec", given: str | None) -> "Store | None":
    """The store that `--remote` or the model file names. Opening one asks nothing of it yet."""
    location = given if given is not None else spec.artifacts.remote
    if location is None:
        return None
    from nxbucket.compile.store import open_store

    return open_store(location)


def _needed_remote(spec: "DeploySpec", given: str | None) -> "Store":
    store = remote_of(spec, given)
    if store is None:
        raise UsageError(
            f"{spec.path} names no remote",
            hint="set `artifacts: {remote: s3://bucket/prefix}` there, or give --remote",
        )
    return store


def _locked(given: Path | None) -> "tuple[DeploySpec, Lock, Path]":
    """The model file and its lock, which must be of one meaning."""
    from nxbucket.compile.lockfile import (
        check_lock,
        lock_path,
        locked_commit,
        model_file_of,
        read_lock,
    )
    from nxbucket.toolkit.spec import load_spec

    path = model_or_lock_file(given)
    file = model_file_of(path) if path.suffix == ".lock" else path
    if not file.is_file():
        raise UsageError(f"no such file: {file}", hint="give the path of a model file or its lock")
    lock_file = lock_path(file.absolute())
    lock = read_lock(lock_file)
    spec = load_spec(file, lambda model, revision: locked_commit(lock, lock_file, model, revision))
    check_lock(lock, lock_file, spec)
    return spec, lock, lock_file


def _cache_of(spec: "DeploySpec") -> "ArtifactCache":
    from nxbucket.compile.cache import ArtifactCache, choose_cache

    return ArtifactCache(choose_cache(spec.artifacts.cache).root)


def _keys(lock: "Lock") -> set[str]:
    return {key for _, p in lock.programs for key in (p.key, p.graph_key)}


@app.command(
    epilog=examples(
        "nxbucket push", "nxbucket push model.yaml --remote s3://bucket/artifacts --json"
    )
)
def push(model_yaml: ModelFile = None, remote: Remote = None, as_json: Json = False) -> None:
    """Put the artifacts that the lock names into the remote. What is there already stays.

    Interrupted, the same command goes on where it stopped.
    """
    with output.errors_as_json(as_json):
        from nxbucket.compile.leases import lease
        from nxbucket.compile.remote import Pusher
        from nxbucket.compile.transfers import Transfer, in_parallel

        spec, lock, lock_file = _locked(model_yaml)
        cache, store = _cache_of(spec), _needed_remote(spec, remote)
        programs = lock.programs
        total = sum(b.size_bytes for b in {b for _, p in programs for b in p.blobs})
        with lease(cache.root, _keys(lock)), byte_progress("pushing", total) as progress:
            # Each blob is hashed when it is read to be sent.
            manifests = _whole(cache, lock, lock_file, hashed=False)
            by_graph: dict[str, list[Manifest]] = {}
            for manifest in manifests.values():
                by_graph.setdefault(manifest.graph_key, []).append(manifest)
            transfer = Transfer(progress, output.print_note)
            pusher = Pusher(store, cache, transfer)
            pushed = in_parallel(pusher.push_of_one_graph, by_graph.values(), transfer)
        by_key = {result.manifest.key: result.status for results in pushed for result in results}
        rows = [(name, p.name, by_key[p.key]) for name, p in programs]
        adopted = [program for _, program, status in rows if status == "adopted"]
        if as_json:
            programs_json = [dict(zip(("target", "name", "status"), r, strict=True)) for r in rows]
            output.print_json(
                {"ok": not adopted, "remote": store.location, "programs": programs_json}
            )
        else:
            output.print_table([("target", "program", "status"), *rows])
        if adopted and as_json:
            raise typer.Exit(StoreError.exit_code)
        if adopted:
            raise StoreError(
                f"{store.location} has other bytes for {', '.join(adopted)}: another host was "
                "first, and compilers do not always give the same bytes",
                hint=f"take them, and commit the new lock: nxbucket pull {spec.path}",
            )
        output.print_note(f"{store.location} has what {lock_file} names")


def _whole(
    cache: "ArtifactCache", lock: "Lock", lock_file: Path, *, hashed: bool
) -> "dict[str, Manifest]":
    """Every program's manifest by key. Raises LockError naming what is missing or damaged."""
    from nxbucket.compile.cache import Hit
    from nxbucket.compile.lockfile import fault_of, model_file_of

    manifests, faults = {}, []
    for name, p in lock.programs:
        found = cache.lookup(p.key, hashed=hashed)
        fault = fault_of(lock, name, p, found)
        if fault is None and isinstance(found, Hit):
            manifests[p.key] = found.manifest
        else:
            faults.append(str(fault))
    if faults:
        raise LockError(
            f"the cache {cache.root} does not hold what {lock_file} names: {'; '.join(faults)}",
            hint=f"nxbucket compile {model_file_of(lock_file)}",
        )
    return manifests


@app.command(
    epilog=examples("nxbucket pull --locked", "nxbucket pull model.lock --remote /mnt/artifacts")
)
def pull(
    model_yaml: ModelFile = None,
    remote: Remote = None,
    locked: Annotated[
        bool,
        typer.Option(
            "--locked",
            help="Take the bytes that the lock names and no others. Without it, other bytes of the "
            "same programs are taken too, and the lock then names those.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring the artifacts that the lock names from the remote into the cache, each verified."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.fetch import fetch_locked
        from nxbucket.compile.transfers import Transfer

        spec, lock, lock_file = _locked(model_yaml)
        cache, store = _cache_of(spec), _needed_remote(spec, remote)
        with byte_progress("pulling", None) as progress:
            transfer = Transfer(progress, output.print_note)
            fetched = fetch_locked(lock, lock_file, cache, store, transfer, locked=locked)
        if as_json:
            output.print_json({"ok": True, "remote": store.location, **fetched.as_json()})
        else:
            output.print_table([("target", "program", "status"), *fetched.rows])
        for name in fetched.changed:
            output.print_note(f"{name}: its bytes are new, and the lock names them now")
        output.print_note(f"{cache.root} has what {lock_file} names")


@app.command(epilog=examples("nxbucket lock", "nxbucket lock model.yaml --remote s3://b/p --json"))
def lock(
    model_yaml: ModelFile = None,
    remote: Remote = None,
    emulate: GraphsOnly = False,
    as_json: Json = False,
) -> None:
    """Write the lock from what cache and remote hold, without compiling: after `--shard` jobs."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.build import gather
        from nxbucket.compile.compiler import compiler_for
        from nxbucket.toolkit.progress import reporter
        from nxbucket.toolkit.spec import load_spec

        spec = load_spec(model_file(model_yaml))
        cache = _cache_of(spec)
        with reporter() as progress:
            report = gather(
                spec, cache, compiler_for(spec, emulate=emulate), progress, remote_of(spec, remote)
            )
        if as_json:
            output.print_json(
                {
                    "ok": True,
                    "lock": str(report.lock_file),
                    "lock_written": report.lock_written,
                    "changed": report.changed,
                    "programs": [
                        {"name": o.name, "status": o.status, "key": o.planned.key}
                        for o in report.outcomes
                    ],
                }
            )
        state = "written" if report.lock_written else "unchanged"
        output.print_note(f"{report.lock_file} {state}; {len(report.outcomes)} programs")


LockFile = Annotated[Path, typer.Argument(metavar="LOCK", show_default=False)]


@app.command(epilog=examples("nxbucket diff old.lock model.lock"))
def diff(old: LockFile, new: LockFile, as_json: Json = False) -> None:
    """Compare two locks: programs added, dropped and changed, and why. Exit 1 if they differ."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.lock_diff import diff_locks
        from nxbucket.compile.lockfile import read_lock
        from nxbucket.toolkit.lock_report import diff_as_json, print_diff

        for path in (old, new):
            if not path.is_file():
                raise UsageError(f"no such file: {path}", hint="give the paths of two lock files")
        found = diff_locks(read_lock(old), read_lock(new))
        if as_json:
            output.print_json(diff_as_json(found))
        else:
            print_diff(found)
        if not found.is_empty:
            raise typer.Exit(1)


@app.command(epilog=examples("nxbucket pack model.lock artifacts.tar"))
def pack(
    model_yaml: Annotated[Path, typer.Argument(metavar="MODEL_YAML")],
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE")],
    as_json: Json = False,
) -> None:
    """Write the artifacts that the lock names into one tar file, for a host without a network."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.leases import lease
        from nxbucket.compile.pack import pack as pack_artifacts

        spec, lock, lock_file = _locked(model_yaml)
        for own in (spec.path, lock_file):
            if archive.resolve() == own.resolve():
                raise UsageError(f"{archive} is not to be written over", hint="name another file")
        cache, programs = _cache_of(spec), lock.programs
        total = sum(b.size_bytes for b in {b for _, p in programs for b in p.blobs})
        with lease(cache.root, _keys(lock)), byte_progress("packing", total) as progress:
            _whole(cache, lock, lock_file, hashed=True)
            graphs = {p.graph_key for _, p in programs if cache.has_entry(p.graph_key)}
            keys = {p.key for _, p in programs} | graphs
            size_bytes = pack_artifacts(cache, keys, archive, progress)
        if as_json:
            output.print_json({"ok": True, "archive": str(archive), "size_bytes": size_bytes})
        where = " --cache-dir FOLDER" if spec.artifacts.cache is not None else ""
        output.print_note(
            f"{archive}: {len(programs)} programs, {size_bytes} bytes; there: nxbucket unpack "
            f"{archive.name}{where}, and then with {spec.path.name} and {lock_file.name} as here"
        )


@app.command(epilog=examples("nxbucket unpack artifacts.tar"))
def unpack(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE")],
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Bring the artifacts of a packed file into the cache, each verified."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.cache import ArtifactCache, choose_cache
        from nxbucket.compile.pack import unpack as unpack_artifacts

        cache = ArtifactCache(cache_dir.absolute() if cache_dir else choose_cache(None).root)
        cache.prepare()
        with byte_progress("unpacking", None) as progress:
            done = unpack_artifacts(archive, cache, progress)
        if as_json:
            output.print_json({"ok": True, "cache_dir": str(cache.root), **asdict(done)})
        for name in done.replaced:
            output.print_note(f"{name}: its bytes are others than were here")
        output.print_note(f"{cache.root}: {len(done.keys)} entries of {archive}")
