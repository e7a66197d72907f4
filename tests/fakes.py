"""Stand-ins that several test packages share."""

import json
from pathlib import Path
from typing import Any

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}

ABSENT: Any = object()
"""As an override: leave the field out."""


def model_folder(path: Path, **overrides: Any) -> Path:
    """A model folder with config.json and no weights."""
    path.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in (TINY_LLAMA | overrides).items() if v is not ABSENT}
    (path / "config.json").write_text(json.dumps(config))
    return path
