"""Requests that a server has seen, or would see: when they came, and how long they were."""

from array import array
from dataclasses import dataclass

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
