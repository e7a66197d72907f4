"""The histograms of true sizes: their bounds, and that a server's own follow its lists."""

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from nxbucket.compile.program import Bucket
from nxbucket.serve.metrics import ProgramMetrics
from nxbucket.serve.size_bounds import MOST_BOUNDS, size_bounds
from nxbucket.toolkit.choice.metrics_reader import read_metrics

BUCKETS = st.sets(st.integers(1, 200_000), min_size=1, max_size=12)


@given(BUCKETS, st.sampled_from([0, 32]))
def test_every_bucket_is_a_bound_and_there_are_few(buckets: set[int], exact_up_to: int) -> None:
    bounds = size_bounds(buckets, exact_up_to)
    assert len(bounds) <= MOST_BOUNDS
    assert list(bounds) == sorted(set(bounds))
    assert buckets <= set(bounds)
    assert bounds[-1] == max(buckets)
    assert set(range(1, min(exact_up_to, max(buckets)) + 1)) <= set(bounds)


def test_bounds_are_the_finest_multiples_that_fit() -> None:
    assert size_bounds([128, 512, 2048]) == tuple(range(32, 2049, 32))
    assert size_bounds([1, 2, 48], 32) == tuple(range(1, 49))
    assert size_bounds([1, 100], 32) == (*range(1, 33), *range(36, 101, 4))
    assert size_bounds(range(1, 101)) == tuple(range(1, 101))


def buckets_of(prefill: list[int], decode: list[int]) -> list[Bucket]:
    long = [Bucket("decode", size, 1024) for size in decode]
    return [*(Bucket("prefill", s) for s in prefill), *(Bucket("decode", s) for s in decode), *long]


def test_true_sizes_can_be_read_back(tmp_path: Path) -> None:
    """And a server made anew in the same process has its own bounds, and counts from 0."""
    ProgramMetrics(buckets_of([4096], [64]))
    metrics = ProgramMetrics(buckets_of([32, 64], [1, 4]))
    for tokens in (32, 33, 64, 64):
        metrics.ran(Bucket("prefill", 32 if tokens == 32 else 64), tokens)
    for rows in (1, 3, 3):
        metrics.ran(Bucket("decode", 1 if rows == 1 else 4, 1024), rows)
    saved = tmp_path / "metrics.txt"
    saved.write_bytes(generate_latest())
    read = read_metrics(str(saved))
    assert read.chunk_tokens is not None and read.batch_seqs is not None
    assert read.chunk_tokens.bounds == tuple(range(1, 65))
    assert read.chunk_tokens.spread() == {32: 1, 33: 1, 64: 2}
    assert read.chunk_tokens.total == 193
    assert read.batch_seqs.bounds == (1, 2, 3, 4)
    assert read.batch_seqs.spread() == {1: 1, 3: 2}
    assert read.prefill_padding == {32: (1, 0), 64: (3, 31)}
    assert read.decode_padding == {1: (1, 0), 4: (2, 2)}
    assert read.executions["decode_b4_ctx1024"] == 2


ENGINE = """
from nxbucket.compile.program import Bucket
from nxbucket.serve.metrics import ProgramMetrics
buckets = [Bucket("prefill", 64), Bucket("decode", 4)]
for _ in range(2):
    ProgramMetrics(buckets).ran(Bucket("prefill", 64), 50)
"""
FRONT_END = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_the_front_end_adds_up_what_the_engines_processes_count(tmp_path: Path) -> None:
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    printed = ""
    for script in (ENGINE, ENGINE, FRONT_END):
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    saved = tmp_path / "metrics.txt"
    saved.write_text(printed)
    read = read_metrics(str(saved))
    assert read.chunk_tokens is not None and read.batch_seqs is not None
    assert read.chunk_tokens.spread() == {50: 4}
    assert read.batch_seqs.count == 0
