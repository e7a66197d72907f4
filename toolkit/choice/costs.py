"""What programs cost by their size: a step's time, a compile's time, memory. Read from costs.json.

`nxbucket calibrate` writes the file for target cpu; for a device a person writes it, with as many
sizes as were measured. Between two sizes the cost is interpolated; above them the line goes on,
below them the smallest one's holds.

    {
      "format": 1,
      "target": "trn2-lnc2",
      "source": "profiled on a trn2.48xlarge, 2026-11-02",
      "prefill": {"step_s": {"128": 0.006, "8192": 0.19}, "compile_s": {"128": 500, "8192": 2700}},
      "decode": {"step_s": {"1": 0.009, "8": 0.011}, "program_bytes": {"1": 70000000}}
    }
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nxbucket.toolkit.errors import UsageError

Seconds = Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, lt=1 << 50)]
Line = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""Text that ends up in a comment of YAML."""
Size = Annotated[int, Field(gt=0, lt=1 << 31)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PhaseCosts(_Model):
    """Each by bucket: tokens for prefill, sequences for decode."""

    step_s: dict[Size, Seconds] = {}
    """One execution, with all that a server does around it."""
    compile_s: dict[Size, Seconds] = {}
    program_bytes: dict[Size, Bytes] = {}
    """Device memory that a loaded program takes for itself: code, constants, rings."""


class Costs(_Model):
    format: Literal[1]
    target: Line
    source: Line
    """Where the numbers come from, for people."""
    prefill: PhaseCosts = PhaseCosts()
    decode: PhaseCosts = PhaseCosts()


@dataclass(frozen=True)
class Curve:
    """Straight lines through measured points. Above the last the line goes on; below the first,
    where a line could end in nothing, the first point's value holds."""

    points: tuple[tuple[int, float], ...]

    @classmethod
    def rising(cls, measured: Mapping[int, float]) -> "Curve":
        """A smaller size's value stands where a larger one is below it."""
        points = sorted(measured.items())
        highest = accumulate((value for _, value in points), max)
        return cls(tuple((size, value) for (size, _), value in zip(points, highest, strict=True)))

    def __call__(self, size: int) -> float:
        points = self.points
        if len(points) == 1 or size <= points[0][0]:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if size <= right or right == points[-1][0]:
                return low + (high - low) * (size - left) / (right - left)
        raise AssertionError("a curve has points")


def read_costs(file: Path) -> Costs:
    """Raises UsageError with the key that is wrong."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        json.loads(text)
    except FileNotFoundError:
        hint = "nxbucket calibrate model.yaml --output costs.json measures target cpu"
        raise UsageError(f"no such file: {file}", hint=hint) from None
    except json.JSONDecodeError as err:
        raise UsageError(
            f"{file}:{err.lineno}:{err.colno}: not JSON: {err.msg}",
            hint="docs/choosing-buckets.md shows a costs file",
        ) from None
    except (OSError, UnicodeDecodeError, RecursionError) as err:
        raise UsageError(f"{file}: cannot be read: {err}", hint="name a costs file") from None
    try:
        return Costs.model_validate_json(text, strict=True)
    except ValidationError as err:
        first = err.errors()[0]
        # pydantic puts [key] behind a key that is no size.
        place = ".".join(str(part) for part in first["loc"] if part != "[key]") or "the file"
        raise UsageError(
            f"{file}: {place}: {_SAID.get(first['type'], first['msg'])}", hint=_hint(first)
        ) from None


_SAID = {
    "missing": "is missing",
    "extra_forbidden": "no such key",
    "float_type": "a number of seconds is wanted",
    "int_type": "a whole number is wanted",
    "int_parsing": "a bucket's size is wanted, as a whole number in quotes",
    "string_type": "text is wanted",
    "string_pattern_mismatch": "text on one line is wanted",
    "model_type": "an object is wanted",
    "dict_type": 'an object is wanted: {"128": 0.006}',
    "finite_number": "a finite number is wanted",
}


def _hint(error: object) -> str:
    assert isinstance(error, dict)
    if error["type"] == "extra_forbidden":
        known = [*Costs.model_fields, *PhaseCosts.model_fields]
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return "docs/choosing-buckets.md shows a costs file"
