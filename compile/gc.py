"""Removing what no one needs from a cache or a store: by lock reachability, age and size.

An entry is kept if a given lock names it, if a process on this host holds it (a compile, a push, a
server), or if it was made or used within the grace age. What then goes is chosen by the limits:
older than an age, or the least recently used until the rest fits a size; without limits, all that
no lock names. A blob goes when no entry names it any more.
"""

import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.canonical import sha256_hex
from nxbucket.compile.leases import collecting, leased_keys
from nxbucket.compile.lockfile import Lock
from nxbucket.compile.manifest import MAX_ENTRY_BYTES, Blob, Manifest, is_digest
from nxbucket.compile.remote import entry_name
from nxbucket.compile.store import OddObject, Store, files_below
from nxbucket.compile.sweep import Sweep, sweeping
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import CacheError

Kind = Literal["entry", "blob", "temporary"]


@dataclass(frozen=True)
class Limits:
    """`grace_s` protects what is younger, whatever else is said."""

    grace_s: float
    max_age_s: float | None = None
    max_size_bytes: int | None = None


@dataclass(frozen=True)
class Removed:
    kind: Kind
    name: str
    size_bytes: int
    why: str


@dataclass
class Collected:
    """`kept`: how many entries stay, by reason."""

    removed: list[Removed] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        return sum(r.size_bytes for r in self.removed)

    def keep(self, why: str) -> None:
        self.kept[why] = self.kept.get(why, 0) + 1


@dataclass(frozen=True)
class _Entry:
    key: str
    manifest: Manifest | None
    """None for an entry that cannot be read."""
    used_s: float
    size_bytes: int
    sha256: str = ""
    """Of the entry itself, in a store."""

    @property
    def blobs(self) -> frozenset[Blob]:
        return frozenset(() if self.manifest is None else self.manifest.blobs)


def named_by(locks: Iterable[Lock]) -> set[str]:
    """Input keys, graph keys and digests of the blobs of every program of every target."""
    programs = [p for lock in locks for _, p in lock.programs]
    keys = {key for p in programs for key in (p.key, p.graph_key)}
    return keys | {blob.digest for p in programs for blob in p.blobs}


def collect_cache(
    cache: ArtifactCache, reachable: Collection[str], limits: Limits, *, dry_run: bool
) -> Collected:
    """One sweep of a local cache. Publishers wait for it; it waits for them."""
    with cache.writing(), collecting(cache.root):
        now = time.time()
        entries = [
            _Entry(key, _or_none(cache.entry(key)), *_stat_of(cache.entry_path(key)))
            for key in sorted(path.stem for path in files_below(cache.root / "entries"))
            if is_digest(key)
        ]
        held = leased_keys(cache.root)
        collected = Collected()
        doomed = _doomed(entries, reachable, held, limits, now, collected)
        for entry in entries:
            if why := doomed.get(entry.key):
                path = cache.entry_path(entry.key)
                _remove(path, "entry", entry.key, entry.size_bytes, why, dry_run, collected)
        named = _named(entries, doomed, reachable, collected)
        for path in files_below(cache.root / "blobs/sha256"):
            used_s, size_bytes = _stat_of(path)
            if named is None or path.name in named or now - used_s < limits.grace_s:
                continue
            why = "no entry names it"
            _remove(path, "blob", path.name, size_bytes, why, dry_run, collected)
        _collect_temporary(cache, limits, now, dry_run, collected)
        return collected


def collect_store(
    store: Store,
    reachable: Collection[str],
    limits: Limits,
    *,
    dry_run: bool,
    transfer: Transfer,
) -> Collected:
    """One sweep of a shared store, which has no locks: the grace age must outlast any push.

    A push makes the entries and blobs it relies on young again, and waits for a sweep that may have
    seen them old, so that none takes them from under it.
    """
    if dry_run:
        return _sweep_store(store, reachable, limits, None)
    with sweeping(store, transfer) as sweep:
        return _sweep_store(store, reachable, limits, sweep)


def _sweep_store(
    store: Store, reachable: Collection[str], limits: Limits, sweep: Sweep | None
) -> Collected:
    """With no `sweep`, only what would go."""
    now = time.time()
    entries = []
    for found in store.list("entries/"):
        key = found.name.rpartition("/")[2].removesuffix(".json")
        if found.name != entry_name(key):
            continue
        if sweep is not None:
            sweep.goes_on()
        manifest, sha256 = None, ""
        try:
            content = store.read(found.name, MAX_ENTRY_BYTES)
            if content is None:
                continue
            sha256 = sha256_hex(content.payload)
            manifest = Manifest.from_json(content.payload)
        except (OddObject, CacheError):
            pass
        entries.append(_Entry(key, manifest, found.modified_s, found.size_bytes, sha256))
    collected = Collected()
    doomed = _doomed(entries, reachable, (), limits, now, collected)
    for entry in entries:
        if why := doomed.get(entry.key):
            if sweep is not None:
                sweep.goes_on()
                name = entry_name(entry.key)
                # Asked again: a push may have made it young a moment ago.
                age_s = store.age_s(name, entry.size_bytes, entry.sha256)
                if entry.manifest is not None and (age_s is None or age_s < limits.grace_s):
                    del doomed[entry.key]
                    collected.keep("younger than the grace age")
                    continue
                store.delete(name)
            collected.removed.append(Removed("entry", entry.key, entry.size_bytes, why))
    named = _named(entries, doomed, reachable, collected)
    for found in list(store.list("blobs/")):
        digest = found.name.rpartition("/")[2]
        if named is None or digest in named or now - found.modified_s < limits.grace_s:
            continue
        if sweep is not None:
            sweep.goes_on()
            # Asked again: a push may have made it young a moment ago.
            age_s = store.age_s(found.name, found.size_bytes, digest)
            if age_s is not None and age_s < limits.grace_s:
                continue
            store.delete(found.name)
        collected.removed.append(Removed("blob", digest, found.size_bytes, "no entry names it"))
    return collected


def _named(
    entries: Iterable[_Entry],
    doomed: Collection[str],
    reachable: Collection[str],
    collected: Collected,
) -> set[str] | None:
    """Digests that a lock or an entry that stays names; None if one of them does not say which."""
    staying = [e for e in entries if e.key not in doomed]
    unknown = [e.key for e in staying if e.manifest is None]
    if unknown:
        collected.failed.append(
            f"any blob: the entry {unknown[0]}, which stays, cannot be read, so what it needs is "
            "not known"
        )
        return None
    return {b.digest for e in staying for b in e.blobs} | set(reachable)


def _doomed(
    entries: list[_Entry],
    reachable: Collection[str],
    held: Collection[str],
    limits: Limits,
    now: float,
    collected: Collected,
) -> dict[str, str]:
    """Keys of the entries that go, and why. The oldest first, where a size must be reached."""
    doomed: dict[str, str] = {}
    free = []
    for entry in entries:
        age = now - entry.used_s
        if entry.key in held:
            collected.keep("in use")
        elif age < limits.grace_s:
            collected.keep("younger than the grace age")
        elif entry.key in reachable:
            collected.keep("named by a lock")
        elif entry.manifest is None and limits.max_age_s is None:
            doomed[entry.key] = "cannot be read"
        elif limits.max_age_s is not None and age > limits.max_age_s:
            doomed[entry.key] = "older than the limit"
        elif limits.max_age_s is None and limits.max_size_bytes is None:
            doomed[entry.key] = "no lock names it"
        else:
            free.append(entry)
    if limits.max_size_bytes is not None:
        used_by = Counter(b.digest for e in entries if e.key not in doomed for b in e.blobs)
        sizes = {b.digest: b.size_bytes for e in entries for b in e.blobs}
        total = sum(sizes[digest] for digest in used_by)
        for entry in sorted(free, key=lambda e: (e.used_s, e.key)):
            if total <= limits.max_size_bytes:
                break
            doomed[entry.key] = "the least recently used, over the size limit"
            for digest in (b.digest for b in entry.blobs):
                used_by[digest] -= 1
                total -= sizes[digest] * (used_by[digest] == 0)
    for entry in free:
        if entry.key not in doomed:
            collected.keep("within the limits")
    return doomed


def _collect_temporary(
    cache: ArtifactCache, limits: Limits, now: float, dry_run: bool, collected: Collected
) -> None:
    """Work folders and staged entries of the dead: a living compile holds its key's lock."""
    for path in cache.root.glob("tmp/*"):
        used_s, size_bytes = _stat_of(path)
        if now - used_s < limits.grace_s:
            continue
        name = path.name
        if not path.is_dir():
            _remove(path, "temporary", name, size_bytes, "left over", dry_run, collected)
            continue
        with cache.lock(name, blocking=False) as free:
            if free:
                size_bytes = sum(_stat_of(p)[1] for p in path.rglob("*"))
                _remove(path, "temporary", name, size_bytes, "left over", dry_run, collected)


def _remove(
    path: Path,
    kind: Kind,
    name: str,
    size_bytes: int,
    why: str,
    dry_run: bool,
    collected: Collected,
) -> None:
    """What cannot be removed is said, and the rest goes on."""
    if not dry_run:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as err:
            collected.failed.append(f"{path}: {err.strerror or err}")
            return
    collected.removed.append(Removed(kind, name, size_bytes, why))


def _stat_of(path: Path) -> tuple[float, int]:
    """When it was last used, and its bytes; of what just vanished, now and none."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return time.time(), 0
    return found.st_mtime, found.st_size


def _or_none(entry: Manifest | str) -> Manifest | None:
    return entry if isinstance(entry, Manifest) else None
