"""One compile in a process of its own: `python -m nxbucket.compile.worker JOB.json RESULT.json`.

A compiler that crashes, leaks or hangs takes nothing else with it. The caller holds the input key's
lock; this process holds the graph key's while it compiles, so that equal graphs compile once.
"""

import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.canonical import digest_of, file_sha256, sha256_hex
from nxbucket.compile.compiler import CompilerSpec
from nxbucket.compile.failure import Failure
from nxbucket.compile.key import graph_key_inputs
from nxbucket.compile.leases import publishing
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.parent_death import die_with_parent
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.remote import Pulled, pull
from nxbucket.compile.sound import sound_lookup
from nxbucket.compile.store import Store, open_store
from nxbucket.toolkit.architecture import Architecture
from nxbucket.toolkit.errors import NxbucketError


def job_json(
    program: BucketProgram,
    compiler: CompilerSpec,
    cache: ArtifactCache,
    work_dir: Path,
    remote: str | None = None,
) -> str:
    return json.dumps(
        {
            "remote": remote,
            "program": asdict(program),
            "compiler": asdict(compiler),
            "cache_dir": str(cache.root),
            "work_dir": str(work_dir),
            "parent_pid": os.getpid(),
        }
    )


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    # A compile must not outlive the command that asked for it, not even after kill -9.
    die_with_parent()
    if os.getppid() != job["parent_pid"]:
        sys.exit("the command that asked for this compile has gone")
    try:
        manifest, reused = compile_job(
            program_from_json(job["program"]),
            CompilerSpec(**job["compiler"]),
            ArtifactCache(Path(job["cache_dir"])),
            Path(job["work_dir"]),
            None if job["remote"] is None else open_store(job["remote"]),
        )
    except NxbucketError as error:
        # Known: the sentence says more than a traceback in the log would.
        failure = Failure.of(error)
        print(f"error: the compiler {failure.reason}", flush=True)
        Path(result_file).write_text(json.dumps(failure.as_json()))
        sys.exit(1)
    result = {"graph_key": manifest.key, "reused": reused}
    Path(result_file).write_text(json.dumps(result))


def compile_job(
    program: BucketProgram,
    compiler_spec: CompilerSpec,
    cache: ArtifactCache,
    work_dir: Path,
    remote: Store | None = None,
) -> tuple[Manifest, bool]:
    """Lower; take the graph's artifact from the cache or the remote, or compile and publish it.

    Returns the graph entry and whether it was there already.
    """
    compiler = compiler_spec.create()
    toolchain = compiler.toolchain()
    start = time.monotonic()
    lowered = compiler.lower(program)
    lower_s = time.monotonic() - start
    inputs = graph_key_inputs(sha256_hex(lowered.graph), toolchain)
    key = digest_of(inputs)
    print(f"{program.name}: lowered in {lower_s:.1f} s, graph key {key}", flush=True)
    with cache.lock(key):
        found = sound_lookup(cache, key)
        if isinstance(found, Hit):
            cache.mark_used(key)  # No gc takes it before our caller has looked.
            return found.manifest, True
        if remote is not None:
            pulled = pull(remote, cache, key)
            if isinstance(pulled, Pulled):
                return pulled.manifest, True
        start = time.monotonic()
        files = compiler.compile(lowered, work_dir)
        compile_s = time.monotonic() - start
        print(f"{program.name}: compiled in {compile_s:.1f} s", flush=True)
        sys.stdout.flush()
        with publishing(cache.root):
            blobs = tuple(cache.add_blob(path, role) for role, path in files.items())
            manifest = Manifest(
                key_kind="graph",
                program=program.name,
                target=toolchain.target,
                inputs=inputs,
                graph_key=key,
                signature=program.signature,
                blobs=blobs,
                toolchain=dict(toolchain.versions),
                lower_s=round(lower_s, 3),
                compile_s=round(compile_s, 3),
                peak_rss_bytes=_peak_rss_bytes(),
                log_sha256=_log_sha256(),
            )
            cache.publish(manifest)
    return manifest, False


def _peak_rss_bytes() -> int:
    """Of this process or of one of its children, whichever was larger.

    getrusage's own figure outlives exec: a process starts with the peak of the one that forked it.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    status = Path("/proc/self/status").read_text().splitlines()
    own = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return max(own, children) * 1024


def _log_sha256() -> str:
    """Digest of this process's log so far: its standard output is the job's log file."""
    path = Path("/proc/self/fd/1").resolve()
    return file_sha256(path) if path.is_file() else sha256_hex(b"")


def program_from_json(raw: dict[str, Any]) -> BucketProgram:
    return BucketProgram(**{**raw, "architecture": Architecture.from_json(raw["architecture"])})


if __name__ == "__main__":
    main(*sys.argv[1:])
