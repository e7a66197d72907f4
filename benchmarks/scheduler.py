"""Time per `schedule()` with 64 running decodes, ours against vLLM's own, by queue length.

    PYTHONPATH=tests python benchmarks/scheduler.py [--steps 200] [--waiting 10 1000 10000 100000]

Both schedulers take turns step by step in one process, so that a neighbour's load hits both. All
64 seats are taken: each step is a decode of 64 rows. Medians in microseconds.
"""

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path

from serve_fakes import Engine, SchedulerFactory, make_request
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from nxbucket.serve.scheduler import NeuronAsyncScheduler, NeuronScheduler

NUM_RUNNING = 64
PAIRS = [(Scheduler, NeuronScheduler), (AsyncScheduler, NeuronAsyncScheduler)]


def full_engine(factory: SchedulerFactory, cls: type[Scheduler], waiting: list[Request]) -> Engine:
    scheduler = factory.scheduler(
        cls,
        num_blocks=40_000,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=8192,
        max_model_len=8192,
    )
    engine = Engine(scheduler)
    engine.add(*(make_request(f"run{i}", 100, 8000) for i in range(NUM_RUNNING)))
    while len(scheduler.running) < NUM_RUNNING:
        engine.step()
    engine.run(4)
    engine.add(*waiting)
    return engine


def timed_schedule(engine: Engine) -> float:
    """Seconds in `schedule()`; the rest of the step is done but not counted."""
    scheduler = engine.scheduler
    original = scheduler.schedule
    spent = 0.0

    def schedule(throttle_prefills: bool = False):  # type: ignore[no-untyped-def]
        nonlocal spent
        start = time.perf_counter()
        output = original(throttle_prefills)
        spent = time.perf_counter() - start
        return output

    scheduler.schedule = schedule  # type: ignore[method-assign]
    row = engine.step()
    del scheduler.schedule
    assert len(row.tokens) == NUM_RUNNING
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 1_000, 10_000, 100_000])
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # vLLM reports every engine config it makes

    print(f"{NUM_RUNNING} running decodes, median of {args.steps} interleaved steps, microseconds")
    print(f"{'waiting':>8} {'mode':>6} {'vLLM':>8} {'nxbucket':>9} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder:
        factory = SchedulerFactory.in_folder(Path(folder))
        for num_waiting in args.waiting:
            for stock, ours in PAIRS:
                engines = []
                for cls in (stock, ours):
                    waiting = [make_request(f"wait{i}", 20, 100) for i in range(num_waiting)]
                    engines.append(full_engine(factory, cls, waiting))
                times: list[list[float]] = [[], []]
                for _ in range(args.steps):
                    for engine, spent in zip(engines, times, strict=True):
                        spent.append(timed_schedule(engine) * 1e6)
                theirs, mine = (statistics.median(spent) for spent in times)
                mode = "async" if stock is AsyncScheduler else "sync"
                print(
                    f"{num_waiting:>8} {mode:>6} {theirs:>8.0f} {mine:>9.0f} {mine / theirs:>6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
