"""From CI to a store to a fleet, as a person types it: hosts are folders, the compiler is null."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_here import cli_here
from null_compiler import ENVIRONMENT, NullOptions, model_file, recorded
from s3_stand_in import CREDENTIALS

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.lockfile import Lock, read_lock, write_lock
from nxbucket.compile.remote import blob_name, entry_name
from nxbucket.compile.store import DirectoryStore
from nxbucket.toolkit.errors import StoreError

NXBUCKET = "from nxbucket.toolkit.cli import main; main()"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`nxbucket ARGUMENTS` on host `at`; NullOptions as keywords."""

    def run_at(at: Path, *arguments: str, **options: Any) -> tuple[int, str, str]:
        events = str(at / "events")
        Path(events).mkdir(exist_ok=True)
        given = NullOptions(events=events, **options)
        monkeypatch.setenv(ENVIRONMENT, given.environ()[ENVIRONMENT])
        monkeypatch.chdir(at)
        return cli_here(monkeypatch, capsys, *arguments)

    return run_at


def host(folder: Path, *, like: Path | None = None, **model: Any) -> Path:
    """A host with a model.yaml whose remote is `store` beside the hosts, and the lock of `like`."""
    folder.mkdir()
    file = model_file(folder, (32, 64), (1, 2), **model)
    file.write_text(
        file.read_text().replace("cache: cache", f"cache: cache, remote: {folder.parent / 'store'}")
    )
    if like is not None:
        shutil.copy(like / "model.lock", folder)
    return folder


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    return host(tmp_path / "ci")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def cache_of(at: Path) -> ArtifactCache:
    return ArtifactCache(at / "cache")


def lock_of(at: Path) -> Lock:
    return read_lock(at / "model.lock")


def statuses(out: str) -> set[str]:
    return {p["status"] for p in json.loads(out)["programs"]}


def test_what_ci_pushed_every_server_pulls(run: Run, ci: Path, tmp_path: Path) -> None:
    code, out, _ = run(ci, "compile", "--push", "--json")
    assert (code, statuses(out)) == (0, {"compiled"})
    server = host(tmp_path / "server", like=ci)
    code, out, _ = run(server, "pull", "--locked", "--json")
    assert (code, statuses(out)) == (0, {"pulled"})
    assert lock_of(server) == lock_of(ci)
    code, out, _ = run(server, "pull", "--locked", "--json")
    assert (code, statuses(out)) == (0, {"hit"})
    for p in lock_of(server).targets["cpu-null"].programs:
        assert isinstance(cache_of(server).lookup(p.key), Hit)


def test_compile_asks_the_remote_before_it_compiles(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile", "--push")
    other = host(tmp_path / "other")
    code, out, err = run(other, "compile", "--json")
    assert (code, statuses(out)) == (0, {"pulled"})
    assert "pulled from the remote" in err
    assert recorded(other / "events", "lower") == []
    assert lock_of(other) == lock_of(ci)


def test_compile_finds_a_graph_in_the_remote_that_it_has_under_another_key(
    run: Run, ci: Path, tmp_path: Path
) -> None:
    """A release that renames an input costs a lowering, not a compile, on every host."""
    run(ci, "compile", "--push", one_graph=True)
    (store := tmp_path / "store").exists()
    for p in lock_of(ci).targets["cpu-null"].programs:
        DirectoryStore(store).delete(entry_name(p.key))
    other = host(tmp_path / "other")
    code, out, _ = run(other, "compile", "--json", one_graph=True)
    assert (code, statuses(out)) == (0, {"reused"})
    assert recorded(other / "events", "compile") == []


def test_offline_does_not_ask(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile", "--push")
    other = host(tmp_path / "other")
    code, out, _ = run(other, "compile", "--offline", "--json")
    assert (code, statuses(out)) == (0, {"compiled"})


def test_another_remote_may_be_named(run: Run, ci: Path, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    run(ci, "compile", "--push", "--remote", elsewhere)
    assert not (tmp_path / "store").exists()
    server = host(tmp_path / "server", like=ci)
    code, _, _ = run(server, "pull", "--remote", elsewhere)
    assert code == 0


def test_push_without_a_remote_says_what_to_set(run: Run, tmp_path: Path) -> None:
    model_file(tmp_path, (32,), (1,))
    for arguments in (("compile", "--push"), ("compile",), ("push",), ("pull",)):
        code, _, err = run(tmp_path, *arguments)
        if arguments == ("compile",):
            assert code == 0
            continue
        assert code == 2
        assert "remote" in err
        assert "--remote" in err


def test_push_is_done_again_where_it_stopped(run: Run, ci: Path, store: DirectoryStore) -> None:
    run(ci, "compile")
    code, out, _ = run(ci, "push", "--json")
    assert (code, statuses(out)) == (0, {"pushed"})
    program = lock_of(ci).targets["cpu-null"].programs[1]
    store.delete(entry_name(program.key))
    code, out, _ = run(ci, "push", "--json")
    assert (code, statuses(out)) == (0, {"pushed", "present"})


def test_the_loser_of_a_race_is_told_and_adopts(run: Run, ci: Path, tmp_path: Path) -> None:
    # B79
    late = host(tmp_path / "late")
    run(late, "compile", "--offline", salt="late")
    run(ci, "compile", "--push", salt="ci")
    code, _, err = run(late, "push")
    assert code == 1
    assert "another host was first" in err
    assert "nxbucket pull" in err
    code, _, err = run(late, "pull")
    assert code == 0
    assert "its bytes are new" in err
    assert lock_of(late).targets == lock_of(ci).targets
    code, _, _ = run(late, "push")
    assert code == 0


def test_a_compile_that_pushes_takes_the_bytes_that_were_first(
    run: Run, ci: Path, tmp_path: Path
) -> None:
    late = host(tmp_path / "late")
    run(late, "compile", "--offline", salt="late")
    run(ci, "compile", "--push", salt="ci")
    code, out, _ = run(late, "compile", "--push", "--json")
    assert (code, statuses(out)) == (0, {"adopted"})
    assert lock_of(late).targets == lock_of(ci).targets


def test_locked_takes_nothing_else(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile", "--push", salt="ci")
    other = host(tmp_path / "other")
    run(other, "compile", "--offline", salt="other")
    server = host(tmp_path / "server", like=other)
    code, _, err = run(server, "pull", "--locked")
    assert code == 1
    assert "other bytes than the lock names" in err
    assert cache_of(server).all_keys() == []
    assert lock_of(server) == lock_of(other)


def test_compile_locked_checks_and_compiles_nothing(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile", "--push")
    server = host(tmp_path / "server", like=ci)
    code, out, _ = run(server, "compile", "--locked", "--json")
    assert (code, statuses(out)) == (0, {"pulled"})
    empty = host(tmp_path / "empty", like=ci)
    code, _, err = run(empty, "compile", "--locked", "--offline")
    assert code == 1
    assert "prefill_s32 is missing" in err
    assert "nxbucket compile" in err
    assert recorded(empty / "events", "lower") == []


def test_compile_locked_refuses_other_bytes_in_the_cache(
    run: Run, ci: Path, tmp_path: Path
) -> None:
    run(ci, "compile", salt="ci")
    other = host(tmp_path / "other")
    run(other, "compile", salt="other")
    shutil.copy(ci / "model.lock", other)
    code, _, err = run(other, "compile", "--locked")
    assert code == 1
    assert "has other bytes than the lock names" in err


def test_compile_locked_is_of_the_model_file_that_was_locked(run: Run, ci: Path) -> None:
    run(ci, "compile")
    file = ci / "model.yaml"
    before = file.read_text()
    file.write_text(before.replace("32, 64", "16, 64"))
    assert file.read_text() != before
    code, _, err = run(ci, "compile", "--locked")
    assert code == 1
    assert "was made from another model.yaml" in err


@pytest.mark.parametrize("other", [["--push"], ["--shard", "1/2"], ["--executor", "ray"]])
def test_compile_locked_drops_no_option_silently(run: Run, ci: Path, other: list[str]) -> None:
    code, _, err = run(ci, "compile", "--locked", *other)
    assert code == 2
    assert other[0] in err


def test_a_damaged_object_that_looks_whole_from_outside_is_written_over(
    run: Run, ci: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in S3, which tells a size, and not what the bytes are."""

    def age_by_size(store: DirectoryStore, name: str, size_bytes: int, _: str) -> float | None:
        path = store.root / name
        return 0.0 if path.is_file() and path.stat().st_size == size_bytes else None

    monkeypatch.setattr(DirectoryStore, "age_s", age_by_size)
    run(ci, "compile", "--push")
    for path in (tmp_path / "store/blobs").rglob("*"):
        if path.is_file():
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    second = host(tmp_path / "second")
    code, out, err = run(second, "compile", "--push", "--json", salt="second")
    assert (code, statuses(out)) == (0, {"compiled"})
    assert "sha256 differs" in err
    server = host(tmp_path / "server", like=second)
    assert run(server, "pull", "--locked")[0] == 0


def test_a_store_that_says_no_costs_that_push_and_nothing_else(
    run: Run, ci: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = DirectoryStore.upload
    taken: list[str] = []

    def full_at_the_second(store: DirectoryStore, name: str, *rest: Any) -> None:
        taken.append(name)
        if len(taken) == 2:
            raise StoreError("no space left", hint="make some")
        upload(store, name, *rest)

    monkeypatch.setattr(DirectoryStore, "upload", full_at_the_second)
    code, out, err = run(ci, "compile", "--jobs", "1", "--push", "--junit", "out.xml", "--json")
    assert code == 1
    found = [p["status"] for p in json.loads(out)["programs"]]
    assert sorted(found) == ["compiled", "compiled", "compiled", "unpushed"]
    assert not (ci / "model.lock").exists()
    assert "not pushed: no space left" in err
    assert 'type="StoreError"' in (ci / "out.xml").read_text()
    code, out, err = run(ci, "compile", "--push")
    assert code == 0
    assert recorded(ci / "events", "lower").count("prefill_s32") == 1
    assert run(host(tmp_path / "server", like=ci), "pull", "--locked")[0] == 0


def test_shards_make_one_lock(run: Run, ci: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    for i in (1, 2, 3):
        part = host(tmp_path / f"shard{i}")
        code, out, _ = run(part, "compile", "--shard", f"{i}/3", "--push", "--json")
        assert code == 0
        report = json.loads(out)
        seen += [p["name"] for p in report["programs"]]
        assert report["lock_written"] is False or report["others"] == []
        again = run(part, "compile", "--shard", f"{i}/3", "--json")
        assert statuses(again[1]) <= {"hit"}
    assert sorted(seen) == ["decode_b1", "decode_b2", "prefill_s32", "prefill_s64"]
    code, out, _ = run(ci, "lock", "--json")
    assert code == 0
    assert statuses(out) == {"pulled"}
    assert len(lock_of(ci).targets["cpu-null"].programs) == 4
    assert recorded(ci / "events", "lower") == []


def test_a_lock_of_what_is_not_all_there_is_refused(run: Run, ci: Path) -> None:
    run(ci, "compile", "--shard", "1/2", "--push")
    code, _, err = run(ci, "lock")
    assert code == 1
    assert "is missing" in err
    assert not (ci / "model.lock").exists()


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_a_shard_that_is_none_is_refused(run: Run, ci: Path, shard: str) -> None:
    code, _, err = run(ci, "compile", f"--shard={shard}")
    assert code == 2
    assert "--shard 2/4" in err


def test_fail_fast_begins_no_other(run: Run, ci: Path) -> None:
    code, out, _ = run(ci, "compile", "--jobs", "1", "--fail-fast", "--json", fail=("prefill_s32",))
    assert code == 1
    report = json.loads(out)
    assert [p["status"] for p in report["programs"]] == ["failed", *["skipped"] * 3]
    code, out, _ = run(ci, "compile", "--jobs", "1", "--json", fail=("prefill_s32",))
    assert [p["status"] for p in json.loads(out)["programs"]] == ["failed", *["compiled"] * 3]


def test_the_difference_of_two_locks(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile")
    same = tmp_path / "same.lock"
    shutil.copy(ci / "model.lock", same)
    code, out, _ = run(ci, "diff", str(same), "model.lock")
    assert (code, out) == (0, "the same\n")
    file = ci / "model.yaml"
    file.write_text(file.read_text().replace("[1, 2]", "[2]") + "block_size: 64\n")
    run(ci, "compile")
    code, out, _ = run(ci, "diff", str(same), "model.lock")
    assert code == 1
    assert "- decode_b1" in out
    assert "~ prefill_s32: other bytes, another graph; program.block_size: 32 -> 64" in out
    assert "block_size: 32 -> 64" in out.partition("cpu-null:")[0]
    code, out, _ = run(ci, "diff", str(same), "model.lock", "--json")
    found = json.loads(out)
    assert (code, found["same"]) == (1, False)
    assert found["targets"][0]["dropped"] == ["decode_b1"]


def test_compiling_again_is_told_apart_from_a_change(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile", salt="a")
    old = tmp_path / "old.lock"
    shutil.copy(ci / "model.lock", old)
    shutil.rmtree(ci / "cache")
    run(ci, "compile", salt="b")
    _, out, _ = run(ci, "diff", str(old), "model.lock")
    assert "compiled again" in out


def test_pack_and_unpack_serve_a_host_without_a_network(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile")
    archive = str(tmp_path / "artifacts.tar")
    code, out, _ = run(ci, "pack", "model.yaml", archive, "--json")
    assert code == 0
    assert json.loads(out)["size_bytes"] == Path(archive).stat().st_size
    air = host(tmp_path / "air", like=ci)
    code, _, _ = run(air, "unpack", archive, "--cache-dir", str(air / "cache"))
    assert code == 0
    code, out, _ = run(air, "compile", "--locked", "--offline", "--json")
    assert (code, statuses(out)) == (0, {"hit"})


def test_gc_keeps_what_locks_name(run: Run, ci: Path) -> None:
    run(ci, "compile")
    file = ci / "model.yaml"
    shutil.copy(ci / "model.lock", ci / "old.lock")
    file.write_text(file.read_text() + "block_size: 64\n")
    run(ci, "compile")
    arguments = ("cache", "gc", "--cache-dir", "cache", "--grace", "0s", "--json")
    both = ("--lock", "model.lock", "--lock", "old.lock")
    code, out, _ = run(ci, *arguments, *both)
    assert (code, json.loads(out)["removed"]) == (0, [])
    code, out, _ = run(ci, *arguments, "--lock", "model.lock", "--dry-run")
    would = json.loads(out)
    assert would["freed_bytes"] > 0
    code, out, _ = run(ci, *arguments, "--lock", "model.lock")
    assert json.loads(out)["removed"] == would["removed"]
    code, out, _ = run(ci, "compile", "--locked", "--offline", "--json")
    assert (code, statuses(out)) == (0, {"hit"})


def test_gc_of_a_store_keeps_what_locks_name(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile", "--push")
    store = tmp_path / "store"
    for path in store.rglob("*"):
        if path.is_file():
            os.utime(path, (1e9, 1e9))
    code, _, err = run(ci, "cache", "gc", "--remote", str(store), "--lock", "model.lock")
    assert code == 0
    server = host(tmp_path / "server", like=ci)
    assert run(server, "pull", "--locked")[0] == 0
    code, out, _ = run(ci, "cache", "gc", "--remote", str(store), "--older-than", "1d", "--json")
    assert len(json.loads(out)["removed"]) > 4
    late = host(tmp_path / "late", like=ci)
    code, _, err = run(late, "pull", "--locked")
    assert code == 1
    assert "is missing" in err
    assert "compile --push" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "everything would go"),
        (("--older-than", "soon"), "30d"),
        (("--max-size", "20"), "20GiB"),
        (("--max-size", "1GiB", "--grace", "1 parsec"), "--grace"),
        (("--max-size", "1GiB", "--remote", ".", "--grace", "1m"), "2h"),
        (("--max-size", "1GiB", "--remote", "x"), "x is no folder"),
        (("--max-size", f"{'9' * 400}TiB"), "20GiB"),
    ],
)
def test_gc_says_what_it_needs(run: Run, ci: Path, arguments: tuple[str, ...], said: str) -> None:
    run(ci, "compile")
    code, _, err = run(ci, "cache", "gc", "--cache-dir", "cache", *arguments)
    assert code == 2
    assert said in err


def test_verify_repairs_from_the_remote_or_drops(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile", "--push")
    program = lock_of(ci).targets["cpu-null"].programs[0]
    blob = cache_of(ci).blob_path(program.blobs[0].digest)
    blob.write_bytes(b"x")
    verify = ("cache", "verify", "--cache-dir", "cache")
    assert run(ci, *verify)[0] == 1
    code, out, _ = run(ci, *verify, "--repair", "--remote", str(tmp_path / "store"))
    assert code == 0
    assert "(pulled)" in out
    assert run(ci, *verify)[0] == 0
    blob.write_bytes(b"x")
    code, out, _ = run(ci, *verify, "--repair", "--json")
    assert code == 0
    assert {c["repair"] for c in json.loads(out)["corrupt"]} == {"dropped"}
    code, out, _ = run(ci, "compile", "--json")
    assert (code, statuses(out)) == (0, {"hit", "pulled"})


# A stranger's cache and a stranger's store


def swap_two_entries(at: Path, store: DirectoryStore) -> None:
    a, b = lock_of(at).targets["cpu-null"].programs[:2]
    first, second = store.root / entry_name(a.key), store.root / entry_name(b.key)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def tamper_with_a_blob(at: Path, store: DirectoryStore) -> None:
    path = store.root / blob_name(lock_of(at).targets["cpu-null"].programs[0].blobs[0].digest)
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def link_a_blob(at: Path, store: DirectoryStore) -> None:
    path = store.root / blob_name(lock_of(at).targets["cpu-null"].programs[0].blobs[0].digest)
    path.replace(store.root / "elsewhere")
    path.symlink_to(store.root / "elsewhere")


def swell_a_manifest(at: Path, store: DirectoryStore) -> None:
    path = store.root / entry_name(lock_of(at).targets["cpu-null"].programs[0].key)
    path.write_bytes(path.read_bytes() + b" " * (65 << 20))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (swap_two_entries, "holds the entry of key"),
        (tamper_with_a_blob, "sha256 differs from its name"),
        (link_a_blob, "not a plain file"),
        (swell_a_manifest, "larger than"),
    ],
)
def test_what_a_stranger_spoilt_in_the_store_is_refused_with_its_reason(
    run: Run,
    ci: Path,
    tmp_path: Path,
    store: DirectoryStore,
    spoil: Callable[[Path, DirectoryStore], None],
    said: str,
) -> None:
    run(ci, "compile", "--push")
    spoil(ci, store)
    server = host(tmp_path / "server", like=ci)
    code, _, err = run(server, "pull", "--locked")
    assert code == 1
    assert said in err
    verify = run(server, "cache", "verify", "--cache-dir", "cache")
    assert verify[0] == 0


def test_a_cache_that_everybody_can_write_to_is_refused(run: Run, ci: Path) -> None:
    run(ci, "compile")
    (ci / "cache").chmod(0o777)
    shutil.rmtree(ci / "cache/blobs")
    code, _, err = run(ci, "compile")
    assert code == 1
    assert "written by everybody" in err
    assert "chmod o-w" in err


def test_a_linked_blob_in_the_cache_is_corrupt(run: Run, ci: Path, tmp_path: Path) -> None:
    run(ci, "compile")
    program = lock_of(ci).targets["cpu-null"].programs[0]
    path = cache_of(ci).blob_path(program.blobs[0].digest)
    path.replace(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    code, out, _ = run(ci, "cache", "verify", "--cache-dir", "cache")
    assert code == 1
    assert "no plain file" in out


def test_a_lock_that_points_at_another_targets_program_is_refused(
    run: Run, ci: Path, tmp_path: Path
) -> None:
    run(ci, "compile", "--push")
    run(ci, "compile", "--push", target="cpu-other", version="2")
    lock = lock_of(ci)
    ours, theirs = lock.targets["cpu-null"], lock.targets["cpu-other"]
    mixed = replace(ours, programs=(theirs.programs[0], *ours.programs[1:]))
    server = host(tmp_path / "server", like=ci)
    write_lock(replace(lock, targets={"cpu-null": mixed}), server / "model.lock")
    code, _, err = run(server, "pull", "--locked")
    assert code == 1
    assert "another program than the lock describes" in err
    assert "target" in err


@pytest.mark.parametrize("command", [["push"], ["pull", "--locked"]])
def test_ctrl_c_ends_a_transfer_that_nobody_answers(
    run: Run, ci: Path, tmp_path: Path, command: list[str]
) -> None:
    run(ci, "compile")
    server = host(tmp_path / "server", like=ci)
    at = ci if command == ["push"] else server
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", NXBUCKET, *command, "--remote", "s3://bucket/x"],
            cwd=at,
            env={**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": address},
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.settimeout(60)
        asked, _ = silent.accept()
        with asked:
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in err) == (130, False)
    assert "interrupted" in err
