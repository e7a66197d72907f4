"""What a loader makes of an artifact, and where its weights and KV cache live.

The seam between the runner and a target. A runner hands over the step's small integer tensors and
gets logits; who holds weights and KV cache, and in what, is a `Memory`'s own affair: torch tensors
that a cpu program updates in place, jax arrays that an emulated program consumes and replaces, or
buffers of a device.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from nxbucket.compile.manifest import BlobRole, Manifest
from nxbucket.compile.signature import ProgramSignature
from nxbucket.toolkit.errors import BindError


class Memory(Protocol):
    """Weights and KV cache, once for all programs of a server."""

    @property
    def shapes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of every weight and of every layer's keys and values, by name."""

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        """Overwrite these blocks in every layer's keys and values."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), in every layer's keys and values; all at once."""


M = TypeVar("M", bound=Memory)
M_co = TypeVar("M_co", bound=Memory, covariant=True)


class Executable(ABC, Generic[M]):
    """A loaded program. `run` takes the signature's "input" tensors by name; returns the logits.

    Every call's inputs are checked against the signature, because no runtime below does it well:
    AOTInductor's own loader takes any shape and computes nonsense.
    """

    def __init__(self, name: str, signature: ProgramSignature) -> None:
        self.name = name
        self.signature = signature
        self._inputs = tuple(
            (t.name, torch.Size(t.shape), getattr(torch, t.dtype))
            for t in signature.of_role("input")
        )

    def bind(self, memory: M) -> None:
        """Fix weights and KV cache. Raises BindError for a tensor that is missing or differs."""
        for spec in self.signature.inputs:
            if spec.role == "input":
                continue
            held = memory.shapes.get(spec.name)
            if held is None:
                raise BindError(
                    f"{self.name} takes {spec.name}, which this server does not have",
                    hint="compile again: nxbucket compile",
                )
            if held != (spec.dtype, spec.shape):
                raise BindError(
                    f"{self.name} takes {spec.name} as {spec.dtype} {list(spec.shape)}; the server "
                    f"has {held[0]} {list(held[1])}",
                    hint="compile again: nxbucket compile",
                )
        self._bind(memory)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        ordered = []
        for name, shape, dtype in self._inputs:
            tensor = inputs[name]
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise RuntimeError(
                    f"{self.name}: {name} is {tensor.dtype} {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())}, compiled for {dtype} {list(shape)}, contiguous"
                )
            ordered.append(tensor)
        return self._run(ordered)

    @abstractmethod
    def _bind(self, memory: M) -> None: ...

    @abstractmethod
    def _run(self, inputs: list[Tensor]) -> Tensor:
        """The logits, in this host's memory, writable: vLLM's sampler works in place."""


class Loader(Protocol[M_co]):
    """One for each kind of target. Making one imports nothing heavy."""

    def check_host(self, manifest: Manifest) -> None:
        """Raises BindError or EnvironmentProblem if this host cannot run what it describes."""

    def load(self, blobs: Mapping[BlobRole, Path], manifest: Manifest) -> Executable[Any]:
        """Raises BindError for bytes that are not the program the manifest describes."""

    def place(self, signature: ProgramSignature, weights: Mapping[str, Tensor]) -> M_co:
        """The KV cache, zeroed, and the weights, where programs read them."""

    def compiles(self) -> int:
        """How many programs were compiled in this process so far, by what this loader runs on."""


class HostMemory:
    """torch tensors in this host's memory."""

    def __init__(self, kv_cache: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        self.kv_cache = dict(kv_cache)
        self.weights = dict(weights)
        for name, tensor in (self.kv_cache | self.weights).items():
            if not tensor.is_contiguous():
                raise BindError(
                    f"{name} has strides {list(tensor.stride())}; programs take it contiguous",
                    hint="compile again: nxbucket compile",
                )

    @property
    def shapes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {n: torch_shape(t) for n, t in (self.kv_cache | self.weights).items()}

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        for cache in self.kv_cache.values():
            fill_blocks(cache, block_ids, value)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for cache in self.kv_cache.values():
            copy_blocks(cache, pairs)


def fill_blocks(cache: Tensor, block_ids: Sequence[int], value: float) -> None:
    cache[list(block_ids)] = value


def copy_blocks(cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    sources, targets = zip(*pairs, strict=True)
    cache[list(targets)] = cache[list(sources)]


def torch_shape(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def empty_kv_cache(signature: ProgramSignature) -> dict[str, Tensor]:
    return {
        t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype))
        for t in signature.of_role("kv_cache")
    }
