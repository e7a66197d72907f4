"""BucketProgram: one static shape, as plain values. Importing this imports no torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from nxbucket.compile.programs.weights import weight_specs
from nxbucket.compile.signature import ProgramSignature, TensorSpec
from nxbucket.toolkit.architecture import Architecture

Phase = Literal["prefill", "decode"]

PROGRAM_VERSION = 2
"""Bumped by hand when any program's graph changes; the golden digests in the tests insist on it."""

ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}

SCRATCH_SLOT = 0
"""Slot 0 of the null block: where padding rows write their keys and values.

The scheduler's -1 becomes this on the host, so that a program never has a conditional write.
"""


class Bucket(NamedTuple):
    """Which of a plan's programs: `context_len` is None where it takes max_model_len."""

    phase: Phase
    size: int
    context_len: int | None = None

    @property
    def name(self) -> str:
        """AWS's own labels: prefill_s512, decode_b4, decode_b4_ctx1024."""
        name = f"prefill_s{self.size}" if self.phase == "prefill" else f"decode_b{self.size}"
        return name if self.context_len is None else f"{name}_ctx{self.context_len}"


@dataclass(frozen=True)
class BucketProgram:
    """A prefill of `size` tokens of one sequence, or a decode of `size` sequences.

    `max_blocks` is the length of one row of the block table; `num_kv_blocks` the KV blocks of the
    cache, the null block included. `context_len`: the longest sequence this decode takes, None for
    max_model_len; its block table is as short. `kv_segment_size`: tokens of KV read at a time, None
    for all of them.
    """

    phase: Phase
    size: int
    architecture: Architecture
    dtype: str
    block_size: int
    max_blocks: int
    num_kv_blocks: int
    context_len: int | None = None
    kv_segment_size: int | None = None
    kernel: Literal["reference"] = "reference"
    output: Literal["logits"] = "logits"

    @property
    def name(self) -> str:
        return self.bucket.name

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.phase, self.size, self.context_len)

    @property
    def segment_blocks(self) -> int | None:
        return None if self.kv_segment_size is None else self.kv_segment_size // self.block_size

    @cached_property
    def signature(self) -> ProgramSignature:
        n = self.size
        if self.phase == "prefill":
            rows = 1
            host = [
                _int32("block_table", self.max_blocks),
                _int32("context_len", 1),
                _int32("num_tokens", 1),
            ]
        else:
            rows = n
            host = [_int32("block_table", n, self.max_blocks), _int32("seq_lens", n)]
        arch = self.architecture
        kv_shape = (
            self.num_kv_blocks,
            self.block_size,
            arch.num_key_value_heads,
            arch.head_dim,
        )
        kv_names = [f"{kv}.{i}" for i in range(arch.num_hidden_layers) for kv in ("key", "value")]
        inputs = [
            _int32("input_ids", n),
            _int32("positions", n),
            _int32("slot_mapping", n),
            *host,
            *(TensorSpec(name, "kv_cache", self.dtype, kv_shape) for name in kv_names),
            *(TensorSpec(w.name, "weight", self.dtype, w.shape) for w in weight_specs(arch)),
        ]
        outputs = [
            TensorSpec("logits", "output", "float32", (rows, arch.vocab_size)),
            *(TensorSpec(name, "output", self.dtype, kv_shape, alias=name) for name in kv_names),
        ]
        return ProgramSignature(tuple(inputs), tuple(outputs))


def _int32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "input", "int32", shape)


def kv_bytes_per_token(architecture: Architecture, dtype: str) -> int:
    """Keys and values of every layer."""
    values = architecture.num_key_value_heads * architecture.head_dim
    return 2 * architecture.num_hidden_layers * values * ITEM_BYTES[dtype]
