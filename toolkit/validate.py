"""Rules between keys: what the limits of a model file must be to one another and to the model.

Each rule takes what it needs from `Limits` and stays silent where a value is unknown because it was
wrong itself, so that one mistake is reported once.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from nxbucket.toolkit.architecture import Architecture
from nxbucket.toolkit.errors import Problem

BLOCK_SIZE_MULTIPLES = {"cpu": 32}
"""By target. cpu: vLLM 0.32's CPU attention takes multiples of 32 (cpu_attn.py,
get_supported_kernel_block_sizes), and the fast kernels are compiled from it."""


@dataclass(frozen=True)
class Limits:
    file: Path
    defaulted: frozenset[str]
    target: str | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_chunked_prefill: bool | None = None
    architecture: Architecture | None = None
    max_position_embeddings: int | None = None
    positions_reason: str = ""

    @property
    def effective_max_num_batched_tokens(self) -> int | None:
        if self.max_num_batched_tokens is None or self.max_model_len is None:
            return None
        return min(self.max_num_batched_tokens, self.max_model_len)

    def named(self, key: str) -> str:
        """`key value`, and whether anybody wrote it."""
        origin = ", its default" if key in self.defaulted else ""
        return f"{key} {getattr(self, key)}{origin}"

    def problem(self, key: str, code: str, message: str, hint: str) -> Problem:
        return Problem(code, message, hint, self.file, key=key)


def check_limits(limits: Limits) -> list[Problem]:
    rules = (_positions, _seqs, _block_size, _kv_blocks, _chunking, _heads)
    return [problem for rule in rules if (problem := rule(limits)) is not None]


def _positions(limits: Limits) -> Problem | None:
    length, positions = limits.max_model_len, limits.max_position_embeddings
    if length is None or positions is None or length <= positions:
        return None
    reason = limits.positions_reason or f"the model's max_position_embeddings {positions}"
    message = f"max_model_len {length} is above {reason}"
    hint = f"set max_model_len to {positions} or less"
    return limits.problem("max_model_len", "max-model-len", message, hint)


def _seqs(limits: Limits) -> Problem | None:
    seqs, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if seqs is None or budget is None or seqs <= budget:
        return None
    message = (
        f"{limits.named('max_num_batched_tokens')} is below {limits.named('max_num_seqs')}: "
        "a decode step runs one token per sequence"
    )
    hint = f"set max_num_batched_tokens to {seqs} or more, or max_num_seqs to {budget} or less"
    left_out = "max_num_batched_tokens" in limits.defaulted
    key = "max_num_seqs" if left_out else "max_num_batched_tokens"
    return limits.problem(key, "budget-below-seqs", message, hint)


def _block_size(limits: Limits) -> Problem | None:
    size = limits.block_size
    multiple = BLOCK_SIZE_MULTIPLES.get(limits.target or "")
    if size is None or multiple is None:
        return None
    if size % multiple:
        below, above = size // multiple * multiple, ceil(size / multiple) * multiple
        message = f"block_size {size} is no multiple of {multiple}, as target {limits.target} needs"
        hint = f"nearest: {above}" if not below else f"nearest: {below} or {above}"
        return limits.problem("block_size", "block-size", message, hint)
    if limits.max_model_len is None:
        return None
    largest = ceil(limits.max_model_len / multiple) * multiple
    if size <= largest:
        return None
    message = f"block_size {size} is above {limits.named('max_model_len')}"
    key = "block_size" if "block_size" not in limits.defaulted else "max_model_len"
    return limits.problem(key, "block-size", message, f"set block_size to {largest} or less")


def _kv_blocks(limits: Limits) -> Problem | None:
    blocks, length, size = limits.num_gpu_blocks_override, limits.max_model_len, limits.block_size
    if blocks is None or length is None or size is None:
        return None
    needed = ceil(length / size) + 1
    if blocks >= needed:
        return None
    message = (
        f"num_gpu_blocks_override {blocks} holds less than one request: {needed - 1} blocks of "
        f"{size} tokens for max_model_len {length}, and vLLM's null block"
    )
    hint = f"set num_gpu_blocks_override to {needed} or more, or lower max_model_len"
    return limits.problem("num_gpu_blocks_override", "kv-too-small", message, hint)


def _chunking(limits: Limits) -> Problem | None:
    length, budget = limits.max_model_len, limits.max_num_batched_tokens
    if limits.enable_chunked_prefill is not False or length is None or budget is None:
        return None
    if budget >= length:
        return None
    message = (
        f"without chunked prefill {limits.named('max_num_batched_tokens')} caps prompts below "
        f"{limits.named('max_model_len')}"
    )
    hint = (
        "delete enable_chunked_prefill: long prompts run in chunks; or set "
        f"max_num_batched_tokens to {length} or more"
    )
    return limits.problem("enable_chunked_prefill", "chunked-prefill", message, hint)


def _heads(limits: Limits) -> Problem | None:
    ranks, architecture = limits.tensor_parallel_size, limits.architecture
    if ranks is None or architecture is None or architecture.num_attention_heads % ranks == 0:
        return None
    message = f"{architecture.num_attention_heads} attention heads do not split over {ranks} ranks"
    hint = "set tensor_parallel_size to a divisor of the number of heads"
    return limits.problem("tensor_parallel_size", "heads-not-divisible", message, hint)
