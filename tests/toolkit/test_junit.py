"""`compile --junit`: a file that any reader of JUnit XML takes, however the build ended."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from null_compiler import NullOptions, a_program, model_file, recorded
from recorder import Recorder

from nxbucket.compile.cache import Miss
from nxbucket.compile.outcome import Outcome, PlannedProgram, Status
from nxbucket.toolkit.errors import EnvironmentProblem, StoreError
from nxbucket.toolkit.junit import JUnitReporter

NULL_CLI = Path(__file__).parents[1] / "null_cli.py"


def start(folder: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NXBUCKET_")}
    return subprocess.Popen(
        [sys.executable, str(NULL_CLI), "compile", "--junit", "reports/out.xml", *arguments],
        cwd=folder,
        env={**environment, **NullOptions(**options).environ()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str, **options: Any) -> tuple[int, str]:
    process = start(folder, *arguments, **options)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def suite_in(file: Path) -> Element:
    """The only suite of `file`, after a look at everything that the usual schema asks for."""
    root = ElementTree.parse(file).getroot()
    assert root.tag == "testsuites"
    [suite] = root
    counted = {
        "tests": len(suite),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    assert {k: int(suite.attrib[k]) for k in counted} == counted
    assert {k: int(root.attrib[k]) for k in counted} == counted
    assert set(root.attrib) == {"name", "time", *counted}
    assert set(suite.attrib) == {"name", "time", "timestamp", "hostname", *counted}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.attrib["timestamp"])
    for case in suite:
        assert case.tag == "testcase"
        assert set(case.attrib) == {"classname", "name", "time"}
        assert float(case.attrib["time"]) >= 0
        for result in case:
            if result.tag in ("failure", "error"):
                assert set(result.attrib) == {"message", "type"}
            else:
                assert result.tag in ("skipped", "system-out")
    return suite


def case_of(suite: Element, name: str) -> Element:
    [case] = [case for case in suite if case.attrib["name"] == name]
    return case


def test_every_program_is_a_test_and_a_failure_has_its_reason_log_and_the_logs_place(
    tmp_path: Path,
) -> None:
    model_file(tmp_path, (32, 64), (1,))
    assert run(tmp_path, fail=("prefill_s64",), sleep_s=0.2)[0] == 1
    suite = suite_in(tmp_path / "reports" / "out.xml")
    assert suite.attrib["name"] == str(tmp_path / "model.yaml")
    assert [case.attrib["name"] for case in suite] == ["prefill_s32", "prefill_s64", "decode_b1"]
    assert float(case_of(suite, "prefill_s32").attrib["time"]) >= 0.2
    failure = case_of(suite, "prefill_s64")[0]
    assert failure.attrib == {
        "message": "the compiler exited with status 1",
        "type": "CompileError",
    }
    assert failure.text is not None
    log = re.search(r"^log: (.+), which ends:$", failure.text, re.MULTILINE)
    assert log is not None
    assert "RuntimeError: cannot compile prefill_s64" in Path(log[1]).read_text()
    assert "RuntimeError: cannot compile prefill_s64" in failure.text

    assert run(tmp_path)[0] == 0
    suite = suite_in(tmp_path / "reports" / "out.xml")
    said = case_of(suite, "prefill_s32").findtext("system-out")
    assert said is not None
    assert said.startswith("prefill_s32: hit\nkey ")
    assert suite.attrib["failures"] == "0"


def test_after_a_failure_what_was_not_begun_is_skipped(tmp_path: Path) -> None:
    model_file(tmp_path, (32, 64), (1,))
    code, _ = run(tmp_path, "--fail-fast", "--jobs", "1", fail=("prefill_s32",))
    suite = suite_in(tmp_path / "reports" / "out.xml")
    assert (code, suite.attrib["failures"], suite.attrib["skipped"]) == (1, "1", "2")
    assert case_of(suite, "decode_b1")[0].attrib == {"message": "another program failed"}


def test_ctrl_c_leaves_a_report_of_what_is_done(tmp_path: Path) -> None:
    model_file(tmp_path, (32, 64), (1,))
    process = start(tmp_path, "--jobs", "1", events=str(tmp_path), hang=("prefill_s64",))
    deadline = time.monotonic() + 20
    while recorded(tmp_path, "compile")[-1:] != ["prefill_s64"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in err) == (130, False)
    suite = suite_in(tmp_path / "reports" / "out.xml")
    assert [result.tag for case in suite for result in case] == ["system-out", "skipped", "skipped"]
    assert case_of(suite, "prefill_s64")[0].attrib["message"] == "the build was interrupted"
    assert [p.name for p in (tmp_path / "reports").iterdir()] == ["out.xml"]


def test_what_ends_the_build_itself_is_an_error(tmp_path: Path) -> None:
    model_file(tmp_path, (32,), (1,))
    (tmp_path / "cache").write_text("a file")
    assert run(tmp_path)[0] == 1
    suite = suite_in(tmp_path / "reports" / "out.xml")
    error = case_of(suite, "build")[0]
    assert error.attrib["type"] == "CacheError"
    assert "cannot write to the artifact cache" in error.attrib["message"]
    assert (error.text or "").startswith("hint: ")
    assert case_of(suite, "prefill_s32")[0].attrib["message"] == "the build ended early"


def test_a_report_that_cannot_be_written_is_known_before_anything_is_compiled(
    tmp_path: Path,
) -> None:
    model_file(tmp_path, (32,), (1,))
    (tmp_path / "reports").write_text("a file")
    code, err = run(tmp_path, events=str(tmp_path))
    assert (code, "Traceback" in err) == (3, False)
    assert "reports/out.xml: cannot write the JUnit report" in err
    assert recorded(tmp_path, "compile") == []


PROGRAMS = [PlannedProgram(a_program("prefill", size), {}, "a" * 64, Miss()) for size in (1, 2, 4)]


def outcome(program: PlannedProgram, status: Status, **fields: Any) -> Outcome:
    return Outcome(program, status, 1.5, None, **fields)


def report(file: Path, outcomes: Sequence[Outcome], error: BaseException | None = None) -> Recorder:
    recorder = Recorder()
    with JUnitReporter(recorder, file, "mødel.yaml") as junit:
        junit.planned(PROGRAMS)
        for each in outcomes:
            junit.finished(each)
        if error is not None:
            raise error
    return recorder


HOSTILE = "a\x00b\x08c\x1b[31mred\x1b[0m <&>]]> \ud800 \ufffe \x7f é 漢 \U0001f600\r\n\tend"


def test_whatever_a_compiler_prints_the_xml_can_be_read(tmp_path: Path) -> None:
    failed = outcome(
        PROGRAMS[0], "failed", detail=f"said {HOSTILE}", log_tail=HOSTILE, hint=HOSTILE
    )
    recorder = report(tmp_path / "out.xml", [failed, outcome(PROGRAMS[1], "compiled")])
    suite = suite_in(tmp_path / "out.xml")
    failure = case_of(suite, "prefill_s1")[0]
    for text in (failure.text or "", failure.attrib["message"]):
        assert "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}cred <&>]]>" in text
        assert "é 漢 \U0001f600" in text
    assert recorder.lines == ["planned 3", "failed prefill_s1", "compiled prefill_s2"]


def test_the_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.xml"
    with pytest.raises(StoreError):
        report(file, [], StoreError("the connection is lost", hint="mend it"))
    before = file.read_bytes()
    assert b"the connection is lost" in before

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        report(file, [])
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
