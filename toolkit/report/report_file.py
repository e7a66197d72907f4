"""Where a report goes, and what has to be there before one is worth starting on."""

from importlib.util import find_spec
from pathlib import Path

from nxbucket.toolkit.errors import EnvironmentProblem, UsageError
from nxbucket.toolkit.whole_file import write_whole

INSTALL = "pip install 'nxbucket[report]'"


def check_report(path: Path) -> None:
    """Before the work that the report is about. Raises UsageError and EnvironmentProblem."""
    if path.is_dir():
        raise UsageError(f"--report {path} is a folder", hint="name a file, e.g. report.html")
    if not path.parent.is_dir():
        raise UsageError(
            f"--report {path}: no such folder: {path.parent}", hint=f"mkdir -p {path.parent}"
        )
    if find_spec("matplotlib") is None:
        raise without_matplotlib()


def without_matplotlib() -> EnvironmentProblem:
    return EnvironmentProblem("a report needs matplotlib, which is not installed", hint=INSTALL)


def write_report(path: Path, html: str) -> None:
    """All of it or nothing. Raises UsageError and EnvironmentProblem."""
    check_report(path)
    try:
        write_whole(path, html.encode())
    except OSError as err:
        raise EnvironmentProblem(
            f"cannot write the report {path}: {err.strerror or err}",
            hint="name a file in a folder that can be written",
        ) from err
