import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ABSENT, model_folder
from nxbucket.toolkit.architecture import Rope, read_architecture
from nxbucket.toolkit.errors import Problem, SpecError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = Rope("llama3", 10000.0, 8.0, 1.0, 4.0, 8192)


def problems(path: Path, **overrides: Any) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        read_architecture(model_folder(path, **overrides))
    assert all(p.file == path / "config.json" for p in caught.value.problems)
    return caught.value.problems


def write_safetensors(path: Path, dtypes: list[str]) -> None:
    header = {
        f"w{i}": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}
        for i, dtype in enumerate(dtypes)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({}, Rope("default", 10000.0)),
        ({"rope_theta": 500000}, Rope("default", 500000.0)),
        ({"rope_scaling": None, "rope_theta": 5e5}, Rope("default", 500000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope("default", 5e5)),
        ({"rope_scaling": LLAMA3}, LLAMA3_ROPE),  # B89
        ({"rope_scaling": {**LLAMA3, "rope_type": None, "type": "llama3"}}, LLAMA3_ROPE),  # B90
        ({"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}, LLAMA3_ROPE),
    ],
)
def test_rope_is_read_in_old_and_new_spellings(
    tmp_path: Path, overrides: dict[str, Any], rope: Rope
) -> None:
    assert read_architecture(model_folder(tmp_path, **overrides)).architecture.rope == rope


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 8.0},
        {"type": "dynamic", "factor": 2.0},
        {"type": "su"},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": ["llama3"]},
    ],
)
def test_other_rope_forms_are_refused_by_name(tmp_path: Path, scaling: dict[str, Any]) -> None:
    # B90
    [problem] = problems(tmp_path, rope_scaling=scaling)
    assert problem.code == "rope-unsupported"
    name = scaling.get("rope_type", scaling.get("type"))
    assert ("list" if isinstance(name, list) else str(name)) in problem.message


@pytest.mark.parametrize(
    "field",
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
)
@pytest.mark.parametrize("value", [None, "8", True, -1, 0])
def test_each_llama3_field_must_be_there_and_a_number(
    tmp_path: Path, field: str, value: object
) -> None:
    [problem] = problems(tmp_path, rope_scaling={**LLAMA3, field: value})
    assert problem.key == f"rope_scaling.{field}"


def test_rope_fields_of_the_wrong_shape_are_problems(tmp_path: Path) -> None:
    assert problems(tmp_path, rope_scaling="llama3")[0].key == "rope_scaling"
    assert problems(tmp_path, rope_scaling=None, rope_theta="x")[0].key == "rope_theta"
    low_is_high = {**LLAMA3, "low_freq_factor": 4.0}
    assert problems(tmp_path, rope_scaling=low_is_high)[0].key == "rope_scaling.low_freq_factor"


@pytest.mark.parametrize("absent", [ABSENT, None])
def test_fields_left_out_take_llamas_defaults(tmp_path: Path, absent: Any) -> None:
    left_out = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps")
    config = read_architecture(model_folder(tmp_path, **dict.fromkeys(left_out, absent)))
    architecture = config.architecture
    assert architecture.head_dim == 16
    assert architecture.num_key_value_heads == 4
    assert architecture.rms_norm_eps == 1e-6
    assert not architecture.tie_word_embeddings
    assert any("tie_word_embeddings" in note for note in config.notes)  # B96


def test_head_dim_need_not_be_hidden_size_over_heads(tmp_path: Path) -> None:
    # B93
    config = read_architecture(model_folder(tmp_path, hidden_size=80, head_dim=16))
    assert config.architecture.head_dim == 16


def test_biases_follow_the_config(tmp_path: Path) -> None:
    # B104
    config = read_architecture(model_folder(tmp_path, attention_bias=True, mlp_bias=None))
    assert config.architecture.attention_bias
    assert not config.architecture.mlp_bias


def test_end_ids_may_be_a_number_or_a_list_and_do_not_matter_here(tmp_path: Path) -> None:
    # B98
    one = read_architecture(model_folder(tmp_path / "a", eos_token_id=1)).architecture
    many = read_architecture(model_folder(tmp_path / "b", eos_token_id=[1, 2])).architecture
    assert one == many


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        ({"model_type": "mistral"}, "model-unsupported", "mistral"),
        ({"model_type": "qwen2", "vocab_size": "x"}, "model-unsupported", "qwen2"),
        ({"model_type": ABSENT}, "model-unsupported", "missing"),
        ({"model_type": ["llama"]}, "model-unsupported", "list"),
        ({"architectures": ["LlamaForX"]}, "model-unsupported", "LlamaForX"),
        ({"architectures": 3}, "model-unsupported", "integer 3"),
        ({"hidden_act": "gelu"}, "config-unsupported", "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "config-unsupported", "quantized"),
        ({"vocab_size": ABSENT}, "config-missing-field", "vocab_size"),
        ({"vocab_size": "320"}, "config-type", "vocab_size"),
        ({"vocab_size": True}, "config-type", "vocab_size"),
        ({"vocab_size": 320.0}, "config-type", "vocab_size"),
        ({"vocab_size": 10**400}, "config-type", "vocab_size"),
        ({"hidden_size": 0}, "config-type", "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "config-type", "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "config-type", "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "config-type", "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "config-heads", "num_key_value_heads"),
        ({"head_dim": None, "hidden_size": 66}, "config-heads", "hidden_size"),
        ({"head_dim": 15}, "config-heads", "odd"),
        ({"dtype": 5}, "config-type", "dtype"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], code: str, says: str
) -> None:
    [problem] = problems(tmp_path, **overrides)
    assert problem.code == code
    assert says in problem.message


def test_all_wrong_fields_are_reported_together(tmp_path: Path) -> None:
    found = problems(tmp_path, vocab_size=0, hidden_size="x", rope_scaling={"type": "yarn"})
    assert {p.key for p in found} == {"vocab_size", "hidden_size", "rope_scaling.type"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "config-not-json"),
        (b"[]", "config-not-json"),
        (b"\xff", "config-not-json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "config-not-json"),
        (b"[" * 200_000, "config-not-json"),
        (b" " * (2 << 20), "config-too-large"),
    ],
)
def test_a_file_that_is_no_config_is_a_problem(tmp_path: Path, content: bytes, code: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_architecture(tmp_path)
    assert [p.code for p in caught.value.problems] == [code]


def test_a_folder_without_config_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_architecture(tmp_path)
    assert caught.value.problems[0].code == "config-missing"


@pytest.mark.parametrize(
    ("overrides", "stored", "dtype"),
    [
        ({"dtype": ABSENT}, ["BF16", "BF16", "F32"], "bfloat16"),  # B106 a
        ({"torch_dtype": None, "dtype": "bfloat16"}, [], "bfloat16"),  # B106 b
        ({"dtype": None, "torch_dtype": "torch.float16"}, [], "float16"),
        ({"dtype": "float16"}, ["BF16"], "float16"),  # B106 c
        ({"dtype": ABSENT}, ["F8_E4M3"], "f8_e4m3"),
        ({"dtype": ABSENT}, [], None),
    ],
)
def test_the_dtype_is_the_configs_else_the_weights(
    tmp_path: Path, overrides: dict[str, Any], stored: list[str], dtype: str | None
) -> None:
    folder = model_folder(tmp_path, **overrides)
    if stored:
        write_safetensors(folder / "model.safetensors", stored)
    config = read_architecture(folder)
    assert config.dtype == dtype
    assert any("most weights are bfloat16" in n for n in config.notes) == (
        dtype == "float16" and bool(stored)
    )


@pytest.mark.parametrize(
    "content", [b"", b"\x05", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0{"]
)
def test_a_broken_weight_file_leaves_the_dtype_open(tmp_path: Path, content: bytes) -> None:
    folder = model_folder(tmp_path, dtype=None)
    (folder / "model.safetensors").write_bytes(content)
    assert read_architecture(folder).dtype is None


FIELDS = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "dtype", "torch_dtype", "rope_scaling", "rope_theta"),
    *("rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
    *("max_position_embeddings", "quantization_config"),
)
WORDS = st.sampled_from(["llama", "llama3", "rope_type", "type", "factor", "rope_theta", "", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_json_is_an_architecture_or_a_spec_error(
    tmp_path_factory: pytest.TempPathFactory, overrides: dict[str, Any]
) -> None:
    folder = model_folder(tmp_path_factory.getbasetemp() / "any-json", **overrides)
    try:
        read_architecture(folder)
    except SpecError as err:
        assert err.problems
