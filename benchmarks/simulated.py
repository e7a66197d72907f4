"""The simulator's prediction against the real thing: one trace, one model, one set of costs.

    python benchmarks/simulated.py [--requests 200] [--rounds 3] [--ways cpu wall http]
                                   [--json FILE]

A random Llama (hidden 512, 8 layers, vocabulary 16000, float32; 32 million parameters) is compiled
for target cpu and served on one thread. Every round measures step times as `nxbucket calibrate`
does and then replays the first requests of the shipped Azure chat trace, lengths divided by 8, at
two loads: twice what the simulator says the server can do, and 60 % of it. Prompts are random.

    cpu     in this process, on the clock of the processor time it uses; idle time is jumped over.
            Other work on the machine does not count, so what is left is the simulator's own error
    wall    in this process, on the wall clock
    http    `nxbucket serve` and an asyncio client of it that streams, on the wall clock

The large temporaries of a decode go back to the kernel and are faulted in again at each step, or
not, as the heap lies; that makes step times differ from process to process. To do without:

    MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TOP_PAD_=268435456

Predicted and measured have the same trace and times of the same kind of clock. Reported is the
median of the rounds. TTFT is from the request's arrival to its first token, TPOT the mean time
between tokens of a request.
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import load_line, machine_line, version_line
from random_llama import MODELS, SEED, write_weights
from replay import (
    Others,
    Request,
    replay_in_process,
    replay_over_http,
    requests_of,
    server,
    ttft_alone_ms,
)

from nxbucket.serve.calibrate import (
    Repeats,
    SteppedEngine,
    costs_of,
    measure,
    source_sentence,
)
from nxbucket.serve.engine_args import locked_args, preflight
from nxbucket.serve.served import resolve
from nxbucket.toolkit.choice.costs import Costs
from nxbucket.toolkit.choice.deployments import deployment_of
from nxbucket.toolkit.choice.inputs import NO_LIMITS, server_of
from nxbucket.toolkit.choice.replay import Deployment
from nxbucket.toolkit.choice.simulator import simulate
from nxbucket.toolkit.choice.step_times import from_costs
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.trace_reader import find_trace, read_trace

NUM_LAYERS = 8
CHANGES: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "torch_dtype": "float32",
}
MODEL_FILE = """\
# Written by benchmarks/simulated.py.
model: .
dtype: float32
max_model_len: 1024
max_num_seqs: 8
max_num_batched_tokens: 256
enable_prefix_caching: false
neuron_config:
  num_batched_tokens_buckets: [64, 128, 256]
  num_seqs_buckets: [1, 2, 4, 8]
artifacts:
  cache: ./artifacts
"""
TRACE = "azure_conv_2023"
SHRINK = 8
"""The trace's prompts have about 1000 tokens, and its model 100 times the parameters."""
LOADS = {"saturated": 2.0, "60 %": 0.6}
WAYS = ("cpu", "wall", "http")
MEASURES = (
    "output tokens/s",
    "requests/s",
    "TTFT p50 (ms)",
    "TTFT p95 (ms)",
    "TPOT p50 (ms)",
    "TPOT p95 (ms)",
)


@dataclass
class Comparison:
    """What one round of one load by one way came to."""

    way: str
    load: str
    measured: dict[str, float]
    predicted: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)

    def error(self, name: str) -> float:
        return self.predicted[name] / self.measured[name] - 1


def ensure_model() -> Path:
    """The model file, its weights and a tokenizer beside it, written unless they are there."""
    folder = MODELS / "simulated"
    if not folder.is_dir():
        MODELS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS, prefix=".writing-") as scratch:
            written = Path(scratch) / "model"
            written.mkdir()
            write_weights(written, NUM_LAYERS, CHANGES)
            write_tokenizer(written, CHANGES["vocab_size"])
            (written / "model.yaml").write_text(MODEL_FILE)
            written.rename(folder)
    return folder / "model.yaml"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each token, so that the server has as much text to send as another."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def scaled(trace: Trace, num_requests: int, max_model_len: int) -> Trace:
    """The trace's beginning with shorter requests, its arrivals as they are."""
    assert trace.output_tokens is not None and trace.arrival_s is not None
    outputs = [max(1, n // SHRINK) for n in trace.output_tokens[:num_requests]]
    prompts = [
        min(max(1, n // SHRINK), max_model_len - output)
        for n, output in zip(trace.prompt_tokens[:num_requests], outputs, strict=True)
    ]
    arrivals = trace.arrival_s[:num_requests]
    return Trace(trace.name, array("i", prompts), array("i", outputs), arrivals)


def arriving(trace: Trace, requests_per_s: float) -> Trace:
    """The same requests, as far apart from each other as that rate asks."""
    assert trace.arrival_s is not None
    factor = len(trace) / requests_per_s / trace.arrival_s[-1]
    arrivals = array("d", (factor * s for s in trace.arrival_s))
    return Trace(trace.name, trace.prompt_tokens, trace.output_tokens, arrivals)


def measures(requests: Sequence[Request]) -> dict[str, float]:
    for request in requests:
        if request.num_tokens != request.max_tokens:
            raise RuntimeError(f"asked for {request.max_tokens} tokens, got {request.num_tokens}")
    return summary(
        [r.first_s - r.arrival_s for r in requests],
        [(r.last_s - r.first_s) / (r.num_tokens - 1) for r in requests if r.num_tokens > 1],
        sum(r.num_tokens for r in requests),
        max(r.last_s for r in requests),
    )


def summary(
    ttft_s: Sequence[float], tpot_s: Sequence[float], num_tokens: int, end_s: float
) -> dict[str, float]:
    ttft, tpot = (statistics.quantiles(s, n=100, method="inclusive") for s in (ttft_s, tpot_s))
    values = (
        num_tokens / end_s,
        len(ttft_s) / end_s,
        *(1e3 * of[cut] for of in (ttft, tpot) for cut in (49, 94)),
    )
    return dict(zip(MEASURES, values, strict=True))


def predict(
    trace: Trace, deployment: Deployment, costs: Costs
) -> tuple[dict[str, float], dict[str, int]]:
    """The measures, and the steps by program."""
    done = simulate(trace, deployment, from_costs(costs, "measured here"))
    if len(done.rows) != len(trace):
        raise RuntimeError(f"{len(trace) - len(done.rows)} requests were refused")
    predicted = summary(done.ttft_s, done.tpot_s, done.output_tokens, done.end_s)
    steps = {f"prefill_s{b}": use.executions for b, use in done.stats.prefill.items()}
    steps |= {f"decode_b{b}": use.executions for b, use in done.stats.decode.items()}
    return predicted, steps


class Bench:
    """The model, its engine in this process, and the command that serves it."""

    def __init__(self, model_file: Path, num_requests: int, trace_name: str) -> None:
        self.model_file = model_file
        self.spec, self.served = resolve(model_file)
        preflight(self.spec, self.served)
        self.engine = SteppedEngine(
            locked_args(self.spec, self.served),
            self.served.architecture.vocab_size,
        )
        trace = read_trace(find_trace(trace_name))
        self.trace = scaled(trace, num_requests, self.spec.max_model_len)
        server = server_of(model_file, NO_LIMITS)
        self.deployment = deployment_of(server.limits, self.trace, server.lists)

    def costs(self, way: str) -> Costs:
        self.engine.clock = clock_of(way)
        with self._prefills_in_a_row(0):
            step_s = measure(self.engine, self.served, Repeats())
        source = source_sentence(self.served, Repeats())
        manifests = self.served.verified_manifests()
        programs, runs = self.served.locked.programs, self.served.runs
        return costs_of(self.served.target, source, step_s, programs, manifests, runs)

    def capacity(self, costs: Costs) -> float:
        """Requests per second that the simulator serves if all are there at once."""
        at_once = arriving(self.trace, 1e9)
        return predict(at_once, self.deployment, costs)[0]["requests/s"]

    def compare(self, way: str, load: str, costs: Costs, seed: int) -> Comparison:
        trace = arriving(self.trace, LOADS[load] * self.capacity(costs))
        requests = requests_of(trace, self.served.architecture.vocab_size, seed)
        predicted, steps = predict(trace, self.deployment, costs)
        if way == "http":
            smallest = min(self.deployment.prefill_buckets)
            with server(self.model_file) as (port, session):
                alone_ms = ttft_alone_ms(port, requests[0].prompt[:1] * smallest)
                others = Others(session)
                more = asyncio.run(replay_over_http(port, requests))
                more["others_cores"] = others.cores()
            more["front_end_ms"] = alone_ms - 1e3 * costs.prefill.step_s[smallest]
        else:
            clock, others = clock_of(way), Others()
            with self._prefills_in_a_row(self.deployment.max_consecutive_prefills):
                more = replay_in_process(self.engine, requests, clock, jumps=way == "cpu")
            more["others_cores"] = others.cores()
        more |= {"predicted_steps": steps, "costs": costs.model_dump(mode="json")}
        return Comparison(way, load, measures(requests), predicted, more)

    @contextmanager
    def _prefills_in_a_row(self, limit: int) -> Iterator[None]:
        """As calibrating sets the scheduler (0), or as a server does."""
        core: Any = self.engine.llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        before, scheduler.max_consecutive_prefills = scheduler.max_consecutive_prefills, limit
        try:
            yield
        finally:
            scheduler.max_consecutive_prefills = before


def clock_of(way: str) -> Callable[[], float]:
    return time.process_time if way == "cpu" else time.perf_counter


def report(done: list[Comparison]) -> None:
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for one in done:
        groups.setdefault((one.way, one.load), []).append(one)
    for (way, load), rounds in groups.items():
        print(f"\n{way}, {load}: median of {len(rounds)} rounds\n")
        print(
            "| measure | measured | predicted | error | error, min–max |\n|---|---:|---:|---:|---:|"
        )
        for name in MEASURES:
            measured = statistics.median(one.measured[name] for one in rounds)
            predicted = statistics.median(one.predicted[name] for one in rounds)
            errors = sorted(one.error(name) for one in rounds)
            span = f"{errors[0]:+.1%} – {errors[-1]:+.1%}"
            middle = statistics.median(errors)
            print(f"| {name} | {measured:.2f} | {predicted:.2f} | {middle:+.1%} | {span} |")
        busy = sorted(one.more["others_cores"] for one in rounds)
        print(f"\nother work on the machine used {busy[0]:.2f} to {busy[-1]:.2f} cores")
        if way == "http":
            late = statistics.median(one.more["front_end_ms"] for one in rounds)
            print(f"a request alone has its first token {late:.1f} ms later than its step takes")
        else:
            report_steps(rounds)


def report_steps(rounds: list[Comparison]) -> None:
    """Of the last round: steps taken, and the mean one against what calibrating found."""
    more = rounds[-1].more
    print("\n| program | steps | predicted | ms | calibrated | steps alike in rounds |")
    print("|---|---:|---:|---:|---:|---:|")
    alike = Counter(
        name
        for one in rounds
        for name, count in one.more["predicted_steps"].items()
        if one.more["steps"].get(name, 0) == count
    )
    for name, count in more["predicted_steps"].items():
        phase, size = name.split("_")
        calibrated = more["costs"][phase]["step_s"][size[1:]]
        measured = more["step_s"].get(name, 0.0)
        print(
            f"| {name} | {more['steps'].get(name, 0)} | {count} | {1e3 * measured:.2f} | "
            f"{1e3 * calibrated:.2f} | {alike[name]} of {len(rounds)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200, help="of the trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--trace", default=TRACE, help="a shipped trace's name, or a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    args = parser.parse_args()
    if args.requests < 20 or args.rounds < 1:
        parser.error("--requests starts at 20, --rounds at 1")
    # The processor time of several threads is no time that passes; and a second thread waits for
    # its turn wherever anything else runs, the client of `http` included.
    os.environ["OMP_NUM_THREADS"] = "1"

    print(f"machine: {machine_line()}\nversions: {version_line()}", flush=True)
    model_file = ensure_model()
    compile_model = [str(Path(sys.executable).with_name("nxbucket")), "compile", str(model_file)]
    print(f"$ {shlex.join(compile_model)}", flush=True)
    subprocess.run(compile_model, check=True, stdout=subprocess.DEVNULL)
    bench = Bench(model_file, args.requests, args.trace)
    done = []
    for number in range(1, args.rounds + 1):
        for way in args.ways:
            costs = bench.costs(way)
            for load in LOADS:
                done.append(bench.compare(way, load, costs, SEED + number))
                told = f"round {number} of {args.rounds}, {way}, {load}"
                print(f"{told}: {load_line()}", file=sys.stderr, flush=True)
    if args.json:
        document: dict[str, Any] = {"machine": machine_line(), "versions": version_line()}
        document |= {"requests": args.requests, "comparisons": [vars(one) for one in done]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")

    report(done)


if __name__ == "__main__":
    main()
