"""Typed access to one section of the model file. What is wrong is noted, never repaired.

Every reader returns the value, or its default where the key is left out, or None where the value
is wrong. A wrong value stops no other key from being checked.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nxbucket.toolkit.buckets import describe, show
from nxbucket.toolkit.errors import Problem
from nxbucket.toolkit.refusals import nearest
from nxbucket.toolkit.yaml_source import Entry, ListNode, MapNode, Node, ScalarNode

_YES_NO = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}
_UNITS = {"k": 1000, "m": 1000**2, "K": 1 << 10, "M": 1 << 20}


class Section:
    def __init__(
        self, node: MapNode | None, file: Path, prefix: str, problems: list[Problem]
    ) -> None:
        self._entries: dict[str, Entry] = {} if node is None else node.entries
        self._file = file
        self._prefix = prefix
        self._problems = problems
        self.defaulted: set[str] = set()
        """Dotted keys left to their default."""

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def dotted(self, key: str) -> str:
        return f"{self._prefix}.{key}" if self._prefix else key

    def node(self, key: str) -> Node | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.node

    def report(self, key: str, code: str, message: str, hint: str) -> None:
        """A problem with a value. Its place in the file is filled in from the key later."""
        self._problems.append(Problem(code, message, hint, self._file, key=self.dotted(key)))

    def report_key(self, key: str, code: str, message: str, hint: str) -> None:
        """A problem with the key itself, placed where the key stands."""
        entry = self._entries[key]
        dotted = self.dotted(key if len(key) <= 60 else f"{key[:60]}...")
        self._problems.append(
            Problem(code, message, hint, self._file, entry.line, entry.column, dotted)
        )

    def _scalar(self, key: str, wanted: str, default: Any) -> ScalarNode | None:
        """The node, or None: left out, null where that is the default, or wrong."""
        node = self.node(key)
        if node is None:
            self.defaulted.add(self.dotted(key))
            return None
        if not isinstance(node, ScalarNode):
            self.wrong_type(key, wanted)
            return None
        if node.kind == "null":
            if default is not None:
                hint = f"give a value, or delete the line to use the default ({default})"
                self.report(key, "empty-value", f"{self.dotted(key)} has no value", hint)
            else:
                self.defaulted.add(self.dotted(key))
            return None
        return node

    def wrong_type(self, key: str, wanted: str, hint: str | None = None) -> None:
        node = self.node(key)
        assert node is not None
        message = f"{self.dotted(key)} is {describe_node(node)}, {wanted} wanted"
        self.report(key, "wrong-type", message, hint or f"write {wanted}")

    def integer(
        self, key: str, default: int | None, *, minimum: int = 1, maximum: int | None = None
    ) -> int | None:
        node = self._scalar(key, "integer", default)
        if node is None:
            return default if self.dotted(key) in self.defaulted else None
        if node.kind != "integer":
            self.wrong_type(key, "integer", integer_hint(node))
            return None
        value = int(node.text)
        if value < minimum:
            message = f"{self.dotted(key)} is {value}; it must be at least {minimum}"
            self.report(key, "out-of-range", message, f"give an integer from {minimum}")
            return None
        if maximum is not None and value > maximum:
            message = f"{self.dotted(key)} is {value}; it must be at most {maximum}"
            self.report(key, "out-of-range", message, f"give {minimum} to {maximum}")
            return None
        return value

    def boolean(self, key: str, default: bool | None) -> bool | None:
        shown = None if default is None else str(default).lower()
        node = self._scalar(key, "true or false", shown)
        if node is None:
            return default if self.dotted(key) in self.defaulted else None
        if node.kind != "boolean":
            meant = _YES_NO.get(node.text.lower())
            if node.quoted and node.text in ("true", "false"):
                meant = node.text == "true"
            hint = None if meant is None else f"write {str(meant).lower()}, without quotes"
            self.wrong_type(key, "true or false", hint)
            return None
        return bool(node.value)

    def string(self, key: str, default: str | None) -> str | None:
        node = self._scalar(key, "string", default)
        if node is None:
            return default if self.dotted(key) in self.defaulted else None
        if node.kind != "string":
            self.wrong_type(key, "string", f'put it in quotes: {key}: "{show(node.text)}"')
            return None
        if not node.text.strip() or not node.text.isprintable():
            message = f"{self.dotted(key)} is {show(node.text)}"
            self.report(
                key, "bad-text", message, "write text on one line, without control characters"
            )
            return None
        return node.text

    def choice(self, key: str, choices: Iterable[str], default: str | None) -> str | None:
        value = self.string(key, default)
        options = list(choices)
        if value is None or self.dotted(key) in self.defaulted or value in options:
            return value
        near = nearest(value.lower(), options)
        hint = f"did you mean {near}?" if near else f"one of {', '.join(options)}"
        message = f"{self.dotted(key)} {show(value)} is none of {', '.join(options)}"
        self.report(key, "unknown-value", message, hint)
        return None

    def items(self, key: str, wanted: str, hint: str | None = None) -> list[Node] | None:
        """A list's nodes; None where the key is left out, null or wrong. `hint`: for wrong."""
        node = self.node(key)
        if node is None or (isinstance(node, ScalarNode) and node.kind == "null"):
            self.defaulted.add(self.dotted(key))
            return None
        if isinstance(node, ListNode):
            return list(node.items)
        self.wrong_type(key, wanted, hint or _list_hint(key, node))
        return None

    def child(self, key: str) -> "Section":
        """A nested section; left out and empty are the same."""
        node = self.node(key)
        if isinstance(node, MapNode):
            return Section(node, self._file, self.dotted(key), self._problems)
        if node is not None and not (isinstance(node, ScalarNode) and node.kind == "null"):
            self.wrong_type(key, "mapping", f"write the keys of {key} below it, indented by two")
        return Section(None, self._file, self.dotted(key), self._problems)

    def plain(self, key: str) -> Any:
        """Any value as fresh Python data. Scalars that YAML's readers dispute are reported."""
        node = self.node(key)
        assert node is not None
        return self._plain(node, key)

    def _plain(self, node: Node, key: str) -> Any:
        if isinstance(node, ListNode):
            return [self._plain(item, f"{key}[{i}]") for i, item in enumerate(node.items)]
        if isinstance(node, MapNode):
            return {k: self._plain(e.node, f"{key}.{k}") for k, e in node.entries.items()}
        if node.kind == "odd":
            message = f"readers of YAML disagree on what {show(node.text)} is"
            hint = f'for the text, write "{show(node.text)}" with the quotes'
            if node.text.lower() in _YES_NO:
                hint = f"for the boolean, write {str(_YES_NO[node.text.lower()]).lower()}; {hint}"
            elif (meant := meant_integer(node.text)) is not None:
                hint = f"for the number, write {meant}; {hint}"
            self.report(key, "ambiguous-value", message, hint)
        return node.value


def describe_node(node: Node) -> str:
    if isinstance(node, ListNode):
        return "a list"
    if isinstance(node, MapNode):
        return "a mapping"
    if node.kind != "odd":
        return describe(node.value)
    # PyYAML's answer, which is what people compare with.
    is_float = re.fullmatch(r"[-+]?[0-9.][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?", node.text)
    return f"{'float' if is_float else 'string'} {show(node.text)}"


def meant_integer(text: str) -> int | None:
    """The integer a person meant by text that is none, where that is clear."""
    if len(text) > 20:
        return None
    plain = text.strip().replace("_", "").replace(",", "")
    if re.fullmatch(r"0[xX][0-9a-fA-F]+|0[bB][01]+|0o[0-7]+", plain):
        return int(plain, 0)
    if re.fullmatch(r"[1-9][0-9]*", plain):
        return int(plain)
    # As vLLM reads its own arguments: 2k is 2000, 2K is 2048.
    if unit := re.fullmatch(r"([1-9][0-9]*)([kKmM])", plain):
        return int(unit[1]) * _UNITS[unit[2]]
    if re.fullmatch(r"[1-9][0-9]*(\.[0-9]*)?([eE][-+]?[0-9]{1,2})?", plain):
        value = float(plain)
        if value < 1e15 and value.is_integer():
            return int(value)
    return None


def integer_hint(node: Node) -> str:
    if isinstance(node, ScalarNode):
        if node.quoted and re.fullmatch("[1-9][0-9]*", node.text):
            return f"remove the quotes: {show(node.text)}"
        if (meant := meant_integer(node.text)) is not None:
            return f"write {meant}"
    return "write a plain decimal integer, e.g. 1024"


def _list_hint(key: str, node: Node) -> str:
    if isinstance(node, ScalarNode):
        parts = [meant_integer(part) for part in re.split(r"[,\s]+", node.text.strip(" []"))]
        if parts and all(part is not None for part in parts):
            return f"write {key}: {parts}"
    return f"write a list, e.g. {key}: [128, 512, 2048]"
