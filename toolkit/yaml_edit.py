"""Sets the bucket lists of a model file and leaves every other byte, and each comment, as it is.

PyYAML writes no comments, so nothing is dumped: its events say where a list stands in the text, and
the text is cut there.

What is refused, with the line to edit by hand: a list that another key shares through an alias, and
forms in which no person writes a list of numbers (a value on another line than its dash). What the
edit did is compared with what was asked before anyone sees it.
"""

import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nxbucket.toolkit.errors import EnvironmentProblem, Problem, SpecError, UsageError
from nxbucket.toolkit.section import describe_node
from nxbucket.toolkit.spec import DeploySpec, spec_of
from nxbucket.toolkit.yaml_list_lines import ListLines, changes
from nxbucket.toolkit.yaml_source import Document, ListNode, MapNode, Node, parse_yaml, read_yaml
from nxbucket.toolkit.yaml_spans import SourceText, Span, read_spans

SECTION = "neuron_config"
LIST_KEYS = ("num_batched_tokens_buckets", "num_seqs_buckets")
"""In the order they are written where neither is there."""


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
    spec = spec_of(parse_yaml(edited, file))
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
    source = SourceText(text)
    edit = _Edit(source, file, key, current, values)
    edited = edit.edited()
    wanted = _plain(document.root)
    wanted[SECTION] = (wanted.get(SECTION) or {}) | {key: values}
    try:
        got = _plain(_parse(edited.encode(), file).root)
    except SpecError:
        got = None
    if got != wanted or SourceText(edited).comments() != source.comments():
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


class _Edit:
    """One list of one file."""

    def __init__(
        self, source: SourceText, file: Path, key: str, current: list[int] | None, values: list[int]
    ) -> None:
        self._source = source
        self._file = file
        self._key = key
        self._current = current
        self._values = values

    def edited(self) -> str:
        root = read_spans(self._source.text)
        if (pair := root.get(SECTION)) is None:
            return self._append_section(root)
        name, section = pair
        if not isinstance((section.alias_of or section).event, yaml.MappingStartEvent):
            return self._fill_section(root, name, section)
        if section.alias_of is not None:
            line = self._source.line_of(section.alias_of.start)
            self.refuse(f"{SECTION} stands for the mapping on line {line}", section.start)
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
        for i1, i2, _ in changes(self._current, self._values):
            for item in place.children[i1:i2]:
                self._check_not_shared(item)
        return ListLines(self._source, place, self._current, self._values, self.refuse).edited()

    def refuse(self, message: str, at: int | None = None) -> NoReturn:
        where = self._file if at is None else f"{self._file}:{self._source.line_of(at)}"
        raise UsageError(
            f"{where}: {message}",
            hint=f"edit it by hand, in {SECTION}: {self._key}: {self._values}",
        )

    def _check_not_shared(self, span: Span) -> None:
        if span.used_at is not None:
            anchor = getattr(span.event, "anchor", "")
            line = self._source.line_of(span.used_at)
            self.refuse(
                f"*{anchor} on line {line} stands for this value too, and would change with it",
                span.start,
            )

    def _insert_lines(self, at: int, *lines: str) -> str:
        """`at` begins a line, or is the end of a text whose last line was not ended."""
        source = self._source
        new = source.newline.join(lines)
        if at == source.line_start(at):
            return source.cut(at, at, new + source.newline)
        texts = [
            t for t in source.tokens if isinstance(t, yaml.ScalarToken) and t.end_mark.index == at
        ]
        if texts and texts[-1].style in ("|", ">"):
            start: int = texts[-1].start_mark.index
            self.refuse("this text ends with the file; end its last line first", start)
        return source.cut(at, at, source.newline + new)

    # ---- keys that are not there

    def _append_section(self, root: Span) -> str:
        if root.is_flow:
            return self._add_to_flow(root, f"{SECTION}: {{{self._key}: {self._values}}}")
        indent = " " * self._source.column(root.inner)
        ends = [t for t in self._source.tokens if isinstance(t, yaml.DocumentEndToken)]
        at = ends[0].start_mark.index if ends else len(self._source.text)
        step = self._indent_step(root)
        return self._insert_lines(
            at, f"{indent}{SECTION}:", f"{indent}{step}{self._key}: {self._values}"
        )

    def _indent_step(self, root: Span) -> str:
        column = self._source.column(root.inner)
        for value in root.children[1::2]:
            if isinstance(value.event, yaml.MappingStartEvent) and not value.is_flow:
                return " " * max(self._source.column(value.inner) - column, 1)
        return "  "

    def _fill_section(self, root: Span, name: Span, section: Span) -> str:
        source = self._source
        entry = f"{self._key}: {self._values}"
        colon = source.colon(name, section)
        plain = section.alias_of is None and getattr(section.event, "anchor", None) is None
        same_line = colon is not None and source.line_of(colon) == source.line_of(section.end)
        if root.is_flow or not plain or not same_line:
            return self._fill(name, section, f"{{{entry}}}")
        assert colon is not None
        indent = " " * source.column(root.inner) + self._indent_step(root)
        below = self._insert_lines(source.line_end(section.end), indent + entry)
        return below[:colon] + below[section.end :]

    def _fill(self, name: Span, place: Span, new: str) -> str:
        """In place of an alias or of a null, which may have no text at all."""
        source = self._source
        if place.alias_of is not None:
            return source.cut(place.start, place.end, new)
        self._check_not_shared(place)
        start = place.end - len(getattr(place.event, "value", ""))
        if source.colon(name, place) is None:
            new = f": {new}"
        elif source.text[start - 1] not in " \t" and source.column(start) > 0:
            new = f" {new}"
        return source.cut(start, place.end, new)

    def _add_to_flow(self, mapping: Span, entry: str) -> str:
        source = self._source
        close = mapping.end - 1
        inside = [t for t in source.tokens if mapping.inner <= t.start_mark.index < close]
        if not inside:
            blank = not source.text[mapping.inner : close].strip()
            at = mapping.inner if blank else close
            return source.cut(at, at, entry)
        ends_in_comma = isinstance(inside[-1], yaml.FlowEntryToken)
        value_end: int = inside[-2 if ends_in_comma else -1].end_mark.index
        last_end: int = inside[-1].end_mark.index
        key = mapping.children[-2].start
        indent = source.text[source.line_start(key) : key]
        if indent.strip() or source.line_of(last_end) == source.line_of(close):
            return source.cut(value_end, value_end, f", {entry}")
        at = source.line_end(last_end)
        own_line = f"{indent}{entry}{',' if ends_in_comma else ''}{source.newline}"
        comma = "" if ends_in_comma else ","
        return source.cut(value_end, at, comma + source.text[value_end:at] + own_line)

    def _add_to_block(self, mapping: Span, entry: str) -> str:
        source = self._source
        column = source.column(mapping.inner)
        last = [
            t
            for t in source.tokens
            if t.start_mark.index < mapping.end and not isinstance(t, yaml.BlockEndToken)
        ][-1]
        at: int = last.end_mark.index
        if not (isinstance(last, yaml.ScalarToken) and last.style in ("|", ">")):
            at = source.line_end(at)
        # Comments right below that lie deeper, or where the dashes are, belong to what is above.
        value = mapping.children[-1]
        deepest = column + 1
        if isinstance(value.event, yaml.SequenceStartEvent) and not value.is_flow:
            deepest = min(deepest, source.column(source.dashes(value)[0]))
        while comment := re.match(" *#", source.text[at : source.line_end(at)]):
            if comment.end() - 1 < deepest:
                break
            at = source.line_end(at)
        return self._insert_lines(at, " " * column + entry)
