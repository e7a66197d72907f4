"""What a lock names, from a store into the local cache."""

import shlex
from collections.abc import Mapping
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
    read_lock,
    write_lock,
)
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.remote import Damaged, Pulled, pull
from nxbucket.compile.store import Store
from nxbucket.compile.transfers import Transfer, in_parallel, lock_of
from nxbucket.toolkit.errors import LockError


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
    transfer: Transfer,
    *,
    locked: bool,
    only_target: str | None = None,
) -> Fetched:
    """Pull what the cache lacks. Raises LockError naming all that is not to be had.

    Not `locked`, other bytes of the same program are taken too, and the lock is written anew.
    """
    programs = [(name, p) for name, p in lock.programs if only_target in (None, name)]
    missing = {
        (name, p.name): fault
        for name, p in programs
        if (fault := fault_of(lock, name, p, cache.lookup(p.key))) is not None
    }
    # What is here as locked need not be asked for, unless newer bytes would do as well.
    asked = [(name, p) for name, p in programs if not locked or (name, p.name) in missing]
    if asked:
        cache.prepare()

    def fetch(which: tuple[str, LockedProgram]) -> Manifest | str:
        return _fetch(lock, *which, cache, store, transfer, locked)

    with lease(cache.root, (p.key for _, p in programs)):
        names = [(name, p.name) for name, p in asked]
        found = dict(zip(names, in_parallel(fetch, asked, transfer), strict=True))
    changed = {
        (name, p.name): manifest
        for name, p in programs
        if isinstance(manifest := found.get((name, p.name)), Manifest) and manifest.blobs != p.blobs
    }
    if changed:
        _relock(lock, lock_file, changed)
    faults = [
        why if missing[which] == why else f"{why} (and here: {missing[which]})"
        for which, why in found.items()
        if isinstance(why, str) and which in missing
    ]
    if faults:
        file = shlex.quote(str(model_file_of(lock_file)))
        hint = f"on a host that compiles: nxbucket compile --push {file}"
        if any("has other bytes than the lock names" in why for why in faults):
            hint = f"take the newer lock, or nxbucket pull {file}, which takes these bytes"
        elif any("remove it" in why for why in faults):
            hint = f"remove what is named here from the store, then {hint}"
        raise LockError(
            f"{store.location} does not hold what {lock_file} names: {'; '.join(faults)}", hint=hint
        )
    statuses = []
    for name, p in programs:
        cache.mark_used(p.key)
        which = (name, p.name)
        status = "changed" if which in changed else "pulled" if which in missing else "hit"
        statuses.append((name, p.name, status))
    return Fetched(statuses)


def _relock(lock: Lock, lock_file: Path, changed: Mapping[tuple[str, str], Manifest]) -> None:
    """Have the lock name the new bytes: the lock as it is now, which a compile may have written."""
    latest = read_lock(lock_file)
    targets = dict(latest.targets)
    for name, target in latest.targets.items():
        before = lock.targets.get(name)
        if before is None:
            continue
        programs = tuple(
            replace(p, blobs=manifest.blobs, graph_key=manifest.graph_key)
            if p in before.programs and (manifest := changed.get((name, p.name))) is not None
            else p
            for p in target.programs
        )
        targets[name] = replace(target, programs=programs)
    write_lock(replace(latest, targets=targets), lock_file)


def _fetch(
    lock: Lock,
    target: str,
    program: LockedProgram,
    cache: ArtifactCache,
    store: Store,
    transfer: Transfer,
    locked: bool,
) -> Manifest | str:
    """The manifest, or why there is none."""

    def fault(manifest: Manifest) -> str | None:
        wanted = program if locked else replace(program, blobs=manifest.blobs)
        return fault_of(lock, target, wanted, Hit(manifest))

    with lock_of(cache, program.key, program.name, transfer):
        found = pull(store, cache, program.key, transfer.progress, fault)
    if isinstance(found, Pulled):
        return found.manifest
    if isinstance(found, Damaged):
        return f"{program.name}: {found.reason}"
    return f"{program.name} is missing"
