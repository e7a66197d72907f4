"""What a build hands to whatever compiles its programs, and what it gets back."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.compiler import CompilerSpec
from nxbucket.compile.cost import CompileTimes
from nxbucket.compile.jobs import JobMemory
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.outcome import Outcome, PlannedProgram, Reporter
from nxbucket.compile.store import Store
from nxbucket.compile.subprocess_job import Limits


@dataclass(frozen=True)
class PoolOptions:
    """`jobs`: None for as many as cores and memory carry. `remote`: asked before each compile, and
    with `push` given each artifact as soon as it is there. `retry`: once, what is worth it."""

    jobs: int | None = None
    timeout_s: float | None = None
    remote: Store | None = None
    push: bool = False
    keep_going: bool = True
    max_rss_bytes: int | None = None
    retry: bool = True

    @property
    def limits(self) -> Limits:
        return Limits(self.timeout_s, self.max_rss_bytes)


@dataclass(frozen=True)
class Work:
    """The programs that a build lacks or has to push, and what is known of time and memory."""

    cache: ArtifactCache
    compiler: CompilerSpec
    reporter: Reporter
    options: PoolOptions
    pending: list[PlannedProgram]
    memory: JobMemory
    times: CompileTimes | None = None

    def expected_s(self) -> dict[str, float | None]:
        times = self.times
        missing = [p for p in self.pending if not isinstance(p.found, Hit)]
        return {p.name: times.estimate_s(p.program) if times else None for p in missing}


class Executor(Protocol):
    """Compiles all of a Work."""

    def run(self) -> list[Outcome]:
        """Every program's outcome; a failure is one. KeyboardInterrupt stops what runs."""


MakeExecutor = Callable[[Work], Executor]


@dataclass(frozen=True)
class Made:
    """A program's artifact, under its key in the build's cache."""

    manifest: Manifest
    status: Literal["compiled", "reused", "pulled", "adopted"]


@dataclass(frozen=True)
class Signals:
    """To a job, from the pool it is of: `stop` ends it, `no_more` only what has not begun."""

    stop: threading.Event
    no_more: threading.Event


class NotBegun(Exception):
    """The job was still waiting for its turn when there was to be no more."""


class Runner(Protocol):
    """Where a pool's compiles run. `pushes`: what it made is in the remote already.

    `retries_alone`: whether a second try should have this runner for itself.
    """

    pushes: bool
    retries_alone: bool

    def run(
        self, planned: PlannedProgram, begun: Callable[[str | None], None], signals: Signals
    ) -> Made:
        """Compile one program; `begun` is told the place. Called from several threads, each with
        the lock of the program's key held. Raises JobFailure, Stopped or NotBegun."""
