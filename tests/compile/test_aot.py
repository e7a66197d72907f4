"""`nxbucket compile` with AOTInductor itself: one plan of two programs, compiled once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from null_compiler import model_file

from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.lockfile import check_lock, read_lock
from nxbucket.compile.manifest import Manifest
from nxbucket.compile.plan import plan_programs
from nxbucket.compile.program import BucketProgram
from nxbucket.toolkit.spec import load_spec

pytestmark = pytest.mark.aot

NXBUCKET = "from nxbucket.toolkit.cli import main; main()"

LOAD_AND_RUN = """
import json, sys, torch
import torch._inductor
package, inputs = sys.argv[1], json.loads(sys.argv[2])
run = torch._inductor.aoti_load_package(package)
torch.manual_seed(0)
tensors = []
for t in inputs:
    if t["role"] == "weight":
        tensors.append(torch.randn(t["shape"]) * 0.1)
    elif t["name"] in ("num_tokens", "seq_lens"):
        tensors.append(torch.ones(t["shape"], dtype=torch.int32))
    else:
        tensors.append(torch.zeros(t["shape"], dtype=getattr(torch, t["dtype"])))
outputs = run(*tensors)
outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
cache = next(x for t, x in zip(inputs, tensors) if t["name"] == "key.0")
print(json.dumps({
    "shapes": [list(o.shape) for o in outputs],
    "finite": all(bool(o.isfinite().all()) for o in outputs),
    "written": bool(cache.any()),
}))
"""


class Compiled:
    def __init__(self, folder: Path) -> None:
        self.file = model_file(folder, (16,), (1,))
        self.done = nxbucket(folder, "compile", "--json")
        assert self.done.returncode == 0, self.done.stderr
        self.report = json.loads(self.done.stdout)
        self.spec = load_spec(self.file)
        self.programs: list[BucketProgram] = plan_programs(self.spec)
        self.cache = ArtifactCache(folder / "cache")

    def manifests(self) -> list[Manifest]:
        found = [self.cache.lookup(p["key"]) for p in self.report["programs"]]
        return [f.manifest for f in found if isinstance(f, Hit)]


def nxbucket(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", NXBUCKET, *arguments],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("NXBUCKET_")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("aot"))


def test_one_package_for_each_list_entry(compiled: Compiled) -> None:
    assert [(p["name"], p["status"]) for p in compiled.report["programs"]] == [
        ("prefill_s16", "compiled"),
        ("decode_b1", "compiled"),
    ]
    blobs = [p for p in (compiled.cache.root / "blobs").rglob("*") if p.is_file()]
    assert {p.name for p in blobs} == {p["digest"] for p in compiled.report["programs"]}
    # A .pt2 is a zip file.
    assert len(blobs) == 2
    assert all(p.read_bytes()[:2] == b"PK" for p in blobs)


def test_the_manifest_has_the_program_s_signature_and_the_toolchain(compiled: Compiled) -> None:
    import torch

    manifests = compiled.manifests()
    assert [m.signature for m in manifests] == [p.signature for p in compiled.programs]
    for manifest in manifests:
        assert {"compiler", "torch", "cxx", "march"} <= set(manifest.toolchain)
        assert manifest.toolchain["compiler"] == "aotinductor"
        assert "g++" in manifest.toolchain["cxx"]
        assert manifest.toolchain["torch"] == torch.__version__
        assert manifest.target == f"cpu-{manifest.toolchain['march']}"
        assert manifest.compile_s > 0
        assert manifest.peak_rss_bytes > 100 << 20


def test_the_lock_names_the_packages_and_fits_the_model_file(compiled: Compiled) -> None:
    path = compiled.file.with_suffix(".lock")
    lock = read_lock(path)
    check_lock(lock, path, compiled.spec)
    [target] = lock.targets.values()
    assert [p.blobs for p in target.programs] == [m.blobs for m in compiled.manifests()]


def test_a_second_compile_is_all_hits(compiled: Compiled) -> None:
    again = json.loads(nxbucket(compiled.file.parent, "compile", "--json").stdout)
    assert [p["status"] for p in again["programs"]] == ["hit", "hit"]
    assert not again["lock_written"]


@pytest.mark.parametrize("index", [0, 1], ids=["prefill", "decode"])
def test_a_package_loads_in_another_process_and_runs(compiled: Compiled, index: int) -> None:
    manifest = compiled.manifests()[index]
    package = compiled.cache.root / f"{manifest.program}.pt2"
    package.write_bytes(compiled.cache.blob_path(manifest.blobs[0].digest).read_bytes())
    inputs = manifest.signature.as_json()["inputs"]
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_RUN, str(package), json.dumps(inputs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    vocab = compiled.spec.architecture.vocab_size
    assert result == {"shapes": [[1, vocab]], "finite": True, "written": True}
