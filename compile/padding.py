"""From a step's real tokens to the tensors of a bucket, as the specification's model runner pads.

Pure functions over torch tensors: no vLLM. What the padding holds: token 0; the last real position
(prefill) or 0 (decode); slot -1, which no program ever sees, because it becomes the scratch slot;
the null block; a context of one token.
"""

import torch
from torch import Tensor

from nxbucket.compile.program import SCRATCH_SLOT

PAD_TOKEN = 0
NULL_BLOCK = 0
NO_SLOT = -1


def prefill_inputs(
    bucket: int,
    max_blocks: int,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    blocks: Tensor,
) -> dict[str, Tensor]:
    """One sequence's chunk. Args are [real tokens] (integer), `blocks` its block numbers in order.

    Returns the program's inputs by name, int32: [bucket] each, block_table [max_blocks],
    context_len [1], num_tokens [1].
    """
    num_tokens = input_ids.shape[0]
    return {
        "input_ids": _padded(input_ids, bucket, PAD_TOKEN),
        "positions": _padded(positions, bucket, int(positions[-1])),
        "slot_mapping": to_scratch(_padded(slot_mapping, bucket, NO_SLOT)),
        "block_table": _padded(blocks, max_blocks, NULL_BLOCK),
        "context_len": _padded(positions[:1], 1, 0),
        "num_tokens": torch.tensor([num_tokens], dtype=torch.int32),
    }


def decode_inputs(
    bucket: int, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, block_table: Tensor
) -> dict[str, Tensor]:
    """One token each of several sequences. Args are [rows]; block_table [rows, max_blocks].

    Returns the program's inputs by name, int32: [bucket] each, block_table [bucket, max_blocks].
    """
    rows, max_blocks = block_table.shape
    table = torch.full((bucket, max_blocks), NULL_BLOCK, dtype=torch.int32)
    table[:rows] = block_table
    return {
        "input_ids": _padded(input_ids, bucket, PAD_TOKEN),
        "positions": _padded(positions, bucket, 0),
        "slot_mapping": to_scratch(_padded(slot_mapping, bucket, NO_SLOT)),
        "block_table": table,
        "seq_lens": _padded(positions + 1, bucket, 1),
    }


def to_scratch(slot_mapping: Tensor) -> Tensor:
    """-1 becomes the null block's scratch slot: programs have no conditional write."""
    return torch.where(slot_mapping == NO_SLOT, SCRATCH_SLOT, slot_mapping)


def _padded(values: Tensor, length: int, filler: int) -> Tensor:
    out = torch.full((length,), filler, dtype=torch.int32)
    out[: values.shape[0]] = values
    return out
