"""What this host's processor can run, by x86-64 level."""

import functools
import platform
from pathlib import Path

from nxbucket.toolkit.errors import EnvironmentProblem

# The psABI's levels, in the names of /proc/cpuinfo: gitlab.com/x86-psABIs/x86-64-ABI, table 3.1.
LEVEL_FLAGS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}


@functools.cache
def host_cpu_flags() -> frozenset[str]:
    """The feature flags of /proc/cpuinfo; empty where there are none to read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def host_march() -> str:
    """The highest x86-64 level this host runs, of those we compile for."""
    if platform.machine() == "x86_64":
        for level, needed in LEVEL_FLAGS.items():
            if needed <= host_cpu_flags():
                return level
    raise EnvironmentProblem(
        f"target cpu needs an x86-64 processor with AVX2; this is {platform.machine()}",
        hint="compile on such a host, or name the level to compile for: compiler.march: x86-64-v3",
    )


def runnable_targets() -> list[str]:
    """The cpu targets whose artifacts this host can run, the best first."""
    return [f"cpu-{level}" for level, flags in LEVEL_FLAGS.items() if flags <= host_cpu_flags()]
