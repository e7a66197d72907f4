"""What a program costs before it is compiled: bytes per rank, FLOPs, compile time. No torch.

Bytes are exact: they follow from the signature. FLOPs are those of the matrix products, which are
all but a few in a thousand of a decoder's: 2 * m * n * k for each [m, k] x [k, n], the way
torch.utils.flop_counter counts them. Attention is counted over the padded context, because that
is what a static shape computes: the whole block table, for every token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nxbucket.compile.manifest import Manifest
from nxbucket.compile.program import ITEM_BYTES, BucketProgram
from nxbucket.compile.signature import ProgramSignature, TensorSpec

EMBEDDING, HEAD = "embed_tokens", "lm_head"
"""Weights that are not applied to every token: one is looked up, one sees the output rows only."""


@dataclass(frozen=True)
class Cost:
    """One execution of one program on one rank."""

    weight_bytes: int
    kv_cache_bytes: int
    io_bytes: int
    """Host inputs and returned outputs. The KV cache is updated in place and counts as itself."""
    flops: int


@dataclass(frozen=True)
class Memory:
    """What a rank holds while it serves. Weights and KV cache are shared by all programs."""

    weight_bytes: int
    kv_cache_bytes: int
    io_bytes: int
    """Of the largest program: one runs at a time."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_cache_bytes + self.io_bytes


def cost_of(program: BucketProgram) -> Cost:
    signature = program.signature
    returned = [t for t in signature.of_role("output") if t.alias is None]
    return Cost(
        weight_bytes=_total(signature.of_role("weight")),
        kv_cache_bytes=_total(signature.of_role("kv_cache")),
        io_bytes=_total([*signature.of_role("input"), *returned]),
        flops=_flops(program),
    )


def memory_of(programs: Iterable[BucketProgram]) -> Memory:
    costs = [cost_of(program) for program in programs]
    return Memory(
        max(c.weight_bytes for c in costs),
        max(c.kv_cache_bytes for c in costs),
        max(c.io_bytes for c in costs),
    )


def _total(tensors: Iterable[TensorSpec]) -> int:
    return sum(t.num_elements * ITEM_BYTES[t.dtype] for t in tensors)


def _flops(program: BucketProgram) -> int:
    signature = program.signature
    # The head is applied to the rows that are returned: of a prefill, the last token only.
    output_rows = next(t for t in signature.outputs if t.alias is None).shape[0]
    matrices = {t.name: t.num_elements for t in signature.of_role("weight") if len(t.shape) == 2}
    embedding = matrices.pop(EMBEDDING)
    head = matrices.pop(HEAD, embedding)
    projections = program.size * sum(matrices.values()) + output_rows * head
    # Each token's query against all keys, and the weights against all values, in every layer.
    arch = program.architecture
    query_size = arch.num_attention_heads * arch.head_dim
    attention = 2 * program.size * query_size * _padded_context(program) * arch.num_hidden_layers
    return 2 * (projections + attention)


def _padded_context(program: BucketProgram) -> int:
    """Tokens that one row of the block table reaches."""
    table = next(t for t in program.signature.inputs if t.name == "block_table")
    return table.shape[-1] * program.block_size


@dataclass(frozen=True)
class CompileTimes:
    """Lowering and compiling, in seconds per layer: the median of what a cache has recorded."""

    s_per_layer: float
    num_recorded: int

    def estimate_s(self, program: BucketProgram) -> float:
        return self.s_per_layer * program.architecture.num_hidden_layers


def compile_times(recorded: Mapping[str, Manifest], target: str) -> CompileTimes | None:
    """From entries by key; None if `target` has none. An artifact is counted once."""
    from statistics import median  # Imports decimal and random: not for a plan of hits.

    artifacts = {m.graph_key: m for m in recorded.values() if m.target == target}
    seconds = [
        (m.lower_s + m.compile_s) / layers
        for m in artifacts.values()
        if (layers := _num_layers(m.signature))
    ]
    return CompileTimes(median(seconds), len(seconds)) if seconds else None


def peak_rss_bytes(recorded: Mapping[str, Manifest], target: str) -> int | None:
    """The most memory that a compile for `target` was seen to hold; None if none was recorded."""
    return max((m.peak_rss_bytes for m in recorded.values() if m.target == target), default=None)


def _num_layers(signature: ProgramSignature) -> int:
    """A layer has one tensor of keys and one of values."""
    return len(list(signature.of_role("kv_cache"))) // 2
