"""Bucket lists: the rules they keep, the defaults, and the choice of a bucket.

Plain functions over plain values. A list is never sorted, deduplicated or cut here: what breaks a
rule is reported, because a repaired list would build other programs than the file says.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from nxbucket.toolkit.errors import Problem

SMALLEST_DEFAULT_PREFILL_BUCKET = 128


def get_bucket_for_count(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `count`; `buckets` ascend."""
    at = bisect_left(buckets, count)
    if at == len(buckets):
        raise ValueError(f"no bucket holds {count}: {list(buckets)}")
    return buckets[at]


def get_default_num_batched_tokens_buckets(max_num_batched_tokens: int) -> list[int]:
    """Powers of two from 128; the maximum closes the list when it is no power of two."""
    return _powers_of_two(SMALLEST_DEFAULT_PREFILL_BUCKET, max_num_batched_tokens)


def get_default_num_seqs_buckets(max_num_seqs: int) -> list[int]:
    """Powers of two from 1; the maximum closes the list when it is no power of two."""
    return _powers_of_two(1, max_num_seqs)


def _powers_of_two(first: int, maximum: int) -> list[int]:
    buckets = []
    size = first
    while size < maximum:
        buckets.append(size)
        size *= 2
    return [*buckets, maximum]


def check_bucket_list(
    values: Sequence[object],
    *,
    file: Path,
    key: str,
    last: int | None,
    last_rule: str,
    last_hint: str | None = None,
) -> list[Problem]:
    """Every rule a list breaks. `last` is what it must end in, None when that is not known.

    `last_rule` says where `last` comes from, in the words of the file.
    """
    if not values:
        ending = "" if last is None else f"; its last value must be {last} ({last_rule})"
        hint = "give at least one bucket, or delete the line to use the default list"
        return [Problem("bucket-empty", f"{key} is empty{ending}", hint, file, key=key)]
    return [
        *check_items(values, file, key),
        *check_order(values, file, key),
        *_check_last(values, file, key, last=last, last_rule=last_rule, last_hint=last_hint),
    ]


def _is_bucket(value: object) -> bool:
    # bool is an int in Python; `true` in a list of sizes is a mistake all the same.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_items(values: Sequence[object], file: Path, key: str) -> list[Problem]:
    """Each item is a positive integer."""
    problems = []
    for index, value in enumerate(values):
        if _is_bucket(value):
            continue
        at = f"{key}[{index}]"
        if isinstance(value, int) and not isinstance(value, bool):
            message = f"{at} is {value}; a bucket is a positive integer"
            hint = f"remove {value}; sizes start at 1"
            problems.append(Problem("bucket-not-positive", message, hint, file, key=at))
        else:
            message = f"{at} is {describe(value)}, integer wanted"
            hint = "write a plain decimal integer, without quotes"
            problems.append(Problem("bucket-not-integer", message, hint, file, key=at))
    return problems


def check_order(values: Sequence[object], file: Path, key: str) -> list[Problem]:
    """The first pair out of order. Items that are no integers are reported on their own."""
    sizes = [(i, v) for i, v in enumerate(values) if isinstance(v, int) and _is_bucket(v)]
    for (before, smaller), (index, size) in pairwise(sizes):
        if size > smaller:
            continue
        ascending = sorted({v for _, v in sizes})
        verb = "repeats" if size == smaller else "is below"
        message = (
            f"{key} must ascend strictly: {size} at index {index} {verb} {smaller} "
            f"at index {before}"
        )
        hint = f"in order, and each once: {ascending}" if len(ascending) <= 32 else "sort the list"
        return [
            Problem("bucket-not-ascending", message, hint, file, key=f"{key}[{index}]"),
        ]
    return []


def _check_last(
    values: Sequence[object],
    file: Path,
    key: str,
    *,
    last: int | None,
    last_rule: str,
    last_hint: str | None,
) -> list[Problem]:
    if last is None or not all(map(_is_bucket, values)):
        return []
    largest = max(v for v in values if isinstance(v, int))
    # With the list out of order too, the largest value is what the person meant to be last.
    if largest == last:
        return []
    relation = "above" if largest > last else "below"
    message = (
        f"{key} ends in {largest}, which is {relation} {last} ({last_rule}); "
        f"its last value must be {last}"
    )
    hint = last_hint or f"make {last} the last value"
    index = list(values).index(largest)
    return [Problem("bucket-last", message, hint, file, key=f"{key}[{index}]")]


def describe(value: object) -> str:
    """A value and its type, as an error names them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean {str(value).lower()}"
    if isinstance(value, str):
        return f'string "{show(value)}"' if " " in value else f"string {show(value)}"
    if isinstance(value, int | float):
        return f"{'integer' if isinstance(value, int) else 'float'} {value}"
    return "a mapping" if isinstance(value, dict) else "a list"


def show(text: str, limit: int = 60) -> str:
    """Text from a file, cut to size and with nothing in it that could move a terminal's cursor."""
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return cut if cut.isprintable() and cut else repr(cut)
