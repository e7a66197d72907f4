"""What the schedulers refuse to start with, each with a sentence, and what they read from config.

A combination that would mix phases, leave a chunk without a bucket or wait for ever is an error
here rather than a surprise under load.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from nxbucket.serve.policy import DEFAULT_MAX_CONSECUTIVE_PREFILLS, Limits, check_buckets
from nxbucket.toolkit.buckets import (
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    limits: Limits
    num_batched_tokens_buckets: tuple[int, ...]
    num_seqs_buckets: tuple[int, ...]
    max_consecutive_prefills: int


def check_scheduler_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, needs_async: bool
) -> SchedulerSettings:
    """The settings, or one ValueError that names all that stands in the way."""
    problems = [
        *_unsupported(vllm_config, needs_async),
        *_kv_problems(vllm_config, kv_cache_config),
    ]
    token_buckets: tuple[int, ...] = ()
    seqs_buckets: tuple[int, ...] = ()
    cap = 0
    try:
        token_buckets, seqs_buckets = _buckets(vllm_config)
    except ValueError as error:
        problems.append(str(error))
    try:
        cap = _max_consecutive_prefills(vllm_config)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    scheduler = vllm_config.scheduler_config
    lora = vllm_config.lora_config
    limits = Limits(
        max_num_active_reqs=scheduler.max_num_active_seqs or scheduler.max_num_seqs,
        num_blocks=kv_cache_config.num_blocks,
        block_size=_block_size(kv_cache_config),
        max_model_len=vllm_config.model_config.max_model_len,
        max_loras=lora.max_loras if lora else None,
    )
    return SchedulerSettings(limits, token_buckets, seqs_buckets, cap)


def _section(vllm_config: VllmConfig, name: str) -> dict[str, Any]:
    additional = vllm_config.additional_config
    section = additional.get(name) if isinstance(additional, dict) else None
    return section or {}


def _buckets(vllm_config: VllmConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    scheduler = vllm_config.scheduler_config
    max_tokens = min(scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len)
    neuron_config = _section(vllm_config, "neuron_config")
    token_buckets = neuron_config.get("num_batched_tokens_buckets")
    seqs_buckets = neuron_config.get("num_seqs_buckets")
    if token_buckets is None:
        token_buckets = get_default_num_batched_tokens_buckets(max_tokens)
    if seqs_buckets is None:
        seqs_buckets = get_default_num_seqs_buckets(scheduler.max_num_seqs)
    return (
        check_buckets(
            "num_batched_tokens_buckets",
            token_buckets,
            max_tokens,
            "the smaller of max_num_batched_tokens and max_model_len",
        ),
        check_buckets("num_seqs_buckets", seqs_buckets, scheduler.max_num_seqs, "max_num_seqs"),
    )


def _max_consecutive_prefills(vllm_config: VllmConfig) -> int:
    cap = _section(vllm_config, "nxbucket").get(
        "max_consecutive_prefills", DEFAULT_MAX_CONSECUTIVE_PREFILLS
    )
    if type(cap) is not int or cap < 0:
        raise ValueError(f"max_consecutive_prefills must be 0 (no limit) or more, is {cap!r}")
    return cap


def _unsupported(vllm_config: VllmConfig, needs_async: bool) -> Iterator[str]:
    scheduler = vllm_config.scheduler_config
    if bool(scheduler.async_scheduling) != needs_async:
        # A sync scheduler under an async engine would work, at half the speed.
        flag = "on" if scheduler.async_scheduling else "off"
        wanted = "NeuronAsyncScheduler" if scheduler.async_scheduling else "NeuronScheduler"
        yield f"async_scheduling is {flag}, which needs {wanted}"
    if scheduler.long_prefill_token_threshold > 0:
        # vLLM sees one request at a time and lifts the threshold for it (v1/core/sched/scheduler.py
        # applies it only if another request is eligible), so it would have no effect.
        yield (
            "long_prefill_token_threshold has no effect with one prefill per step: remove it, or "
            "lower max_num_batched_tokens"
        )
    if vllm_config.speculative_config is not None:
        yield "speculative decoding is not supported: remove speculative_config"
    if vllm_config.kv_transfer_config is not None or vllm_config.ec_transfer_config is not None:
        yield "KV and encoder-cache connectors are not supported: remove the transfer config"
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported"
    elif model.supports_multimodal_inputs:
        yield "multimodal inputs are not supported: set limit_mm_per_prompt to 0 for every modality"


def _block_size(kv_cache_config: KVCacheConfig) -> int:
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def _kv_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        yield f"the model must have one KV cache group with full attention, has {kinds}"
        return
    max_model_len = vllm_config.model_config.max_model_len
    block_size = _block_size(kv_cache_config)
    needed = -(-max_model_len // block_size) + 1
    if kv_cache_config.num_blocks < needed:
        yield (
            f"the KV cache has {kv_cache_config.num_blocks} blocks of {block_size} tokens, one "
            f"request of max_model_len={max_model_len} needs {needed} (one is vLLM's null block): "
            f"raise num_gpu_blocks_override or lower max_model_len"
        )
