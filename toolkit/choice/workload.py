"""What bucket lists are chosen for: how many steps of each size a workload takes.

Prefill: a prompt, less what the prefix cache has, is read in chunks of max_num_batched_tokens and a
rest. The lists change neither, so the sizes are a property of the trace. Decode: how many requests
decode at once depends on how long steps take, so it comes from a simulation, or from a server that
counted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, repeat
from operator import sub
from typing import Any

from nxbucket.compile.program import Phase
from nxbucket.toolkit.buckets import get_bucket_for_count
from nxbucket.toolkit.choice.metrics_reader import SizeHistogram
from nxbucket.toolkit.choice.trace import Trace, usable_cache

Sizes = Mapping[int, int]
"""Real tokens, or sequences, of a step -> steps."""
Lists = Mapping[Phase, Sequence[int]]


@dataclass(frozen=True)
class ServerLimits:
    """Of the server that lists are chosen for, or that is simulated."""

    max_num_batched_tokens: int
    """No step is longer: min(max_num_batched_tokens, max_model_len)."""
    max_num_seqs: int
    max_model_len: int | None = None
    """None: as long as the trace asks for."""
    block_size: int = 32
    num_kv_blocks: int | None = None
    """With the null block; None: enough for max_num_seqs of the longest requests."""
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class StepSizes:
    """Steps by size, and what they compute in all.

    A server counts sizes in bins. Its steps stand at their bin's upper bound, so that none is taken
    for shorter than it was, and `real`, the exact sum, is less than that of the bounds.
    """

    counts: Sizes
    real: int

    @classmethod
    def exactly(cls, counts: Sizes) -> "StepSizes":
        return cls(counts, sum(size * count for size, count in counts.items()))

    @classmethod
    def at_bounds(cls, histogram: SizeHistogram) -> "StepSizes":
        pairs = zip(histogram.bounds, histogram.counts, strict=True)
        counts = {bound: count for bound, count in pairs if count}
        return cls(counts, round(histogram.total))


@dataclass(frozen=True)
class Prompts:
    """`refused`: prompts that leave no room for an answer; a server refuses them, too."""

    chunks: StepSizes
    refused: int


def chunk_sizes(trace: Trace, limits: ServerLimits) -> Prompts:
    """Prefill steps by their real tokens."""
    prompts: Sequence[int] = trace.prompt_tokens
    to_compute: Iterable[int] = prompts
    if trace.cached_tokens is not None and limits.enable_prefix_caching:
        cached = map(usable_cache, prompts, trace.cached_tokens, repeat(limits.block_size))
        to_compute = map(sub, prompts, cached)
    fits = len(prompts)
    if (longest := limits.max_model_len) is not None:
        to_compute = compress(to_compute, (prompt < longest for prompt in prompts))
        fits = sum(prompt < longest for prompt in prompts)
    chunks = chunked(Counter(to_compute), limits.max_num_batched_tokens)
    return Prompts(StepSizes.exactly(chunks), len(prompts) - fits)


def chunked(lengths: Sizes, most: int) -> Counter[int]:
    """Each length in as few pieces as can be, of `most` and a rest."""
    chunks: Counter[int] = Counter()
    for length, count in lengths.items():
        whole, rest = divmod(length, most)
        if whole:
            chunks[most] += whole * count
        if rest:
            chunks[rest] += count
    return chunks


@dataclass(frozen=True)
class Use:
    """What a list makes of a workload: in tokens for prefill, in sequences for decode."""

    buckets: tuple[int, ...]
    steps: int
    real: int
    executed: int
    """Real and padding."""

    @property
    def padding_share(self) -> float:
        """Padding of all that is executed."""
        return 1 - self.real / self.executed if self.executed else 0.0

    def as_json(self) -> dict[str, Any]:
        return {"buckets": list(self.buckets), "padding_share": round(self.padding_share, 6)}


def use_of(sizes: StepSizes, buckets: Sequence[int]) -> Use:
    """Raises ValueError for a size above the last bucket."""
    executed = steps = 0
    for size, count in sizes.counts.items():
        steps += count
        executed += get_bucket_for_count(size, buckets) * count
    return Use(tuple(buckets), steps, sizes.real, executed)


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
