"""How one compile failed, as the worker tells the process that started it."""

import json
from dataclasses import dataclass
from typing import Any

from nxbucket.toolkit.errors import CompileError, NxbucketError


class ProgramFailed(CompileError):
    """One program did not compile. `message` goes on from "the compiler": "was killed by …".

    `retryable`: not the program's fault, such as memory that was short; worth one more try.
    """

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable


@dataclass(frozen=True)
class Failure:
    """`reason` goes on from "the compiler", `hint` is the command or edit that mends it."""

    reason: str
    hint: str | None = None
    retryable: bool = False

    @classmethod
    def of(cls, error: NxbucketError) -> "Failure":
        if isinstance(error, ProgramFailed):
            return cls(error.message, error.hint, error.retryable)
        return cls(f"reports: {error.message}", error.hint)

    def as_json(self) -> dict[str, Any]:
        failure = {"reason": self.reason, "hint": self.hint, "retryable": self.retryable}
        return {"failure": failure}

    @classmethod
    def from_json(cls, text: str) -> "Failure | None":
        """None for anything that `as_json` did not write: a worker may die while it writes."""
        try:
            raw = json.loads(text)["failure"]
            reason, hint, retryable = raw["reason"], raw["hint"], raw["retryable"]
        except (ValueError, KeyError, TypeError):
            return None
        return cls(str(reason), None if hint is None else str(hint), retryable is True)
