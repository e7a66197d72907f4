import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ABSENT, model_folder
from nxbucket.toolkit.architecture import Rope, read_architecture
from nxbucket.toolkit.errors import Problem, SpecError
from nxbucket.toolkit.spec import load_spec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = Rope("llama3", 10000.0, 8.0, 1.0, 4.0, 8192)
YARN_ROPE = Rope(
    "yarn",
    10000.0,
    4.0,
    original_max_position_embeddings=1024,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention_factor=0.1 * math.log(4) + 1,
)


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
    ("scaling", "rope"),
    [
        ({"rope_type": "linear", "factor": 8.0}, Rope("linear", 10000.0, 8.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, Rope("default", 10000.0)),
        (LLAMA3, LLAMA3_ROPE),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024},
            YARN_ROPE,
        ),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            Rope(
                "longrope",
                10000.0,
                attention_factor=math.sqrt(1 + math.log(4) / math.log(1024)),
                short_factor=(1.0,) * 8,
            ),
        ),
    ],
    ids=lambda value: value.get("rope_type") if isinstance(value, dict) else "",
)
def test_old_and_new_spelling_and_both_at_once_mean_the_same(
    tmp_path: Path, scaling: dict[str, Any], rope: Rope
) -> None:
    # B90: one meaning, so one key.
    form = scaling["rope_type"]
    bare = {k: v for k, v in scaling.items() if k != "rope_type"}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 10000, "rope_scaling": {**bare, "type": form}},
        {"rope_theta": 10000.0, "rope_scaling": scaling},
        {"rope_theta": 10000.0, "rope_scaling": {**scaling, "type": form}},
        {"rope_scaling": None, "rope_parameters": {**scaling, "rope_theta": 10000.0}},
        {"rope_parameters": {**bare, "type": form, "rope_theta": 10000}},
    ]
    for i, overrides in enumerate(spellings):
        folder = model_folder(tmp_path / str(i), **overrides)
        assert read_architecture(folder).architecture.rope == rope


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"type": "su", "factor": 2.0}, "su"),
        ({"type": "mrope", "mrope_section": [1, 2, 3]}, "mrope"),
        ({"rope_type": "default", "mrope_section": [1, 2, 3]}, "mrope_section"),
        ({"rope_type": "ntk", "factor": 2.0}, "ntk"),
        ({"rope_type": "proportional"}, "proportional"),
        ({"rope_type": "deepseek_yarn", "factor": 2.0}, "deepseek_yarn"),
        ({"rope_type": ["llama3"]}, "list"),
        ({"rope_type": {"a": 1}}, "mapping"),
        ({"rope_type": "x\x1b[2J" * 99}, "\\x1b"),
        ({"rope_type": "dynamic", "alpha": 1000.0}, "alpha"),
        ({"rope_type": "yarn", "type": "linear", "factor": 4.0}, "which?"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary"),
    ],
)
def test_other_rope_forms_are_refused_by_name(
    tmp_path: Path, scaling: dict[str, Any], says: str
) -> None:
    # B90
    [problem] = problems(tmp_path, rope_scaling=scaling)
    assert problem.code == "rope-unsupported"
    assert says in problem.message
    assert len(problem.message) < 200


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"factor": None}, "factor"),
        ({"factor": "4"}, "factor"),
        ({"factor": -4}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": 10**400}, "factor"),
        ({"original_max_position_embeddings": 1.5}, "original_max_position_embeddings"),
        ({"beta_fast": "x"}, "beta_fast"),
        ({"beta_fast": 1, "beta_slow": 32}, "beta_fast"),
        ({"attention_factor": 0}, "attention_factor"),
        ({"mscale": "x", "mscale_all_dim": 1.0}, "mscale"),
        ({"truncate": 1}, "truncate"),
        ({"rope_theta": 1.0}, "rope_theta"),
    ],
)
def test_a_wrong_field_of_yarn_is_named(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    [problem] = problems(tmp_path, rope_scaling={**yarn, **change})
    assert problem.key == f"rope_scaling.{key}"


@pytest.mark.parametrize(
    "factors", [None, "x", [], [1.0] * 7, [1.0] * 9, ["1"] * 8, [0.0] * 8, [float("inf")] * 8]
)
@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_longrope_needs_a_factor_for_each_frequency(
    tmp_path: Path, key: str, factors: object
) -> None:
    longrope = {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 1024,
    }
    [problem] = problems(tmp_path, rope_scaling={**longrope, key: factors})
    assert problem.key == f"rope_scaling.{key}"


@pytest.mark.parametrize(
    ("overrides", "tokens", "says"),
    [
        ({}, 4096, "max_position_embeddings 4096"),
        ({"max_sequence_length": 2048}, 2048, "max_sequence_length 2048"),
        ({"rope_scaling": LLAMA3}, 4096, "max_position_embeddings 4096"),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240, "times the factor 2.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096, "dynamic RoPE changes"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 4096,
                }
            },
            4096,
            "set max_position_embeddings to 16384",
        ),
        (
            {
                "original_max_position_embeddings": 1024,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                },
            },
            1024,
            "longrope changes its table",
        ),
    ],
)
def test_how_long_a_text_may_be_follows_from_the_rope_and_says_why(
    tmp_path: Path, overrides: dict[str, Any], tokens: int, says: str
) -> None:
    model_folder(tmp_path / "model", **overrides)
    file = tmp_path / "model.yaml"
    file.write_text(f"model: model\nmax_model_len: {tokens}\n")
    assert load_spec(file).max_model_len == tokens
    file.write_text(f"model: model\nmax_model_len: {tokens + 1}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    [problem] = caught.value.problems
    assert f"max_model_len {tokens + 1} is above" in problem.message
    assert says in problem.message


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
    left_out = dict.fromkeys(("head_dim", "num_key_value_heads", "rms_norm_eps"), absent)
    config = read_architecture(model_folder(tmp_path, tie_word_embeddings=ABSENT, **left_out))
    architecture = config.architecture
    assert architecture.head_dim == 16
    assert architecture.num_key_value_heads == 4
    assert architecture.rms_norm_eps == 1e-6
    assert not architecture.tie_word_embeddings
    assert any("tie_word_embeddings" in note for note in config.notes)  # B96


@pytest.mark.parametrize(
    "key", ["tie_word_embeddings", "hidden_act", "attention_bias", "use_cache"]
)
def test_a_null_that_transformers_refuses_is_refused_before_the_compile(
    tmp_path: Path, key: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read_architecture(model_folder(tmp_path, **{key: None}))
    [problem] = caught.value.problems
    assert (problem.code, problem.key) == ("config-null", key)


@pytest.mark.parametrize(
    ("field", "mend"),
    [
        ({"eos_token_id": "</s>"}, "published"),
        ({"eos_token_id": [1, "a"]}, "published"),
        ({"bos_token_id": [1]}, "published"),
        ({"pad_token_id": 0.0}, "published"),
        ({"rms_norm_eps": 1}, "published"),
        ({"initializer_range": 1}, "published"),
        ({"use_cache": 1}, "published"),
        ({"dtype": "torch.bfloat16"}, "write 'bfloat16'"),
    ],
    ids=str,
)
def test_a_type_that_transformers_refuses_is_refused_before_the_compile(
    tmp_path: Path, field: dict[str, Any], mend: str
) -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    folder = model_folder(tmp_path, **field)
    with pytest.raises(SpecError) as caught:
        read_architecture(folder)
    [problem] = caught.value.problems
    assert (problem.code, problem.key) == ("config-type", *field)
    assert mend in problem.hint
    with pytest.raises((StrictDataclassError, AttributeError)):
        AutoConfig.from_pretrained(str(folder))


def test_head_dim_need_not_be_hidden_size_over_heads(tmp_path: Path) -> None:
    # B93
    config = read_architecture(model_folder(tmp_path, hidden_size=80, head_dim=16))
    assert config.architecture.head_dim == 16


def test_biases_follow_the_config(tmp_path: Path) -> None:
    # B104
    config = read_architecture(model_folder(tmp_path, attention_bias=True, mlp_bias=ABSENT))
    assert config.architecture.qkv_bias
    assert config.architecture.o_bias
    assert not config.architecture.mlp_bias


def test_end_ids_may_be_a_number_or_a_list_and_do_not_matter_here(tmp_path: Path) -> None:
    # B98
    one = read_architecture(model_folder(tmp_path / "a", eos_token_id=1)).architecture
    many = read_architecture(model_folder(tmp_path / "b", eos_token_id=[1, 2])).architecture
    assert one == many


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        ({"model_type": "mistral"}, "model-unsupported", "LlamaForCausalLM as a mistral"),
        ({"model_type": "phi3", "vocab_size": "x"}, "model-unsupported", "phi3"),
        ({"model_type": "qwen2_moe"}, "model-unsupported", "qwen2_moe"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "model-unsupported", "Sequence"),
        ({"architectures": ["LlamaModel"]}, "model-unsupported", "LlamaModel"),
        ({"architectures": [["LlamaForCausalLM"]]}, "model-unsupported", "LlamaForCausalLM"),
        ({"num_hidden_layers": 2**31 - 1}, "config-value", "num_hidden_layers"),
        ({"is_causal": False}, "config-unsupported", "is_causal"),
        ({"qk_norm": True}, "config-unsupported", "qk_norm"),
        ({"dual_chunk_attention_config": {}}, "config-unsupported", "dual_chunk"),
        ({"layer_types": ["sliding_attention"] * 2}, "config-unsupported", "layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "config-type", "layer_types"),
        ({"layer_types": "full_attention"}, "config-type", "layer_types"),
        ({"partial_rotary_factor": 0.5}, "rope-unsupported", "partial_rotary_factor"),
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
    found = problems(tmp_path, vocab_size=0, hidden_size="x", rope_scaling={"type": "su"})
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
        ({"dtype": None, "torch_dtype": "float16"}, [], "float16"),
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
    *("max_position_embeddings", "quantization_config", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "layer_types", "attention_bias", "original_max_position_embeddings"),
)
WORDS = st.sampled_from(
    [
        *("llama", "mistral", "qwen2", "qwen3", "llama3", "yarn", "linear", "dynamic", "longrope"),
        *("rope_type", "type", "factor", "rope_theta", "sliding_attention", "", "x"),
    ]
)
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
