"""From a model file to artifacts in the cache and a lock file: hit, or compile and publish."""

import collections
import concurrent.futures
import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from nxbucket.compile.cache import ArtifactCache, Corrupt, Hit, LockHolder, Lookup
from nxbucket.compile.canonical import digest_of
from nxbucket.compile.compiler import HLO_FILE, CompilerSpec
from nxbucket.compile.host_memory import available_bytes
from nxbucket.compile.key import key_inputs
from nxbucket.compile.lockfile import (
    Lock,
    changed_programs,
    lock_path,
    locked_program,
    make_lock,
    read_lock,
    write_lock,
)
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.plan import plan_programs
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.sound import sound_lookup
from nxbucket.compile.subprocess_job import JobFailure, Stopped, run_job
from nxbucket.compile.targets import neuron_target
from nxbucket.compile.toolchain import Toolchain
from nxbucket.compile.worker import job_json
from nxbucket.toolkit.errors import EnvironmentProblem, LockError
from nxbucket.toolkit.spec import DeploySpec

POLL_S = 0.2


@dataclass(frozen=True)
class PlannedProgram:
    """A program with its input key and what the cache holds for it."""

    program: BucketProgram
    inputs: dict[str, Any]
    key: str
    found: Lookup

    @property
    def name(self) -> str:
        return self.program.name


@dataclass(frozen=True)
class Outcome:
    """How one program came out.

    `reused`: another entry had the same graph's artifact. `rebuilt`: the artifact was corrupt. For
    both, `detail` says what was, if anything. `failed`: it is the reason, `hint` the mend where one
    is known; read on in `log_path`. `hlo_path`: what the compiler was given, if it was an HLO.
    """

    planned: PlannedProgram
    status: Literal["hit", "compiled", "rebuilt", "reused", "failed"]
    wall_s: float
    manifest: Manifest | None
    detail: str | None = None
    log_path: Path | None = None
    hlo_path: Path | None = None
    log_tail: str = ""
    hint: str | None = None

    @property
    def name(self) -> str:
        return self.planned.name


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, from 1: of the programs, those that one of `count` jobs compiles."""

    index: int
    count: int

    def __contains__(self, planned: PlannedProgram) -> bool:
        # By key and not by place: a list that grows by one entry moves no other program.
        return int(planned.key[:8], 16) % self.count == self.index - 1


@dataclass(frozen=True)
class BuildReport:
    """`others`: programs of other shards that the cache does not have yet."""

    toolchain: Toolchain
    outcomes: list[Outcome]
    lock_file: Path
    lock_written: bool
    changed: list[str]
    """Programs whose bytes are not those the previous lock named."""
    previous_commit: str | None = None
    """The commit of the hub id that the previous lock named."""
    others: tuple[str, ...] = ()

    @property
    def failed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status == "failed"]


class Reporter(Protocol):
    """Told what happens, from several threads."""

    def planned(self, total: int) -> None: ...
    def started(self, planned: PlannedProgram) -> None: ...
    def waiting(self, planned: PlannedProgram, holder: LockHolder | None) -> None: ...
    def finished(self, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Plan:
    """`lacks`: why nothing can be compiled here; the toolchain is the lock's then."""

    toolchain: Toolchain
    programs: list[PlannedProgram]
    lacks: EnvironmentProblem | None = None


def plan(spec: DeploySpec, cache: ArtifactCache, compiler: CompilerSpec) -> Plan:
    """Every program of `spec`, looked up. No torch.

    Raises EnvironmentProblem if there is neither the compiler nor a lock that says which it was.
    """
    lacks = None
    try:
        toolchain = compiler.create().toolchain()
    except EnvironmentProblem as err:
        locked = _locked_toolchain(spec, cache, compiler)
        if locked is None:
            raise
        toolchain, lacks = locked, err
    planned = []
    for program in plan_programs(spec):
        inputs = key_inputs(program, toolchain)
        key = digest_of(inputs)
        planned.append(PlannedProgram(program, inputs, key, sound_lookup(cache, key)))
    return Plan(toolchain, planned, lacks)


def _locked_toolchain(
    spec: DeploySpec, cache: ArtifactCache, compiler: CompilerSpec
) -> Toolchain | None:
    """What made the artifacts that the lock names for a Neuron target, with these very options."""
    lock = _previous_lock(lock_path(spec.path)) if compiler.is_neuron else None
    if lock is None or lock.spec.get("compiler") != spec.resolved()["compiler"]:
        return None
    target = neuron_target(spec.target, compiler.options["lnc"])
    locked = lock.targets.get(target)
    if locked is None:
        return None
    # The lock does not say what lowered the graphs, its entries do: all were planned together.
    for program in locked.programs:
        if isinstance(entry := cache.entry(program.key), Manifest):
            return Toolchain(target, locked.toolchain, entry.inputs.get("lowering", {}))
    return Toolchain(target, locked.toolchain)


def build(
    spec: DeploySpec,
    cache: ArtifactCache,
    compiler: CompilerSpec,
    reporter: Reporter,
    *,
    jobs: int | None = None,
    timeout_s: float | None = None,
    shard: Shard | None = None,
) -> BuildReport:
    """Compile what `cache` lacks, `jobs` at a time, and write the lock once everything is there.

    A failed program does not stop the others, and is not remembered: the next run tries it again.
    KeyboardInterrupt stops the running compiles and leaves what is finished in the cache. Raises
    EnvironmentProblem if something is to be compiled, and there is nothing to do it with.
    """
    planned = plan(spec, cache, compiler)
    hits = [_hit(p, p.found) for p in planned.programs if isinstance(p.found, Hit)]
    outcomes = {outcome.name: outcome for outcome in hits}
    absent = [p for p in planned.programs if p.name not in outcomes]
    others = tuple(p.name for p in absent if shard is not None and p not in shard)
    programs = [p for p in planned.programs if p.name not in others]
    if planned.lacks is not None and len(programs) > len(hits):
        raise planned.lacks
    reporter.planned(len(programs))
    for outcome in outcomes.values():
        reporter.finished(outcome)
    missing = [p for p in programs if p.name not in outcomes]
    if missing:
        cache.prepare()
        run = _Run(cache, compiler, reporter, timeout_s, collections.deque(missing))
        for outcome in run.all(jobs or default_jobs(len(missing), compiler.memory_per_job_bytes)):
            outcomes[outcome.name] = outcome
    return _finish(spec, planned.toolchain, [outcomes[p.name] for p in programs], others)


def default_jobs(num_missing: int, memory_per_job_bytes: int) -> int:
    """As many as cores and free memory carry, at least one."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(num_missing, cores, available_bytes() // memory_per_job_bytes))


@dataclass
class _Run:
    """The compiles of one build, shared by its threads. Each thread takes from `pending`."""

    cache: ArtifactCache
    compiler: CompilerSpec
    reporter: Reporter
    timeout_s: float | None
    pending: collections.deque[PlannedProgram]

    def __post_init__(self) -> None:
        self.stop = threading.Event()

    def all(self, jobs: int) -> list[Outcome]:
        threads = concurrent.futures.ThreadPoolExecutor(jobs)
        try:
            futures = [threads.submit(self._work) for _ in range(jobs)]
            return [outcome for f in futures for outcome in f.result()]
        finally:
            # Ctrl-C can come while the first threads already compile and others are not made yet.
            self.stop.set()
            threads.shutdown()

    def _work(self) -> list[Outcome]:
        outcomes = []
        while not self.stop.is_set():
            try:
                planned = self.pending.popleft()
            except IndexError:
                break
            try:
                outcome = self._one(planned)
            except Stopped:
                break
            except BaseException:
                self.stop.set()
                raise
            if outcome is None:
                # Another process compiles it. Try the others first, then look again.
                self.pending.append(planned)
                self.stop.wait(POLL_S)
                continue
            self.reporter.finished(outcome)
            outcomes.append(outcome)
        return outcomes

    def _one(self, planned: PlannedProgram) -> Outcome | None:
        """The program's outcome, or None if another process holds its lock."""
        with self.cache.lock(planned.key, blocking=False) as held:
            if not held:
                self.reporter.waiting(planned, self.cache.lock_holder(planned.key))
                return None
            found = sound_lookup(self.cache, planned.key)
            if isinstance(found, Hit):
                return _hit(planned, found)
            self.reporter.started(planned)
            return self._compile(planned, found)

    def _compile(self, planned: PlannedProgram, found: Lookup) -> Outcome:
        start = time.monotonic()
        try:
            result = self._run_with_one_retry(planned)
        except JobFailure as failure:
            hlo_path = self.cache.failed_hlo_path(planned.key)
            return Outcome(
                planned,
                "failed",
                time.monotonic() - start,
                manifest=None,
                detail=failure.reason,
                log_path=failure.log_path,
                hlo_path=hlo_path if hlo_path.is_file() else None,
                log_tail=failure.log_tail,
                hint=failure.hint,
            )
        graph_entry = self.cache.lookup(str(result["graph_key"]))
        assert isinstance(graph_entry, Hit), graph_entry
        wall_s = time.monotonic() - start
        if graph_entry.manifest.toolchain != planned.inputs["toolchain"]:
            # The key was computed with another one: its bytes are not those that the key names.
            return Outcome(
                planned,
                "failed",
                wall_s,
                manifest=None,
                detail="was replaced by another version while the build ran",
                log_path=self.cache.log_path(planned.key),
                hint="nxbucket compile builds it with the one that is there now",
            )
        manifest = self.cache.link(graph_entry.manifest, planned.inputs)
        damage = found.reason if isinstance(found, Corrupt) else None
        if result["reused"]:
            return Outcome(planned, "reused", wall_s, manifest, damage)
        return Outcome(planned, "rebuilt" if damage else "compiled", wall_s, manifest, damage)

    def _run_with_one_retry(self, planned: PlannedProgram) -> dict[str, object]:
        """Again once after what may go through now; never after an error of the program's."""
        try:
            return self._run(planned)
        except JobFailure as failure:
            if not failure.worth_a_retry:
                raise
            return self._run(planned)

    def _run(self, planned: PlannedProgram) -> dict[str, object]:
        with self.cache.work_dir(planned.key) as work_dir:
            job = job_json(planned.program, self.compiler, self.cache, work_dir)
            log_path = self.cache.log_path(planned.key)
            hlo_path = self.cache.failed_hlo_path(planned.key)
            with self.cache.writing():
                hlo_path.unlink(missing_ok=True)
                try:
                    return run_job(job, work_dir, log_path, self.timeout_s, self.stop)
                except JobFailure:
                    with contextlib.suppress(OSError):  # it may have failed before there was one
                        (work_dir / HLO_FILE).replace(hlo_path)
                    raise


def _hit(planned: PlannedProgram, found: Hit) -> Outcome:
    return Outcome(planned, "hit", 0.0, found.manifest)


def _finish(
    spec: DeploySpec, toolchain: Toolchain, outcomes: list[Outcome], others: tuple[str, ...]
) -> BuildReport:
    path = lock_path(spec.path)
    programs = [
        locked_program(o.planned.program, o.planned.key, o.manifest) for o in outcomes if o.manifest
    ]
    if others or len(programs) < len(outcomes):
        return BuildReport(toolchain, outcomes, path, lock_written=False, changed=[], others=others)
    previous = _previous_lock(path)
    lock = make_lock(spec, toolchain.target, toolchain.versions, programs, previous)
    return BuildReport(
        toolchain,
        outcomes,
        path,
        lock_written=write_lock(lock, path),
        changed=changed_programs(previous, lock, toolchain.target),
        previous_commit=previous.model_commit if previous is not None else None,
    )


def _previous_lock(path: Path) -> Lock | None:
    """None also for a lock that cannot be read: this run writes a good one."""
    try:
        return read_lock(path)
    except LockError:
        return None
