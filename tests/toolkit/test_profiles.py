"""Profiles: the shipped ones are what they say, and a model file, `init` and `ls` use them."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stand_in import Hub, folder_files, hub_stand_in
from published_configs import FOLDER, PUBLISHED
from servers import ROOT, python_path

from fakes import model_folder
from nxbucket.compile.lockfile import spec_digest
from nxbucket.compile.neuron.hardware import CHIP_OF
from nxbucket.compile.neuron.instances import INSTANCES, target_of
from nxbucket.toolkit import cli
from nxbucket.toolkit.errors import Problem, SpecError, UsageError
from nxbucket.toolkit.init import write_model_file
from nxbucket.toolkit.init_limits import Limits
from nxbucket.toolkit.profile_check import Checker
from nxbucket.toolkit.profiles import (
    all_profiles,
    load_profile,
    match,
    profile_file,
    profile_names,
    read_profile,
)
from nxbucket.toolkit.spec import DeploySpec, load_spec
from nxbucket.toolkit.spec_report import spec_as_json

OURS = """\
title: Ours
source: the platform team
config:
  max_model_len: 1024
  max_num_seqs: 4
  max_num_batched_tokens: 512
  neuron_config:
    num_batched_tokens_buckets: [128, 512]
    num_seqs_buckets: [1, 4]
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nxbucket", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a model with many positions, a profile, and no hub's cache."""
    model_folder(tmp_path / "llama", max_position_embeddings=131072)
    (tmp_path / "ours.yaml").write_text(OURS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def load(folder: Path, text: str) -> DeploySpec:
    (folder / "model.yaml").write_text(f"model: llama\n{text}")
    return load_spec(folder / "model.yaml")


def problems(folder: Path, text: str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load(folder, text)
    return caught.value.problems


# The shipped profiles


def test_there_are_at_least_twenty_and_each_names_source_and_model() -> None:
    profiles = all_profiles()
    assert len(profiles) >= 20
    for profile in profiles:
        published = profile.published
        assert re.search(r"@[0-9a-f]{7,8} \S|#\d+ \(search excerpt\)", published.source), (
            profile.name
        )
        assert "*" not in published.models[0], profile.name
        assert published.config, profile.name
        assert all(note.endswith((".", "]")) for note in published.notes), profile.name


def test_without_a_network_every_profile_is_checked_and_none_has_a_finding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: Any) -> None:
        raise AssertionError("a network was asked for")

    monkeypatch.setattr("socket.socket.connect", unreachable)
    begun = time.monotonic()
    assert run(monkeypatch, "profiles", "check", "--json") == 0
    assert time.monotonic() - begun < 10
    report = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in report["profiles"]] == profile_names()
    assert all("hub's cache" in p["unread"] or "no folder" in p["unread"]
               for p in report["profiles"])  # fmt: skip
    assert run(monkeypatch, "profiles", "check") == 0
    assert "could not be read" in capsys.readouterr().err


@pytest.fixture
def hub() -> Iterator[Hub]:
    """The models of tests/published_models, under the ids that the profiles have as well."""
    with hub_stand_in() as running:
        for model in PUBLISHED:
            running.add(model.hub_id, folder_files(FOLDER / model.name))
        running.add("meta-llama/Llama-3.1-8B-Instruct", folder_files(FOLDER / "llama-3.1-8b"))
        yield running


def command(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "NXBUCKET_"))}
    ours = {"HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from nxbucket.toolkit.cli import main; main()", *arguments],
        cwd=folder,
        env={**kept, **ours, "PYTHONPATH": python_path(ROOT / "tests"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_what_is_refused_is_what_is_stated_where_config_json_can_be_read(
    folder: Path, hub: Hub
) -> None:
    done = command(folder, "profiles", "check", "--online", "--json", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stdout
    reports = {p["name"]: p for p in json.loads(done.stdout)["profiles"]}
    read = {name for name, report in reports.items() if report["unread"] is None}
    assert {"tinyllama-1.1b-one-block", "llama-3.3-70b-inf2", "llama-3.1-8b-inf2"} <= read
    assert reports["tinyllama-1.1b-one-block"]["today"] == []
    assert reports["llama-3.3-70b-inf2"]["today"] == ["not-yet", "heads-not-divisible"]
    stated = {profile.name: set(profile.refused_codes) for profile in all_profiles()}
    assert all(set(reports[name]["today"]) == stated[name] for name in read)

    # What was read is in the hub's cache: the same without --online, and offline.
    requests = len(hub.requests)
    again = command(folder, "profiles", "check", "--json", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert again.returncode == 0
    offline = {p["name"]: p for p in json.loads(again.stdout)["profiles"]}
    assert {name for name, report in offline.items() if report["unread"] is None} == read
    assert len(hub.requests) == requests


def test_a_hub_that_cannot_be_reached_is_asked_once(folder: Path, hub: Hub) -> None:
    hub.answer_all_with = 503
    done = command(folder, "profiles", "check", "--online", HF_ENDPOINT=hub.url)
    assert done.returncode == 0
    assert len(hub.requests) <= 2
    [reason] = [line for line in done.stderr.splitlines() if "503" in line]
    assert reason.startswith("note: ")


# Files of one's own


@pytest.mark.parametrize(
    ("text", "code", "line", "says"),
    [
        ("sources: x\n", "unknown-key", 10, "did you mean source?"),
        ("max_num_seqs: 4\n", "unknown-key", 10, "go under config"),
        ("models: a/b\n", "wrong-type", 10, "a list wanted"),
        ("models: [1]\n", "wrong-type", 10, "text wanted"),
        ("refused_today: [{code: not-yet}]\n", "missing-key", 10, "refused_today[0].why"),
        ("refused_today: [{code: a, why: b, whi: c}]\n", "unknown-key", 10, "did you mean why?"),
        ("notes: ['']\n", "bad-text", 10, "notes[0]"),
        ("title: again\n", "duplicate-key", 10, "given twice"),
        ("  serve: {port: 1}\n", "profile-key", 10, "config.serve"),
    ],
)
def test_a_wrong_file_has_a_code_a_line_and_a_mend(
    folder: Path, text: str, code: str, line: int, says: str
) -> None:
    file = folder / "ours.yaml"
    file.write_text(OURS + text)
    with pytest.raises(SpecError) as caught:
        read_profile(file, "ours.yaml")
    [problem] = [p for p in caught.value.problems if p.code == code]
    assert (problem.file, problem.line) == (file, line)
    assert says in f"{problem.message} {problem.hint}"


def test_a_file_without_the_required_keys_says_each(folder: Path) -> None:
    (folder / "ours.yaml").write_text("notes: []\n")
    with pytest.raises(SpecError) as caught:
        read_profile(folder / "ours.yaml", "ours.yaml")
    assert [p.code for p in caught.value.problems] == ["missing-key"] * 3


def check(file: Path) -> list[tuple[str, str]]:
    report = Checker(online=False).check(str(file), file)
    return [(finding.code, finding.message) for finding in report.findings]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("  tensor_parallel_size: 2\n", "not-yet", "not stated"),
        ("refused_today: [{code: not-yet, why: x}]\n", "not-refused", "not found: not-yet"),
        ("instances: [trn2.96xlarge]\n", "instance-unknown", "trn2.96xlarge"),
        ("  target: inf2\ninstances: [trn2.48xlarge]\n", "instance-target", "of target trn2"),
        ("  max_num_sequences: 4\n", "unknown-key", "max_num_sequences"),
        ("title: again\n", "duplicate-key", "given twice"),
    ],
)
def test_check_finds(folder: Path, text: str, code: str, says: str) -> None:
    file = folder / "ours.yaml"
    assert check(file) == []
    file.write_text(OURS + text)
    [(found, message)] = check(file)
    assert found == code
    assert says in message


def test_more_ranks_than_logical_cores_are_a_finding(folder: Path) -> None:
    file = folder / "ours.yaml"
    text = (
        f"{OURS}  tensor_parallel_size: 128\ninstances: [trn2.48xlarge]\n"
        "refused_today: [{code: not-yet, why: ranks}]\n"
    )
    file.write_text(text)
    [(code, message)] = check(file)
    assert code == "instance-cores"
    assert "64 logical cores of trn2.48xlarge at lnc 2" in message
    file.write_text(
        text.replace("\nconfig:\n", "\nconfig:\n  target: trn2\n  compiler: {lnc: 1}\n")
    )
    assert check(file) == []


def test_a_finding_exits_1_and_names_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ours.yaml").write_text(OURS.replace("[1, 4]", "[4, 1]"))
    assert run(monkeypatch, "profiles", "check", "./ours.yaml") == 1
    err = capsys.readouterr().err
    assert "warning: ours.yaml:9:27: bucket-not-ascending" in err
    assert "hint: in order, and each once: [1, 4]" in err
    assert run(monkeypatch, "profiles", "check", "--json", "./ours.yaml") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


# Matching


def test_a_published_id_comes_before_a_pattern_and_the_instance_before_its_target() -> None:
    found = [p.name for p in match("meta-llama/Llama-3.3-70B-Instruct", "trn1.32xlarge", "trn1")]
    assert found == ["llama-3.3-70b-trn1", "llama-3.3-70b-1024-blocks"]
    names = [p.name for p in match("nvidia/Llama-3.3-70B-Instruct-FP8", "trn2.48xlarge", "trn2")]
    assert names[0] == "llama-3.3-70b-fp8-trn2"
    assert set(names) > {"llama-3.3-70b-fp8-trn2", "llama-3.3-70b-4k-trn2"}
    assert match("org/unheard-of") == []
    assert match("org/unheard[of]?") == []


def test_a_repositorys_name_alone_and_any_case_match() -> None:
    assert match("tinyllama-1.1b-chat-V1.0") == match("TinyLlama/TinyLlama-1.1B-Chat-v1.0") != []


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_profile("llama-3.3-70b-fp8")
    assert "did you mean llama-3.3-70b-fp8-trn2?" in str(caught.value.hint)
    for path in ("./none.yaml", "~nobody-here/x.yaml", "x" * 5000 + "/a"):
        with pytest.raises(UsageError, match="no profile"):
            profile_file(path, tmp_path)


def test_instances_and_targets() -> None:
    assert target_of("trn2u.48xlarge") == target_of("trn2") == "trn2"
    with pytest.raises(UsageError) as caught:
        target_of("trn2.48xlarg")
    assert "did you mean trn2.48xlarge?" in str(caught.value.hint)
    cores = {name: instance.logical_cores(1) for name, instance in INSTANCES.items()}
    assert (cores["trn1.32xlarge"], cores["inf2.48xlarge"], cores["trn2.48xlarge"]) == (32, 24, 128)
    assert INSTANCES["trn2.48xlarge"].logical_cores(2) == 64
    assert all(chip.bf16_flops_per_s > 1e14 for chip in CHIP_OF.values())


# `profile:` in a model file


def test_keys_of_the_model_file_win_one_by_one(folder: Path) -> None:
    spec = load(
        folder,
        "profile: ./ours.yaml\nmax_num_seqs: 2\nneuron_config: {num_seqs_buckets: [1, 2]}\n",
    )
    assert (spec.max_model_len, spec.max_num_seqs, spec.max_num_batched_tokens) == (1024, 2, 512)
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 512)
    assert spec.neuron_config.num_seqs_buckets == (1, 2)
    assert spec.profile == "./ours.yaml"
    assert spec.from_profile == {
        "max_model_len",
        "max_num_batched_tokens",
        "neuron_config.num_batched_tokens_buckets",
    }
    assert "max_model_len" not in spec.defaulted
    assert "profile" not in spec.resolved()
    assert spec_as_json(spec)["profile"] == "./ours.yaml"


def test_null_drops_a_value_of_the_profile_for_the_default(folder: Path) -> None:
    text = "profile: ours.yaml\nneuron_config: {num_batched_tokens_buckets: null}\ncompiler:\n"
    spec = load(folder, text)
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 256, 512)
    assert "neuron_config.num_batched_tokens_buckets" in spec.defaulted


def test_a_shipped_profile_by_name(folder: Path) -> None:
    spec = load(folder, "profile: tinyllama-1.1b-one-block\n")
    assert (spec.block_size, spec.max_model_len) == (2048, 2048)
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 512, 1024, 2048)


def test_a_value_decides_the_digest_and_a_name_does_not(folder: Path) -> None:
    before = spec_digest(load(folder, "profile: ours.yaml\n").resolved())
    (folder / "theirs.yaml").write_text(OURS)
    assert spec_digest(load(folder, "profile: theirs.yaml\n").resolved()) == before
    (folder / "ours.yaml").write_text(OURS.replace("[1, 4]", "[2, 4]"))
    assert spec_digest(load(folder, "profile: ours.yaml\n").resolved()) != before


def test_validate_says_profile_beside_its_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.yaml").write_text("model: llama\nprofile: ours.yaml\nmax_num_seqs: 4\n")
    assert run(monkeypatch, "validate") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert rows["profile"] == ["ours.yaml", "file"]
    assert rows["max_model_len"] == ["1024", "profile ours.yaml"]
    assert rows["max_num_seqs"] == ["4", "file"]


def test_a_problem_of_a_profiles_value_is_at_the_line_that_names_it(folder: Path) -> None:
    [problem] = problems(folder, "profile: llama-3.1-8b-trn2\n")
    assert (problem.code, problem.line, problem.column) == ("not-yet", 2, 10)
    assert problem.message.endswith("tensor_parallel_size is from profile llama-3.1-8b-trn2")
    assert problem.hint.endswith("tensor_parallel_size in model.yaml wins over the profile's")
    spec = load(folder, "profile: llama-3.1-8b-trn2\ntensor_parallel_size: 1\n")
    assert (spec.target, spec.max_num_seqs) == ("trn2", 32)


def test_a_problem_of_the_files_own_value_names_the_profiles_limit(folder: Path) -> None:
    text = "profile: ours.yaml\nneuron_config: {num_seqs_buckets: [1, 2]}\n"
    [problem] = problems(folder, text)
    assert (problem.code, problem.line) == ("bucket-last", 3)
    assert problem.message.endswith("max_num_seqs is from profile ours.yaml")


def test_a_lower_limit_over_the_profiles_list_repairs_nothing(folder: Path) -> None:
    [problem] = problems(folder, "profile: ours.yaml\nmax_model_len: 256\n")
    assert (problem.code, problem.line) == ("bucket-last", 2)
    assert "num_batched_tokens_buckets" in problem.hint


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("profile: qwen3-embedding-8b-trn2\ntensor_parallel_size: 1\n", "cannot-hold", "show"),
        ("profile: ours.yaml\ntarget: cpu\n", "no-effect", "compiler.lnc: null in model.yaml"),
        ("profile: absent.yaml\n", "profile-not-found", "nxbucket profiles ls"),
        ("profile: [a]\n", "wrong-type", "string"),
        ("profile: bad.yaml\n", "missing-key", "add title"),
    ],
)
def test_other_problems_have_a_hint_that_fits(
    folder: Path, text: str, code: str, hint: str
) -> None:
    (folder / "ours.yaml").write_text(f"{OURS}  compiler: {{lnc: 2}}\n")
    (folder / "bad.yaml").write_text(OURS.replace("title: Ours\n", ""))
    [problem] = problems(folder, text)
    assert problem.code == code
    assert hint in problem.hint


# `init`


def published(folder: Path, name: str, called: str) -> str:
    target = folder / called
    target.mkdir()
    (target / "config.json").write_bytes((FOLDER / name / "config.json").read_bytes())
    return str(target)


def test_init_takes_a_profile_that_plans_and_names_it(folder: Path) -> None:
    model = published(folder, "tinyllama-1.1b", "TinyLlama-1.1B-Chat-v1.0")
    said: list[str] = []
    spec = write_model_file(model, folder / "model.yaml", say=said.append)
    assert (spec.target, spec.block_size) == ("cpu", 2048)
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 512, 1024, 2048)
    assert "tinyllama-1.1b-one-block" in said[0]
    assert "vllm-project/vllm#7885" in (folder / "model.yaml").read_text()


def test_init_says_what_of_a_refused_profile_does_not_hold(folder: Path) -> None:
    model = published(folder, "llama-3.3-70b", "Llama-3.3-70B-Instruct")
    said: list[str] = []
    spec = write_model_file(model, folder / "model.yaml", instance="trn2.48xlarge", say=said.append)
    assert (spec.target, spec.tensor_parallel_size) == ("trn2", 1)
    assert (spec.max_model_len, spec.max_num_seqs) == (4096, 8)
    assert spec.neuron_config.num_batched_tokens_buckets == (256, 512, 1024, 2048, 4096)
    told = "\n".join(said)
    assert "llama-3.3-70b-latency-trn2" in told
    assert "not yet: tensor_parallel_size 64" in told
    assert "a rank of trn2 has 24.0 GiB" in told
    assert "taken from it: num_batched_tokens_buckets" in told


@pytest.mark.parametrize("instance", [None, *INSTANCES, "trn3"])
@pytest.mark.parametrize("name", [model.name for model in PUBLISHED])
def test_whatever_model_and_instance_the_file_validates(
    folder: Path, name: str, instance: str | None
) -> None:
    [hub_id] = [m.hub_id for m in PUBLISHED if m.name == name]
    model = published(folder, name, hub_id.rpartition("/")[2])
    spec = write_model_file(model, folder / "model.yaml", instance=instance)
    assert load_spec(folder / "model.yaml") == spec
    assert spec.target == (target_of(instance) if instance else "cpu")


@pytest.mark.parametrize("profile", profile_names())
def test_whatever_profile_is_named_the_file_validates(folder: Path, profile: str) -> None:
    said: list[str] = []
    spec = write_model_file(
        str(folder / "llama"), folder / "model.yaml", profile=profile, say=said.append
    )
    assert load_spec(folder / "model.yaml") == spec
    assert f"profile {profile} was published for" in said[0]


def test_init_writes_all_that_a_profile_of_ones_own_has(folder: Path) -> None:
    more = "  num_gpu_blocks_override: 99\n  async_scheduling: false\n  compiler: {optlevel: 2}\n"
    text = OURS.replace("\nconfig:\n", f"\nconfig:\n  target: trn2\n{more}").replace(
        "[1, 4]", "[1, 4]\n    decode_context_length_buckets: [256]"
    )
    (folder / "ours.yaml").write_text(text)
    written = write_model_file(str(folder / "llama"), folder / "model.yaml", profile="./ours.yaml")
    meant = load(folder, "profile: ours.yaml\n")
    theirs, ours = written.resolved(), meant.resolved()
    assert {k: v for k, v in theirs.items() if k != "model"} == {
        k: v for k, v in ours.items() if k != "model"
    }


def test_a_wrong_instance_or_profile_writes_nothing(folder: Path) -> None:
    for instance, profile in (("p5.48xlarge", None), (None, "nope")):
        with pytest.raises(UsageError):
            write_model_file(
                str(folder / "llama"), folder / "model.yaml", instance=instance, profile=profile
            )
    assert not (folder / "model.yaml").exists()


def test_lists_end_in_their_limits() -> None:
    limits = Limits("float32", 100, 2048, max_num_seqs=6)
    assert limits.prefill_buckets == [100]
    assert limits.decode_buckets == [1, 2, 4, 6]


# The commands


def test_ls_lists_and_narrows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "profiles", "ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(profile_names())
    assert any(line.endswith("plans") for line in lines)
    narrowed = ("--model", "*llama-3.3-70b*", "--instance", "inf2.48xlarge")
    assert run(monkeypatch, "profiles", "ls", *narrowed, "--json") == 0
    found = json.loads(capsys.readouterr().out)["profiles"]
    assert [p["name"] for p in found] == ["llama-3.3-70b-inf2", "llama-3.3-70b-1024-blocks"]
    assert found[0]["config"]["tensor_parallel_size"] == 24
    assert run(monkeypatch, "profiles", "ls", "--instance", "p5.48xlarge") == 2


def test_show_prints_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "profiles", "show", "./ours.yaml") == 0
    assert capsys.readouterr().out == OURS
    assert run(monkeypatch, "profiles", "show", "llama-3.1-8b-inf2", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["neuron_config"] == {"num_seqs_buckets": [1, 4, 8, 16, 32, 48]}
    assert shown["plans"] is False
    assert run(monkeypatch, "profiles", "show", "nope") == 2


@pytest.mark.parametrize("arguments", [["profiles", "ls"], ["profiles", "check"]], ids=" ".join)
def test_nothing_heavy_is_imported(folder: Path, arguments: list[str]) -> None:
    heavy = "('torch', 'vllm', 'jax', 'transformers', 'numpy', 'rich', 'obstore', 'botocore')"
    code = (
        "import sys; from nxbucket.toolkit.cli import main\n"
        f"sys.argv = ['nxbucket', *{arguments}]\n"
        "try: main()\n"
        f"finally: print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
