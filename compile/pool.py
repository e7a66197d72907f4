"""The compiles of one build on this host: a few at a time, each in a process of its own."""

import collections
import concurrent.futures
import os
import threading
import time
from dataclasses import dataclass, replace

from nxbucket.compile.cache import ArtifactCache, Corrupt, Hit, Lookup
from nxbucket.compile.compiler import CompilerSpec
from nxbucket.compile.host_memory import available_bytes
from nxbucket.compile.outcome import Outcome, PlannedProgram, Reporter
from nxbucket.compile.remote import Damaged, Pulled, pull, push
from nxbucket.compile.store import Store
from nxbucket.compile.subprocess_job import JobFailure, Stopped, run_job
from nxbucket.compile.worker import job_json

POLL_S = 0.2


@dataclass(frozen=True)
class PoolOptions:
    """`jobs`: None for as many as cores and memory carry. `remote`: asked before each compile, and
    with `push` given each artifact as soon as it is there."""

    jobs: int | None = None
    timeout_s: float | None = None
    remote: Store | None = None
    push: bool = False
    keep_going: bool = True


def default_jobs(num_missing: int, memory_per_job_bytes: int) -> int:
    """As many as cores and free memory carry, at least one."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(num_missing, cores, available_bytes() // memory_per_job_bytes))


class Pool:
    """Threads that take from `pending`; each waits for one compile at a time."""

    def __init__(
        self,
        cache: ArtifactCache,
        compiler: CompilerSpec,
        reporter: Reporter,
        options: PoolOptions,
        pending: list[PlannedProgram],
    ) -> None:
        self._cache = cache
        self._compiler = compiler
        self._reporter = reporter
        self._options = options
        self._pending = collections.deque(pending)
        self._again: collections.deque[PlannedProgram] = collections.deque()
        self._stop = threading.Event()
        self._failed = threading.Event()

    def run(self) -> list[Outcome]:
        """Every program's outcome. What died of short memory is tried once more, alone, at the end.

        KeyboardInterrupt stops the running compiles and leaves what is finished in the cache.
        """
        memory_bytes = self._compiler.memory_per_job_bytes
        jobs = self._options.jobs or default_jobs(len(self._pending), memory_bytes)
        outcomes = self._drain(jobs)
        self._pending, self._again = self._again, collections.deque()
        return [*outcomes, *self._drain(1, last=True)]

    def _drain(self, jobs: int, *, last: bool = False) -> list[Outcome]:
        threads = concurrent.futures.ThreadPoolExecutor(jobs)
        done = False
        try:
            futures = [threads.submit(self._work, last) for _ in range(jobs)]
            outcomes = [outcome for f in futures for outcome in f.result()]
            done = True
            return outcomes
        finally:
            # Ctrl-C can come while the first threads already compile and others are not made yet.
            if not done:
                self._stop.set()
            threads.shutdown()

    def _work(self, last: bool) -> list[Outcome]:
        outcomes = []
        while not self._stop.is_set():
            try:
                planned = self._pending.popleft()
            except IndexError:
                break
            try:
                outcome = self._one(planned, last)
            except Stopped:
                break
            except BaseException:
                self._stop.set()
                raise
            if outcome is None:
                continue
            self._reporter.finished(outcome)
            outcomes.append(outcome)
        return outcomes

    def _one(self, planned: PlannedProgram, last: bool) -> Outcome | None:
        """The program's outcome; None if it stands in a queue again."""
        if self._failed.is_set() and not self._options.keep_going:
            return Outcome(planned, "skipped", 0.0, None, "another program failed")
        start = time.monotonic()
        with self._cache.lock(planned.key, blocking=False) as held:
            if not held:
                # Another process compiles it. Try the others first, then look again.
                self._reporter.waiting(planned, self._cache.lock_holder(planned.key))
                self._pending.append(planned)
                self._stop.wait(POLL_S)
                return None
            found = self._cache.lookup(planned.key)
            if isinstance(found, Hit):
                return self._pushed(Outcome(planned, "hit", 0.0, found.manifest))
            if (pulled := self._pull(planned, start)) is not None:
                return pulled
            self._reporter.started(planned)
            try:
                outcome = self._compile(planned, found, start)
            except JobFailure as failure:
                if failure.worth_a_retry and not last:
                    self._again.append(planned)
                    return None
                self._failed.set()
                return _failed(planned, failure, start)
            return self._pushed(outcome)

    def _pull(self, planned: PlannedProgram, start: float) -> Outcome | None:
        store = self._options.remote
        if store is None:
            return None
        found = pull(store, self._cache, planned.key, _nobody)
        if isinstance(found, Pulled):
            return Outcome(planned, "pulled", time.monotonic() - start, found.manifest)
        if isinstance(found, Damaged):
            self._reporter.noted(f"{planned.name}: not pulled: {found.reason}")
        return None

    def _compile(self, planned: PlannedProgram, found: Lookup, start: float) -> Outcome:
        """Raises JobFailure."""
        result = self._run_job(planned)
        graph_entry = self._cache.lookup(str(result["graph_key"]))
        assert isinstance(graph_entry, Hit), graph_entry
        if graph_entry.manifest.toolchain != planned.inputs["toolchain"]:
            # The key was computed with another one: its bytes are not those that the key names.
            raise JobFailure(
                "was replaced by another version while the build ran",
                self._cache.log_path(planned.key),
                hint="nxbucket compile builds it with the one that is there now",
            )
        manifest = self._cache.link(graph_entry.manifest, planned.inputs)
        wall_s = time.monotonic() - start
        damage = found.reason if isinstance(found, Corrupt) else None
        if result["reused"]:
            return Outcome(planned, "reused", wall_s, manifest, damage)
        return Outcome(planned, "rebuilt" if damage else "compiled", wall_s, manifest, damage)

    def _run_job(self, planned: PlannedProgram) -> dict[str, object]:
        store = self._options.remote
        with self._cache.work_dir(planned.key) as work_dir:
            remote = None if store is None else store.location
            job = job_json(planned.program, self._compiler, self._cache, work_dir, remote)
            log_path = self._cache.log_path(planned.key)
            with self._cache.writing():
                return run_job(job, work_dir, log_path, self._options.timeout_s, self._stop)

    def _pushed(self, outcome: Outcome) -> Outcome:
        """The outcome, its artifact in the remote too if that is wanted.

        The first writer wins there: other bytes that were there already are taken instead of ours.
        """
        store, manifest = self._options.remote, outcome.manifest
        if store is None or not self._options.push or manifest is None:
            return outcome
        graph_entry = self._cache.lookup(manifest.graph_key)
        if isinstance(graph_entry, Hit) and graph_entry.manifest.blobs == manifest.blobs:
            push(store, self._cache, manifest.graph_key, _nobody)
        pushed = push(store, self._cache, outcome.planned.key, _nobody)
        if pushed.status != "adopted":
            return outcome
        theirs = pull(store, self._cache, outcome.planned.key, _nobody)
        if not isinstance(theirs, Pulled):
            return outcome
        return replace(outcome, status="adopted", manifest=theirs.manifest)


def _failed(planned: PlannedProgram, failure: JobFailure, start: float) -> Outcome:
    return Outcome(
        planned,
        "failed",
        time.monotonic() - start,
        manifest=None,
        detail=failure.reason,
        log_path=failure.log_path,
        log_tail=failure.log_tail,
        hint=failure.hint,
    )


def _nobody(_: int) -> None:
    """Blobs are small beside the compile: the row of the program is progress enough."""
