"""The sizes that a server really saw, from its /metrics: over HTTP, or from a file of that text.

nxbucket's servers count the tokens of each prefill step and the sequences of each decode step, with
bounds fine enough to choose buckets by. Of another vLLM server there are only the prompts' lengths,
in bounds of 1, 2, 5, 10, 20 and so on.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.choice.metrics_source import metrics_text
from nxbucket.toolkit.errors import EnvironmentProblem, TraceError

CHUNK_TOKENS = "nxbucket_prefill_chunk_tokens"
BATCH_SEQS = "nxbucket_decode_batch_seqs"
COMPUTED_TOKENS = "vllm:request_prefill_kv_computed_tokens"
PROMPT_TOKENS = "vllm:request_prompt_tokens"
EXECUTIONS = "nxbucket_program_executions_total"
PREFILL_PADDING = "nxbucket_prefill_padding_tokens"
DECODE_PADDING = "nxbucket_decode_padding_seqs"

MOST = 2.0**53
"""Where a float stops counting by ones."""


@dataclass(frozen=True)
class SizeHistogram:
    bounds: tuple[int, ...]
    """Ascending upper bounds, inclusive."""
    counts: tuple[int, ...]
    """Of each bound, not cumulative."""
    total: float
    """The exact sum of all sizes."""
    beyond: int = 0
    """How many were above the last bound."""

    @property
    def count(self) -> int:
        return sum(self.counts) + self.beyond

    def spread(self) -> dict[int, int]:
        """Size -> count: the counts of a bin evenly over its whole sizes, in integers.

        They add up to `counts` exactly. In a bin of one size that is the truth; in a wide one, as
        vLLM's are, it is an approximation, whose mean is not that of `total`. `beyond` is left out:
        nothing says how large those were.
        """
        sizes: dict[int, int] = {}
        low = min(0, self.bounds[0] - 1)
        for bound, count in zip(self.bounds, self.counts, strict=True):
            width = bound - low
            if count < width:  # at most one of each size; no walk through a bin of 100000
                sizes |= {low + -(-nth * width // count): 1 for nth in range(1, count + 1)}
            else:
                cumulative = [count * nth // width for nth in range(width + 1)]
                sizes |= {low + nth: b - a for nth, (a, b) in enumerate(pairwise(cumulative), 1)}
            low = bound
        return sizes


@dataclass(frozen=True)
class ServerMetrics:
    """Counted since the server started."""

    source: str
    chunk_tokens: SizeHistogram | None
    """Tokens of prefill steps, without padding; None if the server is not nxbucket's."""
    batch_seqs: SizeHistogram | None
    """Sequences of decode steps, without padding."""
    prompt_tokens: SizeHistogram | None
    """vLLM's, of finished requests: without what the prefix cache had, if it tells that."""
    prompt_tokens_metric: str | None
    executions: dict[str, int]
    """By program."""
    prefill_padding: dict[int, tuple[int, int]]
    """Bucket -> (steps, padding tokens)."""
    decode_padding: dict[int, tuple[int, int]]
    """Bucket -> (steps, padding rows)."""


def read_metrics(
    source: str, *, api_key: str | None = None, timeout_s: float = 10.0
) -> ServerMetrics:
    """`source`: a server's URL, with /metrics or without, or a file that holds the text.

    Raises UsageError, TraceError, or EnvironmentProblem without prometheus_client.
    """
    samples = _Samples(source, metrics_text(source, api_key=api_key, timeout_s=timeout_s))
    if not samples.names_with("nxbucket_", "vllm:"):
        raise TraceError(
            f"{source} has no metrics of nxbucket or vLLM",
            hint="the URL is that of a server; vLLM's --disable-log-stats leaves them out",
        )
    metric, prompts = _prompt_tokens(samples)
    metrics = ServerMetrics(
        source=source,
        chunk_tokens=samples.histogram(CHUNK_TOKENS),
        batch_seqs=samples.histogram(BATCH_SEQS),
        prompt_tokens=prompts,
        prompt_tokens_metric=metric,
        executions=samples.counts(EXECUTIONS, "program"),
        prefill_padding=samples.padding(PREFILL_PADDING),
        decode_padding=samples.padding(DECODE_PADDING),
    )
    steps = [h for h in (metrics.chunk_tokens, metrics.batch_seqs) if h is not None and h.count]
    if not steps and prompts is None and not any(metrics.executions.values()):
        raise TraceError(
            f"{source}: the server has served nothing yet",
            hint="ask again when it has had a day of its usual requests",
        )
    return metrics


def _prompt_tokens(samples: "_Samples") -> tuple[str | None, SizeHistogram | None]:
    for name in (COMPUTED_TOKENS, PROMPT_TOKENS):
        histogram = samples.histogram(name)
        if histogram is not None and histogram.count:
            return name, histogram
    return None, None


Labels = frozenset[tuple[str, str]]


class _Samples:
    """By name and labels. What is there twice, as in two servers' texts in one file, is added."""

    def __init__(self, source: str, text: str) -> None:
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError:
            raise EnvironmentProblem(
                "reading metrics takes prometheus_client, which is not installed",
                hint="pip install prometheus-client; nxbucket[cpu] has it",
            ) from None
        self._source = source
        self._samples: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples[sample.name][frozenset(sample.labels.items())] += sample.value
        except Exception as err:  # the parser lets through what Python raises at odd text
            raise TraceError(
                f"{source} is no text of Prometheus metrics: {show(str(err))}",
                hint="curl -s http://host:8000/metrics > metrics.txt saves it",
            ) from None

    def names_with(self, *prefixes: str) -> list[str]:
        return [name for name in self._samples if name.startswith(prefixes)]

    def counts(self, name: str, label: str) -> dict[str, int]:
        """Of a counter, by one of its labels; the other labels are added up."""
        counts: dict[str, int] = defaultdict(int)
        for labels, value in self._samples.get(name, {}).items():
            counts[dict(labels).get(label, "")] += self._whole(name, value)
        return dict(counts)

    def padding(self, name: str) -> dict[int, tuple[int, int]]:
        steps = self.counts(f"{name}_count", "bucket")
        padding = self.counts(f"{name}_sum", "bucket")
        wrong = [bucket for bucket in steps if not (bucket.isascii() and bucket.isdigit())]
        if wrong or steps.keys() != padding.keys():
            raise self._damaged(name, "its buckets are no sizes, or some lines are missing")
        return {
            int(bucket): (steps[bucket], padding[bucket])
            for bucket in sorted(steps, key=lambda b: (len(b), b))
        }

    def histogram(self, name: str) -> SizeHistogram | None:
        """Of all label sets together.

        Where one has coarser bounds than another, its counts go to the upper end of its bins.
        """
        buckets = self._samples.get(f"{name}_bucket")
        if buckets is None:
            return None
        series: dict[Labels, list[tuple[float, int]]] = defaultdict(list)
        for labels, value in buckets.items():
            bound = self._bound(name, dict(labels).get("le", ""))
            without_bound = frozenset((key, text) for key, text in labels if key != "le")
            series[without_bound].append((bound, self._whole(name, value)))
        counts: dict[float, int] = defaultdict(int)
        for points in series.values():
            self._add_bins(name, points, counts)
        beyond = counts.pop(math.inf)
        if not counts:
            raise self._damaged(name, "it has no bound but infinity")
        bounds = sorted(counts)
        return SizeHistogram(
            bounds=tuple(int(bound) for bound in bounds),
            counts=tuple(counts[bound] for bound in bounds),
            total=self._sum(name),
            beyond=beyond,
        )

    def _add_bins(
        self, name: str, points: Iterable[tuple[float, int]], counts: dict[float, int]
    ) -> None:
        points = sorted(points)
        if points[-1][0] != math.inf:
            raise self._damaged(name, "the line of le=+Inf is missing")
        before = 0
        for bound, cumulative in points:
            if cumulative < before:
                raise self._damaged(name, "its counts descend")
            counts[bound] += cumulative - before
            before = cumulative

    def _sum(self, name: str) -> float:
        sums = self._samples.get(f"{name}_sum")
        if sums is None:
            raise self._damaged(name, f"{name}_sum is missing")
        total = sum(sums.values())
        if not 0 <= total < math.inf:
            raise self._damaged(name, f"the sum of its sizes is {total}")
        return total

    def _bound(self, name: str, text: str) -> float:
        """A whole number: no size lies between 2 and 2.5."""
        try:
            bound = float(text)
        except ValueError:
            bound = math.nan
        if bound == math.inf:
            return bound
        if not 0 <= bound < MOST:
            raise self._damaged(name, f"le={show(text)} is no size")
        return math.floor(bound)

    def _whole(self, name: str, value: float) -> int:
        if not (0 <= value < MOST and value.is_integer()):
            raise self._damaged(name, f"{value} is no count")
        return int(value)

    def _damaged(self, name: str, why: str) -> TraceError:
        return TraceError(
            f"{self._source}: {name} cannot be read: {why}",
            hint="save the whole text again: curl -s http://host:8000/metrics > metrics.txt",
        )
