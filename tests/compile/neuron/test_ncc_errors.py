"""Every documented error of neuronx-cc is told in our words, with a line to edit."""

import json
from pathlib import Path

import pytest

from nxbucket.compile.failure import Failure, ProgramFailed
from nxbucket.compile.neuron.hardware import hbm_bytes_per_rank, logical_cores
from nxbucket.compile.neuron.ncc_errors import (
    MEANINGS,
    RETRYABLE,
    failure_of_codes,
    failure_of_exit,
    find_codes,
)
from nxbucket.compile.neuron.oom import oom_kills
from nxbucket.toolkit.errors import CompileError
from nxbucket.toolkit.spec_reader import LNC_OF

# compiler/error-codes of the SDK's documentation, 2.32.
DOCUMENTED = """
EARG001 EBIR023 EBVF030 EHCA005 EMOD025 EOOM001 EOOM002 ESFH002 ESPP004 ESPP047 EUOC002 EVRF001
EVRF004 EVRF005 EVRF006 EVRF007 EVRF009 EVRF010 EVRF011 EVRF013 EVRF015 EVRF016 EVRF017 EVRF018
EVRF019 EVRF022 EVRF031 EVRF035 EVRF036 EVRF037 EVRF038 EVRF039 EVRF040 EVRF041 EVRF042 EVRF043
EVRF044 EVRF045 EVRF046 EVRF047 EVRF048 EVRF049 EVRF050 EVRF051 EVRF052 EVRF053 EVRF054 EVRF055
EVRF056 EVRF057 EVRF058 EVRF059 EVRF060 EVRF061 EVRF062 EVRF063 EVRF064 EVRF065 EXSP001 EXTP004
"""


@pytest.mark.parametrize("code", DOCUMENTED.split())
def test_a_documented_code_has_a_sentence_a_mend_and_no_retry(code: str) -> None:
    failure = failure_of_codes([f"NCC_{code}"])
    assert failure is not None
    assert failure.message.startswith(f"reports NCC_{code}: the program ")
    assert failure.hint
    assert not failure.retryable


def test_only_the_race_between_kernels_is_worth_a_retry() -> None:
    assert {"NCC_ILKK005"} == RETRYABLE <= set(MEANINGS)
    for codes, retryable in (
        (["NCC_ILKK005"], True),
        (["NCC_ILKK005", "NCC_IXYZ901"], False),
        (["NCC_EVRF009", "NCC_ILKK005"], False),
    ):
        failure = failure_of_codes(codes)
        assert failure is not None
        assert failure.retryable == retryable


def test_codes_are_found_in_the_forms_they_are_printed_in() -> None:
    text = (
        "2026-11-30T08:00:00Z ERROR 1 [job]: [NCC_EVRF009] too big\n"
        "[INTERNAL_ERROR] [NCC_IBIR901] assertion - (NCC_EVRF009)\n"
        "NCC_X NCC_evrf001 XNCC_EVRF001 NCC_EVRF0012 NCC_LKK005"
    )
    assert find_codes(text) == ["NCC_EVRF009", "NCC_IBIR901", "NCC_LKK005"]


def test_a_code_nobody_documents_is_named() -> None:
    failure = failure_of_codes(["NCC_EXYZ001"])
    assert failure is not None
    assert "NCC_EXYZ001" in failure.message
    assert failure_of_codes([]) is None


@pytest.mark.parametrize(
    ("status", "output", "oom", "reason", "retryable"),
    [
        (-9, "", True, "was killed by SIGKILL (this host or its container ran out", True),
        (-9, "", False, "was killed by SIGKILL (out of memory?)", True),
        (-6, "", False, "crashed with SIGABRT", True),
        (-11, "", False, "crashed with SIGSEGV", True),
        (-64, "", False, "crashed with SIGRTMAX", True),
        (70, "[F137] neuronx-cc was forcibly killed", False, "was killed by SIGKILL", True),
        (70, "[F137] neuronx-cc was forcibly killed", True, "ran out of memory", True),
        (70, "[F134] neuronx-cc terminated abnormally", False, "crashed with SIGABRT", False),
        (70, "[F139] neuronx-cc terminated abnormally", False, "crashed with SIGSEGV", False),
        (137, "", False, "was killed by SIGKILL", True),
        (70, "", False, "ended with status 70 and no NCC code", False),
        (1, "[F135]", False, "ended with status 1", False),
    ],
)
def test_ends_are_told_apart(
    status: int, output: str, oom: bool, reason: str, retryable: bool
) -> None:
    failure = failure_of_exit(status, output, [], oom)
    assert reason in failure.message
    assert failure.hint
    assert failure.retryable == retryable


def test_a_code_says_more_than_the_end() -> None:
    assert "NCC_EVRF009" in failure_of_exit(-9, "", ["NCC_EVRF009"], True).message


def test_oom_kills_are_counted_where_the_kernel_counts_them(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "job").mkdir(parents=True)
    assert oom_kills(proc, cgroups) == 0
    (proc / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/job\n")
    (proc / "vmstat").write_text("nr_free_pages 12\noom_kill 3\n")
    (cgroups / "job" / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert oom_kills(proc, cgroups) == 5
    (proc / "vmstat").write_text("oom_kill x\n")
    assert oom_kills(proc, cgroups) == 2
    assert oom_kills() >= 0


def test_a_failure_goes_through_json_and_noise_does_not() -> None:
    failed = ProgramFailed("was killed", hint="more memory", retryable=True)
    failure = Failure.of(failed)
    assert Failure.from_json(json.dumps(failure.as_json())) == failure
    other = Failure.of(CompileError("no rule for aten.foo", hint="report it"))
    assert (other.reason, other.retryable) == ("reports: no rule for aten.foo", False)
    for text in ("", "{", "[]", "3", '{"failure": 3}', '{"failure": {}}', '{"graph_key": "x"}'):
        assert Failure.from_json(text) is None


@pytest.mark.parametrize(
    ("target", "lnc", "gib", "cores"),
    [
        ("inf2", 1, 16, 2),
        ("trn1", 1, 16, 2),
        ("trn1n", 1, 16, 2),
        ("trn2", 1, 12, 8),
        ("trn2", 2, 24, 4),
        ("trn3", 1, 18, 8),
        ("trn3", 2, 36, 4),
    ],
)
def test_the_memory_and_the_ranks_of_a_chip(target: str, lnc: int, gib: int, cores: int) -> None:
    assert hbm_bytes_per_rank(target, lnc) == gib << 30
    assert logical_cores(target, lnc) == cores


def test_every_neuron_target_has_a_chip() -> None:
    for target, lncs in LNC_OF.items():
        for lnc in lncs:
            assert hbm_bytes_per_rank(target, lnc) > 0
