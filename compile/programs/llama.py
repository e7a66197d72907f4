"""The Llama family as bucket programs: plain torch, static shapes, weights and KV as inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs import attention, rope


class LlamaProgram(nn.Module):
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
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
        for i in range(arch.num_hidden_layers):
            normed = self._norm(hidden, t[f"layers.{i}.input_norm"])
            hidden = hidden + self._attention(t, i, normed, cos, sin)
            normed = self._norm(hidden, t[f"layers.{i}.post_norm"])
            hidden = hidden + self._mlp(t, i, normed)
        if self.program.phase == "prefill":
            hidden = hidden.index_select(0, t["num_tokens"] - 1)
        hidden = self._norm(hidden, t["norm"])
        head = t["embed_tokens"] if arch.tie_word_embeddings else t["lm_head"]
        return F.linear(hidden, head).float()

    def _attention(
        self, t: dict[str, Tensor], i: int, x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        arch = self.program.architecture
        heads, kv_heads, dim = arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim
        qkv = F.linear(x, t[f"layers.{i}.qkv"], t.get(f"layers.{i}.qkv_bias"))
        q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        query = rope.rotate(q.view(-1, heads, dim), cos, sin)
        key = rope.rotate(k.view(-1, kv_heads, dim), cos, sin)
        keys, values = t[f"key.{i}"], t[f"value.{i}"]
        attention.write_kv(keys, key, t["slot_mapping"])
        attention.write_kv(values, v.view(-1, kv_heads, dim), t["slot_mapping"])
        segment_blocks = self.program.segment_blocks
        if self.program.phase == "prefill":
            end = t["context_len"] + t["num_tokens"]
            out = attention.prefill_attention(
                query, keys, values, t["block_table"], t["positions"], end, segment_blocks
            )
        else:
            out = attention.decode_attention(
                query, keys, values, t["block_table"], t["seq_lens"], segment_blocks
            )
        return F.linear(
            out.reshape(-1, heads * dim), t[f"layers.{i}.o"], t.get(f"layers.{i}.o_bias")
        )

    def _mlp(self, t: dict[str, Tensor], i: int, x: Tensor) -> Tensor:
        gate_up = F.linear(x, t[f"layers.{i}.gate_up"], t.get(f"layers.{i}.gate_up_bias"))
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, t[f"layers.{i}.down"], t.get(f"layers.{i}.down_bias"))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(
            wide.pow(2).mean(-1, keepdim=True) + self.program.architecture.rms_norm_eps
        )
        return weight * (wide * scale).to(x.dtype)
