"""A server in a few lines: bucket programs run eagerly on a paged KV cache of their own.

It pads with `compile.padding` and chooses with `serve.binding`, as the real runner does, and is
nastier than vLLM: blocks are handed out in random order, block tables end in stale block numbers,
and every slot no token of ours was written to is filled with `filler` before every step.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxbucket.compile import padding
from nxbucket.compile.program import Bucket, BucketProgram, Phase
from nxbucket.compile.programs.families import program_module
from nxbucket.serve.binding import BoundArtifacts
from nxbucket.serve.executable import Executable, HostMemory, Memory
from nxbucket.serve.loaders import CpuExecutable
from nxbucket.toolkit.architecture import Architecture, Rope


@dataclass(eq=False)
class Running:
    """One sequence: its tokens, how many are in the cache, and where."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    """One row for each step, in order."""
    ends: list[int] = field(default_factory=list)
    """How many tokens were in the cache after each of these steps."""


ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    rope=Rope("default", 10000.0),
)
"""Of two small layers: for what is about tensors on their way, not about numbers."""


@dataclass(frozen=True)
class Shapes:
    """What `model.yaml` would say."""

    prefill: tuple[int, ...] = (4, 8, 16)
    decode: tuple[int, ...] = (1, 2, 4, 8)
    block_size: int = 4
    max_blocks: int = 20
    num_kv_blocks: int = 81
    contexts: tuple[int, ...] = ()
    segment: int | None = None

    def programs(self, arch: Architecture, dtype: str) -> list[BucketProgram]:
        def program(phase: Phase, size: int, context: int | None = None) -> BucketProgram:
            return BucketProgram(
                phase,
                size,
                arch,
                dtype,
                self.block_size,
                -(-context // self.block_size) if context else self.max_blocks,
                self.num_kv_blocks,
                context,
                self.segment,
            )

        prefills = [program("prefill", size) for size in self.prefill]
        contexts = (*self.contexts, None)
        return prefills + [program("decode", n, c) for n in self.decode for c in contexts]


def eager(program: BucketProgram) -> CpuExecutable:
    return CpuExecutable(program.name, program.signature, program_module(program))


class EagerServer:
    """`filler` stands in every slot that holds no token; None leaves what is there, as it must
    where `memory` keeps no cache in the tensors it is given."""

    def __init__(
        self,
        arch: Architecture,
        weights: dict[str, Tensor],
        shapes: Shapes | None = None,
        *,
        dtype: str = "float32",
        filler: float | None = float("nan"),
        seed: int = 0,
        load: Callable[[BucketProgram], Executable[Any]] = eager,
        memory: Callable[[dict[str, Tensor], dict[str, Tensor]], Memory] = HostMemory,
    ) -> None:
        self.shapes = shapes or Shapes()
        self.filler = filler
        programs = self.shapes.programs(arch, dtype)
        self.artifacts = BoundArtifacts({p.bucket: load(p) for p in programs})
        self.kv_cache = {
            t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype))
            for t in self.artifacts.signature.of_role("kv_cache")
        }
        self.artifacts.bind(memory(self.kv_cache, weights))
        self._random = random.Random(seed)
        self._free = list(range(1, self.shapes.num_kv_blocks))
        self._random.shuffle(self._free)
        slots = self.shapes.num_kv_blocks * self.shapes.block_size
        self._written = torch.zeros(slots, dtype=torch.bool)

    def start(self, tokens: Sequence[int]) -> Running:
        return Running(list(tokens))

    def start_after_prefix(self, tokens: Sequence[int], other: Running) -> Running:
        """A prefix-cache hit: the full blocks that `tokens` shares with `other` are taken over."""
        size = self.shapes.block_size
        usable = min(len(tokens) - 1, other.computed)
        shared = 0
        while (shared + 1) * size <= usable and (
            list(tokens[shared * size : (shared + 1) * size])
            == other.tokens[shared * size : (shared + 1) * size]
        ):
            shared += 1
        return Running(list(tokens), other.blocks[:shared], shared * size)

    @torch.no_grad()
    def prefill(self, seq: Running, num_tokens: int, bucket: int | None = None) -> Tensor:
        """The next chunk of the prompt. -> logits [vocab]"""
        if bucket is None:
            bucket = self.artifacts.bucket_for("prefill", num_tokens).size
        positions = torch.arange(seq.computed, seq.computed + num_tokens)
        slots = self._slots(seq, positions)
        inputs = padding.prefill_inputs(
            bucket,
            self.shapes.max_blocks,
            torch.tensor(seq.tokens)[positions],
            positions,
            slots,
            torch.tensor(seq.blocks),
        )
        inputs["block_table"][len(seq.blocks) :] = self._stale(
            self.shapes.max_blocks - len(seq.blocks)
        )
        logits = self._run(Bucket("prefill", bucket), inputs, slots)
        self._advance(seq, num_tokens, logits[0])
        return logits[0]

    def prefill_all(self, seq: Running, budget: int) -> Tensor:
        """The whole prompt in chunks of `budget` tokens. -> logits [vocab] of its last token"""
        while seq.computed < len(seq.tokens):
            last = self.prefill(seq, min(budget, len(seq.tokens) - seq.computed))
        return last

    @torch.no_grad()
    def decode(self, seqs: Sequence[Running], bucket: int | None = None) -> Tensor:
        """One token of each: the last of its `tokens`. -> logits [sequences, vocab]"""
        assert all(seq.computed == len(seq.tokens) - 1 for seq in seqs)
        longest = max(len(seq.tokens) for seq in seqs)
        chosen = self.artifacts.decode_bucket(bucket or len(seqs), longest)
        max_blocks = self.artifacts.max_blocks(chosen)
        positions = torch.tensor([seq.computed for seq in seqs])
        slots = torch.cat([self._slots(seq, positions[i : i + 1]) for i, seq in enumerate(seqs)])
        table = self._stale(len(seqs) * max_blocks).view(len(seqs), -1)
        for i, seq in enumerate(seqs):
            table[i, : len(seq.blocks)] = torch.tensor(seq.blocks)
        inputs = padding.decode_inputs(
            chosen.size, torch.tensor([seq.tokens[-1] for seq in seqs]), positions, slots, table
        )
        logits = self._run(chosen, inputs, slots)[: len(seqs)]
        for seq, row in zip(seqs, logits, strict=True):
            self._advance(seq, 1, row)
        return logits

    def generate(self, prompt: Sequence[int], num_new: int, budget: int) -> Running:
        """One sequence on its own, greedily."""
        seq = self.start(prompt)
        self.prefill_all(seq, budget)
        self.decode_greedily([seq], num_new)
        return seq

    def decode_greedily(self, seqs: Sequence[Running], num_new: int) -> None:
        for _ in range(num_new):
            for seq in seqs:
                seq.tokens.append(int(seq.logits[-1].argmax()))
            self.decode(seqs)

    def written_kv(self) -> dict[str, Tensor]:
        """Every slot that holds a token, of each layer."""
        return {name: kv.flatten(0, 1)[self._written] for name, kv in self.kv_cache.items()}

    def _run(self, bucket: Bucket, inputs: dict[str, Tensor], slots: Tensor) -> Tensor:
        if self.filler is not None:
            for kv in self.kv_cache.values():
                kv.flatten(0, 1)[~self._written] = self.filler
        logits = self.artifacts.run(bucket, inputs)
        self._written[slots] = True
        return logits

    def _slots(self, seq: Running, positions: Tensor) -> Tensor:
        size = self.shapes.block_size
        while len(seq.blocks) * size <= int(positions[-1]):
            seq.blocks.append(self._free.pop())
        return torch.tensor(seq.blocks)[positions // size] * size + positions % size

    def _stale(self, count: int) -> Tensor:
        """Block numbers left over from other sequences, as vLLM's own block table holds them."""
        numbers = [self._random.randrange(self.shapes.num_kv_blocks) for _ in range(count)]
        return torch.tensor(numbers, dtype=torch.int32)

    @staticmethod
    def _advance(seq: Running, num_tokens: int, logits: Tensor) -> None:
        seq.computed += num_tokens
        seq.logits.append(logits)
        seq.ends.append(seq.computed)
