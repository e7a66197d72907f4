"""Start-up of `nxbucket validate` and of a warm `nxbucket compile`, against bare imports.

    python benchmarks/startup_cli.py [--runs 15]

The plan has seven programs. Their artifacts stand under the real cpu toolchain's keys and have the
size of real ones, but random content, so that nothing has to be compiled first. All commands take
turns, so that a neighbour's load hits each of them. Medians of wall time.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from null_compiler import NullCompiler, model_file

from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.compiler import CompilerSpec, Lowered
from nxbucket.compile.cpu import CpuCompiler
from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.spec import load_spec

ARTIFACT_BYTES = 2 << 20
OURS = [sys.executable, "-c", "from nxbucket.toolkit.cli import main; main()"]
PAIRS = [
    ("compile", [*OURS, "compile"], "import typer, pydantic, yaml, rich", 5.0),
    ("validate", [*OURS, "validate"], "import typer, pydantic, yaml", 3.0),
]


class StandIn(NullCompiler):
    """The cpu compiler's name, without its work."""

    def toolchain(self) -> Toolchain:
        return CpuCompiler().toolchain()

    def compile(self, lowered: Lowered, work_dir: Path) -> dict[BlobRole, Path]:
        binary = work_dir / "program.pt2"
        binary.write_bytes(os.urandom(ARTIFACT_BYTES))
        return {"program": binary}


def seconds(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return time.perf_counter() - start


def fill_cache(folder: Path) -> None:
    spec = load_spec(model_file(folder, (16, 32, 64, 128), (1, 2, 4)))
    stand_in = CompilerSpec(f"{Path(__file__).stem}:StandIn", {})
    build(spec, ArtifactCache(folder / "cache"), stand_in, PlainReporter())
    done = subprocess.run(
        [*OURS, "compile"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(" hit ") == 7, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs: int = parser.parse_args().runs
    times: dict[str, tuple[list[float], list[float]]] = {label: ([], []) for label, *_ in PAIRS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill_cache(folder)
        for run in range(runs + 1):
            for label, command, imports, _ in PAIRS:
                ours = seconds(command, folder)
                bare = seconds([sys.executable, "-c", imports], folder)
                if run > 0:  # the first one warms the files up
                    times[label][0].append(ours)
                    times[label][1].append(bare)
    print(f"median of {runs} interleaved runs, milliseconds")
    print(f"{'nxbucket':<10} {'ours':>6} {'python':>7} {'ratio':>6} {'target':>7}")
    for label, _, imports, target in PAIRS:
        mine, bare = (statistics.median(ts) * 1000 for ts in times[label])
        print(
            f"{label:<10} {mine:>6.0f} {bare:>7.0f} {mine / bare:>6.2f} {f'<= {target:.0f}':>7}"
            f'  python -c "{imports}"'
        )


if __name__ == "__main__":
    main()
