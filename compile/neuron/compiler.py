"""The compiler of Neuron targets: a program's HLO, then neuronx-cc, to one NEFF per program.

Two routes lead to the same compiler. The neuronx-cc command is taken where it is found, on PATH or
beside this Python: it is documented, runs in a process of its own, and what it is given stands in
its command line. libneuronxla is taken where only the packages are. The route is in the key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nxbucket.compile.canonical import canonical_json
from nxbucket.compile.compiler import Lowered
from nxbucket.compile.failure import ProgramFailed
from nxbucket.compile.hlo.compiler import lower_to_hlo, lowering_versions, write_hlo
from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.neuron.libneuronxla import (
    LibNeuronXla,
    find_libneuronxla,
    run_libneuronxla,
)
from nxbucket.compile.neuron.neff import check_neff_file
from nxbucket.compile.neuron.neuronx_cc import (
    NeuronxCc,
    check_written,
    find_neuronx_cc,
    missing_compiler,
    probe,
    run_neuronx_cc,
)
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.signature import ProgramSignature
from nxbucket.compile.targets import neuron_target
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.errors import CompileError

MODEL_TYPE = "--model-type"
QUIET = ("--verbose", "warning")
"""What it says while it works; no part of the key."""


@dataclass(frozen=True)
class HloProgram:
    """What `compile` works on: the HloModuleProto, and the tensors that its NEFF must have."""

    hlo: bytes
    signature: ProgramSignature


class NeuronCompiler:
    """`target` is an instance family, `lnc` the physical cores of a logical one. Always both: left
    to itself the compiler asks the host."""

    def __init__(
        self,
        target: str,
        lnc: int,
        optlevel: int = 1,
        auto_cast: str = "none",
        flags: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.lnc = lnc
        self._flags = command_flags(target, lnc, optlevel, auto_cast, flags)
        # Apart, so that `explain` names the one that differs.
        self._options = {
            "target": target,
            "lnc": str(lnc),
            "optlevel": str(optlevel),
            "auto_cast": auto_cast,
            "flags": canonical_json(other_flags(flags)).decode(),
        }

    def toolchain(self) -> Toolchain:
        route = self._route
        if isinstance(route, NeuronxCc):
            self._check_target(route)
            found = {"route": "neuronx-cc", "version": route.version}
        else:
            found = {
                "route": "libneuronxla",
                "version": route.compiler_version,
                "libneuronxla": route.version,
            }
        return Toolchain(
            target=neuron_target(self.target, self.lnc),
            versions={"compiler": "neuronx-cc", **found, **self._options},
            lowering=self.lowering_versions(),
        )

    def lower(self, program: BucketProgram) -> Lowered:
        lowered = self.lower_to_hlo(program)
        return Lowered(lowered.graph, HloProgram(lowered.payload, program.signature))

    def compile(self, lowered: Lowered, work_dir: Path) -> dict[BlobRole, Path]:
        program: HloProgram = lowered.payload
        hlo, neff = write_hlo(program.hlo, work_dir), work_dir / "program.neff"
        route, flags, folder = self._route, [*self._flags, *QUIET], work_dir / "neuronx-cc"
        if isinstance(route, NeuronxCc):
            written = run_neuronx_cc(route.path, hlo, flags, folder)
        else:
            written = run_libneuronxla(hlo, flags, self.target, folder)
        check_written(written)
        if faults := check_neff_file(written, self.target, self.lnc, program.signature):
            raise ProgramFailed(
                f"ended with status 0, and the NEFF it wrote {'; it '.join(faults)}",
                hint="nothing was published; mend what makes neuronx-cc differ from compiler.* and "
                "compile again",
            )
        written.rename(neff)
        return {"program": neff, "hlo": hlo}

    def lowering_versions(self) -> dict[str, str]:
        return lowering_versions()

    def lower_to_hlo(self, program: BucketProgram) -> Lowered:
        """`graph` and `payload` are the canonical HloModuleProto."""
        return lower_to_hlo(program)

    @cached_property
    def _route(self) -> NeuronxCc | LibNeuronXla:
        if (path := find_neuronx_cc()) is not None:
            return probe(path)
        if (library := find_libneuronxla()) is not None:
            return library
        raise missing_compiler()

    def _check_target(self, compiler: NeuronxCc) -> None:
        """AWS asks to read the list from the installed compiler; ours is only a hint."""
        if compiler.targets and self.target not in compiler.targets:
            raise CompileError(
                f"neuronx-cc {compiler.version} does not compile for {self.target}; it lists "
                f"{', '.join(compiler.targets)}",
                hint="set target to one of these, or install a neuronx-cc that knows it",
            )


def command_flags(
    target: str, lnc: int, optlevel: int, auto_cast: str, flags: Sequence[str]
) -> list[str]:
    """All that decides the bytes, in full: neuronx-cc's defaults have changed between releases."""
    return [
        *("--framework", "XLA"),
        *("--target", target),
        *("--lnc", str(lnc)),
        *("--auto-cast", auto_cast),
        f"-O{optlevel}",
        *other_flags(flags),
    ]


def other_flags(flags: Sequence[str]) -> list[str]:
    """Those without a key of their own. The compiler is told that a program is a transformer,
    unless the model file has a `--model-type`."""
    given = any(flag.partition("=")[0] == MODEL_TYPE for flag in flags)
    return [*flags] if given else [MODEL_TYPE, "transformer", *flags]
