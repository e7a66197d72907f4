"""The shipped example by hub id: compiled, pinned, fetched from a hub on loopback, served."""

import json
import urllib.request
from pathlib import Path

import pytest
from hub_stand_in import folder_files, hub_stand_in
from servers import nxbucket_serve, run_nxbucket

from nxbucket.compile.lockfile import read_lock

pytestmark = pytest.mark.engine

HUB_ID = "nxbucket-examples/tiny-llama"


def test_the_example_is_served_by_its_hub_id_at_the_locked_commit(
    example: Path, artifact_env: dict[str, str], tmp_path: Path
) -> None:
    lines = example.read_text().replace("./model", HUB_ID).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("serve:"))
    model_file = tmp_path / "model.yaml"
    model_file.write_text("\n".join(lines[:at]) + "\n")
    files = folder_files(example.parent / "model")
    with hub_stand_in() as hub:
        commit = hub.add(HUB_ID, files)
        env = {**artifact_env, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        compiled = run_nxbucket("compile", str(model_file), env=env)
        assert compiled.returncode == 0, compiled.stderr
        assert compiled.stdout.count(" hit ") == 6
        assert hub.fetched() == {"config.json"}
        assert read_lock(model_file.with_suffix(".lock")).model_commit == commit
        # What main became since then is not what was compiled and checked.
        hub.add(HUB_ID, {**files, "model.safetensors": b"broken", "config.json": b"{}"})
        hub.requests.clear()
        with nxbucket_serve(model_file, tmp_path / "log", env=env) as server:
            models = json.loads(server.get("/v1/models")[1])["data"]
            assert [model["id"] for model in models] == [HUB_ID]
            assert complete(server.url, "Four score").startswith(" and seven years ago")
        assert {"model.safetensors", "tokenizer.json"} <= hub.fetched()
        assert not [r for r in hub.requests if "/main" in r]


def complete(url: str, prompt: str) -> str:
    body = {"model": HUB_ID, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text
