"""The lowering as a compiler: its artifact is the HLO itself, for `--emulate`.

Importing this imports neither torch nor jax.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nxbucket.compile.compiler import HLO_FILE, Lowered
from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.targets import HLO_TARGET
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.errors import EnvironmentProblem
from nxbucket.toolkit.packages import installed_versions

LOWERING_VERSION = 1
"""Of our rules (operators.py, lowering.py, canonical.py). Bumped by hand when the HLO of any
program changes; the golden digests in the tests insist on it."""

LOWERING_PACKAGES = ("torch", "jax", "jaxlib")


class HloCompiler:
    """What every Neuron compiler would be given, whatever its target."""

    def toolchain(self) -> Toolchain:
        return Toolchain(HLO_TARGET, {"compiler": "none", "ir": "hlo"}, lowering_versions())

    def lower(self, program: BucketProgram) -> Lowered:
        return lower_to_hlo(program)

    def compile(self, lowered: Lowered, work_dir: Path) -> dict[BlobRole, Path]:
        return {"hlo": write_hlo(lowered.payload, work_dir)}


def lower_to_hlo(program: BucketProgram) -> Lowered:
    """`graph` and `payload` are both the canonical bytes of an HloModuleProto.

    Raises CompileError for an operator that has no rule, and for what a rule of lint.py refuses.
    """
    from nxbucket.compile.hlo.lint import lint, refuse_errors

    with importing():
        from nxbucket.compile.hlo.lowering import lower
    from nxbucket.compile.hlo.module import read_module

    module = lower(program)
    refuse_errors(program.name, lint(read_module(module), program.signature))
    return Lowered(graph=module, payload=module)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the first import of torch and jax: a half broken installation fails there."""
    try:
        yield
    except ImportError as err:
        raise EnvironmentProblem(
            f"torch and jax are installed, and do not import: {err}",
            hint="pip install --force-reinstall 'nxbucket[hlo]'",
        ) from err


def write_hlo(module: bytes, work_dir: Path) -> Path:
    path = work_dir / HLO_FILE
    path.write_bytes(module)
    return path


def lowering_versions() -> dict[str, str]:
    """Of what writes the graphs. Raises EnvironmentProblem if it is not installed."""
    packages = installed_versions(LOWERING_PACKAGES)
    for name in LOWERING_PACKAGES:
        if name not in packages:
            raise EnvironmentProblem(
                f"Neuron targets are lowered with torch and jax; {name} is not installed",
                hint="pip install 'nxbucket[hlo]'",
            )
    return {"rules": str(LOWERING_VERSION), **packages}
