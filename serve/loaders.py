"""From an artifact's bytes to something that runs. One Loader for each kind of target."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nxbucket.compile.host_cpu import LEVEL_FLAGS, host_cpu_flags
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.signature import ProgramSignature
from nxbucket.toolkit.errors import BindError


@dataclass
class Executable:
    """A loaded program. `run` takes the signature's "input" tensors by name; returns the logits.

    Weights and KV cache are bound once. Every call's inputs are checked against the signature,
    because AOTInductor's own loader takes any shape and computes nonsense.
    """

    name: str
    signature: ProgramSignature
    function: Callable[..., Tensor]
    bound: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        self._inputs = tuple(self.signature.of_role("input"))
        self._shapes = tuple(
            (t.name, torch.Size(t.shape), getattr(torch, t.dtype)) for t in self._inputs
        )

    def bind(self, kv_cache: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Fix the KV cache and the weights. Raises BindError for one that does not fit."""
        bound = []
        for spec in self.signature.inputs:
            if spec.role == "input":
                continue
            tensor = (kv_cache if spec.role == "kv_cache" else weights).get(spec.name)
            if tensor is None:
                raise BindError(
                    f"{self.name} takes {spec.name}, which this server does not have",
                    hint="compile again: nxbucket compile",
                )
            wanted = (torch.Size(spec.shape), getattr(torch, spec.dtype))
            if (tensor.shape, tensor.dtype) != wanted or not tensor.is_contiguous():
                raise BindError(
                    f"{self.name} takes {spec.name} as {spec.dtype} {list(spec.shape)}; the server "
                    f"has {tensor.dtype} {list(tensor.shape)}",
                    hint="compile again: nxbucket compile",
                )
            bound.append(tensor)
        self.bound = tuple(bound)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        ordered = []
        for name, shape, dtype in self._shapes:
            tensor = inputs[name]
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise RuntimeError(
                    f"{self.name}: {name} is {tensor.dtype} {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())}, compiled for {dtype} {list(shape)}, contiguous"
                )
            ordered.append(tensor)
        return self.function(*ordered, *self.bound)


class Loader(Protocol):
    def check_host(self, manifest: Manifest) -> None:
        """Raises BindError if this host cannot run what the manifest describes."""

    def load(self, path: Path, manifest: Manifest) -> Executable: ...


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

    def load(self, path: Path, manifest: Manifest) -> Executable:
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
        return Executable(manifest.program, manifest.signature, package)

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


def loader_for(target: str) -> Loader:
    """Raises BindError for a target this build has no loader for."""
    if target.startswith("cpu-"):
        return CpuLoader()
    raise BindError(
        f"artifacts for {target} cannot be loaded yet",
        hint="target: cpu serves today",
    )
