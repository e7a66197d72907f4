"""Which files load, with what in each weight, and what every other folder is told."""

import dataclasses
import json
import logging
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nxbucket.compile.programs.weights import weight_specs
from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.architecture import Architecture, Rope
from nxbucket.toolkit.errors import ModelError

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=12,
    hidden_size=6,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    rope=Rope("default", 10000.0),
)
TIED = dataclasses.replace(ARCHITECTURE, tie_word_embeddings=True)
INDEX = "model.safetensors.index.json"


def tensors_of(arch: Architecture = ARCHITECTURE) -> dict[str, Tensor]:
    """Every checkpoint tensor of `arch`, each element with a value of its own."""
    tensors, first = {}, 0
    for spec in weight_specs(arch):
        for i, source in enumerate(spec.sources):
            shape = spec.source_shape(i)
            size = math.prod(shape)
            tensors[source] = torch.arange(first, first + size, dtype=torch.float32).view(shape)
            first += size
    return tensors


def write_single(folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    save_file(tensors_of() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor] | None = None, count: int = 3) -> Path:
    tensors = tensors_of() if tensors is None else tensors
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        held = names[i::count]
        save_file({name: tensors[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    write_index(folder, {"metadata": {}, "weight_map": weight_map})
    return folder


def write_index(folder: Path, content: Any) -> None:
    (folder / INDEX).write_text(json.dumps(content))


def weight_map_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def refusal(folder: Path, arch: Architecture = ARCHITECTURE) -> ModelError:
    """The error, which must say something, where, and what to do next."""
    with pytest.raises(ModelError) as caught:
        load_weights(folder, arch, "float32")
    error = caught.value
    assert str(folder) in error.message
    assert error.hint
    return error


# What loads


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_projections_are_joined_in_order_and_weights_follow_the_signature(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    sources = tensors_of()
    weights = load_weights(write(tmp_path), ARCHITECTURE, "float32")
    assert list(weights) == [spec.name for spec in weight_specs(ARCHITECTURE)]
    attn, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    expected = {
        "embed_tokens": [sources["model.embed_tokens.weight"]],
        "layers.1.qkv": [sources[f"{attn}.{p}_proj.weight"] for p in "qkv"],
        "layers.1.qkv_bias": [sources[f"{attn}.{p}_proj.bias"] for p in "qkv"],
        "layers.1.o": [sources[f"{attn}.o_proj.weight"]],
        "layers.1.o_bias": [sources[f"{attn}.o_proj.bias"]],
        "layers.1.input_norm": [sources["model.layers.1.input_layernorm.weight"]],
        "layers.1.post_norm": [sources["model.layers.1.post_attention_layernorm.weight"]],
        "layers.1.gate_up": [sources[f"{mlp}.{p}_proj.weight"] for p in ("gate", "up")],
        "layers.1.gate_up_bias": [sources[f"{mlp}.{p}_proj.bias"] for p in ("gate", "up")],
        "layers.1.down": [sources[f"{mlp}.down_proj.weight"]],
        "layers.1.down_bias": [sources[f"{mlp}.down_proj.bias"]],
        "norm": [sources["model.norm.weight"]],
        "lm_head": [sources["lm_head.weight"]],
    }
    for name, parts in expected.items():
        assert torch.equal(weights[name], torch.cat(parts)), name
    assert weights["layers.1.qkv"].shape == (4 * 2 + 2 * 2 + 2 * 2, 6)
    assert all(weight.is_contiguous() for weight in weights.values())


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_the_served_dtype(tmp_path: Path, stored: str, wanted: str) -> None:
    # B106
    tensors = {name: (t / 7).to(getattr(torch, stored)) for name, t in tensors_of().items()}
    weights = load_weights(write_single(tmp_path, tensors), ARCHITECTURE, wanted)
    assert {w.dtype for w in weights.values()} == {getattr(torch, wanted)}
    norm = tensors["model.norm.weight"].to(getattr(torch, wanted))
    assert torch.equal(weights["norm"], norm)


def test_a_checkpoint_may_mix_dtypes(tmp_path: Path) -> None:
    tensors = tensors_of()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    key = "model.layers.0.self_attn.k_proj.weight"
    tensors[key] = tensors[key].half()
    weights = load_weights(write_single(tmp_path, tensors), ARCHITECTURE, "float32")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert torch.equal(weights["layers.0.qkv"][8:12], tensors[key].float())


def test_stored_rotary_frequencies_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    tensors = tensors_of() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    load_weights(write_single(tmp_path, tensors), ARCHITECTURE, "float32")


def test_an_index_wins_over_a_single_file_beside_it(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_single(tmp_path, {"other": torch.ones(1)})
    load_weights(tmp_path, ARCHITECTURE, "float32")


def test_the_hub_caches_snapshot_of_links_loads(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "0a1b"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    write_shards(blobs)
    for file in sorted(blobs.iterdir()):
        file.rename(blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    load_weights(snapshot, ARCHITECTURE, "float32")


# Names and shapes


@pytest.mark.parametrize(
    "name", [n for n in tensors_of() if "layers.0" not in n and n != "lm_head.weight"]
)
@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_missing_tensor_is_named(
    tmp_path: Path, write: Callable[[Path, dict[str, Tensor]], Path], name: str
) -> None:
    tensors = tensors_of()
    del tensors[name]
    assert name in refusal(write(tmp_path, tensors)).message


@pytest.mark.parametrize(
    ("arch", "extra"),
    [
        (dataclasses.replace(ARCHITECTURE, qkv_bias=False), "self_attn.q_proj.bias"),  # B104
        (dataclasses.replace(ARCHITECTURE, mlp_bias=False), "mlp.down_proj.bias"),
        (dataclasses.replace(ARCHITECTURE, num_hidden_layers=1), "model.layers.1."),
    ],
)
@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_tensor_nobody_takes_is_an_error_that_names_it(
    tmp_path: Path, write: Callable[[Path], Path], arch: Architecture, extra: str
) -> None:
    assert extra in refusal(write(tmp_path), arch).message


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_norm_that_llama_does_not_have_is_an_error(
    tmp_path: Path, write: Callable[[Path, dict[str, Tensor]], Path]
) -> None:
    # B107
    name = "model.layers.0.self_attn.q_norm.weight"
    assert name in refusal(write(tmp_path, tensors_of() | {name: torch.ones(2)})).message


def test_a_tensor_the_index_leaves_out_does_not_go_unseen(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    write_shards(tmp_path, tensors_of() | {name: torch.ones(2)})
    weight_map = weight_map_of(tmp_path)
    del weight_map[name]
    write_index(tmp_path, {"weight_map": weight_map})
    assert name in refusal(tmp_path).message


@pytest.mark.parametrize(
    "change", [lambda t: t[:-1], lambda t: t.T, lambda t: t[None], lambda t: t.flatten()[0]]
)
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"],
)
def test_a_wrong_shape_is_named_with_both_shapes(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    tensors = tensors_of()
    expected = list(tensors[name].shape)
    tensors[name] = change(tensors[name]).contiguous()
    message = refusal(write_single(tmp_path, tensors)).message
    assert name in message
    assert str(list(tensors[name].shape)) in message
    assert str(expected) in message


def test_projections_of_each_others_shape_are_noticed_though_their_sum_is_right(
    tmp_path: Path,
) -> None:
    tensors = tensors_of()
    q, k = (f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk")
    tensors[q], tensors[k] = tensors[k], tensors[q]
    assert q in refusal(write_single(tmp_path, tensors)).message


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.bool]
)
def test_a_quantized_weight_is_refused_by_name_and_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = tensors_of()
    tensors[name] = torch.zeros(tensors[name].shape, dtype=dtype)
    message = refusal(write_single(tmp_path, tensors)).message
    assert name in message
    assert str(dtype).removeprefix("torch.") in message


# Numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_no_number_is_refused_by_name_and_file(
    tmp_path: Path, name: str, dtype: str, bad: float
) -> None:
    tensors = {n: t.to(getattr(torch, dtype)) for n, t in tensors_of().items()}
    tensors[name].flatten()[-1] = bad
    write_shards(tmp_path, tensors)
    message = refusal(tmp_path).message
    assert str(tmp_path / weight_map_of(tmp_path)[name]) in message
    assert name in message
    assert "NaN or infinity" in message


@pytest.mark.parametrize(
    ("value", "stored", "dtype", "fits"),
    [
        (65504.0, "float32", "float16", True),
        (65519.0, "float32", "float16", True),  # rounds to 65504
        (65520.0, "float32", "float16", False),
        (-1e5, "bfloat16", "float16", False),
        (1e5, "bfloat16", "bfloat16", True),
        (3.4e38, "float32", "bfloat16", False),  # rounds past the largest
        (1e300, "float64", "float32", False),
    ],
)
def test_a_weight_too_large_for_the_served_dtype_is_refused(
    tmp_path: Path, value: float, stored: str, dtype: str, fits: bool
) -> None:
    tensors = {n: t.to(getattr(torch, stored)) for n, t in tensors_of().items()}
    tensors["model.norm.weight"][3] = value
    write_single(tmp_path, tensors)
    if fits:
        assert bool(load_weights(tmp_path, ARCHITECTURE, dtype)["norm"].isfinite().all())
        return
    with pytest.raises(ModelError) as caught:
        load_weights(tmp_path, ARCHITECTURE, dtype)
    assert f"infinite in {dtype}" in caught.value.message
    assert "model.norm.weight" in caught.value.message


# Families


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_a_qwen3_without_its_head_norms_names_them(tmp_path: Path, norm: str) -> None:
    # B107
    qwen3 = dataclasses.replace(ARCHITECTURE, family="qwen3", qk_norm=True)
    tensors = tensors_of(qwen3)
    del tensors[f"model.layers.1.self_attn.{norm}.weight"]
    message = refusal(write_single(tmp_path, tensors), qwen3).message
    assert f"model.layers.1.self_attn.{norm}.weight" in message


def test_a_qwen2_takes_three_biases_and_no_fourth(tmp_path: Path) -> None:
    # B104
    qwen2 = dataclasses.replace(ARCHITECTURE, family="qwen2", o_bias=False, mlp_bias=False)
    tensors = tensors_of(qwen2)
    load_weights(write_single(tmp_path, tensors), qwen2, "float32")
    extra = "model.layers.0.self_attn.o_proj.bias"
    assert extra in refusal(write_single(tmp_path, tensors | {extra: torch.ones(6)}), qwen2).message
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    message = refusal(write_single(tmp_path, tensors), qwen2).message
    assert "model.layers.0.self_attn.k_proj.bias" in message


# lm_head


def test_a_tied_checkpoint_needs_no_head(tmp_path: Path) -> None:
    # B96
    weights = load_weights(write_single(tmp_path, tensors_of(TIED)), TIED, "float32")
    assert "lm_head" not in weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_redundant_equal_head_loads_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    # B95 (a)
    tensors = tensors_of(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    with caplog.at_level(logging.WARNING):
        weights = load_weights(write_single(tmp_path, tensors), TIED, dtype)
    assert "lm_head" not in weights
    assert not caplog.records


@pytest.mark.parametrize("rows", [12, 11])
def test_of_a_differing_head_the_embedding_wins_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    # B95 (b)
    tensors = tensors_of(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:rows] + 1
    with caplog.at_level(logging.WARNING):
        weights = load_weights(write_single(tmp_path, tensors), TIED, "float32")
    assert torch.equal(weights["embed_tokens"], tensors["model.embed_tokens.weight"])
    assert "lm_head" not in weights
    [record] = caplog.records
    assert "lm_head.weight" in record.getMessage()
    assert "tie_word_embeddings" in record.getMessage()


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_an_untied_checkpoint_without_a_head_names_both_ways_out(
    tmp_path: Path, write: Callable[[Path, dict[str, Tensor]], Path]
) -> None:
    # B97
    error = refusal(write(tmp_path, tensors_of(TIED)))
    assert "lm_head.weight" in error.message
    assert error.hint is not None
    assert "add the tensor" in error.hint
    assert "tie_word_embeddings: true" in error.hint


# Shards and the index


def test_missing_shards_are_named(tmp_path: Path) -> None:
    # B108
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = refusal(tmp_path).message
    assert "model-00002-of-00003.safetensors" in message
    assert "model-00001-of-00003.safetensors" not in message


def test_an_index_of_another_build_is_called_stale(tmp_path: Path) -> None:
    # B109
    write_shards(tmp_path, count=4)
    names = [f"model-{i + 1:05}-of-00013.safetensors" for i in range(13)]
    write_index(tmp_path, {"weight_map": {t: names[i % 13] for i, t in enumerate(tensors_of())}})
    message = refusal(tmp_path).message
    assert "stale" in message
    assert all(name in message for name in names)


def test_an_index_that_looks_for_a_tensor_in_the_wrong_shard_is_called_stale(
    tmp_path: Path,
) -> None:
    write_shards(tmp_path)
    weight_map = weight_map_of(tmp_path)
    weight_map["model.norm.weight"] = next(
        file for file in weight_map.values() if file != weight_map["model.norm.weight"]
    )
    write_index(tmp_path, {"weight_map": weight_map})
    message = refusal(tmp_path).message
    assert "stale" in message
    assert "model.norm.weight" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not JSON",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'"weight_map"',
        b'{"weight_map": null}',
        b'{"weight_map": ["a", "b"]}',
        b'{"weight_map": {"model.norm.weight": 1}}',
        b'{"weight_map": {"model.norm.weight": ["model.safetensors"]}}',
        b'{"weight_map": {"model.norm.weight": null}}',
        b"[" * 100_000,
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).write_bytes(content)
    assert f"{tmp_path / INDEX}: not a safetensors index" in refusal(tmp_path).message


def test_an_empty_index_is_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {}})
    assert "missing tensors" in refusal(tmp_path).message


@pytest.mark.parametrize("name", ["../{}", "./{}", "sub/{}", "{folder}/{}", ".", "", "/"])
def test_an_index_names_plain_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder, beside = tmp_path / "model", tmp_path / "model" / "sub"
    beside.mkdir(parents=True)
    write_shards(folder)
    file = "model-00001-of-00003.safetensors"
    for copy in (tmp_path / file, beside / file):
        copy.write_bytes((folder / file).read_bytes())
    weight_map = {
        tensor: name.format(file, folder=tmp_path) if held_in == file else held_in
        for tensor, held_in in weight_map_of(folder).items()
    }
    write_index(folder, {"weight_map": weight_map})
    message = refusal(folder).message
    assert "not plain names" in message


@pytest.mark.parametrize("file", [INDEX, "model-00002-of-00003.safetensors"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    write_shards(folder)
    (folder / file).rename(elsewhere)
    (folder / file).symlink_to(elsewhere)
    message = refusal(folder).message
    assert "links out of the folder" in message
    assert file in message


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    write_shards(tmp_path)
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.rename(tmp_path / "real.safetensors")
    file.symlink_to("real.safetensors")
    load_weights(tmp_path, ARCHITECTURE, "float32")


def test_a_model_folder_that_is_itself_a_link_is_followed(tmp_path: Path) -> None:
    folder, link = tmp_path / "model", tmp_path / "link"
    folder.mkdir()
    write_shards(folder)
    link.symlink_to(folder)
    load_weights(link, ARCHITECTURE, "float32")


# Bytes


def truncated(content: bytes) -> bytes:
    return content[:-5]


def with_a_huge_header(content: bytes) -> bytes:
    return struct.pack("<Q", 1 << 62) + content[8:]


def with_an_offset_outside(content: bytes) -> bytes:
    return re.sub(rb'"data_offsets":\[0,', b'"data_offsets":[9,', content)


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        with_a_huge_header,
        with_an_offset_outside,
        lambda content: b"",
        lambda content: content[:7],
        lambda content: b"garbage" * 99,
        lambda content: b"\x80\x02}q\x00." + bytes(99),
        lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    ],
)
@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_damaged_file_is_named(
    tmp_path: Path, write: Callable[[Path], Path], damage: Callable[[bytes], bytes]
) -> None:
    write(tmp_path)
    file = max(tmp_path.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert file.read_bytes() != content
    assert f"{file}: not a safetensors file" in refusal(tmp_path).message


@pytest.mark.parametrize(
    "files", [["pytorch_model.bin"], ["pytorch_model-00001-of-00002.bin", "consolidated.00.pth"]]
)
def test_pickle_files_are_refused_and_safetensors_asked_for(
    tmp_path: Path, files: list[str]
) -> None:
    for file in files:
        torch.save(tensors_of(), tmp_path / file)
    error = refusal(tmp_path)
    assert "safetensors wanted" in error.message
    assert all(file in error.message for file in files)


def test_pickle_files_beside_safetensors_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    load_weights(write_single(tmp_path), ARCHITECTURE, "float32")


@pytest.mark.parametrize("folder", [".", "not-there"])
def test_a_folder_without_weights_says_what_is_looked_for(tmp_path: Path, folder: str) -> None:
    message = refusal(tmp_path / folder).message
    assert "model.safetensors" in message
    assert INDEX in message


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    # Guards the tests above: the files on disk are ordinary safetensors.
    write_single(tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors_of().items())
