"""A server takes what its cache lacks from the remote, and only the bytes that its lock names."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from null_compiler import model_file, null_spec

from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.executor import PoolOptions
from nxbucket.compile.host_cpu import host_march
from nxbucket.compile.store import DirectoryStore
from nxbucket.serve.engine_args import artifacts_at_hand
from nxbucket.serve.served import Served, resolve
from nxbucket.toolkit.errors import BindError, LockError
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.spec import load_spec


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def served(tmp_path: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Compiled and pushed elsewhere; this host has the lock and an empty cache."""
    monkeypatch.delenv("NXBUCKET_CACHE_DIR", raising=False)
    file = model_file(tmp_path, (32,), (1,))
    compiler = null_spec(target=f"cpu-{host_march()}")
    options = PoolOptions(remote=store, push=True)
    cache = ArtifactCache(tmp_path / "cache")
    build(load_spec(file), cache, compiler, PlainReporter(), options)
    shutil.rmtree(cache.root)
    return resolve(file)[1]


def test_what_the_cache_lacks_is_pulled(served: Served, store: DirectoryStore) -> None:
    manifests = artifacts_at_hand(served, store.location)
    assert set(manifests) == {"prefill_s32", "decode_b1"}
    shutil.rmtree(store.root)
    assert artifacts_at_hand(served, store.location) == manifests


def test_without_a_remote_what_is_missing_stops_the_start(served: Served) -> None:
    with pytest.raises(BindError, match="prefill_s32 is missing"):
        artifacts_at_hand(served, None)


def test_other_bytes_than_the_locks_are_not_served(served: Served, store: DirectoryStore) -> None:
    target = served.locked
    first = target.programs[0]
    other = replace(first, blobs=(replace(first.blobs[0], digest="e" * 64),))
    edited = replace(target, programs=(other, *target.programs[1:]))
    lock = replace(served.lock, targets={served.target: edited})
    with pytest.raises(LockError, match="other bytes than the lock names"):
        artifacts_at_hand(replace(served, lock=lock), store.location)
    assert served.cache.lookup(first.key).__class__.__name__ == "Miss"
