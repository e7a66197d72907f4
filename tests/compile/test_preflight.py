"""What `nxbucket compile` says of a checkpoint before it compiles anything."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from null_compiler import NullOptions, model_file, recorded
from safetensors_files import Tensors, tensors_of, write_safetensors

from nxbucket.compile import compiler
from nxbucket.compile.checkpoint import HEAD, INDEX_FILE, SINGLE_FILE
from nxbucket.toolkit import cli
from nxbucket.toolkit.architecture import FAMILIES
from nxbucket.toolkit.spec import load_spec

"""dtype and shape by name."""

DOWN = "model.layers.0.mlp.down_proj.weight"
Q_NORM = "model.layers.0.self_attn.q_norm.weight"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"
O_BIAS = "model.layers.0.self_attn.o_proj.bias"


@pytest.fixture
def compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], tuple[int, str, list[str]]]:
    """Exit code, stderr, and what reached a compiler."""

    def run(file: Path) -> tuple[int, str, list[str]]:
        monkeypatch.setitem(compiler.FACTORIES, "cpu", "null_compiler:NullCompiler")
        for name, value in NullOptions(events=str(tmp_path)).environ().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["nxbucket", "compile", str(file)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return int(code or 0), capsys.readouterr().err, recorded(tmp_path, "lower")

    return run


def model_of(folder: Path, family: str = "llama", **config: Any) -> tuple[Path, Tensors]:
    """model.yaml and the tensors its checkpoint should have."""
    own = {"model_type": family, "architectures": [FAMILIES[family]], "sliding_window": None}
    file = model_file(folder, (32,), (1,), **{**own, **config})
    return file, tensors_of(load_spec(file).architecture)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_fits_its_config_compiles(
    tmp_path: Path, compiled: Callable[[Path], tuple[int, str, list[str]]], family: str
) -> None:
    file, tensors = model_of(tmp_path, family)
    write_safetensors(tmp_path / "llama" / SINGLE_FILE, tensors)
    code, said, lowered = compiled(file)
    assert (code, len(lowered)) == (0, 2), said
    assert "no weights" not in said


def test_a_folder_of_configuration_alone_compiles_with_a_note(
    tmp_path: Path, compiled: Callable[[Path], tuple[int, str, list[str]]]
) -> None:
    code, said, lowered = compiled(model_of(tmp_path)[0])
    assert (code, len(lowered)) == (0, 2), said
    assert "no weights: compiling from config.json alone" in said


@pytest.mark.parametrize("redundant", [(), (HEAD,)])
def test_a_tied_head_may_be_there_or_not(
    tmp_path: Path,
    compiled: Callable[[Path], tuple[int, str, list[str]]],
    redundant: tuple[str, ...],
) -> None:
    # B95, B96
    file, tensors = model_of(tmp_path, "qwen2", tie_word_embeddings=True)
    assert HEAD not in tensors
    tensors |= dict.fromkeys(redundant, tensors["model.embed_tokens.weight"])
    write_safetensors(tmp_path / "llama" / SINGLE_FILE, tensors)
    code, said, lowered = compiled(file)
    assert (code, len(lowered)) == (0, 2), said


Change = Callable[[Tensors], Tensors]


def without(name: str) -> Change:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def with_(name: str, dtype: str, *shape: int) -> Change:
    return lambda tensors: {**tensors, name: (dtype, shape)}


@pytest.mark.parametrize(
    ("family", "config", "change", "says"),
    [
        ("llama", {}, without(HEAD), (HEAD, "tie_word_embeddings: true", "add the tensor")),  # B97
        ("llama", {}, without(DOWN), ("missing tensors", DOWN)),
        ("llama", {}, with_(DOWN, "BF16", 128, 64), (DOWN, "[128, 64]", "[64, 128]")),
        ("llama", {}, with_(DOWN, "I8", 64, 128), (DOWN, "int8")),
        ("llama", {}, with_(DOWN, "F8_E4M3", 64, 128), (DOWN, "float8_e4m3fn")),
        ("llama", {}, with_(Q_BIAS, "BF16", 64), (Q_BIAS, "attention_bias")),  # B104
        ("llama", {"attention_bias": True}, without(O_BIAS), (O_BIAS,)),  # B104
        ("qwen2", {}, without(Q_BIAS), (Q_BIAS,)),  # B104
        ("qwen2", {}, with_(O_BIAS, "BF16", 64), (O_BIAS, "qwen2")),  # B104
        ("qwen3", {}, with_(Q_BIAS, "BF16", 64), (Q_BIAS,)),  # B104
        ("qwen3", {}, without(Q_NORM), (Q_NORM,)),  # B107
        ("llama", {}, with_(Q_NORM, "BF16", 16), (Q_NORM, "llama")),  # B107
        ("mistral", {}, with_("model.layers.7.mlp.up_proj.weight", "BF16", 1), ("layers.7",)),
    ],
)
def test_names_shapes_and_dtypes_are_checked_before_any_compile(
    tmp_path: Path,
    compiled: Callable[[Path], tuple[int, str, list[str]]],
    family: str,
    config: dict[str, Any],
    change: Change,
    says: tuple[str, ...],
) -> None:
    file, tensors = model_of(tmp_path, family, **config)
    write_safetensors(tmp_path / "llama" / SINGLE_FILE, change(tensors))
    code, said, lowered = compiled(file)
    assert (code, lowered) == (1, [])
    assert all(word in said for word in says), said
    assert "hint: " in said
    assert not file.with_suffix(".lock").exists()


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (lambda name: name.replace("00002", "00009"), "model-00009-of-00003.safetensors"),  # B108
        (lambda name: name.replace("00003.", "00013."), "stale"),  # B109
    ],
)
def test_a_stale_index_and_a_missing_shard_stop_the_compile(
    tmp_path: Path,
    compiled: Callable[[Path], tuple[int, str, list[str]]],
    rename: Callable[[str], str],
    says: str,
) -> None:
    file, tensors = model_of(tmp_path)
    weight_map: dict[str, str] = {}
    for i in range(3):
        shard = f"model-0000{i + 1}-of-00003.safetensors"
        held = dict(list(tensors.items())[i::3])
        write_safetensors(tmp_path / "llama" / shard, held)
        weight_map |= dict.fromkeys(held, rename(shard))
    (tmp_path / "llama" / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    code, said, lowered = compiled(file)
    assert (code, lowered) == (1, [])
    assert says in said
