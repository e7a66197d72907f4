"""What changed between two locks: programs added, dropped and changed, and why they did."""

from dataclasses import dataclass
from typing import Any

from nxbucket.compile.explain import Difference, differences
from nxbucket.compile.key import key_inputs
from nxbucket.compile.lockfile import PROGRAM_KEYS, Lock, LockedProgram, LockedTarget, program_of
from nxbucket.compile.toolchain import Toolchain


@dataclass(frozen=True)
class ChangedProgram:
    """`why` is empty where both were made from the same inputs, and came out in other bytes."""

    name: str
    why: tuple[Difference, ...]
    same_graph: bool
    same_bytes: bool


@dataclass(frozen=True)
class TargetDiff:
    target: str
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    changed: tuple[ChangedProgram, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.dropped or self.changed)


@dataclass(frozen=True)
class LockDiff:
    """`settings`: of the model file and config.json, from the first lock to the second."""

    settings: tuple[Difference, ...]
    commits: tuple[str | None, str | None]
    targets: tuple[TargetDiff, ...]

    @property
    def is_empty(self) -> bool:
        same_commit = self.commits[0] == self.commits[1]
        return not self.settings and same_commit and all(t.is_empty for t in self.targets)


def diff_locks(old: Lock, new: Lock) -> LockDiff:
    before, after = ({k: lock.spec.get(k) for k in PROGRAM_KEYS} for lock in (old, new))
    settings = (
        *differences(before, after),
        *differences(old.architecture, new.architecture, "config.json"),
    )
    return LockDiff(
        settings,
        (old.model_commit, new.model_commit),
        tuple(_diff_target(old, new, name) for name in sorted({*old.targets, *new.targets})),
    )


def _diff_target(old: Lock, new: Lock, name: str) -> TargetDiff:
    before, after = (
        {p.name: p for p in lock.targets[name].programs} if name in lock.targets else {}
        for lock in (old, new)
    )
    changed = [
        _diff_program(old, new, name, before[program], after[program])
        for program in after
        if program in before
    ]
    return TargetDiff(
        name,
        tuple(p for p in after if p not in before),
        tuple(p for p in before if p not in after),
        tuple(c for c in changed if c is not None),
    )


def _diff_program(
    old: Lock, new: Lock, target: str, before: LockedProgram, after: LockedProgram
) -> ChangedProgram | None:
    if (before.key, before.blobs) == (after.key, after.blobs):
        return None
    return ChangedProgram(
        after.name,
        tuple(
            differences(
                _inputs(old, old.targets[target], target, before),
                _inputs(new, new.targets[target], target, after),
            )
        ),
        before.graph_key == after.graph_key,
        before.blobs == after.blobs,
    )


def _inputs(lock: Lock, target: LockedTarget, name: str, program: LockedProgram) -> dict[str, Any]:
    return key_inputs(program_of(lock, target, program), Toolchain(name, target.toolchain))
