"""Durations and sizes as people type them: 30d, 12h, 500MB, 20GiB."""

import re

from nxbucket.toolkit.errors import UsageError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
BYTES = {
    "b": 1,
    **{f"{c}b": 1000**i for i, c in enumerate("kmgt", 1)},
    **{f"{c}ib": 1024**i for i, c in enumerate("kmgt", 1)},
}
MOST = 1e18
QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def seconds_of(text: str, option: str) -> float:
    """Raises UsageError for anything but a number with s, m, h, d or w behind it."""
    return _quantity(text, option, SECONDS, "30d, 12h or 90m")


def bytes_of(text: str, option: str) -> int:
    """Raises UsageError for anything but a number with B, kB, MB, GB, KiB, MiB, GiB … behind it."""
    return int(_quantity(text, option, BYTES, "20GiB or 500MB"))


def _quantity(text: str, option: str, units: dict[str, int], examples: str) -> float:
    found = QUANTITY.fullmatch(text)
    factor = units.get(found[2].lower()) if found else None
    if found is None or factor is None or float(found[1]) * factor > MOST:
        raise UsageError(f"{option} is {text!r}", hint=f"a number and its unit, such as {examples}")
    return float(found[1]) * factor
