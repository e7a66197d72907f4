"""`build` with the null compiler: real worker processes, one cache, one lock."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from null_compiler import NullOptions, model_file, null_spec, recorded, recorded_pids
from recorder import Recorder

from nxbucket.compile import jobs as jobs_module
from nxbucket.compile import key as key_module
from nxbucket.compile.build import BuildReport, build, plan
from nxbucket.compile.cache import ArtifactCache, Corrupt, Hit, Miss
from nxbucket.compile.canonical import file_sha256
from nxbucket.compile.cpu import CpuCompiler
from nxbucket.compile.executor import PoolOptions
from nxbucket.compile.host_memory import available_bytes
from nxbucket.compile.jobs import JobMemory, choose_jobs
from nxbucket.compile.lockfile import lock_path, read_lock
from nxbucket.compile.outcome import Outcome
from nxbucket.compile.subprocess_job import JobFailure, Limits, Stopped, run_job
from nxbucket.serve.served import Served
from nxbucket.toolkit.errors import BindError, CompileError
from nxbucket.toolkit.spec import DeploySpec, load_spec

Workers = Callable[[], list[int]]


class Bench:
    """One model file, one cache, and a record of what the compiler did."""

    def __init__(self, folder: Path, prefill: tuple[int, ...], decode: tuple[int, ...]) -> None:
        self.spec: DeploySpec = load_spec(model_file(folder, prefill, decode))
        self.cache = ArtifactCache(folder / "cache")
        self.events = folder / "events"
        self.events.mkdir()
        self.reporter = Recorder()

    def build(
        self,
        jobs: int | None = 2,
        timeout_s: float | None = None,
        max_rss_bytes: int | None = None,
        **options: object,
    ) -> BuildReport:
        (self.events / "events").unlink(missing_ok=True)
        self.reporter = Recorder()
        compiler = null_spec(events=str(self.events), **options)
        pool = PoolOptions(jobs=jobs, timeout_s=timeout_s, max_rss_bytes=max_rss_bytes)
        return build(self.spec, self.cache, compiler, self.reporter, pool)

    def compiled(self) -> list[str]:
        return recorded(self.events, "compile")

    def blob_of(self, outcome: Outcome) -> Path:
        assert outcome.manifest is not None
        return self.cache.blob_path(outcome.manifest.blobs[0].digest)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Two programs: prefill_s32 and decode_b1."""
    return Bench(tmp_path, (32,), (1,))


def statuses(report: BuildReport) -> dict[str, str]:
    return {o.name: o.status for o in report.outcomes}


def test_lists_of_m_and_n_entries_make_m_plus_n_artifacts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (32, 64, 128), (1, 2))
    names = ["prefill_s32", "prefill_s64", "prefill_s128", "decode_b1", "decode_b2"]

    report = bench.build()

    assert statuses(report) == dict.fromkeys(names, "compiled")
    assert sorted(bench.compiled()) == sorted(names)
    blobs = {bench.blob_of(o) for o in report.outcomes}
    assert len(blobs) == 5
    assert set((bench.cache.root / "blobs").rglob("*" * 1)) >= blobs
    assert len([p for p in (bench.cache.root / "blobs").rglob("*") if p.is_file()]) == 5
    kinds = [
        m.manifest.key_kind
        for k in bench.cache.all_keys()
        if isinstance(m := bench.cache.lookup(k), Hit)
    ]
    assert sorted(kinds) == ["graph"] * 5 + ["input"] * 5
    assert report.lock_written
    lock = read_lock(report.lock_file)
    assert [p.name for p in lock.targets["cpu-null"].programs] == names
    assert bench.reporter.lines[0] == "planned 5"
    assert bench.reporter.most_running <= 2
    assert list((bench.cache.root / "tmp").iterdir()) == []

    again = bench.build()
    assert statuses(again) == dict.fromkeys(names, "hit")
    assert recorded_pids(bench.events) == set()
    assert not again.lock_written
    assert bench.reporter.lines == ["planned 5", *(f"hit {name}" for name in names)]


def test_a_second_build_needs_no_write_access(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.build()

    def refused(_: ArtifactCache) -> None:
        raise AssertionError("prepared to write")

    monkeypatch.setattr(ArtifactCache, "prepare", refused)
    assert set(statuses(bench.build()).values()) == {"hit"}


def test_a_manifest_describes_its_compile(bench: Bench) -> None:
    outcome = bench.build().outcomes[0]
    manifest = outcome.manifest
    assert manifest is not None
    assert manifest.key == outcome.planned.key
    assert manifest.signature == outcome.planned.program.signature
    assert (manifest.program, manifest.target) == ("prefill_s32", "cpu-null")
    assert manifest.toolchain == {"compiler": "null", "version": "1"}
    assert manifest.compile_s >= 0
    assert manifest.peak_rss_bytes > 1 << 20
    log = bench.cache.log_path(outcome.planned.key)
    assert manifest.log_sha256 == file_sha256(log)
    assert f"graph key {manifest.graph_key}" in log.read_text()


def test_one_truncated_blob_is_rebuilt_alone_and_the_lock_follows(tmp_path: Path) -> None:
    # B86
    bench = Bench(tmp_path, (32, 128), (1, 2))
    first = bench.build(salt="random")
    bad = bench.blob_of(first.outcomes[1])
    bad.write_bytes(bad.read_bytes()[:-7])

    report = bench.build(salt="random")

    assert statuses(report) == {
        "prefill_s32": "hit",
        "prefill_s128": "rebuilt",
        "decode_b1": "hit",
        "decode_b2": "hit",
    }
    assert str(bad) in str(report.outcomes[1].detail)
    assert bench.compiled() == ["prefill_s128"]
    assert report.changed == ["prefill_s128"]
    assert report.lock_written
    programs = read_lock(report.lock_file).targets["cpu-null"].programs
    assert [p.blobs for p in programs] == [o.manifest.blobs for o in report.outcomes if o.manifest]
    assert bench.blob_of(report.outcomes[1]) != bad


def test_a_rebuilt_artifact_with_the_same_bytes_leaves_the_lock_alone(bench: Bench) -> None:
    bench.blob_of(bench.build().outcomes[0]).write_bytes(b"")
    report = bench.build()
    assert statuses(report) == {"prefill_s32": "rebuilt", "decode_b1": "hit"}
    assert (report.changed, report.lock_written) == ([], False)


def test_a_corrupt_input_entry_is_made_again_from_the_graph_s_artifact(bench: Bench) -> None:
    outcome = bench.build().outcomes[0]
    bench.cache.entry_path(outcome.planned.key).write_text('{"format": 1}')
    report = bench.build()
    assert statuses(report) == {"prefill_s32": "reused", "decode_b1": "hit"}
    assert "missing or unknown fields" in (report.outcomes[0].detail or "")
    assert bench.compiled() == []
    assert isinstance(bench.cache.lookup(outcome.planned.key), Hit)


def test_the_memory_that_can_be_had_is_more_than_none() -> None:
    assert available_bytes() > 1 << 20


def test_one_failing_program_leaves_the_others_and_is_tried_again(tmp_path: Path) -> None:
    # B125
    bench = Bench(tmp_path, (32, 64, 128), (1,))
    bench.build(version="0")
    lock_before = lock_path(bench.spec.path).read_bytes()

    report = bench.build(fail=("prefill_s64",))

    assert statuses(report) == {
        "prefill_s32": "compiled",
        "prefill_s64": "failed",
        "prefill_s128": "compiled",
        "decode_b1": "compiled",
    }
    [failed] = report.failed
    assert failed.detail == "exited with status 1"
    assert failed.log_path == bench.cache.log_path(failed.planned.key)
    assert "null compiler: internal error in prefill_s64" in failed.log_tail
    assert failed.log_tail.endswith("RuntimeError: cannot compile prefill_s64")
    assert bench.compiled().count("prefill_s64") == 1  # no second try of a deterministic error
    assert not report.lock_written
    assert lock_path(bench.spec.path).read_bytes() == lock_before
    assert bench.cache.lookup(failed.planned.key) == Miss()

    report = bench.build()
    assert statuses(report)["prefill_s64"] == "compiled"
    assert bench.compiled() == ["prefill_s64"]
    assert report.lock_written


def test_a_compile_killed_once_is_tried_again_and_twice_is_a_failure(bench: Bench) -> None:
    report = bench.build(kill={"prefill_s32": 1, "decode_b1": 5})
    assert statuses(report) == {"prefill_s32": "compiled", "decode_b1": "failed"}
    assert bench.compiled().count("prefill_s32") == 2
    assert bench.compiled().count("decode_b1") == 2
    assert report.failed[0].detail == "was killed by SIGKILL (out of memory?)"


def test_a_time_limit_kills_the_compiler_and_its_children(bench: Bench, workers: Workers) -> None:
    hung = ("prefill_s32",)
    report = bench.build(timeout_s=4, hang=hung, spawn=hung)
    assert statuses(report) == {"prefill_s32": "failed", "decode_b1": "compiled"}
    assert report.failed[0].detail == "ran into the time limit of 4 s"
    assert bench.compiled().count("prefill_s32") == 1
    assert workers() == []
    assert no_longer_alive(recorded_pids(bench.events))


def test_a_compile_whose_children_hold_too_much_is_killed_and_tried_once_more_alone(
    bench: Bench, workers: Workers
) -> None:
    report = bench.build(hold_mib={"prefill_s32": 400}, max_rss_bytes=300 << 20)
    assert statuses(report) == {"prefill_s32": "failed", "decode_b1": "compiled"}
    [failed] = report.failed
    held = re.fullmatch(
        r"held (0\.\d\d) GiB of memory, and the limit is 0.29 GiB", failed.detail or ""
    )
    assert held is not None
    assert 0.29 < float(held[1]) < 0.6
    assert "--max-rss-gib" in (failed.hint or "")
    assert bench.compiled().count("prefill_s32") == 2
    assert bench.reporter.lines[-2:] == ["started prefill_s32", "failed prefill_s32"]
    assert workers() == []
    assert statuses(bench.build(max_rss_bytes=300 << 20))["prefill_s32"] == "compiled"


def test_how_many_jobs_and_how_long_follow_what_the_cache_has_recorded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (32,), (1,))
    bench.build(jobs=None, sleep_s=0.5)
    first = " ".join(bench.reporter.lines)
    assert "3.00 GiB for each (assumed)" in first
    assert "begins 2 programs to compile; no record of how long one takes" in first
    assert bench.reporter.eta.remaining_s() == 0

    bench.spec = load_spec(model_file(tmp_path, (32, 64, 128), (1,)))
    report = bench.build(jobs=None)
    peak = max(o.manifest.peak_rss_bytes for o in report.outcomes if o.manifest)
    assert peak < 200 << 20
    second = " ".join(bench.reporter.lines)
    assert "(the most recorded for cpu-null, and a fifth more)" in second
    assert re.search(r"begins 2 programs to compile: ~[12] s, by what is recorded", second)


def test_a_compiler_that_dies_leaves_no_child_behind(bench: Bench) -> None:
    report = bench.build(kill={"prefill_s32": 2}, spawn=("prefill_s32",))
    assert statuses(report)["prefill_s32"] == "failed"
    assert len(recorded(bench.events, "child")) == 2
    assert no_longer_alive(recorded_pids(bench.events))


def no_longer_alive(pids: set[int]) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(_is_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _is_alive(pid: int) -> bool:
    try:
        # A zombie is dead: whoever adopted it has not looked yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_compiler_that_ends_early_without_an_error_is_a_failure(bench: Bench) -> None:
    report = bench.build(exit_0=("decode_b1",))
    assert report.failed[0].detail == "ended without a result"


def test_equal_graphs_compile_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (32, 64), (1,))
    report = bench.build(one_graph=True)
    assert sorted(statuses(report).values()) == ["compiled", "reused", "reused"]
    assert len(bench.compiled()) == 1
    assert len(recorded(bench.events, "lower")) == 3
    assert len({bench.blob_of(o) for o in report.outcomes}) == 1


def test_another_input_key_with_the_same_graph_reuses_the_artifact(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An upgrade that leaves the graphs as they are costs a lowering each, not a compile.
    first = bench.build()
    monkeypatch.setattr(key_module, "PROGRAM_VERSION", 1000)
    report = bench.build()
    assert set(statuses(report).values()) == {"reused"}
    assert bench.compiled() == []
    for before, after in zip(first.outcomes, report.outcomes, strict=True):
        assert before.planned.key != after.planned.key
        assert bench.blob_of(before) == bench.blob_of(after)
    assert report.changed == []
    assert set(statuses(bench.build()).values()) == {"hit"}


def test_a_new_toolchain_compiles_everything_again(bench: Bench) -> None:
    # B72
    bench.build()
    assert set(statuses(bench.build(version="2")).values()) == {"compiled"}
    assert set(statuses(bench.build()).values()) == {"hit"}


def test_a_bucket_of_another_list_is_reused(tmp_path: Path) -> None:
    # B68
    bench = Bench(tmp_path, (32, 128), (1,))
    bench.build()
    bench.spec = load_spec(model_file(tmp_path, (32, 64, 128), (1,)))
    assert statuses(bench.build()) == {
        "prefill_s32": "hit",
        "prefill_s64": "compiled",
        "prefill_s128": "hit",
        "decode_b1": "hit",
    }


def test_one_job_at_a_time_is_one_job_at_a_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (32, 64), (1,))
    bench.build(jobs=1)
    assert bench.reporter.most_running == 1
    assert [line for line in bench.reporter.lines if line.startswith("started")] == [
        "started prefill_s32",
        "started prefill_s64",
        "started decode_b1",
    ]


def test_an_interrupt_stops_the_compiles_and_keeps_what_is_finished(
    tmp_path: Path, workers: Workers
) -> None:
    bench = Bench(tmp_path, (32, 64, 128), (1,))
    finished = Recorder.finished

    class Interrupting(Recorder):
        def finished(self, outcome: Outcome) -> None:
            finished(self, outcome)
            raise KeyboardInterrupt

    compiler = null_spec(events=str(bench.events), hang=("prefill_s64",))
    with pytest.raises(KeyboardInterrupt):
        build(bench.spec, bench.cache, compiler, Interrupting(), PoolOptions(jobs=2))
    assert workers() == []
    assert statuses(bench.build())["prefill_s32"] == "hit"


def test_a_program_another_process_compiles_is_waited_for(bench: Bench) -> None:
    # B79: one builder per key; who comes second takes what the first one made.
    planned = plan(bench.spec, bench.cache, null_spec()).programs[1]
    bench.cache.prepare()
    code = (
        "import sys, time; from pathlib import Path\n"
        "from nxbucket.compile.cache import ArtifactCache\n"
        "with ArtifactCache(Path(sys.argv[1])).lock(sys.argv[2]):\n"
        "    print(flush=True); time.sleep(1.5)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(bench.cache.root), planned.key], stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        report = bench.build(jobs=1)
    assert statuses(report) == {"prefill_s32": "compiled", "decode_b1": "compiled"}
    assert f"waiting decode_b1 {holder.pid}" in bench.reporter.lines
    assert bench.compiled() == ["prefill_s32", "decode_b1"]


def test_a_plan_looks_and_compiles_nothing(bench: Bench) -> None:
    planned = plan(bench.spec, bench.cache, null_spec(events=str(bench.events)))
    assert [p.found for p in planned.programs] == [Miss(), Miss()]
    assert recorded_pids(bench.events) == set()
    assert not bench.cache.root.exists()


def test_a_lock_that_is_garbage_is_replaced(bench: Bench) -> None:
    path = lock_path(bench.spec.path)
    path.write_text("garbage")
    assert bench.build().lock_written
    assert "cpu-null" in read_lock(path).targets


@pytest.mark.parametrize(
    ("free_gib", "cores", "missing", "jobs"),
    [(64, 8, 3, 3), (64, 2, 9, 2), (7, 8, 9, 2), (1, 8, 9, 1)],
)
def test_the_number_of_jobs_follows_work_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, cores: int, missing: int, jobs: int
) -> None:
    monkeypatch.setattr(jobs_module, "available_bytes", lambda: free_gib << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert null_spec().memory_per_job_bytes == 3 << 30
    chosen = choose_jobs(missing, JobMemory(3 << 30, "assumed"))
    assert chosen.count == jobs
    each = f"{cores} cores, {free_gib}.00 GiB free, 3.00 GiB for each (assumed)"
    assert chosen.why == f"{jobs} job{'s' * (jobs > 1)} at a time: {each}"
    assert choose_jobs(missing, JobMemory(16 << 30, "")).count <= max(1, free_gib // 16)
    assert choose_jobs(missing, JobMemory(3 << 30, ""), wanted=7).count == 7


def test_a_job_that_is_garbage_fails_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(JobFailure) as caught:
        run_job("{}", tmp_path, tmp_path / "log", Limits(), threading.Event())
    assert caught.value.reason == "exited with status 1"
    assert caught.value.signal_number is None
    assert "KeyError" in caught.value.log_tail


def test_a_worker_whose_parent_has_gone_does_nothing(tmp_path: Path) -> None:
    job = json.dumps({"parent_pid": 1 << 30})
    with pytest.raises(JobFailure) as caught:
        run_job(job, tmp_path, tmp_path / "log", Limits(), threading.Event())
    assert "has gone" in caught.value.log_tail


def test_a_stopped_job_raises_stopped(tmp_path: Path, workers: Workers) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        run_job("{}", tmp_path, tmp_path / "log", Limits(), stop)
    assert workers() == []


def served(bench: Bench) -> Served:
    path = lock_path(bench.spec.path)
    return Served(path, bench.cache, "cpu-null", read_lock(path))


def test_what_a_compile_locks_a_server_finds(bench: Bench) -> None:
    report = bench.build()
    assert served(bench).verified_manifests() == {o.name: o.manifest for o in report.outcomes}


def test_a_server_lists_exactly_the_programs_that_are_missing_or_corrupt(tmp_path: Path) -> None:
    # B73
    bench = Bench(tmp_path, (32, 64, 128), (1,))
    by_name = {o.name: o for o in bench.build().outcomes}
    for name in ("prefill_s32", "prefill_s128"):
        bench.cache.entry_path(by_name[name].planned.key).unlink()
    bench.blob_of(by_name["prefill_s64"]).write_bytes(b"short")
    assert isinstance(bench.cache.lookup(by_name["prefill_s64"].planned.key), Corrupt)
    with pytest.raises(BindError) as caught:
        served(bench).verified_manifests()
    message = caught.value.message
    assert "prefill_s32 is missing; prefill_s64 is corrupt (" in message
    assert message.endswith("prefill_s128 is missing")
    assert "decode" not in message
    assert caught.value.hint == f"nxbucket compile {bench.spec.path}"


@pytest.mark.parametrize("march", ["native", "haswell", "x86-64-v9"])
def test_a_march_that_is_no_level_is_refused_before_anything_is_compiled(march: str) -> None:
    with pytest.raises(CompileError, match=march) as caught:
        CpuCompiler(march)
    assert "x86-64-v3" in str(caught.value.hint)


def test_the_options_of_the_null_compiler_reach_other_processes() -> None:
    [(name, value)] = NullOptions(sleep_s=1).environ().items()
    assert name == "NULL_COMPILER"
    assert json.loads(value)["sleep_s"] == 1
