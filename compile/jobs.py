"""How many programs this host compiles at a time, and how much memory one is thought to take."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from nxbucket.compile.cost import peak_rss_bytes
from nxbucket.compile.host_memory import available_bytes, gib
from nxbucket.compile.manifest import Manifest

HEADROOM = 1.2
"""Over the largest peak seen: the next program may be the largest yet."""


@dataclass(frozen=True)
class JobMemory:
    """Peak of one compile; `why` says where the number is from."""

    num_bytes: int
    why: str


@dataclass(frozen=True)
class Jobs:
    """`why` is a sentence for the person who waits."""

    count: int
    why: str


def job_memory(recorded: Mapping[str, Manifest], target: str, assumed_bytes: int) -> JobMemory:
    """By the largest peak that the cache has recorded for `target`, if it has one."""
    peak = peak_rss_bytes(recorded, target)
    if not peak:
        return JobMemory(assumed_bytes, "assumed")
    return JobMemory(int(peak * HEADROOM), f"the most recorded for {target}, and a fifth more")


def choose_jobs(num_missing: int, memory: JobMemory, wanted: int | None = None) -> Jobs:
    """`wanted` if given, else as many as cores and free memory carry; at least one."""
    if wanted is not None:
        return Jobs(wanted, f"{_at_a_time(wanted)}, as asked for")
    cores, free = len(os.sched_getaffinity(0)), available_bytes()
    count = max(1, min(num_missing, cores, free // memory.num_bytes))
    has = f"{gib(free)} free" if free else "free memory unknown"
    each = f"{gib(memory.num_bytes)} for each ({memory.why})"
    return Jobs(count, f"{_at_a_time(count)}: {cores} cores, {has}, {each}")


def _at_a_time(count: int) -> str:
    return f"{count} {'job' if count == 1 else 'jobs'} at a time"
