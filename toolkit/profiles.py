"""`bucket_profiles/`: configurations that people have published, and those a person writes alike.

A profile is a YAML file: where its values are from, the models and instances it was published for,
what of it is refused today, and `config`, the keys of a model file without the model. docs/
profiles.md says how to write one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictStr, ValidationError

from nxbucket.toolkit.buckets import describe, show
from nxbucket.toolkit.errors import Problem, SpecError, UsageError
from nxbucket.toolkit.refusals import nearest
from nxbucket.toolkit.section import Section
from nxbucket.toolkit.yaml_source import Document, MapNode, read_yaml

NOT_IN_CONFIG = {
    "model": "a profile is for any model it fits",
    "revision": "it belongs to a model",
    "profile": "a profile starts from no other",
    "artifacts": "where artifacts are is a matter of the host",
    "serve": "a profile says what is compiled",
}
_WANTED = {
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of code and why",
}
_MEANT = {
    "title": "what it is, in a few words",
    "source": "where the values are from",
    "config": "the keys of a model file, e.g. max_num_seqs",
    "code": "the code that `nxbucket validate` prints",
    "why": "a sentence",
}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Refused(_Strict):
    """A problem that the spec reader has with `config` today, by its code."""

    code: StrictStr
    why: StrictStr


class Published(_Strict):
    """A profile's file."""

    title: StrictStr
    source: StrictStr
    """Repository, commit and path, or whoever wrote it."""
    models: tuple[StrictStr, ...] = ()
    """Hub ids, the published one first, and patterns with `*`."""
    instances: tuple[StrictStr, ...] = ()
    """Instance types it was published for; empty where the source names none."""
    notes: tuple[StrictStr, ...] = ()
    refused_today: tuple[Refused, ...] = ()
    """Empty: it plans as it is."""
    config: dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """`name`: of a file of bucket_profiles/, or the path that was asked for."""

    name: str
    file: Path
    published: Published
    document: Document

    @property
    def tree(self) -> MapNode:
        """`config`, with the places of its values."""
        tree = self.document.root.entries["config"].node
        assert isinstance(tree, MapNode)
        return tree

    @property
    def config(self) -> dict[str, Any]:
        return self.published.config

    @property
    def target(self) -> str | None:
        target = self.config.get("target")
        return target if isinstance(target, str) else None

    @property
    def neuron_config(self) -> dict[str, Any]:
        section = self.config.get("neuron_config")
        return section if isinstance(section, dict) else {}

    @property
    def refused_codes(self) -> list[str]:
        return [refused.code for refused in self.published.refused_today]

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **self.published.model_dump(mode="json")}


@cache
def profiles_folder() -> Path:
    from nxbucket import bucket_profiles

    return Path(next(iter(bucket_profiles.__path__)))


@cache
def profile_names() -> list[str]:
    return sorted(file.stem for file in profiles_folder().glob("*.yaml"))


def is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def profile_file(name: str, beside: Path) -> Path:
    """Of a name, or a path relative to `beside`. Raises UsageError for what is not there."""
    if is_path(name):
        try:
            file = beside / Path(name).expanduser()
            if file.is_file():
                return file
        except (OSError, RuntimeError):
            pass  # a name too long for the file system; `~nobody`
        raise UsageError(
            f"no profile {show(name, 200)} in {beside}",
            hint="a path starts at the file that names it; without / and .yaml it is a name of "
            "`nxbucket profiles ls`",
        )
    if name in profile_names():
        return profiles_folder() / f"{name}.yaml"
    near = nearest(name, profile_names())
    hint = f"did you mean {near}? " if near else ""
    raise UsageError(
        f"no profile {show(name)}",
        hint=f"{hint}`nxbucket profiles ls` has all; a file of your own is named by its path, "
        "e.g. ./my.yaml",
    )


def load_profile(name: str, beside: Path | None = None) -> Profile:
    """Raises UsageError for an unknown name, SpecError with everything wrong in the file."""
    return read_profile(profile_file(name, beside or Path()), name)


def all_profiles() -> list[Profile]:
    """Those of bucket_profiles/, by name."""
    return [load_profile(name) for name in profile_names()]


def read_profile(file: Path, name: str) -> Profile:
    document = read_yaml(file)
    problems = [*document.problems]
    top = Section(document.root, file, "", problems)
    values = {key: top.plain(key) for key in top}
    try:
        published = Published.model_validate(values)
    except ValidationError as err:
        problems += [_problem(dict(error), file) for error in err.errors()]
        raise SpecError(document.placed(problems)) from None
    profile = Profile(name, file, published, document)
    problems += _check_texts(published, file)
    for key, why in NOT_IN_CONFIG.items():
        if key in profile.tree.entries:
            message = f"config.{key}: {why}"
            hint = f"give {key} in the model file"
            problems.append(Problem("profile-key", message, hint, file, key=f"config.{key}"))
    if problems:
        raise SpecError(document.placed(problems))
    return profile


def _problem(error: dict[str, Any], file: Path) -> Problem:
    """What pydantic says, in our words."""
    path = ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    last = str(error["loc"][-1])
    if error["type"] == "extra_forbidden":
        known = Refused.model_fields if "." in path else Published.model_fields
        near = nearest(last, known)
        hint = f"did you mean {near}?" if near else f"known here: {', '.join(known)}"
        if "." not in path and near is None:
            hint += "; keys of a model file go under config"
        return Problem("unknown-key", f"unknown key {show(path)}", hint, file, key=path)
    if error["type"] == "missing":
        return Problem(
            "missing-key", f"{path} is missing: {_MEANT.get(last, '')}", f"add {last}:", file,
            key=path,
        )  # fmt: skip
    wanted = _WANTED.get(error["type"], "another value")
    message = f"{path} is {describe(error['input'])}, {wanted} wanted"
    return Problem("wrong-type", message, f"write {wanted}", file, key=path)


def _check_texts(published: Published, file: Path) -> list[Problem]:
    texts = {"title": published.title, "source": published.source}
    for name in ("models", "instances", "notes"):
        texts |= {f"{name}[{i}]": text for i, text in enumerate(getattr(published, name))}
    return [
        Problem("bad-text", f"{key} is {show(text)}", "write text on one line", file, key=key)
        for key, text in texts.items()
        if not text.strip() or not text.isprintable()
    ]


def match(
    model: str,
    instance: str | None = None,
    target: str | None = None,
    profiles: Iterable[Profile] | None = None,
) -> list[Profile]:
    """Profiles for a model, the best first, those of other instances and targets left out.

    A published hub id comes before a pattern, the very instance before its target, and what serves
    longer texts before what serves shorter ones. `model`: a hub id, or a repository's name alone.
    """
    found = []
    for profile in all_profiles() if profiles is None else profiles:
        by_model, by_instance = _model_rank(profile, model), _rank(profile, instance, target)
        if by_model is None or by_instance is None:
            continue
        length = profile.config.get("max_model_len")
        length = length if isinstance(length, int) else 0
        found.append(((by_model, by_instance, -length, profile.name), profile))
    return [profile for _, profile in sorted(found, key=lambda pair: pair[0])]


def matching_instance(
    profiles: Iterable[Profile], instance: str | None, target: str | None
) -> list[Profile]:
    """Those that are not for another instance or target, in the order they come in."""
    return [profile for profile in profiles if _rank(profile, instance, target) is not None]


def _model_rank(profile: Profile, model: str) -> int | None:
    """`*` in the model asked for stands for anything, too."""
    wanted = model.lower()
    for rank, exact in ((0, True), (1, False)):
        for known in map(str.lower, profile.published.models):
            name = known if "/" in wanted else known.rpartition("/")[2]
            if exact != ("*" in known) and (_fits(wanted, name) or _fits(name, wanted)):
                return rank
    return None


def _fits(wanted: str, pattern: str) -> bool:
    """`*` is the only wildcard."""
    return fnmatchcase(wanted, re.sub(r"([\[?])", r"[\1]", pattern))


def _rank(profile: Profile, instance: str | None, target: str | None) -> int | None:
    if instance in profile.published.instances:
        return 0
    if target is None or profile.target == target:
        return 1
    return 2 if profile.target is None else None
