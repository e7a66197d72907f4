"""The shipped example, compiled once for the whole session."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from servers import ROOT, run_nxbucket

ARTIFACTS = ROOT / "build" / "test-artifacts"
"""Kept between runs: keys cover all that matters, so what is there is what would be compiled."""


@pytest.fixture(scope="session")
def artifact_env() -> dict[str, str]:
    return {"NXBUCKET_CACHE_DIR": str(ARTIFACTS)}


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory, artifact_env: dict[str, str]) -> Path:
    """A model.yaml beside its lock; all artifacts in the cache. Do not write to its folder."""
    model_file = example_in(tmp_path_factory.mktemp("example"))
    done = run_nxbucket("compile", str(model_file), env=artifact_env)
    assert done.returncode == 0, done.stderr
    return model_file


@pytest.fixture(scope="session")
def emulated_example(
    tmp_path_factory: pytest.TempPathFactory, artifact_env: dict[str, str]
) -> Path:
    """The same for trn2, its graphs in the cache, for `--emulate`."""
    model_file = example_in(tmp_path_factory.mktemp("emulated"), target="trn2")
    done = run_nxbucket("compile", str(model_file), "--emulate", env=artifact_env)
    assert done.returncode == 0, done.stderr
    return model_file


def example_in(folder: Path, **changes: str) -> Path:
    """A copy of the example with other values for some keys; nothing is compiled."""
    source = ROOT / "examples" / "tiny-llama"
    shutil.copytree(source / "model", folder / "model")
    model_file = folder / "model.yaml"
    model_file.write_text(with_values((source / "model.yaml").read_text(), changes))
    return model_file


def with_values(text: str, changes: Mapping[str, str]) -> str:
    """A model file with other values for keys of one line, nested ones included."""
    for key, value in changes.items():
        text, replaced = re.subn(rf"(?m)^( *){key}:.*$", rf"\1{key}: {value}", text)
        assert replaced == 1, key
    return text


def variant(example: Path, folder: Path, **changes: str) -> Path:
    """A copy of the example's model file and lock with other values for keys that shape nothing."""
    lines = example.read_text().splitlines()
    for key, value in changes.items():
        kept = [line for line in lines if not line.startswith(f"{key}:")]
        lines = [*kept, f"{key}: {value}"]
    text = "\n".join(lines).replace("./model", str(example.parent / "model"))
    model_file = folder / "model.yaml"
    model_file.write_text(text + "\n")
    shutil.copyfile(example.with_suffix(".lock"), model_file.with_suffix(".lock"))
    return model_file
