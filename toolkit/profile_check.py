"""Whether profiles are what they say: the spec reader's verdict against `refused_today`.

config.json of a hub id is not always to be had. What needs it is then left open, and said.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nxbucket.compile.neuron.instances import INSTANCES
from nxbucket.toolkit.errors import EnvironmentProblem, NxbucketError, Problem, SpecError
from nxbucket.toolkit.model_folder import CommitOf, ask_the_hub
from nxbucket.toolkit.profiles import Profile, read_profile
from nxbucket.toolkit.spec_reader import LNC_OF, read_values
from nxbucket.toolkit.yaml_source import Document, Entry, MapNode, ScalarNode

WITHOUT_CONFIG_JSON = frozenset({"not-yet", "cannot-hold", "unknown-key"})
"""Codes that the model file alone decides."""


@dataclass(frozen=True)
class Verdict:
    """What the spec reader says of a model with a profile's `config`.

    `unread`: why config.json could not be read. What depends on it is not among the problems.
    """

    values: Mapping[str, Any]
    problems: tuple[Problem, ...]
    unread: str | None
    hub_is_gone: bool = False

    @property
    def codes(self) -> list[str]:
        return list(dict.fromkeys(problem.code for problem in self.problems))


@dataclass(frozen=True)
class Finding:
    code: str
    message: str
    place: str
    """file:line:column, as far as it is known."""
    hint: str


def _finding(problem: Problem) -> Finding:
    return Finding(problem.code, problem.message, problem.place, problem.hint)


@dataclass(frozen=True)
class Report:
    """Of one profile. `today`: the codes that were found."""

    name: str
    today: tuple[str, ...]
    unread: str | None
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    profile: Profile,
    model: str,
    *,
    file: Path | None = None,
    commit_of: CommitOf = ask_the_hub,
    **own: str,
) -> Verdict:
    """`own`: keys of the model file, which win. `file`: where it would be."""
    given = {"model": model, **own}
    entries = {key: Entry(1, 1, _text(value)) for key, value in given.items()}
    root = MapNode({**profile.tree.entries, **entries}, 1, 1)
    document = Document(file or profile.file, root, ())
    try:
        values, problems = read_values(document, commit_of)
    except EnvironmentProblem as err:
        return Verdict({}, (), err.message, hub_is_gone=True)
    lookup: list[Problem] = []
    found: list[Problem] = []
    for problem in document.placed(problems):
        unread = problem.code == "model-not-found" or problem.code.startswith("hub-")
        (lookup if unread else found).append(problem)
    if not lookup:
        return Verdict(values, tuple(found), None)
    hub_is_gone = lookup[0].code == "hub-unreachable"
    return Verdict(values, tuple(found), lookup[0].message, hub_is_gone)


def _text(text: str) -> ScalarNode:
    return ScalarNode(text, "string", True, 1, 1)


class Checker:
    """Asks for each model once, and for no other after a hub that cannot be reached."""

    def __init__(self, *, online: bool) -> None:
        self._online = online
        self._gone: str | None = None
        self._commits: dict[str, str] = {}

    def check(self, name: str, file: Path) -> Report:
        try:
            profile = read_profile(file, name)
        except SpecError as err:
            return Report(name, (), None, tuple(map(_finding, err.problems)))
        except NxbucketError as err:
            return Report(
                name, (), None, (Finding(err.code, err.message, str(file), err.hint or ""),)
            )
        verdict = self._judge(profile)
        found = [*_against_statement(profile, verdict), *_of_instances(profile)]
        findings = tuple(map(_finding, profile.document.placed(found)))
        return Report(name, tuple(verdict.codes), verdict.unread, findings)

    def _judge(self, profile: Profile) -> Verdict:
        published = next((m for m in profile.published.models if "*" not in m), None)
        if published is None:
            return judge(profile, "any/model", commit_of=_no_model)
        verdict = judge(profile, published, commit_of=self._commit_of)
        if commit := verdict.values.get("model_commit"):
            self._commits[published] = commit
        if verdict.hub_is_gone and self._online:
            self._online, self._gone = False, verdict.unread
        return verdict

    def _commit_of(self, model: str, revision: str | None) -> str | None:
        if model in self._commits:
            return self._commits[model]
        if self._online:
            return revision
        try:
            return cached_commit(model)
        except EnvironmentProblem:
            if self._gone is None:
                raise
            raise EnvironmentProblem(self._gone) from None


def _no_model(_: str, __: str | None) -> str | None:
    raise EnvironmentProblem("the profile names no model")


def cached_commit(model: str) -> str:
    """Of the main branch, as this host last knew it. Raises EnvironmentProblem if it never did."""
    from huggingface_hub import constants

    repo = Path(constants.HF_HUB_CACHE).expanduser() / f"models--{model.replace('/', '--')}"
    try:
        commit = (repo / "refs" / "main").read_text().strip()
        if (repo / "snapshots" / commit / "config.json").is_file():
            return commit
    except (OSError, UnicodeError):
        pass
    raise EnvironmentProblem(
        f"{model} is not in the hub's cache on this host", hint="--online asks the hub"
    )


def _against_statement(profile: Profile, verdict: Verdict) -> Iterable[Problem]:
    stated = profile.refused_codes
    for problem in verdict.problems:
        if problem.code not in stated:
            message = f"found and not stated: {problem.message}"
            hint = f"{problem.hint}; or state {problem.code} in refused_today"
            yield replace(problem, message=message, hint=hint)
    for index, code in enumerate(stated):
        open_today = verdict.unread is not None and code not in WITHOUT_CONFIG_JSON
        if code not in verdict.codes and not open_today:
            message = f"stated in refused_today and not found: {code}"
            key, hint = f"refused_today[{index}]", "delete it"
            yield Problem("not-refused", message, hint, profile.file, key=key)


def _of_instances(profile: Profile) -> Iterable[Problem]:
    ranks = profile.config.get("tensor_parallel_size", 1)
    compiler = profile.config.get("compiler")
    lnc = compiler.get("lnc") if isinstance(compiler, dict) else None
    for index, name in enumerate(profile.published.instances):
        key = f"instances[{index}]"
        instance = INSTANCES.get(name)
        if instance is None:
            message, hint = (
                f"no instance type {name} is known here",
                f"known: {', '.join(INSTANCES)}",
            )
            yield Problem("instance-unknown", message, hint, profile.file, key=key)
            continue
        if profile.target not in (None, instance.target):
            message = f"{name} is of target {instance.target}, and target is {profile.target}"
            hint = f"write target: {instance.target}, or name another instance type"
            yield Problem("instance-target", message, hint, profile.file, key=key)
        size = lnc if isinstance(lnc, int) else LNC_OF[instance.target][0]
        cores = instance.logical_cores(size)
        if isinstance(ranks, int) and ranks > cores:
            message = (
                f"tensor_parallel_size {ranks} is above the {cores} logical cores of {name} at "
                f"lnc {size}"
            )
            hint = f"tensor_parallel_size of {cores} or less, or a larger instance type"
            yield Problem("instance-cores", message, hint, profile.file, key=key)
