"""Stand-ins for what only AWS has: a compiler whose "NEFF" is its graph, and the classes
of torch_neuronx that load one. XLA runs the graph, so that numbers are real.

The classes keep to what public code does with AWS's; tests/serve/test_neuron_device.py is the
contract between them and the loader.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from nxbucket.compile.compiler import Lowered
from nxbucket.compile.hlo.compiler import lower_to_hlo, lowering_versions, write_hlo
from nxbucket.compile.hlo.wire import Field, read_message, read_packed
from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.toolchain import Toolchain
from nxbucket.serve.torch_neuron import Route, TorchNeuron

NEFF = b"not a NEFF, but the graph of one: "


class StandInNeuronCompiler:
    """Takes the options of NeuronCompiler."""

    def __init__(self, target: str = "trn2", lnc: int = 2, **_: Any) -> None:
        self.target, self.lnc = target, lnc

    def toolchain(self) -> Toolchain:
        versions = {"compiler": "stand-in", "target": self.target, "lnc": str(self.lnc)}
        return Toolchain(f"{self.target}-lnc{self.lnc}", versions, lowering_versions())

    def lower(self, program: BucketProgram) -> Lowered:
        return lower_to_hlo(program)

    def compile(self, lowered: Lowered, work_dir: Path) -> dict[BlobRole, Path]:
        neff = work_dir / "program.neff"
        neff.write_bytes(NEFF + lowered.payload)
        return {"program": neff, "hlo": write_hlo(lowered.payload, work_dir)}


@dataclass
class Device:
    """What happened on it, in order, and what it is to fail at."""

    events: list[str] = field(default_factory=list)
    fail: dict[str, str] = field(default_factory=dict)
    """Event -> text of the RuntimeError it raises."""
    damage: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def note(self, event: str) -> None:
        self.events.append(event)
        if event in self.fail:
            raise RuntimeError(self.fail[event])

    def connected(self, *routes: str) -> TorchNeuron:
        """With these of the two classes registered."""
        device = self

        class Executor:
            def __init__(self, path: str, start_nc: int, rank: int, world: int) -> None:
                assert (start_nc, rank, world) == (0, 0, 1)
                self._program = _Program(Path(path).read_bytes())
                device.note("load")

            def execute(self, inputs: tuple[Tensor, ...], outputs: list[Tensor]) -> None:
                device.note("execute")
                assert isinstance(inputs, tuple)
                results = self._program.run(inputs)
                for i, (place, result) in enumerate(zip(outputs, results, strict=True)):
                    place.copy_(device.damage(result) if i == 0 else result)

        class SPMDModel:
            def __init__(self, neff: bytes, metaneff: bytes, local: int, world: int) -> None:
                assert (local, world) == (1, 1)
                self._program = _Program(neff)
                self.meta = MetaNeff(metaneff)
                device.note("load")

            def initialize(
                self,
                states: list[dict[str, Tensor]],
                weights: list[dict[str, Tensor]],
                start_rank: int,
            ) -> None:
                assert start_rank == 0
                ((self._states,), (self._weights,)) = (states, weights)
                device.note("initialize")

            def forward(self, inputs: list[Tensor]) -> list[Tensor]:
                device.note("execute")
                given = iter(inputs)
                held = {"INPUT_STATE": self._states, "INPUT_WEIGHT": self._weights}
                all_inputs = [
                    next(given) if t.type == "USER_INPUT" else held[t.type][t.key]
                    for t in self.meta.inputs
                ]
                results = self._program.run(all_inputs)
                for output, taken in self.meta.aliases.items():
                    all_inputs[taken].copy_(results[output])
                return [
                    device.damage(r) for i, r in enumerate(results) if i not in self.meta.aliases
                ]

        class Classes:
            def __getattr__(self, name: str) -> Any:
                if name in routes:
                    return {"Executor": Executor, "SPMDModel": SPMDModel}[name]
                # torch's own words
                raise RuntimeError(f"Class neuron.{name} not registered!")

        class Ops:
            def _parallel_load(self, checkpoints: list[dict[str, Tensor]]) -> Any:
                return [{n: t.clone() for n, t in ranked.items()} for ranked in checkpoints]

        class Noting(TorchNeuron):
            def upload(self, checkpoint: Mapping[str, Tensor], route: Route) -> dict[str, Tensor]:
                device.note("weights")
                return super().upload(checkpoint, route)

        return Noting(Classes(), Ops(), device="cpu")


class _Program:
    def __init__(self, neff: bytes) -> None:
        assert neff.startswith(NEFF)
        self._xla = _compiled(neff.removeprefix(NEFF))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        import jax
        import torch.utils.dlpack

        results = self._xla([jax.dlpack.from_dlpack(t.clone()) for t in inputs])
        return [torch.utils.dlpack.from_dlpack(r).clone() for r in results]


@functools.cache
def _compiled(graph: bytes) -> Any:
    from nxbucket.compile.hlo.xla_cpu import XlaCpuProgram

    return XlaCpuProgram(graph)


@dataclass
class MetaTensor:
    name: str
    shape: tuple[int, ...]
    data_type: int
    type: str
    key: str


class MetaNeff:
    """Read by the numbers in the public notes, not by those of the writer under test."""

    def __init__(self, payload: bytes) -> None:
        message = read_message(payload)
        self.inputs = [_meta_tensor(f) for f in message if f.number == 1]
        self.outputs = [_meta_tensor(f) for f in message if f.number == 2]
        self.graph = b"".join(_bytes(f) for f in message if f.number == 4)
        entries = [dict(_numbers(f)) for f in message if f.number == 6]
        self.aliases = {entry[1]: entry[2] for entry in entries}


def _meta_tensor(raw: Field) -> MetaTensor:
    by_number = {f.number: f for f in read_message(_bytes(raw))}
    types = ("UNDEFINED_TYPE", "USER_INPUT", "INPUT_STATE", "INPUT_WEIGHT")
    key = by_number.get(6) or by_number.get(8)
    kind = by_number[7].value if 7 in by_number else 0
    data_type = by_number[3].value
    assert isinstance(kind, int)
    assert isinstance(data_type, int)
    return MetaTensor(
        _bytes(by_number[1]).decode(),
        tuple(read_packed(_bytes(by_number[2]))),
        data_type,
        types[kind],
        _bytes(key).decode() if key else "",
    )


def _numbers(raw: Field) -> list[tuple[int, int]]:
    return [(f.number, f.value) for f in read_message(_bytes(raw)) if isinstance(f.value, int)]


def _bytes(raw: Field) -> bytes:
    assert isinstance(raw.value, bytes)
    return raw.value
