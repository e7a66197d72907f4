"""Artifacts between the local cache and a shared store: pulled verified, pushed blobs first.

The local cache is what compiles and servers use; a store is only ever behind it. What comes from a
store is a stranger's until its entry is well formed, belongs to its key, and every blob has the
size and sha256 that the entry says.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.canonical import sha256_hex
from nxbucket.compile.key import manifest_fault
from nxbucket.compile.leases import publishing
from nxbucket.compile.manifest import MAX_ENTRY_BYTES, Blob, Manifest
from nxbucket.compile.sound import neff_fault
from nxbucket.compile.store import Content, OddObject, Progress, Store
from nxbucket.compile.sweep import wait_for_sweep
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import CacheError

YOUNG_S = 3600.0
"""A blob written within this time is left alone by every gc: half of the least grace age."""


@dataclass(frozen=True)
class Pulled:
    manifest: Manifest


@dataclass(frozen=True)
class Absent:
    pass


@dataclass(frozen=True)
class Damaged:
    """The store has an entry that cannot be used. `reason` names the object."""

    reason: str


Pull = Pulled | Absent | Damaged


@dataclass(frozen=True)
class Pushed:
    """`adopted`: the store's own manifest, where another host was faster with other bytes."""

    status: Literal["pushed", "present", "adopted"]
    manifest: Manifest


def entry_name(key: str) -> str:
    return f"entries/{key[:2]}/{key}.json"


def blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest[:2]}/{digest}"


def pull(
    store: Store,
    cache: ArtifactCache,
    key: str,
    progress: Progress = lambda _: None,
    accept: Callable[[Manifest], str | None] = lambda _: None,
) -> Pull:
    """Bring the artifact of `key` into the local cache. Call with `cache.lock(key)` held.

    `accept` looks at the manifest before a byte of a blob is fetched, and says why it will not do.
    Raises StoreError where the store cannot be asked; never for what it holds.
    """
    try:
        found = store.read(entry_name(key), MAX_ENTRY_BYTES)
    except OddObject as err:
        return Damaged(err.message)
    if found is None:
        return Absent()
    manifest = _manifest(store, key, found)
    if isinstance(manifest, Damaged):
        return manifest
    if reason := accept(manifest):
        return Damaged(f"{store.location}/{entry_name(key)}: {reason}")
    # No gc between the first look at a blob and the entry.
    with publishing(cache.root), contextlib.ExitStack() as stack:
        missing = [blob for blob in manifest.blobs if cache.check_blob(blob) is not None]
        work_dir = stack.enter_context(cache.work_dir(key)) if missing else Path()
        for blob in missing:
            damage = _fetch(store, cache, blob, work_dir / "blob", progress)
            if damage is not None:
                return damage
        if fault := neff_fault(cache, manifest):
            return Damaged(f"{store.location}/{entry_name(key)}: {fault}")
        cache.publish_copy(manifest)
    return Pulled(manifest)


class Pusher:
    """Many pushes to one store: a blob that several entries name goes up once.

    A gc that sweeps the store is waited for where it may take what a push relies on.
    """

    def __init__(self, store: Store, cache: ArtifactCache, transfer: Transfer) -> None:
        self._store = store
        self._cache = cache
        self._transfer = transfer
        self._young: set[str] = set()
        """Digests of blobs written by us, or seen there and young."""
        self._ours: set[str] = set()
        """Digests of blobs that were not there before we wrote them."""

    def push(self, manifest: Manifest) -> Pushed:
        """The artifact of a manifest that `lookup` gave; a blob is hashed as it is sent.

        Raises StoreError, CacheError for a blob that is not what its name says, and Stopped.
        """
        store, key = self._store, manifest.key
        name, payload = entry_name(key), manifest.to_json()
        # Where none of its blobs was, nor is its entry, most likely: not asked for.
        ours = self._push_if_new(manifest.blobs)
        if ours and store.put(name, payload, replacing=None):
            return Pushed("pushed", manifest)
        while True:
            found = store.read(name, MAX_ENTRY_BYTES)
            if found is not None:
                theirs = _manifest(store, key, found)
                if isinstance(theirs, Manifest) and has_blobs(store, theirs):
                    if self._made_young(name, found):
                        self._wait_for_sweep()
                        continue
                    if theirs.blobs != manifest.blobs:
                        return Pushed("adopted", theirs)
                    return Pushed("pushed" if ours else "present", theirs)
            relied_on_old = [self._push_blob(blob) for blob in manifest.blobs]
            ours = store.put(name, payload, replacing=None if found is None else found.tag)
            if ours and not any(relied_on_old):
                return Pushed("pushed", manifest)
            if ours:
                # A gc that saw it while it was old may still take it: look again after that.
                self._wait_for_sweep()

    def push_of_one_graph(
        self, manifests: Sequence[Manifest], *, anew: bool = False
    ) -> list[Pushed]:
        """Several of one graph key; then the graph's own entry: what an upgrade finds again.

        `anew`: over what is there, which a reader has found damaged.
        """
        push = self._push_over if anew else self.push
        pushed = [push(manifest) for manifest in manifests]
        graph = self._cache.entry(manifests[0].graph_key)
        if isinstance(graph, Manifest) and graph.blobs in {m.blobs for m in manifests}:
            push(graph)
        return pushed

    def _push_over(self, manifest: Manifest) -> Pushed:
        for blob in manifest.blobs:
            if blob.digest not in self._ours:
                self._upload(blob)
                self._ours.add(blob.digest)
        name = entry_name(manifest.key)
        with contextlib.suppress(OddObject):
            found = self._store.read(name, MAX_ENTRY_BYTES)
            tag = None if found is None else found.tag
            if self._store.put(name, manifest.to_json(), replacing=tag):
                return Pushed("pushed", manifest)
        return self.push(manifest)

    def _made_young(self, name: str, found: Content) -> bool:
        """Whether an entry was from long ago: what a gc may be about to take.

        Written again, it is young, and what it names stays.
        """
        age_s = self._store.age_s(name, len(found.payload), sha256_hex(found.payload))
        if age_s is None or age_s <= YOUNG_S:
            return False
        self._store.put(name, found.payload, replacing=found.tag)
        return True

    def _wait_for_sweep(self) -> None:
        wait_for_sweep(self._store, self._transfer)

    def _push_if_new(self, blobs: Sequence[Blob]) -> bool:
        """Whether each blob is of our writing; written now, if not one of them was there."""
        missing = [blob for blob in blobs if blob.digest not in self._ours]
        if any(self._age_s(blob) is not None for blob in missing):
            return False
        for blob in missing:
            self._upload(blob)
            self._ours.add(blob.digest)
        return True

    def _push_blob(self, blob: Blob) -> bool:
        """Whether one was there from long ago: what a gc may be about to take.

        Written again, it is young.
        """
        if blob.digest in self._young | self._ours:
            return False
        age_s = self._age_s(blob)
        was_old = age_s is not None and age_s > YOUNG_S
        if age_s is None or was_old:
            self._upload(blob)
        if not was_old:
            self._young.add(blob.digest)
        return was_old

    def _age_s(self, blob: Blob) -> float | None:
        return self._store.age_s(blob_name(blob.digest), blob.size_bytes, blob.digest)

    def _upload(self, blob: Blob) -> None:
        path = self._cache.blob_path(blob.digest)
        self._store.upload(blob_name(blob.digest), path, blob.digest, self._transfer.progress)


def has_blobs(store: Store, manifest: Manifest) -> bool:
    return all(
        store.age_s(blob_name(b.digest), b.size_bytes, b.digest) is not None for b in manifest.blobs
    )


def _manifest(store: Store, key: str, found: Content) -> Manifest | Damaged:
    at = f"{store.location}/{entry_name(key)}"
    try:
        manifest = Manifest.from_json(found.payload)
    except CacheError as err:
        return Damaged(f"{at}: {err.message}")
    fault = manifest_fault(manifest, key)
    return Damaged(f"{at}: {fault}") if fault else manifest


def _fetch(
    store: Store, cache: ArtifactCache, blob: Blob, staged: Path, progress: Progress
) -> Damaged | None:
    name = blob_name(blob.digest)
    at = f"{store.location}/{name}"
    sha256 = store.fetch(name, staged, blob.size_bytes, progress)
    if sha256 is None:
        return Damaged(f"{at}: missing")
    size = staged.stat().st_size
    if size != blob.size_bytes:
        more = "more than " if size > blob.size_bytes else f"{size} bytes, not "
        return Damaged(f"{at}: {more}{blob.size_bytes}")
    if sha256 != blob.digest:
        return Damaged(f"{at}: sha256 differs from its name; remove it there, and push again")
    cache.adopt_blob(staged, blob)
    return None
