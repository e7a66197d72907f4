"""Where things stand in a YAML text: its lines, its tokens, and the span of each value.

Places are counted in characters. The text has passed `parse_yaml`.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import yaml

BREAK = re.compile("(\r\n|[\n\r\x85\u2028\u2029])")


@dataclass(eq=False)
class Span:
    """A value's place in the text, its anchor included."""

    start: int
    end: int
    """Of a block collection: where the next thing begins, beyond comments and blank lines."""
    event: yaml.Event
    children: list["Span"] = field(default_factory=list)
    """A list's items; a mapping's keys and values in turn."""
    used_at: int | None = None
    """Where an alias stands for this value."""
    alias_of: "Span | None" = None

    @property
    def is_flow(self) -> bool:
        return bool(getattr(self.event, "flow_style", False))

    @property
    def inner(self) -> int:
        """Behind the bracket of a flow collection; at the first key of a block mapping."""
        return _index(self.event.end_mark)

    def get(self, key: str) -> "tuple[Span, Span] | None":
        for name, value in zip(self.children[::2], self.children[1::2], strict=True):
            if getattr((name.alias_of or name).event, "value", None) == key:
                return name, value
        return None


def _index(mark: Any) -> int:
    assert isinstance(mark, yaml.Mark)
    return mark.index


def read_spans(text: str) -> Span:
    """The span of the root mapping, with all others in it."""
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    anchors: dict[str, Span] = {}

    def read(event: yaml.Event) -> Span:
        span = Span(_index(event.start_mark), _index(event.end_mark), event)
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            span.alias_of = anchors[anchor or ""]
            if span.alias_of.used_at is None:
                span.alias_of.used_at = span.start
            return span
        if anchor is not None:
            anchors[anchor] = span
        if isinstance(event, yaml.CollectionStartEvent):
            while not isinstance(item := next(events), yaml.CollectionEndEvent):
                span.children.append(read(item))
            span.end = _index(item.end_mark)
        return span

    next(events), next(events)
    return read(next(events))


class SourceText:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
        breaks = list(BREAK.finditer(text))
        self._starts = [0, *(found.end() for found in breaks)]
        self.newline = breaks[0][0] if breaks else "\n"

    def line_of(self, at: int) -> int:
        return bisect_right(self._starts, at)

    def line_start(self, at: int) -> int:
        return self._starts[self.line_of(at) - 1]

    def line_end(self, at: int) -> int:
        """Behind the line's break."""
        line = self.line_of(at)
        return self._starts[line] if line < len(self._starts) else len(self.text)

    def column(self, at: int) -> int:
        return at - self.line_start(at)

    def cut(self, start: int, end: int, new: str) -> str:
        """The text with `new` in place of what stands from `start` to `end`."""
        return self.text[:start] + new + self.text[end:]

    def colon(self, name: Span, value: Span) -> int | None:
        """Behind the colon between a key and its value."""
        for token in self.tokens:
            if isinstance(token, yaml.ValueToken):
                end: int = token.end_mark.index
                if name.end < end <= value.end:
                    return end
        return None

    def dashes(self, block: Span) -> list[int]:
        return [
            t.start_mark.index
            for t in self.tokens
            if isinstance(t, yaml.BlockEntryToken) and block.start <= t.start_mark.index < block.end
        ]

    def comments(self) -> list[str]:
        """Whatever starts with # between two tokens."""
        found = []
        end = 0
        for token in self.tokens:
            found += re.findall(
                r"#[^\n\r\x85\u2028\u2029]*", self.text[end : token.start_mark.index]
            )
            end = max(end, token.end_mark.index)
        return found
