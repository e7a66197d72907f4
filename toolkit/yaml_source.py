"""YAML with positions: a file becomes a tree whose every value knows its line and column.

PyYAML only splits the text into events. Its composer and resolver are left out on purpose: they
drop duplicate keys, turn `1_024`, `0x100`, `1:30` and `yes` into values nobody typed, share aliased
lists, and recurse as deep as the file does. Whatever the bytes are, the result is a tree or a
SpecError.

What is not read: merge keys (`<<`), tags (`!!int`), several documents in one file, keys that are
not plain words. Aliases are read and count as the copies they stand for.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import yaml

from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.errors import EnvironmentProblem, Problem, SpecError, UsageError

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 4096
"""Values in a file with each alias counted as a copy. The largest real model file has about 60."""
MAX_DEPTH = 32

Kind = Literal["null", "boolean", "integer", "float", "string", "odd"]

_INTEGER = re.compile(r"-?[1-9][0-9]{0,17}|0")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]+(?:[eE][-+]?[0-9]{1,2})?")
# Forms that YAML 1.1 and 1.2, or two of their readers, take for different values.
_ODD = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|0o[0-7_]+"
    r"|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"
    r"|[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    r"|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"
)
_BOOLEANS = dict.fromkeys(("true", "True", "TRUE"), True)
_BOOLEANS |= dict.fromkeys(("false", "False", "FALSE"), False)
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
# Outside YAML's printable set, and the byte order mark. PyYAML reports no line for these.
_CONTROL = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


@dataclass(frozen=True)
class ScalarNode:
    text: str
    kind: Kind
    quoted: bool
    line: int
    column: int

    @property
    def value(self) -> bool | int | float | str | None:
        match self.kind:
            case "null":
                return None
            case "boolean":
                return _BOOLEANS[self.text]
            case "integer":
                return int(self.text)
            case "float":
                return float(self.text)
        return self.text


@dataclass(frozen=True)
class ListNode:
    items: "tuple[Node, ...]"
    line: int
    column: int


@dataclass(frozen=True)
class MapNode:
    entries: "dict[str, Entry]"
    line: int
    column: int


@dataclass(frozen=True)
class Entry:
    """A key's own place, and what stands behind it."""

    line: int
    column: int
    node: "Node"


Node = ScalarNode | ListNode | MapNode


@dataclass(frozen=True)
class Document:
    file: Path
    root: MapNode
    problems: tuple[Problem, ...]
    """What is wrong with the YAML and did not keep the rest from being read."""

    def placed(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems of this file with line and column filled in from their key, in file order.

        A key that is not in the file is placed at the section it would be in.
        """
        places = dict(_places(self.root, ""))

        def place(problem: Problem) -> Problem:
            key = problem.key
            if problem.file != self.file or problem.line is not None:
                return problem
            while key and key not in places:
                key = key[: max(key.rfind("."), key.rfind("["), 0)]
            if not key:
                return problem
            line, column = places[key]
            return replace(problem, line=line, column=column)

        def order(problem: Problem) -> tuple[bool, int, int]:
            return problem.file != self.file, problem.line or 0, problem.column or 0

        return sorted(map(place, problems), key=order)


def _places(node: Node, path: str) -> Iterator[tuple[str, tuple[int, int]]]:
    if isinstance(node, MapNode):
        for key, entry in node.entries.items():
            at = f"{path}.{key}" if path else key
            # An empty value has no width: its key is the place to look at.
            empty = isinstance(entry.node, ScalarNode) and not entry.node.text
            yield at, (entry.line, entry.column) if empty else (entry.node.line, entry.node.column)
            yield from _places(entry.node, at)
    elif isinstance(node, ListNode):
        for index, item in enumerate(node.items):
            at = f"{path}[{index}]"
            yield at, (item.line, item.column)
            yield from _places(item, at)


def read_yaml(file: Path) -> Document:
    """The file's tree. A file that is not there is a usage error; what is in it, a SpecError."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(
            f"no such file: {file}", hint="give the path of a model file, e.g. model.yaml"
        ) from None
    except IsADirectoryError:
        raise UsageError(
            f"{file} is a directory, a model file is wanted",
            hint=f"give the file itself, e.g. {file / 'model.yaml'}",
        ) from None
    except PermissionError:
        raise EnvironmentProblem(
            f"no permission to read {file}", hint="check its owner and mode with ls -l"
        ) from None
    except (OSError, ValueError) as err:
        raise UsageError(f"cannot open {file}: {err}", hint="give the path of a file") from err
    return parse_yaml(content, file)


def parse_yaml(content: bytes, file: Path) -> Document:
    return _Composer(_decode(content, file), file).document()


def _decode(content: bytes, file: Path) -> str:
    def refuse(code: str, message: str, hint: str, line: int | None = None) -> NoReturn:
        raise SpecError([Problem(code, message, hint, file, line=line)])

    if len(content) > MAX_FILE_BYTES:
        refuse("file-too-large", "the file is larger than 1 MiB", "a model file is a few lines")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        refuse("not-utf8", "the file is UTF-16", "save it as UTF-8")
    if content.startswith(b"\xef\xbb\xbf"):
        refuse(
            "byte-order-mark",
            "the file starts with a byte order mark",
            "save it as UTF-8 without BOM",
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        byte = content[err.start]
        refuse("not-utf8", f"byte 0x{byte:02x} is not UTF-8", "save the file as UTF-8", line)
    if found := _CONTROL.search(text):
        line = text.count("\n", 0, found.start()) + 1
        column = found.start() - text.rfind("\n", 0, found.start())
        message = f"control character {found[0]!r} at line {line} column {column}"
        raise SpecError(
            [Problem("control-character", message, "delete it", file, line=line, column=column)]
        )
    return text


class _Composer:
    def __init__(self, text: str, file: Path) -> None:
        self._lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
        self._file = file
        self._events = yaml.parse(text, Loader=yaml.SafeLoader)
        self._anchors: dict[str, tuple[Node, int] | None] = {}
        self._problems: list[Problem] = []
        self._num_nodes = 0

    def document(self) -> Document:
        self._next()
        start = self._next()
        if isinstance(start, yaml.StreamEndEvent):
            self._fail(
                "file-empty", "the file is empty", "write at least the line `model: <folder>`"
            )
        first = self._next()
        if not isinstance(first, yaml.MappingStartEvent):
            self._fail(
                "not-a-mapping",
                "the file is not a mapping of keys to values",
                "write `key: value` lines, the first of them `model: <folder>`",
                _place(first),
            )
        root = self._node(first, 0)
        self._next()
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            self._fail(
                "several-documents",
                "a second document starts here; a model file holds one",
                "keep one document to a file and remove the `---` line",
                _place(after),
            )
        assert isinstance(root, MapNode)
        return Document(self._file, root, tuple(self._problems))

    def _node(self, event: yaml.Event, depth: int) -> Node:
        line, column = at = _place(event)
        if depth > MAX_DEPTH:
            message = f"values are nested more than {MAX_DEPTH} deep"
            self._fail("too-deep", message, "a model file needs three levels", at)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor or "", at)
        self._count(1, at)
        before = self._num_nodes
        anchor: str | None = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None
        if (tag := getattr(event, "tag", None)) is not None:
            self._report("yaml-tag", f"tag {show(tag)} is not read", "delete the tag", at)
        node: Node
        if isinstance(event, yaml.MappingStartEvent):
            node = self._mapping(line, column, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := self._next(), yaml.SequenceEndEvent):
                items.append(self._node(item, depth + 1))
            node = ListNode(tuple(items), line, column)
        else:
            assert isinstance(event, yaml.ScalarEvent)
            node = self._scalar(event, at)
        if anchor is not None:
            self._anchors[anchor] = (node, self._num_nodes - before + 1)
        return node

    def _mapping(self, line: int, column: int, depth: int) -> MapNode:
        entries: dict[str, Entry] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            at = _place(event)
            key_node = self._node(event, depth + 1)
            if not isinstance(key_node, ScalarNode):
                self._fail("key-not-a-word", "a key must be a plain word", "write `key: value`", at)
            key = key_node.text
            value = self._node(self._next(), depth + 1)
            if key == "<<":
                hint = "write the keys out; plain aliases (`*name`) of single values do work"
                self._report("merge-key", "merge keys (<<) are not read", hint, at)
            elif key in entries:
                message = (
                    f"{show(key)} is given twice, on line {entries[key].line} and line {at[0]}"
                )
                self._report("duplicate-key", message, "keep one of the two lines", at, key)
            else:
                entries[key] = Entry(*at, value)
        return MapNode(entries, line, column)

    def _scalar(self, event: yaml.ScalarEvent, at: tuple[int, int]) -> ScalarNode:
        text = event.value
        if any("\ud800" <= c <= "\udfff" for c in text):
            message = "the text holds half of a surrogate pair"
            self._fail("control-character", message, "delete the \\u escape", at)
        # A tagged scalar is reported already; its text stands for it.
        plain = event.implicit[0] or not (event.style or event.tag is None)
        kind = _kind(text) if plain else "string"
        return ScalarNode(text, kind, not plain, *at)

    def _alias(self, anchor: str, at: tuple[int, int]) -> Node:
        if anchor not in self._anchors:
            message = f"alias *{show(anchor)} has no anchor &{show(anchor)} before it"
            self._fail("alias-unknown", message, "write the value out", at)
        target = self._anchors[anchor]
        if target is None:
            message = f"alias *{show(anchor)} lies inside the value it stands for"
            self._fail("alias-recursive", message, "write the value out", at)
        node, size = target
        self._count(size, at)
        return node

    def _count(self, size: int, at: tuple[int, int]) -> None:
        self._num_nodes += size
        if self._num_nodes > MAX_NODES:
            self._fail(
                "too-many-values",
                f"the file holds more than {MAX_NODES} values, aliases counted as copies",
                "write out what is needed; a model file has a few dozen values",
                at,
            )

    def _next(self) -> yaml.Event:
        try:
            return next(self._events)
        except yaml.MarkedYAMLError as err:
            mark = err.problem_mark or err.context_mark
            self._fail_syntax(err.problem or err.context or "not YAML", mark)
        except (yaml.YAMLError, ValueError, OverflowError):
            # PyYAML lets int() and chr() fail on `%YAML 1e9` and on "\UFFFFFFFF".
            self._fail("yaml-syntax", "the file is not YAML", "look for a stray % or \\U escape")

    def _fail_syntax(self, problem: str, mark: yaml.Mark | None) -> NoReturn:
        if mark is None:
            self._fail("yaml-syntax", problem, "compare with `model: <folder>`")
        line, column = mark.line + 1, mark.column + 1
        source = self._lines[mark.line] if mark.line < len(self._lines) else ""
        indent = source[: len(source) - len(source.lstrip())]
        tab = column if source[mark.column : mark.column + 1] == "\t" else indent.find("\t") + 1
        if tab:
            self._fail(
                "tab",
                f"tab character at line {line} column {tab}; use spaces",
                "replace each tab by spaces, e.g. with `expand`",
                (line, tab),
            )
        hint = "check quotes, brackets, colons and indentation just before this place"
        self._fail("yaml-syntax", f"not valid YAML: {problem}", hint, (line, column))

    def _report(
        self,
        code: str,
        message: str,
        hint: str,
        at: tuple[int, int],
        key: str | None = None,
    ) -> None:
        self._problems.append(Problem(code, message, hint, self._file, *at, key))

    def _fail(
        self, code: str, message: str, hint: str, at: tuple[int, int] | None = None
    ) -> NoReturn:
        line, column = at or (None, None)
        problem = Problem(code, message, hint, self._file, line, column)
        raise SpecError([*self._problems, problem])


def _place(event: yaml.Event) -> tuple[int, int]:
    mark = event.start_mark
    assert mark is not None
    return mark.line + 1, mark.column + 1


def _kind(text: str) -> Kind:
    if text in _NULLS:
        return "null"
    if text in _BOOLEANS:
        return "boolean"
    if _INTEGER.fullmatch(text):
        return "integer"
    if _FLOAT.fullmatch(text):
        return "float"
    return "odd" if _ODD.fullmatch(text) else "string"
