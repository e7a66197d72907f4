"""Compiles on a Ray cluster: each program a task, which Ray places by the cores and the memory that
it asks for.

The shared store is the meeting point. A node compiles in a cache of its own and pushes; this host
then pulls, verified, into the build's cache. Importing this imports Ray.
"""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxbucket.compile.executor import Executor, Made, MakeExecutor, NotBegun, Signals, Work
from nxbucket.compile.failure import Failure
from nxbucket.compile.host_memory import gib
from nxbucket.compile.outcome import Outcome, PlannedProgram
from nxbucket.compile.pool import Pool
from nxbucket.compile.ray_node import compile_on_node, request_json
from nxbucket.compile.remote import Damaged, Pulled, pull
from nxbucket.compile.subprocess_job import JobFailure, Stopped
from nxbucket.toolkit.errors import EnvironmentProblem, UsageError

try:
    import ray
    from ray.exceptions import (
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayError,
        WorkerCrashedError,
    )
except ImportError as err:
    raise EnvironmentProblem(
        f"--executor ray needs Ray: {err}", hint="pip install 'nxbucket[ray]', on every node"
    ) from err

POLL_S = 0.2
CANCEL_S = 10.0
"""How long a cancelled task has for killing its compiler and tidying up."""
CONNECT_S = 10.0
LOST = (WorkerCrashedError, NodeDiedError, ObjectLostError, OutOfMemoryError)
"""Not the program's fault: another node may do better."""


@dataclass(frozen=True)
class RayOptions:
    """`address`: None for RAY_ADDRESS, or the cluster that this host is part of."""

    address: str | None = None
    cpus_per_job: float = 1.0


def ray_executor(options: RayOptions) -> MakeExecutor:
    def make(work: Work) -> Executor:
        return RayExecutor(work, options)

    return make


class RayExecutor:
    def __init__(self, work: Work, options: RayOptions) -> None:
        assert work.options.remote is not None
        self._work = work
        self._options = options

    def run(self) -> list[Outcome]:
        work, cpus = self._work, self._options.cpus_per_job
        with _connected(self._options.address):
            slots, nodes = _slots(cpus, work.memory.num_bytes)
            each = f"{cpus:g} CPU and {gib(work.memory.num_bytes)} for each ({work.memory.why})"
            work.reporter.noted(f"note: {slots} jobs at a time on {nodes} Ray nodes: {each}")
            if slots == 0:
                work.reporter.noted(
                    "note: no node has that much; an autoscaler may add one, and nothing is "
                    "compiled until then (--ray-cpus-per-job)"
                )
            # All are submitted at once: the queue is Ray's.
            tasks = work.options.jobs or len(work.pending)
            return Pool(work, RayRunner(work, cpus), tasks, min(tasks, max(1, slots))).run()


class RayRunner:
    pushes = True
    retries_alone = False  # Each has the memory that it asked for to itself anyway.

    def __init__(self, work: Work, cpus_per_job: float) -> None:
        self._work = work
        self._task: Any = ray.remote(
            num_returns="streaming",
            max_retries=0,
            num_cpus=cpus_per_job,
            memory=work.memory.num_bytes,
            scheduling_strategy="SPREAD",
        )(compile_on_node)

    def run(
        self, planned: PlannedProgram, begun: Callable[[str | None], None], signals: Signals
    ) -> Made:
        work = self._work
        log_path = work.cache.log_path(planned.key)
        with work.cache.writing():
            log_path.unlink(missing_ok=True)  # An older one would be shown as this failure's.
        request = request_json(planned, work.compiler, work.options)
        answers = self._task.options(name=f"nxbucket {planned.name}").remote(request)
        try:
            place = _next(answers, log_path, signals, begun=False)["place"]
            begun(place)
            answer = _next(answers, log_path, signals, begun=True)
        except (Stopped, NotBegun):
            _cancel(answers)
            raise
        with work.cache.writing():
            log_path.write_text(answer["log"])
        if "failure" in answer:
            failure = Failure(**answer["failure"])
            raise JobFailure(
                failure.reason, log_path, hint=failure.hint, retryable=failure.retryable
            )
        return self._fetched(planned, answer, place, log_path)

    def _fetched(
        self, planned: PlannedProgram, answer: dict[str, Any], place: str, log_path: Path
    ) -> Made:
        store, cache = self._work.options.remote, self._work.cache
        assert store is not None
        found = pull(store, cache, planned.key)
        if not isinstance(found, Pulled):
            what = found.reason if isinstance(found, Damaged) else f"{store.location} has no entry"
            raise JobFailure(
                f"is done on {place}, but what it pushed is not to be had from here: {what}",
                log_path,
                hint=f"is {store.location} the same place on every node and on this host?",
            )
        with cache.lock(answer["graph_key"]):
            pull(store, cache, answer["graph_key"])
        status = answer["status"]
        if status == "adopted":
            return Made(found.manifest, "adopted")
        if status == "reused":
            return Made(found.manifest, "reused")
        # What a node had already, or found in the remote, was compiled by nobody now.
        return Made(found.manifest, "pulled" if status in ("hit", "pulled") else "compiled")


def _next(answers: Any, log_path: Path, signals: Signals, *, begun: bool) -> dict[str, Any]:
    """The task's next answer. Raises JobFailure, Stopped or NotBegun."""
    ready: list[Any] = []
    while not ready:
        if signals.stop.is_set():
            raise Stopped
        if not begun and signals.no_more.is_set():
            raise NotBegun
        ready, _ = ray.wait([answers], timeout=POLL_S)
    try:
        answer: dict[str, Any] = ray.get(next(answers))
    except LOST as err:
        raise JobFailure(
            f"was lost with its node or worker ({type(err).__name__}: {_first_line(err)})",
            log_path,
            retryable=True,
        ) from err
    except (RayError, StopIteration) as err:
        raise JobFailure(
            f"could not be run on a node: {type(err).__name__}: {_last_line(err)}",
            log_path,
            hint="is this nxbucket installed on every node, and in the same place in sys.path?",
        ) from err
    return answer


def _cancel(answers: Any) -> None:
    """Have the node kill its compiler, and wait until it has, for a while."""
    with contextlib.suppress(RayError):
        ray.cancel(answers, force=False)
        if not ray.wait([answers.completed()], timeout=CANCEL_S)[0]:
            ray.cancel(answers, force=True)


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if where.startswith("ray://"):
        raise UsageError(
            f"{where} is the address of a Ray Client server, through which no results stream",
            hint="run this on a host of the cluster, or give HOST:6379",
        )
    # Ray tells of lost nodes on stdout, which is for data.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            _check_listening(where)
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as err:
            raise EnvironmentProblem(
                f"no Ray cluster at {where}: {_first_line(err)}",
                hint="ray start --head, then ray start --address=HOST:6379 on the other nodes; or "
                "give --ray-address",
            ) from err
        try:
            yield
        finally:
            ray.shutdown()


def _check_listening(where: str) -> None:
    """Raises OSError. Ray itself would try for minutes."""
    host, colon, port = where.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _slots(cpus_per_job: float, memory_bytes: int) -> tuple[int, int]:
    """How many jobs the cluster carries at a time, and its living nodes."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    carried = (
        min(r.get("CPU", 0) // cpus_per_job, r.get("memory", 0) // memory_bytes) for r in alive
    )
    return int(sum(carried)), len(alive)


def _first_line(err: BaseException) -> str:
    return (str(err).strip().splitlines() or [""])[0]


def _last_line(err: BaseException) -> str:
    """Of a task's error: its traceback comes first."""
    return (str(err).strip().splitlines() or [""])[-1]
