"""No variable of jax's or XLA's gets into a graph, or in its way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from null_compiler import a_program

from nxbucket.compile.canonical import sha256_hex
from nxbucket.compile.hlo.compiler import lower_to_hlo

LOWER = """
import sys
sys.path.insert(0, sys.argv[1])
from null_compiler import a_program
from nxbucket.compile.canonical import sha256_hex
from nxbucket.compile.hlo.compiler import lower_to_hlo
from nxbucket.compile.hlo.xla_cpu import XlaCpuProgram
graph = lower_to_hlo(a_program("decode", 2)).graph
XlaCpuProgram(graph)
print(sha256_hex(graph))
"""


@pytest.mark.parametrize(
    "variables",
    [
        {"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        {"JAX_PLATFORMS": "cuda"},
        {"XLA_FLAGS": "--xla_no_such_flag=1"},
        {"JAX_ENABLE_X64": "1", "JAX_DISABLE_JIT": "1"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_a_variable_changes_no_graph(variables: dict[str, str]) -> None:
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOWER, tests],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == sha256_hex(lower_to_hlo(a_program("decode", 2)).graph)
