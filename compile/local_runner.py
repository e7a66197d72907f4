"""Compiles on this host, each in a process of its own."""

import contextlib
import threading
from collections.abc import Callable

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.compiler import HLO_FILE, CompilerSpec
from nxbucket.compile.executor import Made, PoolOptions, Signals
from nxbucket.compile.outcome import PlannedProgram
from nxbucket.compile.subprocess_job import JobFailure, run_job
from nxbucket.compile.worker import job_json


class LocalRunner:
    pushes = False
    retries_alone = True  # What died of short memory has most of it then.

    def __init__(self, cache: ArtifactCache, compiler: CompilerSpec, options: PoolOptions) -> None:
        self._cache = cache
        self._compiler = compiler
        self._options = options

    def run(
        self, planned: PlannedProgram, begun: Callable[[str | None], None], signals: Signals
    ) -> Made:
        begun(None)
        result = self._run_job(planned, signals.stop)
        graph_entry = self._cache.lookup(str(result["graph_key"]))
        if not isinstance(graph_entry, Hit):
            raise JobFailure(
                "was done, and then its artifact was taken away by another process",
                self._cache.log_path(planned.key),
                retryable=True,
            )
        if graph_entry.manifest.toolchain != planned.inputs["toolchain"]:
            # The key was computed with another one: its bytes are not those that the key names.
            raise JobFailure(
                "was replaced by another version while the build ran",
                self._cache.log_path(planned.key),
                hint="nxbucket compile builds it with the one that is there now",
            )
        manifest = self._cache.link(graph_entry.manifest, planned.inputs)
        return Made(manifest, "reused" if result["reused"] else "compiled")

    def _run_job(self, planned: PlannedProgram, stop: threading.Event) -> dict[str, object]:
        store = self._options.remote
        with self._cache.work_dir(planned.key) as work_dir:
            remote = None if store is None else store.location
            job = job_json(planned.program, self._compiler, self._cache, work_dir, remote)
            log_path = self._cache.log_path(planned.key)
            hlo_path = self._cache.failed_hlo_path(planned.key)
            with self._cache.writing():
                hlo_path.unlink(missing_ok=True)
                try:
                    return run_job(job, work_dir, log_path, self._options.limits, stop)
                except JobFailure:
                    with contextlib.suppress(OSError):  # it may have failed before there was one
                        (work_dir / HLO_FILE).replace(hlo_path)
                    raise
