"""A trace as JSON lines: our keys and their aliases, OpenAI's responses, and Mooncake's."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.choice.trace_columns import Columns, Role, Rows, find_columns
from nxbucket.toolkit.choice.trace_file import Block, fault
from nxbucket.toolkit.errors import TraceError

_DETAILS = ("prompt_tokens_details", "input_tokens_details")


def read_json_lines(file: Path, blocks: Iterator[Block], progress: Callable[[int], None]) -> Rows:
    reader: _Reader | None = None
    for block in blocks:
        for number, line in block.numbered_lines():
            if not line or line.isspace():
                continue
            flat = _flat(parse_object(file, number, line))
            if reader is None:
                reader = _Reader(file, flat, number)
            reader.add(flat, number)
        if reader is not None:
            progress(len(reader.rows))
    assert reader is not None, "the caller has seen a first line"
    return reader.finish()


def parse_object(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as err:
        hint = "one JSON object per line is wanted: jq -c . writes it so"
        raise fault(file, number, f"column {err.colno}: not JSON: {err.msg}", hint) from None
    except (ValueError, RecursionError) as err:
        hint = "one JSON object per line is wanted, with a few numbers in it"
        raise fault(file, number, f"JSON that cannot be read: {err}", hint) from None
    if not isinstance(value, dict):
        hint = "one JSON object per line is wanted; jq -c '.[]' unpacks a list"
        raise fault(file, number, "no JSON object", hint)
    return value


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """With the keys of `usage` as usage.prompt_tokens and so on, where OpenAI has the numbers."""
    usage = row.get("usage")
    if not isinstance(usage, dict):
        return row
    flat = {key: value for key, value in row.items() if key != "usage"}
    for key, value in usage.items():
        if key in _DETAILS and isinstance(value, dict):
            flat |= {f"usage.{key}.{inner}": number for inner, number in value.items()}
        else:
            flat[f"usage.{key}"] = value
    return flat


class _Reader:
    """Every row must have what the first one has, except `cached_tokens`.

    vLLM leaves prompt_tokens_details out of a response to a prompt that the prefix cache had
    nothing of.
    """

    def __init__(self, file: Path, first: dict[str, Any], line: int) -> None:
        found = find_columns(list(first), file, line, noun="key")
        self._file = file
        self._first_line = line
        self._wanted = set(found.at) - {"cached"}
        self._roles: list[Role] = [role for role in found.at if role != "cached"] + ["cached"]
        self._keys: dict[tuple[str, ...], dict[Role, str]] = {}
        self._any_cached = False
        names: dict[Role, str] = {"cached": "cached_tokens", **found.names}
        at = {role: index for index, role in enumerate(self._roles)}
        how = f"sort the lines: jq -sc 'sort_by(.{names.get('arrival')})[]' < {file.name}"
        self.rows = Rows(file, Columns(at, names, found.milliseconds), how)

    def add(self, row: dict[str, Any], line: int) -> None:
        keys = tuple(row)
        names = self._keys.get(keys)
        if names is None:
            names = self._keys[keys] = self._names(keys, line)
        cached = row[names["cached"]] if "cached" in names else None
        self._any_cached |= cached is not None
        cells = [row[names[role]] for role in self._roles[:-1]]
        self.rows.add([*cells, 0 if cached is None else cached], line)

    def _names(self, keys: tuple[str, ...], line: int) -> dict[Role, str]:
        columns = find_columns(keys, self._file, line, noun="key")
        found = set(columns.at) - {"cached"}
        if found == self._wanted and columns.milliseconds == self.rows.columns.milliseconds:
            return columns.names
        raise self._differs(columns, found, line)

    def _differs(self, columns: Columns, found: set[Role], line: int) -> TraceError:
        first = f"line {self._first_line}"
        if missing := self._wanted - found:
            key = self.rows.columns.names[min(missing)]
            sentence = f"the row has no {show(key)}, and {first} has"
        elif more := found - self._wanted:
            sentence = f"the row has {show(columns.names[min(more)])}, and {first} has not"
        else:
            sentence = f"the row's times are in another unit than those of {first}"
        hint = "all rows have the same keys: remove those that differ"
        return fault(self._file, line, sentence, hint)

    def finish(self) -> Rows:
        if not self._any_cached:
            del self.rows.arrays["cached"]
        return self.rows
