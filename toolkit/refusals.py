"""Keys people write that are none of ours, and what each is answered with.

Three sources: the older Neuron stack's names, vLLM arguments that model.yaml decides, and vLLM
arguments that cannot hold here. `serve:` and the arguments after `nxbucket serve --` are held to
the same table.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OLDER_NAMES = {
    "context_encoding_buckets": "use neuron_config.num_batched_tokens_buckets",
    "prefill_buckets": "use neuron_config.num_batched_tokens_buckets",
    "token_generation_buckets": (
        "context-length buckets are not batch buckets; use neuron_config.num_seqs_buckets, and "
        "decode_context_length_buckets for the lengths"
    ),
    "decode_buckets": "use neuron_config.num_seqs_buckets",
    "buckets": (
        "use neuron_config.num_batched_tokens_buckets (prefill) and num_seqs_buckets (decode)"
    ),
    "enable_bucketing": "buckets are always on; delete the line",
    "n_positions": "use max_model_len",
    "sequence_length": "use max_model_len",
    "seq_len": "use max_model_len",
    "max_length": "use max_model_len",
    "max_context_length": "use max_num_batched_tokens (prefill step) and max_model_len",
    "batch_size": "use max_num_seqs",
    "max_batch_size": "use max_num_seqs",
    "ctx_batch_size": "prefill runs one request at a time; delete the line",
    "tkg_batch_size": "use max_num_seqs",
    "tp_degree": "use tensor_parallel_size",
    "num_cores": "use tensor_parallel_size",
    "torch_dtype": "use dtype",
    "auto_cast_type": "use compiler.auto_cast",
    "logical_nc_config": "use compiler.lnc",
    "is_continuous_batching": "batching is always continuous; delete the line",
    "is_block_kv_layout": "the KV cache is always in blocks; delete the line",
    "pa_num_blocks": "use num_gpu_blocks_override",
    "pa_block_size": "use block_size",
    "is_prefix_caching": "use enable_prefix_caching",
    "override_neuron_config": "its keys go under neuron_config",
    "additional_config": "its neuron_config goes to the top level of model.yaml",
}

# vLLM's argument -> the key of model.yaml that holds it, and whether programs depend on it.
_OURS = {
    "model": ("model", True),
    "revision": ("revision", True),
    "dtype": ("dtype", True),
    "tensor_parallel_size": ("tensor_parallel_size", True),
    "max_model_len": ("max_model_len", True),
    "max_num_seqs": ("max_num_seqs", True),
    "max_num_batched_tokens": ("max_num_batched_tokens", True),
    "block_size": ("block_size", True),
    "num_gpu_blocks_override": ("num_gpu_blocks_override", True),
    "enable_prefix_caching": ("enable_prefix_caching", False),
    "async_scheduling": ("async_scheduling", False),
    "additional_config": ("neuron_config", True),
}

_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "q": "quantization",
    "sc": "speculative_config",
    "cc": "compilation_config",
    "O": "optimization_level",
    "ac": "attention_config",
    "ep": "enable_expert_parallel",
}


@dataclass(frozen=True)
class _Refusal:
    why: str
    hint: str
    holds: tuple[Any, ...] = (None,)
    """Values that ask for what already is so. They change nothing and are accepted."""


_DELETE = "delete the line"
_ONE_RANK = _Refusal(
    "one engine on one rank is what runs today", "not yet; leave it at 1", (None, 1)
)
_LORA = _Refusal(
    "LoRA adapters are not compiled into the programs", "not yet; merge it first", (None, False)
)
_SPECULATIVE = _Refusal(
    "speculative decoding needs programs that are not built", f"not yet; {_DELETE}"
)
_NO_JIT = _Refusal("nothing compiles while serving, so it has no effect", _DELETE)
_KV_MEMORY = _Refusal(
    "the number of KV blocks is part of every program's shape and not taken from free memory",
    "set num_gpu_blocks_override in model.yaml",
)
_OFFLOAD = _Refusal("weights and KV cache stay where the program runs", _DELETE, (None, 0, 0.0))
_POOLING = _Refusal(
    "only text generation is compiled", "not yet; use vLLM itself", (None, "auto", "generate")
)
_MULTIMODAL = _Refusal("only text models are compiled", f"not yet; {_DELETE}")
_TRANSFER = _Refusal("disaggregated serving is not built", f"not yet; {_DELETE}")
_PLUGGED = _Refusal("nxbucket brings its own", _DELETE, (None, "auto", ""))

_CANNOT_HOLD = {
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "data_parallel_size",
            "data_parallel_size_local",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "nnodes",
        ),
        _ONE_RANK,
    ),
    **dict.fromkeys(("enable_expert_parallel", "enable_eplb", "enable_dbo"), _Refusal(
        "mixture-of-experts models are not compiled", f"not yet; {_DELETE}", (None, False)
    )),
    **dict.fromkeys(
        ("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras",
         "fully_sharded_loras", "default_mm_loras"),
        _LORA,
    ),
    **dict.fromkeys(
        ("speculative_config", "speculative_model", "num_speculative_tokens", "spec_method",
         "spec_model", "spec_tokens", "num_lookahead_slots"),
        _SPECULATIVE,
    ),
    **dict.fromkeys(
        ("compilation_config", "optimization_level", "cudagraph_capture_sizes",
         "max_cudagraph_capture_size", "max_seq_len_to_capture"),
        _NO_JIT,
    ),
    "enforce_eager": _Refusal(_NO_JIT.why, _NO_JIT.hint, (None, False)),
    **dict.fromkeys(("gpu_memory_utilization", "kv_cache_memory_bytes"), _KV_MEMORY),
    **dict.fromkeys(
        ("swap_space", "cpu_offload_gb", "kv_offloading_size", "offload_group_size"), _OFFLOAD
    ),
    **dict.fromkeys(("runner", "task", "convert"), _POOLING),
    "pooler_config": _Refusal(_POOLING.why, _POOLING.hint),
    **dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs"), _MULTIMODAL),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config"), _TRANSFER),
    **dict.fromkeys(
        ("scheduler_cls", "worker_cls", "attention_backend", "attention_config", "kernel_config"),
        _PLUGGED,
    ),
    "config": _Refusal(
        "a config file could set what the lock decides",
        "put its arguments under serve: in model.yaml",
    ),
    "hf_config_path": _Refusal(
        "the architecture is that of config.json beside the weights",
        "edit that config.json, then run `nxbucket compile`",
    ),
    "quantization": _Refusal(
        "quantized weights are not compiled",
        "not yet; use the float32, bfloat16 or float16 checkpoint",
    ),
    "quantization_config": _Refusal("quantized weights are not compiled", f"not yet; {_DELETE}"),
    "kv_cache_dtype": _Refusal(
        "the KV cache has the model's dtype", "not yet; delete the line", (None, "auto")
    ),
    "long_prefill_token_threshold": _Refusal(
        "prefill chunks are cut to the prefill buckets, one request at a time",
        "set max_num_batched_tokens in model.yaml",
        (None, 0),
    ),
    "max_num_scheduled_tokens": _Refusal(
        "the step budget is max_num_batched_tokens", "set max_num_batched_tokens in model.yaml"
    ),
    "enable_chunked_prefill": _Refusal(
        "prompts longer than the largest prefill bucket run in chunks",
        "write enable_chunked_prefill at the top level of model.yaml, where the limits are checked",
        (None, True),
    ),
    "trust_remote_code": _Refusal(
        "programs are written per model family; a checkpoint's own code is never run",
        _DELETE,
        (None, False),
    ),
    "model_impl": _Refusal("programs are written per model family", _DELETE, (None, "auto")),
    "hf_overrides": _Refusal(
        "config.json decides the programs and is read without vLLM",
        "edit config.json in the model folder",
        (None, {}),
    ),
    "enable_sleep_mode": _Refusal("weights stay bound while serving", _DELETE, (None, False)),
    "enable_prompt_embeds": _Refusal("programs take token ids", _DELETE, (None, False)),
    "device": _Refusal("target says where the programs run", "set target in model.yaml"),
}  # fmt: skip

SERVE_ARGUMENTS = frozenset({
    "allowed_origins", "api_key", "chat_template", "disable_log_requests", "disable_log_stats",
    "enable_auto_tool_choice", "enable_log_requests", "generation_config", "host", "load_format",
    "logprobs_mode", "max_logprobs", "otlp_traces_endpoint", "override_generation_config", "port",
    "reasoning_parser", "response_role", "root_path", "seed", "served_model_name", "ssl_certfile",
    "ssl_keyfile", "structured_outputs_config", "tokenizer", "tokenizer_mode",
    "tokenizer_revision", "tool_call_parser", "uds", "uvicorn_log_level",
})  # fmt: skip
"""Arguments of `vllm serve` that people write at the top level. Any other is passed on as well."""


def argument_name(name: str) -> str:
    """`--max-model-len` and `max_model_len` are one argument; `-tp` is spelled out."""
    plain = name.lstrip("-").split("=", 1)[0].split(".", 1)[0].replace("-", "_")
    # vLLM takes the level together with the letter: -O3.
    short = plain.rstrip("0123") if plain[:1] == "O" else plain
    return _SHORT.get(short, plain)


def refused_serve_argument(name: str, value: Any) -> tuple[str, str] | None:
    """(message, hint) for a `vllm serve` argument that cannot be passed on, else None.

    `value` is what follows the argument, True for a bare flag; text from a command line is read as
    the value it spells. vLLM also takes `--no-<flag>` and unambiguous beginnings: so does this.
    """
    plain = argument_name(name)
    known = {*_OURS, *_CANNOT_HOLD}
    if plain not in known and plain.startswith("no_") and plain[3:] in known:
        plain, value = plain[3:], False
    if plain not in known | SERVE_ARGUMENTS and len(plain) > 3:
        plain = next((full for full in sorted(known) if full.startswith(plain)), plain)
    if plain in _OURS:
        key, shapes_programs = _OURS[plain]
        if shapes_programs:
            why = "decides the compiled programs" if key != "revision" else "decides the weights"
            return f"{plain} {why}", f"set {key} in model.yaml, then run `nxbucket compile`"
        return f"{plain} is set by model.yaml", f"set {key} in model.yaml"
    refusal = _CANNOT_HOLD.get(plain)
    if refusal is None or _holds(refusal, value):
        return None
    return f"{plain}: {refusal.why}", refusal.hint


def refused_key(name: str, value: Any) -> tuple[str, str] | None:
    """The same answer for a vLLM argument at the top level of model.yaml, where ours belong."""
    refusal = _CANNOT_HOLD.get(name)
    if refusal is None or _holds(refusal, value):
        return None
    return f"{name}: {refusal.why}", refusal.hint


def is_vllm_key_that_holds(name: str, value: Any) -> bool:
    """A vLLM argument with the value that is so here anyway, e.g. `pipeline_parallel_size: 1`."""
    refusal = _CANNOT_HOLD.get(name)
    return refusal is not None and _holds(refusal, value)


def _holds(refusal: _Refusal, value: Any) -> bool:
    spelled = {"true": True, "false": False, "null": None, "none": None, "1": 1, "0": 0}
    if isinstance(value, str):
        value = spelled.get(value.lower(), value)
    # `True == 1` in Python; here they are different answers.
    return any(type(value) is type(held) and value == held for held in refusal.holds)


def unknown_key_hint(key: str, section: str, known: Mapping[str, Iterable[str]]) -> str:
    """The mend for a key `section` does not have. `known` maps each section to its keys."""
    if key in OLDER_NAMES:
        return OLDER_NAMES[key]
    own = list(known[section])
    plain = key.replace("-", "_").lower()
    if plain in own:
        return f"write {plain}"
    for other, keys in known.items():
        if plain in keys:
            where = f"under {other}" if other else "at the top level"
            return f"{plain} belongs {where}"
    if plain in SERVE_ARGUMENTS:
        return f"{plain} belongs under serve"
    if len(key) <= 60:
        if near := difflib.get_close_matches(plain, own, n=1):
            return f"did you mean {near[0]}?"
        paths = {k: f"{s}.{k}" if s else k for s, keys in known.items() for k in keys}
        if near := difflib.get_close_matches(plain, paths, n=1):
            return f"did you mean {paths[near[0]]}?"
        if near := difflib.get_close_matches(plain, OLDER_NAMES, n=1, cutoff=0.8):
            return OLDER_NAMES[near[0]]
    return f"keys known here: {', '.join(sorted(own))}"


def nearest(word: str, words: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(word, list(words), n=1)
    return matches[0] if matches else None
