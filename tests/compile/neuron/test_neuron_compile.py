"""`nxbucket compile` for a Neuron target, from the command line, with a stand-in for neuronx-cc."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from neuron_bench import FIRST, SECOND, NeuronBench
from neuronx_cc_stand_in import make_neff, program_name
from waiting import wait_for

from nxbucket.compile.cache import ArtifactCache, Hit, Miss
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.neuron.neff import check_neff_file, read_neff

Workers = Callable[[], list[int]]


@pytest.fixture
def bench(tmp_path: Path) -> NeuronBench:
    """Two programs for trn2."""
    return NeuronBench(tmp_path)


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {p["name"]: p["status"] for p in report["programs"]}


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {p["name"]: p for p in report["programs"]}


def manifest_of(bench: NeuronBench, program: dict[str, Any]) -> tuple[ArtifactCache, Hit]:
    cache = ArtifactCache(bench.folder / "cache")
    found = cache.lookup(program["key"])
    assert isinstance(found, Hit)
    return cache, found


def test_each_program_becomes_a_neff_beside_its_hlo_and_a_second_run_compiles_none(
    bench: NeuronBench,
) -> None:
    code, report = bench.compile()
    assert code == 0
    assert statuses(report) == {FIRST: "compiled", SECOND: "compiled"}
    assert report["target"] == "trn2-lnc2"
    toolchain = report["toolchain"]
    assert (toolchain["compiler"], toolchain["route"]) == ("neuronx-cc", "neuronx-cc")
    assert toolchain["version"] == "2.27.5334.0+f702b353"
    assert (toolchain["target"], toolchain["lnc"]) == ("trn2", "2")
    assert (toolchain["optlevel"], toolchain["auto_cast"]) == ("1", "none")
    assert json.loads(toolchain["flags"]) == ["--model-type", "transformer"]
    for program in report["programs"]:
        cache, found = manifest_of(bench, program)
        blobs = {blob.role: cache.blob_path(blob.digest) for blob in found.manifest.blobs}
        assert set(blobs) == {"program", "hlo"}
        assert check_neff_file(blobs["program"], "trn2", 2, found.manifest.signature) == []
        assert read_neff(blobs["program"]).graphs == ("sg00", "sg01")
    bench.assert_nothing_wrong_is_published()
    assert [p.name for p in bench.folder.iterdir() if "nki" in p.name or "metric" in p.name] == []

    code, again = bench.compile()
    assert (code, statuses(again)) == (0, {FIRST: "hit", SECOND: "hit"})
    assert sorted(bench.compiled()) == [SECOND, FIRST]


def test_the_real_lowering_compiles_from_the_command_line(bench: NeuronBench) -> None:
    command = [sys.executable, "-c", "from nxbucket.toolkit.cli import main; main()"]
    search = f"{bench.path}{os.pathsep}{os.defpath}"
    done = subprocess.run(
        [*command, "compile", "--json"],
        cwd=bench.folder,
        env={**os.environ, "PATH": search},
        stdout=subprocess.PIPE,
        check=False,
    )
    report = json.loads(done.stdout)
    assert statuses(report) == {FIRST: "compiled", SECOND: "compiled"}
    _, found = manifest_of(bench, report["programs"][0])
    assert set(found.manifest.inputs["lowering"]) >= {"torch", "jax", "jaxlib"}
    bench.assert_nothing_wrong_is_published()


def test_the_key_names_nothing_of_the_host(bench: NeuronBench) -> None:
    _, report = bench.compile("-j", "1")
    _, found = manifest_of(bench, report["programs"][0])
    text = json.dumps(found.manifest.inputs)
    assert str(bench.folder) not in text
    assert os.uname().nodename not in text


def test_a_new_neuronx_cc_compiles_everything_again(bench: NeuronBench) -> None:
    _, before = bench.compile()
    bench.forget_events()
    code, after = bench.compile(version="2.28.1.0+0")
    assert code == 0
    assert set(statuses(after).values()) == {"compiled"}
    assert len(bench.compiled()) == 2
    assert before["programs"][0]["key"] != after["programs"][0]["key"]


def test_the_verbosity_a_logfile_and_the_way_to_the_binary_are_not_in_the_key(
    bench: NeuronBench,
) -> None:
    bench.compile()
    elsewhere = bench.folder / "elsewhere"
    shutil.move(bench.path, elsewhere)
    _, again = bench.compile(path=f"{elsewhere}{os.pathsep}{os.defpath}", version_on="stderr")
    assert set(statuses(again).values()) == {"hit"}


def test_the_job_has_a_folder_of_its_own_an_exact_command_and_a_clean_environment(
    bench: NeuronBench,
) -> None:
    # The stand-in refuses to run where these reach it.
    env = {"NEURON_CC_FLAGS": "--cache_dir=/x --no_cache", "XLA_FLAGS": "--xla_dump_to=/x"}
    code, report = bench.compile(env=env)
    assert code == 0
    log = bench.log(report["programs"][0])
    [command] = [line for line in log.splitlines() if line.startswith("running ")]
    words = command.split()[1:]
    assert words[:2] == [str(bench.path / "neuronx-cc"), "compile"]
    for option in ("--output", "--logfile"):
        assert Path(words[words.index(option) + 1]).is_absolute()
    assert "INFO: compiling" in log


FAILURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a documented code": (
        {"do": "fail", "code": "NCC_EVRF009", "status": 70},
        "reports NCC_EVRF009: the program needs more memory than its core's HBM has",
        "num_gpu_blocks_override",
    ),
    "an internal code": (
        {"do": "fail", "code": "NCC_IXYZ902", "status": 70},
        "reports NCC_IXYZ902, an error of its own that nxbucket does not know",
        "compiler.optlevel: 1",
    ),
    "the documented code of two": (
        {"do": "fail", "code": ["NCC_IABC901", "NCC_EBVF030"], "status": 1},
        "reports NCC_EBVF030: the program becomes more instructions",
        "num_batched_tokens_buckets",
    ),
    "no code": ({"do": "fail", "code": [], "status": 70}, "ended with status 70", "optlevel"),
    "killed": ({"do": "signal", "number": 9}, "was killed by SIGKILL (", "--jobs 1"),
    "aborted": ({"do": "signal", "number": 6}, "crashed with SIGABRT", "report the log to AWS"),
    "a bad pointer": ({"do": "signal", "number": 11}, "crashed with SIGSEGV", "optlevel"),
    "a child of it killed": ({"do": "driver", "number": 9}, "was killed by SIGKILL (", "--jobs"),
    "a child of it aborted": ({"do": "driver", "number": 6}, "crashed with SIGABRT", "AWS"),
    "nothing written": ({"do": "nothing"}, "ended with status 0 and wrote no NEFF", "full disk"),
    "an empty file": ({"do": "empty"}, "ended with status 0 and wrote an empty NEFF", "full disk"),
    "half a file": ({"do": "truncated"}, "the NEFF it wrote is cut off", "nothing was published"),
    "a flipped bit": ({"do": "damaged"}, "is damaged: its archive is not", "nothing was"),
    "another target": (
        {"do": "neff", "target": "sunda"},
        "the NEFF it wrote is for trn1, trn1n, inf2 ('sunda'), not for trn2",
        "compiler.*",
    ),
    "another logical core": (
        {"do": "neff", "lnc": 1},
        "is for logical cores of 1, not of 2 (lnc)",
        "compiler.*",
    ),
    "a graph less": ({"do": "neff", "graphs": 1}, "has 1 graphs; a logical core of 2", "nothing"),
    "other tensors": (
        {"do": "neff", "sizes": [4, 4]},
        "has other inputs than the program: it lacks 2 of 4 bytes, 1 of 16",
        "nothing was published",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_told_apart_mended_never_published_and_never_remembered(
    bench: NeuronBench, name: str
) -> None:
    # B125
    what, reason, mend = FAILURES[name]
    code, report = bench.compile(programs={SECOND: what})
    assert code == 1
    assert statuses(report) == {FIRST: "compiled", SECOND: "failed"}
    failed = by_name(report)[SECOND]
    assert reason in failed["detail"]
    assert mend in failed["hint"]
    assert f"error: the compiler {failed['detail']}" in bench.log(failed)
    assert not (bench.folder / "model.lock").exists()
    retried = "was killed" in reason or what["do"] == "signal"
    assert bench.compiled().count(SECOND) == 1 + retried
    bench.assert_nothing_wrong_is_published()
    assert ArtifactCache(bench.folder / "cache").lookup(failed["key"]) == Miss()


def test_a_failure_is_shown_to_a_person_and_the_next_run_compiles_only_that(
    bench: NeuronBench,
) -> None:
    done = bench.run("compile", programs={SECOND: FAILURES["a documented code"][0]})
    assert done.returncode == 1
    assert f"warning: {SECOND}: the compiler reports NCC_EVRF009: the program needs" in done.stderr
    assert f"hint: {SECOND}: lower max_num_seqs, max_model_len or num_gpu_blocks" in done.stderr
    assert "  | [ERROR] [NCC_EVRF009] this did not go well" in done.stderr
    assert bench.run("cache", "verify", "--cache-dir", "cache").returncode == 0
    code, again = bench.compile()
    assert (code, statuses(again)) == (0, {FIRST: "hit", SECOND: "compiled"})
    assert bench.run("cache", "verify", "--cache-dir", "cache").returncode == 0


def test_what_a_failed_compiler_was_given_is_kept_until_it_succeeds(bench: NeuronBench) -> None:
    failing = {SECOND: {"do": "fail", "code": "NCC_EVRF016"}}
    code, report = bench.compile(programs=failing)
    assert code == 1
    failed = by_name(report)[SECOND]
    kept = bench.folder / "cache/logs" / f"{failed['key']}.hlo"
    assert failed["hlo"] == str(kept)
    assert program_name(kept.read_bytes()) == SECOND
    assert by_name(report)[FIRST]["hlo"] is None
    # Once more: overwritten, and a person is told.
    kept.write_text("old")
    done = bench.run("compile", programs=failing)
    assert f"note: {SECOND}: the HLO it was given is {kept}\n" in done.stderr
    assert program_name(kept.read_bytes()) == SECOND
    assert bench.compile()[0] == 0
    assert list(kept.parent.glob("*.hlo")) == []


@pytest.mark.parametrize(
    "what",
    [
        {"do": "signal", "number": 9},
        {"do": "driver", "number": 9},
        {"do": "fail", "code": "NCC_ILKK005"},
    ],
)
def test_what_may_go_through_a_second_time_is_tried_again_once(
    bench: NeuronBench, what: dict[str, Any]
) -> None:
    code, report = bench.compile(programs={SECOND: {**what, "times": 1}})
    assert (code, statuses(report)) == (0, {FIRST: "compiled", SECOND: "compiled"})
    assert bench.compiled().count(SECOND) == 2


def test_nonsense_in_the_output_hides_no_code_and_stops_nothing(bench: NeuronBench) -> None:
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    what = {SECOND: {"do": "fail", "code": "NCC_EVRF009"}}
    code, report = bench.compile(programs=what, noise=4 << 20, env=env)
    assert (code, statuses(report)) == (1, {FIRST: "compiled", SECOND: "failed"})
    assert "NCC_EVRF009" in by_name(report)[SECOND]["detail"]


def test_a_code_beside_a_race_is_an_error_all_the_same(bench: NeuronBench) -> None:
    what = {"do": "fail", "code": ["NCC_ILKK005", "NCC_EVRF009"]}
    code, _ = bench.compile(programs={SECOND: what})
    assert code == 1
    assert bench.compiled().count(SECOND) == 1


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # A zombie is dead: whoever adopted it has not looked yet.
    return stat.rpartition(")")[2].split()[0] != "Z"


def all_dead(bench: NeuronBench) -> bool:
    return wait_for(lambda: not any(is_alive(pid) for pid in bench.pids()), 5)


def test_children_that_outlive_the_compiler_end_with_the_job(bench: NeuronBench) -> None:
    code, report = bench.compile(children=True)
    assert (code, statuses(report)) == (0, {FIRST: "compiled", SECOND: "compiled"})
    assert len(bench.pids()) == 4
    assert all_dead(bench)


def test_a_compiler_that_hangs_is_given_up_with_its_children(bench: NeuronBench) -> None:
    hang = {SECOND: {"do": "hang"}}
    code, report = bench.compile("--timeout-s", "4", programs=hang)
    assert (code, statuses(report)) == (1, {FIRST: "compiled", SECOND: "failed"})
    assert by_name(report)[SECOND]["detail"] == "ran into the time limit of 4 s"
    assert bench.compiled().count(SECOND) == 1
    assert all_dead(bench)
    bench.assert_nothing_wrong_is_published()


def test_ctrl_c_ends_the_compiler_and_the_next_run_goes_on(
    bench: NeuronBench, workers: Workers
) -> None:
    process = bench.start("compile", "--jobs", "1", programs={SECOND: {"do": "hang"}})
    assert wait_for(lambda: len(bench.pids()) == 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert workers() == []
    assert all_dead(bench)
    code, again = bench.compile()
    assert (code, statuses(again)) == (0, {FIRST: "hit", SECOND: "compiled"})
    bench.assert_nothing_wrong_is_published()


def test_a_kill_of_the_command_ends_the_compiler_and_its_children(
    bench: NeuronBench, workers: Workers
) -> None:
    process = bench.start("compile", "--jobs", "1", programs={SECOND: {"do": "hang"}})
    assert wait_for(lambda: len(bench.pids()) == 3)
    process.kill()
    process.communicate(timeout=20)
    assert all_dead(bench)
    assert wait_for(lambda: workers() == [], 5)
    code, again = bench.compile()
    assert (code, statuses(again)) == (0, {FIRST: "hit", SECOND: "compiled"})
    bench.assert_nothing_wrong_is_published()


def test_two_commands_at_once_compile_each_program_once(bench: NeuronBench) -> None:
    processes = [bench.start("compile", "--json", sleep_s=0.3) for _ in range(2)]
    reports = [json.loads(p.communicate(timeout=120)[0]) for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert sorted(bench.compiled()) == [SECOND, FIRST]
    digests = [[p["digest"] for p in report["programs"]] for report in reports]
    assert digests[0] == digests[1]
    bench.assert_nothing_wrong_is_published()


def test_inspect_takes_a_key_or_a_digest_of_the_cache(bench: NeuronBench) -> None:
    _, report = bench.compile()
    key = by_name(report)[SECOND]["key"]
    cache, found = manifest_of(bench, by_name(report)[SECOND])
    neff, hlo = (blob.digest for blob in found.manifest.blobs)

    def inspect(name: str) -> "subprocess.CompletedProcess[str]":
        return bench.run("inspect", name, "--cache-dir", "cache")

    for name in (key, key[:12], neff[:12]):
        done = inspect(name)
        assert done.returncode == 0
        assert "cayman" in done.stdout
    done = inspect(key[:12])
    assert f"note: {SECOND}, trn2-lnc2: its program is {cache.blob_path(neff)}" in done.stderr
    assert f"note: its hlo is {cache.blob_path(hlo)}" in done.stderr
    # The stand-in's graph has no instructions.
    assert f"{cache.blob_path(hlo)}: not an HloModuleProto" in inspect(hlo[:12]).stderr
    done = inspect("0000")
    assert done.returncode == 2
    assert "no file 0000, and 0 keys and 0 blobs of" in done.stderr
    cache.blob_path(neff).unlink()
    done = inspect(key)
    assert done.returncode == 1
    assert f"error: {cache.blob_path(neff)} is missing" in done.stderr


def test_without_a_compiler_nothing_is_lowered_and_the_mend_is_named(bench: NeuronBench) -> None:
    done = bench.run("compile", path=os.defpath)
    assert done.returncode == 3
    assert "error: neuronx-cc is not on PATH" in done.stderr
    assert "--extra-index-url https://pip.repos.neuron.amazonaws.com" in done.stderr
    assert "nxbucket compile --emulate" in done.stderr
    assert not (bench.folder / "cache").exists()
    assert json.loads(bench.run("compile", "--json", path=os.defpath).stdout)["error"]["code"] == (
        "environment"
    )


def test_without_a_compiler_plan_prints_all_but_keys_and_hits(bench: NeuronBench) -> None:
    done = bench.run("plan", path=os.defpath)
    assert done.returncode == 0
    assert f"{FIRST}  unknown (no neuronx-cc here)  " in done.stdout
    assert "KV cache  " in done.stdout
    assert "to compile  unknown; 2 programs at most" in done.stdout
    assert "note: neuronx-cc is not on PATH" in done.stderr
    plan_file = bench.folder / "model.yaml"
    assert f"hint: nxbucket plan {plan_file} --emulate" in done.stderr
    report = json.loads(bench.run("plan", "--json", path=os.defpath).stdout)
    assert report["ok"]
    assert [p["cache"] for p in report["programs"]] == ["unknown", "unknown"]
    assert {p["key"] for p in report["programs"]} == {None}
    assert report["to_compile"]["programs"] is None
    assert not (bench.folder / "cache").exists()


def test_without_a_compiler_the_lock_says_which_it_was(bench: NeuronBench) -> None:
    bench.compile()
    bench.forget_events()
    lock = (bench.folder / "model.lock").read_text()
    plan = bench.run("plan", path=os.defpath)
    assert (plan.returncode, plan.stdout.count("  hit  ")) == (0, 2)
    explained = bench.run("explain", path=os.defpath)
    assert (explained.returncode, explained.stdout.splitlines()[0]) == (
        0,
        f"{FIRST}, {SECOND}: hit",
    )
    for done in (plan, explained):
        assert "keys are for the compiler that model.lock names" in done.stderr
    code, report = bench.compile(path=os.defpath)
    assert (code, statuses(report)) == (0, {FIRST: "hit", SECOND: "hit"})
    assert not report["lock_written"]
    assert (bench.folder / "model.lock").read_text() == lock

    # What is missing is explained; only compiling it takes the compiler.
    key = by_name(report)[SECOND]["key"]
    ArtifactCache(bench.folder / "cache").entry_path(key).unlink()
    assert bench.run("plan", path=os.defpath).stdout.count("  miss  ") == 1
    explained = bench.run("explain", path=os.defpath)
    assert explained.returncode == 1
    assert f"{SECOND} is missing" in explained.stdout
    assert bench.compile(path=os.defpath)[0] == 3
    # The lock knows nothing of other options.
    model_yaml = bench.folder / "model.yaml"
    model_yaml.write_text(model_yaml.read_text() + "compiler: {optlevel: 2}\n")
    assert bench.run("explain", path=os.defpath).returncode == 3
    assert "unknown" in bench.run("plan", path=os.defpath).stdout
    assert bench.compiled() == []


def test_a_target_that_the_installed_compiler_does_not_list_is_refused(bench: NeuronBench) -> None:
    for style in ("argparse", "paragraph"):
        done = bench.run("compile", targets=("trn1", "inf2"), help_style=style)
        assert done.returncode == 1
        assert "does not compile for trn2; it lists trn1, inf2" in done.stderr
    assert bench.compiled() == []


def test_a_compiler_that_is_replaced_during_a_build_publishes_under_no_other_s_key(
    bench: NeuronBench,
) -> None:
    real = bench.path / "real"
    (bench.path / "neuronx-cc").rename(real)
    count = bench.folder / "count"
    (bench.path / "neuronx-cc").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || exec {sys.executable} -S {real} "$@"\n'
        f'echo x >> {count}\necho "NeuronX Compiler version 2.$(wc -l < {count}).0"\n'
    )
    (bench.path / "neuronx-cc").chmod(0o755)
    code, report = bench.compile("-j", "1")
    assert (code, statuses(report)) == (1, {FIRST: "failed", SECOND: "failed"})
    assert {p["detail"] for p in report["programs"]} == {
        "was replaced by another version while the build ran"
    }
    bench.assert_nothing_wrong_is_published()
    assert not (bench.folder / "model.lock").exists()


def test_inf2_and_trn1_share_a_chip_and_not_a_key(bench: NeuronBench) -> None:
    keys = set()
    for target in ("inf2", "trn1"):
        NeuronBench(bench.folder, f"target: {target}\n")
        code, report = bench.compile()
        assert (code, report["target"]) == (0, f"{target}-lnc1")
        keys.add(report["programs"][0]["key"])
    assert len(keys) == 2


def test_a_program_that_does_not_fit_its_core_is_foretold(bench: NeuronBench) -> None:
    NeuronBench(bench.folder, "target: trn2\nnum_gpu_blocks_override: 5000000\n")
    done = bench.run("compile")
    assert "a rank of trn2 has 24.0 GiB of HBM at compiler.lnc 2" in done.stderr
    assert "NCC_EVRF009" in done.stderr
    plan = json.loads(bench.run("plan", "--json").stdout)
    assert plan["memory_per_rank"]["hbm_bytes"] == 24 << 30
    assert "24.0 GiB of HBM" in plan["warnings"][0]
    assert "HBM 24.0 GiB" in bench.run("plan").stdout


def test_a_truncated_neff_in_the_cache_is_compiled_again(bench: NeuronBench) -> None:
    _, report = bench.compile()
    cache, found = manifest_of(bench, report["programs"][0])
    neff = cache.blob_path(next(b.digest for b in found.manifest.blobs if b.role == "program"))
    os.truncate(neff, 1500)
    assert bench.run("cache", "verify", "--cache-dir", "cache").returncode == 1
    code, report = bench.compile()
    assert (code, statuses(report)) == (0, {FIRST: "rebuilt", SECOND: "hit"})
    bench.assert_nothing_wrong_is_published()


def test_a_compile_for_the_cpu_never_sees_the_neuron_path(tmp_path: Path) -> None:
    bench = NeuronBench(tmp_path, "")
    modules = tmp_path / "modules"
    null_cli = Path(__file__).parents[2] / "null_cli.py"
    env = {**os.environ, "NULL_CLI_MODULES": str(modules)}
    for command in ("compile", "plan"):
        done = subprocess.run(
            [sys.executable, str(null_cli), command], cwd=bench.folder, env=env, check=False
        )
        assert done.returncode == 0
        imported = modules.read_text().splitlines()
        assert [m for m in imported if "neuron" in m.removeprefix("nxbucket.")] == []


def test_another_chips_neff_under_an_entry_is_found_and_built_again(bench: NeuronBench) -> None:
    """Every digest is right: only the NEFF's own header says what it is."""
    _, report = bench.compile()
    for program in report["programs"]:
        cache, found = manifest_of(bench, program)
        with cache.work_dir("e" * 64) as work_dir:
            sizes = {t.name: t.num_elements * 4 for t in found.manifest.signature.inputs}
            staged = work_dir / "neff"
            staged.write_bytes(make_neff(list(sizes.values()), [4], target="sunda"))
            neff = cache.add_blob(staged)
        for key in (program["key"], program["graph_key"]):
            entry = cache.entry(key)
            assert isinstance(entry, Manifest)
            blobs = tuple(neff if b.role == "program" else b for b in entry.blobs)
            cache.publish(replace(entry, blobs=blobs))
    verified = bench.run("cache", "verify", "--cache-dir", "cache")
    assert verified.returncode == 1
    assert "is for trn1" in verified.stdout
    bench.forget_events()
    code, again = bench.compile()
    assert (code, statuses(again)) == (0, {FIRST: "rebuilt", SECOND: "rebuilt"})
    assert sorted(bench.compiled()) == [SECOND, FIRST]
    assert bench.run("cache", "verify", "--cache-dir", "cache").returncode == 0


def test_two_shards_compile_each_program_once_and_the_last_writes_the_lock(tmp_path: Path) -> None:
    bench = NeuronBench(tmp_path, prefill=(32, 64, 128), decode=(1, 2))
    seen: list[str] = []
    for shard in ("1/2", "2/2"):
        code, report = bench.compile("--shard", shard)
        assert code == 0
        assert report["lock_written"] == (report["others"] == []) == (shard == "2/2")
        seen += [name for name, status in statuses(report).items() if status == "compiled"]
    everything = sorted(["decode_b1", "decode_b2", "prefill_s128", "prefill_s32", "prefill_s64"])
    assert sorted(seen) == sorted(bench.compiled()) == everything
    bench.assert_nothing_wrong_is_published()
    refused = bench.run("compile", "--shard", "3/2")
    assert (refused.returncode, "--shard 2/4" in refused.stderr) == (2, True)
