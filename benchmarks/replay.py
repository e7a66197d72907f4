"""A trace sent to an engine in this process, or over HTTP to a server. simulated.py uses it."""

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_startup import free_port, wait_for_health

from nxbucket.serve.calibrate import SteppedEngine
from nxbucket.toolkit.choice.trace import Trace

MODEL = "m"
"""What the server calls it."""
ALONE, ALONE_EVERY_S = 15, 0.5


@dataclass
class Request:
    """One row of the trace, as it went. Times in seconds from the first arrival."""

    arrival_s: float
    prompt: list[int]
    max_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


def requests_of(trace: Trace, vocab_size: int, seed: int) -> list[Request]:
    assert trace.output_tokens is not None and trace.arrival_s is not None
    chosen = random.Random(seed)
    return [
        Request(arrival, chosen.choices(range(3, vocab_size), k=length), tokens)
        for arrival, length, tokens in zip(
            trace.arrival_s, trace.prompt_tokens, trace.output_tokens, strict=True
        )
    ]


def replay_in_process(
    engine: SteppedEngine, requests: list[Request], clock: Callable[[], float], *, jumps: bool
) -> dict[str, Any]:
    """Add each request when it comes, step while there is one. `jumps`: no waiting between."""
    from vllm import RequestOutput, SamplingParams

    llm = engine.llm.llm_engine
    step_s: dict[str, list[float]] = {}
    by_id: dict[str, Request] = {}
    executions = engine.executions()
    start, jumped, next_row = clock(), 0.0, 0
    while next_row < len(requests) or llm.has_unfinished_requests():
        now = clock() - start + jumped
        while next_row < len(requests) and requests[next_row].arrival_s <= now:
            request = requests[next_row]
            params = SamplingParams(
                temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
            )
            by_id[f"trace-{next_row}"] = request
            llm.add_request(f"trace-{next_row}", {"prompt_token_ids": request.prompt}, params)
            next_row += 1
        if not llm.has_unfinished_requests():
            wait = requests[next_row].arrival_s - (clock() - start + jumped)
            if jumps:
                jumped += max(0.0, wait)
            else:
                time.sleep(max(0.0, wait))
            continue
        before = clock()
        outputs = llm.step()
        after = clock()
        for output in outputs:
            request = by_id[output.request_id]
            assert isinstance(output, RequestOutput)
            request.num_tokens = len(output.outputs[0].token_ids)
            request.last_s = after - start + jumped
            request.first_s = request.first_s or request.last_s
        ran = engine.executions()
        for name, count in ran.items():
            if count > executions[name]:
                step_s.setdefault(name, []).append(after - before)
        executions = ran
    return {
        "steps": {name: len(times) for name, times in step_s.items()},
        "step_s": {name: statistics.fmean(times) for name, times in step_s.items()},
    }


async def replay_over_http(port: int, requests: Sequence[Request]) -> dict[str, Any]:
    import openai

    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        max_retries=0,
        timeout=600,
    )
    start = time.perf_counter()
    late_s = []

    async def send(request: Request) -> None:
        await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
        late_s.append(time.perf_counter() - start - request.arrival_s)
        stream = await client.completions.create(
            model=MODEL,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices:
                request.last_s = time.perf_counter() - start
                request.first_s = request.first_s or request.last_s
            if chunk.usage:
                request.num_tokens = chunk.usage.completion_tokens

    await asyncio.gather(*map(send, requests))
    await client.close()
    return {"client_late_ms": 1e3 * max(late_s)}


def ttft_alone_ms(port: int, prompt: list[int]) -> float:
    """The median TTFT of requests that have the server to themselves."""
    alone = [Request(ALONE_EVERY_S * number, prompt, 1) for number in range(ALONE)]
    asyncio.run(replay_over_http(port, alone))
    return 1e3 * statistics.median(r.first_s - r.arrival_s for r in alone[1:])


@contextmanager
def server(model_file: Path) -> Iterator[tuple[int, int]]:
    """`nxbucket serve`: its port and its process id, which is its session's too."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("nxbucket")), "serve", str(model_file)]
    command += ["--", "--port", str(port), "--served-model-name", MODEL]
    with tempfile.TemporaryDirectory() as scratch:
        log_path = Path(scratch) / "log"
        with log_path.open("w") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_env(),
                start_new_session=True,
            )
            try:
                wait_for_health(port, child, time.monotonic(), log_path)
                yield port, child.pid
            finally:
                child.send_signal(signal.SIGTERM)
                child.wait(timeout=60)


def clean_env() -> dict[str, str]:
    """Without what an engine in this process has set for itself, threads aside."""
    ours = {
        "NXBUCKET_ACTIVE",
        "TORCH_COMPILE_DISABLE",
        "VLLM_DIST_IDENT",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_STREAM",
        "VLLM_PLUGINS",
    }
    return {name: value for name, value in os.environ.items() if name not in ours}


class Others:
    """How many cores everything else on this machine uses, from now on."""

    def __init__(self, *sessions: int) -> None:
        self._sessions = {os.getsid(0), *sessions}
        self._start_s = time.monotonic()
        self._start_ticks = self._ticks()

    def cores(self) -> float:
        spent = self._ticks() - self._start_ticks
        return spent / os.sysconf("SC_CLK_TCK") / (time.monotonic() - self._start_s)

    def _ticks(self) -> int:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, fields)
        return user + nice + system + irq + softirq - self._ours()

    def _ours(self) -> int:
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) in self._sessions:
                ticks += int(fields[11]) + int(fields[12])
        return ticks
