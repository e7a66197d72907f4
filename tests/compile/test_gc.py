"""What a sweep takes and what it leaves: by lock, age, size, use."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from artifacts import Crash, crash_at, faults, new_cache, push, put_artifact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxbucket.compile.cache import ArtifactCache, Hit, Miss
from nxbucket.compile.gc import Collected, Limits, collect_cache, collect_store
from nxbucket.compile.leases import lease, leased_keys
from nxbucket.compile.remote import Pulled, pull
from nxbucket.compile.store import DirectoryStore
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import CacheError, StoreError

ALL = Limits(grace_s=0)
DAY = 86400.0


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return new_cache(tmp_path / "cache")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def age(cache: ArtifactCache, key: str, seconds: float) -> None:
    os.utime(cache.entry_path(key), (time.time() - seconds,) * 2)


def gone(collected: Collected, kind: str = "entry") -> set[str]:
    return {r.name for r in collected.removed if r.kind == kind}


def test_what_no_lock_names_goes_and_its_blobs_with_it(cache: ArtifactCache) -> None:
    kept, other = put_artifact(cache), put_artifact(cache, b"other", graph="2")
    collected = collect_cache(cache, {kept.key}, ALL, dry_run=False)
    assert gone(collected) == {other.key}
    assert gone(collected, "blob") == {b.digest for b in other.blobs}
    assert cache.lookup(kept.key) == Hit(kept)
    assert cache.lookup(other.key) == Miss()
    assert collected.freed_bytes >= other.size_bytes
    assert faults(cache) == {}


def test_a_dry_run_says_the_same_and_does_nothing(cache: ArtifactCache) -> None:
    manifest = put_artifact(cache)
    said = collect_cache(cache, (), ALL, dry_run=True)
    assert cache.lookup(manifest.key) == Hit(manifest)
    assert said.removed == collect_cache(cache, (), ALL, dry_run=False).removed


def test_a_blob_that_another_entry_names_stays(cache: ArtifactCache) -> None:
    kept, other = put_artifact(cache), put_artifact(cache, graph="2")
    assert kept.blobs[0] == other.blobs[0]
    collected = collect_cache(cache, {kept.key}, ALL, dry_run=False)
    assert gone(collected) == {other.key}
    assert gone(collected, "blob") == {other.blobs[1].digest}
    assert cache.lookup(kept.key) == Hit(kept)


def test_what_is_young_stays(cache: ArtifactCache) -> None:
    manifest = put_artifact(cache)
    collected = collect_cache(cache, (), Limits(grace_s=60), dry_run=False)
    assert collected.removed == []
    assert collected.kept == {"younger than the grace age": 1}
    assert cache.lookup(manifest.key) == Hit(manifest)


def test_an_old_entry_that_is_used_again_is_young(cache: ArtifactCache) -> None:
    manifest = put_artifact(cache)
    age(cache, manifest.key, 9 * DAY)
    cache.mark_used(manifest.key)
    limits = Limits(grace_s=0, max_age_s=DAY)
    assert collect_cache(cache, (), limits, dry_run=False).removed == []


def test_age_takes_what_is_older_and_the_lock_keeps_it(cache: ArtifactCache) -> None:
    old, young, locked = (put_artifact(cache, bytes([i]), graph=str(i)) for i in range(3))
    age(cache, old.key, 3 * DAY)
    age(cache, locked.key, 3 * DAY)
    limits = Limits(grace_s=0, max_age_s=2 * DAY)
    assert gone(collect_cache(cache, {locked.key}, limits, dry_run=False)) == {old.key}
    assert cache.lookup(young.key) == Hit(young)


def test_size_takes_the_least_recently_used_first(cache: ArtifactCache) -> None:
    made = [put_artifact(cache, bytes([i]) * 1000, graph=str(i)) for i in range(5)]
    for i, manifest in enumerate(made):
        age(cache, manifest.key, (5 - i) * DAY)
    limits = Limits(grace_s=0, max_size_bytes=2 * made[0].size_bytes)
    assert gone(collect_cache(cache, {made[0].key}, limits, dry_run=False)) == {
        m.key for m in made[1:4]
    }
    assert gone(collect_cache(cache, {made[0].key}, limits, dry_run=False)) == set()


def test_an_entry_that_cannot_be_read_goes(cache: ArtifactCache) -> None:
    manifest = put_artifact(cache)
    cache.entry_path(manifest.key).write_text("{}")
    kept = collect_cache(cache, {manifest.key}, ALL, dry_run=False)
    assert gone(kept) == set()
    assert "cannot be read" in kept.failed[0]  # and so no blob went either
    assert cache.blob_path(manifest.blobs[0].digest).is_file()
    assert manifest.key in gone(collect_cache(cache, (), ALL, dry_run=False))


def test_what_a_living_process_holds_stays(cache: ArtifactCache) -> None:
    manifest = put_artifact(cache)
    with lease(cache.root, [manifest.key]):
        assert leased_keys(cache.root) == {manifest.key}
        collected = collect_cache(cache, (), ALL, dry_run=False)
        assert (gone(collected), collected.kept) == (set(), {"in use": 1})
    assert leased_keys(cache.root) == set()
    assert gone(collect_cache(cache, (), ALL, dry_run=False)) == {manifest.key}


def test_a_lease_ends_with_its_process_however_it_ends(cache: ArtifactCache) -> None:
    manifest = put_artifact(cache)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from nxbucket.compile.leases import lease\n"
        "with lease(Path(sys.argv[1]), [sys.argv[2]]):\n"
        "    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(cache.root), manifest.key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert leased_keys(cache.root) == {manifest.key}
    process.kill()
    process.communicate()
    assert leased_keys(cache.root) == set()
    assert list(cache.root.glob("leases/*")) == []


def test_a_sweep_that_cannot_see_everything_takes_nothing(
    cache: ArtifactCache, store: DirectoryStore, tmp_path: Path
) -> None:
    """A reader follows a link that a listing does not; and a folder may be somebody else's."""
    manifest = put_artifact(cache)
    push(store, cache, manifest.key, lambda _: None)
    for root in (cache.root, store.root):
        (folder,) = (root / "entries").iterdir()
        folder.rename(tmp_path / f"moved-{root.name}")
        folder.symlink_to(tmp_path / f"moved-{root.name}")
    with pytest.raises(CacheError):
        collect_cache(cache, (), ALL, dry_run=False)
    with pytest.raises(StoreError):
        collect_store(store, (), ALL, dry_run=False, transfer=Transfer())
    assert faults(cache) == {}
    reader = new_cache(tmp_path / "reader")
    assert pull(store, reader, manifest.key, lambda _: None) == Pulled(manifest)


def test_the_blobs_that_a_lock_names_stay_whatever_became_of_their_entry(
    cache: ArtifactCache,
) -> None:
    manifest = put_artifact(cache)
    cache.entry_path(manifest.key).unlink()
    digest = manifest.blobs[0].digest
    collect_cache(cache, {digest}, ALL, dry_run=False)
    assert cache.check_blob(manifest.blobs[0]) is None
    collect_cache(cache, (), ALL, dry_run=False)
    assert cache.check_blob(manifest.blobs[0]) is not None


def test_a_lease_is_one_only_when_it_is_whole_and_every_user_can_see_it(
    cache: ArtifactCache,
) -> None:
    before = os.umask(0o077)
    try:
        with lease(cache.root, ["a" * 64]):
            (path,) = (cache.root / "leases").iterdir()
            assert path.suffix == ".json"
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            assert leased_keys(cache.root) == {"a" * 64}
    finally:
        os.umask(before)
    assert leased_keys(cache.root) == set()


def test_a_cache_that_is_only_read_can_be_leased(tmp_path: Path) -> None:
    with lease(tmp_path / "nowhere", ["a" * 64]):
        pass


def test_what_killed_jobs_left_in_tmp_goes(cache: ArtifactCache) -> None:
    left = cache.root / "tmp" / ("e" * 64) / "x"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x" * 100)
    (cache.root / "tmp" / "entry-abc").write_bytes(b"x")
    collected = collect_cache(cache, (), ALL, dry_run=False)
    assert gone(collected, "temporary") == {"e" * 64, "entry-abc"}
    assert list((cache.root / "tmp").iterdir()) == []


def test_the_folder_of_a_running_compile_stays(cache: ArtifactCache) -> None:
    with cache.lock("e" * 64), cache.work_dir("e" * 64) as work_dir:
        assert collect_cache(cache, (), ALL, dry_run=False).removed == []
        assert work_dir.exists()


def test_wherever_a_disk_stops_a_sweep_the_rest_is_whole(tmp_path: Path) -> None:
    for step in range(40):
        cache = new_cache(tmp_path / str(step))
        kept = put_artifact(cache)
        put_artifact(cache, b"other", graph="2")
        with pytest.MonkeyPatch.context() as patch:
            taken = crash_at(step, patch)
            try:
                collect_cache(cache, {kept.key}, ALL, dry_run=False)
            except Crash:
                pass
            else:
                assert taken() <= step
                break
        assert faults(cache) == {}
        assert cache.lookup(kept.key) == Hit(kept)
        collect_cache(cache, {kept.key}, ALL, dry_run=False)
        assert cache.all_keys() == [kept.key]
        assert faults(cache) == {}
    assert 2 < step < 39


def test_a_sweep_waits_for_whoever_publishes(cache: ArtifactCache) -> None:
    """Eight processes at once, with no grace: no entry is ever without its blobs."""
    code = (
        "import sys, time\nsys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from artifacts import ArtifactCache, put_artifact\n"
        "from nxbucket.compile.gc import Limits, collect_cache\n"
        "from nxbucket.compile.leases import publishing\n"
        "cache = ArtifactCache(Path(sys.argv[1])); me = sys.argv[3]\n"
        "end = time.monotonic() + 3\n"
        "while time.monotonic() < end:\n"
        "    if int(me) % 2:\n"
        "        collect_cache(cache, (), Limits(grace_s=0), dry_run=False)\n"
        "    else:\n"
        "        with publishing(cache.root):\n"
        "            put_artifact(cache, b'shared', graph=me)\n"
    )
    tests = str(Path(__file__).parents[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(cache.root), tests, str(i)], stderr=subprocess.PIPE
        )
        for i in range(8)
    ]
    looked = 0
    while any(p.poll() is None for p in processes):
        # An entry may go while it is looked at; one without its blobs stays so.
        for key in faults(cache):
            time.sleep(0.2)
            assert not cache.has_entry(key) or isinstance(cache.lookup(key), Hit | Miss)
        looked += 1
    for p in processes:
        assert p.communicate()[1] == b""
        assert p.returncode == 0
    assert looked > 0
    assert faults(cache) == {}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    artifacts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 100), st.booleans()), min_size=1, max_size=8
    ),
    grace=st.integers(0, 50),
    max_age=st.none() | st.integers(0, 100),
    max_size=st.none() | st.integers(0, 200),
)
def test_whatever_the_limits_what_stays_is_whole_and_what_a_lock_names_stays(
    tmp_path_factory: pytest.TempPathFactory,
    artifacts: list[tuple[int, int, bool]],
    grace: int,
    max_age: int | None,
    max_size: int | None,
) -> None:
    cache = new_cache(tmp_path_factory.mktemp("gc"))
    store = DirectoryStore(cache.root / "store")
    reachable = set()
    for i, (content, _, locked) in enumerate(artifacts):
        manifest = put_artifact(cache, bytes([content]) * 20, graph=f"{i:x}")
        push(store, cache, manifest.key, lambda _: None)
        if locked:
            reachable.add(manifest.key)
    for key, (_, days, _) in zip(cache.all_keys(), artifacts, strict=True):
        age(cache, key, days * DAY)
    limits = Limits(grace * DAY, None if max_age is None else max_age * DAY, max_size)
    before = set(cache.all_keys())
    collected = collect_cache(cache, reachable, limits, dry_run=False)
    assert faults(cache) == {}
    assert set(cache.all_keys()) == before - gone(collected)
    assert reachable <= set(cache.all_keys())
    assert sum(collected.kept.values()) + len(gone(collected)) == len(before)
    swept = collect_store(store, reachable, limits, dry_run=False, transfer=Transfer())
    assert reachable.isdisjoint(gone(swept))
    assert json.dumps(swept.kept)
