"""Pulls and pushes that are cut off anywhere: nothing wrong is accepted, and a rerun completes."""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from artifacts import (
    Crash,
    Fault,
    StoppingStore,
    contents,
    crash_at,
    faults,
    lost,
    manifest_of,
    new_cache,
    push,
    put_artifact,
)

from nxbucket.compile.cache import ArtifactCache, Hit, Miss
from nxbucket.compile.gc import Limits, collect_store
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.remote import (
    Absent,
    Damaged,
    Pulled,
    Pushed,
    Pusher,
    blob_name,
    entry_name,
    pull,
)
from nxbucket.compile.store import DirectoryStore
from nxbucket.compile.subprocess_job import Stopped
from nxbucket.compile.sweep import Sweep
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import CacheError, StoreError

MAX_STEPS = 60


def nobody(_: int) -> None:
    pass


@pytest.fixture(autouse=True)
def a_dead_sweep_is_soon_known_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxbucket.compile.sweep.STALE_S", 0.5)
    monkeypatch.setattr("nxbucket.compile.sweep.POLL_S", 0.01)


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return new_cache(tmp_path / "cache")


@pytest.fixture
def other(tmp_path: Path) -> ArtifactCache:
    return new_cache(tmp_path / "other")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def test_what_was_pushed_is_pulled(
    cache: ArtifactCache, other: ArtifactCache, store: DirectoryStore
) -> None:
    manifest = put_artifact(cache)
    moved: list[int] = []
    assert push(store, cache, manifest.key, moved.append) == Pushed("pushed", manifest)
    assert push(store, cache, manifest.key, moved.append) == Pushed("present", manifest)
    assert sum(moved) == manifest.size_bytes
    assert pull(store, other, manifest.key, nobody) == Pulled(manifest)
    assert contents(other, manifest) == contents(cache, manifest)
    assert other.lookup(manifest.key) == Hit(manifest)


def test_what_the_store_lacks_is_absent(cache: ArtifactCache, store: DirectoryStore) -> None:
    assert pull(store, cache, "a" * 64, nobody) == Absent()
    assert cache.all_keys() == []


def test_a_blob_that_is_here_is_not_fetched_again(
    cache: ArtifactCache, store: DirectoryStore
) -> None:
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    cache.entry_path(manifest.key).unlink()
    moved: list[int] = []
    assert pull(store, cache, manifest.key, moved.append) == Pulled(manifest)
    assert moved == []


def test_the_first_writer_wins(
    cache: ArtifactCache, other: ArtifactCache, store: DirectoryStore
) -> None:
    # B79: compilers are not byte-stable.
    first, second = put_artifact(cache, b"first"), put_artifact(other, b"second")
    assert first.key == second.key
    push(store, cache, first.key, nobody)
    assert push(store, other, second.key, nobody) == Pushed("adopted", first)
    assert pull(store, other, first.key, nobody) == Pulled(first)


def test_a_local_artifact_that_is_not_whole_is_not_pushed(
    cache: ArtifactCache, store: DirectoryStore
) -> None:
    manifest = put_artifact(cache)
    cache.blob_path(manifest.blobs[1].digest).write_bytes(b"x")
    with pytest.raises(CacheError, match="not pushed"):
        push(store, cache, manifest.key, nobody)
    assert not list(store.list("entries/"))


def damaged(store: DirectoryStore, manifest: Manifest, how: str, tmp_path: Path) -> None:
    entry = store.root / entry_name(manifest.key)
    blob = store.root / blob_name(manifest.blobs[0].digest)
    match how:
        case "blob cut short":
            blob.write_bytes(blob.read_bytes()[:-1])
        case "blob with a bit flipped":
            blob.write_bytes(bytes([blob.read_bytes()[0] ^ 1]) + blob.read_bytes()[1:])
        case "blob too long":
            blob.write_bytes(blob.read_bytes() + b"more")
        case "blob empty":
            blob.write_bytes(b"")
        case "blob missing":
            blob.unlink()
        case "entry cut short":
            entry.write_bytes(entry.read_bytes()[:-10])
        case "entry empty":
            entry.write_bytes(b"")
        case "entry of another key":
            entry.write_bytes(manifest_of(*manifest.blobs, graph="2").to_json())
        case "entry not JSON":
            entry.write_bytes(b"\xff\xfe")
        case "entry of another target":
            raw = json.loads(entry.read_bytes())
            entry.write_text(json.dumps({**raw, "target": "trn2-lnc2"}))
        case "blobs swapped":
            raw = json.loads(entry.read_bytes())
            a, b = raw["blobs"]
            a["digest"], b["digest"] = b["digest"], a["digest"]
            entry.write_text(json.dumps(raw))
        case _:
            raise AssertionError(how)


DAMAGE = (
    *("blob cut short", "blob with a bit flipped", "blob too long", "blob empty", "blob missing"),
    *("entry cut short", "entry empty", "entry of another key", "entry not JSON"),
    *("entry of another target", "blobs swapped"),
)


@pytest.mark.parametrize("how", DAMAGE)
def test_what_a_stranger_changed_is_not_taken(
    cache: ArtifactCache, other: ArtifactCache, store: DirectoryStore, tmp_path: Path, how: str
) -> None:
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    damaged(store, manifest, how, tmp_path)
    found = pull(store, other, manifest.key, nobody)
    assert isinstance(found, Damaged)
    assert store.location in found.reason
    assert other.lookup(manifest.key) == Miss()
    assert faults(other) == {}


@pytest.mark.parametrize("how", [d for d in DAMAGE if d != "blob with a bit flipped"])
def test_a_push_mends_what_is_damaged(
    cache: ArtifactCache, other: ArtifactCache, store: DirectoryStore, tmp_path: Path, how: str
) -> None:
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    damaged(store, manifest, how, tmp_path)
    assert push(store, cache, manifest.key, nobody).status == "pushed"
    assert pull(store, other, manifest.key, nobody) == Pulled(manifest)


def test_a_larger_entry_than_there_are_is_refused(
    cache: ArtifactCache, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    monkeypatch.setattr("nxbucket.compile.remote.MAX_ENTRY_BYTES", 100)
    found = pull(store, cache, manifest.key, nobody)
    assert isinstance(found, Damaged)
    assert "larger than 100 bytes" in found.reason


def test_a_manifest_that_will_not_do_costs_no_blob(
    cache: ArtifactCache, other: ArtifactCache, store: DirectoryStore
) -> None:
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    moved: list[int] = []
    found = pull(store, other, manifest.key, moved.append, lambda _: "not what the lock names")
    assert isinstance(found, Damaged)
    assert "not what the lock names" in found.reason
    assert moved == []


# Cut off at every step


@pytest.mark.parametrize("fault", get_args(Fault))
@pytest.mark.parametrize("stays", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("error", [lost, Crash], ids=["error", "power cut"])
@pytest.mark.parametrize("act", ["pull", "push", "supersede", "gc"])
def test_wherever_a_store_stops_nothing_wrong_is_left_and_a_rerun_completes(
    tmp_path: Path, act: str, fault: Fault, error: Callable[[], BaseException], stays: bool
) -> None:
    for step in range(MAX_STEPS):
        folder = tmp_path / str(step)
        cache, other = new_cache(folder / "cache"), new_cache(folder / "other")
        store = DirectoryStore(folder / "store")
        manifest = put_artifact(cache)
        if act != "push":
            push(store, cache, manifest.key, nobody)
        if act == "supersede":
            damaged(store, manifest, "blob cut short", folder)
        stopping = StoppingStore(store, step, fault, error, stays=stays)
        run = ACTS[act]
        ended = True
        try:
            run(stopping, cache, other, manifest)
        except (StoreError, Crash):
            ended = False
        # Whatever is there now, a reader takes it whole or not at all.
        reader = new_cache(folder / "reader")
        found = pull(store, reader, manifest.key, nobody)
        assert isinstance(found, Pulled | Absent | Damaged)
        if isinstance(found, Pulled):
            assert contents(reader, manifest) == contents(cache, manifest)
        assert faults(reader) == faults(other) == faults(cache) == {}
        run(store, cache, other, manifest)
        assert faults(other) == faults(cache) == {}
        check_done(act, store, new_cache(folder / "last"), manifest)
        if ended and stopping.taken <= step:
            break
    assert 1 < step < MAX_STEPS - 1


def gc_all(store: Any, *_: Any) -> None:
    collect_store(store, (), Limits(grace_s=0), dry_run=False, transfer=Transfer())


ACTS: dict[str, Callable[[Any, ArtifactCache, ArtifactCache, Manifest], Any]] = {
    "pull": lambda store, cache, other, m: pull(store, other, m.key, nobody),
    "push": lambda store, cache, other, m: push(store, cache, m.key, nobody),
    "supersede": lambda store, cache, other, m: push(store, cache, m.key, nobody),
    "gc": gc_all,
}


def check_done(act: str, store: DirectoryStore, reader: ArtifactCache, manifest: Manifest) -> None:
    if act == "gc":
        assert list(store.list("entries/")) == list(store.list("blobs/")) == []
    else:
        assert pull(store, reader, manifest.key, nobody) == Pulled(manifest)


def test_wherever_a_disk_stops_a_pull_nothing_wrong_is_left_and_a_rerun_completes(
    tmp_path: Path,
) -> None:
    for step in range(MAX_STEPS):
        cache, other = new_cache(tmp_path / f"{step}/cache"), new_cache(tmp_path / f"{step}/other")
        store = DirectoryStore(tmp_path / f"{step}/store")
        manifest = put_artifact(cache)
        push(store, cache, manifest.key, nobody)
        with pytest.MonkeyPatch.context() as patch:
            taken = crash_at(step, patch)
            try:
                pull(store, other, manifest.key, nobody)
            except Crash:
                pass
            else:
                assert taken() <= step
                break
        assert faults(other) == {}
        assert pull(store, other, manifest.key, nobody) == Pulled(manifest)
        assert faults(other) == {}
    assert 5 < step < MAX_STEPS - 1


def test_whatever_part_of_a_push_can_be_seen_and_in_whatever_order_no_reader_is_fooled(
    tmp_path: Path,
) -> None:
    cache = new_cache(tmp_path / "cache")
    manifest = put_artifact(cache)
    push(whole := DirectoryStore(tmp_path / "whole"), cache, manifest.key, nobody)
    names = [f.name for prefix in ("entries/", "blobs/") for f in whole.list(prefix)]
    assert len(names) == 3
    for i, order in enumerate(itertools.permutations(names)):
        store = DirectoryStore(tmp_path / f"store{i}")
        reader = new_cache(tmp_path / f"reader{i}")
        for at, name in enumerate(order):
            target = store.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((whole.root / name).read_bytes())
            found = pull(store, reader, manifest.key, nobody)
            assert isinstance(found, Pulled) == (at == len(order) - 1)
            assert isinstance(found, Absent) == (entry_name(manifest.key) not in order[: at + 1])
            assert faults(reader) == {}


# gc while others push


def aged(store: DirectoryStore, seconds: float) -> None:
    for path in store.root.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("old_blobs", [False, True])
def test_a_gc_at_any_moment_of_a_push_takes_nothing_from_under_it(
    tmp_path: Path, old_blobs: bool
) -> None:
    """`old_blobs`: the blobs are there from long ago, and no entry names them any more."""
    for step in range(MAX_STEPS):
        folder = tmp_path / str(step)
        cache = new_cache(folder / "cache")
        store = DirectoryStore(folder / "store")
        manifest = put_artifact(cache)
        if old_blobs:
            push(store, cache, manifest.key, nobody)
            store.delete(entry_name(manifest.key))
            aged(store, 1e6)
        pushing = StoppingStore(store, -1, "before", lost, stays=False)

        def gc(number: int, step: int = step, store: DirectoryStore = store) -> None:
            if number == step:
                collect_store(store, (), Limits(grace_s=7200), dry_run=False, transfer=Transfer())

        pushing.between = gc
        push(pushing, cache, manifest.key, nobody)
        assert pull(store, new_cache(folder / "reader"), manifest.key, nobody) == Pulled(manifest)
        if pushing.taken <= step:
            break
    assert 3 < step < MAX_STEPS - 1


def test_a_push_at_any_moment_of_a_gc_is_whole_afterwards(tmp_path: Path) -> None:
    for step in range(MAX_STEPS):
        folder = tmp_path / str(step)
        cache = new_cache(folder / "cache")
        store = DirectoryStore(folder / "store")
        manifest, old = put_artifact(cache), put_artifact(cache, b"old", graph="2")
        push(store, cache, old.key, nobody)
        push(store, cache, manifest.key, nobody)
        store.delete(entry_name(manifest.key))
        aged(store, 1e6)
        collecting = StoppingStore(store, -1, "before", lost, stays=False)

        pushing = threading.Thread(target=push, args=(store, cache, manifest.key, nobody))

        def push_now(number: int, step: int = step, pushing: threading.Thread = pushing) -> None:
            if number == step:
                pushing.start()
                # It may have to wait for this sweep to end.
                pushing.join(timeout=0.3)

        collecting.between = push_now
        collect_store(collecting, (), Limits(grace_s=7200), dry_run=False, transfer=Transfer())
        if collecting.taken <= step:
            break
        pushing.join()
        assert pull(store, new_cache(folder / "reader"), manifest.key, nobody) == Pulled(manifest)
        assert pull(store, new_cache(folder / "second"), old.key, nobody) == Absent()
    assert 3 < step < MAX_STEPS - 1


def test_what_a_push_found_there_from_long_ago_is_young_afterwards(
    cache: ArtifactCache, store: DirectoryStore, tmp_path: Path
) -> None:
    """Else the lock that names it would be of nothing after the next sweep."""
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    aged(store, 1e6)
    assert push(store, cache, manifest.key, nobody).status == "present"
    collect_store(store, (), Limits(grace_s=7200), dry_run=False, transfer=Transfer())
    assert pull(store, new_cache(tmp_path / "reader"), manifest.key, nobody) == Pulled(manifest)


def test_a_push_that_waits_for_a_sweep_says_so_and_can_be_stopped(
    cache: ArtifactCache, store: DirectoryStore
) -> None:
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    aged(store, 1e6)
    assert Sweep(store).begin()
    said: list[str] = []
    transfer = Transfer(say=said.append)
    transfer.stop.set()
    with pytest.raises(Stopped):
        Pusher(store, cache, transfer).push(manifest)
    assert "waiting for a gc" in said[0]


def test_a_sweep_leaves_the_note_of_the_one_that_took_over(store: DirectoryStore) -> None:
    first, second = Sweep(store), Sweep(store)
    assert first.begin()
    assert not second.begin()
    time.sleep(0.6)  # STALE_S here
    assert second.begin()
    first.end()
    assert not Sweep(store).begin()
    second.end()
    assert Sweep(store).begin()


def test_one_odd_object_stops_neither_a_pull_nor_a_sweep(
    cache: ArtifactCache, other: ArtifactCache, store: DirectoryStore
) -> None:
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, nobody)
    entry = store.root / entry_name(manifest.key)
    entry.unlink()
    entry.symlink_to("elsewhere")
    assert isinstance(pull(store, other, manifest.key, nobody), Damaged)
    gc_all(store)
    assert faults(other) == {}


def test_two_pushes_at_once_leave_one_whole_artifact(tmp_path: Path) -> None:
    for attempt in range(20):
        store = DirectoryStore(tmp_path / f"store{attempt}")
        caches = [new_cache(tmp_path / f"{attempt}-{i}") for i in range(4)]
        manifests = [put_artifact(c, f"bytes {i}".encode()) for i, c in enumerate(caches)]
        key = manifests[0].key
        results: list[Pushed] = []

        def push_from(
            cache: ArtifactCache,
            store: DirectoryStore = store,
            key: str = key,
            results: list[Pushed] = results,
        ) -> None:
            results.append(push(store, cache, key, nobody))

        threads = [threading.Thread(target=push_from, args=(c,)) for c in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.status for r in results].count("pushed") == 1
        (winner,) = {r.manifest.blobs for r in results}
        found = pull(store, new_cache(tmp_path / f"reader{attempt}"), key, nobody)
        assert isinstance(found, Pulled)
        assert found.manifest.blobs == winner
