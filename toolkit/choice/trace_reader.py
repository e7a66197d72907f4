"""Traces from files, in the forms that people have them, and the few that nxbucket ships.

CSV with a header, or JSON lines; gzip or not. A request is a row. Only the prompt's length has to
be there; `NAMES` of trace_columns.py has the names by which a column is known.
"""

import difflib
import importlib.resources
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.trace_csv import read_csv
from nxbucket.toolkit.choice.trace_file import Block, fault, open_trace
from nxbucket.toolkit.choice.trace_json import read_json_lines
from nxbucket.toolkit.choice.vllm_log import (
    HOW_TO_LOG,
    is_vllm_log,
    looks_like_text_log,
    read_vllm_log,
)
from nxbucket.toolkit.errors import TraceError, UsageError

_SHIPPED_ENDING = ".csv.gz"


def read_trace(file: Path, progress: Callable[[int], None] | None = None) -> Trace:
    """Raises TraceError at the first fault, with its line, and UsageError if there is no file.

    `progress` is told the number of rows so far, now and then.
    """
    progress = progress or (lambda rows: None)
    with open_trace(file) as all_blocks:
        rest = _without_top_comments(all_blocks)
        first = next(rest, None)
        if first is None:
            raise TraceError(f"{file} is empty", hint="a trace has one row for each request")
        blocks = chain([first], rest)
        # A server's output begins with lines that are no JSON, whatever the formatter.
        if is_vllm_log(first.text):
            return read_vllm_log(file, blocks, progress)
        if first.text.startswith("{"):
            return read_json_lines(file, blocks, progress).trace()
        _refuse_other_forms(file, first)
        return read_csv(file, blocks, progress).trace()


def _without_top_comments(blocks: Iterator[Block]) -> Iterator[Block]:
    """The file from its first line that is neither blank nor begins with #."""
    for block in blocks:
        skipped = 0
        for number, line in block.numbered_lines():
            text = line.strip()
            if text and not text.startswith("#"):
                yield Block(block.text[skipped:].lstrip(" \t"), number)
                yield from blocks
                return
            skipped += len(line) + 1


def _refuse_other_forms(file: Path, first: Block) -> None:
    if looks_like_text_log(first.text):
        raise fault(
            file,
            first.first_line,
            "this is vLLM's log as text; it is read as JSON lines",
            HOW_TO_LOG,
        )
    if first.text.startswith("["):
        raise fault(
            file,
            first.first_line,
            "this is a JSON list; JSON lines are wanted, one object per line",
            f"jq -c '.[]' < {file.name} > trace.jsonl",
        )


def shipped_traces() -> dict[str, Path]:
    """By name; bucket_profiles/traces/README.md says where they are from."""
    folder = Path(str(importlib.resources.files("nxbucket.bucket_profiles") / "traces"))
    files = sorted(folder.glob(f"*{_SHIPPED_ENDING}"))
    return {file.name.removesuffix(_SHIPPED_ENDING): file for file in files}


def find_trace(given: str) -> Path:
    """The file of that name, else the shipped trace. Raises UsageError if it is neither."""
    shipped = shipped_traces()
    try:
        if Path(given).exists():
            return Path(given)
    except OSError:  # a name that is too long
        pass
    if given in shipped:
        return shipped[given]
    near = difflib.get_close_matches(given, shipped, n=1)
    hint = f"did you mean {near[0]}?" if near else "name a file, or a trace that is shipped."
    raise UsageError(f"no such trace: {show(given)}", hint=f"{hint} Shipped: {', '.join(shipped)}")
