import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifacts import Crash, crash_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from null_compiler import NULL_TOOLCHAIN, a_program

from nxbucket.compile import cache as cache_module
from nxbucket.compile.cache import (
    ArtifactCache,
    Corrupt,
    Hit,
    LockHolder,
    Lookup,
    Miss,
    choose_cache,
)
from nxbucket.compile.key import graph_key_inputs, key_inputs
from nxbucket.compile.manifest import Blob, Manifest
from nxbucket.toolkit.errors import CacheError, EnvironmentProblem

PROGRAM = a_program()
CONTENT = b"the bytes of a program"


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    made = ArtifactCache(tmp_path / "cache")
    made.prepare()
    return made


def stage(cache: ArtifactCache, content: bytes = CONTENT) -> Blob:
    with cache.work_dir("0" * 64) as work_dir:
        staged = work_dir / "program.bin"
        staged.write_bytes(content)
        return cache.add_blob(staged)


def manifest_of(blob: Blob, version: str = "1") -> Manifest:
    inputs = graph_key_inputs(version * 64, NULL_TOOLCHAIN)
    return Manifest(
        key_kind="graph",
        program=PROGRAM.name,
        target="cpu-null",
        inputs=inputs,
        graph_key="a" * 64,
        signature=PROGRAM.signature,
        blobs=(blob,),
        toolchain=dict(NULL_TOOLCHAIN.versions),
        lower_s=0.0,
        compile_s=0.0,
        peak_rss_bytes=1,
        log_sha256="c" * 64,
    )


KEY = manifest_of(Blob("program", "0" * 64, 1)).key


def put(cache: ArtifactCache, content: bytes = CONTENT) -> Manifest:
    manifest = manifest_of(stage(cache, content))
    cache.publish(manifest)
    return manifest


def reason(found: Lookup) -> str:
    assert isinstance(found, Corrupt)
    return found.reason


def test_what_is_published_is_found_and_nothing_else(cache: ArtifactCache) -> None:
    assert cache.lookup(KEY) == Miss()
    manifest = put(cache)
    assert cache.lookup(KEY) == Hit(manifest)
    assert cache.blob_path(manifest.blobs[0].digest).read_bytes() == CONTENT
    assert cache.lookup("f" * 64) == Miss()
    assert cache.all_keys() == [KEY]


def test_a_link_finds_the_same_blobs_under_the_input_key(cache: ArtifactCache) -> None:
    graph_entry = put(cache)
    inputs = key_inputs(PROGRAM, NULL_TOOLCHAIN)
    linked = cache.link(graph_entry, inputs)
    assert cache.lookup(linked.key) == Hit(linked)
    assert (linked.key_kind, linked.inputs) == ("input", inputs)
    assert linked.blobs == graph_entry.blobs
    assert linked.key != graph_entry.key


def test_a_lookup_in_a_cache_that_is_not_there_is_a_miss(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "none")
    assert cache.lookup(KEY) == Miss()
    assert cache.all_keys() == []
    assert not cache.root.exists()


def replace_by_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


# B86: what damages a blob. Each is found before use, and the file is named.
BLOB_DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda p: p.write_bytes(CONTENT[: len(CONTENT) // 2]),
    "flipped": lambda p: p.write_bytes(bytes([CONTENT[0] ^ 1]) + CONTENT[1:]),
    "emptied": lambda p: p.write_bytes(b""),
    "longer": lambda p: p.write_bytes(CONTENT + b"\0"),
    "missing": lambda p: p.unlink(),
    "a dangling link": replace_by_a_dangling_link,
}


@pytest.mark.parametrize("damage", BLOB_DAMAGE)
def test_a_damaged_blob_is_corrupt_and_publishing_again_mends_it(
    cache: ArtifactCache, damage: str
) -> None:
    blob = put(cache).blobs[0]
    path = cache.blob_path(blob.digest)
    BLOB_DAMAGE[damage](path)
    assert str(path) in reason(cache.lookup(KEY))
    manifest = put(cache)
    assert cache.lookup(KEY) == Hit(manifest)
    assert manifest.blobs[0] == blob


def entry_of_another_key(path: Path) -> None:
    raw = json.loads(path.read_text())
    raw["inputs"]["graph"] = "9" * 64
    path.write_text(json.dumps(raw))


def entry_with_nan(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1,', '"format": NaN,'))


ENTRY_DAMAGE: dict[str, Callable[[Path], object]] = {
    "an empty object": lambda p: p.write_text("{}"),
    "empty": lambda p: p.write_text(""),
    "garbage": lambda p: p.write_bytes(bytes(range(256))),
    "half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "a list": lambda p: p.write_text("[]"),
    "deep": lambda p: p.write_text("[" * 100_000),
    "NaN in the inputs": entry_with_nan,
    "of another key": entry_of_another_key,
    "of another format": lambda p: p.write_text(
        p.read_text().replace('"format": 1', '"format": 2')
    ),
}


@pytest.mark.parametrize("damage", ENTRY_DAMAGE)
def test_a_damaged_entry_is_corrupt_and_publishing_again_mends_it(
    cache: ArtifactCache, damage: str
) -> None:
    put(cache)
    path = cache.entry_path(KEY)
    ENTRY_DAMAGE[damage](path)
    assert str(path) in reason(cache.lookup(KEY))
    if damage != "of another key":
        assert str(path) in str(cache.entry(KEY))
    manifest = put(cache)
    assert cache.lookup(KEY) == Hit(manifest)


def test_an_entry_above_the_size_limit_is_corrupt_and_not_read_whole(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache)
    monkeypatch.setattr(cache_module, "MAX_ENTRY_BYTES", 100)
    assert "larger than 100 bytes" in reason(cache.lookup(KEY))


def test_an_entry_folder_that_is_a_file_is_corrupt(cache: ArtifactCache) -> None:
    cache.entry_path(KEY).parent.write_text("not a folder")
    assert reason(cache.lookup(KEY))


def test_a_folder_where_an_entry_belongs_is_corrupt_and_explained(cache: ArtifactCache) -> None:
    path = cache.entry_path(KEY)
    path.mkdir(parents=True)
    assert str(path) in reason(cache.lookup(KEY))
    with pytest.raises(CacheError, match=str(path)):
        put(cache)


def test_a_folder_where_a_blob_belongs_is_corrupt_and_explained(cache: ArtifactCache) -> None:
    path = cache.blob_path(put(cache).blobs[0].digest)
    path.unlink()
    path.mkdir()
    assert str(path) in reason(cache.lookup(KEY))
    with pytest.raises(CacheError, match=str(path)):
        put(cache)


def test_a_file_where_a_folder_of_the_cache_belongs_is_explained(cache: ArtifactCache) -> None:
    cache.entry_path(KEY).parent.write_text("not a folder")
    with pytest.raises(CacheError, match=str(cache.entry_path(KEY).parent)) as caught:
        put(cache)
    assert caught.value.hint


def test_an_entry_is_not_published_before_its_blobs_are_there(cache: ArtifactCache) -> None:
    with pytest.raises(CacheError, match="missing"):
        cache.publish(manifest_of(Blob("program", "d" * 64, 3)))
    assert cache.lookup(KEY) == Miss()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_of_an_entry_make_a_lookup_raise(cache: ArtifactCache, payload: bytes) -> None:
    path = cache.entry_path(KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload)
    assert isinstance(cache.lookup(KEY), Corrupt)
    assert isinstance(cache.entry(KEY), str)


def test_a_crash_at_any_step_leaves_nothing_or_a_whole_artifact(tmp_path: Path) -> None:
    seen = []
    for step in range(100):
        cache = ArtifactCache(tmp_path / str(step))
        cache.prepare()
        with pytest.MonkeyPatch.context() as patch:
            taken = crash_at(step, patch)
            try:
                cache.link(put(cache), key_inputs(PROGRAM, NULL_TOOLCHAIN))
            except Crash:
                crashed = True
            else:
                crashed = taken() > step
                assert taken() <= step
        found = [cache.lookup(key) for key in cache.all_keys()]
        assert all(isinstance(f, Hit) for f in found), (step, found)
        seen.append(len(found))
        manifest = cache.link(put(cache), key_inputs(PROGRAM, NULL_TOOLCHAIN))
        assert cache.lookup(manifest.key) == Hit(manifest)
        if not crashed:
            break
    assert seen[0] == 0
    assert seen[-1] == 2
    assert seen == sorted(seen)
    # Blob: sync, move, sync; each of two entries the same; and some folders made.
    assert len(seen) >= 10


def test_a_crash_while_a_corrupt_artifact_is_rebuilt_leaves_it_corrupt_or_whole(
    tmp_path: Path,
) -> None:
    for step in range(100):
        cache = ArtifactCache(tmp_path / str(step))
        cache.prepare()
        blob = put(cache).blobs[0]
        cache.blob_path(blob.digest).write_bytes(b"bad")
        with pytest.MonkeyPatch.context() as patch:
            taken = crash_at(step, patch)
            try:
                put(cache, b"other bytes this time")
            except Crash:
                pass
            else:
                assert taken() <= step
                break
        found = cache.lookup(KEY)
        if isinstance(found, Hit):
            assert found.manifest.blobs[0] != blob
        else:
            assert isinstance(found, Corrupt)
        put(cache)
        assert isinstance(cache.lookup(KEY), Hit)
    assert step > 5


def test_a_good_blob_that_is_there_is_kept(cache: ArtifactCache) -> None:
    # B79: other entries, and running servers, point at it.
    path = cache.blob_path(stage(cache).digest)
    os.utime(path, (1, 1))
    before = path.stat()
    stage(cache)
    assert path.stat().st_ino == before.st_ino
    # Young again: gc must not take it before the entry that is about to name it.
    assert time.time() - path.stat().st_mtime < 60


def test_a_rebuilt_entry_names_the_new_bytes_and_the_old_ones_stay(cache: ArtifactCache) -> None:
    # B79: compilers are not byte-stable; entry and object always agree.
    old = put(cache)
    new = put(cache, b"other bytes")
    assert new.key == old.key
    assert cache.lookup(KEY) == Hit(new)
    assert cache.check_blob(old.blobs[0]) is None


def test_what_is_published_can_be_read_by_other_users(cache: ArtifactCache) -> None:
    # B75: compiled by root in a container's build, served by another user.
    old = os.umask(0o022)
    try:
        manifest = put(cache)
    finally:
        os.umask(old)
    for path in (cache.entry_path(KEY), cache.blob_path(manifest.blobs[0].digest)):
        assert path.stat().st_mode & 0o777 == 0o644


def test_publishing_leaves_nothing_in_tmp(cache: ArtifactCache) -> None:
    put(cache)
    assert list((cache.root / "tmp").iterdir()) == []


def test_a_publish_that_fails_leaves_nothing_in_tmp(cache: ArtifactCache) -> None:
    cache.entry_path(KEY).parent.write_text("not a folder")
    with pytest.raises(CacheError):
        put(cache)
    assert list((cache.root / "tmp").iterdir()) == []


def test_a_full_disk_is_explained(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    blob = stage(cache)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="No space left on device"):
        cache.publish(manifest_of(blob))
    assert cache.lookup(KEY) == Miss()


def test_a_work_folder_is_empty_whatever_a_killed_job_left(cache: ArtifactCache) -> None:
    with cache.work_dir(KEY) as first:
        (first / "left behind").write_text("x")
        with cache.work_dir(KEY) as second:
            assert list(second.iterdir()) == []
            assert not first.exists()


# Locks

HOLD = """
import sys, time
from pathlib import Path
from nxbucket.compile.cache import ArtifactCache
with ArtifactCache(Path(sys.argv[1])).lock(sys.argv[2]) as held:
    print(held, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(cache: ArtifactCache) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(cache.root), KEY], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_does_not_get_the_lock_and_reads_who_has_it(
    cache: ArtifactCache, holder: "subprocess.Popen[str]"
) -> None:
    with cache.lock(KEY, blocking=False) as held:
        assert not held
    with cache.lock("f" * 64, blocking=False) as held:
        assert held
    note = cache.lock_holder(KEY)
    assert note is not None
    assert (note.pid, note.host) == (holder.pid, os.uname().nodename)
    assert f"pid {holder.pid} on " in str(note)


def test_the_kernel_gives_the_lock_of_a_killed_holder_to_the_one_who_waits(
    cache: ArtifactCache, holder: "subprocess.Popen[str]"
) -> None:
    holder.send_signal(signal.SIGKILL)
    start = time.monotonic()
    with cache.lock(KEY) as held:
        assert held
        note = cache.lock_holder(KEY)
        assert note is not None
        assert note.pid == os.getpid()
    assert time.monotonic() - start < 10
    assert cache.lock_holder(KEY) is None


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{}",
        "[]",
        '{"pid": 1, "host": "h"}',
        '{"pid": 1, "host": "h", "since": "noon"}',
        '{"pid": 1, "host": "h", "since": null}',
        '{"pid": 1, "host": "h", "since": 1e999}',
        '{"pid": 1, "host": "h", "since": NaN}',
        '{"pid": [], "host": {}, "since": 1}',
        "[" * 100_000,
    ],
    ids=lambda note: note[:45],
)
def test_a_note_of_the_holder_that_is_garbage_is_none_or_can_be_printed(
    cache: ArtifactCache, note: str
) -> None:
    (cache.root / "locks" / f"{KEY}.json").write_text(note)
    assert "pid" in str(cache.lock_holder(KEY) or "pid")


def test_a_lock_that_cannot_be_made_is_explained(cache: ArtifactCache) -> None:
    (cache.root / "locks" / f"{KEY}.lock").mkdir()
    with pytest.raises(CacheError, match=r"\.lock") as caught, cache.lock(KEY):
        pass
    assert caught.value.hint


# Where the cache is


def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write to the artifact cache") as caught:
        ArtifactCache(tmp_path / "file" / "cache").prepare()
    assert "NXBUCKET_CACHE_DIR" in str(caught.value.hint)


def test_a_folder_without_write_permission_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, whom no permission stops.
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(CacheError, match="Permission denied"):
        ArtifactCache(tmp_path / "cache").prepare()


def test_a_path_too_long_for_the_filesystem_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="File name too long"):
        ArtifactCache(tmp_path / ("x" * 300)).prepare()


@pytest.mark.parametrize("filesystem", ["nfs4", "cifs", "lustre", "fuse.sshfs"])
def test_a_network_filesystem_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    # B88
    monkeypatch.setattr(cache_module, "filesystem_type", lambda _: filesystem)
    with pytest.raises(CacheError, match=filesystem) as caught:
        ArtifactCache(tmp_path / "cache").prepare()
    assert "local disk" in str(caught.value.hint)
    assert not (tmp_path / "cache").exists()


def test_the_mount_nearest_to_the_cache_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B88
    share = tmp_path / "a share"
    share.mkdir()
    mounts = [
        "/dev/sda1 / ext4 rw 0 0",
        f"server:/x {str(share).replace(' ', chr(92) + '040')} nfs4 rw 0 0",
        "odd line",
    ]
    real = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if str(path) == "/proc/self/mounts":
            return "\n".join(mounts) + "\n"
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(CacheError, match="nfs4"):
        ArtifactCache(share / "not" / "yet").prepare()
    ArtifactCache(tmp_path / "beside").prepare()


def test_reading_needs_no_folder_of_the_writer(cache: ArtifactCache) -> None:
    manifest = put(cache)
    for name in ("locks", "logs", "tmp"):
        shutil.rmtree(cache.root / name)
    assert cache.lookup(KEY) == Hit(manifest)


def test_the_environment_goes_before_the_model_file_and_that_before_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B65
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", str(tmp_path / "env"))
    choice = choose_cache(tmp_path / "file")
    assert (choice.root, choice.origin) == (tmp_path / "env", "NXBUCKET_CACHE_DIR")
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", "~/env")
    assert choose_cache(None).root == tmp_path / "env"
    monkeypatch.delenv("NXBUCKET_CACHE_DIR")
    choice = choose_cache(tmp_path / "file")
    assert (choice.root, choice.origin) == (tmp_path / "file", "artifacts.cache")
    choice = choose_cache(None)
    assert choice.root == tmp_path / ".cache" / "nxbucket"
    assert choice.origin == "the user's cache folder"


def test_an_empty_variable_is_as_good_as_none_and_a_relative_one_starts_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", "")
    assert choose_cache(tmp_path).origin == "artifacts.cache"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", "here")
    assert choose_cache(None).root == tmp_path / "here"


def test_without_a_home_there_is_an_error_and_no_made_up_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # B75: a container's user without a passwd entry.
    def nobody(_: object) -> Any:
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME", "NXBUCKET_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(EnvironmentProblem) as caught:
        choose_cache(None)
    assert "NXBUCKET_CACHE_DIR" in str(caught.value.hint)


def test_a_home_of_nobody_in_the_variable_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", "~no-such-user-here/cache")
    with pytest.raises(EnvironmentProblem, match="NXBUCKET_CACHE_DIR"):
        choose_cache(None)


def test_with_home_unset_the_passwd_entry_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B75: `compile` and `serve` ask the same function, so they find the same folder.
    for name in ("HOME", "XDG_CACHE_HOME", "NXBUCKET_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert choose_cache(None).root == Path(home) / ".cache" / "nxbucket"


def test_a_holder_is_printed_for_people() -> None:
    since = time.time() - 100
    assert str(LockHolder(7, "box", since)).startswith("pid 7 on box, for 100 s")
    assert str(replace(LockHolder(7, "box", since), since=since + 1000)).endswith("for 0 s")
