"""A context of 32768 tokens against one of 4096, with KV read in segments and in one piece.

    python benchmarks/long_context.py [PLAN ...] [--json FILE] [--engine]

A random Llama (hidden 256, 4 layers, 8 heads on 2 KV heads, vocabulary 1000, float32), prefill in
chunks of 512 tokens, segments of 1024. Each plan is compiled by `nxbucket compile`, one program at
a time, and its peak is that of the compile's own process, as the manifest records it. Then a fresh
process loads the plan, prefills one prompt that nearly fills the context, and decodes 16 tokens:

    loaded     resident memory with programs, weights and KV cache in place, each program run once
    peak       the most resident while prompt and decode ran (VmHWM, reset before)
    first, last    processor time of the first and the last full chunk of the prompt

Times are processor time on one thread: they hold on a machine that has other things to do, and more
threads shorten them by what the machine allows. The programs run without an engine around them, so
memory is theirs. --engine also sends the prompt through vllm.LLM for the 32768-token plan in
segments: it is served, and gives the same first token.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine_line, version_line
from random_llama import MODELS, write_weights

CHUNK = 512
SEGMENT = 1024
DECODE_STEPS = 16
NUM_LAYERS = 4
CHANGES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "torch_dtype": "float32",
}
MODEL_FILE = """\
# Written by benchmarks/long_context.py.
model: ../model
dtype: float32
max_model_len: {max_model_len}
max_num_seqs: 1
max_num_batched_tokens: {chunk}
enable_prefix_caching: false
neuron_config:
  num_batched_tokens_buckets: [{chunk}]
  num_seqs_buckets: [1]
  kv_segment_size_buckets: {segments}
artifacts:
  cache: artifacts
"""


@dataclass(frozen=True)
class Plan:
    max_model_len: int
    num_tokens: int
    in_segments: bool

    @property
    def name(self) -> str:
        return f"{self.max_model_len}-{'segments' if self.in_segments else 'one-piece'}"


PLANS = [
    Plan(4096, 4000, True),
    Plan(32768, 30000, True),
    Plan(4096, 4000, False),
    Plan(32768, 30000, False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [plan.name for plan in PLANS]
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--engine", action="store_true", help="also through vllm.LLM")
    parser.add_argument("--serve", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--model-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(CHILDREN[args.serve](args.model_file, args.tokens)))
        return
    print(machine_line())
    print(version_line())
    folder = ensure_model()
    header = ("plan", "compile s", "peak MiB", "loaded MiB", "peak MiB", "first ms", "last ms")
    print(("{:>18}" + "{:>12}" * 8).format(*header, "prompt s", "decode ms"))
    chosen = [plan for plan in PLANS if plan.name in (args.plans or names)]
    figures = {plan.name: measure(folder, plan, args.engine) for plan in chosen}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def ensure_model() -> Path:
    folder = MODELS / "long-context"
    if not (folder / "model" / "config.json").exists():
        (folder / "model").mkdir(parents=True, exist_ok=True)
        write_weights(folder / "model", NUM_LAYERS, CHANGES)
    return folder


def measure(folder: Path, plan: Plan, engine: bool) -> dict[str, Any]:
    model_file = folder / plan.name / "model.yaml"
    model_file.parent.mkdir(exist_ok=True)
    segments = f"[{SEGMENT}]" if plan.in_segments else "null"
    model_file.write_text(
        MODEL_FILE.format(max_model_len=plan.max_model_len, chunk=CHUNK, segments=segments)
    )
    compiled = compile_plan(model_file)
    ran = run_child("programs", model_file, plan.num_tokens)
    chunks = ran["chunk_ms"]
    full = chunks[: plan.num_tokens // CHUNK]
    numbers = (
        compiled["seconds"],
        compiled["peak_bytes"] / 2**20,
        ran["loaded_bytes"] / 2**20,
        ran["peak_bytes"] / 2**20,
        full[0],
        full[-1],
        sum(chunks) / 1e3,
        statistics.median(ran["decode_ms"]),
    )
    print(f"{plan.name:>18}" + "".join(f"{number:12.1f}" for number in numbers), flush=True)
    figures = {"compile": compiled, "programs": ran}
    if engine and plan.in_segments and plan.max_model_len == PLANS[1].max_model_len:
        served = run_child("engine", model_file, plan.num_tokens)
        if served["token_id"] != ran["token_id"]:
            raise SystemExit(f"vLLM answers {served['token_id']}, the programs {ran['token_id']}")
        print(
            f"{'':>18} through vllm.LLM: {served['seconds']:.1f} s to the same first token, "
            f"peak {served['peak_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
        figures["engine"] = served
    return figures


def compile_plan(model_file: Path) -> dict[str, Any]:
    """Every program anew: seconds, and the highest peak of a compile."""
    from nxbucket.compile.cache import ArtifactCache, Hit

    cache = ArtifactCache(model_file.parent / "artifacts")
    if cache.root.exists():
        shutil.rmtree(cache.root)
    command = [sys.executable, "-c", "from nxbucket.toolkit.cli import main; main()"]
    done = subprocess.run(
        [*command, "compile", str(model_file), "--jobs", "1", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"nxbucket compile {model_file}:\n{done.stdout}\n{done.stderr}")
    report = json.loads(done.stdout)
    found = [cache.lookup(program["key"]) for program in report["programs"]]
    manifests = [f.manifest for f in found if isinstance(f, Hit)]
    return {
        "seconds": report["wall_s"],
        "peak_bytes": max(m.peak_rss_bytes for m in manifests),
        "programs": {
            m.program: {"compile_s": m.compile_s, "peak_bytes": m.peak_rss_bytes} for m in manifests
        },
    }


def run_child(kind: str, model_file: Path, num_tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", kind, "--model-file", str(model_file)]
    done = subprocess.run(
        [*command, "--tokens", str(num_tokens)], stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_programs(model_file: Path, num_tokens: int) -> dict[str, Any]:
    """In the child: the bound programs, and nothing of vLLM."""
    import torch

    from nxbucket.compile import padding
    from nxbucket.compile.program import Bucket
    from nxbucket.serve.binding import load_artifacts
    from nxbucket.serve.loaders import loader_for
    from nxbucket.serve.served import resolve
    from nxbucket.serve.weights import load_weights

    torch.set_num_threads(1)
    spec, served = resolve(model_file)
    loader = loader_for(served.target)
    artifacts = load_artifacts(served, loader)
    weights = load_weights(spec.model_dir, spec.architecture, spec.dtype)
    artifacts.bind(loader.place(artifacts.signature, weights))
    artifacts.smoke(spec.architecture.vocab_size)
    size = spec.block_size
    blocks = torch.arange(1, spec.max_blocks_per_seq + 1)
    tokens = torch.tensor(prompt(num_tokens))
    loaded_bytes = memory("VmRSS")
    # Since kernel 2.6.35 a 5 makes VmHWM start again from what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    chunk_ms, decode_ms = [], []
    prefill = Bucket("prefill", CHUNK)
    for first in range(0, num_tokens, CHUNK):
        positions = torch.arange(first, min(first + CHUNK, num_tokens))
        slots = blocks[positions // size] * size + positions % size
        table = blocks[: int(positions[-1]) // size + 1]
        max_blocks = artifacts.max_blocks(prefill)
        start = time.process_time()
        inputs = padding.prefill_inputs(
            CHUNK, max_blocks, tokens[positions], positions, slots, table
        )
        logits = artifacts.run(prefill, inputs)
        chunk_ms.append(1e3 * (time.process_time() - start))
    token_id = int(logits[0].argmax())
    next_token = token_id
    for position in range(num_tokens, num_tokens + DECODE_STEPS):
        bucket = artifacts.decode_bucket(1, position + 1)
        table = blocks[None, : artifacts.max_blocks(bucket)]
        one = torch.tensor([position])
        start = time.process_time()
        inputs = padding.decode_inputs(
            1, torch.tensor([next_token]), one, blocks[one // size] * size + one % size, table
        )
        next_token = int(artifacts.run(bucket, inputs)[0].argmax())
        decode_ms.append(1e3 * (time.process_time() - start))
    return {
        "token_id": token_id,
        "loaded_bytes": loaded_bytes,
        "peak_bytes": memory("VmHWM"),
        "kv_cache_bytes": served.kv_cache_bytes,
        "chunk_ms": chunk_ms,
        "decode_ms": decode_ms,
    }


def run_engine(model_file: Path, num_tokens: int) -> dict[str, Any]:
    """In the child: the same prompt through vLLM."""
    import os

    from nxbucket.serve.engine_args import engine_args

    arguments = engine_args(model_file) | {"skip_tokenizer_init": True}
    # In this process, so that its memory is what is measured.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    request: Any = {"prompt_token_ids": prompt(num_tokens)}
    (result,) = llm.generate([request], params, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - start,
        "token_id": result.outputs[0].token_ids[0],
        "peak_bytes": memory("VmHWM"),
    }


CHILDREN = {"programs": run_programs, "engine": run_engine}


def prompt(num_tokens: int) -> list[int]:
    import random

    chosen = random.Random(num_tokens)
    return [chosen.randrange(3, CHANGES["vocab_size"]) for _ in range(num_tokens)]


def memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main()
