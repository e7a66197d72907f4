"""`profile:` of a model file: what it takes from a profile, and how its problems are told.

A key of the model file wins over the profile's; in a section, key by key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nxbucket.toolkit.errors import NxbucketError, Problem, SpecError
from nxbucket.toolkit.profiles import is_path, load_profile
from nxbucket.toolkit.section import Section
from nxbucket.toolkit.yaml_source import Document, Entry, MapNode, Node, ScalarNode

SECTIONS = ("neuron_config", "compiler")


@dataclass(frozen=True)
class Base:
    """`keys`: dotted, those whose values are the profile's."""

    document: Document
    name: str
    keys: frozenset[str]

    def told(self, problems: list[Problem]) -> list[Problem]:
        return [self._told(problem) for problem in problems]

    def _told(self, problem: Problem) -> Problem:
        """Says which of the values in a message are the profile's, and what mends those."""
        if problem.file != self.document.file:
            return problem
        own = next((k for k in self.keys if _is_within(problem.key or "", k)), None)
        named = {key for key in self.keys if re.search(rf"\b{re.escape(key)}\b", problem.message)}
        if own is not None:
            named.add(own)
        if not named:
            return problem
        said = f"{problem.message}; {_and(sorted(named))} from profile {self.name}"
        if own is None:
            return replace(problem, message=said)
        place = self.document.root.entries["profile"].node
        hint = self._hint(problem, own)
        return replace(problem, message=said, hint=hint, line=place.line, column=place.column)

    def _hint(self, problem: Problem, key: str) -> str:
        """The line to mend is not in this file."""
        file = self.document.file.name
        if problem.code in ("cannot-hold", "unknown-key"):
            if is_path(self.name):
                return f"in {self.name}: {problem.hint}"
            return (
                "this profile cannot hold here as it is: instead of it, write the keys that can "
                f"into {file}; `nxbucket profiles show {self.name}` prints them"
            )
        if "delete the line" in problem.hint:
            return problem.hint.replace("delete the line", f"write {key}: null in {file}")
        return f"{problem.hint}; {key} in {file} wins over the profile's"


def start_from_profile(document: Document, problems: list[Problem]) -> tuple[MapNode, Base | None]:
    """The tree to read, and what of it is the profile's. What is wrong with it is noted."""
    top = Section(document.root, document.file, "", problems)
    name = top.string("profile", None)
    if name is None:
        return document.root, None
    try:
        profile = load_profile(name, document.file.parent)
    except SpecError as err:
        problems += err.problems
        return document.root, None
    except NxbucketError as err:
        top.report("profile", "profile-not-found", err.message, err.hint or "")
        return document.root, None
    entries, keys = _merged(profile.tree.entries, document.root.entries)
    root = MapNode(entries, document.root.line, document.root.column)
    return root, Base(document, name, frozenset(keys))


def _merged(
    base: Mapping[str, Entry], own: Mapping[str, Entry]
) -> tuple[dict[str, Entry], set[str]]:
    merged = {**base, **own}
    keys: set[str] = set()
    for name, entry in base.items():
        inner = entry.node
        if name not in SECTIONS or not isinstance(inner, MapNode):
            keys |= {name} - own.keys()
            continue
        given = own[name].node if name in own else None
        if given is not None and not isinstance(given, MapNode) and not _is_null(given):
            continue  # neither a section nor empty: reported as what it is
        theirs = given.entries if isinstance(given, MapNode) else {}
        place = own.get(name, entry)
        node = MapNode({**inner.entries, **theirs}, place.node.line, place.node.column)
        merged[name] = Entry(place.line, place.column, node)
        keys |= {f"{name}.{key}" for key in inner.entries if key not in theirs}
    return merged, keys


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.kind == "null"


def _is_within(path: str, key: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}["))


def _and(keys: list[str]) -> str:
    if len(keys) == 1:
        return f"{keys[0]} is"
    return f"{', '.join(keys[:-1])} and {keys[-1]} are"
