"""What other bucket lists cost to compile: which programs are new, and how long they take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxbucket.compile.cache import ArtifactCache, choose_cache
from nxbucket.compile.cost import compile_times
from nxbucket.compile.plan import plan_programs
from nxbucket.compile.program import BucketProgram
from nxbucket.toolkit.choice.costs import Costs, Curve
from nxbucket.toolkit.spec import DeploySpec


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


def with_lists(spec: DeploySpec, lists: Mapping[str, Sequence[int]]) -> DeploySpec:
    """The same model file with other lists, by their keys."""
    changed = {key: tuple(sizes) for key, sizes in lists.items()}
    neuron = spec.neuron_config.model_copy(update=changed)
    return spec.model_copy(update={"neuron_config": neuron})


@dataclass(frozen=True)
class CompileSeconds:
    """How long a program takes to compile, by bucket; `source` says how that is known, or not."""

    prefill: Curve | None
    decode: Curve | None
    source: str

    def of(self, program: BucketProgram) -> float | None:
        curve = self.prefill if program.phase == "prefill" else self.decode
        return None if curve is None else curve(program.size)


def compile_seconds(spec: DeploySpec | None, costs: Costs | None) -> CompileSeconds:
    """From the costs file, else from what the model file's cache has recorded for its target."""
    if costs is not None and costs.prefill.compile_s and costs.decode.compile_s:
        return CompileSeconds(
            Curve.rising(costs.prefill.compile_s),
            Curve.rising(costs.decode.compile_s),
            "from the costs file",
        )
    if spec is None:
        return CompileSeconds(None, None, "no record of how long a program takes to compile")
    recorded = ArtifactCache(choose_cache(spec.artifacts.cache).root).manifests()
    kinds = Counter(m.target for m in recorded.values() if m.target.split("-")[0] == spec.target)
    times = compile_times(recorded, kinds.most_common(1)[0][0]) if kinds else None
    if times is None:
        reason = f"no record of how long a program takes to compile for {spec.target}"
        return CompileSeconds(None, None, reason)
    seconds = times.s_per_layer * spec.architecture.num_hidden_layers
    same = Curve(((1, seconds),))
    return CompileSeconds(same, same, f"estimated from {times.num_recorded} recorded")


def price_of(
    spec: DeploySpec, lists: Mapping[str, Sequence[int]], seconds: CompileSeconds
) -> Price:
    """Of going from the lists of `spec` to `lists`."""
    now = {program.name for program in plan_programs(spec)}
    then = {program.name: program for program in plan_programs(with_lists(spec, lists))}
    new = [name for name in then if name not in now]
    each = [seconds.of(then[name]) for name in new]
    known = [s for s in each if s is not None]
    return Price(
        tuple(new),
        tuple(name for name in then if name in now),
        tuple(sorted(now - then.keys())),
        sum(known) if len(known) == len(each) else None,
        seconds.source,
    )
