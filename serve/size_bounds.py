"""The bins in which a server counts the sizes of its steps. No vLLM, no torch."""

from collections.abc import Iterable

MOST_BOUNDS = 64
EXACT_DECODE_SIZES = 32
"""Batches up to this size are counted each on its own."""


def size_bounds(buckets: Iterable[int], exact_up_to: int = 0) -> tuple[int, ...]:
    """Bounds that tell sizes apart: every bucket, and the multiples of the finest step that fits.

    The step is a power of two, as good bucket sizes are multiples of one. Every size up to
    `exact_up_to` is a bound, too. There are more than MOST_BOUNDS only where the buckets and those
    sizes alone are more.
    """
    buckets = sorted(buckets)
    largest = buckets[-1]
    step = 1
    while True:
        exact = range(1, min(exact_up_to, largest) + 1)
        bounds = sorted({*exact, *range(step, largest, step), *buckets})
        if len(bounds) <= MOST_BOUNDS or step >= largest:
            return tuple(bounds)
        step *= 2
