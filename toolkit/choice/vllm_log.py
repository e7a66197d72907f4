"""vLLM's request log as JSON lines, joined by request id.

    vllm serve ... --enable-log-requests --enable-log-outputs \\
        --log-level DEBUG --logging-config.formatter json > requests.jsonl

A formatter of your own, by VLLM_LOGGING_CONFIG_PATH, does as well if it writes `message`, and
`asctime` or a name of NAMES["arrival"] for the time. The messages are those of vLLM 0.32's
entrypoints/serve/utils/request_logger.py:

    DEBUG  Request ID details: prompt: '...', prompt_token_ids: [1, 2], prompt_embeds shape: None.
    INFO   Received request ID: params: SamplingParams(...), lora_request: None.
    DEBUG  Generated response ID details: output_token_ids: [3, 4]
    DEBUG  Generated response ID (streaming delta) details: output_token_ids: [3]

Only DEBUG has token ids, and so lengths. A server's output has other lines, too, and some that are
no JSON: whatever is no message of a request is skipped.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.trace_columns import Clock, Columns, Role, Rows, Wrong, role_of
from nxbucket.toolkit.choice.trace_file import Block, fault
from nxbucket.toolkit.errors import TraceError

HOW_TO_LOG = (
    "start vLLM with --enable-log-requests --enable-log-outputs --log-level DEBUG "
    "--logging-config.formatter json, and keep what it prints"
)

_LOG_LINE = re.compile(r'^\{.*"message": ?"', re.MULTILINE)
_ARGUMENTS = "non-default args: "
_WANTED = ("Received request ", " details: ", _ARGUMENTS)
_MAX_LOG_LEN = re.compile(r"'max_log_len': (\d{1,12})\b")
_DETAILS = re.compile(r"Request (.+?) details: prompt: ", re.DOTALL)
_RECEIVED = re.compile(
    r"Received request (.+?): params: (SamplingParams|BeamSearchParams)\(", re.DOTALL
)
_GENERATED = re.compile(
    r"Generated response (.+?)( \(streaming delta\)| \(streaming complete\))?"
    r" details: output_token_ids: (.*)",
    re.DOTALL,
)
_MAX_TOKENS = re.compile(r"[ (]max_tokens=(\d{1,12})[,)]")
_TIMES = ("asctime", "time", "@timestamp")
_IDS = "prompt_token_ids: "


def is_vllm_log(text: str) -> bool:
    return _LOG_LINE.search(text) is not None


def looks_like_text_log(text: str) -> bool:
    """The same messages, written by vLLM's usual formatter."""
    return "Received request " in text and ": params: " in text


@dataclass(slots=True)
class _Request:
    time: Any
    line: int
    prompt_tokens: int | None
    max_tokens: int | None = None
    is_generation: bool = False
    """False for what only tokenizes or embeds."""
    outputs: list[int] = field(default_factory=list)
    """One for each of `n` answers."""
    streamed: int | None = None


def read_vllm_log(file: Path, blocks: Iterator[Block], progress: Callable[[int], None]) -> Trace:
    log = _Log(file)
    for block in blocks:
        for number, line in block.numbered_lines():
            if any(part in line for part in _WANTED):
                log.read(line, number)
        progress(len(log.requests))
    return log.trace()


class _Log:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.requests: list[_Request] = []
        self._latest: dict[str, _Request] = {}
        """By id; a client may send one id again."""
        self._arguments_seen = False
        self._max_log_len: int | None = None
        """Of ids that the server wrote, if it was told to cut them."""

    def read(self, line: str, number: int) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        message = record.get("message") if isinstance(record, dict) else None
        if not isinstance(message, str):
            return
        if found := _DETAILS.match(message):
            self._start(found[1], _time_of(record), number, _prompt_tokens(message))
        elif found := _RECEIVED.match(message):
            self._receive(found[1], record, number, message)
        elif found := _GENERATED.fullmatch(message):
            self._generate(found[1], found[2] == " (streaming delta)", found[3])
        elif message.startswith(_ARGUMENTS):
            self._arguments_seen = True
            if cut := _MAX_LOG_LEN.search(message):
                self._max_log_len = int(cut[1])

    def _start(self, name: str, time: Any, line: int, prompt_tokens: int | None) -> _Request:
        request = _Request(time, line, prompt_tokens)
        self._latest[name] = request
        self.requests.append(request)
        return request

    def _receive(self, name: str, record: dict[str, Any], line: int, message: str) -> None:
        """vLLM writes the line with the details first, if at all."""
        request = self._latest.get(name)
        if request is None or request.is_generation:
            request = self._start(name, _time_of(record), line, None)
        request.is_generation = True
        allowed = _MAX_TOKENS.search(message)
        request.max_tokens = int(allowed[1]) if allowed else None

    def _generate(self, name: str, is_delta: bool, ids: str) -> None:
        # The Responses API logs its requests with a number behind the id, and its answers without.
        request = self._latest.get(name) or self._latest.get(f"{name}_0")
        if request is None or ids == "None":
            return
        if is_delta:
            request.streamed = (request.streamed or 0) + _count(ids)
        else:
            request.outputs.append(_count(ids))

    def trace(self) -> Trace:
        generations = [r for r in self.requests if r.is_generation]
        if not generations:
            raise TraceError(f"{self.file} is a log without requests", hint=HOW_TO_LOG)
        known = [r for r in generations if r.prompt_tokens]
        if not known:
            raise TraceError(
                f"{self.file} has requests ({len(generations)}) and no lengths of their prompts: "
                "vLLM logs token ids at level DEBUG only",
                hint=HOW_TO_LOG,
            )
        limit = self._max_log_len
        if limit is not None and any((r.prompt_tokens or 0) >= limit for r in known):
            raise TraceError(
                f"{self.file}: the server wrote no more than {limit} token ids of a prompt: "
                "lengths above are not in the log",
                hint="start it without --max-log-len",
            )
        return self._rows(known).trace(self._notes(generations, known))

    def _rows(self, requests: list[_Request]) -> Rows:
        """In order of arrival: several front ends may have written to one file."""
        seconds = self._seconds(requests)
        roles: list[Role] = ["prompt"]
        if seconds:
            requests = sorted(requests, key=lambda r: seconds[r.line])
            roles.append("arrival")
        if any(map(_outputs, requests)):
            roles.append("output")
        if all(r.max_tokens is not None for r in requests):
            roles.append("max")
        rows = Rows(self.file, Columns.of(roles), "")
        start = min(seconds.values(), default=0.0)
        for request in requests:
            for output in _outputs(request) or [0]:
                cells = {
                    "prompt": request.prompt_tokens,
                    "arrival": seconds.get(request.line, 0.0) - start,
                    "output": output,
                    "max": request.max_tokens,
                }
                rows.add([cells[role] for role in roles], request.line)
        return rows

    def _seconds(self, requests: list[_Request]) -> dict[int, float]:
        """By line, since the first of them; empty if the log has no times."""
        if any(r.time is None for r in requests):
            return {}
        clock = Clock()
        try:
            return {(line := r.line): clock.seconds(r.time) for r in requests}
        except Wrong as wrong:
            raise fault(self.file, line, f"the time {wrong.sentence}", wrong.hint) from None

    def _notes(self, generations: list[_Request], known: list[_Request]) -> list[str]:
        notes = []
        if not self._arguments_seen:
            notes.append(
                "the log lacks the line of the server's arguments: had it --max-log-len, lengths "
                "above that are cut, which cannot be told"
            )
        if unknown := len(generations) - len(known):
            notes.append(f"requests without prompt token ids, left out: {unknown}")
        if any(r.time is None for r in known):
            notes.append("the log has no times (asctime): when requests arrived is unknown")
        silent = sum(not _outputs(r) for r in known)
        if silent == len(known):
            notes.append(
                "no token ids of answers are in the log: vLLM writes them at level DEBUG with "
                "--enable-log-outputs, and never for /v1/completions"
            )
        elif silent:
            notes.append(
                f"requests without token ids of an answer, taken as 0 output tokens: {silent} "
                "(aborted, empty, or of /v1/completions, whose answers vLLM does not log)"
            )
        if streamed := sum(r.streamed is not None and not r.outputs for r in known):
            notes.append(
                f"streamed answers: {streamed}; vLLM logs no piece without text, so their output "
                "tokens may be a few too low"
            )
        return notes


def _outputs(request: _Request) -> list[int]:
    if request.outputs or request.streamed is None:
        return request.outputs
    return [request.streamed]


def _prompt_tokens(message: str) -> int | None:
    """The last of its name: the prompt, which comes before it, may say anything."""
    ids = message[message.rfind(_IDS) + len(_IDS) :].partition("]")[0]
    return _count(ids) if ids.startswith("[") else None


def _count(ids: str) -> int:
    """Of a list, a tuple or an array, as Python writes them."""
    return len(re.findall(r"\d+", ids))


def _time_of(record: dict[str, Any]) -> Any:
    for name, value in record.items():
        if name in _TIMES or role_of(name) == "arrival":
            return value
    return None
