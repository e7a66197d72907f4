"""Requests that a server has seen, or would see: when they came, and how long they were."""

from array import array
from dataclasses import dataclass, replace

MAX_TOKENS = 100_000_000
"""More than any request has; a larger number is a fault of the trace."""


@dataclass(frozen=True)
class Trace:
    """One entry per request in each column, in order of arrival; a column that is None is unknown.

    Columns are arrays of 4 bytes a number (8 for times), so that millions of requests fit.
    """

    name: str
    """The file, as a person would name it."""
    prompt_tokens: "array[int]"
    output_tokens: "array[int] | None" = None
    arrival_s: "array[float] | None" = None
    """Seconds since the first request; never descending."""
    cached_tokens: "array[int] | None" = None
    """Prompt tokens that the prefix cache had."""
    max_tokens: "array[int] | None" = None
    """What the client allowed, of which `output_tokens` is what came."""
    notes: tuple[str, ...] = ()
    """What a person should know of how the file was read."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def can_be_replayed(self) -> bool:
        return self.arrival_s is not None and self.output_tokens is not None


def usable_cache(prompt_tokens: int, cached_tokens: int, block_size: int) -> int:
    """What of a prompt need not be computed: whole blocks, and never all of it.

    As vLLM does: the last token is computed whatever the cache has, since its output is wanted.
    """
    return min(cached_tokens, prompt_tokens - 1) // block_size * block_size


def share_of(trace: Trace, servers: int) -> Trace:
    """What one of `servers` gets of the traffic of all: each of them in turn."""
    return trace if servers == 1 else part_of(trace, range(0, len(trace), servers))


def part_of(trace: Trace, rows: range) -> Trace:
    """Some rows as a trace of its own, its clock starting with its first request."""
    part = slice(rows.start, rows.stop, rows.step)
    arrivals = trace.arrival_s[part] if trace.arrival_s is not None else None
    if arrivals:
        first = arrivals[0]
        for i, arrival in enumerate(arrivals):
            arrivals[i] = arrival - first
    return replace(
        trace,
        prompt_tokens=trace.prompt_tokens[part],
        output_tokens=None if trace.output_tokens is None else trace.output_tokens[part],
        arrival_s=arrivals,
        cached_tokens=None if trace.cached_tokens is None else trace.cached_tokens[part],
        max_tokens=None if trace.max_tokens is None else trace.max_tokens[part],
    )
