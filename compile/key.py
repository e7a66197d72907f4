"""Artifact keys: sha256 over everything that decides the graph and the bytes, and nothing else.

Two levels (docs/cache-keys.md lists each input and why):
- the input key is computed from plain values, with no torch: a warm `compile` needs only this;
- the graph key hashes the lowered graph, and is asked on an input-key miss: an upgrade that left
  the graph as it was costs a lowering (seconds), not a compile.
"""

from dataclasses import asdict
from typing import Any

from nxbucket.compile.canonical import digest_of
from nxbucket.compile.manifest import Manifest, blob_of
from nxbucket.compile.program import PROGRAM_VERSION, BucketProgram
from nxbucket.compile.toolchain import Toolchain

KEY_FORMAT = 1


def key_inputs(program: BucketProgram, toolchain: Toolchain) -> dict[str, Any]:
    """The inputs of a program's input key, as they are stored in its manifest."""
    shape = asdict(program)
    del shape["architecture"]
    return {
        "format": KEY_FORMAT,
        "kind": "input",
        "program_version": PROGRAM_VERSION,
        "program": shape,
        "architecture": program.architecture.as_json(),
        "tensor_parallel_size": 1,
        "target": toolchain.target,
        "toolchain": dict(toolchain.versions),
        "lowering": dict(toolchain.lowering),
    }


def input_key(program: BucketProgram, toolchain: Toolchain) -> str:
    return digest_of(key_inputs(program, toolchain))


def manifest_fault(manifest: Manifest, key: str) -> str | None:
    """Why the well formed manifest that stands under `key` is none of `key`; blobs aside."""
    if manifest.key != key:
        return f"holds the entry of key {manifest.key}"
    # The key covers `inputs` only: what repeats it may not say otherwise.
    for name in ("target", "toolchain"):
        if getattr(manifest, name) != manifest.inputs.get(name):
            return f"its `{name}` is not the one of its inputs"
    if not _has_its_graph(manifest):
        return "its HLO is not the graph that its graph key names"
    return None


def _has_its_graph(manifest: Manifest) -> bool:
    """Whether an artifact that holds its graph holds the one that its graph key was made from.

    An entry's blobs are not part of its key, as compilers are not byte-stable; a graph is.
    """
    graph = blob_of(manifest.blobs, "hlo")
    if graph is None:
        return True
    toolchain = Toolchain(manifest.target, manifest.toolchain)
    return digest_of(graph_key_inputs(graph.digest, toolchain)) == manifest.graph_key


def graph_key_inputs(graph_sha256: str, toolchain: Toolchain) -> dict[str, Any]:
    return {
        "format": KEY_FORMAT,
        "kind": "graph",
        "graph": graph_sha256,
        "target": toolchain.target,
        "toolchain": dict(toolchain.versions),
    }
