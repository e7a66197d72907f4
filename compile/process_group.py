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
    total = 0
    try:
        pids = [name for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            continue  # it has ended
        # The name is in parentheses, and may hold blanks and parentheses itself.
        fields = stat.rpartition(b")")[2].split()
        if len(fields) > _RSS_PAGES and int(fields[_GROUP]) == group:
            total += int(fields[_RSS_PAGES]) * PAGE_BYTES
    return total
