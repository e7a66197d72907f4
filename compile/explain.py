"""Why an artifact is not there: what differs between what was asked for and what there is.

Plain functions over plain values. A name is the dotted path of a key input, e.g.
`architecture.rope.theta`; docs/cache-keys.md lists them.
"""

import contextlib
import json
import math
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final = _Absent()
"""One side has no such input: it was made by a release that did not know it."""


@dataclass(frozen=True)
class Difference:
    """One value that differs: `there` in what exists, `wanted` in what was asked for."""

    name: str
    there: Any
    wanted: Any

    def __str__(self) -> str:
        name = self.name if self.name.isprintable() else show(self.name)
        return f"{name}: {show(self.there)} -> {show(self.wanted)}"

    def as_json(self) -> dict[str, Any]:
        """A side that is absent has no field."""
        sides = {"there": self.there, "wanted": self.wanted}
        return {"name": self.name, **{k: v for k, v in sides.items() if v is not ABSENT}}


@dataclass(frozen=True)
class Nearest:
    """The entry that differs least from what was asked for."""

    key: str
    program: str
    differences: tuple[Difference, ...]


def differences(there: Any, wanted: Any, name: str = "") -> list[Difference]:
    """Every leaf that differs, in the order of its name. Types count: 1, 1.0 and true are three."""
    return list(_differences(there, wanted, name))


def _differences(there: Any, wanted: Any, name: str) -> Iterator[Difference]:
    if isinstance(there, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*there, *wanted}):
            dotted = f"{name}.{key}" if name else str(key)
            yield from _differences(there.get(key, ABSENT), wanted.get(key, ABSENT), dotted)
        return
    if _same(there, wanted):
        return
    yield from _inside_json_text(there, wanted, name) or [Difference(name, there, wanted)]


def _same(there: Any, wanted: Any) -> bool:
    if there is ABSENT or wanted is ABSENT:
        return there is wanted
    return json.dumps(there, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def _inside_json_text(there: Any, wanted: Any, name: str) -> list[Difference]:
    """Where both are JSON objects as text (the compiler's options), what differs inside them."""
    if isinstance(there, str) and isinstance(wanted, str) and there[:1] == wanted[:1] == "{":
        with contextlib.suppress(ValueError, RecursionError):
            return differences(json.loads(there), json.loads(wanted), name)
    return []


def nearest(
    wanted: Mapping[str, Any], entries: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> Nearest | None:
    """Of `entries` (key -> program's name and key inputs), the one with the fewest differences.

    Of equals, the same phase first, then the nearest size, then by key: the same answer every
    time. A program of another model never hides one of this model in another size, as it differs
    in more.
    """
    candidates = [
        Nearest(key, program, tuple(differences(inputs, wanted)))
        for key, (program, inputs) in entries.items()
    ]
    return min(candidates, key=_distance, default=None)


def _distance(candidate: Nearest) -> tuple[int, bool, float, str]:
    by_name = {d.name: d for d in candidate.differences}
    size = by_name.get("program.size")
    apart = 0.0 if size is None else _apart(size.there, size.wanted)
    return len(candidate.differences), "program.phase" in by_name, apart, candidate.key


def _apart(there: Any, wanted: Any) -> float:
    if type(there) is int and type(wanted) is int:
        return abs(there - wanted)
    return math.inf


def remedy(found: Nearest | None, model_file: Path, runnable_targets: Collection[str]) -> str:
    """The one thing to do about a miss: compile, unless another host's artifact can be had here."""
    there = {d.name: d.there for d in found.differences} if found else {}
    wanted = {d.name: d.wanted for d in found.differences} if found else {}
    if set(there) == {"toolchain.torch"}:
        torch = str(there["toolchain.torch"])
        # Another minor release is another vLLM.
        if torch.isprintable() and _minor(torch) == _minor(str(wanted["toolchain.torch"])):
            return f"pip install {shlex.quote(f'torch=={torch}')}"
    follows_march = all(
        name in ("target", "toolchain.march") or name.startswith("toolchain.options.")
        for name in there
    )
    if follows_march and there.get("target") in runnable_targets and "toolchain.march" in there:
        return f"set `compiler: {{march: {there['toolchain.march']}}}` in {model_file}"
    return compile_command(model_file)


def compile_command(model_file: Path, *, emulate: bool = False) -> str:
    return f"nxbucket compile {shlex.quote(str(model_file))}{' --emulate' if emulate else ''}"


def emulate_command(command: str, model_file: Path) -> str:
    return f"nxbucket {command} {shlex.quote(str(model_file))} --emulate"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def show(value: Any, limit: int = 120) -> str:
    """A value on one line of a terminal: JSON in ASCII, cut to size."""
    if value is ABSENT:
        return repr(value)
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
