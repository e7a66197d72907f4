"""What padding, stale blocks and other sequences hold never reaches an output or a used KV slot."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from eager_server import EagerServer, Shapes, eager
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxbucket.compile import padding
from nxbucket.compile.program import SCRATCH_SLOT, BucketProgram, Phase
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.serve.executable import HostMemory
from nxbucket.toolkit.architecture import Architecture, Rope

pytestmark = pytest.mark.usefixtures("one_thread")

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=False,
    rope=Rope("default", 100.0),
)
BLOCK_SIZE, MAX_BLOCKS, KV_BLOCKS = 4, 6, 20
BAD = [float("nan"), float("inf"), float("-inf")]


def random_weights(dtype: str = "float32") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, dtype))
        for spec in weight_specs(ARCHITECTURE)
    }


def program_of(phase: Phase, size: int) -> BucketProgram:
    return BucketProgram(phase, size, ARCHITECTURE, "float32", BLOCK_SIZE, MAX_BLOCKS, KV_BLOCKS)


def prompt_of(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(1, ARCHITECTURE.vocab_size) for _ in range(length)]


def run_everything(server: EagerServer) -> list[Tensor]:
    """Chunks, a cached prefix, padded batches: every output, then the KV of every token."""
    seqs = [server.start(prompt_of(3 + 9 * i, seed=i)) for i in range(5)]
    for seq in seqs:
        server.prefill_all(seq, 16 if seq is seqs[0] else 7)
        server.decode_greedily([seq], 1)
    seqs.append(server.start_after_prefix([*seqs[4].tokens[:30], 7, 8, 9], seqs[4]))
    server.prefill_all(seqs[-1], 16)
    server.decode_greedily(seqs, 2)
    server.decode_greedily(seqs[:3], 2)
    return [row for seq in seqs for row in seq.logits] + list(server.written_kv().values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("filler", BAD)
def test_nan_and_infinity_in_slots_nobody_wrote_change_no_bit(filler: float, dtype: str) -> None:
    # The null block, blocks nobody owns, and the rest of a block half full.
    weights = random_weights(dtype)
    clean, poisoned = (
        run_everything(EagerServer(ARCHITECTURE, weights, dtype=dtype, filler=value))
        for value in (0.0, filler)
    )
    assert len(clean) == len(poisoned) > 30
    for expected, got in zip(clean, poisoned, strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("filler", BAD)
def test_a_poisoned_sequence_poisons_no_other_of_its_batch(filler: float) -> None:
    def last_logits(poison: bool) -> Tensor:
        server = EagerServer(ARCHITECTURE, random_weights())
        seqs = [server.start(prompt_of(10 + i, seed=i)) for i in range(3)]
        for seq in seqs:
            server.prefill_all(seq, 16)
            seq.tokens.append(1)
        if poison:
            for kv in server.kv_cache.values():
                kv[seqs[1].blocks] = filler
        return server.decode(seqs)

    clean, poisoned = last_logits(False), last_logits(True)
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    assert not torch.isfinite(poisoned[1]).all()


def test_a_nan_in_the_pad_tokens_embedding_stays_in_the_padding() -> None:
    weights = random_weights()
    weights["embed_tokens"][padding.PAD_TOKEN] = float("nan")
    server = EagerServer(ARCHITECTURE, weights, Shapes(prefill=(16,), decode=(8,)))
    seqs = [server.start(prompt_of(9, seed=i)) for i in range(3)]
    for seq in seqs:
        server.prefill_all(seq, 16)
        seq.tokens.append(1)
    server.decode(seqs)
    assert all(torch.isfinite(row).all() for seq in seqs for row in seq.logits)
    assert all(torch.isfinite(kv).all() for kv in server.written_kv().values())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_prefill_changes_its_own_slots_and_the_scratch_slot_in_place(
    data: st.DataObject,
) -> None:
    bucket = data.draw(st.sampled_from([1, 4, 8, 16]))
    num_tokens = data.draw(st.integers(1, bucket))
    context_len = data.draw(st.integers(0, BLOCK_SIZE * MAX_BLOCKS - num_tokens))
    blocks = torch.tensor(data.draw(st.permutations(range(1, KV_BLOCKS)))[:MAX_BLOCKS])
    positions = torch.arange(context_len, context_len + num_tokens)
    slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    tokens = random_integers(0, ARCHITECTURE.vocab_size, num_tokens)
    inputs = padding.prefill_inputs(bucket, MAX_BLOCKS, tokens, positions, slots, blocks)
    garbage = {
        **inputs,
        "input_ids": padded_with_anything(data, inputs["input_ids"], num_tokens, 49),
        "positions": padded_with_anything(data, inputs["positions"], num_tokens, 10**6),
    }
    has_padding = num_tokens < bucket
    outputs = [
        check_slots("prefill", bucket, given_inputs, slots, has_padding)
        for given_inputs in (inputs, garbage)
    ]
    assert torch.equal(*outputs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_decode_changes_its_own_slots_and_the_scratch_slot_in_place(data: st.DataObject) -> None:
    bucket = data.draw(st.sampled_from([1, 2, 4, 8]))
    rows = data.draw(st.integers(1, bucket))
    # Each sequence writes to a block of its own, and may share the blocks before it.
    last_blocks = torch.tensor(data.draw(st.permutations(range(1, KV_BLOCKS)))[:rows])
    table = random_integers(1, KV_BLOCKS, rows, MAX_BLOCKS)
    positions = torch.tensor(
        data.draw(
            st.lists(st.integers(0, BLOCK_SIZE * MAX_BLOCKS - 1), min_size=rows, max_size=rows)
        )
    )
    table[torch.arange(rows), positions // BLOCK_SIZE] = last_blocks
    slots = last_blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    tokens = random_integers(0, ARCHITECTURE.vocab_size, rows)
    inputs = padding.decode_inputs(bucket, tokens, positions, slots, table)
    garbage = {
        **inputs,
        "input_ids": padded_with_anything(data, inputs["input_ids"], rows, 49),
        "positions": padded_with_anything(data, inputs["positions"], rows, 10**6),
    }
    outputs = [
        check_slots("decode", bucket, given_inputs, slots, rows < bucket)[:rows]
        for given_inputs in (inputs, garbage)
    ]
    assert torch.equal(*outputs)


def random_integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(2))


def padded_with_anything(data: st.DataObject, values: Tensor, kept: int, most: int) -> Tensor:
    """`values` with other padding after the first `kept`."""
    out = values.clone()
    if kept < len(out):
        out[kept:] = data.draw(st.integers(0, most))
    return out


def check_slots(
    phase: Phase, bucket: int, inputs: dict[str, Tensor], slots: Tensor, has_padding: bool
) -> Tensor:
    """Run on a random cache; see that exactly `slots`, and with padding the scratch, changed."""
    program = program_of(phase, bucket)
    executable = eager(program)
    generator = torch.Generator().manual_seed(1)
    kv_cache = {
        t.name: torch.randn(t.shape, generator=generator)
        for t in program.signature.of_role("kv_cache")
    }
    before = {name: kv.clone() for name, kv in kv_cache.items()}
    addresses = {name: kv.data_ptr() for name, kv in kv_cache.items()}
    executable.bind(HostMemory(kv_cache, random_weights()))
    with torch.no_grad():
        logits = executable.run(inputs)
    expected = set(slots.tolist()) | ({SCRATCH_SLOT} if has_padding else set())
    for name, kv in kv_cache.items():
        assert kv.data_ptr() == addresses[name]
        changed = (kv != before[name]).flatten(0, 1).flatten(1).any(1)
        assert set(changed.nonzero().flatten().tolist()) == expected
    return logits


@pytest.mark.parametrize("field", ["head_dim", "num_key_value_heads"])
def test_the_signature_holds_the_cache_that_the_program_updates(field: str) -> None:
    changes: dict[str, Any] = {field: 4}
    program = dataclasses.replace(
        program_of("decode", 2), architecture=dataclasses.replace(ARCHITECTURE, **changes)
    )
    updated = [t.alias for t in program.signature.outputs if t.alias]
    assert updated == [t.name for t in program.signature.of_role("kv_cache")]
    assert updated == ["key.0", "value.0", "key.1", "value.1"]
