"""The columns of a trace: their names, what a cell may hold, and the arrays they become."""

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from operator import gt
from pathlib import Path
from typing import Literal

from nxbucket.toolkit.buckets import describe, show
from nxbucket.toolkit.choice.trace import MAX_TOKENS, Trace
from nxbucket.toolkit.choice.trace_file import fault
from nxbucket.toolkit.errors import TraceError

Role = Literal["arrival", "prompt", "output", "cached", "max"]

NAMES: dict[Role, tuple[str, ...]] = {
    "arrival": (
        "arrival_s", "arrival_time", "arrival", "timestamp", "ts", "created", "created_at",
        "arrival_ms", "timestamp_ms",
    ),
    "prompt": (
        "prompt_tokens", "num_prompt_tokens", "input_tokens", "num_input_tokens", "context_tokens",
        "request_tokens", "input_length", "input_len", "prompt_length", "prompt_len",
    ),
    "output": (
        "output_tokens", "num_output_tokens", "completion_tokens", "num_completion_tokens",
        "generated_tokens", "response_tokens", "output_length", "output_len", "completion_len",
    ),
    "cached": ("cached_tokens", "num_cached_tokens"),
    "max": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
}  # fmt: skip
"""The first of each is ours; the others are Azure's, BurstGPT's, Mooncake's, OpenAI's."""

_MILLISECONDS = ("arrival_ms", "timestamp_ms")
_OF_MOONCAKE = "hash_ids"
"""Who writes this key writes `timestamp` in milliseconds."""

MOST_SECONDS = 1e11
"""Beyond the year 5000, and so a clock in milliseconds or less."""

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_SCIENTIFIC = re.compile(r"[+-]?[\d.]+[eE][+-]?\d+", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", re.ASCII)


def canonical(role: Role) -> str:
    return NAMES[role][0]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_ROLES: dict[str, Role] = {_plain(name): role for role, names in NAMES.items() for name in names}


@dataclass(frozen=True)
class Columns:
    """Where a row has what."""

    at: dict[Role, int]
    names: dict[Role, str]
    """As the file spells them."""
    milliseconds: bool = False
    ignored: tuple[str, ...] = ()
    """Names that mean nothing here."""

    @classmethod
    def of(cls, roles: Sequence[Role]) -> "Columns":
        return cls({r: i for i, r in enumerate(roles)}, {r: canonical(r) for r in roles})


def find_columns(names: Sequence[str], file: Path, line: int, *, noun: str = "column") -> Columns:
    """Raises TraceError for two names of one meaning, and if none is the prompt's length.

    A dotted name, such as usage.prompt_tokens, goes by its last part.
    """
    at: dict[Role, int] = {}
    for index, name in enumerate(names):
        role = role_of(name)
        if role is None:
            continue
        if role in at:
            both = f"{show(names[at[role]])!r} and {show(name)!r}"
            raise fault(
                file,
                line,
                f"{both} both are {canonical(role)}",
                f"rename or remove one {noun} of them",
            )
        at[role] = index
    if "prompt" not in at:
        raise _no_prompt(names, file, line, noun)
    plain = {_plain(name) for name in names}
    is_ms = "arrival" in at and (
        _plain(names[at["arrival"]]) in map(_plain, _MILLISECONDS) or _plain(_OF_MOONCAKE) in plain
    )
    ignored = tuple(name for name in names if role_of(name) is None)
    return Columns(at, {role: names[index] for role, index in at.items()}, is_ms, ignored)


def role_of(name: str) -> Role | None:
    return _ROLES.get(_plain(name.rpartition(".")[2]))


def _no_prompt(names: Sequence[str], file: Path, line: int, noun: str) -> TraceError:
    found = ", ".join(show(name, 40) for name in names[:12])
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    known = ", ".join(NAMES["prompt"])
    if noun == "column" and all(_NUMBER.fullmatch(name.strip()) for name in names):
        return fault(
            file,
            line,
            f"there is no header: the first line is {found}{more}",
            "put one above it, such as arrival_s,prompt_tokens,output_tokens",
        )
    if len(names) == 1 and noun == "column":
        separator = next((s for s in ("\t", ";", "|") if s in names[0]), None)
        if separator:
            return fault(
                file,
                line,
                f"the columns are separated by {separator!r}, a comma wanted",
                f"tr {separator!r} , < {file.name} > commas.csv",
            )
    return fault(
        file,
        line,
        f"no {noun} is the prompt's length; found: {found or 'none'}{more}",
        f"rename the right one to one of: {known}",
    )


class Wrong(Exception):
    """What a cell should not hold; whoever knows the place makes a TraceError of it."""

    def __init__(self, sentence: str, hint: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint


def tokens_of(cell: object) -> int:
    """A cell of CSV, or a value of JSON, as a number of tokens."""
    if isinstance(cell, str):
        text = cell.strip()
        if not (text.isascii() and text.isdigit()):
            raise _no_tokens(text)
        if len(text) > 18:  # int() refuses thousands of digits in its own words
            raise _too_many(text)
        value = int(text)
    elif type(cell) is int:
        value = cell
    else:
        raise _no_tokens(cell)
    if value > MAX_TOKENS:
        raise _too_many(str(value))
    if value < 0:
        raise Wrong(f"is {show(str(value))}, which is negative", "a request has 0 tokens or more")
    return value


def _too_many(digits: str) -> Wrong:
    return Wrong(
        f"is {show(digits, 30)}, more than any request has", f"tokens go up to {MAX_TOKENS}"
    )


def _no_tokens(cell: object) -> Wrong:
    whole = "write a whole number of tokens, in plain digits"
    if isinstance(cell, float):
        cell = repr(cell)
    if not isinstance(cell, str):
        return Wrong(f"is {show(describe(cell))}, a number wanted", whole)
    if not cell:
        return Wrong("is empty", f"{whole}, or remove the row")
    shown = show(cell)
    if _NUMBER.fullmatch(cell):
        if cell.startswith("-"):
            return Wrong(f"is {shown}, which is negative", "a request has 0 tokens or more")
        if _SCIENTIFIC.fullmatch(cell) or cell.startswith("+"):
            return Wrong(f"is {shown}, plain digits wanted", whole)
        return Wrong(f"is {shown}, and a token has no fractions", whole)
    return Wrong(f"is {shown}, a number wanted", whole)


@dataclass
class Clock:
    """Turns arrival times into seconds since the first one, which decides the kind of all."""

    milliseconds: bool = False
    first: float | datetime | None = None

    def seconds(self, cell: object) -> float:
        value = self._datetime(cell) if self._is_datetime(cell) else self._number(cell)
        if self.first is None:
            self.first = value
        if isinstance(value, datetime) and isinstance(self.first, datetime):
            return (value - self.first).total_seconds()
        assert not isinstance(value, datetime) and not isinstance(self.first, datetime)
        return value - self.first

    def _is_datetime(self, cell: object) -> bool:
        if self.first is not None:
            return isinstance(self.first, datetime)
        return isinstance(cell, str) and _DATE.match(cell.strip()) is not None

    def _datetime(self, cell: object) -> datetime:
        hint = "write it as 2026-11-30 18:15:46.680590, the way the first row has it"
        try:
            # Digits after the sixth are dropped: a microsecond is enough.
            value = datetime.fromisoformat(cell.strip() if isinstance(cell, str) else "")
        except ValueError:
            raise Wrong(f"is {_shown(cell)}, a date and time wanted", hint) from None
        if isinstance(self.first, datetime) and (self.first.tzinfo is None) != (
            value.tzinfo is None
        ):
            raise Wrong(f"is {_shown(cell)}: some rows have a time zone, some not", hint)
        return value

    def _number(self, cell: object) -> float:
        seconds = "write seconds, or a date and time such as 2026-11-30 18:15:46.680590"
        if isinstance(cell, str):
            text = cell.strip()
            if not text:
                raise Wrong("is empty", seconds)
            if not _NUMBER.fullmatch(text):
                raise Wrong(f"is {show(text)}, a number wanted", seconds)
            value = float(text)
        elif isinstance(cell, int | float) and not isinstance(cell, bool):
            value = float(cell) if isinstance(cell, float) or abs(cell) < 10**18 else math.inf
        else:
            raise Wrong(f"is {_shown(cell)}, a number wanted", seconds)
        if self.milliseconds:
            value /= 1000
        if value < 0:
            raise Wrong(f"is {_shown(cell)}, which is negative", seconds)
        if not value < MOST_SECONDS:
            raise Wrong(
                f"is {_shown(cell)}: no time in seconds",
                "name the column timestamp_ms if that is what it is, or divide it",
            )
        return value


def _shown(cell: object) -> str:
    if isinstance(cell, str):
        return show(cell)
    return repr(cell) if isinstance(cell, float) else show(describe(cell))


@dataclass
class Rows:
    """The rows so far, column by column."""

    file: Path
    columns: Columns
    how_to_sort: str
    clock: Clock = field(init=False)
    arrays: "dict[Role, array[int]]" = field(init=False)
    arrival_s: "array[float]" = field(default_factory=lambda: array("d"))
    last_line: int = 0
    """Where the last row was."""

    def __post_init__(self) -> None:
        self.clock = Clock(self.columns.milliseconds)
        self.arrays = {role: array("i") for role in self.columns.at if role != "arrival"}

    def __len__(self) -> int:
        return len(self.arrays["prompt"])

    def add(self, cells: Sequence[object], line: int) -> None:
        """`cells`: a row in the file's order. Raises TraceError for what a request cannot be."""
        role: Role
        for role, index in self.columns.at.items():
            try:
                if role == "arrival":
                    self._add_arrival(self.clock.seconds(cells[index]), line)
                else:
                    self.arrays[role].append(tokens_of(cells[index]))
            except Wrong as wrong:
                raise self._fault(
                    line, f"{self._name(role)} {wrong.sentence}", wrong.hint
                ) from None
        prompt = self.arrays["prompt"][-1]
        if not prompt:
            hint = "every request has a prompt: remove the row"
            raise self._fault(line, f"{self._name('prompt')} is 0", hint)
        if "cached" in self.arrays and self.arrays["cached"][-1] > prompt:
            raise self._fault(
                line,
                f"{self._name('cached')} is {self.arrays['cached'][-1]}, of a prompt of {prompt}",
                "cached tokens are those of the prompt that the prefix cache had",
            )
        self.last_line = line

    def _add_arrival(self, seconds: float, line: int) -> None:
        if self.arrival_s and seconds < self.arrival_s[-1]:
            raise self._fault(
                line,
                f"{self._name('arrival')} goes back by {self.arrival_s[-1] - seconds:g} s after "
                f"line {self.last_line}: the rows are not sorted",
                self.how_to_sort,
            )
        self.arrival_s.append(seconds)

    def extend(
        self, arrival_s: "array[float] | None", tokens: "dict[Role, array[int]]", last_line: int
    ) -> bool:
        """Many rows at once; False, and nothing added, if `add` would refuse one of them."""
        if arrival_s is not None:
            before = self.arrival_s[-1] if self.arrival_s else 0.0
            if arrival_s[0] < before or any(map(gt, arrival_s, islice(arrival_s, 1, None))):
                return False
        prompt = tokens["prompt"]
        if min(prompt) < 1 or any(max(column) > MAX_TOKENS for column in tokens.values()):
            return False
        if "cached" in tokens and any(map(gt, tokens["cached"], prompt)):
            return False
        for role, column in tokens.items():
            self.arrays[role].extend(column)
        if arrival_s is not None:
            self.arrival_s.extend(arrival_s)
        self.last_line = last_line
        return True

    def trace(self, notes: Iterable[str] = ()) -> Trace:
        if not len(self):
            raise TraceError(
                f"{self.file} has no rows of requests", hint="one row for each request is wanted"
            )
        units = []
        if self.columns.milliseconds:
            units.append(f"{self._name('arrival')} was read as milliseconds")
        ignored = self.columns.ignored
        missing: list[Role] = [r for r in ("arrival", "output") if r not in self.columns.at]
        if ignored and missing:
            wanted = " and ".join(canonical(role) for role in missing)
            listed = ", ".join(show(name, 40) for name in ignored[:8])
            units.append(f"there is no {wanted}; not used: {listed}")
        return Trace(
            name=self.file.name,
            prompt_tokens=self.arrays["prompt"],
            output_tokens=self.arrays.get("output"),
            arrival_s=self.arrival_s if "arrival" in self.columns.at else None,
            cached_tokens=self.arrays.get("cached"),
            max_tokens=self.arrays.get("max"),
            notes=(*units, *notes),
        )

    def _name(self, role: Role) -> str:
        return show(self.columns.names[role])

    def _fault(self, line: int, sentence: str, hint: str) -> TraceError:
        return fault(self.file, line, sentence, hint)
