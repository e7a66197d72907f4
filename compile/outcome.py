"""What is known of each program while a build runs, and how it came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from nxbucket.compile.cache import LockHolder, Lookup
from nxbucket.compile.eta import Eta
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.program import BucketProgram


@dataclass(frozen=True)
class PlannedProgram:
    """A program with its input key and what the cache holds for it."""

    program: BucketProgram
    inputs: dict[str, Any]
    key: str
    found: Lookup

    @property
    def name(self) -> str:
        return self.program.name


Status = Literal[
    "hit", "pulled", "compiled", "rebuilt", "reused", "adopted", "failed", "unpushed", "skipped"
]
"""`pulled`: from the remote. `reused`: another entry had the same graph's artifact. `rebuilt`: the
artifact was corrupt. `adopted`: compiled here, but another host had pushed other bytes first, and
they are used. `unpushed`: in the cache, and the remote did not take it. `skipped`: never begun,
since another program failed."""


@dataclass(frozen=True)
class Outcome:
    """How one program came out.

    `detail` says what was wrong with an artifact that was there, if anything; of a failure, it is
    the reason; read on in `log_path`. `hlo_path`: what the compiler was given, if it was an HLO.
    `retryable`: it may be better the next time.
    """

    planned: PlannedProgram
    status: Status
    wall_s: float
    manifest: Manifest | None
    detail: str | None = None
    log_path: Path | None = None
    hlo_path: Path | None = None
    log_tail: str = ""
    hint: str | None = None
    retryable: bool = False

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def what_failed(self) -> str:
        """Of a `failed` or `unpushed` one, as the rest of a sentence about the program."""
        if self.status == "unpushed":
            return f"in the cache, and not pushed: {self.detail}"
        return f"the compiler {self.detail}"


class Reporter(Protocol):
    """Told what happens, from several threads. `place`: the host, where it is not this one."""

    def planned(self, programs: Sequence[PlannedProgram]) -> None: ...
    def begins(self, eta: Eta) -> None: ...
    def started(self, planned: PlannedProgram, place: str | None = None) -> None: ...
    def waiting(self, planned: PlannedProgram, holder: LockHolder | None) -> None: ...
    def finished(self, outcome: Outcome) -> None: ...
    def noted(self, sentence: str) -> None: ...
