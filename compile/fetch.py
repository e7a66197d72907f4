"""What a lock names, from a store into the local cache."""

import concurrent.futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.leases import lease
from nxbucket.compile.lockfile import (
    Lock,
    LockedProgram,
    fault_of,
    model_file_of,
    write_lock,
)
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.remote import Damaged, Pulled, pull
from nxbucket.compile.store import Progress, Store
from nxbucket.toolkit.errors import LockError

TRANSFERS = 16
"""Artifacts on their way at the same time."""


@dataclass(frozen=True)
class Fetched:
    """`rows`: target, program and "hit", "pulled" or "changed", of every program of the lock."""

    rows: list[tuple[str, str, str]]

    @property
    def changed(self) -> list[str]:
        return [program for _, program, status in self.rows if status == "changed"]

    def as_json(self) -> dict[str, Any]:
        return {
            "programs": [dict(zip(("target", "name", "status"), r, strict=True)) for r in self.rows]
        }


def fetch_locked(
    lock: Lock,
    lock_file: Path,
    cache: ArtifactCache,
    store: Store,
    progress: Progress,
    *,
    locked: bool,
    only_target: str | None = None,
) -> Fetched:
    """Pull what the cache lacks. Raises LockError naming all that is not to be had.

    Not `locked`, other bytes of the same program are taken too, and the lock is written anew.
    """
    programs = [
        (name, p)
        for name, target in lock.targets.items()
        for p in target.programs
        if only_target in (None, name)
    ]
    missing = {
        (name, p.name)
        for name, p in programs
        if fault_of(lock, name, p, cache.lookup(p.key)) is not None
    }
    # What is here as locked need not be asked for, unless newer bytes would do as well.
    asked = [(name, p) for name, p in programs if not locked or (name, p.name) in missing]
    found: dict[tuple[str, str], Manifest | str] = {}
    if asked:
        cache.prepare()
        with (
            lease(cache.root, (p.key for _, p in programs)),
            concurrent.futures.ThreadPoolExecutor(TRANSFERS) as pool,
        ):
            futures = {
                (name, p.name): pool.submit(_fetch, lock, name, p, cache, store, progress, locked)
                for name, p in asked
            }
            found = {which: future.result() for which, future in futures.items()}
    faults = [why for which, why in found.items() if isinstance(why, str) and which in missing]
    if faults:
        raise LockError(
            f"{store.location} does not hold what {lock_file} names: {'; '.join(faults)}",
            hint=f"on a host that compiles: nxbucket compile --push {model_file_of(lock_file)}",
        )
    statuses, targets = {}, dict(lock.targets)
    for name, p in programs:
        manifest = found.get((name, p.name))
        statuses[name, p.name] = "pulled" if (name, p.name) in missing else "hit"
        if isinstance(manifest, Manifest) and manifest.blobs != p.blobs:
            statuses[name, p.name] = "changed"
            programs_now = tuple(
                replace(q, blobs=manifest.blobs, graph_key=manifest.graph_key) if q == p else q
                for q in targets[name].programs
            )
            targets[name] = replace(targets[name], programs=programs_now)
    if "changed" in statuses.values():
        write_lock(replace(lock, targets=targets), lock_file)
    return Fetched([(name, program, status) for (name, program), status in statuses.items()])


def _fetch(
    lock: Lock,
    target: str,
    program: LockedProgram,
    cache: ArtifactCache,
    store: Store,
    progress: Progress,
    locked: bool,
) -> Manifest | str:
    """The manifest, or why there is none."""

    def fault(manifest: Manifest) -> str | None:
        wanted = program if locked else replace(program, blobs=manifest.blobs)
        return fault_of(lock, target, wanted, Hit(manifest))

    with cache.lock(program.key):
        found = pull(store, cache, program.key, progress, fault)
    if isinstance(found, Pulled):
        return found.manifest
    if isinstance(found, Damaged):
        return f"{program.name}: {found.reason}"
    return f"{program.name} is missing"
