"""The shell steps of examples/ci, as they stand in the files, against an S3 server on loopback.

`nxbucket` is the real command with the null compiler; only what installs and what needs a forge or
a cluster is left out.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from null_compiler import NullOptions, model_file, recorded
from s3_stand_in import BUCKET, CREDENTIALS, s3_server

from nxbucket.compile.lockfile import read_lock

RECIPES = Path(__file__).parents[1] / "examples" / "ci"
NULL_CLI = Path(__file__).with_name("null_cli.py")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as found:
        yield found


class Runner:
    """A CI job's or a pod's shell: a folder of its own, and the commands on PATH."""

    def __init__(self, folder: Path, endpoint: str, repository: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for path in repository.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
        (folder / "llama").symlink_to(repository / "llama")
        tools = folder / "bin"
        tools.mkdir()
        shim = tools / "nxbucket"
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{NULL_CLI}" "$@"\n')
        shim.chmod(0o755)
        (folder / "events").mkdir()
        self.env = {
            **os.environ,
            **CREDENTIALS,
            **NullOptions(events=str(folder / "events")).environ(),
            "AWS_ENDPOINT_URL": endpoint,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "NXBUCKET_CACHE_DIR": str(folder / "cache"),
            "HOME": str(folder),
        }

    def shell(self, script: str, **env: str) -> str:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def repository(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    file = model_file(folder, (32, 64, 128), (1, 2))
    prefix = re.sub(r"\W", "-", request.node.name)
    remote = f"artifacts: {{remote: s3://{BUCKET}/{prefix}}}"
    file.write_text(file.read_text().replace("artifacts: {cache: cache}", remote))
    return folder


def load(name: str) -> Any:
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def steps(job: dict[str, Any]) -> list[str]:
    """The shell steps of a GitHub job, but for installing and what talks to GitHub."""
    return [
        step["run"]
        for step in job["steps"]
        if "run" in step and step["name"] not in ("Install", "Push the commit")
    ]


def test_github_actions(tmp_path: Path, endpoint: str, repository: Path) -> None:
    (workflow,) = load("github-actions.yml")
    jobs = workflow["jobs"]
    compiled: list[str] = []
    for shard in jobs["compile"]["strategy"]["matrix"]["shard"]:
        runner = Runner(tmp_path / f"shard{shard}", endpoint, repository)
        for script in steps(jobs["compile"]):
            runner.shell(script.replace("${{ matrix.shard }}", str(shard)))
        compiled += recorded(runner.folder / "events", "compile")
        assert (runner.folder / "junit.xml").read_text().startswith("<?xml")
    assert sorted(compiled) == [
        "decode_b1",
        "decode_b2",
        "prefill_s128",
        "prefill_s32",
        "prefill_s64",
    ]
    locking = Runner(tmp_path / "lock", endpoint, repository)
    locking.shell(
        "git init -q && git add model.yaml && git -c user.name=a -c user.email=a commit -qm x"
    )
    for script in steps(jobs["lock"]):
        locking.shell(script)
    assert locking.shell("git log -1 --format=%s").startswith("Lock the artifacts of")
    assert recorded(locking.folder / "events", "lower") == []
    checking = Runner(tmp_path / "check", endpoint, repository)
    (checking.folder / "model.lock").write_bytes((locking.folder / "model.lock").read_bytes())
    for script in steps(jobs["check"]):
        checking.shell(script)
    assert recorded(checking.folder / "events", "lower") == []


def test_gitlab_ci(tmp_path: Path, endpoint: str, repository: Path) -> None:
    (pipeline,) = load("gitlab-ci.yml")
    total = pipeline["compile"]["parallel"]
    for index in range(1, total + 1):
        runner = Runner(tmp_path / f"part{index}", endpoint, repository)
        for script in pipeline["compile"]["script"]:
            runner.shell(script, CI_NODE_INDEX=str(index), CI_NODE_TOTAL=str(total))
        assert (runner.folder / pipeline["compile"]["artifacts"]["reports"]["junit"]).exists()
    locking = Runner(tmp_path / "lock", endpoint, repository)
    for script in pipeline["lock"]["script"]:
        locking.shell(script)
    lock = read_lock(locking.folder / pipeline["lock"]["artifacts"]["paths"][0])
    assert len(lock.targets["cpu-null"].programs) == 5


def test_kubernetes(tmp_path: Path, endpoint: str, repository: Path) -> None:
    job, deployment = load("kubernetes.yaml")
    ci = Runner(tmp_path / "ci", endpoint, repository)
    ci.shell(pod_script(job["spec"]["template"]["spec"]["containers"][0], ci.folder))
    pod = deployment["spec"]["template"]["spec"]
    server = Runner(tmp_path / "server", endpoint, repository)
    (server.folder / "model.lock").write_bytes((ci.folder / "model.lock").read_bytes())
    init = pod_script(pod["initContainers"][0], server.folder)
    assert "pull model.yaml --locked" in init
    # `doctor` looks at this very host, whose artifacts here are the null compiler's.
    server.shell(init.replace("nxbucket doctor model.yaml", "nxbucket cache verify --json"))
    assert recorded(server.folder / "events", "lower") == []
    serve = pod["containers"][0]
    assert serve["command"][:3] == ["nxbucket", "serve", "model.yaml"]
    mounts = {m["mountPath"] for m in serve["volumeMounts"]}
    assert {m["mountPath"] for m in pod["initContainers"][0]["volumeMounts"]} >= mounts


def pod_script(container: dict[str, Any], folder: Path) -> str:
    """/config is where model.yaml came from; here it is in the folder already."""
    (script,) = container["args"]
    assert json.dumps(container["command"]) == '["sh", "-ec"]'
    return "\n".join(line for line in script.splitlines() if "/config/" not in line)
