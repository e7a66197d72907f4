"""Which weights a program takes, and which checkpoint tensors each is made of.

Plain values: planning and key computation read this without torch.
"""

from dataclasses import dataclass

from nxbucket.toolkit.architecture import Architecture


@dataclass(frozen=True)
class WeightSpec:
    """A program's weight of `shape`: the checkpoint tensors `sources`, concatenated on dim 0.

    q, k and v (and gate and up) become one matrix each, so that a program does one matrix product
    where the checkpoint has three (two).
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_rows: tuple[int, ...]
    """Rows (dim 0) of each source, in order; they add up to shape[0]."""

    def source_shape(self, index: int) -> tuple[int, ...]:
        return (self.source_rows[index], *self.shape[1:])


def weight_specs(arch: Architecture) -> list[WeightSpec]:
    """Every weight of a decoder, in the order of the program's inputs."""
    q_rows = arch.num_attention_heads * arch.head_dim
    kv_rows = arch.num_key_value_heads * arch.head_dim
    hidden, inter = arch.hidden_size, arch.intermediate_size

    specs = [_one("embed_tokens", "model.embed_tokens.weight", (arch.vocab_size, hidden))]
    for i in range(arch.num_hidden_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        qkv_rows = (q_rows, kv_rows, kv_rows)
        specs += [
            _one(f"{ours}.input_norm", f"{theirs}.input_layernorm.weight", (hidden,)),
            _joined(
                f"{ours}.qkv", attn, ("q_proj", "k_proj", "v_proj"), "weight", qkv_rows, hidden
            ),
            _one(f"{ours}.o", f"{attn}.o_proj.weight", (hidden, q_rows)),
            _one(f"{ours}.post_norm", f"{theirs}.post_attention_layernorm.weight", (hidden,)),
            _joined(
                f"{ours}.gate_up", mlp, ("gate_proj", "up_proj"), "weight", (inter, inter), hidden
            ),
            _one(f"{ours}.down", f"{mlp}.down_proj.weight", (hidden, inter)),
        ]
        if arch.qkv_bias:
            specs.append(
                _joined(f"{ours}.qkv_bias", attn, ("q_proj", "k_proj", "v_proj"), "bias", qkv_rows)
            )
        if arch.o_bias:
            specs.append(_one(f"{ours}.o_bias", f"{attn}.o_proj.bias", (hidden,)))
        if arch.qk_norm:
            specs += [
                _one(f"{ours}.{norm}", f"{attn}.{norm}.weight", (arch.head_dim,))
                for norm in ("q_norm", "k_norm")
            ]
        if arch.mlp_bias:
            specs += [
                _joined(
                    f"{ours}.gate_up_bias", mlp, ("gate_proj", "up_proj"), "bias", (inter, inter)
                ),
                _one(f"{ours}.down_bias", f"{mlp}.down_proj.bias", (hidden,)),
            ]
    specs.append(_one("norm", "model.norm.weight", (hidden,)))
    if not arch.tie_word_embeddings:
        specs.append(_one("lm_head", "lm_head.weight", (arch.vocab_size, hidden)))
    return specs


def _one(name: str, source: str, shape: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(name, shape, (source,), (shape[0],))


def _joined(
    name: str,
    parent: str,
    projections: tuple[str, ...],
    kind: str,
    rows: tuple[int, ...],
    columns: int | None = None,
) -> WeightSpec:
    shape = (sum(rows),) if columns is None else (sum(rows), columns)
    return WeightSpec(name, shape, tuple(f"{parent}.{p}.{kind}" for p in projections), rows)
