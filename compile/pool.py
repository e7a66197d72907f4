"""The compiles of one build: a few at a time, each program once, whoever else is at it."""

import collections
import concurrent.futures
import threading
import time
from dataclasses import replace

from nxbucket.compile.cache import Corrupt, Hit, Lookup
from nxbucket.compile.eta import Eta
from nxbucket.compile.executor import NotBegun, Runner, Signals, Work
from nxbucket.compile.jobs import choose_jobs
from nxbucket.compile.local_runner import LocalRunner
from nxbucket.compile.outcome import Outcome, PlannedProgram
from nxbucket.compile.remote import Damaged, Pulled, Pusher, pull
from nxbucket.compile.sound import sound_lookup
from nxbucket.compile.subprocess_job import JobFailure, Stopped
from nxbucket.compile.transfers import Transfer
from nxbucket.toolkit.errors import StoreError

POLL_S = 0.2


def local_pool(work: Work) -> "Pool":
    """As many processes on this host as were asked for, or as it carries."""
    missing = len(work.expected_s())
    jobs = choose_jobs(missing or len(work.pending), work.memory, work.options.jobs)
    if missing:
        work.reporter.noted(f"note: {jobs.why}")
    return Pool(work, LocalRunner(work.cache, work.compiler, work.options), jobs.count)


class Pool:
    """Threads that take from `pending`; each waits for one compile at a time.

    `at_a_time`: how many of them really run, for the estimate, where not all that wait do.
    """

    def __init__(
        self, work: Work, runner: Runner, threads: int, at_a_time: int | None = None
    ) -> None:
        self._cache = work.cache
        self._reporter = work.reporter
        self._options = work.options
        self._runner = runner
        self._threads = threads
        self._eta = Eta(work.expected_s(), at_a_time or threads)
        self._pending = collections.deque(work.pending)
        self._again: collections.deque[PlannedProgram] = collections.deque()
        self._signals = Signals(threading.Event(), threading.Event())
        self._damaged: set[str] = set()

    def run(self) -> list[Outcome]:
        """Every program's outcome. What was worth a retry is tried once more, at the end.

        KeyboardInterrupt stops the running compiles and leaves what is finished in the cache.
        """
        if self._eta.is_of_something:
            self._reporter.begins(self._eta)
        outcomes = self._drain(self._threads, last=not self._options.retry)
        self._pending, self._again = self._again, collections.deque()
        threads = 1 if self._runner.retries_alone else self._threads
        return [*outcomes, *self._drain(threads, last=True)]

    def _drain(self, num_threads: int, *, last: bool) -> list[Outcome]:
        threads = concurrent.futures.ThreadPoolExecutor(num_threads)
        done = False
        try:
            futures = [threads.submit(self._work, last) for _ in range(num_threads)]
            running = set(futures)
            while running:
                # In steps: an interrupt that is no signal, such as Ray's, wakes nobody who waits.
                ended, running = concurrent.futures.wait(
                    running, POLL_S, concurrent.futures.FIRST_EXCEPTION
                )
                for future in ended:
                    future.result()  # What one raises stops the others, below.
            outcomes = [outcome for f in futures for outcome in f.result()]
            done = True
            return outcomes
        finally:
            # Ctrl-C can come while the first threads already compile and others are not made yet.
            if not done:
                self._signals.stop.set()
            threads.shutdown()

    def _work(self, last: bool) -> list[Outcome]:
        outcomes = []
        while not self._signals.stop.is_set():
            try:
                planned = self._pending.popleft()
            except IndexError:
                break
            try:
                outcome = self._one(planned, last)
                if outcome is None:
                    continue
                compiled = outcome.status in ("compiled", "rebuilt")
                self._eta.finished(planned.name, compiled=compiled)
                self._reporter.finished(outcome)
            except Stopped:
                break
            except BaseException:
                # The other threads' compiles are not waited for.
                self._signals.stop.set()
                raise
            outcomes.append(outcome)
        return outcomes

    def _one(self, planned: PlannedProgram, last: bool) -> Outcome | None:
        """The program's outcome; None if it stands in a queue again."""
        if self._signals.no_more.is_set():
            return _skipped(planned)
        start = time.monotonic()
        with self._cache.lock(planned.key, blocking=False) as held:
            if not held:
                # Another process compiles it. Try the others first, then look again.
                self._reporter.waiting(planned, self._cache.lock_holder(planned.key))
                self._pending.append(planned)
                self._signals.stop.wait(POLL_S)
                return None
            found = sound_lookup(self._cache, planned.key)
            if isinstance(found, Hit):
                self._cache.mark_used(planned.key)
                return self._pushed(Outcome(planned, "hit", 0.0, found.manifest))
            if (pulled := self._pull(planned, start)) is not None:
                return pulled
            return self._compile(planned, found, last)

    def _pull(self, planned: PlannedProgram, start: float) -> Outcome | None:
        store = self._options.remote
        if store is None:
            return None
        found = pull(store, self._cache, planned.key)
        if isinstance(found, Pulled):
            return Outcome(planned, "pulled", time.monotonic() - start, found.manifest)
        if isinstance(found, Damaged):
            self._damaged.add(planned.key)
            self._reporter.noted(f"{planned.name}: not pulled: {found.reason}")
        return None

    def _compile(self, planned: PlannedProgram, found: Lookup, last: bool) -> Outcome | None:
        start = time.monotonic()

        def begun(place: str | None) -> None:
            nonlocal start
            start = time.monotonic()  # A remote job may have waited for hours.
            self._eta.started(planned.name)
            self._reporter.started(planned, place)

        try:
            made = self._runner.run(planned, begun, self._signals)
        except NotBegun:
            return _skipped(planned)
        except JobFailure as failure:
            if failure.worth_a_retry and not last:
                once_more = f"the compiler {failure.reason}; it is tried once more, later"
                self._reporter.noted(f"{planned.name}: {once_more}")
                self._again.append(planned)
                return None
            if not self._options.keep_going:
                self._signals.no_more.set()
            return self._failure(planned, failure, start)
        wall_s = time.monotonic() - start
        damage = found.reason if isinstance(found, Corrupt) else None
        outcome = Outcome(planned, made.status, wall_s, made.manifest, damage)
        if damage and made.status == "compiled":
            outcome = replace(outcome, status="rebuilt")
        return outcome if self._runner.pushes else self._pushed(outcome)

    def _pushed(self, outcome: Outcome) -> Outcome:
        """The outcome, its artifact in the remote too if that is wanted.

        The first writer wins there: other bytes that were there already are taken instead of ours.
        A store that says no costs this push, and no compile that runs.
        """
        try:
            return self._push(outcome)
        except StoreError as err:
            if not self._options.keep_going:
                self._signals.no_more.set()
            return replace(outcome, status="unpushed", detail=err.message, hint=err.hint)

    def _push(self, outcome: Outcome) -> Outcome:
        store, manifest = self._options.remote, outcome.manifest
        if store is None or not self._options.push or manifest is None:
            return outcome
        transfer = Transfer(say=self._reporter.noted, stop=self._signals.stop)
        pusher = Pusher(store, self._cache, transfer)
        # What was found damaged there is written over, whatever it looks like from outside.
        anew = outcome.planned.key in self._damaged
        (pushed,) = pusher.push_of_one_graph([manifest], anew=anew)
        if pushed.status != "adopted":
            return outcome
        theirs = pull(store, self._cache, outcome.planned.key)
        if not isinstance(theirs, Pulled):
            what = theirs.reason if isinstance(theirs, Damaged) else "it has just gone"
            raise StoreError(
                f"{outcome.name}: {store.location} has another artifact, which will not do: {what}",
                hint="remove that object from the store, and run the same command again",
            )
        return replace(outcome, status="adopted", manifest=theirs.manifest)

    def _failure(self, planned: PlannedProgram, failure: JobFailure, start: float) -> Outcome:
        hlo_path = self._cache.failed_hlo_path(planned.key)
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
            retryable=failure.worth_a_retry,
        )


def _skipped(planned: PlannedProgram) -> Outcome:
    return Outcome(planned, "skipped", 0.0, None, "another program failed")
