"""Attention over a long paged context, one segment of the KV cache at a time.

Keys and values of one segment are gathered, scored and folded into a running maximum, sum and
weighted sum of values (an online softmax, float32), so that no temporary grows with max_model_len:
nothing of K, V, mask or scores is ever wider than a segment.

The segments are a `while_loop` in the graph, not copies of its body. Copies make the compile grow
with layers x segments, and always pay for max_model_len; the loop is compiled once per layer and
ends at the batch's longest sequence. AOTInductor writes it as a C++ `while`, the KV cache still
updated in place. Measured with 2 layers, prefill of 128 tokens, AOTInductor's processor time and
result: loop 15 s and 2.1 MB at 8 segments, and as long by the clock at 32 and 64; 32 copies 45 s
and 3.2 MB, and a context of 256 tokens takes as long as one of 16384 (with the loop, a twentieth).
So 32 layers of 32 segments are out of reach for copies.

Where a segment's scores would still be larger than SCORE_TILE_BYTES (a long chunk, a long segment),
the rows are taken a tile at a time, in a loop around the other.

Neuron's compiler takes loops of a fixed number of rounds only (AWS, jax-neuronx known issues). So
each loop counts from 0 in its first operand up to a constant; what else its condition asks is a
chance to end early that a lowering may ignore: a segment in which a row sees nothing leaves that
row as it was.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op

LOWEST = torch.finfo(torch.float32).min
"""Stands for -inf, which would give NaN where a row has seen nothing yet: -inf - -inf."""

NULL_BLOCK = 0

SCORE_TILE_BYTES = 256 << 20


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    last: Tensor,
    end: Tensor,
    segment_blocks: int,
    window: int | None = None,
) -> Tensor:
    """Each row of `query` against the tokens up to its last one, at most `window` of them.

    query [batch, kv_heads, rows, head_dim]; keys, values: one layer's cache; block_table int32
    [batch, blocks]; last int32 [batch, rows], the position of the last token a row sees, 0 or more;
    end int32 [batch], tokens of the sequence: what lies behind them may hold anything, NaN too.
    -> [batch, kv_heads, rows, head_dim], the query's dtype
    """
    batch, kv_heads, rows, head_dim = query.shape
    num_segments = -(-block_table.shape[1] // segment_blocks)
    surplus = num_segments * segment_blocks - block_table.shape[1]
    table = F.pad(block_table, (0, surplus), value=NULL_BLOCK)
    table = table.view(batch, num_segments, segment_blocks)
    # With one query head per KV head the query is a view, and the loop's values would take its
    # strides over, which its body does not keep.
    scaled = query.contiguous().float() * head_dim**-0.5
    first = torch.zeros_like(last) if window is None else last - (window - 1)
    context = (keys, values, table, end, end.max())
    row_bytes = 4 * batch * kv_heads * segment_blocks * keys.shape[1]
    num_tiles = -(-rows * row_bytes // SCORE_TILE_BYTES)
    if num_tiles == 1:
        return _all_segments(scaled, first, last, *context).to(query.dtype)
    tile = -(-rows // num_tiles)
    padding = num_tiles * tile - rows
    tiles = F.pad(scaled, (0, 0, 0, padding)).view(batch, kv_heads, num_tiles, tile, head_dim)
    first, last = (F.pad(x, (0, padding)).view(batch, num_tiles, tile) for x in (first, last))
    out = _all_tiles(tiles.movedim(2, 0), first.movedim(1, 0), last.movedim(1, 0), *context)
    out = out.movedim(0, 2).reshape(batch, kv_heads, num_tiles * tile, head_dim)
    return out[:, :, :rows].to(query.dtype)


def _all_tiles(query: Tensor, first: Tensor, last: Tensor, *context: Tensor) -> Tensor:
    """query [tiles, batch, kv_heads, rows, head_dim]; first, last [tiles, batch, rows]."""
    num_tiles = query.shape[0]

    def not_at_end(tile: Tensor, *_: Tensor) -> Tensor:
        return tile < num_tiles

    def attend_tile(
        tile: Tensor, out: Tensor, query: Tensor, first: Tensor, last: Tensor, *context: Tensor
    ) -> tuple[Tensor, Tensor]:
        at = tile[None]
        rows = (x.index_select(0, at)[0] for x in (query, first, last))
        attended = _all_segments(*rows, *context)
        return tile + 1, out.index_put((at,), attended[None])

    state: Any = (torch.zeros((), dtype=torch.int32), torch.zeros_like(query))
    operands = (query, first, last, *context)
    _, out = while_loop_op(not_at_end, attend_tile, state, operands)
    return cast(Tensor, out)


def _all_segments(
    query: Tensor,
    first: Tensor,
    last: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    end: Tensor,
    longest: Tensor,
) -> Tensor:
    """float32, like the scaled query; `first` and `last` say what each row sees."""
    state: Any = (  # while_loop's annotation says a tuple of one
        torch.zeros((), dtype=torch.int32),
        torch.full_like(query[..., :1], LOWEST),
        torch.zeros_like(query[..., :1]),
        torch.zeros_like(query),
    )
    operands = (query, keys, values, table, first, last, end, longest)
    _, _, total, weighted = while_loop_op(_not_at_end, _fold_segment, state, operands)
    return cast(Tensor, weighted / total)


def _not_at_end(segment: Tensor, *operands: Tensor) -> Tensor:
    keys, table, longest = operands[4], operands[6], operands[10]
    before_longest = segment * (table.shape[2] * keys.shape[1]) < longest
    return (segment < table.shape[1]) & before_longest


def _fold_segment(
    segment: Tensor,
    maximum: Tensor,
    total: Tensor,
    weighted: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    first: Tensor,
    last: Tensor,
    end: Tensor,
    _longest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The running maximum [..., rows, 1], sum and weighted values after one more segment."""
    size = table.shape[2] * keys.shape[1]
    blocks = table.index_select(1, segment[None])[:, 0]
    positions = segment * size + torch.arange(size, dtype=torch.int32)
    in_sequence = (positions[None, :] < end[:, None])[:, None, :, None]
    k = torch.where(in_sequence, _gather(keys, blocks), 0).float()
    v = torch.where(in_sequence, _gather(values, blocks), 0).float()
    seen = positions[None, None, :] <= last[:, :, None]
    seen = (seen & (positions[None, None, :] >= first[:, :, None]))[:, None]
    scores = torch.where(seen, query @ k.transpose(-1, -2), LOWEST)
    new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
    weights = torch.where(seen, torch.exp(scores - new_maximum), 0.0)
    decay = torch.exp(maximum - new_maximum)
    return (
        segment + 1,
        new_maximum,
        total * decay + weights.sum(-1, keepdim=True),
        weighted * decay + weights @ v,
    )


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """[batch, blocks] -> [batch, kv_heads, tokens, head_dim]."""
    return cache[blocks].flatten(1, 2).transpose(1, 2)
