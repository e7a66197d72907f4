"""The server that a replay stands for, from limits and lists."""

from nxbucket.toolkit.buckets import (
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)
from nxbucket.toolkit.choice.replay import Deployment
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.workload import Lists, ServerLimits


def deployment_of(limits: ServerLimits, trace: Trace, lists: Lists | None = None) -> Deployment:
    """With powers of two for each list that is not given."""
    lists = lists or {}
    longest = limits.max_model_len
    if longest is None:
        longest = max(limits.max_num_batched_tokens, _longest_request(trace))
    blocks_per_seq = -(-longest // limits.block_size)
    tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    return Deployment(
        name="powers of two",
        prefill_buckets=tuple(
            lists.get("prefill") or get_default_num_batched_tokens_buckets(tokens)
        ),
        decode_buckets=tuple(lists.get("decode") or get_default_num_seqs_buckets(seqs)),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks or seqs * blocks_per_seq + 1,
        enable_prefix_caching=limits.enable_prefix_caching,
    )


def _longest_request(trace: Trace) -> int:
    """Prompt and answer, and one more, as a server takes only what leaves room."""
    outputs = trace.output_tokens
    if outputs is None:
        return max(trace.prompt_tokens) + 1
    return max(map(sum, zip(trace.prompt_tokens, outputs, strict=True))) + 1
