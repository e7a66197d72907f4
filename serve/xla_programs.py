"""HLO programs on XLA:CPU, and their KV cache. Imported only where something is emulated.

A program gives its KV cache up when it runs, and the arrays it returns in its place share the
memory: nothing is copied. So there is one cache that belongs to no program, and each run takes the
arrays out of it and puts the new ones in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.utils.dlpack
from torch import Tensor

from nxbucket.compile.hlo.tensors import tensor_faults
from nxbucket.compile.hlo.xla_cpu import XlaCpuProgram  # before jax: it sets jax's platform
from nxbucket.compile.signature import ProgramSignature
from nxbucket.serve.executable import Executable, copy_blocks, fill_blocks
from nxbucket.toolkit.errors import BindError

# isort: split
import jax
import jax.monitoring
import numpy as np
from jaxlib import _hlo  # type: ignore[attr-defined]

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""jax's own, for each function it hands to XLA. Modules of ours are counted where they are made."""


class _Compiles:
    count = 0


def _count(event: str, duration_secs: float, **_: Any) -> None:
    _Compiles.count += event == COMPILE_EVENT


jax.monitoring.register_event_duration_secs_listener(_count)


def compiles_so_far() -> int:
    return _Compiles.count


class XlaMemory:
    """Weights are the checkpoint's own bytes where their address suits XLA, else one copy."""

    def __init__(self, kv_cache: Mapping[str, jax.Array], weights: Mapping[str, jax.Array]) -> None:
        self.kv_cache = dict(kv_cache)
        self.weights = dict(weights)

    @classmethod
    def of(cls, signature: ProgramSignature, weights: Mapping[str, Tensor]) -> "XlaMemory":
        kv_cache = {
            t.name: jax.numpy.zeros(t.shape, t.dtype) for t in signature.of_role("kv_cache")
        }
        return cls(kv_cache, {name: jax.dlpack.from_dlpack(t) for name, t in weights.items()})

    @property
    def shapes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        held = self.kv_cache | self.weights
        return {name: (str(a.dtype), tuple(a.shape)) for name, a in held.items()}

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        self._on_host(lambda host: fill_blocks(host, block_ids, value))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._on_host(lambda host: copy_blocks(host, pairs))

    def _on_host(self, change: Callable[[Tensor], None]) -> None:
        """On the host, not as a jax function: that would compile one for each number of blocks."""
        for name, cache in self.kv_cache.items():
            host = torch.utils.dlpack.from_dlpack(cache).clone()
            change(host)
            self.kv_cache[name] = jax.dlpack.from_dlpack(host)


class XlaExecutable(Executable[XlaMemory]):
    def __init__(self, name: str, signature: ProgramSignature, program: XlaCpuProgram) -> None:
        super().__init__(name, signature)
        self.program = program
        self._memory: XlaMemory | None = None

    def _bind(self, memory: XlaMemory) -> None:
        self._memory = memory

    def _run(self, inputs: list[Tensor]) -> Tensor:
        memory = self._memory
        assert memory is not None, f"{self.name} is not bound"
        given = iter(inputs)
        results = self.program(
            [
                jax.device_put(next(given).numpy())
                if t.role == "input"
                else (memory.kv_cache if t.role == "kv_cache" else memory.weights)[t.name]
                for t in self.signature.inputs
            ]
        )
        returned = []
        for spec, result in zip(self.signature.outputs, results, strict=True):
            if spec.alias is None:
                returned.append(result)
            else:
                memory.kv_cache[spec.alias] = result
        (logits,) = returned
        return torch.from_numpy(np.array(logits))


def load_module(name: str, signature: ProgramSignature, path: Path) -> XlaExecutable:
    """Read, check and compile. Raises BindError."""
    module = path.read_bytes()
    mend = "nxbucket cache verify, then nxbucket compile --emulate"
    try:
        faults = list(signature_faults(module, signature))
    except Exception as err:  # jaxlib raises its own kinds for bytes that are no module
        raise BindError(f"{name}: {path} is no HLO module: {_first_line(err)}", hint=mend) from err
    if faults:
        raise BindError(
            f"{name}: {path} is another graph than its manifest describes: {'; '.join(faults)}",
            hint=mend,
        )
    _Compiles.count += 1
    try:
        program = XlaCpuProgram(module)
    except Exception as err:
        raise BindError(
            f"{name}: XLA:CPU does not compile {path}: {_first_line(err)}", hint=mend
        ) from err
    return XlaExecutable(name, signature, program)


def signature_faults(module: bytes, signature: ProgramSignature) -> Iterator[str]:
    """What the module's entry takes and returns, where the signature says something else."""
    shape = _hlo.XlaComputation(module).program_shape()
    parameters, outputs = shape.parameter_shapes(), shape.result_shape().tuple_shapes()
    yield from tensor_faults("parameter", _types(parameters), signature.inputs)
    yield from tensor_faults("output", _types(outputs), signature.outputs)


def _types(shapes: Iterable[Any]) -> list[str]:
    """Without the layout that jaxlib writes behind each: f32[1,13]{1,0}."""
    return [str(shape).partition("{")[0] for shape in shapes]


def _first_line(err: Exception) -> str:
    return (str(err) or type(err).__name__).partition("\n")[0][:300]
