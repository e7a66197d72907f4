"""`nxbucket compile` and `nxbucket cache` as a person runs them, with the null compiler."""

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_here import cli_here
from null_compiler import NullOptions, model_file, null_spec, recorded, recorded_pids
from waiting import wait_for

from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.lockfile import read_lock
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.spec import load_spec

NULL_CLI = Path(__file__).parents[1] / "null_cli.py"
Workers = Callable[[], list[int]]


def start(folder: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """`nxbucket ARGUMENTS` in `folder`. Options are NullOptions' or, in capitals, variables."""
    variables = {k: str(options.pop(k)) for k in list(options) if k.isupper()}
    return subprocess.Popen(
        [sys.executable, str(NULL_CLI), *arguments],
        cwd=folder,
        env={**os.environ, **NullOptions(**options).environ(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    process = start(folder, *arguments, **options)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err.replace("  | Traceback", "")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a model.yaml of two programs."""
    model_file(tmp_path, (32,), (1,))
    return tmp_path


PROGRAM_FIELDS = {
    "name", "status", "key", "graph_key", "digest", "size_bytes", "wall_s", "detail", "log",
    "hint", "hlo", "log_tail",
}  # fmt: skip
REPORT_FIELDS = {
    "ok", "target", "toolchain", "cache_dir", "lock", "lock_written", "changed", "others", "wall_s",
    "programs", "model_commit", "previous_commit",
}  # fmt: skip


def test_compile_again_is_all_hits_and_imports_neither_torch_nor_vllm(tmp_path: Path) -> None:
    model_file(tmp_path, (32, 64, 128), (1, 2))
    first = run(tmp_path, "compile", "model.yaml")
    assert first.returncode == 0, first.stderr
    rows = [line.split() for line in first.stdout.splitlines()]
    assert rows[0] == ["program", "status", "seconds", "bytes", "key"]
    assert [row[:2] for row in rows[1:]] == [
        [name, "compiled"]
        for name in ("prefill_s32", "prefill_s64", "prefill_s128", "decode_b1", "decode_b2")
    ]
    assert f"note: cache {tmp_path / 'cache'} (artifacts.cache)" in first.stderr
    assert "[5 of 5]" in first.stderr
    assert f"{tmp_path / 'model.lock'} written; 5 programs" in first.stderr

    modules = tmp_path / "modules"
    again = run(tmp_path, "compile", "--json", NULL_CLI_MODULES=modules)
    report = json.loads(again.stdout)
    assert set(report) == REPORT_FIELDS
    assert (report["ok"], report["lock_written"], report["changed"]) == (True, False, [])
    assert (report["target"], report["toolchain"]["compiler"]) == ("cpu-null", "null")
    assert report["cache_dir"] == str(tmp_path / "cache")
    for program, row in zip(report["programs"], rows[1:], strict=True):
        assert set(program) == PROGRAM_FIELDS
        assert (program["name"], program["status"]) == (row[0], "hit")
        assert (program["key"], str(program["size_bytes"])) == (row[4], row[3])
        assert (program["detail"], program["log"]) == (None, None)
    imported = set(modules.read_text().splitlines())
    assert not imported & {"torch", "vllm", "numpy", "transformers", "ray"}
    assert "typer" in imported


def test_a_dry_run_compiles_nothing_and_makes_nothing(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    code, out, err = cli_here(monkeypatch, capsys, "compile", "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["to_compile"] == {"programs": 2, "compile_s": None, "estimated_from": 0}
    assert [(p["name"], p["cache"]) for p in plan["programs"]] == [
        ("prefill_s32", "miss"),
        ("decode_b1", "miss"),
    ]
    assert not (small / "cache").exists()
    assert not (small / "model.lock").exists()
    code, out, err = cli_here(monkeypatch, capsys, "compile", "--dry-run")
    assert (code, out.splitlines()[0].split()[:2]) == (0, ["program", "cache"])
    assert "2 of 2 would be compiled for cpu-null" in err
    assert (code, out, err) == cli_here(monkeypatch, capsys, "plan")


def test_a_truncated_artifact_is_reported_rebuilt_alone_and_the_lock_follows(small: Path) -> None:
    before = json.loads(run(small, "compile", "--json", salt="random").stdout)
    digest = before["programs"][1]["digest"]
    blob = ArtifactCache(small / "cache").blob_path(digest)
    os.truncate(blob, blob.stat().st_size // 2)
    lock = (small / "model.lock").read_bytes()

    done = run(small, "compile", salt="random")

    assert done.returncode == 0
    assert f"decode_b1: was corrupt ({blob}: " in done.stderr
    assert "prefill_s32: hit" in done.stderr
    assert "note: decode_b1: its bytes are new, and the lock names them now" in done.stderr
    assert (small / "model.lock").read_bytes() != lock
    assert run(small, "cache", "verify", "--cache-dir", "cache").returncode == 0
    after = json.loads(run(small, "compile", "--json").stdout)
    assert [p["status"] for p in after["programs"]] == ["hit", "hit"]
    assert after["programs"][0] == before["programs"][0] | {"status": "hit", "wall_s": 0.0}
    assert after["programs"][1]["digest"] != digest


def test_two_compiles_at_once_compile_each_program_once(tmp_path: Path) -> None:
    # B79: the bytes differ from run to run, and still both end with one and the same artifact.
    model_file(tmp_path, (32, 64), (1, 2))
    options: dict[str, Any] = {"events": str(tmp_path), "sleep_s": 0.2, "salt": "random"}
    processes = [start(tmp_path, "compile", "--json", **options) for _ in range(2)]
    reports = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    names = ["decode_b1", "decode_b2", "prefill_s32", "prefill_s64"]
    assert sorted(recorded(tmp_path, "compile")) == names
    for pair in zip(*(report["programs"] for report in reports), strict=True):
        assert {program["status"] for program in pair} == {"compiled", "hit"}
    one, other = ([p["digest"] for p in report["programs"]] for report in reports)
    assert one == other
    programs = read_lock(tmp_path / "model.lock").targets["cpu-null"].programs
    assert [p.blobs[0].digest for p in programs] == one
    assert [p for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_a_failing_program_is_shown_with_its_log_and_the_way_on(tmp_path: Path) -> None:
    # B125
    model_file(tmp_path, (32, 64, 128), (1,))
    done = run(tmp_path, "compile", fail=("prefill_s64",))
    assert done.returncode == 1
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert {name: row[1] for name, row in rows.items()} == {
        "program": "status",
        "prefill_s32": "compiled",
        "prefill_s64": "failed",
        "prefill_s128": "compiled",
        "decode_b1": "compiled",
    }
    log = ArtifactCache(tmp_path / "cache").log_path(rows["prefill_s64"][4])
    assert f"its log, {log}, ends:" in done.stderr
    assert "  | null compiler: internal error in prefill_s64" in done.stderr
    assert "error: 1 of 4 programs did not compile" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hint: ")
    assert not (tmp_path / "model.lock").exists()

    again = run(tmp_path, "compile", "--json", fail=("prefill_s64",))
    assert again.returncode == 1
    report = json.loads(again.stdout)
    assert (report["ok"], report["lock_written"]) == (False, False)
    [failed] = [p for p in report["programs"] if p["status"] != "hit"]
    assert (failed["name"], failed["status"], failed["log"]) == ("prefill_s64", "failed", str(log))
    assert (failed["digest"], failed["size_bytes"]) == (None, None)
    assert "null compiler: internal error in prefill_s64" in failed["log_tail"]
    assert run(tmp_path, "compile").returncode == 0


def test_ctrl_c_stops_all_compiles_and_the_next_run_goes_on(
    tmp_path: Path, workers: Workers
) -> None:
    model_file(tmp_path, (32, 64), (1,))
    process = start(tmp_path, "compile", "--jobs", "1", events=str(tmp_path), hang=("prefill_s64",))
    assert wait_for(lambda: recorded(tmp_path, "compile")[-1:] == ["prefill_s64"])
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert workers() == []
    assert not (tmp_path / "model.lock").exists()
    again = json.loads(run(tmp_path, "compile", "--json").stdout)
    assert [p["status"] for p in again["programs"]] == ["hit", "compiled", "compiled"]
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_a_kill_of_the_command_ends_its_compiles_at_once(tmp_path: Path, workers: Workers) -> None:
    model_file(tmp_path, (32,), (1,))
    hang = ("prefill_s32", "decode_b1")
    process = start(tmp_path, "compile", "--jobs", "2", events=str(tmp_path), hang=hang)
    assert wait_for(lambda: len(recorded(tmp_path, "compile")) == 2)
    assert len(workers()) == 2
    process.kill()
    process.communicate()
    assert wait_for(lambda: workers() == [], seconds=5)


def test_after_each_of_twenty_kills_the_cache_verifies_and_a_second_run_completes(
    tmp_path: Path, workers: Workers
) -> None:
    spec = load_spec(model_file(tmp_path, (32,), (1,)))
    cache = ArtifactCache(tmp_path / "cache")
    moments = random.Random(20)
    began = time.monotonic()
    run(tmp_path, "compile", version="whole", salt="random", sleep_s=0.05)
    whole_run_s = time.monotonic() - began
    hits_of_second_runs = 0
    for number in range(20):
        # A new toolchain each time, so that there is always something to compile.
        options: dict[str, Any] = {"version": str(number), "salt": "random", "sleep_s": 0.05}
        process = start(tmp_path, "compile", **options)
        time.sleep(whole_run_s * moments.uniform(0.3, 1.1))
        process.kill()
        process.communicate()
        assert wait_for(lambda: workers() == []), "a worker outlived its parent"
        found = [cache.lookup(key) for key in cache.all_keys()]
        assert all(isinstance(f, Hit) for f in found), found

        with PlainReporter() as reporter:
            report = build(spec, cache, null_spec(**options), reporter)
        assert report.failed == []
        hits_of_second_runs += [o.status for o in report.outcomes].count("hit")
        programs = read_lock(tmp_path / "model.lock").targets["cpu-null"].programs
        assert [p.key for p in programs] == [o.planned.key for o in report.outcomes]
        assert all(isinstance(cache.lookup(p.key), Hit) for p in programs)
        assert list((cache.root / "tmp").glob("*/*")) == []
    # Else every kill was too early or too late to show anything.
    assert 0 < hits_of_second_runs < 40
    done = run(tmp_path, "cache", "verify", "--cache-dir", "cache", "--json")
    verified = json.loads(done.stdout)
    assert (done.returncode, verified["corrupt"]) == (0, [])
    assert verified["entries"] == 84


def test_the_variable_moves_the_cache_and_its_origin_is_printed(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # B65
    monkeypatch.chdir(small)
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", str(small / "elsewhere"))
    code, out, err = cli_here(monkeypatch, capsys, "compile", "--json")
    assert code == 0
    assert json.loads(out)["cache_dir"] == str(small / "elsewhere")
    assert f"cache {small / 'elsewhere'} (NXBUCKET_CACHE_DIR)" in err
    assert (small / "elsewhere" / "entries").is_dir()
    assert not (small / "cache").exists()
    code, out, _ = cli_here(monkeypatch, capsys, "cache", "ls", "--json")
    assert (code, len(json.loads(out)["entries"])) == (0, 4)


def test_the_cache_commands_print_what_is_there(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    code, out, _ = cli_here(monkeypatch, capsys, "compile", "--json")
    programs = {p["key"]: p for p in json.loads(out)["programs"]}
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", "cache")

    code, out, _ = cli_here(monkeypatch, capsys, "cache", "ls", "--json")
    listed = json.loads(out)
    assert (code, set(listed)) == (0, {"ok", "cache_dir", "entries"})
    fields = {"key", "kind", "program", "target", "graph_key", "size_bytes", "compile_s"}
    assert all(set(entry) == fields for entry in listed["entries"])
    inputs = [entry for entry in listed["entries"] if entry["kind"] == "input"]
    assert {e["key"]: e["graph_key"] for e in inputs} == {
        k: p["graph_key"] for k, p in programs.items()
    }
    code, out, _ = cli_here(monkeypatch, capsys, "cache", "ls")
    assert (code, len(out.splitlines())) == (0, 5)

    key = next(iter(programs))
    code, out, _ = cli_here(monkeypatch, capsys, "cache", "show", key[:12])
    shown = json.loads(out)
    assert (code, shown["ok"], shown["key"]) == (0, True, key)
    assert {"inputs", "signature", "blobs", "toolchain", "graph_key", "compile_s"} <= set(shown)
    assert shown["inputs"]["program"]["phase"] == shown["program"].partition("_")[0]

    code, out, err = cli_here(monkeypatch, capsys, "cache", "verify", "--json")
    report = json.loads(out)
    assert (code, report) == (
        0,
        {"ok": True, "cache_dir": str(small / "cache"), "entries": 4, "corrupt": []},
    )
    code, out, err = cli_here(monkeypatch, capsys, "cache", "verify")
    assert (code, out) == (0, "")
    assert "4 entries, 0 corrupt" in err


def test_a_corrupt_entry_is_named_by_every_cache_command(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # B86
    monkeypatch.chdir(small)
    _, out, _ = cli_here(monkeypatch, capsys, "compile", "--json")
    key = json.loads(out)["programs"][0]["key"]
    path = ArtifactCache(small / "cache").entry_path(key)
    path.write_text("{}")
    here = ("--cache-dir", "cache")

    code, out, _ = cli_here(monkeypatch, capsys, "cache", "verify", *here)
    assert (code, out.split(": ")[:2]) == (1, [key, str(path)])
    code, out, _ = cli_here(monkeypatch, capsys, "cache", "verify", "--json", *here)
    report = json.loads(out)
    assert (code, report["ok"], report["entries"]) == (1, False, 4)
    assert [c["key"] for c in report["corrupt"]] == [key]
    code, out, _ = cli_here(monkeypatch, capsys, "cache", "ls", "--json", *here)
    assert [e["key"] for e in json.loads(out)["entries"] if "reason" in e] == [key]
    code, _, err = cli_here(monkeypatch, capsys, "cache", "show", key, *here)
    assert (code, "cache verify" in err) == (2, True)
    code, _, err = cli_here(monkeypatch, capsys, "compile", "--dry-run")
    assert (code, "1 of 2 would be compiled" in err) == (0, True)
    code, _, err = cli_here(monkeypatch, capsys, "compile")
    assert (code, f"was corrupt ({path}: " in err) == (0, True)


def good_entry(root: Path) -> Path:
    return next(root.glob("entries/*/*.json"))


def edit_entry(pattern: str, replacement: str) -> Callable[[Path], object]:
    def damage(root: Path) -> None:
        entry = good_entry(root)
        text, count = re.subn(pattern, replacement, entry.read_text(), count=1)
        assert count == 1
        entry.write_text(text)

    return damage


def stray_files(root: Path) -> None:
    folder = root / "entries" / "ee"
    folder.mkdir(exist_ok=True)
    (folder / "odd.json").write_text("{}")
    (folder / f"{'e' * 64}.json").write_text("null")
    (folder / f"ee{'f' * 62}.json").mkdir()
    (folder / f"{'0' * 64}.json").write_text("in another folder than its own")


def odd_notes_of_lock_holders(root: Path) -> None:
    for entry in root.glob("entries/*/*.json"):
        (root / "locks" / entry.name).write_text('{"since": []}')


def empty_every_blob(root: Path) -> None:
    for blob in root.glob("blobs/*/*/*"):
        blob.write_bytes(b"")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "random bytes": lambda root: good_entry(root).write_bytes(random.Random(1).randbytes(400)),
    "deep nesting": lambda root: good_entry(root).write_text("[" * 50_000 + "]" * 50_000),
    "NaN": edit_entry('"inputs": {', '"inputs": {"x": NaN, '),
    "a huge number": edit_entry('"compile_s": [0-9.]+', f'"compile_s": {"9" * 400}'),
    "a lone surrogate": edit_entry('"target": "[^"]*"', r'"target": "\\udc00"'),
    "stray files": stray_files,
    "odd notes of lock holders": odd_notes_of_lock_holders,
    "every blob emptied": empty_every_blob,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_garbage_in_the_cache_is_never_a_traceback_and_compile_mends_it(
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    monkeypatch.chdir(small)
    assert cli_here(monkeypatch, capsys, "compile")[0] == 0
    DAMAGE[damage](small / "cache")
    (small / "model.lock").write_bytes(random.Random(2).randbytes(100))
    here = ("--cache-dir", "cache")
    key = good_entry(small / "cache").stem
    for command in [
        ("cache", "ls", *here),
        ("cache", "ls", "--json", *here),
        ("cache", "show", key, *here),
        ("cache", "show", "", *here),
        ("cache", "verify", *here),
        ("cache", "verify", "--json", *here),
        ("compile", "--dry-run"),
    ]:
        code, out, err = cli_here(monkeypatch, capsys, *command)
        assert code in (0, 1, 2), command
        assert out or err
        if "--json" in command:
            json.loads(out)
    assert cli_here(monkeypatch, capsys, "compile")[0] == 0
    code, out, _ = cli_here(monkeypatch, capsys, "compile", "--json")
    assert {p["status"] for p in json.loads(out)["programs"]} == {"hit"}


def test_a_folder_where_an_entry_belongs_is_explained(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    _, out, _ = cli_here(monkeypatch, capsys, "compile", "--dry-run", "--json")
    path = ArtifactCache(small / "cache").entry_path(json.loads(out)["programs"][0]["key"])
    path.mkdir(parents=True)
    code, out, err = cli_here(monkeypatch, capsys, "compile")
    assert (code, out) == (1, "")
    assert "cannot write to the artifact cache" in err
    assert str(path) in err


def test_garbage_in_the_lock_is_explained_by_serve(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    (small / "model.lock").write_bytes(b"\x80\xff garbage")
    code, _, err = cli_here(monkeypatch, capsys, "serve", "model.yaml")
    assert code == 1
    assert "not a lock file of ours" in err
    assert f"hint: nxbucket compile {small / 'model.yaml'}" in err


def test_what_was_compiled_for_another_target_is_not_served_and_both_are_named(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # B72
    monkeypatch.chdir(small)
    assert cli_here(monkeypatch, capsys, "compile")[0] == 0
    code, _, err = cli_here(monkeypatch, capsys, "serve", "model.yaml")
    assert code == 1
    assert "locked for cpu-null; this host runs cpu-x86-64" in err


def test_a_cache_that_cannot_be_written_is_explained(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # B75
    monkeypatch.chdir(small)
    (small / "cache").write_text("a file")
    code, out, err = cli_here(monkeypatch, capsys, "compile")
    assert (code, out) == (1, "")
    assert f"error: {small / 'cache'}: cannot write to the artifact cache" in err
    assert "hint: " in err
    code, out, _ = cli_here(monkeypatch, capsys, "compile", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "cache")


def test_a_cache_that_is_not_there_is_explained(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["ls"], ["show", "ab"], ["verify"]):
        code, out, err = cli_here(
            monkeypatch, capsys, "cache", *command, "--cache-dir", str(small / "none")
        )
        assert (code, out) == (2, "")
        assert f"no artifact cache at {small / 'none'}" in err


def test_a_key_of_no_entry_or_of_several_is_explained(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small)
    assert cli_here(monkeypatch, capsys, "compile")[0] == 0
    here = ("--cache-dir", "cache")
    code, _, err = cli_here(monkeypatch, capsys, "cache", "show", "zz", *here)
    assert (code, "0 entries" in err) == (2, True)
    code, _, err = cli_here(monkeypatch, capsys, "cache", "show", "", *here)
    assert (code, "4 entries" in err) == (2, True)


def test_no_process_is_started_when_everything_is_there(small: Path) -> None:
    run(small, "compile")
    run(small, "compile", events=str(small))
    assert recorded_pids(small) == set()


def run_on_terminal(folder: Path, interrupt_after: str | None, **options: Any) -> tuple[int, str]:
    """`nxbucket compile` with a terminal for stderr: its exit code, and what was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(NULL_CLI), "compile"],
        cwd=folder,
        env={**os.environ, **NullOptions(**options).environ(), "TERM": "xterm", "COLUMNS": "60"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:
            break  # nobody has the other end any more
        shown += chunk
        if interrupt_after and interrupt_after.encode() in shown:
            process.send_signal(signal.SIGINT)
            interrupt_after = None
    os.close(ours)
    return process.wait(timeout=20), shown.decode()


def test_on_a_terminal_the_running_programs_are_shown_live(small: Path) -> None:
    code, shown = run_on_terminal(small, None, sleep_s=0.3)
    assert code == 0
    assert "prefill_s32 compiling" in shown
    assert "0/2" in shown
    assert "no record of how long one takes" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"decode_b1: compiled in [0-9.]+ s \[[12] of 2\]", plain)
    assert "model.lock written; 2 programs" in plain


def test_ctrl_c_on_a_terminal_gives_the_cursor_back(small: Path, workers: Workers) -> None:
    hang = ("prefill_s32", "decode_b1")
    code, shown = run_on_terminal(small, "prefill_s32 compiling", hang=hang)
    assert code == 130
    assert "Traceback" not in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert workers() == []


def test_the_time_that_is_left_is_shown_live_once_something_is_recorded(small: Path) -> None:
    assert run(small, "compile", sleep_s=1.0, version="1").returncode == 0
    code, shown = run_on_terminal(small, None, sleep_s=1.0, version="2")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert code == 0
    assert re.search(r"2 programs to compile: ~[1-3] s, by what is recorded", plain)
    assert re.search(r"programs .* 0/2 .* ~[1-3] s left", plain)


@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_jobs_that_is_none_is_wrong_usage(small: Path, jobs: str) -> None:
    done = run(small, "compile", f"--jobs={jobs}")
    assert done.returncode == 2
    assert "hint: a number of programs at a time, or auto" in done.stderr


def test_jobs_auto_is_what_is_done_anyway_and_why_is_said(small: Path) -> None:
    done = run(small, "compile", "--jobs", "auto")
    assert done.returncode == 0
    assert re.search(
        r"note: \d jobs? at a time: \d+ cores, [0-9.]+ GiB free, 3.00 GiB for each \(assumed\)",
        done.stderr,
    )
    assert "note: 2 programs to compile; no record of how long one takes" in done.stderr


def test_a_limit_of_memory_is_told_with_how_much_of_what_limit(small: Path) -> None:
    hold = {"hold_mib": {"prefill_s32": 400}}
    done = run(small, "compile", "--max-rss-gib", "0.25", "--json", **hold)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    [failed] = [p for p in report["programs"] if p["status"] == "failed"]
    assert re.fullmatch(r"held 0\.\d\d GiB of memory, and the limit is 0.25 GiB", failed["detail"])
    assert failed["hint"] == "a larger --max-rss-gib lets it have more"
    assert "prefill_s32: the compiler held 0." in done.stderr
    assert "it is tried once more, later" in done.stderr


def test_the_help_has_the_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = cli_here(monkeypatch, capsys, "compile", "--help")
    assert code == 0
    ending = [line.split() for line in out.splitlines()[-6:] if line.strip()]
    assert [line[0] for line in ending[-5:]] == ["0", "1", "2", "3", "130"]
