"""A trace as CSV with a header. Rows of plain numbers are read by the block, others one by one."""

import csv
import re
from array import array
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from nxbucket.toolkit.choice.trace_columns import Role, Rows, find_columns
from nxbucket.toolkit.choice.trace_file import Block, fault, text_of, with_whole_quotes

# Possessive, so that matching a block keeps no state for each of its rows.
_TOKENS = r" *+\d{1,9}+ *+"
_SECONDS = r" *+\d{1,10}+(?:\.\d{1,12}+)?+ *+"
_DATETIME = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9}+)?+(?:Z|[+-]\d\d:\d\d)?+"
_ANYTHING = r'[^,"\r\n]*+'


def read_csv(file: Path, blocks: Iterator[Block], progress: Callable[[int], None]) -> Rows:
    table: _Table | None = None
    for block in with_whole_quotes(blocks):
        rows = csv.reader(text_of(block), strict=True)
        try:
            if table is None:
                table = _Table(file, next(rows), block.first_line)
            elif table.read_at_once(block):
                progress(len(table.rows))
                continue
            table.read_one_by_one(rows, block.first_line)
        except csv.Error as err:
            raise fault(
                file,
                block.first_line + max(0, rows.line_num - 1),
                f"not CSV: {str(err).partition(' - ')[0]}",
                "drop the columns of text: numbers are all that is read",
            ) from None
        progress(len(table.rows))
    assert table is not None, "the caller has seen a first line"
    return table.rows


class _Table:
    def __init__(self, file: Path, header: list[str], line: int) -> None:
        columns = find_columns(header, file, line)
        arrival = columns.at.get("arrival", 0) + 1
        how = f"below the header, as `sort -t, -k{arrival},{arrival}g` does (dates: without g)"
        self.file = file
        self.width = len(header)
        self.rows = Rows(file, columns, f"sort the rows by {columns.names.get('arrival')}, {how}")
        self._pattern: re.Pattern[str] | None = None

    def read_one_by_one(self, rows: Any, first_line: int) -> None:
        """`rows`: a csv.reader, which counts lines."""
        line = first_line + rows.line_num
        for cells in rows:
            if len(cells) == self.width:
                self.rows.add(cells, line)
            elif len(cells) > 1 or "".join(cells).strip():
                raise self._wrong_width(len(cells), line)
            line = first_line + rows.line_num

    def _wrong_width(self, found: int, line: int) -> Exception:
        fields = "1 field" if found == 1 else f"{found} fields"
        return fault(
            self.file,
            line,
            f"the row has {fields} and the header {self.width}",
            "every row has one value for each column; text with a comma in it needs quotes",
        )

    def read_at_once(self, block: Block) -> bool:
        """False, and nothing read, if a row has to be looked at, or is wrong."""
        pattern = self._pattern_of_a_block()
        if pattern is None or not pattern.fullmatch(block.text):
            return False
        text = block.text.replace("\r\n", "\n")[:-1]
        cells = text.replace("\n", ",").split(",")
        arrival_s = None
        tokens: dict[Role, array[int]] = {}
        for role, index in self.rows.columns.at.items():
            column = cells[index :: self.width]
            if role != "arrival":
                tokens[role] = array("i", map(int, column))
                continue
            try:
                arrival_s = self._seconds(column)
            except (ValueError, TypeError):  # no such day, or only some with a time zone
                return False
        last_line = block.first_line + len(cells) // self.width - 1
        return self.rows.extend(arrival_s, tokens, last_line)

    def _seconds(self, column: list[str]) -> "array[float]":
        first = self.rows.clock.first
        if isinstance(first, datetime):
            dates = map(datetime.fromisoformat, column)
            return array("d", [(date - first).total_seconds() for date in dates])
        assert first is not None
        if self.rows.clock.milliseconds:
            return array("d", [float(cell) / 1000 - first for cell in column])
        return array("d", [float(cell) - first for cell in column])

    def _pattern_of_a_block(self) -> re.Pattern[str] | None:
        """Known once the first row has shown what the times look like."""
        if self._pattern is None and len(self.rows):
            times = _DATETIME if isinstance(self.rows.clock.first, datetime) else _SECONDS
            cells = [_ANYTHING] * self.width
            for role, index in self.rows.columns.at.items():
                cells[index] = times if role == "arrival" else _TOKENS
            self._pattern = re.compile(f"(?:{','.join(cells)}\\r?+\\n)++", re.ASCII)
        return self._pattern
