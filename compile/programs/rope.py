"""Rotary position embedding: the inverse frequencies of each form, and their use."""

import math

import torch
from torch import Tensor

from nxbucket.toolkit.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2].

    Computed with the operations Hugging Face and vLLM use, in their order, because at position
    100,000 one unit in the last place of a frequency is already 0.006 radians.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    return _llama3(rope, frequencies) if rope.form == "llama3" else frequencies


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
