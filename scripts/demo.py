"""`make demo`: compile the example, serve it, ask it a question over HTTP, print the answer."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

QUESTION = "How does the Gettysburg Address begin?"
START_LIMIT_S = 180


def main(model_file: Path) -> int:
    nxbucket = str(Path(sys.executable).with_name("nxbucket"))
    say(f"nxbucket compile {model_file}")
    report = json.loads(
        subprocess.run(
            [nxbucket, "compile", str(model_file), "--json"], check=True, stdout=subprocess.PIPE
        ).stdout
    )
    port = free_port()
    say(f"nxbucket serve {model_file} -- --port {port}")
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        server = subprocess.Popen(
            [nxbucket, "serve", str(model_file), "--", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log.name)
            say(f"POST http://127.0.0.1:{port}/v1/chat/completions")
            answer = ask(f"http://127.0.0.1:{port}")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    print(f"\nQ: {QUESTION}\nA: {answer.strip()}\n")
    statuses = ", ".join(f"{p['name']} {p['status']}" for p in report["programs"])
    print(f"programs:  {statuses}")
    print(f"artifacts: {report['cache_dir']}")
    print(f"lock:      {report['lock']}")
    return 0


def ask(url: str) -> str:
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 200,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def wait_for(url: str, server: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}; its log: {log}")
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    sys.exit(f"the server did not answer {url} within {START_LIMIT_S} s; its log: {log}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def say(line: str) -> None:
    print(f"$ {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
