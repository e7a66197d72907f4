"""New values for a list that is there, in block or in flow style, line by line.

A value that stays keeps its line. A value that goes leaves its end-of-line comment behind, on a
line of its own.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NoReturn

import yaml

from nxbucket.toolkit.yaml_spans import BREAK, SourceText, Span

_REST = re.compile(r"([ \t]*)(#.*)?")


def changes(current: Sequence[int], wanted: Sequence[int]) -> Iterator[tuple[int, int, list[str]]]:
    """From and to which index values go, and what comes in their place."""
    matcher = SequenceMatcher(None, current, wanted, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            yield i1, i2, [str(value) for value in wanted[j1:j2]]


@dataclass(eq=False)
class _Line:
    """A line of a list."""

    source: str
    lead: str
    items: list[tuple[float, str]]
    """Index in the list as it was, and text. What is new stands between two indices."""
    gap: str = ""
    comment: str = ""
    ending: str = ""
    has_comma: bool = False
    changed: bool = False

    @property
    def indent(self) -> str:
        return self.lead[: len(self.lead) - len(self.lead.lstrip())]


class ListLines:
    def __init__(
        self,
        source: SourceText,
        place: Span,
        current: Sequence[int],
        wanted: Sequence[int],
        refuse: Callable[[str, int], NoReturn],
    ) -> None:
        """`refuse` gets what is wrong with a form that is not edited, and where it stands."""
        self._source = source
        self._place = place
        self._current = current
        self._wanted = wanted
        self._refuse = refuse

    def edited(self) -> str:
        """The whole text, with the list as it is wanted."""
        return self._edit_flow() if self._place.is_flow else self._edit_block()

    def _edit_block(self) -> str:
        source = self._source
        items = self._place.children
        dashes = source.dashes(self._place)
        for dash, item in zip(dashes, items, strict=True):
            before = source.text[source.line_start(dash) : dash]
            if before.strip() or source.line_of(dash) != source.line_of(item.end):
                self._refuse("this entry is not on one line of its own", dash)
        start, end = source.line_start(dashes[0]), source.line_end(items[-1].end)
        lines = self._lines(start, end, items)
        if not lines[-1].source:
            lines.pop()
        ended = bool(lines[-1].ending)
        self._merge(lines, per_line=True)
        shown = []
        for line in lines:
            if not line.changed:
                shown.append(line.source)
            elif line.items:
                shown.append(line.lead + line.items[0][1] + line.gap + line.comment + line.ending)
            elif line.comment:
                shown.append(line.indent + line.comment + line.ending)
        new = "".join(shown)
        return source.cut(start, end, new if ended else re.sub(BREAK.pattern + r"\Z", "", new))

    def _edit_flow(self) -> str:
        source = self._source
        start, end = self._place.inner, self._place.end - 1
        body = source.text[start:end]
        items = self._place.children
        if "#" not in body and (not items or not BREAK.search(body)):
            return source.cut(start, end, self._one_line(start, end, items))
        for item in items:
            if source.line_of(item.start) != source.line_of(item.end):
                self._refuse("this entry is not on one line", item.start)
        lines = self._lines(start, end, items)
        first, last = lines[0], lines[-1]
        # A comma that leads a line has no place beside values that come and go.
        odd_commas = any(
            line.source.lstrip().startswith(",") or (line.has_comma and not line.items)
            for line in lines
        )
        with_items = [line for line in lines if line.items]
        ends_in_comma = bool(items) and any(
            isinstance(t, yaml.FlowEntryToken) and items[-1].end <= t.start_mark.index < end
            for t in source.tokens
        )
        indents = [line.lead for line in with_items if line is not first]
        if items and not indents:
            indents = [" " * source.column(items[0].start)]
        self._merge(
            lines,
            per_line=all(len(line.items) < 2 for line in lines),
            indent=indents[0] if indents else "",
        )
        last_with_items = [line for line in lines if line.items][-1]
        shown = []
        for line in lines:
            comma = ends_in_comma or line is not last_with_items
            as_it_was = not line.changed and not odd_commas
            if as_it_was and (not line.items or comma == line.has_comma):
                shown.append(line.source)
            elif line.items:
                text = ", ".join(item for _, item in line.items) + ("," if comma else "")
                gap = line.gap if line.comment or not line.ending else ""
                shown.append(line.lead + text + gap + line.comment + line.ending)
            elif line.comment:
                indent = (line.gap or " ") if line is first else line.indent
                shown.append(indent + line.comment + line.ending)
            elif line is first or line is last:
                shown.append("" if line is first else line.indent)
                shown.append(line.ending)
            elif not line.source.strip():
                shown.append(line.source)
        return source.cut(start, end, "".join(shown))

    def _one_line(self, start: int, end: int, items: list[Span]) -> str:
        source = self._source
        if not items:
            return ", ".join(map(str, self._wanted))
        separator = source.text[items[0].end : items[1].start] if len(items) > 1 else ", "
        new = [self._text_of(item) for item in items]
        for i1, i2, added in reversed(list(changes(self._current, self._wanted))):
            new[i1:i2] = added
        pad, tail = source.text[start : items[0].start], source.text[items[-1].end : end]
        return pad + separator.join(new) + tail

    def _text_of(self, span: Span) -> str:
        return self._source.text[span.start : span.end]

    def _lines(self, start: int, end: int, items: list[Span]) -> list[_Line]:
        parts = BREAK.split(self._source.text[start:end])
        lines = []
        at = start
        for content, ending in zip(parts[::2], [*parts[1::2], ""], strict=True):
            on_line = [
                (index, item)
                for index, item in enumerate(items)
                if at <= item.start < at + len(content)
            ]
            rest = on_line[-1][1].end - at if on_line else 0
            while content[rest : rest + 1] in (" ", "\t") and "," in content[rest:].split("#")[0]:
                rest += 1
            has_comma = content[rest : rest + 1] == ","
            if not on_line:
                has_comma = "," in content.split("#")[0]
                rest = content.find("#") if "#" in content else len(content)
            elif has_comma:
                rest += 1
            tail = _REST.fullmatch(content, rest)
            assert tail is not None
            lead = content[: on_line[0][1].start - at] if on_line else content[:rest]
            lines.append(
                _Line(
                    source=content + ending,
                    lead=lead if not lead.lstrip().startswith(",") else lead.split(",")[0],
                    items=[(index, self._text_of(item)) for index, item in on_line],
                    gap=tail[1],
                    comment=tail[2] or "",
                    ending=ending,
                    has_comma=has_comma,
                )
            )
            at += len(content) + len(ending)
        return lines

    def _merge(self, lines: list[_Line], *, per_line: bool, indent: str | None = None) -> None:
        """Takes values out and puts values in. What replaces a value comes where that was.

        `indent`: of a flow list, whose first line stands behind the bracket.
        """
        line_of = {index: line for line in lines for index, _ in line.items}
        first = lines[0]
        for i1, i2, added in changes(self._current, self._wanted):
            if not line_of:
                lines[-1].items = [(0, text) for text in added]
                lines[-1].changed = True
                return
            at = line_of[i2 - 1 if i2 > i1 else max(i1 - 1, 0)]
            for index in range(i1, i2):
                line = line_of[index]
                line.items = [item for item in line.items if item[0] != index]
                line.changed = True
            if not added:
                continue
            entries = [(i2 - 0.5, text) for text in added]
            at_head = i2 == 0
            behind_bracket = indent is not None and at is first
            if at.items and (not per_line or (at_head and behind_bracket)):
                before = sum(index < i2 for index, _ in at.items)
                at.items[before:before] = entries
                at.changed = True
                continue
            groups = [[entry] for entry in entries] if per_line else [entries]
            if not at.items and not at.comment:
                at.items = groups.pop(0)
            where = lines.index(at) + (not at_head)
            lead = indent if indent is not None and at is first else at.lead
            new = [
                _Line("", lead, group, ending=self._source.newline, changed=True)
                for group in groups
            ]
            if new and not at_head and not at.ending:
                new[-1].ending, at.ending = "", self._source.newline
                new[-1].gap = "" if at.comment else at.gap
                at.changed = True
            lines[where:where] = new
