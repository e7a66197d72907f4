"""neuronx-cc as a command: finding it, asking what it is, running it.

Its options are those of compiler/neuronx-cc/api-reference-guide in the SDK's documentation (2.32).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nxbucket.compile.failure import ProgramFailed
from nxbucket.compile.neuron.ncc_errors import failure_of_exit, find_codes
from nxbucket.compile.neuron.oom import oom_kills
from nxbucket.compile.parent_death import group_dies_with_parent
from nxbucket.toolkit.errors import EnvironmentProblem
from nxbucket.toolkit.packages import AWS_INDEX, installed_version, is_placeholder

COMMAND = "neuronx-cc"
INSTALL = (
    "give neuronx-cc an environment of its own: python3 -m venv ~/neuronx-cc && "
    f'~/neuronx-cc/bin/pip install "neuronx-cc==VERSION" --extra-index-url {AWS_INDEX}, and put '
    "~/neuronx-cc/bin on PATH; pin VERSION, which is in every key"
)
VERSION = re.compile(r"NeuronX Compiler version (\S+)")
"""To the end of the word: what stands behind a + or a % tells two builds apart."""
HELP = ("compile", "--help")
PROBE_TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 4 << 20
TAIL_LINES = 200
LOG_TAIL_BYTES = 1 << 20
UNKEYED_PREFIXES = ("NEURON", "XLA_", "PJRT_")
UNKEYED = ("LD_PRELOAD", "PYTHONPATH")
"""The command line documents no variable, so none may decide the bytes behind the key's back: what
frameworks put into NEURON_CC_FLAGS is not for the command. PYTHONPATH is ours, and neuronx-cc may
live in another Python."""


@dataclass(frozen=True)
class NeuronxCc:
    """`targets`: what `compile --help` lists, empty if it lists none that could be read."""

    path: Path
    version: str
    targets: tuple[str, ...]


def find_neuronx_cc() -> Path | None:
    """On PATH, or beside this Python: an environment need not be activated."""
    beside = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    found = shutil.which(COMMAND, path=beside)
    return Path(found).absolute() if found else None


def missing_compiler() -> EnvironmentProblem:
    """What to say where there is no compiler, also if PyPI's placeholder stands in its place."""
    hint = f"{INSTALL}; without it, `nxbucket compile --emulate` does everything up to the compiler"
    if (version := placeholder_version("neuronx-cc")) is not None:
        return EnvironmentProblem(
            f"neuronx-cc {version} is the empty placeholder of PyPI; the compiler itself is in "
            "AWS's package index",
            hint=f"pip uninstall -y neuronx-cc; {hint}",
        )
    return EnvironmentProblem(
        "neuronx-cc is not on PATH, and Neuron targets are compiled with it", hint=hint
    )


def placeholder_version(package: str) -> str | None:
    """The version of an installed package of this name that is none of AWS's."""
    version = installed_version(package)
    return version if version is not None and is_placeholder(version) else None


def probe(path: Path) -> NeuronxCc:
    """Its version and targets. Raises EnvironmentProblem if it does not say what it is."""
    with ExitStack() as running:
        # Both at a time: each start of it takes seconds.
        files = [running.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        asked = [
            running.enter_context(_ask(path, into, *arguments))
            for into, arguments in zip(files, (["--version"], HELP), strict=True)
        ]
        try:
            said = [_answer(process, into) for process, into in zip(asked, files, strict=True)]
        except subprocess.TimeoutExpired as err:
            for process in asked:
                process.kill()
            raise EnvironmentProblem(
                f"`{shlex.join(err.cmd)}` does not answer",
                hint=f"run it yourself; if it hangs: {INSTALL}",
            ) from err
    version = VERSION.search(said[0])
    if version is None or version[1].startswith(("0.", "1.")):
        raise EnvironmentProblem(
            f"{path} --version does not name a NeuronX Compiler of version 2",
            hint=f"put the right neuronx-cc first on PATH, or {INSTALL}",
        )
    return NeuronxCc(path, version[1], listed_targets(said[1]))


def _ask(path: Path, into: IO[bytes], *arguments: str) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            [str(path), *arguments],
            stdin=subprocess.DEVNULL,
            # A file and no pipe: a child that it leaves behind would keep a pipe open.
            stdout=into,
            # Which of the two it writes to depends on the version.
            stderr=subprocess.STDOUT,
            env=compiler_environment(os.environ),
        )
    except OSError as err:
        raise EnvironmentProblem(
            f"{path} does not run: {err.strerror or err}",
            hint=f"take one that is for this processor: {INSTALL}",
        ) from err


def _answer(process: "subprocess.Popen[bytes]", into: IO[bytes]) -> str:
    process.wait(timeout=PROBE_TIMEOUT_S)
    into.seek(0)
    return into.read(MAX_ANSWER_BYTES).decode(errors="replace")


def listed_targets(help_text: str) -> tuple[str, ...]:
    """argparse's `--target {a,b}`, or the names in the paragraph below the option."""
    if choices := re.search(r"--target[ =]+\{([^}]*)\}", help_text):
        return tuple(re.findall(r"[\w-]+", choices[1]))
    if paragraph := re.search(r"^\s*--target\b(.*?)(?=^\s*--?\w|\Z)", help_text, re.M | re.S):
        names = dict.fromkeys(re.findall(r"\b(?:trn|inf)[0-9]+[a-z]*\b", paragraph[1]))
        # One name alone is an example, not a list.
        return tuple(names) if len(names) > 1 else ()
    return ()


def compiler_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        k: v for k, v in environ.items() if not k.startswith(UNKEYED_PREFIXES) and k not in UNKEYED
    }


def run_neuronx_cc(path: Path, hlo: Path, flags: Sequence[str], work_dir: Path) -> Path:
    """The file it wrote, unchecked. Raises ProgramFailed.

    Its output goes to ours as it comes. `work_dir` is made: the compiler drops files where it
    stands.
    """
    work_dir.mkdir()
    output, logfile = work_dir / "program.neff.tmp", work_dir / "neuronx-cc.log"
    argv = [
        str(path), "compile", str(hlo), *flags, "--output", str(output), "--logfile", str(logfile),
    ]  # fmt: skip
    command = f"{shlex.join(argv)}\n".encode(errors="surrogateescape")
    (work_dir / "command.txt").write_bytes(command)
    say(b"running " + command)
    kills = oom_kills()
    with group_dies_with_parent():
        process = subprocess.Popen(
            argv,
            cwd=work_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=compiler_environment(os.environ),
        )
        assert process.stdout is not None
        said = _Output(process.stdout)
        returncode = process.wait()
        said.finish()
    if returncode == 0:
        return output
    log = _tail_of(logfile)
    say(f"the end of {logfile.name}:\n{log}\n".encode())
    text = f"{said.text}\n{log}"
    codes = dict.fromkeys([*said.codes, *find_codes(log)])
    raise failure_of_exit(returncode, text, codes, oom_kills() > kills)


class _Output:
    """Passes a process's output on, and keeps its last lines and every code in it.

    A thread, because the pipe does not end with the process: children that outlive it hold it.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.codes: dict[str, None] = {}
        self._pipe = pipe
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(list(self._lines))

    def finish(self) -> None:
        self._thread.join(timeout=2)

    def _pass_on(self) -> None:
        with self._pipe:
            while raw := self._pipe.readline(64 << 10):
                line = raw.decode(errors="replace")
                self._lines.append(line)
                self.codes.update(dict.fromkeys(find_codes(line)))
                say(raw)


def say(raw: bytes) -> None:
    """Into the job's log, which is our output, as it is. A full disk must not stop the reading:
    the compiler would wait for it, or die of a closed pipe."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()


def _tail_of(file: Path) -> str:
    try:
        with file.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return f.read().decode(errors="replace")
    except OSError:
        return "(there is none)"


def check_written(output: Path) -> None:
    """Raises ProgramFailed if the compiler was content and left nothing behind."""
    if not output.is_file() or output.stat().st_size == 0:
        state = "an empty NEFF" if output.is_file() else "no NEFF"
        raise ProgramFailed(
            f"ended with status 0 and wrote {state}",
            hint="look for a full disk or a wrapper around neuronx-cc; `nxbucket doctor` names it",
        )
