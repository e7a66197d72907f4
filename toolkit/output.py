"""What the CLI prints: data to stdout, everything else to stderr.

Plain text, written by hand: rich would wrap paths and read square brackets as markup, and costs a
good part of `validate`'s start-up. Colour only marks the words `error:`, `warning:` and `hint:`, on
a terminal, and not under NO_COLOR.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from nxbucket.toolkit.errors import EnvironmentProblem, NxbucketError, Problem, SpecError

_RED, _YELLOW, _CYAN = "31", "33", "36"


def print_data(text: str) -> None:
    print(text)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their longest cell; nothing is cut or wrapped, so lines stay greppable."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def print_warning(text: str) -> None:
    print(f"{_mark('warning:', _YELLOW, sys.stderr)} {text}", file=sys.stderr)


def print_hint(text: str) -> None:
    print(f"{_mark('hint:', _CYAN, sys.stderr)} {text}", file=sys.stderr)


def print_indented(text: str) -> None:
    """Somebody else's words, such as the end of a compiler's log."""
    for line in text.splitlines():
        print(f"  | {line}", file=sys.stderr)


def print_error(error: NxbucketError) -> None:
    """`error: ...`, an empty line, `hint: ...`; a SpecError lists its problems first."""
    if isinstance(error, SpecError):
        for problem in error.problems:
            _print_problem(problem)
    print(f"{_mark('error:', _RED, sys.stderr)} {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\n{_mark('hint:', _CYAN, sys.stderr)} {error.hint}", file=sys.stderr)


def _print_problem(problem: Problem) -> None:
    key = "" if problem.key is None or problem.key in problem.message else f" ({problem.key})"
    print(f"{problem.place}: {problem.code}: {problem.message}{key}", file=sys.stderr)
    print(f"  {_mark('hint:', _CYAN, sys.stderr)} {problem.hint}", file=sys.stderr)


def _mark(word: str, colour: str, stream: TextIO) -> str:
    if os.environ.get("NO_COLOR") or not stream.isatty():
        return word
    return f"\x1b[{colour}m{word}\x1b[0m"


class ReaderGone(Exception):
    """Whoever read our output has closed it. No OSError, which click would end with exit code 1."""


@contextmanager
def errors_as_json(wanted: bool) -> Iterator[None]:
    """Under --json a known error is the one JSON object on stdout; the exit code stays the same.

    What the system refuses (a path that is too long, a full disk) is a known error, too.
    """
    try:
        try:
            yield
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as err:
            where = f"{err.filename}: " if err.filename else ""
            raise EnvironmentProblem(
                f"{where}{err.strerror or err}", hint="NXBUCKET_DEBUG=1 shows where it came from"
            ) from err
    except NxbucketError as error:
        if not wanted:
            raise
        print_json({"ok": False, **error.as_json()})
        raise SystemExit(error.exit_code) from error
