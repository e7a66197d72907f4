"""What differs between two sets of key inputs, which entry is nearest, and what mends it."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_compiler import ARCHITECTURE, LLAMA3_ROPE, a_program

from nxbucket.compile.canonical import canonical_json, digest_of
from nxbucket.compile.explain import (
    ABSENT,
    Difference,
    Nearest,
    compile_command,
    differences,
    nearest,
    remedy,
    show,
)
from nxbucket.compile.key import key_inputs
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.toolchain import Toolchain

OPTIONS = {"cpp.march": "x86-64-v3", "cpp.simdlen": 256, "cpp.vec_isa_ok": True}
TOOLCHAIN = Toolchain(
    "cpu-x86-64-v3",
    {
        "compiler": "aotinductor",
        "torch": "2.13.0+cpu",
        "cxx": "g++ 12.2.0",
        "march": "x86-64-v3",
        "options": canonical_json(OPTIONS).decode(),
    },
)
MODEL = replace(ARCHITECTURE, rope=LLAMA3_ROPE)
MODEL_FILE = Path("model.yaml")

Entries = dict[str, tuple[str, dict[str, Any]]]


def inputs_of(program: BucketProgram) -> dict[str, Any]:
    return key_inputs(program, TOOLCHAIN)


def entries_of(*all_inputs: dict[str, Any]) -> Entries:
    return {digest_of(inputs): ("prefill_s16", inputs) for inputs in all_inputs}


INPUTS = inputs_of(a_program(architecture=MODEL))
OTHER_MODEL = replace(ARCHITECTURE, num_hidden_layers=7, tie_word_embeddings=True)
CACHE = entries_of(
    INPUTS,
    *(inputs_of(a_program("prefill", size, MODEL)) for size in (8, 32, 64)),
    *(inputs_of(a_program("decode", size, MODEL)) for size in (1, 16)),
    *(inputs_of(a_program("prefill", size, OTHER_MODEL)) for size in (16, 17)),
)


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [leaf for name, child in value.items() for leaf in leaves(child, (*path, name))]
    return [path]


def changed(path: tuple[str, ...], new: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(INPUTS))
    place = copy
    for name in path[:-1]:
        place = place[name]
    if new is ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return copy


values = st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e30, 1e30)


@given(st.sampled_from(leaves(INPUTS)), values | st.just(ABSENT))
@settings(max_examples=500)
def test_any_single_input_changed_changes_the_key_and_is_named_alone(
    path: tuple[str, ...], new: Any
) -> None:
    # B67. The leaves are found, not listed: a new field of a program is covered as it is.
    wanted = changed(path, new)
    if wanted == INPUTS and json.dumps(wanted) == json.dumps(INPUTS):
        return
    assert digest_of(wanted) != digest_of(INPUTS)
    if digest_of(wanted) in CACHE:
        return
    for entries in (entries_of(INPUTS), CACHE):
        found = nearest(wanted, entries)
        assert found is not None
        assert [d.name for d in found.differences] == [".".join(path)]
    there: Any = INPUTS
    for name in path:
        there = there[name]
    assert differences(INPUTS, wanted) == [Difference(".".join(path), there, new)]


@given(st.sampled_from(sorted(OPTIONS)), st.integers() | st.text())
def test_a_changed_compiler_option_is_named_alone_too(name: str, new: Any) -> None:
    text = canonical_json({**OPTIONS, name: new}).decode()
    wanted = changed(("toolchain", "options"), text)
    expected = [] if wanted == INPUTS else [f"toolchain.options.{name}"]
    assert [d.name for d in differences(INPUTS, wanted)] == expected


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": NaN}', '{"cpp.march"  :"x86-64-v3"', "{" * 5000]
)
def test_options_that_are_no_json_differ_as_a_whole(text: str) -> None:
    names = {d.name for d in differences(INPUTS, changed(("toolchain", "options"), text))}
    assert names
    assert all(name.startswith("toolchain.options") for name in names)


def test_the_same_options_written_otherwise_are_still_a_difference() -> None:
    wanted = changed(("toolchain", "options"), json.dumps(OPTIONS, indent=1))
    assert [d.name for d in differences(INPUTS, wanted)] == ["toolchain.options"]


def test_several_changes_are_all_named_with_both_values() -> None:
    rope = replace(LLAMA3_ROPE, theta=10000.0, factor=32.0)
    wanted = inputs_of(a_program(architecture=replace(MODEL, rope=rope), num_kv_blocks=17))
    found = nearest(wanted, CACHE)
    assert found is not None
    assert [str(d) for d in found.differences] == [
        "architecture.rope.factor: 8.0 -> 32.0",
        "architecture.rope.theta: 500000.0 -> 10000.0",
        "program.num_kv_blocks: 9 -> 17",
    ]


def test_an_input_one_side_does_not_know_is_shown_as_absent() -> None:
    [difference] = differences(changed(("program", "kernel"), ABSENT), INPUTS)
    assert str(difference) == 'program.kernel: (absent) -> "reference"'
    assert difference.as_json() == {"name": "program.kernel", "wanted": "reference"}


def test_integer_float_and_boolean_are_three_values() -> None:
    assert differences({"a": 1}, {"a": 1.0})
    assert differences({"a": 1}, {"a": True})
    assert not differences({"a": float("nan")}, {"a": float("nan")})


def test_text_from_a_cache_cannot_move_a_cursor() -> None:
    text = str(Difference("a\x1b[2J", "\x1b[2J", "é" * 500))
    assert text.isascii()
    assert text.isprintable()
    assert len(show("x" * 500)) == 120


def test_an_empty_cache_has_no_nearest_entry() -> None:
    assert nearest(INPUTS, {}) is None


def test_a_new_bucket_is_told_apart_from_another_model_of_that_size() -> None:
    # 17 is there for another model. That is no help: this one differs in its size alone.
    found = nearest(inputs_of(a_program("prefill", 17, MODEL)), CACHE)
    assert found is not None
    assert [str(d) for d in found.differences] == ["program.size: 16 -> 17"]


@pytest.mark.parametrize("seed", range(5))
def test_of_two_entries_equally_near_the_choice_is_always_the_same(seed: int) -> None:
    theta = [replace(MODEL, rope=replace(LLAMA3_ROPE, theta=t)) for t in (1.0, 2.0, 3.0)]
    tied = entries_of(*(inputs_of(a_program(architecture=a)) for a in theta))
    shuffled = list(tied.items())
    random.Random(seed).shuffle(shuffled)
    found = nearest(INPUTS, dict(shuffled))
    assert found is not None
    assert found.key == min(tied)


def test_of_entries_equally_near_the_same_phase_goes_before_the_same_size() -> None:
    wanted = inputs_of(a_program("prefill", 16, MODEL))
    other_size = inputs_of(a_program("prefill", 512, MODEL))
    other_phase = inputs_of(a_program("decode", 16, MODEL))
    found = nearest(wanted, entries_of(other_phase, other_size))
    assert found is not None
    assert found.key == digest_of(other_size)


# What mends it


def a_miss(**changes: tuple[Any, Any]) -> Nearest:
    named = {name.replace("__", "."): pair for name, pair in changes.items()}
    return Nearest("k", "p", tuple(Difference(n, *pair) for n, pair in named.items()))


MARCH = a_miss(
    target=("cpu-x86-64-v3", "cpu-x86-64-v4"),
    toolchain__march=("x86-64-v3", "x86-64-v4"),
    toolchain__options__simdlen=(256, 512),
)


@pytest.mark.parametrize(
    ("found", "command"),
    [
        (None, "nxbucket compile model.yaml"),
        (a_miss(architecture__rope__theta=(1.0, 2.0)), "nxbucket compile model.yaml"),
        (a_miss(toolchain__cxx=("g++ 12", "g++ 13")), "nxbucket compile model.yaml"),
        (
            a_miss(toolchain__torch=("2.13.1+cpu", "2.13.0+cpu")),
            "pip install torch==2.13.1+cpu",
        ),
        (a_miss(toolchain__torch=("2.12.0", "2.13.0")), "nxbucket compile model.yaml"),
        (
            a_miss(toolchain__torch=("2.13.1", "2.13.0"), program__size=(1, 2)),
            "nxbucket compile model.yaml",
        ),
        (a_miss(toolchain__torch=(ABSENT, "2.13.0")), "nxbucket compile model.yaml"),
        (MARCH, "set `compiler: {march: x86-64-v3}` in model.yaml"),
    ],
)
def test_the_remedy_is_one_command(found: Nearest | None, command: str) -> None:
    assert remedy(found, MODEL_FILE, ["cpu-x86-64-v3"]) == command


def test_a_march_this_host_cannot_run_is_not_recommended() -> None:
    assert remedy(MARCH, MODEL_FILE, []) == compile_command(MODEL_FILE)


def test_a_path_with_a_space_can_be_pasted() -> None:
    assert compile_command(Path("my model.yaml")) == "nxbucket compile 'my model.yaml'"
