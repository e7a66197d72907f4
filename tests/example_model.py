"""The shipped example, compiled once for the whole session."""

import shutil
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
    folder = tmp_path_factory.mktemp("example")
    source = ROOT / "examples" / "tiny-llama"
    shutil.copytree(source / "model", folder / "model")
    model_file = folder / "model.yaml"
    shutil.copyfile(source / "model.yaml", model_file)
    done = run_nxbucket("compile", str(model_file), env=artifact_env)
    assert done.returncode == 0, done.stderr
    return model_file


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
