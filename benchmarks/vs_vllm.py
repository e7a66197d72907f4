"""Decode and prefill against stock vLLM, on a random Llama of 170 million parameters.

    python benchmarks/vs_vllm.py [--rounds 7] [--dtype bfloat16] [--json FILE] [--keep]

Ours is the real thing: `nxbucket compile`, then vllm.LLM(**engine_args("model.yaml")). Stock is
vllm.LLM with the same limits and its default compilation. Each engine has its own process and both
are alive at once; they take turns measure by measure, the order swapped every round, so that a
neighbour's load hits both. The first round warms up and is not counted. Reported are medians with
the smallest and the largest.

Equal for both: all cores for OpenMP and the engine in the measured process
(VLLM_ENABLE_V1_MULTIPROCESSING=0). By its own default, stock keeps one core for the scheduler's
process and binds the worker's threads to the rest, which on two cores is one thread. Preloaded for
both is what stock preloads for its workers, torch's libgomp; --preload adds to it, for instance
the tcmalloc and libiomp5 of vLLM's CPU guide where they are installed.

Left to stock's defaults: block size, compilation, custom ops. Its KV cache is given a size, since
by default it takes most of the memory.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import random_llama
from machine import load_line, machine_line, num_cores, version_line

DTYPES = ("float32", "bfloat16")
MEASURES: dict[str, dict[str, Any]] = {
    "decode, batch 1 (ms/step)": {"cmd": "decode", "batch": 1},
    "decode, batch 4 (ms/step)": {"cmd": "decode", "batch": 4},
    "decode, batch 8 (ms/step)": {"cmd": "decode", "batch": 8},
    "prefill, 128 tokens (ms)": {"cmd": "prefill", "tokens": 128},
    "prefill, 512 tokens (ms)": {"cmd": "prefill", "tokens": 512},
}
STOCK_KV_CACHE_BYTES = 1 << 30
SETTLE_S = 0.2
"""Between measures: OpenMP threads of the engine that just ran spin for a moment, then sleep."""


@dataclass
class EngineProcess:
    """An engine_process.py child and its measurements."""

    name: str
    arguments: list[str]
    env: dict[str, str]
    log_path: Path
    ready: dict[str, Any] = field(default_factory=dict)
    times_ms: dict[str, list[float]] = field(default_factory=dict)
    busiest_idle: float = 0.0
    """The most processor time used while the other engine was measured, in cores."""

    def __post_init__(self) -> None:
        script = Path(__file__).with_name("engine_process.py")
        self.command = [sys.executable, str(script), *self.arguments]

    def start(self) -> None:
        with self.log_path.open("w") as log:
            self.child = subprocess.Popen(
                self.command,
                env={**os.environ, **self.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.ready = self._answer()["ready"]

    def measure(self, command: dict[str, Any], seed: int) -> float:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({**command, "seed": seed}) + "\n")
        self.child.stdin.flush()
        return float(self._answer()["ms"])

    def cpu_s(self) -> float:
        """Processor time so far, of all threads."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        if self.child.stdin is not None:
            self.child.stdin.close()
        try:
            self.child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            code = self.child.wait()
            tail = "\n".join(self.log_path.read_text().splitlines()[-15:])
            raise SystemExit(f"the {self.name} engine ended with {code}; {self.log_path}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--dtype", choices=DTYPES, help="only this one")
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick look")
    parser.add_argument("--preload", action="append", default=[], help="a library, for both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument(
        "--keep", action="store_true", help="leave weights and artifacts in benchmarks/models"
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.layers < 1:
        parser.error("--rounds and --layers start at 1")

    print(f"machine: {machine_line()}\nversions: {version_line()}", flush=True)
    folder = random_llama.ensure_model(args.layers)
    env = common_env(args.preload)
    reports = []
    for dtype in [args.dtype] if args.dtype else DTYPES:
        engines = compile_and_start(folder, dtype, env)
        try:
            take_turns(engines, args.rounds)
        finally:
            for engine in engines:
                engine.stop()
        reports.append(report(dtype, engines))
    print_tables(reports, args.rounds, args.layers)
    if args.json:
        document: dict[str, Any] = {"machine": machine_line(), "versions": version_line()}
        document |= {"env": env, "rounds": args.rounds, "layers": args.layers, "reports": reports}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if not args.keep:
        shutil.rmtree(folder)


def common_env(preload: list[str]) -> dict[str, str]:
    """What both engines are started with, over this process's own environment."""
    # Ours are set by nxbucket itself; a stock engine must not inherit them.
    for name in ("NXBUCKET_ACTIVE", "TORCH_COMPILE_DISABLE", "VLLM_PLUGINS"):
        os.environ.pop(name, None)
    import torch

    # As CpuPlatform.check_and_update_config of vLLM 0.32 chooses it.
    gomp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")))[:1]
    return {
        "OMP_NUM_THREADS": str(num_cores()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LD_PRELOAD": ":".join([*preload, *gomp]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def stock_arguments(folder: Path, dtype: str) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": random_llama.MAX_MODEL_LEN,
        "max_num_seqs": random_llama.MAX_NUM_SEQS,
        "max_num_batched_tokens": random_llama.MAX_NUM_BATCHED_TOKENS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": STOCK_KV_CACHE_BYTES,
        "skip_tokenizer_init": True,
    }


def compile_and_start(folder: Path, dtype: str, env: dict[str, str]) -> list[EngineProcess]:
    """Both engines, alive: ours, then stock."""
    model_yaml = random_llama.write_model_file(folder, dtype)
    nxbucket = [str(Path(sys.executable).with_name("nxbucket")), "compile", str(model_yaml)]
    print(f"\n$ {shlex.join(nxbucket)}", flush=True)
    subprocess.run(nxbucket, check=True, stdout=subprocess.DEVNULL)
    stock_json = json.dumps(stock_arguments(folder, dtype))
    engines = [
        EngineProcess("ours", ["ours", str(model_yaml)], env, folder / f"ours-{dtype}.log"),
        EngineProcess("stock", ["stock", stock_json], env, folder / f"stock-{dtype}.log"),
    ]
    exports = shlex.join(f"{name}={value}" for name, value in env.items())
    for engine in engines:
        print(f"\n$ env {exports} {shlex.join(engine.command)}", flush=True)
        engine.start()
        ready = engine.ready
        print(f"{engine.name}: vllm.LLM(**{ready['arguments']})")
        told = {k: v for k, v in ready.items() if k not in ("arguments", "start_s")}
        print(f"{engine.name}: ready after {ready['start_s']:.1f} s; {told}", flush=True)
    check_identity(*engines)
    return engines


def check_identity(ours: EngineProcess, stock: EngineProcess) -> None:
    """Each engine is what the table calls it, and both have the same threads."""
    assert ours.ready["platform"] == "NeuronPlatform", ours.ready
    assert stock.ready["platform"] == "CpuPlatform", stock.ready
    assert "inductor" in stock.ready["compilation"], stock.ready
    assert ours.ready["threads"] == stock.ready["threads"], (ours.ready, stock.ready)
    assert not ours.ready["prefix_caching"], ours.ready
    assert not stock.ready["prefix_caching"], stock.ready


def take_turns(engines: list[EngineProcess], rounds: int) -> None:
    seeds = random.Random(random_llama.SEED)
    for number in range(rounds + 1):
        for label, command in MEASURES.items():
            seed = seeds.randrange(1 << 30)  # both engines get the same prompts
            for engine, idle in order(engines, number):
                time.sleep(SETTLE_S)
                idle_before, start = idle.cpu_s(), time.monotonic()
                ms = engine.measure(command, seed)
                idle_cores = (idle.cpu_s() - idle_before) / (time.monotonic() - start)
                if number > 0:
                    engine.times_ms.setdefault(label, []).append(ms)
                    idle.busiest_idle = max(idle.busiest_idle, idle_cores)
        name = f"round {number} of {rounds}" if number else "warm-up round"
        print(f"{name} done, {load_line()}", file=sys.stderr, flush=True)


def order(engines: list[EngineProcess], number: int) -> list[tuple[EngineProcess, EngineProcess]]:
    """(measured, idle) pairs: A B, in the next round B A."""
    ours, stock = engines
    pairs = [(ours, stock), (stock, ours)]
    return pairs if number % 2 else pairs[::-1]


def report(dtype: str, engines: list[EngineProcess]) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "engines": {
            engine.name: {
                "command": engine.command,
                "ready": engine.ready,
                "busiest_idle_cores": round(engine.busiest_idle, 3),
                "times_ms": engine.times_ms,
            }
            for engine in engines
        },
    }


def print_tables(reports: list[dict[str, Any]], rounds: int, layers: int) -> None:
    print(
        f"\n{layers} layers, {rounds} rounds: median (min–max); ratio of medians, below 1 is ours"
    )
    print("\n| dtype | measure | nxbucket | stock vLLM | ours / stock |")
    print("|---|---|---:|---:|---:|")
    for told in reports:
        ours, stock = told["engines"]["ours"], told["engines"]["stock"]
        for label in MEASURES:
            mine, theirs = ours["times_ms"][label], stock["times_ms"][label]
            ratio = statistics.median(mine) / statistics.median(theirs)
            print(f"| {told['dtype']} | {label} | {span(mine)} | {span(theirs)} | {ratio:.2f} |")
    for told in reports:
        idle = {name: e["busiest_idle_cores"] for name, e in told["engines"].items()}
        print(f"\n{told['dtype']}: cores used by an engine while the other ran, at most: {idle}")
    print(f"\nat the end: {load_line()}")


def span(times_ms: list[float]) -> str:
    return f"{statistics.median(times_ms):.1f} ({min(times_ms):.1f}–{max(times_ms):.1f})"


if __name__ == "__main__":
    main()
