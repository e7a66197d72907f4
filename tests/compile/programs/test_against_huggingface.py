"""Our bucket programs, run eagerly, against Hugging Face's Llama on the same checkpoint.

Hugging Face runs the whole sequence at once: no cache, no chunks, no padding, another attention.
`BNN` are cases seen elsewhere.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import EagerServer, Running, Shapes
from hf_models import LLAMA3_ROPE, ROPE_FORMS, Reference, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.architecture import Architecture, read_architecture

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4

HEADS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},  # B96
    "head_dim": {"head_dim": 16},  # B93: 4 heads of 16 in a hidden size of 32
}
BIASES: dict[str, dict[str, Any]] = {  # B104
    "no bias": {},
    "attention": {"attention_bias": True},
    "mlp": {"mlp_bias": True},
    "both": {"attention_bias": True, "mlp_bias": True},
}
GROUPS = {"MHA": 4, "GQA": 2, "MQA": 1}


class Model:
    """A checkpoint as both sides read it."""

    def __init__(self, folder: Path, dtype: str = "float32", **config: Any) -> None:
        self.folder = write_checkpoint(folder, **config)
        self.architecture: Architecture = read_architecture(folder).architecture
        self.dtype = dtype
        self.weights = load_weights(folder, self.architecture, dtype)
        self.reference = Reference.load(folder)

    def server(self, shapes: Shapes | None = None, **options: Any) -> EagerServer:
        return EagerServer(self.architecture, self.weights, shapes, dtype=self.dtype, **options)

    def difference(self, seqs: Sequence[Running]) -> float:
        """The largest difference from Hugging Face, over every step of every sequence."""
        return max(float((torch.stack(s.logits) - self.expected(s)).abs().max()) for s in seqs)

    def expected(self, seq: Running) -> Tensor:
        return self.reference.logits(seq.tokens)[torch.tensor(seq.ends) - 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), rope="llama3")


def prompt_of(length: int, seed: int = 0, vocab_size: int = 96) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(vocab_size) for _ in range(length)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rope", ROPE_FORMS)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("head", HEADS)
def test_every_chunk_and_every_decode_step_equals_hugging_face(
    tmp_path: Path,
    head: str,
    bias: str,
    rope: str,
    group: str,
) -> None:
    config = {**HEADS[head], **BIASES[bias], "num_key_value_heads": GROUPS[group]}
    model = Model(tmp_path, rope=rope, **config)
    server = model.server()
    # From one to three times the largest bucket, so past the 32 positions llama3 started from.
    seqs = [
        server.generate(prompt_of(16), num_new=4, budget=16),
        server.generate(prompt_of(48, seed=1), num_new=12, budget=16),
    ]
    difference = model.difference(seqs)
    print(f"max difference: {difference:.1e}")
    assert difference < TOLERANCE
    # Or equality would show little: spread logits, and outputs that are not one token repeated.
    assert torch.stack(seqs[1].logits).std() > 0.5
    assert len(set(seqs[1].tokens[48:])) >= 4


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16"])
def test_sharded_and_bfloat16_checkpoints_as_hugging_face_writes_them_load(
    tmp_path: Path, shards: int, checkpoint: str
) -> None:
    model = Model(tmp_path, checkpoint=checkpoint, shards=shards, tie_word_embeddings=True)
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    seq = model.server().generate(prompt_of(20), num_new=4, budget=16)
    assert model.difference([seq]) < TOLERANCE


def test_the_checkpoint_of_each_rope_form_means_what_its_other_spelling_means(
    tmp_path: Path,
) -> None:
    # B89: a reader that missed the scaling would agree with itself in both spellings.
    ropes = [
        read_architecture(write_checkpoint(tmp_path / form, rope=form)).architecture.rope
        for form in ROPE_FORMS
    ]
    assert ropes[0] == ropes[1] != ropes[2] == ropes[3]
    assert ropes[2].form == "llama3"
    assert ropes[2].original_max_position_embeddings == 32
    assert LLAMA3_ROPE["original_max_position_embeddings"] == 32


def test_leaving_out_a_scaling_or_a_bias_would_show(tmp_path: Path) -> None:
    with_all = Model(tmp_path, rope="llama3", attention_bias=True, mlp_bias=True)
    tokens = prompt_of(60)
    expected = with_all.reference.logits(tokens)[-1]
    for name in list(with_all.weights):
        if name.endswith("bias") or "norm" in name:
            changed = dict(with_all.weights)
            changed[name] = torch.full_like(changed[name], 0.0 if "bias" in name else 1.0)
            server = EagerServer(with_all.architecture, changed)
            logits = server.prefill_all(server.start(tokens), 16)
            assert (logits - expected).abs().max() > 100 * TOLERANCE, name


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_split_of_a_prompt_into_chunks_and_buckets_gives_the_same_logits(
    model: Model, data: st.DataObject
) -> None:
    # Chunk sizes equal to a bucket, one below and one above come up; so do forced larger buckets.
    server = model.server()
    seq = server.start(prompt_of(data.draw(st.integers(1, 48)), seed=data.draw(st.integers(0, 9))))
    while seq.computed < len(seq.tokens):
        left = len(seq.tokens) - seq.computed
        chunk = data.draw(st.integers(1, min(16, left)))
        fitting = [bucket for bucket in (4, 8, 16) if bucket >= chunk]
        server.prefill(seq, chunk, bucket=data.draw(st.sampled_from(fitting)))
    server.decode_greedily([seq], 2)
    assert model.difference([seq]) < TOLERANCE


@pytest.mark.parametrize("chunks", list(itertools.permutations([3, 4, 5, 7, 8, 9], 3)))
def test_chunks_beside_a_buckets_size_equal_hugging_face(
    model: Model, chunks: tuple[int, ...]
) -> None:
    server = model.server()
    seq = server.start(prompt_of(sum(chunks) + 15 + 16))
    for chunk in (*chunks, 15, 16):
        server.prefill(seq, chunk)
    assert model.difference([seq]) < TOLERANCE


@pytest.mark.parametrize("shared", [4, 8, 30, 45])
def test_a_first_chunk_after_a_cached_prefix_equals_hugging_face(model: Model, shared: int) -> None:
    server = model.server()
    first = server.generate(prompt_of(45), num_new=3, budget=16)
    tokens = first.tokens[:shared] + prompt_of(20, seed=7)
    second = server.start_after_prefix(tokens, first)
    assert second.computed == shared // 4 * 4
    server.prefill_all(second, 16)
    server.decode_greedily([first, second], 4)
    assert model.difference([first, second]) < TOLERANCE


def test_a_sequence_may_fill_its_block_table_to_the_last_slot(model: Model) -> None:
    server = model.server()
    seq = server.generate(prompt_of(70), num_new=10, budget=16)
    assert seq.computed == server.shapes.max_blocks * server.shapes.block_size
    assert model.difference([seq]) < TOLERANCE


def test_a_one_token_prompt_works_in_every_bucket(model: Model) -> None:
    for bucket in (4, 8, 16):
        server = model.server()
        seq = server.start([5])
        server.prefill(seq, 1, bucket=bucket)
        assert model.difference([seq]) < TOLERANCE


def test_batches_that_are_no_compiled_size_give_each_sequence_its_own_text(model: Model) -> None:
    # B59: 8 of 8, then 7, 6 and 5 of 8, 4 of 4, 3 of 4, 2 and 1; equal and different prompts.
    prompts = [prompt_of(21), prompt_of(21), *(prompt_of(5 + 7 * i, seed=i) for i in range(6))]
    server = model.server()
    seqs = [server.start(prompt) for prompt in prompts]
    for seq in seqs:
        server.prefill_all(seq, 16)
    running = list(seqs)
    while running:
        server.decode_greedily(running, 2)
        running.pop(len(running) // 2)
    differences = []
    for seq, prompt in zip(seqs, prompts, strict=True):
        num_new = len(seq.tokens) - len(prompt)
        alone = model.server(seed=5).generate(prompt, num_new, budget=16)
        assert seq.tokens == alone.tokens
        differences.append(float((torch.stack(seq.logits) - torch.stack(alone.logits)).abs().max()))
    print(f"max difference: {max(differences):.1e}")
    assert max(differences) < TOLERANCE
    assert model.difference(seqs) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_larger_decode_bucket_gives_the_same_logits(model: Model, rows: int) -> None:
    # B60, decode
    outputs = []
    for bucket in [b for b in (1, 2, 4, 8) if b >= rows]:
        server = model.server()
        seqs = [server.start(prompt_of(9 + i, seed=i)) for i in range(rows)]
        for seq in seqs:
            server.prefill_all(seq, 16)
            seq.tokens.append(int(seq.logits[-1].argmax()))
        outputs.append(server.decode(seqs, bucket=bucket))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=TOLERANCE)


def test_a_larger_prefill_bucket_gives_the_same_logits(tmp_path: Path) -> None:
    # B60: a prompt of 5 tokens in 128 and forced into 512.
    model = Model(tmp_path, max_position_embeddings=1024)
    shapes = Shapes(prefill=(128, 512), block_size=32, max_blocks=16, num_kv_blocks=33)
    logits = []
    for bucket in (128, 512):
        server = model.server(shapes)
        seq = server.start(prompt_of(5))
        logits.append(server.prefill(seq, 5, bucket=bucket))
        assert model.difference([seq]) < TOLERANCE
    print(f"max difference: {float((logits[0] - logits[1]).abs().max()):.1e}")
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=TOLERANCE)
    assert int(logits[0].argmax()) == int(logits[1].argmax())


def test_a_long_prompt_continues_the_same_with_each_chunk_budget(tmp_path: Path) -> None:
    # B61, with its numbers: about 5000 tokens, budgets of 8192, 512 and 128.
    model = Model(
        tmp_path,
        rope="llama3",
        max_position_embeddings=8192,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    prompt = prompt_of(5001)
    runs = []
    for budget in (8192, 512, 128):
        shapes = Shapes((128, budget), (1,), block_size=32, max_blocks=160, num_kv_blocks=161)
        runs.append(model.server(shapes).generate(prompt, num_new=12, budget=budget))
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert len(set(runs[0].tokens[5001:])) >= 4
    difference = model.difference(runs)
    print(f"max difference: {difference:.1e}")
    assert difference < TOLERANCE


def test_bfloat16_is_as_near_the_truth_as_hugging_face_in_bfloat16(tmp_path: Path) -> None:
    ours, theirs = [], []
    for seed, rope in itertools.product(range(4), ("default", "llama3")):
        folder = tmp_path / f"{seed}-{rope}"
        model = Model(
            folder, "bfloat16", rope=rope, seed=seed, attention_bias=True, checkpoint="bfloat16"
        )
        in_bfloat16 = Reference.load(folder, "bfloat16")
        seq = model.server().generate(prompt_of(48, seed=seed), num_new=12, budget=16)
        truth = model.expected(seq)
        ours.append(torch.stack(seq.logits) - truth)
        theirs.append(in_bfloat16.logits(seq.tokens)[torch.tensor(seq.ends) - 1] - truth)
    our_rms, their_rms = (float(torch.cat(e).pow(2).mean().sqrt()) for e in (ours, theirs))
    our_max, their_max = (float(torch.cat(e).abs().max()) for e in (ours, theirs))
    print(f"rms: {our_rms:.2e} and {their_rms:.2e}; max: {our_max:.2e} and {their_max:.2e}")
    assert our_rms <= 1.5 * their_rms
    assert our_max <= 1.5 * their_max
