"""A compile as a JUnit XML file: what CI systems show as a list of tests, one for each program."""

import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from nxbucket.compile.outcome import Outcome, PlannedProgram, Reporter
from nxbucket.toolkit.errors import EnvironmentProblem, NxbucketError
from nxbucket.toolkit.progress import describe

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even escaped. A compiler's log may."""


class JUnitReporter:
    """Passes everything on to another reporter. The file is written when the build ends, however it
    ends: on Ctrl-C it says what was done so far. It is there, empty, when the build begins: a file
    that cannot be written is known then, and an old one is not taken for this build's."""

    def __init__(self, inner: Reporter, file: Path, suite: str) -> None:
        self._inner = inner
        self._file = file
        self._suite = suite
        self._programs: Sequence[PlannedProgram] = ()
        self._outcomes: dict[str, Outcome] = {}
        self.begins = inner.begins
        self.started = inner.started
        self.waiting = inner.waiting
        self.noted = inner.noted

    def __enter__(self) -> "JUnitReporter":
        self._began, self._timestamp = time.monotonic(), datetime.now(UTC)
        self._write_or_say(None)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._write_or_say(error)

    def planned(self, programs: Sequence[PlannedProgram]) -> None:
        self._programs = programs
        self._inner.planned(programs)

    def finished(self, outcome: Outcome) -> None:
        self._outcomes[outcome.name] = outcome
        self._inner.finished(outcome)

    def _write_or_say(self, error: BaseException | None) -> None:
        try:
            self._write(error)
        except OSError as err:
            problem = f"{self._file}: cannot write the JUnit report: {err.strerror or err}"
            if error is not None:
                print(f"warning: {problem}", file=sys.stderr)  # What ended the build is said next.
                return
            hint = "give --junit a file that can be written"
            raise EnvironmentProblem(problem, hint=hint) from err

    def _write(self, error: BaseException | None) -> None:
        """Beside the file first: a reader finds the old one or the new one, whole."""
        staged = self._file.with_name(f".{self._file.name}.{os.urandom(6).hex()}")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.write_bytes(
                ElementTree.tostring(self._tree(error), "utf-8", xml_declaration=True)
            )
            staged.replace(self._file)
        finally:
            staged.unlink(missing_ok=True)

    def _tree(self, error: BaseException | None) -> ElementTree.Element:
        suite = ElementTree.Element("testsuite", name=_text(self._suite))
        for program in self._programs:
            suite.append(self._case(program, error))
        if error is not None and not isinstance(error, KeyboardInterrupt):
            suite.append(self._build_error(error))
        wall_s = f"{time.monotonic() - self._began:.3f}"
        counts = {
            "tests": str(len(suite)),
            "failures": str(len(suite.findall("testcase/failure"))),
            "errors": str(len(suite.findall("testcase/error"))),
            "skipped": str(len(suite.findall("testcase/skipped"))),
            "time": wall_s,
        }
        suite.attrib |= counts
        suite.set("timestamp", self._timestamp.strftime("%Y-%m-%dT%H:%M:%S"))
        suite.set("hostname", _text(socket.gethostname()))
        suites = ElementTree.Element("testsuites", {"name": "nxbucket compile", **counts})
        suites.append(suite)
        ElementTree.indent(suites)
        return suites

    def _case(self, program: PlannedProgram, error: BaseException | None) -> ElementTree.Element:
        outcome = self._outcomes.get(program.name)
        wall_s = 0.0 if outcome is None else outcome.wall_s
        case = self._new_case(program.name, wall_s)
        if outcome is None:
            why = "the build was interrupted" if _interrupted(error) else "the build ended early"
            ElementTree.SubElement(case, "skipped", message=why)
        elif outcome.status == "skipped":
            ElementTree.SubElement(case, "skipped", message=_text(outcome.detail or ""))
        elif outcome.status in ("failed", "unpushed"):
            kind = "CompileError" if outcome.status == "failed" else "StoreError"
            failure = ElementTree.SubElement(
                case, "failure", message=_text(outcome.what_failed), type=kind
            )
            hint = f"hint: {outcome.hint}\n" if outcome.hint else ""
            log = f"log: {outcome.log_path}, which ends:\n{outcome.log_tail}\n"
            failure.text = _text(hint + (log if outcome.status == "failed" else ""))
        else:
            said = ElementTree.SubElement(case, "system-out")
            said.text = _text(f"{describe(outcome)}\nkey {program.key}\n")
        return case

    def _build_error(self, error: BaseException) -> ElementTree.Element:
        """What ended the build itself, and belongs to no program."""
        case = self._new_case("build", 0.0)
        kind = type(error).__name__
        found = ElementTree.SubElement(case, "error", message=_text(str(error)), type=kind)
        if isinstance(error, NxbucketError) and error.hint:
            found.text = _text(f"hint: {error.hint}\n")
        return case

    def _new_case(self, name: str, wall_s: float) -> ElementTree.Element:
        return ElementTree.Element(
            "testcase", classname=_text(self._suite), name=_text(name), time=f"{wall_s:.3f}"
        )


def _interrupted(error: BaseException | None) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _text(text: str) -> str:
    return NO_XML.sub("\N{REPLACEMENT CHARACTER}", COLOURS.sub("", text))
