"""The cpu compiler: torch.export, then AOTInductor, to one .pt2 per program."""

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxbucket.compile.canonical import canonical_json
from nxbucket.compile.compiler import Lowered
from nxbucket.compile.host_cpu import host_march
from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.errors import CompileError, EnvironmentProblem
from nxbucket.toolkit.packages import installed_version

if TYPE_CHECKING:
    from torch.export import ExportedProgram

SIMD_BITS = {"x86-64-v3": 256, "x86-64-v4": 512}
"""The vector width Inductor writes kernels for, by `-march` level."""


class CpuCompiler:
    """`march` is an x86-64 level, never `native`: a binary's needs must show in its name."""

    def __init__(self, march: str | None = None) -> None:
        self.march = march or host_march()
        if self.march not in SIMD_BITS:
            raise CompileError(
                f"compiler.march: {self.march} is no level target cpu compiles for",
                hint=f"one of {', '.join(SIMD_BITS)}",
            )

    def toolchain(self) -> Toolchain:
        torch_version = installed_version("torch")
        if torch_version is None:
            raise EnvironmentProblem(
                "target cpu compiles with PyTorch, which is not installed",
                hint="pip install 'nxbucket[cpu]'",
            )
        return Toolchain(
            target=f"cpu-{self.march}",
            versions={
                "compiler": "aotinductor",
                "torch": torch_version,
                "cxx": _cxx_version(),
                "march": self.march,
                "options": canonical_json(self._inductor_options()).decode(),
            },
        )

    def lower(self, program: BucketProgram) -> Lowered:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        from nxbucket.compile.graph import canonical_graph
        from nxbucket.compile.programs.families import program_module

        with FakeTensorMode():
            inputs = tuple(
                torch.empty(t.shape, dtype=getattr(torch, t.dtype))
                for t in program.signature.inputs
            )
        with torch.no_grad():
            exported = torch.export.export(program_module(program), inputs, strict=False)
        return Lowered(graph=canonical_graph(exported), payload=exported)

    def compile(self, lowered: Lowered, work_dir: Path) -> dict[BlobRole, Path]:
        exported: ExportedProgram = lowered.payload
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work_dir / "inductor")
        import torch
        import torch._inductor

        package = work_dir / "program.pt2"
        written = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package), inductor_configs=self._inductor_options()
        )
        return {"program": Path(written)}

    def _inductor_options(self) -> "dict[str, Any]":
        return {
            "cpp.march": self.march,
            "cpp.simdlen": SIMD_BITS[self.march],
            # Inductor would compile and load a file for each vector ISA to see whether it works. We
            # know from the level; should g++ not know it, the compile fails and its log says why.
            "cpp.vec_isa_ok": True,
            # The number of threads is the serving host's affair, not the compiling one's.
            "cpp.dynamic_threads": True,
            # Each program compiles in a folder of its own: a precompiled header would be used once.
            "cpp_cache_precompile_headers": False,
            "aot_inductor.precompile_headers": False,
        }


def _cxx_version() -> str:
    cxx = os.environ.get("CXX", "g++")
    try:
        banner = subprocess.run(
            [cxx, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as err:
        raise EnvironmentProblem(
            f"target cpu compiles with a C++ compiler, and `{cxx}` does not run",
            hint="install g++ (apt-get install g++), or name another one in CXX",
        ) from err
    return banner.partition("\n")[0].strip()
