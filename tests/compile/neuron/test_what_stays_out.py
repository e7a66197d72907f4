"""The stand-in is a test's, no extra brings a placeholder, and a server may read NEFFs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
NEURON_PACKAGES = {"neuronx-cc", "libneuronxla", "torch-neuronx"}


def test_nothing_in_the_product_names_the_stand_in() -> None:
    names = re.compile(r"stand_in|neuron_cli|neuron_bench|NCC_STAND_IN", re.I)
    sources = [
        p for d in ("toolkit", "compile", "serve", "scripts") for p in ROOT.glob(f"{d}/**/*")
    ]
    files = [p for p in [*sources, ROOT / "pyproject.toml"] if p.suffix in (".py", ".sh", ".toml")]
    assert len(files) > 50
    assert [p for p in files if names.search(p.read_text())] == []


def test_no_extra_can_resolve_to_a_placeholder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(line) for lines in extras.values() for line in lines]
    neuron = [r for r in wanted if r.name in NEURON_PACKAGES]
    assert {r.name for r in neuron} == NEURON_PACKAGES
    for requirement in neuron:
        for placeholder in ("0.0.1", "1.0", "1.0.0", "1.0.0.post1", "1.99"):
            assert not requirement.specifier.contains(placeholder, prereleases=True)
        assert requirement.specifier.contains("2.27.5334.0+f702b353")
    base = [Requirement(line).name for line in project["dependencies"]]
    assert not NEURON_PACKAGES & set(base)


def test_a_server_reads_neffs_without_the_compiler_s_modules() -> None:
    script = (
        "import sys, nxbucket.compile.neuron.neff\n"
        "mine = {m for m in sys.modules if m.startswith('nxbucket.compile')}\n"
        "assert not mine & {'nxbucket.compile.compiler', 'nxbucket.compile.worker',\n"
        "    'nxbucket.compile.neuron.compiler', 'nxbucket.compile.neuron.neuronx_cc'}\n"
        "assert not {'torch', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
