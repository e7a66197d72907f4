"""Every error nxbucket raises on purpose.

    NxbucketError                     exit 1, unless said otherwise below
    ├── UsageError                    exit 2: the command line itself is wrong
    ├── EnvironmentProblem            exit 3: a tool, package or permission this host lacks
    ├── SpecError                     the model file; carries every Problem found in it
    ├── ModelError                    config.json or the weight files
    │   └── ModelLookupError          no such folder, or the hub does not hand the model out
    ├── CacheError                    the artifact cache
    ├── TraceError                    a trace, or a server's metrics
    ├── StoreError                    a shared store: a folder or an S3 bucket
    ├── ArtifactError                 a file that is no whole artifact
    ├── LockError                     model.lock
    ├── CompileError                  one or more programs did not compile
    ├── HloError                      a file is no HloModuleProto
    └── BindError                     an artifact and the server do not fit each other

Library code raises these; only `cli.main` prints them. Each carries what is wrong, and `hint`: the
command or the edit that mends it. Anything else that escapes is a bug and keeps its traceback.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar


class NxbucketError(Exception):
    """Something the person at the keyboard can mend.

    Args are fields, so that `--json` can report them: `message` says what is wrong and where,
    `hint` what to type or edit next.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_json(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.message, "hint": self.hint}}


class UsageError(NxbucketError):
    exit_code = 2
    code = "usage"


class EnvironmentProblem(NxbucketError):
    exit_code = 3
    code = "environment"


class ModelError(NxbucketError):
    code = "model"


class ModelLookupError(ModelError):
    """`problem_code` is a Problem's; `key` is the key of model.yaml that asked."""

    def __init__(self, code: str, message: str, *, hint: str, key: str = "model") -> None:
        super().__init__(message, hint=hint)
        self.problem_code = code
        self.key = key


class CacheError(NxbucketError):
    code = "cache"


class StoreError(NxbucketError):
    code = "store"


class TraceError(NxbucketError):
    code = "trace"


class ArtifactError(NxbucketError):
    code = "artifact"


class LockError(NxbucketError):
    code = "lock"


class CompileError(NxbucketError):
    code = "compile"


class HloError(NxbucketError):
    code = "hlo"


class BindError(NxbucketError):
    code = "bind"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a file a person wrote. Lines and columns count from 1."""

    code: str
    """Stable and greppable, e.g. `bucket-not-ascending`."""
    message: str
    hint: str
    file: Path
    line: int | None = None
    column: int | None = None
    key: str | None = None
    """Dotted path in the file, e.g. `neuron_config.num_seqs_buckets[2]`."""

    @property
    def place(self) -> str:
        parts = [str(self.file), *(str(n) for n in (self.line, self.column) if n is not None)]
        return ":".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "file": str(self.file)}


class SpecError(NxbucketError):
    """The model file is wrong; `problems` holds everything found in one run, in file order."""

    code = "spec"

    def __init__(self, problems: list[Problem]) -> None:
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{problems[0].file}: {len(problems)} {noun}")
        self.problems = problems

    def as_json(self) -> dict[str, Any]:
        error = super().as_json()["error"]
        return {"error": error, "problems": [p.as_json() for p in self.problems]}
