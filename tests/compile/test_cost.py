"""Bytes and FLOPs of a program against torch's own counts; compile times from what was recorded."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from null_compiler import ARCHITECTURE, LLAMA3_ROPE, a_program

from nxbucket.compile.cost import Memory, compile_times, cost_of, memory_of
from nxbucket.compile.manifest import Blob, Manifest
from nxbucket.compile.program import BucketProgram
from nxbucket.toolkit.architecture import Architecture

ARCHITECTURES = {
    "plain": ARCHITECTURE,
    "llama3": replace(ARCHITECTURE, rope=LLAMA3_ROPE),
    "tied": replace(ARCHITECTURE, tie_word_embeddings=True),
    "bias": replace(ARCHITECTURE, qkv_bias=True, o_bias=True, mlp_bias=True),
    "mha": replace(ARCHITECTURE, num_key_value_heads=4),
    "wide heads": replace(ARCHITECTURE, head_dim=16),
    "three layers": replace(ARCHITECTURE, num_hidden_layers=3),
}


def counted_flops(program: BucketProgram) -> int:
    """What torch counts while the eager program runs on padding."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from nxbucket.compile.programs.llama import LlamaProgram

    inputs = [torch.ones(t.shape, dtype=getattr(torch, t.dtype)) for t in program.signature.inputs]
    # The counter has no rule for the fused CPU kernel; the math form is plain matrix products.
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        LlamaProgram(program).eval()(*inputs)
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize(
    ("phase", "size", "max_blocks"),
    [("prefill", 16, 4), ("prefill", 96, 3), ("decode", 1, 4), ("decode", 8, 7)],
)
def test_flops_are_what_torch_counts(
    architecture: Architecture, phase: Literal["prefill", "decode"], size: int, max_blocks: int
) -> None:
    program = a_program(phase, size, architecture, max_blocks=max_blocks)
    assert cost_of(program).flops == pytest.approx(counted_flops(program), rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_tensors(dtype: str) -> None:
    import torch

    program = a_program(dtype=dtype)
    held: dict[str, int] = {}
    for t in (*program.signature.inputs, *program.signature.outputs):
        if t.alias is None:
            size = torch.empty(t.shape, dtype=getattr(torch, t.dtype)).nbytes
            held[t.role] = held.get(t.role, 0) + size
    cost = cost_of(program)
    assert cost.weight_bytes == held["weight"]
    assert cost.kv_cache_bytes == held["kv_cache"]
    assert cost.io_bytes == held["input"] + held["output"]


def test_a_rank_holds_weights_and_kv_once_and_one_programs_io() -> None:
    small, large = a_program("decode", 1), a_program("decode", 8)
    one, other = cost_of(small), cost_of(large)
    memory = memory_of([small, large])
    assert memory == Memory(one.weight_bytes, one.kv_cache_bytes, other.io_bytes)
    assert memory.total_bytes == one.weight_bytes + one.kv_cache_bytes + other.io_bytes


def recorded(program: BucketProgram, seconds: float, graph: str, target: str = "cpu") -> Manifest:
    return Manifest(
        key_kind="input",
        program=program.name,
        target=target,
        inputs={"graph": graph, "size": program.size},
        graph_key=graph * 64,
        signature=program.signature,
        blobs=(Blob("program", "b" * 64, 10),),
        toolchain={},
        lower_s=1.0,
        compile_s=seconds - 1.0,
        peak_rss_bytes=0,
        log_sha256="0" * 64,
    )


def by_key(*manifests: Manifest) -> dict[str, Manifest]:
    return {m.key: m for m in manifests}


def test_a_compile_time_is_estimated_by_layers_from_the_median_recorded() -> None:
    two_layers: Any = replace(ARCHITECTURE, num_hidden_layers=2)
    times = compile_times(
        by_key(
            recorded(a_program("prefill", 1), 10.0, "1"),
            recorded(a_program("prefill", 2), 12.0, "2"),
            recorded(a_program("prefill", 4, two_layers), 200.0, "3"),
            recorded(a_program("prefill", 8), 1000.0, "4", target="trn2"),
        ),
        "cpu",
    )
    assert times is not None
    assert (times.s_per_layer, times.num_recorded) == (12.0, 3)
    assert times.estimate_s(a_program(architecture=two_layers)) == 24.0


def test_an_artifact_under_two_keys_counts_once() -> None:
    program = a_program()
    manifest = recorded(program, 10.0, "1")
    manifests = by_key(manifest, replace(manifest, key_kind="graph", inputs={"kind": "graph"}))
    times = compile_times(manifests, "cpu")
    assert times is not None
    assert times.num_recorded == 1


def test_without_a_record_for_the_target_there_is_no_estimate() -> None:
    assert compile_times({}, "cpu") is None
    assert compile_times(by_key(recorded(a_program(), 10.0, "1")), "trn2") is None
