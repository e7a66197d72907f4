"""Rotary position embedding: the inverse frequencies of each form, and their use."""

import math

import torch
from torch import Tensor

from nxbucket.toolkit.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2].

    Computed with the operations Hugging Face and vLLM use, in their order, because at position
    100,000 one unit in the last place of a frequency is already 0.006 radians.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    if rope.form == "longrope":
        assert rope.short_factor is not None
        return 1.0 / (torch.tensor(rope.short_factor) * rope.theta**exponents)
    if rope.form == "yarn":
        return _yarn(rope, rope.theta**exponents, head_dim)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.form == "linear":
        assert rope.factor is not None
        return frequencies / rope.factor
    return _llama3(rope, frequencies) if rope.form == "llama3" else frequencies


def cos_sin(rope: Rope, angles: Tensor) -> tuple[Tensor, Tensor]:
    """angles float32 [n, head_dim / 2] -> cos and sin [n, 1, head_dim / 2], for `rotate`."""
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    factor = rope.attention_factor
    if factor is None or factor == 1:
        return cos, sin
    return cos * factor, sin * factor


def _yarn(rope: Rope, powers: Tensor, head_dim: int) -> Tensor:
    """YaRN: frequencies that turn often are kept, those that turn little divided, a ramp between.

    Source: jquesnelle/yarn; transformers' `_compute_yarn_parameters`. Where the ramp ends depends
    on `truncate`; a table of its own for the magnitude is `attention_factor`, in `cos_sin`.
    """
    assert rope.factor and rope.beta_fast and rope.beta_slow
    assert rope.original_max_position_embeddings
    original = rope.original_max_position_embeddings

    def dimension(rotations: float) -> float:
        turned = math.log(original / (rotations * 2 * math.pi))
        return (head_dim * turned) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = torch.clamp(
        (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1
    )
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between.

    Source: meta-llama/llama-models, `apply_scaling`; transformers' `_compute_llama3_parameters`.
    """
    assert rope.factor and rope.low_freq_factor and rope.high_freq_factor
    assert rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    old_context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > old_context / low, frequencies / rope.factor, frequencies)
    ramp = (old_context / wavelengths - low) / (high - low)
    blended = (1 - ramp) * scaled / rope.factor + ramp * scaled
    in_ramp = ~(wavelengths < old_context / high) * ~(wavelengths > old_context / low)
    return torch.where(in_ramp, blended, scaled)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, head_dim]; cos, sin float32 [n, 1, head_dim / 2]. Half-split, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
