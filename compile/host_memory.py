"""This host's free memory, and how memory is written."""

from pathlib import Path


def available_bytes() -> int:
    """Memory that can be had without swapping; the page cache counts, unlike in SC_AVPHYS_PAGES.

    0 where nothing says.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
