"""Artifacts made by hand, and disks and stores that stop at a given step."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from null_compiler import NULL_TOOLCHAIN, a_program

from nxbucket.compile.cache import ArtifactCache, Corrupt, Hit
from nxbucket.compile.canonical import digest_of, sha256_hex
from nxbucket.compile.key import graph_key_inputs
from nxbucket.compile.manifest import Blob, Manifest
from nxbucket.compile.remote import Pushed, Pusher
from nxbucket.compile.store import Content, Progress, Store, StoredObject
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import CacheError, StoreError

PROGRAM = a_program()
Fault = Literal["before", "after", "torn", "twice"]


class Crash(BaseException):
    """Stands for the power cut: nothing of ours catches it."""


def new_cache(root: Path) -> ArtifactCache:
    cache = ArtifactCache(root)
    cache.prepare()
    return cache


def graph_of(graph: str) -> bytes:
    return b"the graph " + graph.encode()


def inputs_of(graph: str) -> dict[str, Any]:
    return graph_key_inputs(sha256_hex(graph_of(graph)), NULL_TOOLCHAIN)


def manifest_of(*blobs: Blob, graph: str = "1") -> Manifest:
    return Manifest(
        key_kind="graph",
        program=PROGRAM.name,
        target=NULL_TOOLCHAIN.target,
        inputs=inputs_of(graph),
        graph_key=digest_of(inputs_of(graph)),
        signature=PROGRAM.signature,
        blobs=blobs,
        toolchain=dict(NULL_TOOLCHAIN.versions),
        lower_s=0.0,
        compile_s=0.0,
        peak_rss_bytes=1,
        log_sha256="c" * 64,
    )


def put_artifact(cache: ArtifactCache, content: bytes = b"a program", graph: str = "1") -> Manifest:
    """An artifact of two files, as a Neuron one is. `graph` is a hex digit, and makes the key."""
    with cache.work_dir(graph * 64) as work_dir:
        blobs = []
        for role, payload in (("program", content), ("hlo", graph_of(graph))):
            staged = work_dir / role
            staged.write_bytes(payload)
            blobs.append(cache.add_blob(staged, role))  # type: ignore[arg-type]
        manifest = manifest_of(*blobs, graph=graph)
        cache.publish(manifest)
    return manifest


def contents(cache: ArtifactCache, manifest: Manifest) -> list[bytes]:
    return [cache.blob_path(blob.digest).read_bytes() for blob in manifest.blobs]


def faults(cache: ArtifactCache) -> dict[str, object]:
    """What `cache verify` would complain of."""
    found = {key: cache.lookup(key) for key in cache.all_keys()}
    return {key: f for key, f in found.items() if not isinstance(f, Hit)}


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Every durable act counts as a step; from number `step` on, each raises. -> steps taken."""
    taken = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            if taken >= step:
                raise Crash
            taken += 1
            return real(*args, **kwargs)

        return act

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "mkdir", "unlink", "write_bytes"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    return lambda: taken


class StoppingStore:
    """Another store, whose operation number `step` fails once, or with everything after it.

    `before`: it is not done. `after`: it is done, and the answer is lost. `torn`: what it moves
    arrives in half (a store writes objects whole or not at all, so an upload in half is none).
    `twice`: it is done two times, and the second answer is the one that arrives.
    """

    def __init__(
        self,
        store: Store,
        step: int,
        fault: Fault,
        error: Callable[[], BaseException],
        *,
        stays: bool,
    ) -> None:
        self.store, self.step, self.fault, self.error, self.stays = store, step, fault, error, stays
        self.taken = 0
        self.between: Callable[[int], None] = lambda _: None
        """Called before each operation with its number: another host's chance."""

    @property
    def location(self) -> str:
        return self.store.location

    def read(self, name: str, limit_bytes: int) -> Content | None:
        return cast("Content | None", self._step(lambda: self.store.read(name, limit_bytes)))

    def fetch(self, name: str, into: Path, limit_bytes: int, progress: Progress) -> str | None:
        def torn() -> None:
            self.store.fetch(name, into, limit_bytes, progress)
            half = into.stat().st_size // 2
            with into.open("r+b") as f:
                f.truncate(half)

        def act() -> str | None:
            return self.store.fetch(name, into, limit_bytes, progress)

        return cast("str | None", self._step(act, torn))

    def age_s(self, name: str, size_bytes: int, sha256: str) -> float | None:
        return cast("float | None", self._step(lambda: self.store.age_s(name, size_bytes, sha256)))

    def upload(self, name: str, path: Path, sha256: str, progress: Progress) -> None:
        self._step(lambda: self.store.upload(name, path, sha256, progress))

    def put(self, name: str, payload: bytes, *, replacing: str | None) -> bool:
        return bool(self._step(lambda: self.store.put(name, payload, replacing=replacing)))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return iter(self._step(lambda: list(self.store.list(prefix))))

    def delete(self, name: str) -> None:
        self._step(lambda: self.store.delete(name))

    def _step(self, act: Callable[[], Any], torn: Callable[[], None] = lambda: None) -> Any:
        number, self.taken = self.taken, self.taken + 1
        self.between(number)
        if number == self.step or (self.stays and number > self.step):
            if self.fault == "twice":
                act()
                return act()
            if self.fault == "after" and number == self.step:
                act()
            if self.fault == "torn" and number == self.step:
                torn()
            raise self.error()
        return act()


def lost() -> StoreError:
    return StoreError("the connection is lost")


def push(store: Store, cache: ArtifactCache, key: str, progress: Progress) -> Pushed:
    """Bring the artifact of `key` to the store. The first writer wins.

    Raises CacheError if the local artifact is not whole, StoreError if the store says no.
    """
    local = cache.lookup(key, hashed=False)
    if not isinstance(local, Hit):
        reason = local.reason if isinstance(local, Corrupt) else f"no entry {key}"
        raise CacheError(f"not pushed: {reason}", hint="nxbucket compile")
    return Pusher(store, cache, Transfer(progress)).push(local.manifest)
