"""Start real servers as a user does, and stop them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NXBUCKET = str(Path(sys.executable).with_name("nxbucket"))
START_LIMIT_S = 240
# A tiny model, free to put spaces between JSON's tokens, writes nothing else.
JSON_WITHOUT_SPACES = (
    "--structured-outputs-config",
    '{"disable_any_whitespace": true, "backend": "xgrammar"}',
)


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by `name{labels}`."""
        samples = {}
        for line in self.get("/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples


@contextlib.contextmanager
def nxbucket_serve(
    model_file: Path,
    log_path: Path,
    *vllm_args: str,
    env: Mapping[str, str] | None = None,
    emulate: bool = False,
) -> Iterator[Server]:
    """`nxbucket serve` on a free port, up to its first /health; SIGTERM at the end."""
    port = free_port()
    ours = ["serve", str(model_file), *(["--emulate"] if emulate else [])]
    command = [NXBUCKET, *ours, "--", "--port", str(port), *vllm_args]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
    server = Server(f"http://127.0.0.1:{port}", process, log_path)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(
                f"the server ended with status {server.process.returncode}:\n{server.log[-4000:]}"
            )
        with contextlib.suppress(OSError):
            if server.get("/health")[0] == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"no /health within {START_LIMIT_S} s:\n{server.log[-4000:]}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def run_script(name: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run tests/engine_scripts/<name> in a process of its own: vLLM's platform is chosen once."""
    path = ROOT / "tests" / "engine_scripts" / name
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, "PYTHONPATH": python_path(ROOT / "tests"), **(env or {})},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def python_path(first: Path) -> str:
    """`first` before what PYTHONPATH has."""
    return os.pathsep.join(filter(None, [str(first), os.environ.get("PYTHONPATH")]))


def run_nxbucket(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [NXBUCKET, *arguments],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
