"""Whole programs as HLO: what the module says, and that it is the same wherever it is written."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jaxlib import _hlo  # type: ignore[attr-defined]
from null_compiler import ARCHITECTURE, a_program

from nxbucket.compile.hlo.canonical import UnknownFieldError, canonical_module
from nxbucket.compile.hlo.compiler import HloCompiler, lower_to_hlo
from nxbucket.compile.hlo.wire import BYTES, VARINT, Field, read_message, write_message
from nxbucket.compile.hlo.xla_cpu import XlaCpuProgram
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs import segments
from nxbucket.compile.programs.families import program_module

SEGMENTED: dict[str, Any] = {"size": 64, "kv_segment_size": 32}


def text_of(program: BucketProgram) -> str:
    module = _hlo.HloModule.from_serialized_hlo_module_proto(lower_to_hlo(program).graph)
    text: str = module.to_string()
    return text


def random_inputs(program: BucketProgram, seed: int) -> list[torch.Tensor]:
    """A prefill of its bucket less two tokens, behind five of context; decodes of any length."""
    generator = torch.Generator().manual_seed(seed)
    n, arch = program.size, program.architecture
    context, blocks = 5, program.num_kv_blocks
    if program.phase == "prefill":
        table = 1 + torch.randperm(blocks - 1, generator=generator)[: program.max_blocks]
        positions = torch.arange(n) + context
        slots = table[positions // program.block_size] * program.block_size
        host = {
            "positions": positions,
            "slot_mapping": slots + positions % program.block_size,
            "block_table": table,
            "context_len": torch.tensor([context]),
            "num_tokens": torch.tensor([n - 2]),
        }
    else:
        longest = program.max_blocks * program.block_size
        lengths = torch.randint(1, longest + 1, (n,), generator=generator)
        tables = 1 + torch.arange(n * program.max_blocks).view(n, -1) % (blocks - 1)
        at = tables[torch.arange(n), (lengths - 1) // program.block_size]
        host = {
            "positions": lengths - 1,
            "slot_mapping": at * program.block_size + (lengths - 1) % program.block_size,
            "block_table": tables,
            "seq_lens": lengths,
        }
    host["input_ids"] = torch.randint(0, arch.vocab_size, (n,), generator=generator)
    return [
        host[t.name].to(torch.int32)
        if t.role == "input"
        else torch.randn(t.shape, generator=generator) * 0.3
        for t in program.signature.inputs
    ]


def largest_difference(program: BucketProgram, inputs: list[torch.Tensor]) -> float:
    """Of logits and KV, between the module on XLA:CPU and the program run eagerly."""
    eager = [t.clone() for t in inputs]
    with torch.no_grad():
        logits = program_module(program)(*eager)
    updated = {t.name: x for t, x in zip(program.signature.inputs, eager, strict=True)}
    expected = [updated[t.alias] if t.alias else logits for t in program.signature.outputs]
    found = XlaCpuProgram(lower_to_hlo(program).graph)([jax.device_put(t.numpy()) for t in inputs])
    return max(
        float(np.abs(np.asarray(f) - e.numpy()).max()) for f, e in zip(found, expected, strict=True)
    )


PROGRAMS = {
    "prefill": a_program("prefill"),
    "decode": a_program("decode", 4, num_kv_blocks=17),
    "prefill-segments": a_program("prefill", **SEGMENTED),
    "decode-segments": a_program("decode", 4, kv_segment_size=32, num_kv_blocks=17),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_module_computes_what_the_program_does(name: str) -> None:
    difference = largest_difference(PROGRAMS[name], random_inputs(PROGRAMS[name], 1))
    print(f"{name}: {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.parametrize(("tile_rows", "window"), list(product((7, 64, 100), (None, 24))))
def test_rows_in_tiles_give_what_they_give_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, tile_rows: int, window: int | None
) -> None:
    """7 and 100 do not divide the 128 rows of a KV head: the last tile has rows of padding."""
    windowed = () if window is None else (0,)
    architecture = replace(ARCHITECTURE, sliding_window=window, windowed_layers=windowed)
    program = a_program("prefill", architecture=architecture, **SEGMENTED)
    inputs = random_inputs(program, 2)
    logits = []
    for tile_bytes in (segments.SCORE_TILE_BYTES, tile_rows * 4 * 2 * 32):
        monkeypatch.setattr(segments, "SCORE_TILE_BYTES", tile_bytes)
        with torch.no_grad():
            logits.append(program_module(program)(*(t.clone() for t in inputs)))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-6)
    assert text_of(program).count(" while(") == 2
    assert largest_difference(program, inputs) < 1e-5


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_module_has_the_signatures_inputs_outputs_and_aliases(name: str) -> None:
    program = PROGRAMS[name]
    signature = program.signature
    module = read_message(lower_to_hlo(program).graph)
    (shape,) = (read_message(f.value) for f in module if f.number == 4)  # type: ignore[arg-type]
    names = [f.value for f in shape if f.number == 3]
    assert names == [t.name.encode() for t in signature.inputs]
    kv = [i for i, t in enumerate(signature.inputs) if t.role == "kv_cache"]
    aliases = ", ".join(f"{{{o}}}: ({i}, {{}}, must-alias)" for o, i in enumerate(kv, 1))
    assert f"input_output_alias={{ {aliases} }}" in text_of(program)


def test_an_updated_cache_is_the_given_buffer() -> None:
    program = PROGRAMS["decode"]
    given = [jax.device_put(t.numpy()) for t in random_inputs(program, 3)]
    XlaCpuProgram(lower_to_hlo(program).graph)(given)
    consumed = {
        t.role for t, x in zip(program.signature.inputs, given, strict=True) if x.is_deleted()
    }
    assert consumed == {"kv_cache"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_wide_integer_and_no_call_is_in_a_module(dtype: str) -> None:
    for program in PROGRAMS.values():
        text = text_of(replace(program, dtype=dtype))
        for word in ("s64[", "u64[", "f64[", "custom-call", " call(", "dynamic-", " sort("):
            assert word not in text


def test_ids_are_dense_from_one() -> None:
    module = read_message(lower_to_hlo(PROGRAMS["prefill-segments"]).graph)
    computations = [read_message(f.value) for f in module if f.number == 3]  # type: ignore[arg-type]
    instructions = [
        read_message(f.value)  # type: ignore[arg-type]
        for c in computations
        for f in c
        if f.number == 2
    ]
    ids = [f.value for i in instructions for f in i if f.number == 35]
    assert ids == list(range(1, len(ids) + 1))
    assert [f.value for c in computations for f in c if f.number == 5] == list(
        range(1, len(computations) + 1)
    )


def test_a_constant_of_the_architecture_is_in_the_bytes() -> None:
    """XLA's own fingerprint of a module leaves constants out."""
    other = replace(PROGRAMS["prefill"], architecture=replace(ARCHITECTURE, rms_norm_eps=1e-6))
    assert lower_to_hlo(other).graph != lower_to_hlo(PROGRAMS["prefill"]).graph


def test_what_was_lowered_before_leaves_no_trace() -> None:
    first = lower_to_hlo(PROGRAMS["prefill"]).graph
    lower_to_hlo(PROGRAMS["decode"])
    assert lower_to_hlo(PROGRAMS["prefill"]).graph == first


def raw_module(*extra: Field) -> bytes:
    """A computation of one parameter, as XLA would number it."""
    instruction = [
        Field(1, BYTES, b"p"),
        Field(2, BYTES, b"parameter"),
        Field(3, BYTES, b"\x10\x0b"),
        Field(35, VARINT, 5 << 32 | 1),
    ]
    computation = [
        Field(1, BYTES, b"main.5"),
        Field(2, BYTES, write_message([*instruction, *extra])),
        Field(5, VARINT, 5),
        Field(6, VARINT, 5 << 32 | 1),
    ]
    module = [
        Field(1, BYTES, b"jit"),
        Field(3, BYTES, write_message(computation)),
        Field(4, BYTES, b""),
        Field(5, VARINT, 9),
        Field(6, VARINT, 5),
    ]
    return write_message(module)


def test_a_field_that_may_hold_ids_stops_the_renumbering() -> None:
    signature = PROGRAMS["prefill"].signature
    canonical_module(raw_module(), signature)
    with pytest.raises(UnknownFieldError, match="parameter has field 99"):
        canonical_module(raw_module(Field(99, VARINT, 1)), signature)
    with pytest.raises(UnknownFieldError, match="field 68"):
        canonical_module(raw_module(Field(68, BYTES, b"x")), signature)


def test_source_lines_are_left_out() -> None:
    signature = PROGRAMS["prefill"].signature
    with_metadata = canonical_module(raw_module(Field(7, BYTES, b"\x0a\x01x")), signature)
    assert with_metadata == canonical_module(raw_module(), signature)


def test_asking_for_the_toolchain_imports_neither_torch_nor_jax() -> None:
    code = (
        "import sys; from nxbucket.compile.hlo.compiler import HloCompiler; "
        "HloCompiler().toolchain(); print({'torch', 'jax', 'jaxlib'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "set()"
    lowering = HloCompiler().toolchain().lowering
    assert set(lowering) == {"rules", "torch", "jax", "jaxlib"}
