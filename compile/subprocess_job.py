"""Run one compile as a child process that can be stopped, whole, at any time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nxbucket.compile.failure import Failure
from nxbucket.compile.host_memory import gib
from nxbucket.compile.process_group import group_rss_bytes

TAIL_LINES = 15
POLL_S = 0.1
UNKEYED_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "AOT_INDUCTOR_", "AOTI_")


@dataclass(frozen=True)
class Limits:
    """Of one job, its children included. Past one, all of it is killed."""

    timeout_s: float | None = None
    max_rss_bytes: int | None = None


class Stopped(Exception):
    """The build was interrupted while this job ran."""


@dataclass
class JobFailure(Exception):
    """`reason` is a sentence; `signal_number` is set if the process was killed by one.

    `retryable` is what the worker says of a failure that it knows, and `hint` the mend.
    """

    reason: str
    log_path: Path
    signal_number: int | None = None
    hint: str | None = None
    retryable: bool = False

    @property
    def worth_a_retry(self) -> bool:
        """A signal is often memory, which may be free now. An error stays one."""
        return self.signal_number is not None or self.retryable

    @property
    def log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])


def run_job(
    job: str, work_dir: Path, log_path: Path, limits: Limits, stop: threading.Event
) -> dict[str, object]:
    """Run `nxbucket.compile.worker` on `job`; its result. Raises JobFailure or Stopped.

    The child has an empty working folder, its own log and its own process group, which is killed as
    a whole: compilers start children.
    """
    job_file, result_file = work_dir / "job.json", work_dir / "result.json"
    job_file.write_text(job)
    cwd = work_dir / "cwd"
    cwd.mkdir()
    command = [sys.executable, "-m", "nxbucket.compile.worker", str(job_file), str(result_file)]
    # An editable install and the tests' compilers are found through sys.path, not the folder.
    env = {**_clean_environment(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    log_path.unlink(missing_ok=True)  # it may be another user's
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
    try:
        returncode = _wait(process, limits, stop, log_path)
    finally:
        # The group also when the process itself has ended: it may have left children behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if returncode < 0:
        name = signal.Signals(-returncode).name
        why = " (out of memory?)" if name == "SIGKILL" else ""
        raise JobFailure(f"was killed by {name}{why}", log_path, -returncode)
    if returncode > 0 and (failure := _known_failure(result_file)) is not None:
        raise JobFailure(failure.reason, log_path, hint=failure.hint, retryable=failure.retryable)
    if returncode > 0:
        raise JobFailure(f"exited with status {returncode}", log_path)
    try:
        result: dict[str, object] = json.loads(result_file.read_text())
    except (FileNotFoundError, ValueError):
        raise JobFailure("ended without a result", log_path) from None
    return result


def _known_failure(result_file: Path) -> Failure | None:
    try:
        return Failure.from_json(result_file.read_text())
    except (OSError, ValueError):
        return None


def _clean_environment() -> dict[str, str]:
    """Without what would change the bytes behind the key's back."""
    return {k: v for k, v in os.environ.items() if not k.startswith(UNKEYED_ENVIRONMENT)}


def _wait(
    process: subprocess.Popen[bytes], limits: Limits, stop: threading.Event, log_path: Path
) -> int:
    """The exit status. Raises Stopped, or JobFailure past a limit."""
    timeout_s, max_rss_bytes = limits.timeout_s, limits.max_rss_bytes
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=POLL_S)
        if stop.is_set():
            raise Stopped
        if deadline is not None and time.monotonic() > deadline:
            raise JobFailure(
                f"ran into the time limit of {timeout_s:g} s",
                log_path,
                hint="a larger --timeout-s lets it run longer",
            )
        if max_rss_bytes is not None and (held := group_rss_bytes(process.pid)) > max_rss_bytes:
            raise JobFailure(
                f"held {gib(held)} of memory, and the limit is {gib(max_rss_bytes)}",
                log_path,
                hint="a larger --max-rss-gib lets it have more",
                retryable=True,
            )
