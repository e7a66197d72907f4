"""KV read in segments, and decode programs of shorter contexts: against Hugging Face and the rest.

EagerServer fills every slot that holds no token with NaN before each step, so all of these also
show that what is masked poisons nothing, segment by segment.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import EagerServer, Running, Shapes
from hf_models import Reference, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxbucket.compile.program import Phase
from nxbucket.compile.programs import segments
from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.architecture import read_architecture

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
AGAINST_ONE_PIECE = 5e-5
PLAIN = Shapes()
"""Blocks of 4, at most 20 of them: 80 tokens."""


class Model:
    def __init__(self, folder: Path, dtype: str = "float32", **config: Any) -> None:
        self.folder = write_checkpoint(folder, rope="llama3", **config)
        self.architecture = read_architecture(folder).architecture
        self.dtype = dtype
        self.weights = load_weights(folder, self.architecture, dtype)
        self.reference = Reference.load(folder)

    def server(self, shapes: Shapes, seed: int = 0) -> EagerServer:
        return EagerServer(self.architecture, self.weights, shapes, dtype=self.dtype, seed=seed)

    def difference(self, seqs: list[Running]) -> float:
        """The largest difference from Hugging Face, over every step of every sequence."""
        return max(float((torch.stack(s.logits) - self.expected(s)).abs().max()) for s in seqs)

    def expected(self, seq: Running) -> Tensor:
        return self.reference.logits(seq.tokens)[torch.tensor(seq.ends) - 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(96) for _ in range(length)]


def names_that_ran(server: EagerServer) -> set[str]:
    return {name for name, count in server.artifacts.executions.items() if count}


# Segments


@pytest.mark.parametrize("group", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("segment", [4, 8, 12, 28, 40, 76, 80])
def test_every_chunk_and_decode_step_equals_hugging_face(
    tmp_path: Path, segment: int, group: int
) -> None:
    # 12, 28 and 76 do not divide 80: the last segment is partly beyond the block table.
    model = Model(tmp_path, num_key_value_heads=group)
    server = model.server(replace(PLAIN, segment=segment))
    seqs = [server.generate(prompt_of(n, seed=n), num_new=8, budget=16) for n in (3, 50)]
    difference = model.difference(seqs)
    print(f"max difference: {difference:.1e}")
    assert difference < TOLERANCE
    assert len(set(seqs[1].tokens[50:])) >= 4


@pytest.mark.parametrize("edge", [8, 16, 32, 40])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_context_that_ends_at_or_beside_a_segments_edge(
    model: Model, edge: int, beside: int
) -> None:
    server = model.server(replace(PLAIN, segment=8))
    seq = server.start(prompt_of(edge + beside))
    server.prefill_all(seq, 16)
    server.decode_greedily([seq], 3)
    assert model.difference([seq]) < TOLERANCE


def test_a_sequence_may_fill_its_block_table_to_the_last_slot(model: Model) -> None:
    server = model.server(replace(PLAIN, segment=12))
    seq = server.generate(prompt_of(70), num_new=10, budget=16)
    assert seq.computed == 80
    assert model.difference([seq]) < TOLERANCE


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_program_in_segments_equals_the_one_in_one_piece(
    model: Model, data: st.DataObject
) -> None:
    segment = 4 * data.draw(st.integers(1, 19), label="blocks in a segment")
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4), label="lengths")
    budget = data.draw(st.integers(1, 16), label="budget")
    logits = []
    for shapes in (PLAIN, replace(PLAIN, segment=segment)):
        server = model.server(shapes)
        seqs = [server.start(prompt_of(n, seed=i)) for i, n in enumerate(lengths)]
        for seq in seqs:
            server.prefill_all(seq, budget)
            seq.tokens.append(5)
        server.decode(seqs)
        logits.append(torch.cat([torch.stack(seq.logits) for seq in seqs]))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=AGAINST_ONE_PIECE)


def test_a_prompt_of_many_segments_continues_the_same_with_each_segment_size(
    tmp_path: Path,
) -> None:
    model = Model(
        tmp_path,
        max_position_embeddings=4096,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    prompt = prompt_of(2001)
    runs = []
    for segment in (None, 32, 256, 1000 // 32 * 32):
        shapes = Shapes((128,), (1,), 32, 70, 71, segment=segment)
        runs.append(model.server(shapes).generate(prompt, num_new=6, budget=128))
    assert all(run.tokens == runs[0].tokens for run in runs)
    assert len(set(runs[0].tokens[2001:])) >= 3
    difference = model.difference(runs)
    print(f"max difference: {difference:.1e}")
    assert difference < TOLERANCE


def test_a_first_chunk_after_a_cached_prefix_equals_hugging_face(model: Model) -> None:
    server = model.server(replace(PLAIN, segment=8))
    first = server.generate(prompt_of(45), num_new=3, budget=16)
    tokens = first.tokens[:30] + prompt_of(20, seed=7)
    second = server.start_after_prefix(tokens, first)
    assert second.computed == 28
    server.prefill_all(second, 16)
    server.decode_greedily([first, second], 4)
    assert model.difference([first, second]) < TOLERANCE


def test_bfloat16_in_segments_is_as_near_the_truth_as_in_one_piece(tmp_path: Path) -> None:
    errors: dict[int | None, list[Tensor]] = {None: [], 8: [], 20: []}
    for seed in range(4):
        model = Model(tmp_path / str(seed), "bfloat16", seed=seed)
        for segment, found in errors.items():
            seq = model.server(replace(PLAIN, segment=segment)).generate(
                prompt_of(48, seed=seed), num_new=12, budget=16
            )
            found.append(torch.stack(seq.logits) - model.expected(seq))
    rms = {segment: float(torch.cat(e).pow(2).mean().sqrt()) for segment, e in errors.items()}
    print(rms)
    whole = rms[None]
    assert rms[8] <= 1.1 * whole
    assert rms[20] <= 1.1 * whole


# The attention itself


def inputs_of_attend(lengths: list[int], rows: int, blocks: int, filler: float) -> dict[str, Any]:
    """Sequences of these lengths in blocks of 4, `filler` wherever there is no token."""
    generator = torch.Generator().manual_seed(sum(lengths))
    batch = len(lengths)
    cache = torch.full((2, 1 + batch * blocks, 4, 2, 8), filler)
    table = torch.arange(1, 1 + batch * blocks, dtype=torch.int32).view(batch, blocks)
    for row, length in zip(table, lengths, strict=True):
        for position in range(length):
            slot = cache[:, row[position // 4], position % 4]
            slot.copy_(torch.randn(slot.shape, generator=generator))
    last = torch.stack([torch.linspace(0, n - 1, rows).round().to(torch.int32) for n in lengths])
    return {
        "query": 3 * torch.randn(batch, 2, rows, 8, generator=generator),
        "keys": cache[0],
        "values": cache[1],
        "block_table": table,
        "last": last,
        "end": torch.tensor(lengths, dtype=torch.int32),
    }


def attended(given: dict[str, Any], window: int | None = None) -> Tensor:
    """The definition, one row at a time, in float64."""
    keys, values = given["keys"].double(), given["values"].double()
    out = torch.empty(given["query"].shape, dtype=torch.float64)
    batch, kv_heads, rows, head_dim = out.shape
    for b in range(batch):
        k = keys[given["block_table"][b]].flatten(0, 1)
        v = values[given["block_table"][b]].flatten(0, 1)
        for h in range(kv_heads):
            for r in range(rows):
                seen = int(given["last"][b, r]) + 1
                first = 0 if window is None else max(0, seen - window)
                scores = k[first:seen, h] @ given["query"][b, h, r].double() / head_dim**0.5
                out[b, h, r] = scores.softmax(0) @ v[first:seen, h]
    return out


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 28), min_size=1, max_size=3),
    rows=st.integers(1, 5),
    segment_blocks=st.integers(1, 7),
    filler=st.sampled_from([float("nan"), float("inf"), 1e30, 0.0]),
    window=st.none() | st.integers(1, 30),
)
def test_attend_is_softmax_attention_over_what_each_row_sees(
    lengths: list[int], rows: int, segment_blocks: int, filler: float, window: int | None
) -> None:
    # Rows of one call end in different segments, so most see nothing in some of them.
    given = inputs_of_attend(lengths, rows, 7, filler)
    out = segments.attend(**given, segment_blocks=segment_blocks, window=window)
    torch.testing.assert_close(out.double(), attended(given, window), rtol=0, atol=1e-5)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    given = inputs_of_attend([28, 9], 4, 7, float("nan"))
    given["query"] *= 1e4
    out = segments.attend(**given, segment_blocks=2)
    torch.testing.assert_close(out.double(), attended(given), rtol=0, atol=1e-4)


def test_segments_past_the_end_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # What allows a compiler without loops to unroll all of them.
    given = inputs_of_attend([9, 2], 3, 7, float("nan"))
    ended = segments.attend(**given, segment_blocks=2)

    def all_of_them(segment: Tensor, *operands: Tensor) -> Tensor:
        return segment < operands[6].shape[1]

    monkeypatch.setattr(segments, "_not_at_end", all_of_them)
    assert torch.equal(segments.attend(**given, segment_blocks=2), ended)


def test_a_nan_in_a_token_the_row_sees_is_not_hidden() -> None:
    given = inputs_of_attend([20], 2, 7, 0.0)
    given["keys"][given["block_table"][0, 2]] = float("nan")
    out = segments.attend(**given, segment_blocks=2)
    assert out[:, :, 1].isnan().all()
    assert out[:, :, 0].isfinite().all()


def test_no_temporary_is_wider_than_a_segment() -> None:
    from null_compiler import a_program

    from nxbucket.compile.cpu import CpuCompiler

    # 97 blocks of 4, segments of 8 tokens.
    sizes: list[tuple[Phase, int]] = [("prefill", 16), ("decode", 4)]
    for phase, size in sizes:
        program = a_program(
            phase, size, block_size=4, max_blocks=97, num_kv_blocks=1001, kv_segment_size=8
        )
        exported = CpuCompiler("x86-64-v3").lower(program).payload
        largest = {}
        for module in exported.graph_module.modules():
            for node in module.graph.nodes:
                value = node.meta.get("val")
                is_cache = isinstance(value, Tensor) and value.shape[:1] == (1001,)
                if isinstance(value, Tensor) and node.op != "placeholder" and not is_cache:
                    largest[node.name] = value.numel()
        # Linear layers: 16 tokens x 128; a table: 4 x 98 numbers. Scores over 388 would be 24832.
        assert max(largest.values()) <= 16 * 128, max(largest, key=lambda n: largest[n])


# Contexts


CONTEXTS = replace(PLAIN, contexts=(16, 40))


@pytest.mark.parametrize("segment", [None, 8, 24])
@pytest.mark.parametrize("length", [1, 14, 15, 16, 17, 38, 39, 40, 41, 79])
def test_a_context_program_equals_the_full_one_beside_its_edges(
    model: Model, length: int, segment: int | None
) -> None:
    logits = []
    for shapes in (PLAIN, replace(CONTEXTS, segment=segment)):
        server = model.server(shapes)
        seq = server.start(prompt_of(length))
        server.prefill_all(seq, 16)
        seq.tokens.append(7)
        server.decode([seq])
        logits.append(seq.logits[-1])
        assert model.difference([seq]) < TOLERANCE
    # The decode's own token counts: it is in the cache when attention reads.
    expected = "_ctx16" if length + 1 <= 16 else "_ctx40" if length + 1 <= 40 else ""
    ran = [name for name in names_that_ran(server) if name.startswith("decode")]
    assert ran == [f"decode_b1{expected}"]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=AGAINST_ONE_PIECE)


def test_the_longest_sequence_of_a_batch_chooses_the_context(model: Model) -> None:
    server = model.server(CONTEXTS)
    seqs = [server.start(prompt_of(n, seed=n)) for n in (3, 30, 12)]
    for seq in seqs:
        server.prefill_all(seq, 16)
    server.decode_greedily(seqs, 2)
    assert server.artifacts.executions["decode_b4_ctx40"] == 2
    server.decode_greedily([seqs[0], seqs[2]], 2)
    assert server.artifacts.executions["decode_b2_ctx16"] == 2
    assert model.difference(seqs) < TOLERANCE


def test_sequences_that_grow_through_every_context_give_the_same_text(model: Model) -> None:
    texts = []
    for shapes in (PLAIN, CONTEXTS, replace(CONTEXTS, segment=12)):
        server = model.server(shapes, seed=3)
        seqs = [server.start(prompt_of(n, seed=n)) for n in (9, 11)]
        for seq in seqs:
            server.prefill_all(seq, 16)
        server.decode_greedily(seqs, 40)
        texts.append([seq.tokens for seq in seqs])
        assert model.difference(seqs) < TOLERANCE
    assert texts[0] == texts[1] == texts[2]
    assert {"decode_b2_ctx16", "decode_b2_ctx40", "decode_b2"} <= names_that_ran(server)
