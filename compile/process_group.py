"""What a process group holds in memory: a compiler's children count as much as itself."""

import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GROUP, _RSS_PAGES = 2, 21
"""Places in /proc/PID/stat, counted from behind the command's name (proc(5): fields 5 and 24)."""


def group_rss_bytes(group: int) -> int:
    """Resident memory of every process of `group`, summed. Pages that they share count each time.

    0 where there is no /proc.
    """
    return sum(_rss_bytes(process, group) for process in Path("/proc").glob("[0-9]*"))


def _rss_bytes(process: Path, group: int) -> int:
    """0 if it is of another group, or has ended."""
    try:
        stat = (process / "stat").read_bytes()
    except OSError:
        return 0
    # The name is in parentheses, and may hold blanks and parentheses itself.
    fields = stat.rpartition(b")")[2].split()
    if len(fields) <= _RSS_PAGES or int(fields[_GROUP]) != group:
        return 0
    return int(fields[_RSS_PAGES]) * PAGE_BYTES
