"""Many commands on one cache, and commands that are killed: real processes, the null compiler."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from artifacts import faults
from null_compiler import NullOptions, model_file, recorded

from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.lockfile import read_lock
from nxbucket.compile.remote import Pulled, pull
from nxbucket.compile.store import DirectoryStore

NULL_CLI = Path(__file__).parents[1] / "null_cli.py"
NAMES = ["decode_b1", "decode_b2", "prefill_s128", "prefill_s32", "prefill_s64"]


def start(folder: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(NULL_CLI), *arguments],
        cwd=folder,
        env={**os.environ, **NullOptions(**options).environ()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_eight_commands_on_one_cache_compile_each_program_exactly_once(tmp_path: Path) -> None:
    # The bytes differ from run to run: all eight must end with one and the same artifact.
    model_file(tmp_path)
    options: dict[str, Any] = {"events": str(tmp_path), "sleep_s": 0.3, "salt": "random"}
    processes = [start(tmp_path, "compile", "--jobs", "2", "--json", **options) for _ in range(8)]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, ended
    assert sorted(recorded(tmp_path, "compile")) == NAMES
    reports = [json.loads(out) for out, _ in ended]
    for each in zip(*(report["programs"] for report in reports), strict=True):
        found = sorted(program["status"] for program in each)
        assert found == ["compiled", *["hit"] * 7]
        assert len({program["digest"] for program in each}) == 1
    assert faults(ArtifactCache(tmp_path / "cache")) == {}
    assert len(read_lock(tmp_path / "model.lock").targets["cpu-null"].programs) == 5


def keys_in(store: DirectoryStore) -> set[str]:
    return {Path(entry.name).stem for entry in store.list("entries") if is_entry(entry.name)}


def check_whole(store: DirectoryStore, keys: set[str], reader: ArtifactCache) -> None:
    for key in keys:
        assert isinstance(found := pull(store, reader, key, lambda _: None), Pulled), found


def is_entry(name: str) -> bool:
    """Not a file that a writer was killed over: its name is no key, and no reader asks for it."""
    return not Path(name).name.startswith(".")


def test_fifty_kills_of_a_compile_that_pushes_leave_no_half_of_anything(tmp_path: Path) -> None:
    model_file(tmp_path, (32, 64), (1,))
    cache, store = ArtifactCache(tmp_path / "cache"), DirectoryStore(tmp_path / "store")
    reader = ArtifactCache(tmp_path / "reader")
    reader.prepare()
    moments = random.Random(50)
    push = ("compile", "--push", "--remote", "store", "--jobs", "2")
    options: dict[str, Any] = {"salt": "random", "sleep_s": 0.02}

    began = time.monotonic()
    start(tmp_path, *push, **options, version="whole").communicate(timeout=60)
    whole_run_s = time.monotonic() - began

    finished_early, known, pushes_cut_off = 0, keys_in(store), 0
    for number in range(50):
        # A new toolchain every third time: there is always something left to compile and to push.
        process = start(tmp_path, *push, **options, version=str(number // 3))
        time.sleep(whole_run_s * moments.uniform(0.25, 0.75))
        finished_early += process.poll() is not None
        process.kill()
        process.communicate()
        assert faults(cache) == {}
        found = keys_in(store)
        assert found >= known
        check_whole(store, found - known, reader)
        pushes_cut_off += 0 < len(found - known) < 6
        known = found
    # Else the kills were all too early or too late to show anything.
    assert pushes_cut_off > 5
    assert finished_early < 35, (finished_early, whole_run_s)

    done = start(tmp_path, *push, "--json", **options, version="16")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    keys = {p[kind] for p in json.loads(out)["programs"] for kind in ("key", "graph_key")}
    assert len(keys) == 6
    assert keys <= keys_in(store)
    assert faults(cache) == {}
    check_whole(store, keys_in(store), reader)
    verified = start(tmp_path, "cache", "verify", "--cache-dir", "cache", "--json")
    out, _ = verified.communicate(timeout=60)
    assert (verified.returncode, json.loads(out)["corrupt"]) == (0, [])
