"""One engine in this process, looked at from inside: MODEL_YAML OUT.json [--emulate].

Runs the same requests plainly, with NaN in every block that nobody owns, and with everything
preempted halfway, and records each shape that reaches an executable.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"

BUCKETS = {"prefill": (32, 64, 128), "decode": (1, 2, 4)}


def main(model_file: str, out_file: str, *options: str) -> None:
    from nxbucket.serve.engine_args import engine_args

    arguments = engine_args(model_file, emulate="--emulate" in options)
    arguments["enable_prefix_caching"] = False  # a cached block is owned by nobody, yet in use
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    scheduler = core.scheduler
    num_blocks = next(runner.artifacts.signature.of_role("kv_cache")).shape[0]
    calls = record_calls(runner)
    steps = record_steps(runner)
    compiled_at_start = runner.loader.compiles()

    rng = random.Random(3)
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=4000))
    requests = [
        (list(text[rng.randrange(3000) :][: rng.randint(1, 300)].encode()), rng.randint(1, 40))
        for _ in range(12)
    ]

    def run(before_step: Callable[[int], None] = lambda step: None) -> list[Any]:
        for i, (prompt, max_tokens) in enumerate(requests):
            engine.add_request(
                f"r{i}",
                {"prompt_token_ids": prompt},
                SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=3),
            )
        texts, step = {}, 0
        while engine.has_unfinished_requests():
            before_step(step)
            for output in engine.step():
                if output.finished:
                    choice = output.outputs[0]
                    logprobs = [sorted(lp.logprob for lp in s.values()) for s in choice.logprobs]
                    texts[output.request_id] = [list(choice.token_ids), logprobs]
            step += 1
        return [texts[f"r{i}"] for i in range(len(requests))]

    plain = run()
    padding = {
        phase: {str(b): [u.executions, u.real, u.padding] for b, u in uses.items()}
        for phase, uses in (
            ("prefill", scheduler.stats.prefill),
            ("decode", scheduler.stats.decode),
        )
    }
    recomputed = recompute_padding(steps)

    def poison(_step: int) -> None:
        owned = {
            block
            for request in scheduler.requests
            for group in scheduler.kv_cache_manager.get_block_ids(request)
            for block in group
        }
        runner.memory.fill_blocks(sorted(set(range(num_blocks)) - owned), float("nan"))

    poisoned = run(poison)

    preempted = {"times": 0}

    def preempt(step: int) -> None:
        if step in (9, 30, 31, 50):
            preempted["times"] += len(scheduler.running)
            llm.reset_prefix_cache(reset_running_requests=True)

    resumed = run(preempt)
    Path(out_file).write_text(
        json.dumps(
            {
                "plain": plain,
                "poisoned": poisoned,
                "resumed": resumed,
                "preempted": preempted["times"],
                "calls": sorted(calls),
                "num_calls": len(steps),
                "padding": padding,
                "recomputed": recomputed,
                "signatures": {
                    e.name: [[t.name, list(t.shape)] for t in e.signature.of_role("input")]
                    for e in runner.artifacts.executables.values()
                },
                "compiles": compiles(),
                "compiles_of_loader": runner.loader.compiles() - compiled_at_start,
                "jax": "jax" in sys.modules,
            }
        )
    )


def record_calls(runner: Any) -> set[tuple[str, str]]:
    """Every distinct (program, input shapes) that reaches an executable, its own checks passed."""
    seen = set()
    for executable in runner.artifacts.executables.values():

        def recording(
            inputs: list[Any],
            _name: str = executable.name,
            _run: Callable[..., Any] = executable._run,
        ) -> Any:
            seen.add((_name, json.dumps([list(t.shape) for t in inputs])))
            return _run(inputs)

        executable._run = recording
    return seen


def record_steps(runner: Any) -> list[tuple[str, list[int]]]:
    """The scheduler's own, unpadded, account of every step that runs a program."""
    steps = []
    execute = runner.execute_model

    def recording(scheduler_output: Any, *rest: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            steps.append(
                (scheduler_output.phase, list(scheduler_output.num_scheduled_tokens.values()))
            )
        return execute(scheduler_output, *rest)

    runner.execute_model = recording
    return steps


def recompute_padding(steps: list[tuple[str, list[int]]]) -> dict[str, dict[str, list[int]]]:
    totals = {phase: {str(b): [0, 0, 0] for b in sizes} for phase, sizes in BUCKETS.items()}
    for phase, tokens in steps:
        count = sum(tokens)
        bucket = min(b for b in BUCKETS[phase] if b >= count)
        total = totals[phase][str(bucket)]
        total[0] += 1
        total[1] += count
        total[2] += bucket - count
    return totals


def compiles() -> dict[str, dict[str, int]]:
    import torch._dynamo.utils

    counters = torch._dynamo.utils.counters
    return {name: dict(values) for name, values in counters.items() if values}


main(*sys.argv[1:])
