"""A decoder as bucket programs: plain torch, static shapes, weights and KV as inputs.

What the families have in common; each family's file says what it does otherwise. Biases, tied
heads and windows are fields of the architecture: a program has them as inputs, or has not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs import attention, rope


class DecoderProgram(nn.Module):
    """One bucket. Called with the signature's inputs in order; returns the logits.

    The KV cache is updated in place. Logits are float32: [1, vocab] of the last real token for a
    prefill, [batch, vocab] for a decode (rows of padding hold numbers nobody reads).
    """

    inverse_frequencies: Tensor

    def __init__(self, program: BucketProgram) -> None:
        super().__init__()
        self.program = program
        arch = program.architecture
        table = rope.inverse_frequencies(arch.rope, arch.head_dim)
        self.register_buffer("inverse_frequencies", table, persistent=False)
        self._names = [t.name for t in program.signature.inputs]

    def forward(self, *tensors: Tensor) -> Tensor:
        t = dict(zip(self._names, tensors, strict=True))
        arch = self.program.architecture
        hidden = F.embedding(t["input_ids"], t["embed_tokens"])
        angles = t["positions"].float()[:, None] * self.inverse_frequencies[None, :]
        cos, sin = rope.cos_sin(arch.rope, angles)
        for i in range(arch.num_hidden_layers):
            normed = self.norm(hidden, t[f"layers.{i}.input_norm"])
            hidden = hidden + self._attention(t, i, normed, cos, sin)
            normed = self.norm(hidden, t[f"layers.{i}.post_norm"])
            hidden = hidden + self._mlp(t, i, normed)
        if self.program.phase == "prefill":
            hidden = hidden.index_select(0, t["num_tokens"] - 1)
        hidden = self.norm(hidden, t["norm"])
        head = t["embed_tokens"] if arch.tie_word_embeddings else t["lm_head"]
        return F.linear(hidden, head).float()

    def _attention(
        self, t: dict[str, Tensor], i: int, x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        arch = self.program.architecture
        heads, kv_heads, dim = arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim
        qkv = F.linear(x, t[f"layers.{i}.qkv"], t.get(f"layers.{i}.qkv_bias"))
        q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        query = self.before_rotation(q.view(-1, heads, dim), t, f"layers.{i}.q_norm")
        query = rope.rotate(query, cos, sin)
        key = self.before_rotation(k.view(-1, kv_heads, dim), t, f"layers.{i}.k_norm")
        key = rope.rotate(key, cos, sin)
        keys, values = t[f"key.{i}"], t[f"value.{i}"]
        attention.write_kv(keys, key, t["slot_mapping"])
        attention.write_kv(values, v.view(-1, kv_heads, dim), t["slot_mapping"])
        window, segment_blocks = arch.window_of(i), self.program.segment_blocks
        if self.program.phase == "prefill":
            end = t["context_len"] + t["num_tokens"]
            out = attention.prefill_attention(
                query,
                keys,
                values,
                t["block_table"],
                t["positions"],
                end,
                window,
                segment_blocks,
            )
        else:
            out = attention.decode_attention(
                query, keys, values, t["block_table"], t["seq_lens"], window, segment_blocks
            )
        return F.linear(
            out.reshape(-1, heads * dim), t[f"layers.{i}.o"], t.get(f"layers.{i}.o_bias")
        )

    def before_rotation(self, heads: Tensor, t: dict[str, Tensor], norm: str) -> Tensor:
        """A query or a key, [n, heads, head_dim]; `norm` is the name of its norm, if it has one."""
        return heads

    def _mlp(self, t: dict[str, Tensor], i: int, x: Tensor) -> Tensor:
        gate_up = F.linear(x, t[f"layers.{i}.gate_up"], t.get(f"layers.{i}.gate_up_bias"))
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, t[f"layers.{i}.down"], t.get(f"layers.{i}.down_bias"))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(
            wide.pow(2).mean(-1, keepdim=True) + self.program.architecture.rms_norm_eps
        )
        return weight * (wide * scale).to(x.dtype)
