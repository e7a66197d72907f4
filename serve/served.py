"""What a server serves: the lock's target and what it was made for, as vLLM's config carries it.

Everything a worker needs travels in `vllm_config.additional_config["nxbucket"]`, so that processes
started by vLLM see it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxbucket.compile.cache import ArtifactCache, Hit, choose_cache
from nxbucket.compile.explain import compile_command, emulate_command
from nxbucket.compile.host_cpu import runnable_targets
from nxbucket.compile.lockfile import (
    BUCKET_LISTS,
    Lock,
    LockedTarget,
    check_lock,
    fault_of,
    lock_path,
    locked_commit,
    model_file_of,
    read_lock,
)
from nxbucket.compile.manifest import BlobRole, Manifest
from nxbucket.compile.program import kv_bytes_per_token
from nxbucket.compile.targets import HLO_TARGET, check_emulation, neuron_target
from nxbucket.toolkit.architecture import Architecture
from nxbucket.toolkit.errors import BindError, LockError
from nxbucket.toolkit.spec import DeploySpec, load_spec


@dataclass(frozen=True)
class Served:
    """One target of one lock, and where its artifacts are.

    `emulated`: its graphs run on this host's processor, instead of its programs on a device.
    """

    lock_file: Path
    cache: ArtifactCache
    target: str
    lock: Lock
    emulated: bool = False

    @property
    def locked(self) -> LockedTarget:
        return self.lock.targets[self.target]

    @property
    def model_file(self) -> Path:
        return model_file_of(self.lock_file)

    @property
    def runs(self) -> BlobRole:
        """Which of an artifact's blobs is loaded."""
        return "hlo" if self.emulated else "program"

    @property
    def dtype(self) -> str:
        return str(self.lock.spec["dtype"])

    @property
    def architecture(self) -> Architecture:
        return Architecture.from_json(dict(self.lock.architecture))

    @property
    def kv_cache_bytes(self) -> int:
        """Exact: every layer's keys and values, the null block included."""
        tokens = self.locked.num_kv_blocks * int(self.lock.spec["block_size"])
        return tokens * kv_bytes_per_token(self.architecture, self.dtype)

    def verified_manifests(self) -> dict[str, Manifest]:
        """Every program's manifest, by name, each blob checked and the one the lock names.

        Raises BindError listing all that is missing, corrupt or different, with the command that
        mends it.
        """
        self.cache.check_private()
        manifests, faults = {}, []
        for program in self.locked.programs:
            found = self.cache.lookup(program.key)
            fault = fault_of(self.lock, self.target, program, found)
            if fault is None and isinstance(found, Hit):
                manifests[program.name] = found.manifest
                self.cache.mark_used(program.key)
            else:
                faults.append(str(fault))
        if faults:
            raise BindError(
                f"the cache {self.cache.root} does not hold what {self.lock_file} names: "
                f"{'; '.join(faults)}",
                hint=compile_command(self.model_file, emulate=self.emulated),
            )
        return manifests

    def as_additional_config(self) -> dict[str, Any]:
        """What goes into `additional_config`."""
        locked = self.locked
        lists = {name: list(getattr(locked, name)) for name in BUCKET_LISTS}
        return {
            "neuron_config": {name: sizes for name, sizes in lists.items() if sizes},
            "nxbucket": {
                "lock": str(self.lock_file),
                "cache": str(self.cache.root),
                "target": self.target,
                "emulate": self.emulated,
            },
        }

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> "Served":
        """Raises BindError if the engine was configured without us, LockError for a bad lock."""
        ours = (vllm_config.additional_config or {}).get("nxbucket")
        if not isinstance(ours, Mapping) or not {"lock", "cache", "target"} <= set(ours):
            raise BindError(
                "additional_config has no nxbucket section, so there is no lock to serve",
                hint="start with `nxbucket serve`, or pass vllm.LLM(**engine_args('model.yaml'))",
            )
        lock_file = Path(ours["lock"])
        cache = ArtifactCache(Path(ours["cache"]))
        emulated = bool(ours.get("emulate"))
        return cls(
            lock_file, cache, ours["target"], read_lock(lock_file, emulate=emulated), emulated
        )


def resolve(
    path: Path, *, emulate: bool = False, command: str = "serve"
) -> tuple[DeploySpec, Served]:
    """The model file and what its lock says to serve here. `path` is model.yaml or model.lock.

    `command`: the one that asks, for a hint to name with `--emulate`.

    A hub id is read at the lock's commit. Raises SpecError, LockError (none, malformed, of another
    model file), BindError, UsageError for emulation of target cpu, or EnvironmentProblem for a hub
    that is needed and cannot be reached.
    """
    model_file = model_file_of(path) if path.suffix == ".lock" else path
    lock_file = lock_path(model_file.absolute())
    spec = load_spec(
        model_file,
        lambda model, revision: locked_commit(
            read_lock(lock_file, emulate=emulate), lock_file, model, revision, emulate=emulate
        ),
    )
    if emulate:
        check_emulation(spec)
    lock = read_lock(lock_file, emulate=emulate)
    check_lock(lock, lock_file, spec, emulate=emulate)
    cache = ArtifactCache(choose_cache(spec.artifacts.cache).root)
    target = _target(spec, lock, lock_file, cache if emulate else None, command)
    return spec, Served(lock_file, cache, target, lock, emulate)


def _target(
    spec: DeploySpec,
    lock: Lock,
    lock_file: Path,
    emulated_from: ArtifactCache | None,
    command: str,
) -> str:
    """The best of the lock's targets that can be run. Raises LockError if there is none.

    Emulation takes a device's artifacts, which hold the graphs too, or else the graphs alone; what
    this host's cache has goes first.
    """
    emulate = emulated_from is not None
    wanted = [*device_targets(spec), *([HLO_TARGET] if emulate else [])]
    locked = [target for target in wanted if target in lock.targets]
    if emulated_from is not None:
        locked.sort(key=lambda target: not _has_entries(emulated_from, lock.targets[target]))
    if locked:
        return locked[0]
    locked_for = ", ".join(sorted(lock.targets)) or "no target"
    if not emulate and spec.target != "cpu" and HLO_TARGET in lock.targets:
        raise LockError(
            f"{lock_file}: locked for {locked_for}, the graphs without a program; a device of "
            f"{spec.target} runs {', '.join(wanted)}",
            hint=f"{emulate_command(command, spec.path)}, or {compile_command(spec.path)}",
        )
    host = "--emulate" if emulate else "this host" if spec.target == "cpu" else spec.target
    raise LockError(
        f"{lock_file}: locked for {locked_for}; {host} runs "
        f"{', '.join(wanted) or 'none of the targets there are'}",
        hint=compile_command(spec.path, emulate=emulate),
    )


def _has_entries(cache: ArtifactCache, target: LockedTarget) -> bool:
    return all(cache.entry_path(program.key).exists() for program in target.programs)


def device_targets(spec: DeploySpec) -> list[str]:
    """What runs without emulation, the best first. A Neuron target's has to have its device."""
    if spec.target == "cpu":
        return runnable_targets()
    assert spec.compiler.lnc is not None
    return [neuron_target(spec.target, spec.compiler.lnc)]
