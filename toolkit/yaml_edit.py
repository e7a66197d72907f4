"""Sets the bucket lists of a model file and leaves every other byte, and each comment, as it is.

PyYAML writes no comments, so nothing is dumped: its events say where a list stands in the text, and
the text is cut there. A value that stays keeps its line. A value that goes leaves its end-of-line
comment behind, on a line of its own.

What is refused, with the line to edit by hand: a list that another key shares through an alias, and
forms in which no person writes a list of numbers (a value on another line than its dash). What the
edit did is compared with what was asked before anyone sees it.
"""

import os
import re
import stat
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nxbucket.toolkit.errors import EnvironmentProblem, Problem, SpecError, UsageError
from nxbucket.toolkit.section import describe_node
from nxbucket.toolkit.spec import DeploySpec
from nxbucket.toolkit.spec_reader import read_values
from nxbucket.toolkit.yaml_source import Document, ListNode, MapNode, Node, parse_yaml, read_yaml

SECTION = "neuron_config"
LIST_KEYS = ("num_batched_tokens_buckets", "num_seqs_buckets")
"""In the order they are written where neither is there."""

_BREAK = re.compile("(\r\n|[\n\r\x85\u2028\u2029])")
_REST = re.compile(r"([ \t]*)(#.*)?")


def with_bucket_lists(content: bytes | str, file: Path, lists: Mapping[str, Sequence[int]]) -> str:
    """The text of `file` with these lists in its neuron_config.

    Raises SpecError for what `read_yaml` would, UsageError for what only a person can edit.
    """
    for key, values in lists.items():
        if key not in LIST_KEYS or not values:
            raise UsageError(
                f"{SECTION}.{key}: {list(values)} cannot be written",
                hint=f"give one bucket or more for {' or '.join(LIST_KEYS)}",
            )
    # Half of a surrogate pair becomes bytes that are refused as not UTF-8.
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    _parse(data, file)
    text = data.decode("utf-8")
    for key in LIST_KEYS:
        if key in lists:
            text = _with_list(text, file, key, list(lists[key]))
    return text


def write_bucket_lists(file: Path, lists: Mapping[str, Sequence[int]]) -> DeploySpec:
    """Raises what `load_spec` does for the edited text; then the file is as it was.

    The file keeps its mode. A symlink stays one: the file that it names is replaced.
    """
    file = file.absolute()
    read_yaml(file)
    if not file.is_file():
        raise UsageError(f"{file} is no regular file", hint="give the path of a model file")
    content = file.read_bytes()
    edited = with_bucket_lists(content, file, lists).encode()
    # Checked under the file's own name: relative paths in it start at the link's folder, not at
    # its target's, and a message names the file that a person knows.
    document = parse_yaml(edited, file)
    values, problems = read_values(document)
    if problems:
        raise SpecError(document.placed(problems))
    spec = DeploySpec.model_validate(values)
    if edited != content:
        _replace(file, content, edited)
    return spec


def _replace(file: Path, before: bytes, after: bytes) -> None:
    try:
        target = file.resolve(strict=True)
        status = target.stat()
        if not (status.st_mode & 0o222 and os.access(target, os.W_OK)):
            raise EnvironmentProblem(f"{file} is read-only", hint=f"chmod u+w {target}")
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        staged = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(after)
            made = staged.stat()
            if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
                os.chown(staged, status.st_uid, status.st_gid)
            staged.chmod(stat.S_IMODE(status.st_mode))
            if target.read_bytes() != before:
                raise UsageError(
                    f"{file} was changed by someone else meanwhile", hint="run the command again"
                )
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as err:
        raise EnvironmentProblem(
            f"{file}: cannot be written: {err.strerror or err}",
            hint="a new file is made beside it and renamed: check its folder's mode with ls -ld",
        ) from err


def _parse(data: bytes, file: Path) -> Document:
    document = parse_yaml(data, file)
    if document.problems:
        raise SpecError(list(document.problems))
    return document


def _with_list(text: str, file: Path, key: str, values: list[int]) -> str:
    document = _parse(text.encode(), file)
    current = _current(document, key)
    if current == values:
        return text
    edit = _Edit(text, file, key, current, values)
    edited = edit.edited()
    wanted = _plain(document.root)
    wanted[SECTION] = (wanted.get(SECTION) or {}) | {key: values}
    try:
        got = _plain(_parse(edited.encode(), file).root)
    except SpecError:
        got = None
    if got != wanted or _comments(edited) != _comments(text):
        edit.refuse(f"{key} cannot be set without a change to something else in the file")
    return edited


def _current(document: Document, key: str) -> list[int] | None:
    """The list in the file; None where it, or all of neuron_config, is left out or null."""
    node: Node = document.root
    for name, kind, wanted in ((SECTION, MapNode, "a mapping"), (key, ListNode, "a list")):
        assert isinstance(node, MapNode)
        if name not in node.entries:
            return None
        node = node.entries[name].node
        if not isinstance(node, MapNode | ListNode) and node.kind == "null":
            return None
        if not isinstance(node, kind):
            raise _wrong(document.file, node, name, wanted)
    assert isinstance(node, ListNode)
    values = []
    for item in node.items:
        value = None if isinstance(item, MapNode | ListNode) else item.value
        if type(value) is not int:
            raise _wrong(document.file, item, key, "an integer")
        values.append(value)
    return values


def _wrong(file: Path, node: Node, name: str, wanted: str) -> SpecError:
    dotted = name if name == SECTION else f"{SECTION}.{name}"
    message = f"{dotted} has {describe_node(node)} where {wanted} is wanted"
    hint = "`nxbucket validate` says how to mend it"
    return SpecError([Problem("wrong-type", message, hint, file, node.line, node.column, dotted)])


def _plain(node: Node) -> Any:
    if isinstance(node, MapNode):
        return {key: _plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [_plain(item) for item in node.items]
    return node.value if node.kind in ("integer", "null") else (node.kind, node.text)


def _comments(text: str) -> list[str]:
    """Whatever starts with # between two tokens."""
    found = []
    end = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        found += re.findall(r"#[^\n\r\x85\u2028\u2029]*", text[end : token.start_mark.index])
        end = max(end, token.end_mark.index)
    return found


@dataclass(eq=False)
class _Span:
    """A value's place in the text, in characters, its anchor included."""

    start: int
    end: int
    """Of a block collection: where the next thing begins, beyond comments and blank lines."""
    event: yaml.Event
    children: list["_Span"] = field(default_factory=list)
    """A list's items; a mapping's keys and values in turn."""
    used_at: int | None = None
    """Where an alias stands for this value."""
    alias_of: "_Span | None" = None

    @property
    def is_flow(self) -> bool:
        return bool(getattr(self.event, "flow_style", False))

    @property
    def inner(self) -> int:
        """Behind the bracket of a flow collection; at the first key of a block mapping."""
        return _index(self.event.end_mark)

    def get(self, key: str) -> "tuple[_Span, _Span] | None":
        for name, value in zip(self.children[::2], self.children[1::2], strict=True):
            if getattr((name.alias_of or name).event, "value", None) == key:
                return name, value
        return None


def _index(mark: Any) -> int:
    assert isinstance(mark, yaml.Mark)
    return mark.index


def _spans(text: str) -> _Span:
    """The root mapping. `text` has passed `parse_yaml`."""
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    anchors: dict[str, _Span] = {}

    def read(event: yaml.Event) -> _Span:
        span = _Span(_index(event.start_mark), _index(event.end_mark), event)
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


class _Edit:
    """One list of one file."""

    def __init__(
        self, text: str, file: Path, key: str, current: list[int] | None, values: list[int]
    ) -> None:
        self._text = text
        self._file = file
        self._key = key
        self._current = current
        self._values = values
        self._tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
        breaks = list(_BREAK.finditer(text))
        self._starts = [0, *(found.end() for found in breaks)]
        self._newline = breaks[0][0] if breaks else "\n"

    def edited(self) -> str:
        root = _spans(self._text)
        if (pair := root.get(SECTION)) is None:
            return self._append_section(root)
        name, section = pair
        if not isinstance((section.alias_of or section).event, yaml.MappingStartEvent):
            return self._fill_section(root, name, section)
        if section.alias_of is not None:
            self.refuse(
                f"{SECTION} stands for the mapping on line {self._line(section.alias_of.start)}",
                section.start,
            )
        self._check_not_shared(section)
        if (pair := section.get(self._key)) is None:
            entry = f"{self._key}: {self._values}"
            if section.is_flow:
                return self._add_to_flow(section, entry)
            return self._add_to_block(section, entry)
        name, place = pair
        if self._current is None or place.alias_of is not None:
            return self._fill(name, place, str(self._values))
        self._check_not_shared(place)
        for index, item in enumerate(place.children):
            if any(index in range(i1, i2) for i1, i2, _ in self._changes()):
                self._check_not_shared(item)
        if place.is_flow:
            return self._edit_flow(place)
        return self._edit_block(place)

    def refuse(self, message: str, at: int | None = None) -> NoReturn:
        where = self._file if at is None else f"{self._file}:{self._line(at)}"
        raise UsageError(
            f"{where}: {message}",
            hint=f"edit it by hand, in {SECTION}: {self._key}: {self._values}",
        )

    def _check_not_shared(self, span: _Span) -> None:
        if span.used_at is not None:
            anchor = getattr(span.event, "anchor", "")
            self.refuse(
                f"*{anchor} on line {self._line(span.used_at)} stands for this value too, and "
                "would change with it",
                span.start,
            )

    def _line(self, at: int) -> int:
        return bisect_right(self._starts, at)

    def _line_start(self, at: int) -> int:
        return self._starts[self._line(at) - 1]

    def _line_end(self, at: int) -> int:
        """Behind the line's break."""
        line = self._line(at)
        return self._starts[line] if line < len(self._starts) else len(self._text)

    def _column(self, at: int) -> int:
        return at - self._line_start(at)

    def _cut(self, start: int, end: int, new: str) -> str:
        return self._text[:start] + new + self._text[end:]

    def _insert_lines(self, at: int, *lines: str) -> str:
        """`at` begins a line, or is the end of a text whose last line was not ended."""
        new = self._newline.join(lines)
        if at == self._line_start(at):
            return self._cut(at, at, new + self._newline)
        texts = [
            t for t in self._tokens if isinstance(t, yaml.ScalarToken) and t.end_mark.index == at
        ]
        if texts and texts[-1].style in ("|", ">"):
            start: int = texts[-1].start_mark.index
            self.refuse("this text ends with the file; end its last line first", start)
        return self._cut(at, at, self._newline + new)

    # ---- keys that are not there

    def _append_section(self, root: _Span) -> str:
        if root.is_flow:
            return self._add_to_flow(root, f"{SECTION}: {{{self._key}: {self._values}}}")
        indent = " " * self._column(root.inner)
        ends = [t for t in self._tokens if isinstance(t, yaml.DocumentEndToken)]
        at = ends[0].start_mark.index if ends else len(self._text)
        step = self._indent_step(root)
        return self._insert_lines(
            at, f"{indent}{SECTION}:", f"{indent}{step}{self._key}: {self._values}"
        )

    def _indent_step(self, root: _Span) -> str:
        column = self._column(root.inner)
        for value in root.children[1::2]:
            if isinstance(value.event, yaml.MappingStartEvent) and not value.is_flow:
                return " " * max(self._column(value.inner) - column, 1)
        return "  "

    def _fill_section(self, root: _Span, name: _Span, section: _Span) -> str:
        entry = f"{self._key}: {self._values}"
        colon = self._colon(name, section)
        plain = section.alias_of is None and getattr(section.event, "anchor", None) is None
        same_line = colon is not None and self._line(colon) == self._line(section.end)
        if root.is_flow or not plain or not same_line:
            return self._fill(name, section, f"{{{entry}}}")
        assert colon is not None
        indent = " " * self._column(root.inner) + self._indent_step(root)
        below = self._insert_lines(self._line_end(section.end), indent + entry)
        return below[:colon] + below[section.end :]

    def _colon(self, name: _Span, value: _Span) -> int | None:
        """Behind the colon between a key and its value."""
        for token in self._tokens:
            if isinstance(token, yaml.ValueToken):
                end: int = token.end_mark.index
                if name.end < end <= value.end:
                    return end
        return None

    def _fill(self, name: _Span, place: _Span, new: str) -> str:
        """In place of an alias or of a null, which may have no text at all."""
        if place.alias_of is not None:
            return self._cut(place.start, place.end, new)
        self._check_not_shared(place)
        start = place.end - len(getattr(place.event, "value", ""))
        if self._colon(name, place) is None:
            new = f": {new}"
        elif self._text[start - 1] not in " \t" and self._column(start) > 0:
            new = f" {new}"
        return self._cut(start, place.end, new)

    def _add_to_flow(self, mapping: _Span, entry: str) -> str:
        close = mapping.end - 1
        inside = [t for t in self._tokens if mapping.inner <= t.start_mark.index < close]
        if not inside:
            blank = not self._text[mapping.inner : close].strip()
            at = mapping.inner if blank else close
            return self._cut(at, at, entry)
        ends_in_comma = isinstance(inside[-1], yaml.FlowEntryToken)
        value_end: int = inside[-2 if ends_in_comma else -1].end_mark.index
        last_end: int = inside[-1].end_mark.index
        key = mapping.children[-2].start
        indent = self._text[self._line_start(key) : key]
        if indent.strip() or self._line(last_end) == self._line(close):
            return self._cut(value_end, value_end, f", {entry}")
        at = self._line_end(last_end)
        own_line = f"{indent}{entry}{',' if ends_in_comma else ''}{self._newline}"
        comma = "" if ends_in_comma else ","
        return (
            self._text[:value_end] + comma + self._text[value_end:at] + own_line + (self._text[at:])
        )

    def _add_to_block(self, mapping: _Span, entry: str) -> str:
        column = self._column(mapping.inner)
        last = [
            t
            for t in self._tokens
            if t.start_mark.index < mapping.end and not isinstance(t, yaml.BlockEndToken)
        ][-1]
        at: int = last.end_mark.index
        if not (isinstance(last, yaml.ScalarToken) and last.style in ("|", ">")):
            at = self._line_end(at)
        # Comments right below that lie deeper, or where the dashes are, belong to what is above.
        value = mapping.children[-1]
        deepest = column + 1
        if isinstance(value.event, yaml.SequenceStartEvent) and not value.is_flow:
            deepest = min(deepest, self._column(self._dashes(value)[0]))
        while comment := re.match(" *#", self._text[at : self._line_end(at)]):
            if comment.end() - 1 < deepest:
                break
            at = self._line_end(at)
        return self._insert_lines(at, " " * column + entry)

    # ---- lists that are there

    def _changes(self) -> Iterator[tuple[int, int, list[str]]]:
        """From and to which index values go, and what comes in their place."""
        matcher = SequenceMatcher(None, self._current or [], self._values, autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            if tag != "equal":
                yield i1, i2, [str(value) for value in self._values[j1:j2]]

    def _source(self, span: _Span) -> str:
        return self._text[span.start : span.end]

    def _dashes(self, place: _Span) -> list[int]:
        return [
            t.start_mark.index
            for t in self._tokens
            if isinstance(t, yaml.BlockEntryToken) and place.start <= t.start_mark.index < place.end
        ]

    def _edit_block(self, place: _Span) -> str:
        items = place.children
        dashes = self._dashes(place)
        for dash, item in zip(dashes, items, strict=True):
            before = self._text[self._line_start(dash) : dash]
            if before.strip() or self._line(dash) != self._line(item.end):
                self.refuse("this entry is not on one line of its own", dash)
        start, end = self._line_start(dashes[0]), self._line_end(items[-1].end)
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
        return self._cut(start, end, new if ended else re.sub(_BREAK.pattern + r"\Z", "", new))

    def _edit_flow(self, place: _Span) -> str:
        start, end = place.inner, place.end - 1
        body = self._text[start:end]
        items = place.children
        if "#" not in body and (not items or not _BREAK.search(body)):
            return self._cut(start, end, self._one_line(start, end, items))
        for item in items:
            if self._line(item.start) != self._line(item.end):
                self.refuse("this entry is not on one line", item.start)
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
            for t in self._tokens
        )
        indents = [line.lead for line in with_items if line is not first]
        if items and not indents:
            indents = [" " * self._column(items[0].start)]
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
        return self._cut(start, end, "".join(shown))

    def _one_line(self, start: int, end: int, items: list[_Span]) -> str:
        if not items:
            return ", ".join(map(str, self._values))
        separator = self._text[items[0].end : items[1].start] if len(items) > 1 else ", "
        new = [self._source(item) for item in items]
        for i1, i2, added in reversed(list(self._changes())):
            new[i1:i2] = added
        pad, tail = self._text[start : items[0].start], self._text[items[-1].end : end]
        return pad + separator.join(new) + tail

    def _lines(self, start: int, end: int, items: list[_Span]) -> list[_Line]:
        parts = _BREAK.split(self._text[start:end])
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
                    items=[(index, self._source(item)) for index, item in on_line],
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
        for i1, i2, added in self._changes():
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
            new = [_Line("", lead, group, ending=self._newline, changed=True) for group in groups]
            if new and not at_head and not at.ending:
                new[-1].ending, at.ending = "", self._newline
                new[-1].gap = "" if at.comment else at.gap
                at.changed = True
            lines[where:where] = new
