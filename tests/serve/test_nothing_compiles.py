"""A server without a compiler and with nowhere to put compiled code, watched for children."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import JSON_WITHOUT_SPACES, Server, nxbucket_serve, python_path

pytestmark = pytest.mark.engine

# Imported by every Python process of the server at its start. Once the marker file exists, every
# process that is started is noted.
WATCHER = """
import os, sys

STARTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"}

def note(event, args):
    if event in STARTS:
        if os.path.exists(os.environ["WATCH_MARKER"]):
            with open(os.environ["WATCH_LOG"], "a") as log:
                log.write(f"{event} {args!r}\\n")

sys.addaudithook(note)
"""


@pytest.fixture(scope="module")
def watched(
    example: Path, artifact_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("no-compiler")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(WATCHER)
    for name in ("inductor", "triton"):
        (folder / name).mkdir(mode=0o555)
    (folder / "bin").mkdir()
    # All that vLLM's CPU build asks of PATH, at its start.
    (folder / "bin" / "lscpu").symlink_to(shutil.which("lscpu") or "")
    events = folder / "events"
    env = {
        **artifact_env,
        "PATH": str(folder / "bin"),
        "CXX": "/nonexistent/c++",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": python_path(folder / "site"),
        "WATCH_MARKER": str(folder / "watching"),
        "WATCH_LOG": str(events),
    }
    with nxbucket_serve(example, folder / "log", *JSON_WITHOUT_SPACES, env=env) as server:
        (folder / "watching").touch()
        yield server, events


@pytest.mark.parametrize("logprobs", [None, 0, 5], ids=["no logprobs", "chosen only", "top 5"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_of_every_kind_are_answered(
    watched: tuple[Server, Path], logprobs: int | None, temperature: float
) -> None:
    server, _ = watched
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.completions.create(
        model="tiny-llama",
        prompt="Four score and seven",
        max_tokens=12,
        temperature=temperature,
        seed=1,
        logprobs=logprobs,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert (answer.choices[0].logprobs is None) == (logprobs is None)


def test_structured_output_penalties_and_several_choices_work_too(
    watched: tuple[Server, Path],
) -> None:
    server, _ = watched
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    structured = client.chat.completions.create(
        model="tiny-llama",
        messages=[{"role": "user", "content": "n?"}],
        max_tokens=40,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        },
    )
    assert json.loads(structured.choices[0].message.content or "")["n"] in (1, 2)
    several = client.completions.create(
        model="tiny-llama",
        prompt="a",
        n=3,
        max_tokens=5,
        temperature=1.0,
        top_p=0.9,
        presence_penalty=0.5,
        logit_bias={"101": -100},
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    )
    assert len(several.choices) == 3


def test_the_compile_counters_are_zero_and_no_process_was_started(
    watched: tuple[Server, Path],
) -> None:
    server, events = watched
    samples = server.metrics()
    assert samples["nxbucket_serve_compiles_total"] == 0
    assert samples['nxbucket_program_executions_total{program="decode_b1"}'] > 0
    assert not events.exists(), events.read_text()
    # Root writes into a read-only folder all the same: what counts is that nothing did.
    assert not [*(events.parent / "inductor").iterdir(), *(events.parent / "triton").iterdir()]
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in children.split()}
    assert not {n for n in names if "c++" in n or "g++" in n or "cc1" in n}, names
    assert (events.parent / "watching").exists()
