"""A random Llama on disk, with a model file for each dtype. No tokenizer: prompts are token ids."""

import json
import tempfile
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models"
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 512
PREFILL_BUCKETS = [128, 512]
DECODE_BUCKETS = [1, 4, 8]
SEED = 20261130

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

MODEL_FILE = """\
# Written by benchmarks/random_llama.py.
model: .
target: cpu
dtype: {dtype}
max_model_len: {max_model_len}
max_num_seqs: {max_num_seqs}
max_num_batched_tokens: {max_num_batched_tokens}
enable_prefix_caching: false
neuron_config:
  num_batched_tokens_buckets: {prefill}
  num_seqs_buckets: {decode}
artifacts:
  cache: ./artifacts
"""


def ensure_model(num_layers: int) -> Path:
    """The model's folder, written unless it is there already."""
    folder = MODELS / f"llama-{num_layers}-layers"
    if not folder.is_dir():
        MODELS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS, prefix=".writing-") as scratch:
            written = Path(scratch) / "model"
            written.mkdir()
            write_weights(written, num_layers)
            written.rename(folder)
    return folder


def write_model_file(folder: Path, dtype: str) -> Path:
    path = folder / f"{dtype}.yaml"
    path.write_text(
        MODEL_FILE.format(
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            prefill=PREFILL_BUCKETS,
            decode=DECODE_BUCKETS,
        )
    )
    return path


def tensor_shapes(
    num_layers: int, config: dict[str, Any] | None = None
) -> dict[str, tuple[int, ...]]:
    config = config or CONFIG
    hidden, inner, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[k] * head for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(num_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def write_weights(folder: Path, num_layers: int, changes: dict[str, Any] | None = None) -> None:
    """config.json, CONFIG with `changes`, and random bfloat16 weights for it."""
    import torch
    from safetensors.torch import save_file

    config = {**CONFIG, **(changes or {}), "num_hidden_layers": num_layers}
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in tensor_shapes(num_layers, config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            weights[name] = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
