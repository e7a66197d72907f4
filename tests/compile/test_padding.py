"""The specification's padding rules, for every size."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nxbucket.compile import padding
from nxbucket.compile.program import SCRATCH_SLOT

INTEGER_DTYPES = st.sampled_from([torch.int32, torch.int64])
NUMBERS = st.integers(1, 2**31 - 2)


def integers(data: st.DataObject, count: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(data.draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=dtype)


@given(data=st.data(), dtype=INTEGER_DTYPES)
def test_a_prefill_keeps_the_real_tokens_and_pads_the_rest(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    bucket = data.draw(st.integers(1, 40))
    num_tokens = data.draw(st.integers(1, bucket))
    max_blocks = data.draw(st.integers(1, 12))
    num_blocks = data.draw(st.integers(1, max_blocks))
    context_len = data.draw(st.integers(0, 100_000))
    tokens, slots = integers(data, num_tokens, dtype), integers(data, num_tokens, dtype)
    blocks = integers(data, num_blocks, dtype)
    positions = torch.arange(context_len, context_len + num_tokens, dtype=dtype)

    inputs = padding.prefill_inputs(bucket, max_blocks, tokens, positions, slots, blocks)

    rest = bucket - num_tokens
    last = context_len + num_tokens - 1
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "input_ids": tokens.tolist() + [0] * rest,
        "positions": positions.tolist() + [last] * rest,
        "slot_mapping": slots.tolist() + [SCRATCH_SLOT] * rest,
        "block_table": blocks.tolist() + [0] * (max_blocks - num_blocks),
        "context_len": [context_len],
        "num_tokens": [num_tokens],
    }
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int32}
    assert all(tensor.is_contiguous() for tensor in inputs.values())


@given(data=st.data(), dtype=INTEGER_DTYPES)
def test_a_decode_keeps_the_real_rows_and_pads_the_rest(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    bucket = data.draw(st.integers(1, 16))
    rows = data.draw(st.integers(1, bucket))
    max_blocks = data.draw(st.integers(1, 12))
    tokens, slots = integers(data, rows, dtype), integers(data, rows, dtype)
    positions = integers(data, rows, dtype)
    table = integers(data, rows * max_blocks, dtype).view(rows, max_blocks)

    inputs = padding.decode_inputs(bucket, tokens, positions, slots, table)

    rest = bucket - rows
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "input_ids": tokens.tolist() + [0] * rest,
        "positions": positions.tolist() + [0] * rest,
        "slot_mapping": slots.tolist() + [SCRATCH_SLOT] * rest,
        "block_table": table.tolist() + [[0] * max_blocks] * rest,
        "seq_lens": [p + 1 for p in positions.tolist()] + [1] * rest,
    }
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int32}
    assert all(tensor.is_contiguous() for tensor in inputs.values())


@given(st.lists(st.integers(-1, 1000)))
def test_only_the_missing_slot_becomes_the_scratch_slot(slots: list[int]) -> None:
    mapped = padding.to_scratch(torch.tensor(slots, dtype=torch.int32))
    assert mapped.tolist() == [SCRATCH_SLOT if slot == -1 else slot for slot in slots]
    assert mapped.dtype == torch.int32


def test_the_scratch_slot_is_in_the_null_block() -> None:
    # vLLM hands out block 0 to nobody, whatever the block size.
    assert (padding.NULL_BLOCK, SCRATCH_SLOT) == (0, 0)


def test_inputs_are_copies_that_a_later_step_cannot_change() -> None:
    # The runner's buffers are written again while a program may still read.
    tokens, positions = torch.tensor([3, 4]), torch.tensor([0, 1])
    inputs = padding.decode_inputs(2, tokens, positions, tokens, torch.ones(2, 3))
    tokens.fill_(9)
    positions.fill_(9)
    assert inputs["input_ids"].tolist() == [3, 4]
    assert inputs["positions"].tolist() == [0, 1]
    assert inputs["seq_lens"].tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prefill_inputs_are_copies_too(dtype: torch.dtype) -> None:
    tokens, positions = torch.tensor([3, 4], dtype=dtype), torch.tensor([7, 8], dtype=dtype)
    blocks = torch.tensor([2, 1], dtype=dtype)
    inputs = padding.prefill_inputs(2, 2, tokens, positions, tokens, blocks)
    for buffer in (tokens, positions, blocks):
        buffer.fill_(99)
    assert [inputs[name].tolist() for name in ("input_ids", "positions", "block_table")] == [
        [3, 4],
        [7, 8],
        [2, 1],
    ]
    assert inputs["context_len"].tolist() == [7]


def test_more_than_the_bucket_holds_is_an_error_not_a_cut() -> None:
    five, two = torch.arange(5), torch.ones(5, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        padding.prefill_inputs(4, 2, five, five, five, five[:1])
    with pytest.raises(RuntimeError):
        padding.prefill_inputs(8, 2, five, five, five, five[:3])
    with pytest.raises(RuntimeError):
        padding.decode_inputs(4, five, five, five, two)


def test_the_device_half_of_the_server_imports_no_vllm() -> None:
    modules = ["weights", "loaders", "binding", "served"]
    imports = "; ".join(f"import nxbucket.serve.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit('vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
