"""Why a model file would not be served as it stands: its programs, and its lock."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nxbucket.compile.build import Plan
from nxbucket.compile.cache import ArtifactCache, Corrupt, Hit
from nxbucket.compile.explain import (
    Difference,
    Nearest,
    compile_command,
    differences,
    nearest,
    remedy,
)
from nxbucket.compile.host_cpu import runnable_targets
from nxbucket.compile.lockfile import (
    Lock,
    check_locked_model,
    fault_of,
    lock_differences,
    lock_path,
    read_lock,
)
from nxbucket.compile.outcome import PlannedProgram
from nxbucket.compile.targets import HLO_TARGET
from nxbucket.toolkit.errors import LockError
from nxbucket.toolkit.spec import DeploySpec

LockState = Literal[
    "ok", "missing", "unreadable", "outdated", "other-target", "incomplete", "other-toolchain"
]


@dataclass(frozen=True)
class ProgramDiagnosis:
    """`nearest` is set for a miss, if the cache has any entry to compare with."""

    planned: PlannedProgram
    nearest: Nearest | None = None

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def outcome(self) -> str:
        return type(self.planned.found).__name__.lower()

    @property
    def reason(self) -> str | None:
        found = self.planned.found
        return found.reason if isinstance(found, Corrupt) else None


@dataclass(frozen=True)
class LockDiagnosis:
    path: Path
    state: LockState
    detail: str
    differences: tuple[Difference, ...] = ()
    faults: tuple[str, ...] = ()
    """What the cache lacks of what the lock names, a sentence each."""


@dataclass(frozen=True)
class Diagnosis:
    programs: list[ProgramDiagnosis]
    lock: LockDiagnosis
    command: str | None
    """The one that mends it all; None if there is nothing to mend."""

    @property
    def ok(self) -> bool:
        return self.command is None


def diagnose(
    spec: DeploySpec, cache: ArtifactCache, plan: Plan, names: Collection[str]
) -> Diagnosis:
    """Of the programs in `names`."""
    chosen = [p for p in plan.programs if p.name in names]
    if all(isinstance(p.found, Hit) for p in chosen):
        programs = [ProgramDiagnosis(p) for p in chosen]
    else:
        entries = {
            key: (m.program, m.inputs)
            for key, m in cache.manifests().items()
            if m.key_kind == "input"
        }
        programs = [
            ProgramDiagnosis(p, None if _is_there(p) else nearest(p.inputs, entries))
            for p in chosen
        ]
    lock = _diagnose_lock(spec, cache, plan, chosen)
    command = _command(spec, programs, lock)
    if plan.toolchain.target == HLO_TARGET and command == compile_command(spec.path):
        command = compile_command(spec.path, emulate=True)
    return Diagnosis(programs, lock, command)


def _is_there(planned: PlannedProgram) -> bool:
    return isinstance(planned.found, Hit | Corrupt)


def _command(spec: DeploySpec, programs: list[ProgramDiagnosis], lock: LockDiagnosis) -> str | None:
    """If all misses have one remedy, that; else compile, which mends everything."""
    faulty = [p for p in programs if p.outcome != "hit"]
    if not faulty:
        return None if lock.state == "ok" else compile_command(spec.path)
    if any(p.outcome == "corrupt" for p in faulty) or lock.state in ("missing", "unreadable"):
        return compile_command(spec.path)
    remedies = {remedy(p.nearest, spec.path, runnable_targets()) for p in faulty}
    return remedies.pop() if len(remedies) == 1 else compile_command(spec.path)


def _diagnose_lock(
    spec: DeploySpec, cache: ArtifactCache, plan: Plan, chosen: list[PlannedProgram]
) -> LockDiagnosis:
    path = lock_path(spec.path)
    if not path.exists():
        return LockDiagnosis(path, "missing", "there is none, so nothing says what to serve")
    try:
        lock = read_lock(path)
    except LockError as err:
        return LockDiagnosis(path, "unreadable", err.message.removeprefix(f"{path}: "))
    try:
        check_locked_model(lock, path, spec)
    except LockError as err:
        return LockDiagnosis(path, "outdated", err.message.removeprefix(f"{path} "))
    if changed := lock_differences(lock, spec):
        detail = f"made from another {spec.path.name} or config.json"
        return LockDiagnosis(path, "outdated", detail, tuple(changed))
    target = _target(lock, plan)
    if target is None:
        locked_for = ", ".join(sorted(lock.targets)) or "no target"
        detail = f"locked for {locked_for}, and not for {plan.toolchain.target}"
        return LockDiagnosis(path, "other-target", detail)
    return _diagnose_target(path, lock, target, cache, plan, chosen)


def _target(lock: Lock, plan: Plan) -> str | None:
    """The one that is served here."""
    candidates = [plan.toolchain.target, *runnable_targets()]
    return next((target for target in candidates if target in lock.targets), None)


def _diagnose_target(
    path: Path,
    lock: Lock,
    target: str,
    cache: ArtifactCache,
    plan: Plan,
    chosen: list[PlannedProgram],
) -> LockDiagnosis:
    wanted = {p.name: p for p in chosen}
    programs = [p for p in lock.targets[target].programs if p.name in wanted]
    known = {p.key: p.found for p in chosen}
    found = {p.name: known.get(p.key) or cache.lookup(p.key) for p in programs}
    faults = [fault for p in programs if (fault := fault_of(lock, target, p, found[p.name]))]
    if faults:
        detail = f"the cache {cache.root} lacks what it names"
        return LockDiagnosis(path, "incomplete", detail, faults=tuple(faults))
    stale = [p for p in programs if p.key != wanted[p.name].key]
    if stale and target == plan.toolchain.target:
        there = cache.entry(stale[0].key)
        detail = f"names artifacts of another toolchain: {', '.join(p.name for p in stale)}"
        changed = (
            ()
            if isinstance(there, str)
            else differences(there.inputs, wanted[stale[0].name].inputs)
        )
        return LockDiagnosis(path, "other-toolchain", detail, tuple(changed))
    return LockDiagnosis(path, "ok", f"names all of them, for {target}")
