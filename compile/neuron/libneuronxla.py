"""The compiler behind its Python door: `libneuronxla.neuron_xla_compile`.

Frameworks compile through it. Here it is the second choice, for hosts where the package is
installed and no neuronx-cc command is found. Its call is known from public code that makes it
(neuronx-distributed); it has never been run here.
"""

import importlib
import importlib.util
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nxbucket.compile.failure import ProgramFailed
from nxbucket.compile.neuron.ncc_errors import failure_of_exit, find_codes
from nxbucket.compile.neuron.neuronx_cc import compiler_environment, say
from nxbucket.compile.neuron.oom import oom_kills
from nxbucket.compile.parent_death import group_dies_with_parent
from nxbucket.toolkit.packages import installed_version, is_placeholder

PACKAGE = "libneuronxla"


@dataclass(frozen=True)
class LibNeuronXla:
    """`compiler_version` is that of the neuronx-cc package that it drives."""

    version: str
    compiler_version: str


def find_libneuronxla() -> LibNeuronXla | None:
    """None unless it and neuronx-cc are AWS's own (version 2). Imports neither."""
    version, compiler_version = installed_version(PACKAGE), installed_version("neuronx-cc")
    if version is None or compiler_version is None:
        return None
    if is_placeholder(version) or is_placeholder(compiler_version):
        return None
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    return LibNeuronXla(version, compiler_version)


def run_libneuronxla(hlo: Path, flags: Sequence[str], target: str, work_dir: Path) -> Path:
    """The file with what it returned, unchecked. Raises ProgramFailed."""
    work_dir.mkdir()
    output, logfile = work_dir / "program.neff.tmp", work_dir / "neuronx-cc.log"
    words = shlex.join([*flags, "--logfile", str(logfile)])
    (work_dir / "command.txt").write_text(f"neuron_xla_compile {words}\n")
    print(f"running {PACKAGE}.neuron_xla_compile with {words}", flush=True)
    kills = oom_kills()
    with _compiler_environment(), group_dies_with_parent():
        try:
            payload = _compile(hlo.read_bytes(), words, target, work_dir)
        except Exception as err:
            log = logfile.read_text(errors="replace") if logfile.exists() else ""
            text = f"{err}\n{log}"
            say(f"{text}\n".encode(errors="replace"))
            known = failure_of_exit(1, text, find_codes(text), oom_kills() > kills)
            if find_codes(text) or known.retryable:
                raise known from err
            raise ProgramFailed(
                f"raised {type(err).__name__}: {str(err)[:200]}", hint=known.hint
            ) from err
    if not isinstance(payload, bytes):
        raise ProgramFailed(
            f"returned {type(payload).__name__} where {PACKAGE} 2 returns the NEFF's bytes",
            hint="put the neuronx-cc command on PATH: it is preferred",
        )
    output.write_bytes(payload)
    return output


def _compile(hlo: bytes, flags: str, target: str, work_dir: Path) -> object:
    neuron_xla_compile = importlib.import_module(PACKAGE).neuron_xla_compile

    options = {
        "input_format": "hlo",
        "platform_target": target,
        "cache_key": None,
        # Its cache remembers failures, Ctrl-C among them, and waits for the locks of the dead.
        "use_cache": False,
        "retry_failed_compilation": False,
        "lazy": True,
        "work_dir": str(work_dir),
    }
    try:
        return neuron_xla_compile(hlo, flags, create_subdir=False, **options)
    except TypeError as err:
        # Releases before the option was there.
        if "create_subdir" not in str(err):
            raise
        return neuron_xla_compile(hlo, flags, **options)


@contextmanager
def _compiler_environment() -> Iterator[None]:
    """Without NEURON_CC_FLAGS and the like, which it would take flags and a cache from.

    PYTHONPATH stays: it runs in this Python.
    """
    before = dict(os.environ)
    kept = {**compiler_environment(before), "PYTHONPATH": before.get("PYTHONPATH", "")}
    os.environ.clear()
    os.environ.update(kept)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
