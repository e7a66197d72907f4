"""Whether the kernel killed a process for want of memory, as far as it says so."""

from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """A count that has grown once the OOM killer has struck here, or on this host. 0: unknown."""
    return _of_cgroup(proc, cgroups) + _counter(proc / "vmstat", "oom_kill")


def _of_cgroup(proc: Path, cgroups: Path) -> int:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("0::"):  # cgroup v2
            return _counter(cgroups / line[3:].lstrip("/") / "memory.events", "oom_kill")
    return 0


def _counter(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
