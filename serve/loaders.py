"""From an artifact's bytes to something that runs. One Loader for each kind of target."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxbucket.compile.host_cpu import LEVEL_FLAGS, host_cpu_flags
from nxbucket.compile.manifest import BlobRole, Manifest
from nxbucket.compile.signature import ProgramSignature
from nxbucket.compile.targets import HLO_TARGET, parse_neuron_target
from nxbucket.serve.executable import Executable, HostMemory, Loader, empty_kv_cache
from nxbucket.toolkit.errors import BindError


class CpuExecutable(Executable[HostMemory]):
    """`function` takes all of the signature's inputs and updates the KV cache in place."""

    def __init__(
        self, name: str, signature: ProgramSignature, function: Callable[..., Tensor]
    ) -> None:
        super().__init__(name, signature)
        self.function = function
        self._bound: tuple[Tensor, ...] = ()

    def _bind(self, memory: HostMemory) -> None:
        held = memory.kv_cache | memory.weights
        self._bound = tuple(held[t.name] for t in self.signature.inputs if t.role != "input")

    def _run(self, inputs: list[Tensor]) -> Tensor:
        return self.function(*inputs, *self._bound)


class CpuLoader:
    """AOTInductor packages. Its own loader checks neither torch nor processor, so this one does."""

    def check_host(self, manifest: Manifest) -> None:
        built_with = manifest.toolchain.get("torch")
        if built_with != torch.__version__:
            raise BindError(
                f"{manifest.program} was compiled with torch {built_with}; this is "
                f"{torch.__version__}",
                hint="serve with that torch, or run nxbucket compile with this one",
            )
        march = manifest.toolchain.get("march", "")
        self._check_flags(manifest, march, LEVEL_FLAGS.get(march, {march}))

    def load(self, blobs: Mapping[BlobRole, Path], manifest: Manifest) -> CpuExecutable:
        path = blobs["program"]
        try:
            with tempfile.TemporaryDirectory(prefix="nxbucket-") as folder:
                # Blobs are named by their digest, and the loader insists on this ending.
                package_path = Path(folder) / f"{manifest.program}.pt2"
                package_path.symlink_to(path)
                package = torch._inductor.aoti_load_package(str(package_path))
        except Exception as err:  # the loader raises whatever dlopen and zip say
            raise BindError(
                f"{manifest.program}: {path} does not load: {err}",
                hint="nxbucket cache verify, then nxbucket compile",
            ) from err
        isa = package.get_metadata().get("AOTI_CPU_ISA", "")
        self._check_flags(manifest, isa, set(isa.lower().split()))
        return CpuExecutable(manifest.program, manifest.signature, package)

    def place(self, signature: ProgramSignature, weights: Mapping[str, Tensor]) -> HostMemory:
        return HostMemory(empty_kv_cache(signature), weights)

    def compiles(self) -> int:
        """None: what AOTInductor's packages hold is machine code."""
        return 0

    @staticmethod
    def _check_flags(manifest: Manifest, what: str, needed: set[str]) -> None:
        # Inductor calls AVX-512's foundation AVX512; /proc/cpuinfo calls it avx512f.
        names = {"avx512f" if flag == "avx512" else flag for flag in needed}
        lacking = sorted(names - host_cpu_flags())
        if lacking:
            raise BindError(
                f"{manifest.program} was compiled for {what}; this processor lacks "
                f"{', '.join(lacking)}",
                hint="set compiler.march: x86-64-v3 in the model file and compile again",
            )


def loader_for(target: str, *, emulate: bool = False) -> Loader[Any]:
    """Raises BindError for a target this build has no loader for."""
    if emulate:
        from nxbucket.serve.emulation import EmulatingLoader

        return EmulatingLoader()
    if target.startswith("cpu-"):
        return CpuLoader()
    if parse_neuron_target(target) is not None:
        from nxbucket.serve.neuron_device import NeuronLoader

        return NeuronLoader()
    raise BindError(
        f"artifacts for {target} cannot be loaded without emulation"
        if target == HLO_TARGET
        else f"artifacts for {target} cannot be loaded by this nxbucket",
        hint="nxbucket serve --emulate" if target == HLO_TARGET else "nxbucket compile",
    )
