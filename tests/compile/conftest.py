import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("NXBUCKET_", "NULL_"))]:
        monkeypatch.delenv(name)


def _processes_that_name(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() + b"/" in command and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[[], list[int]]]:
    """Pids of live processes with a file of this test on their command line: its workers."""
    yield lambda: _processes_that_name(tmp_path)
