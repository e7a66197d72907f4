"""The name and versions of what turns a graph into bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Toolchain:
    """What turns a graph into bytes. `target` names it in the lock, e.g. `cpu-x86-64-v4`.

    `versions` holds every version and flag that decides the bytes; all of it is in both keys.
    `lowering` holds the versions of what only writes the graph: they are in the input key, and the
    graph itself stands for them in the graph key.
    """

    target: str
    versions: Mapping[str, str]
    lowering: Mapping[str, str] = field(default_factory=dict)
