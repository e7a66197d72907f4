"""Attention over the paged KV cache, reference form: gather the blocks, then SDPA.

A block table longer than `segment_blocks` is read in segments instead (segments.py).
Self-contained and checked against Hugging Face. What is masked cannot poison the result: SDPA with
NaN in a masked key or value row gives NaN, so rows outside the sequence are zeroed after the
gather. That covers the null block and blocks nobody owns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nxbucket.compile.programs import segments


def write_kv(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // block_size, slot % block_size] = rows, in place.

    cache [num_blocks, block_size, kv_heads, head_dim]; rows [n, kv_heads, head_dim];
    slot_mapping int32 [n], each a valid slot (padding rows: SCRATCH_SLOT). Not through a flat view
    of the cache: with a loop in the graph (segments.py), AOTInductor 2.13 makes code of that which
    crashes. The HLO has it flat (hlo/lowering.py).
    """
    block_size = cache.shape[1]
    cache.index_put_((slot_mapping // block_size, slot_mapping % block_size), rows)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    positions: Tensor,
    end: Tensor,
    window: int | None = None,
    segment_blocks: int | None = None,
) -> Tensor:
    """One sequence's chunk against its cached prefix and itself, causally.

    query [tokens, heads, head_dim]; keys, values: one layer's cache; block_table int32
    [max_blocks]; positions int32 [tokens]; end int32 [1], the sequence's length so far. With a
    `window`, a token sees the last `window` tokens, itself included.
    -> [tokens, heads, head_dim]
    """
    if segment_blocks is not None and block_table.shape[0] > segment_blocks:
        tokens, heads, head_dim = query.shape
        kv_heads = keys.shape[2]
        group = heads // kv_heads
        grouped = query.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        rows = grouped.reshape(1, kv_heads, group * tokens, head_dim)
        last = positions.repeat(group)[None]
        table = block_table[None]
        out = segments.attend(rows, keys, values, table, last, end, segment_blocks, window)
        return out.reshape(heads, tokens, head_dim).transpose(0, 1)
    k, v = _gather(keys, block_table), _gather(values, block_table)
    key_positions = torch.arange(k.shape[0], dtype=torch.int32)
    in_sequence = (key_positions < end)[:, None, None]
    k, v = torch.where(in_sequence, k, 0), torch.where(in_sequence, v, 0)
    causal = key_positions[None, :] <= positions[:, None]
    if window is not None:
        causal = causal & (key_positions[None, :] > positions[:, None] - window)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=causal[None, None],
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    segment_blocks: int | None = None,
) -> Tensor:
    """One token of each sequence against its cached tokens, itself included.

    query [batch, heads, head_dim]; block_table int32 [batch, max_blocks]; seq_lens int32 [batch].
    -> [batch, heads, head_dim]
    """
    batch, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    if segment_blocks is not None and block_table.shape[1] > segment_blocks:
        rows = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        last = (seq_lens - 1)[:, None].expand(-1, heads // kv_heads)
        out = segments.attend(
            rows, keys, values, block_table, last, seq_lens, segment_blocks, window
        )
        return out.reshape(batch, heads, head_dim)
    k = _gather(keys, block_table).transpose(1, 2)
    v = _gather(values, block_table).transpose(1, 2)
    key_positions = torch.arange(k.shape[2], dtype=torch.int32)
    in_sequence = key_positions[None, :] < seq_lens[:, None]
    row_mask = in_sequence[:, None, :, None]
    k, v = torch.where(row_mask, k, 0), torch.where(row_mask, v, 0)
    visible = in_sequence
    if window is not None:
        visible = visible & (key_positions[None, :] >= seq_lens[:, None] - window)
    # The query heads of a group stand where SDPA has query positions: no copy of K and V per head.
    grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=visible[:, None, None, :])
    return out.reshape(batch, heads, head_dim)


def _gather(cache: Tensor, block_table: Tensor) -> Tensor:
    """[..., max_blocks] -> [..., max_blocks * block_size, kv_heads, head_dim]."""
    blocks = cache[block_table]
    return blocks.flatten(block_table.dim() - 1, block_table.dim())
