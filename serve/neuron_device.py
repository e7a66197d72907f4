"""NEFFs on a Neuron device: what this host must have, how a program is loaded, where its KV lives.

NOT VERIFIED on a device; docs/hardware.md lists what that covers and how to check it. The order of
things is a contract with a stand-in in tests/serve/test_neuron_device.py:

1. every NEFF is checked and loaded;
2. KV cache and weights go to the device, once for all programs;
3. each program is given them;
4. a run takes the step's small inputs up and brings the logits back, and nothing else.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxbucket.compile.manifest import BlobRole, Manifest
from nxbucket.compile.neuron.neff import check_neff_file
from nxbucket.compile.signature import ProgramSignature, TensorSpec
from nxbucket.compile.targets import parse_neuron_target
from nxbucket.serve.executable import (
    Executable,
    copy_blocks,
    empty_kv_cache,
    fill_blocks,
    torch_shape,
)
from nxbucket.serve.metaneff import metaneff
from nxbucket.serve.neuron_host import (
    LNC_FILE,
    LNC_VARIABLE,
    installed_packages,
    logical_core_of_host,
    package_hint,
    package_problem,
)
from nxbucket.serve.nrt_errors import loading, running
from nxbucket.serve.torch_neuron import Route, TorchNeuron
from nxbucket.toolkit.errors import BindError, EnvironmentProblem
from nxbucket.toolkit.packages import installed_version

NeffCheck = Callable[[Path, str, int, ProgramSignature], list[str]]


class NeuronLoader:
    """`connect` is where a stand-in for AWS's packages comes in."""

    def __init__(
        self,
        connect: Callable[[int], TorchNeuron] | None = None,
        check_neff: NeffCheck | None = None,
    ) -> None:
        self._connect = connect or TorchNeuron.imported
        self._check_neff = check_neff or check_neff_file
        self._neuron: TorchNeuron | None = None
        self._route: Route | None = None

    def check_host(self, manifest: Manifest) -> None:
        """Imports nothing of AWS's: this runs where vLLM has yet to fork."""
        _, lnc = _target_of(manifest)
        versions = installed_packages()
        if problem := package_problem(versions):
            raise EnvironmentProblem(
                problem, hint=package_hint(versions, installed_version("torch"))
            )
        here = logical_core_of_host(os.environ, LNC_FILE)
        if here is not None and here[0] != str(lnc):
            raise BindError(
                f"{manifest.program} was compiled for logical cores of {lnc}; {here[1]} says "
                f"{here[0]}",
                hint=f"export {LNC_VARIABLE}={lnc}, or set compiler.lnc: {here[0]} and compile "
                "again",
            )

    def load(self, blobs: Mapping[BlobRole, Path], manifest: Manifest) -> Executable[Any]:
        target, lnc = _target_of(manifest)
        name, neff = manifest.program, blobs.get("program")
        if neff is None:
            raise BindError(
                f"{name}: the artifact for {manifest.target} holds no NEFF", hint="nxbucket compile"
            )
        if faults := self._check_neff(neff, target, lnc, manifest.signature):
            raise BindError(
                f"{name}: {neff} {'; it '.join(faults)}",
                hint="nxbucket cache verify, then nxbucket compile",
            )
        if self._neuron is None:
            self._neuron = self._connect(lnc)
        self._route = self._neuron.route(target)
        if self._route == "Executor":
            with loading(f"{name}: {neff}"):
                return ExecutorProgram(name, manifest.signature, self._neuron, neff)
        hlo = blobs.get("hlo")
        description = metaneff(manifest.signature, hlo.read_bytes() if hlo else b"")
        with loading(f"{name}: {neff}"):
            return SpmdProgram(
                name, manifest.signature, self._neuron, neff.read_bytes(), description
            )

    def place(self, signature: ProgramSignature, weights: Mapping[str, Tensor]) -> "DeviceMemory":
        neuron, route = self._neuron, self._route
        assert neuron is not None, "programs are loaded first"
        assert route is not None
        with loading("KV cache and weights"):
            kv_cache = {n: neuron.to_device(t) for n, t in empty_kv_cache(signature).items()}
            return DeviceMemory(kv_cache, neuron.upload(weights, route))

    def compiles(self) -> int:
        """None: a NEFF is compiled."""
        return 0


class DeviceMemory:
    """The KV cache is read and written from here through copies on the host, as NxD does it."""

    def __init__(self, kv_cache: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        self.kv_cache = dict(kv_cache)
        self.weights = dict(weights)

    @property
    def shapes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {n: torch_shape(t) for n, t in (self.kv_cache | self.weights).items()}

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        self._on_host(lambda host: fill_blocks(host, block_ids, value))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._on_host(lambda host: copy_blocks(host, pairs))

    def _on_host(self, change: Callable[[Tensor], None]) -> None:
        for cache in self.kv_cache.values():
            host = cache.cpu().clone()
            change(host)
            cache.copy_(host)


class ExecutorProgram(Executable[DeviceMemory]):
    """Takes every input by position, and the KV cache's own tensors as the outputs it updates."""

    def __init__(
        self, name: str, signature: ProgramSignature, neuron: TorchNeuron, neff: Path
    ) -> None:
        super().__init__(name, signature)
        self._neuron = neuron
        self._executor = neuron.executor(neff)
        self._held: dict[str, Tensor] = {}

    def _bind(self, memory: DeviceMemory) -> None:
        self._held = memory.kv_cache | memory.weights

    def _run(self, inputs: list[Tensor]) -> Tensor:
        given = iter(inputs)
        outputs = [
            self._neuron.empty(t.shape, getattr(torch, t.dtype))
            if t.alias is None
            else self._held[t.alias]
            for t in self.signature.outputs
        ]
        with running(self.name):
            self._executor.execute(
                tuple(
                    self._neuron.to_device(next(given)) if t.role == "input" else self._held[t.name]
                    for t in self.signature.inputs
                ),
                outputs,
            )
            return _logits(self.name, self.signature.outputs, outputs)


class SpmdProgram(Executable[DeviceMemory]):
    """Is given KV cache and weights once, by name; takes the step's inputs, returns the logits."""

    def __init__(
        self,
        name: str,
        signature: ProgramSignature,
        neuron: TorchNeuron,
        neff: bytes,
        description: bytes,
    ) -> None:
        super().__init__(name, signature)
        self._neuron = neuron
        self._model = neuron.spmd_model(neff, description)

    def _bind(self, memory: DeviceMemory) -> None:
        with loading(self.name):
            self._neuron.initialize(self._model, memory.kv_cache, memory.weights)

    def _run(self, inputs: list[Tensor]) -> Tensor:
        with running(self.name):
            outputs = self._model.forward(inputs)
            specs = self.signature.outputs
            if len(outputs) != len(specs):
                # As NxD reads it: what is updated in place is not returned.
                specs = tuple(t for t in specs if t.alias is None)
            return _logits(self.name, specs, outputs)


def _logits(name: str, specs: Sequence[TensorSpec], outputs: Sequence[Tensor]) -> Tensor:
    """The one output that comes back to the host. A device's own mistake is an error here."""
    if len(outputs) != len(specs):
        raise RuntimeError(f"{name} returned {len(outputs)} tensors, not {len(specs)}")
    ((spec, tensor),) = [
        (spec, tensor) for spec, tensor in zip(specs, outputs, strict=True) if spec.alias is None
    ]
    if torch_shape(tensor) != (spec.dtype, spec.shape):
        dtype, shape = torch_shape(tensor)
        raise RuntimeError(
            f"{name}: {spec.name} is {dtype} {list(shape)}, compiled as {spec.dtype} "
            f"{list(spec.shape)}"
        )
    return tensor.cpu()


def _target_of(manifest: Manifest) -> tuple[str, int]:
    parsed = parse_neuron_target(manifest.target)
    if parsed is None:
        raise BindError(
            f"{manifest.program} is for {manifest.target}, which is no Neuron target",
            hint="nxbucket compile",
        )
    return parsed
