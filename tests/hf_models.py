"""Tiny random checkpoints of every family, written and read by Hugging Face: our reference.

The weights are scaled so that logits are spread and greedy outputs vary; norm weights and biases
are no identity, so that leaving one out shows.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""With head_dim 8: one frequency kept, one in the ramp, two divided by `factor`."""

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.4, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 128,
}
"""For head_dim 8. A program never leaves the short factors."""


def old_spelling(rope: dict[str, Any]) -> dict[str, Any]:
    """As every config.json was before transformers 5."""
    scaling = {k: v for k, v in rope.items() if k not in ("rope_type", "rope_theta")}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": rope["rope_type"], **scaling},
    }


ROPE_FORMS: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "default, old spelling": {"rope_theta": 500.0},
    "llama3": {"rope_parameters": LLAMA3_ROPE},
    "llama3, old spelling": {
        "rope_theta": 100.0,
        "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
    },
}
"""config.json's fields, as transformers 5 writes them and as everyone did before."""

OTHER_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "yarn": YARN_ROPE,
    "yarn, attention_factor": {**YARN_ROPE, "attention_factor": 0.75},
    "yarn, mscale": {**YARN_ROPE, "mscale": 1.5, "mscale_all_dim": 0.8},
    "yarn, betas, no truncate": {
        **YARN_ROPE,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 2.0},
}
ALL_ROPES = {
    **ROPE_FORMS,
    **{name: {"rope_parameters": rope} for name, rope in OTHER_ROPES.items()},
    **{f"{name}, old spelling": old_spelling(rope) for name, rope in OTHER_ROPES.items()},
}

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}
"""What a family's tiny model says besides: its config class has it for larger ones."""


def write_checkpoint(
    folder: Path,
    *,
    family: str = "llama",
    rope: str = "default",
    seed: int = 0,
    checkpoint: str = "float32",
    shards: int = 1,
    **config: Any,
) -> Path:
    """A checkpoint in `folder`: config.json, and safetensors in about `shards` files.

    `checkpoint` is the dtype it is stored in.
    """
    # Copies: transformers completes what it is given.
    rope_fields = copy.deepcopy(ALL_ROPES[rope])
    config_class, model_class = CLASSES[family]
    hf_config = config_class(**TINY | OWN[family] | config, **copy.deepcopy(rope_fields))
    model = model_class(hf_config)
    _randomize(model, seed)
    model.to(getattr(torch, checkpoint))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=-(-size // shards) if shards > 1 else "5GB")
    _respell_rope(folder / "config.json", rope_fields)
    return folder


def _randomize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                # Small beside what the layers add, or a tied model would repeat its input.
                parameter.copy_(0.4 * noise)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.2
                parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)


def _respell_rope(config_file: Path, rope_fields: dict[str, Any]) -> None:
    config = json.loads(config_file.read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(key, None)
    config_file.write_text(json.dumps(config | rope_fields, indent=2))


@dataclass
class Reference:
    """A checkpoint as Hugging Face runs it: no cache, no padding, the whole sequence each time."""

    model: PreTrainedModel

    @classmethod
    def load(cls, folder: Path, dtype: str = "float32") -> "Reference":
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        return cls(model)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [tokens, vocab]: after each token, the prediction of the next."""
        out: Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits
        return out[0].float()
