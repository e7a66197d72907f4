"""Tiny random Llama checkpoints, written and read by Hugging Face: the reference for our programs.

The weights are scaled so that logits are spread and greedy outputs vary; norm weights and biases
are no identity, so that leaving one out shows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""With head_dim 8: one frequency kept, one in the ramp, two divided by `factor`."""

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
    "attention_bias": False,
    "mlp_bias": False,
}


def write_checkpoint(
    folder: Path,
    *,
    rope: str = "default",
    seed: int = 0,
    checkpoint: str = "float32",
    shards: int = 1,
    **config: Any,
) -> Path:
    """A checkpoint in `folder`: config.json, and safetensors in about `shards` files.

    `checkpoint` is the dtype it is stored in.
    """
    rope_fields = ROPE_FORMS[rope]
    hf_config = LlamaConfig(**TINY | config, **rope_fields)
    model = LlamaForCausalLM(hf_config)  # type: ignore[no-untyped-call]
    _randomize(model, seed)
    model.to(getattr(torch, checkpoint))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=-(-size // shards) if shards > 1 else "5GB")
    _respell_rope(folder / "config.json", rope_fields)
    return folder


def _randomize(model: LlamaForCausalLM, seed: int) -> None:
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

    model: LlamaForCausalLM

    @classmethod
    def load(cls, folder: Path, dtype: str = "float32") -> "Reference":
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        return cls(model)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [tokens, vocab]: after each token, the prediction of the next."""
        out: Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits
        return out[0].float()
