"""docs/model-file.md is what scripts/model_file_reference.py writes, and holds every key."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT

from fakes import model_folder
from nxbucket.toolkit.spec import load_spec
from nxbucket.toolkit.spec_reader import KEYS

SCRIPT = ROOT / "scripts" / "model_file_reference.py"


@pytest.fixture(scope="module")
def script() -> Any:
    found = importlib.util.spec_from_file_location("model_file_reference", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def rows(text: str) -> dict[str, list[str]]:
    """Each key's cells: type, default, meaning."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {key.strip("`"): [cell.strip() for cell in cells] for key, *cells in lines}


def test_the_committed_file_is_the_generated_one(script: Any) -> None:
    assert script.OUTPUT.read_text() == script.reference(), (
        "docs/model-file.md is not what toolkit/spec.py says: "
        "run `python scripts/model_file_reference.py` and commit the file"
    )


def test_every_key_has_a_meaning(script: Any) -> None:
    table = rows(script.reference())
    assert set(table) == {key for keys in KEYS.values() for key in keys}
    assert all(len(cells[-1]) > 10 for cells in table.values())


def test_the_defaults_in_the_table_are_the_defaults(script: Any, tmp_path: Path) -> None:
    model_folder(tmp_path / "llama", max_position_embeddings=131072)
    (tmp_path / "model.yaml").write_text("model: llama\n")
    config = load_spec(tmp_path / "model.yaml").resolved()
    values = {**config, **config["neuron_config"], **config["compiler"]}
    shown = {key: cells[1] for key, cells in rows(script.reference()).items()}
    plain = {k: v for k, v in shown.items() if v.isdecimal() or v in ("true", "none", "cpu")}
    assert len(plain) == 8
    for key, text in plain.items():
        assert str(values[key]).lower() == text, key
    assert values["max_model_len"] == 4096
    assert "at most 4096" in shown["max_model_len"]
