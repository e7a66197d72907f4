"""The input key: what changes it, what does not. docs/cache-keys.md is the list these go by."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from null_compiler import ARCHITECTURE, LLAMA3_ROPE, NULL_TOOLCHAIN, a_program, model_file

from nxbucket.compile import key as key_module
from nxbucket.compile.canonical import digest_of
from nxbucket.compile.key import graph_key_inputs, input_key, key_inputs
from nxbucket.compile.plan import plan_programs
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.architecture import Architecture, Rope
from nxbucket.toolkit.spec import load_spec

TOOLCHAIN = Toolchain(
    "cpu-x86-64-v3",
    {"compiler": "aotinductor", "torch": "2.13.0", "cxx": "g++ 12.2.0", "march": "x86-64-v3"},
)
PROGRAM = a_program()
KEY = input_key(PROGRAM, TOOLCHAIN)

GOLDEN_KEY = "20d5b8198ed3d44946710cc3b26bcca86f8fcd77c91dc935c987c323455d328d"
"""Of PROGRAM and TOOLCHAIN. If this fails, every cache there is will miss: mean it, or mend it."""

PROGRAM_CHANGES: dict[str, Any] = {
    "phase": "decode",
    "size": 17,
    "architecture": replace(ARCHITECTURE, vocab_size=97),
    "dtype": "bfloat16",
    "block_size": 64,
    "max_blocks": 5,
    "num_kv_blocks": 10,
    "context_len": 64,
    "kv_segment_size": 64,
    "kernel": "fast",
    "output": "token_ids",
}
ARCHITECTURE_CHANGES: dict[str, Any] = {
    "family": "qwen2",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 65,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "rope": Rope("default", 500000.0),
    "qk_norm": True,
    "sliding_window": 64,
    "windowed_layers": (0,),
}
ROPE_CHANGES: dict[str, Any] = {
    "form": "default",
    "theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "attention_factor": 1.1,
    "short_factor": (1.0, 2.0),
}


def key_of(program: BucketProgram = PROGRAM, toolchain: Toolchain = TOOLCHAIN) -> str:
    return input_key(program, toolchain)


def with_rope(rope: Rope) -> BucketProgram:
    return replace(PROGRAM, architecture=replace(ARCHITECTURE, rope=rope))


def test_the_golden_key_has_not_drifted() -> None:
    assert KEY == GOLDEN_KEY


def test_every_field_has_a_change_below() -> None:
    assert set(PROGRAM_CHANGES) == {f.name for f in fields(BucketProgram)}
    assert set(ARCHITECTURE_CHANGES) == {f.name for f in fields(Architecture)}
    assert set(ROPE_CHANGES) == {f.name for f in fields(Rope)}


@pytest.mark.parametrize("field", PROGRAM_CHANGES)
def test_each_field_of_a_program_changes_the_key(field: str) -> None:
    assert key_of(replace(PROGRAM, **{field: PROGRAM_CHANGES[field]})) != KEY


@pytest.mark.parametrize("field", ARCHITECTURE_CHANGES)
def test_each_field_of_the_architecture_changes_the_key(field: str) -> None:
    # B67
    architecture = replace(ARCHITECTURE, **{field: ARCHITECTURE_CHANGES[field]})
    assert key_of(replace(PROGRAM, architecture=architecture)) != KEY


@pytest.mark.parametrize("field", ROPE_CHANGES)
def test_each_field_of_the_rope_changes_the_key(field: str) -> None:
    changed = replace(LLAMA3_ROPE, **{field: ROPE_CHANGES[field]})
    assert key_of(with_rope(changed)) != key_of(with_rope(LLAMA3_ROPE))


@pytest.mark.parametrize("name", TOOLCHAIN.versions)
def test_each_version_of_the_toolchain_changes_both_keys(name: str) -> None:
    # B72: march names the target, so what was built for another one is another artifact.
    other = replace(TOOLCHAIN, versions={**TOOLCHAIN.versions, name: "other"})
    assert key_of(toolchain=other) != KEY
    assert graph_key_inputs("a" * 64, other) != graph_key_inputs("a" * 64, TOOLCHAIN)


def test_one_more_flag_in_the_toolchain_changes_the_key() -> None:
    other = replace(TOOLCHAIN, versions={**TOOLCHAIN.versions, "flags": "-O3"})
    assert key_of(toolchain=other) != KEY


@pytest.mark.parametrize("name", ["PROGRAM_VERSION", "KEY_FORMAT"])
def test_both_version_numbers_change_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, name, 1000)
    assert key_of() != KEY


def test_the_graph_key_is_no_input_key_and_follows_the_graph() -> None:
    one, other = (graph_key_inputs(d * 64, TOOLCHAIN) for d in "ab")
    assert digest_of(one) != digest_of(other)
    assert one["kind"] == "graph"
    assert key_inputs(PROGRAM, TOOLCHAIN)["kind"] == "input"


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [leaf for name, child in value.items() for leaf in leaves(child, (*path, name))]
    return [path]


INPUTS = key_inputs(with_rope(LLAMA3_ROPE), TOOLCHAIN)


@given(
    st.sampled_from(leaves(INPUTS)),
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e30, 1e30),
)
def test_any_single_change_of_the_inputs_changes_the_key(path: tuple[str, ...], new: Any) -> None:
    changed = json.loads(json.dumps(INPUTS))
    place = changed
    for name in path[:-1]:
        place = place[name]
    same = json.dumps(place[path[-1]]) == json.dumps(new)
    place[path[-1]] = new
    assert (digest_of(changed) == digest_of(INPUTS)) == same


def keys_of(file: Path) -> list[str]:
    return [input_key(p, NULL_TOOLCHAIN) for p in plan_programs(load_spec(file))]


def test_a_bucket_has_the_same_key_in_every_list_it_stands_in(tmp_path: Path) -> None:
    # B68. The size of the KV cache is given here, so that only the lists differ.
    fixed = "num_gpu_blocks_override: 40\n"
    keys = {}
    for name, prefill, decode in [
        ("a", (32, 128), (1, 4)),
        ("b", (64, 128), (1, 2, 4)),
        ("c", (32, 96), (1, 6)),
    ]:
        file = model_file(tmp_path / name, prefill, decode, fixed)
        keys[name] = {p.name: input_key(p, NULL_TOOLCHAIN) for p in plan_programs(load_spec(file))}
    assert keys["a"]["prefill_s32"] == keys["c"]["prefill_s32"]
    assert keys["a"]["prefill_s128"] == keys["b"]["prefill_s128"]
    assert keys["a"]["decode_b1"] == keys["b"]["decode_b1"] == keys["c"]["decode_b1"]
    assert len({key for named in keys.values() for key in named.values()}) == 8


def test_context_lengths_and_segments_change_the_keys_they_concern(tmp_path: Path) -> None:
    def keys(name: str, *lines: str) -> dict[str, str]:
        file = model_file(tmp_path / name)
        text = file.read_text()
        section = "neuron_config:\n"
        file.write_text(text.replace(section, section + "".join(f"  {line}\n" for line in lines)))
        return {p.name: input_key(p, NULL_TOOLCHAIN) for p in plan_programs(load_spec(file))}

    plain = keys("plain")
    contexts = keys("contexts", "decode_context_length_buckets: [32, 64]")
    segments = keys("segments", "kv_segment_size_buckets: [32]")
    longer = keys("longer", "kv_segment_size_buckets: [64]")
    # Context lengths only add programs; a segment size is part of every program.
    assert plain.items() <= contexts.items()
    assert contexts.keys() - plain.keys() == {
        f"decode_b{n}_ctx{context}" for n in (1, 2) for context in (32, 64)
    }
    assert len(set(contexts.values())) == len(contexts)
    assert segments.keys() == longer.keys() == plain.keys()
    every = [*plain.values(), *segments.values(), *longer.values()]
    assert len(set(every)) == len(every)


def test_a_changed_kv_cache_changes_every_key(tmp_path: Path) -> None:
    few = keys_of(model_file(tmp_path / "a", extra="num_gpu_blocks_override: 40\n"))
    many = keys_of(model_file(tmp_path / "b", extra="num_gpu_blocks_override: 41\n"))
    assert not set(few) & set(many)


def test_what_is_no_input_leaves_the_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B69: paths, key order, comments, served names, ports, the current folder, the host's name.
    first = model_file(tmp_path / "a", extra="serve: {port: 8000}\n")
    before = keys_of(first)
    second = model_file(
        tmp_path / "another folder", extra="serve: {port: 9000, served-model-name: x}\n"
    )
    lines = second.read_text().splitlines()
    head, tail = lines[:4], lines[4:]
    second = second.rename(second.with_name("other.yaml"))
    second.write_text("# a comment\n" + "\n".join([*tail, *reversed(head)]) + "\n")
    monkeypatch.chdir(tmp_path / "another folder")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    monkeypatch.setenv("HOSTNAME", "elsewhere")
    assert keys_of(second) == before


def test_prefix_caching_and_async_scheduling_leave_the_key_alone(tmp_path: Path) -> None:
    on = "enable_prefix_caching: true\nasync_scheduling: true\n"
    off = "enable_prefix_caching: false\nasync_scheduling: false\n"
    assert keys_of(model_file(tmp_path / "a", extra=on)) == keys_of(
        model_file(tmp_path / "b", extra=off)
    )


def test_two_checkpoints_of_one_architecture_share_their_keys(tmp_path: Path) -> None:
    # B74: weights are inputs of the program, so they, the folder and the model's id do not count.
    files = [model_file(tmp_path / name) for name in ("base", "finetune")]
    for file, weights in zip(files, (b"one", b"two"), strict=True):
        (file.parent / "llama" / "model.bin").write_bytes(weights)
    config = files[1].parent / "llama" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "_name_or_path": "me/finetune", "bos_token_id": 7}))
    assert keys_of(files[0]) == keys_of(files[1])


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 500000.0}, {"rms_norm_eps": 1e-6}, {"tie_word_embeddings": True}],
    ids=str,
)
def test_an_edit_of_config_json_changes_every_key(tmp_path: Path, change: dict[str, Any]) -> None:
    # B67
    before = keys_of(model_file(tmp_path / "a"))
    after = keys_of(model_file(tmp_path / "b", **change))
    assert not set(before) & set(after)


CHILD = """
import json, sys
from nxbucket.compile.cpu import CpuCompiler
from nxbucket.compile.key import input_key
from nxbucket.compile.plan import plan_programs
from nxbucket.toolkit.spec import load_spec
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from null_compiler import NULL_TOOLCHAIN
CpuCompiler("x86-64-v3").toolchain()
keys = [input_key(p, NULL_TOOLCHAIN) for p in plan_programs(load_spec(Path(sys.argv[1])))]
heavy = [m for m in ("torch", "numpy", "vllm") if m in sys.modules]
print(json.dumps({"keys": keys, "heavy": heavy}))
"""


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_has_the_same_keys_without_torch(tmp_path: Path, seed: str) -> None:
    file = model_file(tmp_path)
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(file), str(tests)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"keys": keys_of(file), "heavy": []}


def test_the_inputs_are_plain_json_and_name_every_field() -> None:
    inputs = key_inputs(PROGRAM, TOOLCHAIN)
    assert json.loads(json.dumps(inputs)) == inputs
    assert inputs["architecture"] == ARCHITECTURE.as_json()
    assert set(inputs["program"]) | {"architecture"} == {f.name for f in fields(BucketProgram)}
