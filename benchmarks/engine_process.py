"""One vLLM engine in a process of its own, measured over a line protocol. vs_vllm.py starts it.

    python engine_process.py ours MODEL_YAML | stock LLM_ARGUMENTS_AS_JSON

One JSON object a line. Standard output carries the first line ({"ready": ...}) and one answer for
each command of standard input, and nothing else: what vLLM prints goes to standard error.

    {"cmd": "decode", "batch": 4, "seed": 1}     {"ms": 17.2}, for each decode step
    {"cmd": "prefill", "tokens": 128, "seed": 1} {"ms": 95.1}, to the first token

Between commands it waits in a read and uses no processor time, which vs_vllm.py checks.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

CONTEXT = 184
"""Prompt length of the decode measure: with 32 steps more, the mean context is 200 tokens."""
STEPS = 32
FIRST_ORDINARY_TOKEN = 3


def main() -> None:
    # vLLM and what it loads print to standard output, from C++ too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, described = sys.argv[1:]
    start = time.monotonic()
    llm, arguments = start_ours(described) if kind == "ours" else start_stock(described)
    ready = {"start_s": time.monotonic() - start, "arguments": arguments, **describe(llm)}
    _send(answers, {"ready": ready})
    for line in sys.stdin:
        command = json.loads(line)
        measure: Callable[..., float] = MEASURES[command.pop("cmd")]
        _send(answers, {"ms": measure(llm, **command)})


def start_ours(model_yaml: str) -> "tuple[LLM, dict[str, Any]]":
    from nxbucket.serve.engine_args import engine_args

    arguments = engine_args(model_yaml) | {"skip_tokenizer_init": True}
    from vllm import LLM

    return LLM(**arguments), arguments


def start_stock(arguments_json: str) -> "tuple[LLM, dict[str, Any]]":
    arguments = json.loads(arguments_json)
    from vllm import LLM

    return LLM(**arguments), arguments


def describe(llm: "LLM") -> dict[str, Any]:
    """What vLLM made of the arguments, so that the report need not believe them."""
    import torch
    from vllm.platforms import current_platform

    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    return {
        "platform": type(current_platform).__name__,
        "scheduler": config.scheduler_config.get_scheduler_cls().__name__,
        "compilation": f"{compilation.mode.name}, backend {compilation.backend or 'none'}",
        "executor": config.parallel_config.distributed_executor_backend,
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "threads": torch.get_num_threads(),
    }


def decode_ms(llm: "LLM", batch: int, seed: int) -> float:
    """(time of 33 tokens - time of 1 token) / 32, for `batch` requests sent together."""
    first = _generate_s(llm, _prompts(llm, batch, CONTEXT, seed), 1)
    both = _generate_s(llm, _prompts(llm, batch, CONTEXT, seed + 1), 1 + STEPS)
    return 1e3 * (both - first) / STEPS


def prefill_ms(llm: "LLM", tokens: int, seed: int) -> float:
    """Time to the only token of one request, sampling and request handling included."""
    return 1e3 * _generate_s(llm, _prompts(llm, 1, tokens, seed), 1)


MEASURES = {"decode": decode_ms, "prefill": prefill_ms}


def _prompts(llm: "LLM", count: int, length: int, seed: int) -> list[list[int]]:
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    chosen = random.Random(seed)
    return [
        [chosen.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(length)]
        for _ in range(count)
    ]


def _generate_s(llm: "LLM", prompts: list[list[int]], num_tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    results = llm.generate(requests, params, use_tqdm=False)  # type: ignore[arg-type]
    spent = time.perf_counter() - start
    lengths = [len(result.outputs[0].token_ids) for result in results]
    if lengths != [num_tokens] * len(prompts):
        raise RuntimeError(f"asked {len(prompts)} requests for {num_tokens} tokens, got {lengths}")
    return spent


def _send(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
