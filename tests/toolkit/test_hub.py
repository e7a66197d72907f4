"""Hub ids, as a person meets them: the real command against a hub on loopback."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_stand_in import GOOD_TOKEN, Hub, hub_stand_in
from huggingface_hub.errors import HfHubHTTPError
from safetensors_files import tensors_of, write_safetensors
from servers import ROOT, python_path

from fakes import TINY_LLAMA, model_folder
from nxbucket.compile.lockfile import read_lock
from nxbucket.toolkit import hub as hub_module
from nxbucket.toolkit.architecture import read_architecture
from nxbucket.toolkit.errors import NxbucketError

NULL_CLI = ROOT / "tests" / "null_cli.py"
FILES = {
    "config.json": json.dumps(TINY_LLAMA).encode(),
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"not read by whoever compiles",
    "pytorch_model.bin": b"never read",
    "original/consolidated.pth": b"never read",
    "README.md": b"# A model",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_stand_in() as running:
        running.add("org/tiny", FILES)
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL_FILE)
    return tmp_path


MODEL_FILE = """\
model: org/tiny
max_model_len: 128
max_num_batched_tokens: 32
max_num_seqs: 1
neuron_config: {num_batched_tokens_buckets: [32], num_seqs_buckets: [1]}
artifacts: {cache: cache}
"""


def http_error(status: int) -> Exception:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(str(status), response=response)


def environment(folder: Path, url: str, **variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "NXBUCKET_"))}
    ours = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return {**kept, **ours, "PYTHONPATH": python_path(ROOT / "tests"), **variables}


def run(
    folder: Path, url: str, *arguments: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, str(NULL_CLI), *arguments],
        cwd=folder,
        env=environment(folder, url, **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def fetch(
    folder: Path, url: str, commit: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """What a server does before it imports vLLM."""
    code = (
        "import sys; from nxbucket.toolkit.hub import fetch_checkpoint\n"
        "from nxbucket.toolkit.errors import NxbucketError\n"
        "try: print(fetch_checkpoint('org/tiny', sys.argv[1]))\n"
        "except NxbucketError as e: sys.exit(f'{e.exit_code} {e.message} {e.hint}')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, commit],
        env=environment(folder, url, **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_compile_fetches_config_json_and_nothing_else_and_pins_the_commit(
    hub: Hub, folder: Path
) -> None:
    done = run(folder, hub.url, "compile")
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == {"config.json"}
    lock = read_lock(folder / "model.lock")
    assert lock.model_commit == hub.repos["org/tiny"].refs["main"]
    assert lock.spec["model"] == "org/tiny"
    assert str(folder) not in (folder / "model.lock").read_text()


def test_the_lock_of_a_hub_id_is_the_same_on_every_host(hub: Hub, folder: Path) -> None:
    run(folder, hub.url, "compile")
    here = (folder / "model.lock").read_bytes()
    (folder / "model.lock").unlink()
    run(folder, hub.url, "compile", HF_HUB_CACHE=str(folder / "elsewhere"))
    assert (folder / "elsewhere" / "models--org--tiny").is_dir()
    assert (folder / "model.lock").read_bytes() == here


def test_compile_again_follows_the_branch_and_says_so(hub: Hub, folder: Path) -> None:
    run(folder, hub.url, "compile")
    old = hub.repos["org/tiny"].refs["main"]
    new = hub.add("org/tiny", {**FILES, "model.safetensors": b"trained some more"})
    done = run(folder, hub.url, "compile")
    assert f"{old[:12]} -> {new[:12]}" in done.stderr
    assert done.stdout.count(" hit ") == 2
    assert read_lock(folder / "model.lock").model_commit == new


def test_a_revision_that_is_a_cached_commit_asks_for_nothing(hub: Hub, folder: Path) -> None:
    commit = hub.repos["org/tiny"].refs["main"]
    (folder / "model.yaml").write_text(f"{MODEL_FILE}revision: {commit}\n")
    assert run(folder, hub.url, "validate").returncode == 0
    hub.requests.clear()
    done = run(folder, hub.url, "validate", "--json")
    assert json.loads(done.stdout)["model_commit"] == commit
    assert hub.requests == []


def test_a_folder_of_that_name_wins(hub: Hub, folder: Path) -> None:
    model_folder(folder / "org" / "tiny")
    done = run(folder, hub.url, "validate", "--json")
    assert json.loads(done.stdout)["model_commit"] is None
    assert hub.requests == []


def test_a_server_gets_weights_and_tokenizer_of_the_locked_commit_and_no_pickle(
    hub: Hub, folder: Path
) -> None:
    commit = hub.repos["org/tiny"].refs["main"]
    hub.add("org/tiny", {**FILES, "model.safetensors": b"newer"})
    done = fetch(folder, hub.url, commit)
    assert done.returncode == 0, done.stderr
    got = Path(done.stdout.strip())
    assert got.name == commit
    assert (got / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.fetched() == {
        "config.json", "generation_config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    hub.requests.clear()
    assert fetch(folder, hub.url, commit).returncode == 0
    assert hub.fetched() == set()


def test_a_filled_cache_works_offline_and_a_half_filled_one_is_a_sentence(
    hub: Hub, folder: Path
) -> None:
    commit = hub.repos["org/tiny"].refs["main"]
    run(folder, hub.url, "compile")
    hub.requests.clear()
    offline = {"HF_HUB_OFFLINE": "1"}
    assert run(folder, hub.url, "compile", **offline).returncode == 0
    done = fetch(folder, hub.url, commit, **offline)
    assert (
        f"3 HF_HUB_OFFLINE is set, and the hub's cache here does not hold org/tiny at {commit[:12]}"
        in done.stderr
    )
    assert fetch(folder, hub.url, commit).returncode == 0
    hub.requests.clear()
    assert fetch(folder, hub.url, commit, **offline).returncode == 0
    assert hub.requests == []


def test_a_cache_made_by_an_older_release_works_offline(folder: Path) -> None:
    commit = "0123456789" * 4
    repo = folder / "hf" / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_bytes(FILES[name])
    # They are here, so `compile` looks at them.
    architecture = read_architecture(snapshot).architecture
    write_safetensors(snapshot / "model.safetensors", tensors_of(architecture))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    nowhere = "http://127.0.0.1:9"
    assert run(folder, nowhere, "compile", HF_HUB_OFFLINE="1").returncode == 0
    assert read_lock(folder / "model.lock").model_commit == commit
    assert fetch(folder, nowhere, commit, HF_HUB_OFFLINE="1").returncode == 0


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("org/tiny", "org/other", "made for org/tiny, and the model file says org/other"),
        ("revision: main", "revision: dev", "made for org/tiny at main, and the model file says"),
        ("org/tiny", None, "no lock file"),
    ],
)
def test_a_server_is_refused_without_asking_the_hub_if_the_lock_is_of_another_model(
    hub: Hub, folder: Path, before: str, after: str | None, said: str
) -> None:
    file = folder / "model.yaml"
    if "revision" in before:
        file.write_text(f"{MODEL_FILE}{before}\n")
    if after is not None:
        assert run(folder, hub.url, "compile").returncode == 0
        file.write_text(file.read_text().replace(before, after))
    hub.requests.clear()
    done = run(folder, hub.url, "generate", "--prompt", "x")
    assert done.returncode == 1
    assert said in done.stderr
    assert "hint: nxbucket compile" in done.stderr
    assert hub.requests == []


def test_a_server_is_refused_if_the_folder_has_become_a_hub_id(hub: Hub, folder: Path) -> None:
    model_folder(folder / "org" / "tiny")
    assert run(folder, hub.url, "compile").returncode == 0
    (folder / "org" / "tiny" / "config.json").unlink()
    (folder / "org" / "tiny").rmdir()
    done = run(folder, hub.url, "generate", "--prompt", "x")
    assert done.returncode == 1
    assert "made for a folder, and the model file says org/tiny" in done.stderr


def refusal(done: "subprocess.CompletedProcess[str]") -> tuple[int, str]:
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_a_missing_model_is_a_sentence_with_its_place(hub: Hub, folder: Path) -> None:
    (folder / "model.yaml").write_text("model: org/typo\n")
    code, text = refusal(run(folder, hub.url, "validate"))
    assert code == 1
    assert "model.yaml:1:8: hub-not-found: no folder org/typo beside this file" in text
    assert f"no such model on {hub.url}" in text
    assert "HF_TOKEN" in text


def test_a_missing_revision_is_reported_at_its_line(hub: Hub, folder: Path) -> None:
    (folder / "model.yaml").write_text("model: org/tiny\nrevision: v9\n")
    code, text = refusal(run(folder, hub.url, "validate"))
    assert code == 1
    assert "model.yaml:2:11: hub-revision: org/tiny has no revision v9" in text


def test_a_gated_model_names_the_licence_page_and_the_token(hub: Hub, folder: Path) -> None:
    hub.add("org/gated", FILES, gated=True)
    (folder / "model.yaml").write_text(MODEL_FILE.replace("org/tiny", "org/gated"))
    code, text = refusal(run(folder, hub.url, "compile"))
    assert code == 1
    assert "hub-gated: org/gated is gated, and no token is set" in text
    assert f"accept its licence at {hub.url}/org/gated" in text
    assert run(folder, hub.url, "compile", HF_TOKEN=GOOD_TOKEN).returncode == 0


def test_a_gated_model_with_a_token_that_has_no_access(hub: Hub, folder: Path) -> None:
    hub.add("org/gated", FILES, gated=True, licence_accepted=False)
    (folder / "model.yaml").write_text("model: org/gated\n")
    code, text = refusal(run(folder, hub.url, "validate", HF_TOKEN=GOOD_TOKEN))
    assert code == 1
    assert "the account of this token has no access" in text
    assert GOOD_TOKEN not in text


def test_a_repository_without_config_json_or_safetensors(hub: Hub, folder: Path) -> None:
    commit = hub.add("org/tiny", {"pytorch_model.bin": b"x", "config.json": FILES["config.json"]})
    done = fetch(folder, hub.url, commit)
    assert f"1 org/tiny at {commit[:12]} has no model.safetensors" in done.stderr
    hub.add("org/tiny", {"README.md": b"# Nothing here"})
    code, text = refusal(run(folder, hub.url, "validate"))
    assert code == 1
    assert "hub-no-file: org/tiny has no config.json" in text


def test_no_network_and_no_cache_exits_3_after_the_files_own_problems(folder: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    code, text = refusal(run(folder, nowhere, "validate"))
    assert code == 3
    assert f"{nowhere} cannot be reached" in text
    assert "HF_HUB_OFFLINE=1" in text
    (folder / "model.yaml").write_text("model: org/tiny\nblock_size: 33\n")
    code, text = refusal(run(folder, nowhere, "validate"))
    assert code == 1
    assert ":1:8: hub-unreachable: " in text
    assert ":2:13: block-size: " in text


@pytest.mark.parametrize(
    ("err", "code", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 3, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), 3, "cannot write org/tiny"),
        (TimeoutError("timed out"), 3, "cannot be reached: timed out"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), 3, "cannot be reached"),
        (http_error(401), 1, "refuses the token"),
        (http_error(403), 1, "refuses the token"),
        (http_error(429), 3, "HTTP 429"),
        (http_error(502), 3, "HTTP 502"),
    ],
)
def test_each_failure_is_a_sentence_with_a_mend(err: Exception, code: int, text: str) -> None:
    with (
        pytest.raises(NxbucketError, match=re.escape(text)) as caught,
        hub_module._hub_errors("org/tiny", None),
    ):
        raise err
    assert caught.value.exit_code == code
    assert caught.value.hint


@pytest.mark.parametrize("status", [500, 503])
def test_a_hub_that_is_down_is_a_sentence_and_the_cache_holds(
    hub: Hub, folder: Path, status: int
) -> None:
    run(folder, hub.url, "compile")
    hub.answer_all_with = status
    assert run(folder, hub.url, "compile").returncode == 0
    code, text = refusal(run(folder, hub.url, "compile", HF_HOME=str(folder / "empty")))
    assert code == 3
    assert f"{hub.url} answers HTTP {status} for org/tiny" in text


def test_a_cache_that_cannot_be_written_is_a_sentence(hub: Hub, folder: Path) -> None:
    (folder / "hf").write_text("a file where a folder is wanted")
    code, text = refusal(run(folder, hub.url, "validate"))
    assert code == 3
    assert "cannot write org/tiny to the hub's cache" in text


@pytest.mark.parametrize(
    ("model", "is_id"),
    [
        ("meta-llama/Llama-3.2-1B", True),
        ("./org/name", False),
        ("/org/name", False),
        ("org/name/more", False),
        ("gpt2", False),
        ("../name", False),
        ("org/..", False),
        ("~/name", False),
        ("org/" + "x" * 100, False),
    ],
)
def test_a_hub_id_is_one_slash_between_plain_names(model: str, is_id: bool) -> None:
    assert hub_module.is_hub_id(model) is is_id
