"""`--executor ray` on a cluster of two nodes on this host: what the local pool does, elsewhere."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_here import cli_here
from null_compiler import NullOptions, model_file, null_spec, recorded, recorded_pids
from recorder import Recorder
from waiting import wait_for

from nxbucket.compile.build import BuildReport, build
from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.compiler import CompilerSpec
from nxbucket.compile.executor import PoolOptions
from nxbucket.compile.lockfile import read_lock
from nxbucket.compile.ray_node import compile_on_node, request_json
from nxbucket.compile.remote import Pulled, pull
from nxbucket.compile.store import DirectoryStore
from nxbucket.toolkit.spec import DeploySpec, load_spec

# Ray starts its processes by fork, and jax, of other tests, may have threads in this one.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

TESTS = Path(__file__).parents[1]
PREFILL, DECODE = (32, 64, 128), (1, 2)
NAMES = ["prefill_s32", "prefill_s64", "prefill_s128", "decode_b1", "decode_b2"]


class Fleet:
    """A cluster, each node with one CPU and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.num_nodes = 0
        self.cluster: Any = Cluster()
        self.add_node()
        self.add_node()

    def add_node(self) -> Any:
        self.num_nodes += 1
        path = [str(TESTS), *(p for p in sys.path if p)]
        return self.cluster.add_node(
            num_cpus=1,
            include_dashboard=False,
            env_vars={
                "PYTHONPATH": os.pathsep.join(path),
                "NXBUCKET_CACHE_DIR": str(self.folder / f"node{self.num_nodes}"),
            },
        )

    def node_keys(self) -> list[list[str]]:
        """What each node that did something holds, by input and graph key."""
        return [ArtifactCache(cache).all_keys() for cache in self.folder.glob("node*/ray")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'nxbucket[ray]'")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    started = Fleet(tmp_path_factory.mktemp("fleet"))
    yield started
    started.cluster.shutdown()
    patch.undo()


class Bench:
    """A model file, the driver's cache, the store, and a record of what the compilers did."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        self.version = version
        self.spec: DeploySpec = load_spec(model_file(folder, PREFILL, DECODE))
        self.cache = ArtifactCache(folder / "cache")
        self.store = DirectoryStore(folder / "store")
        self.events = folder / "events"
        self.events.mkdir()
        self.reporter = Recorder()

    def compiler(self, **options: Any) -> CompilerSpec:
        spec = null_spec(events=str(self.events), version=self.version, **options)
        return replace(spec, memory_per_job_bytes=128 << 20)

    def build(self, fleet: Fleet, **options: Any) -> BuildReport:
        from nxbucket.compile.ray_executor import RayOptions, ray_executor

        self.reporter = Recorder()
        executor = ray_executor(RayOptions(fleet.cluster.address))
        pool = PoolOptions(remote=self.store, keep_going=options.pop("keep_going", True))
        compiler = self.compiler(**options)
        return build(self.spec, self.cache, compiler, self.reporter, pool, None, executor)

    def stored(self) -> set[str]:
        """The programs in the store: everything in it must be whole."""
        reader = ArtifactCache(self.folder / "reader")
        reader.prepare()
        programs = set()
        for entry in self.store.list("entries"):
            found = pull(self.store, reader, Path(entry.name).stem, lambda _: None)
            assert isinstance(found, Pulled), found
            programs.add(found.manifest.program)
        return programs


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Of a compiler of its own: the nodes' caches outlive a test."""
    return Bench(tmp_path, tmp_path.name)


def statuses(report: BuildReport) -> dict[str, str]:
    return {o.name: o.status for o in report.outcomes}


@pytest.mark.ray
def test_a_cluster_makes_what_the_local_pool_makes_and_each_program_once(
    bench: Bench, fleet: Fleet, tmp_path: Path
) -> None:
    report = bench.build(fleet, sleep_s=0.3)

    assert statuses(report) == dict.fromkeys(NAMES, "compiled")
    assert sorted(recorded(bench.events, "compile")) == sorted(NAMES)
    assert report.lock_written
    assert (
        "note: 2 jobs at a time on 2 Ray nodes: 1 CPU and 0.12 GiB for each (assumed)"
        in " ".join(bench.reporter.lines)
    )
    assert [n for n in fleet.node_keys() if n], "no node kept a cache of its own"
    assert bench.stored() == set(NAMES)
    for outcome in report.outcomes:
        log = bench.cache.log_path(outcome.planned.key).read_text()
        assert f"{outcome.name}: compiled in" in log

    here = Bench(tmp_path / "here", bench.version)
    local = build(here.spec, here.cache, here.compiler(), Recorder())
    assert here.cache.all_keys() == bench.cache.all_keys()
    assert all(isinstance(bench.cache.lookup(key), Hit) for key in bench.cache.all_keys())
    for one, other in zip(report.outcomes, local.outcomes, strict=True):
        assert one.manifest and other.manifest
        assert (one.manifest.key, one.manifest.blobs) == (other.manifest.key, other.manifest.blobs)
    assert read_lock(report.lock_file).targets == read_lock(local.lock_file).targets

    again = bench.build(fleet)
    assert set(statuses(again).values()) == {"hit"}
    bench.cache = ArtifactCache(tmp_path / "another driver")
    assert set(statuses(bench.build(fleet)).values()) == {"pulled"}
    assert len(recorded(bench.events, "compile")) == 5


@pytest.mark.ray
def test_a_failing_program_is_told_as_on_this_host(bench: Bench, fleet: Fleet) -> None:
    report = bench.build(fleet, fail=("prefill_s64",))
    assert statuses(report) == {**dict.fromkeys(NAMES, "compiled"), "prefill_s64": "failed"}
    [failed] = report.failed
    assert (failed.detail or "").startswith("exited with status 1 (on ")
    assert failed.log_path == bench.cache.log_path(failed.planned.key)
    assert failed.log_tail.endswith("RuntimeError: cannot compile prefill_s64")
    assert not failed.retryable
    assert recorded(bench.events, "compile").count("prefill_s64") == 1
    assert not report.lock_written
    assert statuses(bench.build(fleet))["prefill_s64"] == "compiled"


@pytest.mark.ray
def test_a_compile_that_was_killed_on_its_node_is_tried_once_more(
    bench: Bench, fleet: Fleet
) -> None:
    report = bench.build(fleet, kill={"prefill_s32": 1, "decode_b1": 9})
    assert statuses(report)["prefill_s32"] == "compiled"
    [failed] = report.failed
    assert (failed.name, failed.retryable) == ("decode_b1", True)
    assert "was killed by SIGKILL (out of memory?)" in (failed.detail or "")
    assert recorded(bench.events, "compile").count("decode_b1") == 2


@pytest.mark.ray
def test_after_a_failure_fail_fast_takes_back_what_still_waits(bench: Bench, fleet: Fleet) -> None:
    report = bench.build(fleet, keep_going=False, fail=tuple(NAMES), sleep_s=0.5)
    found = list(statuses(report).values())
    assert set(found) == {"failed", "skipped"}
    assert len(recorded(bench.events, "compile")) == found.count("failed")


@pytest.mark.ray
def test_a_node_that_dies_midway_costs_one_more_try_and_nothing_wrong_is_published(
    bench: Bench, fleet: Fleet
) -> None:
    doomed = fleet.add_node()
    work = fleet.folder / f"node{fleet.num_nodes}" / "ray" / "tmp"

    def kill() -> None:
        assert wait_for(lambda: any(work.glob("*/*")), 60), "nothing ever ran on the node"
        fleet.cluster.remove_node(doomed, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    report = bench.build(fleet, sleep_s=1.5, salt="random")
    killer.join()
    assert statuses(report) == dict.fromkeys(NAMES, "compiled")
    lost = [line for line in bench.reporter.lines if "was lost with its node" in line]
    assert len(lost) == 1, bench.reporter.lines
    assert 5 <= len(recorded(bench.events, "compile")) <= 6
    assert not any(map(is_alive, recorded_pids(bench.events)))
    assert report.lock_written
    assert bench.stored() == set(NAMES)
    assert all(isinstance(bench.cache.lookup(key), Hit) for key in bench.cache.all_keys())


@pytest.mark.ray
def test_ctrl_c_takes_the_tasks_back_and_the_next_run_goes_on(bench: Bench, fleet: Fleet) -> None:
    hang = ("prefill_s64", "decode_b1", "decode_b2")

    def interrupt() -> None:
        wait_for(lambda: len({*recorded(bench.events, "compile")} & {*hang}) == 2, 30)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        bench.build(fleet, hang=hang)
    assert wait_for(lambda: not any(map(is_alive, recorded_pids(bench.events))), 5)
    assert not (bench.folder / "model.lock").exists()
    # Ray begins them in no particular order: those that do not hang may have had no turn.
    lines = [line.split() for line in bench.reporter.lines]
    finished = {name for status, name, *_ in lines if status == "compiled"}
    assert finished <= bench.stored() <= {*NAMES} - {*hang}
    again = statuses(bench.build(fleet))
    assert {name for name, status in again.items() if status == "hit"} == finished
    assert {again[name] for name in hang} == {"compiled"}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_cli(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(TESTS / "null_cli.py"), *arguments],
        cwd=folder,
        env={**os.environ, **NullOptions().environ(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.ray
def test_the_command_compiles_on_the_cluster_of_the_environment(
    tmp_path: Path, fleet: Fleet
) -> None:
    model_file(tmp_path, (32,), (1,))
    done = run_cli(
        tmp_path, "compile", "--executor", "ray", "--remote", "store", "--junit", "out.xml",
        "--json", RAY_ADDRESS=fleet.cluster.address,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout)["programs"]
    assert [p["status"] for p in programs] == ["compiled"] * 2
    assert "prefill_s32: compiling on " in done.stderr
    assert (tmp_path / "model.lock").exists()
    assert 'name="prefill_s32"' in (tmp_path / "out.xml").read_text()


def test_a_cluster_that_is_not_there_is_exit_3_with_the_way_to_start_one(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'nxbucket[ray]'")
    model_file(tmp_path, (32,), (1,))
    options = ("--executor", "ray", "--remote", "store")
    done = run_cli(tmp_path, "compile", *options, "--ray-address", "127.0.0.1:1")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr
    assert "hint: ray start --head" in done.stderr
    done = run_cli(tmp_path, "compile", *options, "--ray-address", "ray://127.0.0.1:1")
    assert (done.returncode, "Ray Client" in done.stderr) == (2, True)


def test_without_a_remote_there_is_no_place_to_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model_file(tmp_path, (32,), (1,))
    code, _, err = cli_here(monkeypatch, capsys, "compile", "--executor", "ray")
    assert code == 2
    assert "--executor ray without a remote" in err
    assert "hint: set artifacts.remote in the model file, or give --remote" in err


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model_file(tmp_path, (32,), (1,))
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nxbucket.compile.ray_executor", raising=False)
    options = ("--executor", "ray", "--remote", "store")
    code, _, err = cli_here(monkeypatch, capsys, "compile", *options)
    assert code == 3
    assert "hint: pip install 'nxbucket[ray]'" in err


def test_a_node_with_another_compiler_says_what_differs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nxbucket.compile.build import plan

    compiler = null_spec(events=str(bench.events))
    planned = plan(bench.spec, bench.cache, compiler).programs[0]
    request = request_json(planned, compiler, PoolOptions(remote=bench.store))
    monkeypatch.setenv("NULL_COMPILER", json.dumps({"version": "2", "target": "cpu-other"}))
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", str(bench.folder / "node"))
    began, answer = compile_on_node(request)
    reason = answer["failure"]["reason"]
    assert reason.startswith(f"on {began['place']} is not the one of this host")
    assert 'target is "cpu-other" there, "cpu-null" here' in reason
    assert 'toolchain.version is "2" there, "1" here' in reason
    assert "on every node" in answer["failure"]["hint"]
    assert not answer["failure"]["retryable"]
    assert recorded(bench.events, "lower") == []
