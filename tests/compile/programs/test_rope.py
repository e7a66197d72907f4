"""Rotary frequencies against Hugging Face's, with the numbers of published models."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nxbucket.compile.programs import rope
from nxbucket.toolkit.architecture import Rope

LLAMA_3_1 = Rope("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)  # B89
LLAMA_3_2 = Rope("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)
PUBLISHED = [
    (Rope("default", 10000.0), 128),
    (Rope("default", 500000.0), 128),
    (Rope("default", 1000000.0), 64),
    (LLAMA_3_1, 128),
    (LLAMA_3_2, 64),
]


def hugging_face(form: Rope, head_dim: int) -> LlamaRotaryEmbedding:
    parameters: dict[str, Any] = {"rope_type": form.form, "rope_theta": form.theta}
    if form.form == "llama3":
        parameters |= {
            "factor": form.factor,
            "low_freq_factor": form.low_freq_factor,
            "high_freq_factor": form.high_freq_factor,
            "original_max_position_embeddings": form.original_max_position_embeddings,
        }
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("form", "head_dim"), PUBLISHED)
def test_inverse_frequencies_are_hugging_faces_to_the_last_bit(form: Rope, head_dim: int) -> None:
    expected = hugging_face(form, head_dim).inv_freq
    assert torch.equal(rope.inverse_frequencies(form, head_dim), expected)


def test_llama3_keeps_blends_and_divides_frequencies() -> None:
    plain = rope.inverse_frequencies(Rope("default", 500000.0), 128)
    ratio = plain / rope.inverse_frequencies(LLAMA_3_1, 128)
    assert int((ratio == 1).sum()) > 10
    assert int((ratio == 8).sum()) > 10
    assert int(((ratio > 1.001) & (ratio < 7.999)).sum()) > 5
    assert bool((ratio.diff() >= 0).all())


@pytest.mark.parametrize(("form", "head_dim"), PUBLISHED)
@pytest.mark.parametrize("first", [0, 8190, 131000])
def test_rotation_equals_hugging_face_far_beyond_the_original_positions(
    form: Rope, head_dim: int, first: int
) -> None:
    positions = torch.arange(first, first + 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, head_dim, generator=generator)
    cos, sin = hugging_face(form, head_dim)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    angles = positions.to(torch.int32).float()[:, None] * rope.inverse_frequencies(form, head_dim)
    ours = rope.rotate(x, angles.cos()[:, None, :], angles.sin()[:, None, :])
    torch.testing.assert_close(ours.transpose(0, 1)[None], expected, rtol=0, atol=1e-6)
