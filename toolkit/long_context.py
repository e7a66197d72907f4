"""The two lists for long contexts: rules over plain values, by target.

Their items' types and signs are checked as those of every bucket list (buckets.py).
"""

from collections.abc import Sequence
from math import ceil

from nxbucket.toolkit.buckets import check_items, check_order
from nxbucket.toolkit.errors import Problem
from nxbucket.toolkit.validate import Limits

NEURON_SEGMENT_SIZES = (512, 1024, 2048, 4096, 8192)
"""What AWS's plugin accepts. Target cpu takes any multiple of block_size."""

NEURON_CONTEXT_MULTIPLE = 128
"""AWS's rule. On target cpu a context is whole KV blocks."""


def check_kv_segment_sizes(values: Sequence[object], key: str, limits: Limits) -> list[Problem]:
    """One size: whole KV blocks, and no longer than a sequence can be."""
    if not values:
        hint = "give one size, or delete the line to read prior KV in one piece"
        return [Problem("bucket-empty", f"{key} is empty", hint, limits.file, key=key)]
    if problems := check_items(values, limits.file, key):
        return problems
    if len(values) > 1:
        message = f"{key} has {len(values)} values; only one value today"
        hint = f"keep one, e.g. [{values[-1]}]"
        return [Problem("segment-one-value", message, hint, limits.file, key=f"{key}[1]")]
    size, block, length = int(str(values[0])), limits.block_size, limits.max_model_len
    at = f"{key}[0]"
    if limits.target not in (None, "cpu") and size not in NEURON_SEGMENT_SIZES:
        sizes = ", ".join(map(str, NEURON_SEGMENT_SIZES))
        message = f"{at} is {size}; target {limits.target} takes {sizes}"
        return [Problem("segment-size", message, f"one of {sizes}", limits.file, key=at)]
    if block is None:
        return []
    if size % block:
        message = f"{at} is {size}, no multiple of {limits.named('block_size')}"
        return [Problem("segment-size", message, _nearest(size, block), limits.file, key=at)]
    if length is not None and size > (longest := ceil(length / block) * block):
        message = f"{at} is {size}, above {limits.named('max_model_len')}: it would never be filled"
        hint = f"give {longest} or less, or delete the line"
        return [Problem("segment-size", message, hint, limits.file, key=at)]
    return []


def check_context_lengths(values: Sequence[object], key: str, limits: Limits) -> list[Problem]:
    """Ascending, each below max_model_len, which every plan has as its last one anyway."""
    if not values:
        hint = "give at least one length, or delete the line: max_model_len is always there"
        return [Problem("bucket-empty", f"{key} is empty", hint, limits.file, key=key)]
    problems = [*check_items(values, limits.file, key), *check_order(values, limits.file, key)]
    cpu = limits.target in (None, "cpu")
    multiple = limits.block_size if cpu else NEURON_CONTEXT_MULTIPLE
    reason = "block_size" if cpu else f"what target {limits.target} takes"
    for index, value in enumerate(values):
        if type(value) is not int or value < 1:
            continue
        at, length = f"{key}[{index}]", limits.max_model_len
        if length is not None and value >= length:
            message = f"{at} is {value}; it must be below {limits.named('max_model_len')}"
            hint = f"remove {value}: programs for max_model_len are added to the list"
            problems.append(Problem("context-length", message, hint, limits.file, key=at))
        elif multiple is not None and value % multiple:
            message = f"{at} is {value}, no multiple of {multiple}, {reason}"
            hint = _nearest(value, multiple)
            problems.append(Problem("context-length", message, hint, limits.file, key=at))
    return problems


def _nearest(value: int, multiple: int) -> str:
    below, above = value // multiple * multiple, ceil(value / multiple) * multiple
    return f"nearest: {below} or {above}" if below else f"nearest: {above}"
