"""What a node of a Ray cluster does with one program: compile it, push it, and say how it came out.

Request and answer are plain values, so that a node with another release can still say so. Ray is
not imported here: it is what calls this.
"""

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from nxbucket.compile.cache import ArtifactCache, LockHolder, choose_cache
from nxbucket.compile.canonical import digest_of
from nxbucket.compile.compiler import CompilerSpec
from nxbucket.compile.eta import Eta
from nxbucket.compile.executor import PoolOptions, Work
from nxbucket.compile.explain import differences, show
from nxbucket.compile.failure import Failure
from nxbucket.compile.jobs import JobMemory
from nxbucket.compile.key import key_inputs
from nxbucket.compile.leases import lease
from nxbucket.compile.local_runner import LocalRunner
from nxbucket.compile.outcome import Outcome, PlannedProgram
from nxbucket.compile.pool import Pool
from nxbucket.compile.store import open_store
from nxbucket.compile.worker import program_from_json
from nxbucket.toolkit.errors import NxbucketError

MAX_LOG_BYTES = 1 << 20
"""Of the end of a log, which travels to the driver."""


def request_json(planned: PlannedProgram, compiler: CompilerSpec, options: PoolOptions) -> str:
    assert options.remote is not None
    return json.dumps(
        {
            "program": asdict(planned.program),
            "inputs": planned.inputs,
            "compiler": asdict(compiler),
            "remote": options.remote.location,
            "timeout_s": options.timeout_s,
            "max_rss_bytes": options.max_rss_bytes,
        }
    )


def compile_on_node(request: str) -> Iterator[dict[str, Any]]:
    """First {"place"}: it has begun. Then {"status", "graph_key", "log"}, or {"failure", "log"}."""
    place = socket.gethostname()
    yield {"place": place}
    try:
        answer = _answer(json.loads(request), place)
    except NxbucketError as error:
        answer = {**Failure.of(error).as_json(), "log": ""}
    yield answer


def _answer(request: dict[str, Any], place: str) -> dict[str, Any]:
    program = program_from_json(request["program"])
    compiler = CompilerSpec(**request["compiler"])
    inputs = key_inputs(program, compiler.create().toolchain())
    if found := differences(inputs, request["inputs"]):
        named = "; ".join(
            f"{d.name} is {show(d.there)} there, {show(d.wanted)} here" for d in found
        )
        failure = Failure(
            f"on {place} is not the one of this host, and would give other bytes: {named}",
            "install the same releases of nxbucket and of the compiler on every node and on this "
            "host",
        )
        return {**failure.as_json(), "log": ""}
    # Not the cache itself: where node and driver share a host, the driver holds the locks there.
    cache = ArtifactCache(choose_cache(None).root / "ray")
    cache.prepare()
    key = digest_of(inputs)
    planned = PlannedProgram(program, inputs, key, cache.lookup(key))
    options = PoolOptions(
        timeout_s=request["timeout_s"],
        max_rss_bytes=request["max_rss_bytes"],
        remote=open_store(request["remote"]),
        push=True,
        retry=False,  # The driver's to decide: another node may do better.
    )
    work = Work(cache, compiler, _Silent(), options, [planned], JobMemory(0, ""))
    with lease(cache.root, [key]):
        [outcome] = Pool(work, LocalRunner(cache, compiler, options), 1).run()
    log = "" if outcome.status in ("hit", "pulled") else _end_of_log(cache, key)
    if outcome.manifest is None:
        failure = Failure(f"{outcome.detail} (on {place})", outcome.hint, outcome.retryable)
        return {**failure.as_json(), "log": log}
    return {"status": outcome.status, "graph_key": outcome.manifest.graph_key, "log": log}


def _end_of_log(cache: ArtifactCache, key: str) -> str:
    try:
        return cache.log_path(key).read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")
    except OSError:
        return ""


class _Silent:
    """The driver reports."""

    def planned(self, programs: Sequence[PlannedProgram]) -> None:
        pass

    def begins(self, eta: Eta) -> None:
        pass

    def started(self, planned: PlannedProgram, place: str | None = None) -> None:
        pass

    def waiting(self, planned: PlannedProgram, holder: LockHolder | None) -> None:
        pass

    def finished(self, outcome: Outcome) -> None:
        pass

    def noted(self, sentence: str) -> None:
        pass
