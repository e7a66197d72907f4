"""`--emulate`: a Neuron plan's graphs on this host's processor, compiled by XLA at the start.

The bytes that run are those neuronx-cc is given; no NEFF, runtime or device has a part in it. It
shows that the graphs, the buckets and the server around them are right, and nothing about speed.

Importing this imports neither jax nor torch: it is imported where vLLM has yet to fork.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nxbucket.compile.manifest import BlobRole, Manifest
from nxbucket.compile.signature import ProgramSignature
from nxbucket.toolkit.errors import BindError, EnvironmentProblem
from nxbucket.toolkit.packages import installed_version

if TYPE_CHECKING:
    from torch import Tensor

    from nxbucket.serve.xla_programs import XlaExecutable, XlaMemory

JAX_RELEASE = "0.10.2"
"""Running a module goes through private names of jaxlib; pyproject.toml pins the same."""
JAX_PACKAGES = ("jax", "jaxlib")
INSTALL = "pip install 'nxbucket[hlo]'"


class EmulatingLoader:
    def check_host(self, manifest: Manifest) -> None:
        if problem := jax_problem(installed_jax()):
            raise EnvironmentProblem(problem, hint=INSTALL)

    def load(self, blobs: Mapping[BlobRole, Path], manifest: Manifest) -> "XlaExecutable":
        from nxbucket.serve.xla_programs import load_module

        path = blobs.get("hlo")
        if path is None:
            raise BindError(
                f"{manifest.program}: the artifact for {manifest.target} holds no graph to emulate",
                hint="nxbucket compile --emulate",
            )
        return load_module(manifest.program, manifest.signature, path)

    def place(self, signature: ProgramSignature, weights: "Mapping[str, Tensor]") -> "XlaMemory":
        from nxbucket.serve.xla_programs import XlaMemory

        return XlaMemory.of(signature, weights)

    def compiles(self) -> int:
        from nxbucket.serve.xla_programs import compiles_so_far

        return compiles_so_far()


def installed_jax() -> dict[str, str | None]:
    return {package: installed_version(package) for package in JAX_PACKAGES}


def jax_problem(versions: Mapping[str, str | None]) -> str | None:
    """A sentence for packages that are missing or of another release than emulation needs."""
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return f"--emulate runs on XLA:CPU, and {' and '.join(missing)} is not installed"
    other = [f"{p} {v}" for p, v in versions.items() if v != JAX_RELEASE]
    if other:
        return f"--emulate is made for jax and jaxlib {JAX_RELEASE}; here is {', '.join(other)}"
    return None
