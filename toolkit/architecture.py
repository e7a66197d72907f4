"""What config.json says about the graph: the fields that decide a bucket program, and no others."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `theta` is the base; the rest belongs to the llama3 form."""

    form: Literal["default", "llama3"]
    theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder's shape. Everything here enters every artifact key; weights, names and paths do not."""

    family: Literal["llama"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: Rope
