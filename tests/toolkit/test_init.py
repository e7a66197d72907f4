"""`nxbucket init`: what it writes passes `validate`, for any model, and nothing is lost."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ABSENT, TINY_LLAMA, model_folder
from nxbucket.toolkit import cli
from nxbucket.toolkit.errors import SpecError, UsageError
from nxbucket.toolkit.init import write_model_file
from nxbucket.toolkit.model_folder import find_model
from nxbucket.toolkit.spec import load_spec


def test_the_file_passes_validate_and_says_what_it_holds(tmp_path: Path) -> None:
    model_folder(tmp_path / "llama", max_position_embeddings=131072, dtype="bfloat16")
    file = tmp_path / "model.yaml"
    write_model_file(str(tmp_path / "llama"), file)
    spec = load_spec(file)
    assert spec.model == "./llama"
    assert (spec.dtype, spec.max_model_len) == ("bfloat16", 4096)
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 512, 2048)
    assert spec.neuron_config.num_seqs_buckets == (1, 2, 4, 8)
    assert spec.notes == ()
    text = file.read_text()
    assert "the model's own limit is 131072" in text
    assert max(map(len, text.splitlines())) <= 110


@given(
    positions=st.integers(1, 200_000),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64", ABSENT]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_models_limits(
    tmp_path_factory: pytest.TempPathFactory, positions: int, dtype: object
) -> None:
    folder = tmp_path_factory.mktemp("init")
    model_folder(folder / "llama", max_position_embeddings=positions, dtype=dtype)
    spec = write_model_file(str(folder / "llama"), folder / "model.yaml")
    assert spec.max_model_len == min(positions, 4096)
    assert load_spec(folder / "model.yaml") == spec


def test_the_commented_kv_blocks_are_the_default_ones(tmp_path: Path) -> None:
    model_folder(tmp_path / "llama")
    file = tmp_path / "model.yaml"
    spec = write_model_file(str(tmp_path / "llama"), file)
    assert f"# num_gpu_blocks_override: {spec.num_kv_blocks}  #" in file.read_text()


@pytest.mark.parametrize("name", ["it's here: #1", "ein Modell", "a'b\"c"])
def test_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    model_folder(tmp_path / name)
    write_model_file(str(tmp_path / name), tmp_path / "model.yaml")
    assert yaml.safe_load((tmp_path / "model.yaml").read_text())["model"] == f"./{name}"


def test_a_relative_folder_is_written_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "models" / "llama")
    (tmp_path / "deploy").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = write_model_file("models/llama", Path("deploy/model.yaml"))
    assert spec.model == "../models/llama"
    assert find_model(spec.model, None, tmp_path / "deploy").folder.is_dir()


def test_a_file_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    model_folder(tmp_path / "llama")
    file = tmp_path / "model.yaml"
    file.write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        write_model_file(str(tmp_path / "llama"), file)
    assert file.read_text() == "mine"
    write_model_file(str(tmp_path / "llama"), file, force=True)
    assert load_spec(file).model == "./llama"


def test_a_model_that_does_not_work_leaves_no_file(tmp_path: Path) -> None:
    model_folder(tmp_path / "gpt", model_type="gpt2")
    with pytest.raises(SpecError) as caught:
        write_model_file(str(tmp_path / "gpt"), tmp_path / "model.yaml")
    assert [p.code for p in caught.value.problems] == ["model-unsupported"]
    assert [p.name for p in tmp_path.iterdir()] == ["gpt"]


def test_the_command_prints_the_files_name_or_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder(tmp_path / "llama", **TINY_LLAMA)
    monkeypatch.chdir(tmp_path)

    def init(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["nxbucket", "init", "llama", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), capsys.readouterr().out

    assert init() == (0, f"{tmp_path / 'model.yaml'}\n")
    code, out = init("--json")
    assert code == 2
    assert "--force" in json.loads(out)["error"]["hint"]
    code, out = init("--json", "--output", "other.yaml")
    report = json.loads(out)
    assert (code, report["file"]) == (0, str(tmp_path / "other.yaml"))
    assert report["programs"] == 7


def test_a_model_that_is_nowhere_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no folder") as caught:
        write_model_file("./nope", tmp_path / "model.yaml")
    assert caught.type.__name__ == "ModelLookupError"
    assert not list(tmp_path.iterdir())
