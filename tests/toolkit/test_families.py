"""What each family's config.json means. `BNN` are cases seen elsewhere."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fakes import ABSENT, model_folder
from nxbucket.toolkit.architecture import (
    FAMILIES,
    Architecture,
    ModelConfig,
    read_architecture,
)
from nxbucket.toolkit.errors import Problem, SpecError
from nxbucket.toolkit.spec import load_spec


def config_of(path: Path, family: str, **overrides: Any) -> ModelConfig:
    own = {"model_type": family, "architectures": [FAMILIES[family]]}
    return read_architecture(model_folder(path, **{**own, **overrides}))


def read(path: Path, family: str, **overrides: Any) -> Architecture:
    return config_of(path, family, **overrides).architecture


def refusal(path: Path, family: str, **overrides: Any) -> Problem:
    with pytest.raises(SpecError) as caught:
        read(path, family, **overrides)
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("family", "overrides", "qkv", "o"),
    [  # B104
        ("llama", {}, False, False),
        ("llama", {"attention_bias": True}, True, True),
        ("qwen2", {}, True, False),
        ("qwen2", {"attention_bias": False}, True, False),
        ("qwen3", {}, False, False),
        ("qwen3", {"attention_bias": False}, False, False),
        ("qwen3", {"attention_bias": True}, True, True),
        ("mistral", {"sliding_window": None}, False, False),
    ],
)
def test_biases_are_the_familys_or_the_configs(
    tmp_path: Path, family: str, overrides: dict[str, Any], qkv: bool, o: bool
) -> None:
    arch = read(tmp_path, family, **overrides)
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias) == (qkv, o, False)
    assert arch.qk_norm == (family == "qwen3")


def test_a_mistral_with_biases_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "mistral", attention_bias=True).key == "attention_bias"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_left_out_takes_the_familys_default_and_says_so(
    tmp_path: Path, family: str
) -> None:
    # B96
    config = config_of(tmp_path, family, tie_word_embeddings=ABSENT)
    assert not config.architecture.tie_word_embeddings
    said = f"config.json does not say tie_word_embeddings; the default of {FAMILIES[family]}"
    assert any(note.startswith(said) for note in config.notes)


def test_mistral_nemos_heads_are_not_hidden_size_over_heads(tmp_path: Path) -> None:
    # B93
    arch = read(
        tmp_path,
        "mistral",
        hidden_size=5120,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=None,
    )
    assert arch.head_dim == 128


def test_head_dim_left_out_is_128_for_a_qwen3_only(tmp_path: Path) -> None:
    assert read(tmp_path / "3", "qwen3", head_dim=ABSENT).head_dim == 128
    assert read(tmp_path / "2", "qwen2", head_dim=ABSENT).head_dim == 16


def test_only_a_llama_may_leave_out_its_key_value_heads(tmp_path: Path) -> None:
    problem = refusal(tmp_path, "qwen2", num_key_value_heads=ABSENT)
    assert problem.key == "num_key_value_heads"
    assert read(tmp_path, "qwen2", num_key_value_heads=None).num_key_value_heads == 4


QWEN_WINDOW = {"num_hidden_layers": 28, "sliding_window": 32}


@pytest.mark.parametrize(
    ("family", "overrides", "window", "layers"),
    [  # B101
        ("mistral", {"sliding_window": None}, None, ()),
        ("mistral", {"sliding_window": 64}, 64, (0, 1)),
        ("mistral", {}, 4096, (0, 1)),
        ("llama", {"sliding_window": 64}, None, ()),
        *(
            case
            for family in ("qwen2", "qwen3")
            for case in (
                (family, {**QWEN_WINDOW, "use_sliding_window": False}, None, ()),
                (family, QWEN_WINDOW, None, ()),
                (family, {**QWEN_WINDOW, "use_sliding_window": True}, None, ()),
                (
                    family,
                    {**QWEN_WINDOW, "use_sliding_window": True, "max_window_layers": 28},
                    None,
                    (),
                ),
                (
                    family,
                    {**QWEN_WINDOW, "use_sliding_window": True, "max_window_layers": 14},
                    32,
                    tuple(range(14, 28)),
                ),
                (
                    family,
                    {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
                    None,
                    (),
                ),
                (
                    family,
                    {
                        "use_sliding_window": True,
                        "sliding_window": 8,
                        "layer_types": ["sliding_attention", "full_attention"],
                    },
                    8,
                    (0,),
                ),
            )
        ),
    ],
)
def test_the_window_and_its_layers_are_read_as_transformers_does(
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
    window: int | None,
    layers: tuple[int, ...],
) -> None:
    arch = read(tmp_path, family, **overrides)
    assert (arch.sliding_window, arch.windowed_layers) == (window, layers)
    assert [i for i in range(arch.num_hidden_layers) if arch.window_of(i)] == list(layers)


@pytest.mark.parametrize("window", [0, -1, "8", True, 8.0, 2**40])
def test_a_window_that_is_no_length_is_named(tmp_path: Path, window: object) -> None:
    assert refusal(tmp_path, "mistral", sliding_window=window).key == "sliding_window"


def test_a_mistral_that_says_nothing_of_a_window_has_4096_and_is_told(tmp_path: Path) -> None:
    notes = config_of(tmp_path, "mistral").notes
    assert any("sliding_window" in note and "4096" in note for note in notes)


@pytest.mark.parametrize(("length", "window"), [(63, None), (64, None), (65, 64)])
def test_a_window_that_holds_a_whole_text_is_none(
    tmp_path: Path, length: int, window: int | None
) -> None:
    own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    model_folder(tmp_path / "model", **own, sliding_window=64)
    file = tmp_path / "model.yaml"
    file.write_text(f"model: model\nmax_model_len: {length}\n")
    architecture = load_spec(file).architecture
    assert architecture.sliding_window == window
    assert bool(architecture.windowed_layers) == (window is not None)


def test_the_first_converted_llamas_spell_their_class_otherwise(tmp_path: Path) -> None:
    assert read(tmp_path, "llama", architectures=["LLaMAForCausalLM"]).family == "llama"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("classes", [ABSENT, None, []])
def test_a_family_may_be_named_by_model_type_alone(
    tmp_path: Path, family: str, classes: object
) -> None:
    assert read(tmp_path, family, architectures=classes).family == family


def test_another_class_is_refused_and_what_works_is_named(tmp_path: Path) -> None:
    problem = refusal(tmp_path, "qwen2", architectures=["Qwen2ForRewardModel"])
    assert "Qwen2ForRewardModel as a qwen2" in problem.message
    assert all(name in problem.hint for name in FAMILIES.values())


def test_an_architecture_survives_being_written_down(tmp_path: Path) -> None:
    longrope = {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 1024,
    }
    arch = read(tmp_path, "mistral", sliding_window=64, rope_scaling=longrope)
    assert Architecture.from_json(arch.as_json()) == arch
    assert set(arch.as_json()) == {f.name for f in fields(Architecture)}


@pytest.mark.parametrize("family", FAMILIES)
def test_end_ids_do_not_matter_to_a_program(tmp_path: Path, family: str) -> None:
    # B98: they are vLLM's affair, which reads both files.
    one = read(tmp_path / "a", family, eos_token_id=1, sliding_window=8)
    many = read(tmp_path / "b", family, eos_token_id=[1, 2], sliding_window=8)
    assert one == many
