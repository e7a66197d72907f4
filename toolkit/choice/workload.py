"""What bucket lists are chosen for: how many steps of each size a workload takes.

Prefill: a prompt, less what the prefix cache has, is read in chunks of max_num_batched_tokens and a
rest. The lists change neither, so the sizes are a property of the trace. Decode: how many requests
decode at once depends on how long steps take, so it comes from a simulation, or from a server that
counted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from operator import sub

from nxbucket.toolkit.buckets import get_bucket_for_count
from nxbucket.toolkit.choice.metrics_reader import ServerMetrics
from nxbucket.toolkit.choice.trace import Trace

Sizes = Mapping[int, int]
"""Real tokens, or sequences, of a step -> steps."""


@dataclass(frozen=True)
class Prompts:
    """`refused`: prompts that leave no room for an answer; a server refuses them, too."""

    chunks: Sizes
    refused: int


def chunk_sizes(
    trace: Trace,
    max_num_batched_tokens: int,
    max_model_len: int | None,
    rows: range | None = None,
) -> Prompts:
    """Prefill steps by their real tokens. `rows`: those of the trace; all without it."""
    part = slice(None) if rows is None else slice(rows.start, rows.stop)
    prompts: Sequence[int] = trace.prompt_tokens[part]
    to_compute: Iterable[int] = prompts
    if trace.cached_tokens is not None:
        # The last token of a prompt is computed whatever the cache has.
        cached = map(min, trace.cached_tokens[part], (prompt - 1 for prompt in prompts))
        to_compute = map(sub, prompts, cached)
    fits = len(prompts)
    if max_model_len is not None:
        to_compute = compress(to_compute, (prompt < max_model_len for prompt in prompts))
        fits = sum(prompt < max_model_len for prompt in prompts)
    return Prompts(chunked(Counter(to_compute), max_num_batched_tokens), len(prompts) - fits)


def chunked(lengths: Sizes, max_num_batched_tokens: int) -> Counter[int]:
    chunks: Counter[int] = Counter()
    for length, count in lengths.items():
        whole, rest = divmod(length, max_num_batched_tokens)
        if whole:
            chunks[max_num_batched_tokens] += whole * count
        if rest:
            chunks[rest] += count
    return chunks


def chunk_sizes_of_server(
    metrics: ServerMetrics, max_num_batched_tokens: int
) -> tuple[Sizes | None, str]:
    """What a running server counted, and which of its metrics that is."""
    if metrics.chunk_tokens is not None:
        # Of another server's last bucket, if limits have changed since.
        sizes = metrics.chunk_tokens.spread()
        return chunked(sizes, max_num_batched_tokens), "nxbucket_prefill_chunk_tokens"
    if metrics.prompt_tokens is not None:
        sizes = metrics.prompt_tokens.spread()
        return chunked(sizes, max_num_batched_tokens), metrics.prompt_tokens_metric or "vllm"
    return None, ""


@dataclass(frozen=True)
class Use:
    """What a list of buckets makes of a workload."""

    buckets: tuple[int, ...]
    steps: int
    real: int
    executed: int

    @property
    def padding_share(self) -> float:
        """Padding of all that is executed."""
        return 1 - self.real / self.executed if self.executed else 0.0


def use_of(sizes: Sizes, buckets: Sequence[int]) -> Use:
    """Raises ValueError for a size above the last bucket."""
    real = executed = steps = 0
    for size, count in sizes.items():
        steps += count
        real += size * count
        executed += get_bucket_for_count(size, buckets) * count
    return Use(tuple(buckets), steps, real, executed)


def percentile_list(sizes: Sizes, count: int, grid: int, last: int) -> tuple[int, ...]:
    """What one does by hand: buckets at every 1/count of the steps, rounded up to the grid."""
    ordered = sorted(sizes)
    before = list(accumulate(sizes[size] for size in ordered))
    total = before[-1] if before else 0
    at = 0
    edges = {last}
    for i in range(1, count):
        while at < len(ordered) - 1 and before[at] * count < total * i:
            at += 1
        if ordered:
            edges.add(min(last, rounded_up(ordered[at], grid)))
    return tuple(sorted(edges))


def rounded_up(size: int, grid: int) -> int:
    return -(-size // grid) * grid
