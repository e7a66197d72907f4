"""Reading a module: what XLA's own reader says of it, and nothing but HloError for bad bytes."""

import random
import subprocess
import sys
import time

import pytest
from hlo_modules import (
    F32,
    SEGMENTED,
    computation,
    instruction,
    loop,
    lowered,
    module,
    parameter,
    shape,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from null_compiler import a_program

from nxbucket.compile.hlo.module import looks_like_hlo, read_module
from nxbucket.compile.hlo.wire import BYTES, Field, write_message
from nxbucket.toolkit.errors import HloError


def test_a_module_is_read_as_xla_reads_it() -> None:
    from jaxlib import _hlo  # type: ignore[attr-defined]

    payload = lowered(SEGMENTED)
    ours = read_module(payload)
    theirs = _hlo.HloModule.from_serialized_hlo_module_proto(payload)
    text = theirs.to_string()
    for read in ours.instructions():
        printed = f"%{read.name} = "
        assert printed in text
        if not read.shape.is_tuple:
            assert f"{printed}{read.shape}" in text
    # A line for each instruction, which XLA indents.
    assert sum(line.startswith("  ") for line in text.splitlines()) == ours.id_range[1]


def test_parameters_outputs_and_aliases_are_the_signatures() -> None:
    program = a_program("decode", 4)
    read = read_module(lowered(program))
    assert [(p.name, p.shape.dims) for p in read.parameters] == [
        (t.name, t.shape) for t in program.signature.inputs
    ]
    assert [s.dims for s in read.outputs] == [t.shape for t in program.signature.outputs]
    assert [(a.output, read.parameters[a.parameter].name, a.must) for a in read.aliases] == [
        (1, "key.0", True),
        (2, "value.0", True),
    ]


def test_bytes_of_each_type() -> None:
    payload = module(computation(1, parameter(1, 0, shape("bf16", 3, 5)), root=1))
    assert read_module(payload).parameters[0].shape.num_bytes == 30


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "no computations"),
        (b"model: llama\n", "not an HloModuleProto"),
        (b"\x7fELF" + bytes(60), "not an HloModuleProto"),
        (module(computation(1, instruction(1, "negate", F32, (7,)), root=1)), "uses instruction 7"),
        (module(computation(1, instruction(1, "negate", F32, (1,)), root=1)), "uses instruction 1"),
        (module(computation(1, parameter(1, 0, F32), parameter(1, 1, F32), root=1)), "the id 1"),
        (module(computation(1, parameter(1, 3, F32), root=1)), "numbered from 0"),
        (module(computation(1, parameter(1, 0, F32), root=9)), "instruction 9, is not there"),
        (
            module(computation(1, instruction(1, "call", F32, (), (1,)), root=1)),
            "calls computation 1",
        ),
        (module(computation(1, parameter(1, 0, shape("f32", *[1 << 40] * 3)), root=1)), "elements"),
        (module(computation(1, parameter(1, 0, shape("f32", *[1] * 99)), root=1)), "99 dimensions"),
    ],
)
def test_what_is_wrong_is_said(payload: bytes, said: str) -> None:
    with pytest.raises(HloError, match=said):
        read_module(payload)


def test_tuples_within_tuples_end() -> None:
    deep = F32
    for _ in range(5000):
        deep = write_message([Field(2, 0, 13), Field(4, BYTES, deep)])
    with pytest.raises(HloError, match="deep"):
        read_module(module(computation(1, parameter(1, 0, deep), root=1)))


def _read_or_hlo_error(payload: bytes) -> None:
    """Whatever can be read can be analysed and linted, too."""
    from nxbucket.compile.hlo.analysis import analyse
    from nxbucket.compile.hlo.lint import lint

    try:
        read = read_module(payload)
        analyse(read)
    except HloError as err:
        assert err.message
        return
    lint(read)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=8),
    st.one_of(st.none(), st.integers(0, 1 << 30)),
    st.booleans(),
)
def test_changed_and_cut_modules_are_read_or_refused(
    changes: list[tuple[int, int]], cut: int | None, looped: bool
) -> None:
    payload = bytearray(loop() if looped else lowered(SEGMENTED))
    for at, value in changes:
        payload[at % len(payload)] = value
    if cut is not None:
        del payload[cut % len(payload) :]
    _read_or_hlo_error(bytes(payload))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    _read_or_hlo_error(payload)
    looks_like_hlo(payload)


def test_every_cut_of_a_small_module() -> None:
    payload = loop()
    for end in range(len(payload)):
        _read_or_hlo_error(payload[:end])


def test_every_byte_of_a_small_module_changed() -> None:
    payload = loop()
    chosen = random.Random(0)
    for at in range(len(payload)):
        changed = bytearray(payload)
        changed[at] ^= 1 << chosen.randrange(8)
        _read_or_hlo_error(bytes(changed))


def test_a_megabyte_of_nothing_is_refused_at_once() -> None:
    started = time.monotonic()
    for payload in (b"\x1a\x00" * 500_000, b"\x0a\x00" * 500_000, b"\xff" * 1_000_000):
        with pytest.raises(HloError):
            read_module(payload)
    assert time.monotonic() - started < 10


def test_a_module_is_told_from_other_files() -> None:
    assert looks_like_hlo(lowered(SEGMENTED))
    assert not looks_like_hlo(b"model: llama\n")
    assert not looks_like_hlo(b'{"a": 1}')
    assert not looks_like_hlo(b"")


def test_reading_imports_neither_torch_nor_jax() -> None:
    code = (
        "import sys; import nxbucket.compile.hlo.lint, nxbucket.toolkit.inspect_report; "
        "print([m for m in ('torch', 'jax', 'jaxlib', 'numpy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
