"""The name and versions of what turns a graph into bytes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Toolchain:
    """What turns a graph into bytes. `target` names it in the lock, e.g. `cpu-x86-64-v4`.

    `versions` holds every version and flag that decides the bytes; all of it is in the key.
    """

    target: str
    versions: Mapping[str, str]
