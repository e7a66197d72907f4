"""What programs and scheduler did, on vLLM's own /metrics.

The engine's processes write prometheus_client's multiprocess files (the launcher sets
PROMETHEUS_MULTIPROC_DIR before anything imports the library); the front end adds them up.
"""

from collections.abc import Callable, Iterable, Sequence

import torch._dynamo.utils
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from nxbucket.compile.program import Bucket
from nxbucket.serve.size_bounds import EXACT_DECODE_SIZES, size_bounds

PADDING_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_prefill_padding = Histogram(
    "nxbucket_prefill_padding_tokens",
    "Padding tokens of a prefill step, by bucket (tokens).",
    ["bucket"],
    buckets=PADDING_BUCKETS,
)
_decode_padding = Histogram(
    "nxbucket_decode_padding_seqs",
    "Padding rows of a decode step, by bucket (sequences).",
    ["bucket"],
    buckets=PADDING_BUCKETS,
)
_executions = Counter("nxbucket_program_executions", "Executions of a bound program.", ["program"])
_compiles = Counter(
    "nxbucket_serve_compiles",
    "Graphs that torch.compile or XLA compiled while serving. Anything but 0 is a bug.",
)
_state = Gauge(
    "nxbucket_scheduler_state",
    "1 for the scheduler's state after its last step, 0 for the others.",
    ["state"],
    multiprocess_mode="mostrecent",
)
_held_back = Gauge(
    "nxbucket_held_back_requests",
    "Waiting requests that the scheduler did not show to vLLM's in its last step.",
    multiprocess_mode="mostrecent",
)
_sizes: dict[str, Histogram] = {}
"""By name. Their bounds are the server's own, and a name can be registered once in a process."""


def _size_histogram(name: str, documentation: str, bounds: Sequence[int]) -> Histogram:
    """That of the server before, in this process, goes: its bounds may be others."""
    if before := _sizes.pop(name, None):
        REGISTRY.unregister(before)
    _sizes[name] = Histogram(name, documentation, buckets=bounds)
    return _sizes[name]


class ProgramMetrics:
    """Written by the runner, where a program really ran."""

    def __init__(
        self, buckets: Iterable[Bucket], compiles_of_loader: Callable[[], int] = lambda: 0
    ) -> None:
        """Made when all programs are bound: what is compiled from then on is counted."""
        sizes: dict[str, set[int]] = {"prefill": set(), "decode": set()}
        for bucket in buckets:
            sizes[bucket.phase].add(bucket.size)
        self._chunk_tokens = _size_histogram(
            "nxbucket_prefill_chunk_tokens",
            "Tokens of a prefill step, without padding.",
            size_bounds(sizes["prefill"]),
        )
        self._batch_seqs = _size_histogram(
            "nxbucket_decode_batch_seqs",
            "Sequences of a decode step, without padding.",
            size_bounds(sizes["decode"], EXACT_DECODE_SIZES),
        )
        self._compiles_of_loader = compiles_of_loader
        self._seen = self._compiles_so_far()
        _compiles.inc(0)

    def ran(self, bucket: Bucket, count: int) -> None:
        """`count`: the real tokens of a prefill, the real sequences of a decode."""
        is_prefill = bucket.phase == "prefill"
        padding = _prefill_padding if is_prefill else _decode_padding
        padding.labels(bucket.size).observe(bucket.size - count)
        (self._chunk_tokens if is_prefill else self._batch_seqs).observe(count)
        self._count(bucket.name)

    def _count(self, program: str) -> None:
        _executions.labels(program).inc()
        now = self._compiles_so_far()
        if now != self._seen:
            _compiles.inc(now - self._seen)
            self._seen = now

    def _compiles_so_far(self) -> int:
        return compiles_so_far() + self._compiles_of_loader()


def compiles_so_far() -> int:
    """Frames dynamo captured and graphs inductor took on in this process."""
    counters = torch._dynamo.utils.counters
    return int(counters["frames"]["total"]) + int(counters["aot_autograd"]["total"])


class SchedulerMetrics:
    """Written by the scheduler, once per step, and only what changed."""

    def __init__(self, states: Sequence[str]) -> None:
        self._states = tuple(states)
        self._last: tuple[str, int] | None = None

    def record(self, state: str, num_held_back: int) -> None:
        if (state, num_held_back) == self._last:
            return
        self._last = (state, num_held_back)
        for name in self._states:
            _state.labels(name).set(name == state)
        _held_back.set(num_held_back)
