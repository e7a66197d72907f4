"""`compiler.flags`: which arguments of neuronx-cc a model file may add to ours.

What has a key of its own, or belongs to the build, is given once, by us: of two, neuronx-cc takes
the last, and then the model file, the cache key and the lock would name what is not so.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_TARGET, _LNC = "set target instead", "set compiler.lnc instead"
_OPTLEVEL, _AUTO_CAST = "set compiler.optlevel instead", "set compiler.auto_cast instead"
_BUILD = "delete it: each compile has a folder of its own, and `nxbucket compile` keeps the log"
_FRAMEWORK = "delete it: it is an option of frameworks and their cache, not of neuronx-cc"

PINNED = {
    "--target": _TARGET,
    "--lnc": _LNC,
    "-lnc": _LNC,
    "--logical-nc-config": _LNC,
    "-O": _OPTLEVEL,
    "--optlevel": _OPTLEVEL,
    "--enable-experimental-O1": _OPTLEVEL,
    "--auto-cast": _AUTO_CAST,
    "--framework": "delete it: it is always XLA",
    "--output": _BUILD,
    "--logfile": _BUILD,
    "--verbose": _BUILD,
    "--help": "delete it",
    "-h": "delete it",
    "--cache_dir": "set artifacts.cache instead",
    "--cache-dir": "set artifacts.cache instead",
    "--no_cache": _FRAMEWORK,
    "--no-cache": _FRAMEWORK,
    "--retry_failed_compilation": "delete it: a failure is never remembered here",
    "--retry-failed-compilation": "delete it: a failure is never remembered here",
    "--log_level": _FRAMEWORK,
}
JOINED = re.compile(r"(-O|-lnc)[0-9]+")
"""A short option that takes its value without a space: -O3."""

NO_EFFECT = {
    "--native-int64": (("trn2", "trn3"), "needs trn2 or later"),
    "--enable-saturate-infinity": (("trn1", "trn1n"), "has an effect on trn1 only"),
}
"""Options that are for some targets; the compiler takes them on the others too."""


@dataclass(frozen=True)
class FlagProblem:
    index: int
    message: str
    hint: str


def check_flags(flags: Sequence[str]) -> Iterator[FlagProblem]:
    """One problem for each item that neuronx-cc must not get from a model file."""
    for index, flag in enumerate(flags):
        if not flag.startswith("-"):
            if index == 0:
                message = f"compiler.flags[0] is {flag!r}, no option: neuronx-cc would read a file"
                yield FlagProblem(0, message, "begin with the option, which starts with -")
            continue
        name = re.split(r"[=\s]", flag, maxsplit=1)[0]
        if (pinned := _pinned(name)) is not None:
            message = f"compiler.flags[{index}] is {flag!r}, and {pinned} is given to neuronx-cc"
            yield FlagProblem(index, f"{message} already", PINNED[pinned])
        elif len(name) < len(flag) and flag[len(name)] != "=":
            message = f"compiler.flags[{index}] is {flag!r}: neuronx-cc would read one word"
            value = flag[len(name) :].strip()
            yield FlagProblem(index, message, f'write "{name}={value}", or two items of the list')


def as_list(text: str) -> str:
    """The list that a string of options was meant to be, each option with its value."""
    items: list[str] = []
    for word in text.split():
        if word.startswith("-") or not items or "=" in items[-1]:
            items.append(word)
        else:
            items[-1] += f"={word}"
    return json.dumps(items)


def _pinned(name: str) -> str | None:
    """The option of ours that `name` is, also where it is cut short or joined with its value."""
    if name in PINNED:
        return name
    if (joined := JOINED.fullmatch(name)) is not None:
        return joined[1]
    if name.startswith("--") and len(name) > 3:
        return next((pinned for pinned in PINNED if pinned.startswith(name)), None)
    return None


def notes_on_flags(flags: Sequence[str], target: str) -> Iterator[str]:
    for flag in flags:
        name = flag.partition("=")[0]
        targets, why = NO_EFFECT.get(name, ((target,), ""))
        if target not in targets:
            yield f"compiler.flags: {name} {why}, and target is {target}"
