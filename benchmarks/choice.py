"""Choosing buckets: the solver, the simulator and the trace reader, each beside something plain.

    python benchmarks/choice.py [--rounds 7] [--rows 4000000]

- solver: lists of at most 7 buckets for the 19,366 requests of the Azure chat trace, against the
  textbook dynamic program (every pair of candidates, for every number of buckets)
- simulator: 20,000 requests of that trace, against the length of the traffic they stand for
- reader: a CSV of --rows rows, against csv.reader and int() of the standard library, and its peak
  of resident memory, in a process of its own

In turn, medians.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from machine import machine_line, version_line

from nxbucket.toolkit.choice.deployments import deployment_of
from nxbucket.toolkit.choice.simulator import simulate
from nxbucket.toolkit.choice.solver import Axis, best_lists, steps_by_candidate
from nxbucket.toolkit.choice.step_times import ASSUMED
from nxbucket.toolkit.choice.trace import part_of
from nxbucket.toolkit.choice.trace_reader import find_trace, read_trace
from nxbucket.toolkit.choice.workload import ServerLimits, chunk_sizes

PROGRAMS = 7
LIMITS = ServerLimits(8192, 8)

READ = """
import re, sys
from pathlib import Path
from nxbucket.toolkit.choice.trace_reader import read_trace
print(len(read_trace(Path(sys.argv[1]))))
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def textbook(axis: Axis) -> int:
    """The least cost: D[k][j] = min over i < j of D[k-1][i] + cost[j] * (W[j] - W[i])."""
    n = len(axis.candidates)
    before = [0]
    for count in axis.steps:
        before.append(before[-1] + count)
    least: list[float] = [0, *([float("inf")] * n)]
    for _ in range(axis.max_programs):
        least = [0] + [
            min(least[i] + axis.costs[j - 1] * (before[j] - before[i]) for i in range(j))
            for j in range(1, n + 1)
        ]
    return int(least[n])


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(rounds: int, *works: Callable[[], object]) -> list[float]:
    times = [[seconds(work) for work in works] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def bench_solver(rounds: int) -> None:
    trace = read_trace(find_trace("azure_conv_2023"))
    chunks = chunk_sizes(trace, LIMITS).chunks.counts
    for grid in (128, 16, 1):
        last = LIMITS.max_num_batched_tokens
        candidates = tuple(sorted({min(last, -(-s // grid) * grid) for s in chunks} | {last}))
        axis = Axis(candidates, candidates, steps_by_candidate(chunks, candidates), PROGRAMS)
        assert grid == 1 or best_lists(axis)[-1].cost == textbook(axis)
        if grid == 1:  # minutes, for the textbook
            (ours,) = in_turn(rounds, partial(best_lists, axis))
            print(f"solver, grid {grid}, {len(candidates)} candidates: {1e3 * ours:.1f} ms")
            continue
        ours, plain = in_turn(rounds, partial(best_lists, axis), partial(textbook, axis))
        print(
            f"solver, grid {grid}, {len(candidates)} candidates: {1e3 * ours:.1f} ms, "
            f"textbook {1e3 * plain:.1f} ms, ratio {ours / plain:.4f}"
        )


def bench_simulator(rounds: int) -> None:
    trace = read_trace(find_trace("azure_conv_2023"))
    for seqs in (8, 64):
        limits = ServerLimits(8192, seqs)
        part = part_of(trace, range(min(20_000, len(trace))))
        deployment = deployment_of(limits, part)
        (ours,) = in_turn(rounds, partial(simulate, part, deployment, ASSUMED))
        done = simulate(part, deployment, ASSUMED)
        print(
            f"simulator, {len(part):,} requests, {seqs} seats, "
            f"{done.stats.num_executions:,} steps: {ours:.2f} s for {done.end_s:,.0f} s of traffic"
        )


def plain_read(file: Path) -> int:
    with file.open(newline="") as stream:
        rows = csv.reader(stream)
        next(rows)
        columns = [(float(a), int(p), int(o)) for a, p, o in rows]
    return len(columns)


def bench_reader(rounds: int, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.csv"
        with file.open("w") as stream:
            stream.write("arrival_s,prompt_tokens,output_tokens\n")
            stream.writelines(
                f"{i / 100:.2f},{1 + i * 7919 % 8000},{1 + i % 500}\n" for i in range(rows)
            )
        ours, plain = in_turn(rounds, partial(read_trace, file), partial(plain_read, file))
        done = subprocess.run(
            [sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=True
        )
        count, peak_kib = map(int, done.stdout.split())
        print(
            f"reader, {count:,} rows: {ours:.1f} s, csv.reader {plain:.1f} s, ratio "
            f"{ours / plain:.2f}; peak {peak_kib / 1024:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4_000_000)
    arguments = parser.parse_args()
    print(machine_line())
    print(version_line())
    bench_solver(arguments.rounds)
    bench_simulator(arguments.rounds)
    bench_reader(max(1, arguments.rounds // 3), arguments.rows)


if __name__ == "__main__":
    main()
