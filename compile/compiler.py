"""What a compiler is: a toolchain with a name, a lowering, and a way to bytes.

Nothing a server imports leads here. Compilers run in subprocesses (`worker.py`), so an instance is
described by plain values: `module:Class` and keyword options.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.targets import check_emulation
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.spec import DeploySpec

HLO_FILE = "program.hlo"
"""In a job's work folder: what the compiler is given, if that is an HLO. Kept where it fails."""


@dataclass(frozen=True)
class Lowered:
    """A program on its way to bytes: the graph's canonical form, and what `compile` works on."""

    graph: bytes
    payload: Any


class Compiler(Protocol):
    def toolchain(self) -> Toolchain:
        """Cheap, without torch. Raises EnvironmentProblem, naming the tool, if one is missing."""

    def lower(self, program: BucketProgram) -> Lowered:
        """Seconds; loads no weights."""

    def compile(self, lowered: Lowered, work_dir: Path) -> Mapping[BlobRole, Path]:
        """The artifact's files, in `work_dir` (empty, on the cache's filesystem)."""


@dataclass(frozen=True)
class CompilerSpec:
    """How a subprocess makes the same compiler: `module:Class` and its options."""

    factory: str
    options: Mapping[str, Any]
    memory_per_job_bytes: int = 3 << 30
    """Assumed peak of one compile; AOTInductor and g++ were seen at 1 to 2 GiB."""

    @property
    def is_neuron(self) -> bool:
        return "lnc" in self.options

    def create(self) -> Compiler:
        module, _, name = self.factory.partition(":")
        compiler: Compiler = getattr(importlib.import_module(module), name)(**self.options)
        return compiler


FACTORIES = {
    "cpu": "nxbucket.compile.cpu:CpuCompiler",
    "hlo": "nxbucket.compile.hlo.compiler:HloCompiler",
    "neuron": "nxbucket.compile.neuron.compiler:NeuronCompiler",
}

NEURON_MEMORY_PER_JOB_BYTES = 16 << 30
"""People report 5 to 25 GB for one neuronx-cc; too many at a time end in the OOM killer."""


def compiler_for(spec: DeploySpec, *, emulate: bool = False) -> CompilerSpec:
    """`emulate`: for a Neuron target, what its compiler would be given instead of what it makes.

    Raises UsageError for emulation of target cpu.
    """
    options = spec.compiler
    if emulate:
        check_emulation(spec)
        return CompilerSpec(FACTORIES["hlo"], {})
    if spec.target == "cpu":
        return CompilerSpec(FACTORIES["cpu"], {"march": options.march})
    return CompilerSpec(
        FACTORIES["neuron"],
        {
            "target": spec.target,
            "lnc": options.lnc,
            "optlevel": options.optlevel,
            "auto_cast": options.auto_cast,
            "flags": list(options.flags),
        },
        NEURON_MEMORY_PER_JOB_BYTES,
    )
