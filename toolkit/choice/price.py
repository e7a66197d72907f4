"""What other bucket lists cost to compile: which programs are new, and how long they take."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nxbucket.compile.cache import ArtifactCache, choose_cache
from nxbucket.compile.cost import compile_times
from nxbucket.compile.program import Bucket
from nxbucket.toolkit.choice.costs import Costs, Curve
from nxbucket.toolkit.choice.workload import Lists


@dataclass(frozen=True)
class Price:
    """`compile_s` is of the new programs, one at a time; None if nothing says how long one takes.

    A program that stays needs no compile: its key does not depend on the rest of its list.
    """

    new: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    compile_s: float | None
    estimated_from: str

    def __str__(self) -> str:
        if not self.new:
            return f"nothing new, {len(self.kept)} programs stay, {len(self.dropped)} go"
        count = f"{len(self.new)} new, {len(self.kept)} stay, {len(self.dropped)} go"
        if self.compile_s is None:
            return f"{count}; {self.estimated_from}"
        minutes = self.compile_s / 60
        return f"{count}; about {minutes:.1f} minutes one at a time ({self.estimated_from})"

    def as_json(self) -> dict[str, Any]:
        return {
            "new": list(self.new),
            "kept": list(self.kept),
            "dropped": list(self.dropped),
            "compile_s": self.compile_s,
            "estimated_from": self.estimated_from,
        }


@dataclass(frozen=True)
class CompileSeconds:
    """How long a program takes to compile, by bucket; `source` says how that is known, or not."""

    prefill: Curve | None
    decode: Curve | None
    source: str

    def of(self, bucket: Bucket) -> float | None:
        curve = self.prefill if bucket.phase == "prefill" else self.decode
        return None if curve is None else curve(bucket.size)


UNKNOWN = CompileSeconds(None, None, "no record of how long a program takes to compile")


def from_costs_file(costs: Costs | None) -> CompileSeconds | None:
    """None if it says nothing of compiling."""
    if costs is None or not (costs.prefill.compile_s or costs.decode.compile_s):
        return None
    curves = [
        Curve.rising(phase.compile_s) if phase.compile_s else None
        for phase in (costs.prefill, costs.decode)
    ]
    lacks = [name for name, curve in zip(("prefill", "decode"), curves, strict=True) if not curve]
    source = f"the costs file has no {lacks[0]}.compile_s" if lacks else "from the costs file"
    return CompileSeconds(curves[0], curves[1], source)


def from_cache(cache: Path | None, target: str, num_layers: int) -> CompileSeconds:
    """What a cache has recorded for `target`: `cpu`, `trn2`, … or the name it has in a lock."""
    recorded = ArtifactCache(choose_cache(cache).root).manifests()
    kinds = Counter(
        m.target for m in recorded.values() if target in (m.target, m.target.split("-")[0])
    )
    times = compile_times(recorded, kinds.most_common(1)[0][0]) if kinds else None
    if times is None:
        return replace(UNKNOWN, source=f"{UNKNOWN.source} for {target}")
    same = Curve(((1, times.s_per_layer * num_layers),))
    return CompileSeconds(same, same, f"estimated from {times.num_recorded} recorded")


def price_of(
    now: Lists, then: Lists, context_lengths: Sequence[int], seconds: CompileSeconds
) -> Price:
    """Of going from some lists to others. `context_lengths`: decode_context_length_buckets."""
    old, new = _programs(now, context_lengths), _programs(then, context_lengths)
    each = [seconds.of(bucket) for name, bucket in new.items() if name not in old]
    known = [s for s in each if s is not None]
    return Price(
        tuple(name for name in new if name not in old),
        tuple(name for name in new if name in old),
        tuple(name for name in old if name not in new),
        sum(known) if len(known) == len(each) else None,
        seconds.source,
    )


def _programs(lists: Lists, context_lengths: Sequence[int]) -> dict[str, Bucket]:
    buckets = [Bucket("prefill", size, None) for size in lists.get("prefill", ())]
    for size in lists.get("decode", ()):
        buckets += [Bucket("decode", size, context) for context in (*context_lengths, None)]
    return {bucket.name: bucket for bucket in buckets}
