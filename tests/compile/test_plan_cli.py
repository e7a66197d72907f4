"""`nxbucket plan` and `nxbucket explain` as a person runs them, with the null compiler."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_here import cli_here
from null_compiler import NullOptions, model_file

from nxbucket.compile.cache import ArtifactCache
from nxbucket.compile.cost import Memory
from nxbucket.toolkit import plan_report
from nxbucket.toolkit.plan_report import human, human_bytes, memory_warning, padding_hint
from nxbucket.toolkit.spec import load_spec

NULL_CLI = Path(__file__).parents[1] / "null_cli.py"
NAMES = ["prefill_s32", "prefill_s64", "decode_b1", "decode_b2"]

Run = Callable[..., tuple[int, str, str]]
Edit = Callable[[Path], object]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`nxbucket ARGUMENTS` beside a model.yaml of four programs."""
    model_file(tmp_path, (32, 64), (1, 2))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **options: Any) -> tuple[int, str, str]:
        for name, value in NullOptions(**options).environ().items():
            monkeypatch.setenv(name, value)
        return cli_here(monkeypatch, capsys, *arguments)

    return run


def edited(old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "model.yaml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return edit


def config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "llama" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


# plan


def test_a_plan_has_each_programs_key_cost_and_state(run: Run, tmp_path: Path) -> None:
    code, out, err = run("plan")
    assert code == 0
    table = [line.split() for line in out.partition("\n\n")[0].splitlines()]
    assert table[0] == ["program", "cache", "FLOPs", "I/O", "bytes", "compile", "s", "key"]
    assert [row[:2] for row in table[1:]] == [[name, "miss"] for name in NAMES]
    assert [row[-2] for row in table[1:]] == ["-"] * 4
    assert "to compile  4 programs; no record of how long one takes on cpu-null" in out
    assert "2 requests of max_model_len 128; 256 tokens in all" in out
    assert "block_size 32" in out
    assert "4 of 4 would be compiled for cpu-null" in err
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "model.lock").exists()


def test_a_plan_as_json_is_one_object_of_exact_numbers(run: Run, tmp_path: Path) -> None:
    plan = json.loads(run("plan", "--json")[1])
    assert set(plan) == {
        "ok", "file", "target", "toolchain", "lacks", "cache_dir", "programs", "memory_per_rank",
        "kv_cache", "to_compile", "defaults", "warnings", "hints",
    }  # fmt: skip
    assert [p["name"] for p in plan["programs"]] == NAMES
    assert set(plan["programs"][0]) == {
        "name", "key", "cache", "reason", "weight_bytes", "kv_cache_bytes", "io_bytes", "flops",
        "compile_s", "compile_s_from",
    }  # fmt: skip
    # 2 heads of 16, keys and values, one layer, float32.
    assert plan["kv_cache"] == {
        "num_blocks": 9, "block_size": 32, "requests_at_max_model_len": 2, "tokens": 256,
    }  # fmt: skip
    memory = plan["memory_per_rank"]
    assert memory["kv_cache_bytes"] == 9 * 32 * 2 * 16 * 2 * 4
    assert memory["total_bytes"] == sum(
        memory[name] for name in ("weight_bytes", "kv_cache_bytes", "io_bytes")
    )
    assert plan["defaults"]["block_size"] == 32
    assert "max_model_len" not in plan["defaults"]
    assert "artifacts" not in str(plan["defaults"])


def test_a_warm_plan_has_the_recorded_times_and_imports_no_torch(run: Run, tmp_path: Path) -> None:
    assert run("compile")[0] == 0
    modules = tmp_path / "modules"
    done = subprocess.run(
        [sys.executable, str(NULL_CLI), "plan", "--json"],
        cwd=tmp_path,
        env={**os.environ, "NULL_CLI_MODULES": str(modules)},
        capture_output=True,
        text=True,
        check=True,
    )
    plan = json.loads(done.stdout)
    assert [p["cache"] for p in plan["programs"]] == ["hit"] * 4
    assert {p["compile_s_from"] for p in plan["programs"]} == {"recorded"}
    assert plan["to_compile"] == {"programs": 0, "compile_s": 0, "estimated_from": 0}
    assert not set(modules.read_text().splitlines()) & {"torch", "vllm", "numpy", "transformers"}


def test_what_is_missing_gets_an_estimate_from_what_was_recorded(run: Run) -> None:
    assert run("compile", sleep_s=0.2)[0] == 0
    edited("[32, 64]", "[32, 48, 64]")(Path())
    plan = json.loads(run("plan", "--json")[1])
    states = {p["name"]: (p["cache"], p["compile_s_from"]) for p in plan["programs"]}
    assert states.pop("prefill_s48") == ("miss", "estimated")
    assert set(states.values()) == {("hit", "recorded")}
    assert plan["to_compile"]["estimated_from"] == 4
    assert 0.2 <= plan["to_compile"]["compile_s"] < 5
    out = run("plan")[1]
    assert "estimated per layer from 4 recorded" in out
    assert "~0." in out


def test_a_corrupt_artifact_is_corrupt_in_the_plan_and_its_file_named(
    run: Run, tmp_path: Path
) -> None:
    assert run("compile")[0] == 0
    blob = damage(tmp_path)
    _, out, err = run("plan")
    assert [line.split()[1] for line in out.splitlines()[1:5]] == ["hit", "hit", "corrupt", "hit"]
    assert f"decode_b1: {blob}: 1 bytes" in err


def test_one_large_prefill_bucket_with_prefix_caching_gets_a_hint(tmp_path: Path) -> None:
    # B19
    limits = "max_model_len: 8192\nmax_num_batched_tokens: 1024\nmax_num_seqs: 4\n"
    file = model_file(tmp_path, max_position_embeddings=8192)
    text = f"model: llama\n{limits}neuron_config: {{num_batched_tokens_buckets: [1024]}}\n"
    file.write_text(text)
    hint = padding_hint(load_spec(file))
    assert hint is not None
    assert "pays for 1024 tokens: 40 are 96 % padding" in hint
    assert "num_batched_tokens_buckets: [128, 1024]" in hint
    file.write_text(text.replace("[1024]", "[128, 1024]"))
    assert padding_hint(load_spec(file)) is None
    file.write_text(f"{text}enable_prefix_caching: false\n")
    assert padding_hint(load_spec(file)) is None


@pytest.mark.parametrize("command", [("plan",), ("compile",)])
def test_more_than_this_host_has_is_said_before_anything_is_compiled(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    # B127
    monkeypatch.setattr(plan_report, "available_bytes", lambda: 1000)
    monkeypatch.setattr("nxbucket.compile.host_memory.available_bytes", lambda: 1000)
    code, _, err = run(*command)
    assert code == 0
    assert "warning: a server needs " in err
    assert "this host has 1000.0 bytes available" in err
    assert "max_num_seqs" in err


def test_enough_memory_or_none_to_know_of_is_no_warning(tmp_path: Path) -> None:
    spec = load_spec(model_file(tmp_path))
    memory = Memory(10 << 30, 5 << 30, 1 << 20)
    assert memory_warning(spec, memory, 16 << 30) is None
    assert memory_warning(spec, memory, 0) is None
    warning = memory_warning(spec, memory, 15 << 30)
    assert warning is not None
    assert "15.0 GiB (weights 10.0 GiB, KV cache 5.0 GiB)" in warning


@pytest.mark.parametrize(
    ("count", "shown", "bytes_shown"),
    [
        (0, "0", "0.0 bytes"),
        (999, "999", "999.0 bytes"),
        (1024, "1.02k", "1.0 KiB"),
        (1_140_000_000_000, "1.14T", "1.0 TiB"),
        (10**19, "1e+04P", "9094947.0 TiB"),
    ],
)
def test_numbers_are_scaled_for_people(count: int, shown: str, bytes_shown: str) -> None:
    assert (human(count), human_bytes(count)) == (shown, bytes_shown)


# explain


def damage(folder: Path) -> Path:
    """Cut decode_b1's blob short."""
    lock = json.loads((folder / "model.lock").read_text())
    [program] = [p for p in lock["targets"]["cpu-null"]["programs"] if p["name"] == "decode_b1"]
    blob = ArtifactCache(folder / "cache").blob_path(program["blobs"][0]["digest"])
    os.truncate(blob, 1)
    return blob


def test_after_a_compile_there_is_nothing_to_explain(run: Run) -> None:
    assert run("compile")[0] == 0
    code, out, _ = run("explain")
    assert (code, out.splitlines()) == (
        0,
        [f"{', '.join(NAMES)}: hit", "model.lock: names all of them, for cpu-null"],
    )
    explained = json.loads(run("explain", "--json")[1])
    assert (explained["ok"], explained["command"]) == (True, None)
    assert explained["lock"]["state"] == "ok"
    assert {p["nearest"] for p in explained["programs"]} == {None}


def test_an_empty_cache_and_no_lock_are_said_to_be_so(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("explain", "model.yaml")
    assert code == 1
    assert f"{', '.join(NAMES)}: miss\n  the cache has no entry to compare with\n" in out
    assert "model.lock: there is none" in out
    assert out.splitlines()[-1] == f"to mend it: nxbucket compile {tmp_path / 'model.yaml'}"
    assert json.loads(run("explain", "--json")[1])["lock"]["state"] == "missing"


CHANGES: dict[str, tuple[Edit, list[str], list[str]]] = {
    "theta": (
        config(rope_theta=500000.0),
        ["architecture.rope.theta: 10000.0 -> 500000.0"],
        ["config.json.rope.theta: 10000.0 -> 500000.0"],
    ),
    "eps": (
        config(rms_norm_eps=1e-6),
        ["architecture.rms_norm_eps: 1e-05 -> 1e-06"],
        ["config.json.rms_norm_eps: 1e-05 -> 1e-06"],
    ),
    "tied": (
        config(tie_word_embeddings=True),
        ["architecture.tie_word_embeddings: false -> true"],
        ["config.json.tie_word_embeddings: false -> true"],
    ),
    "dtype": (
        edited("model: llama", "model: llama\ndtype: bfloat16"),
        ['program.dtype: "float32" -> "bfloat16"'],
        ['dtype: "float32" -> "bfloat16"'],
    ),
    "blocks": (
        edited("model: llama", "model: llama\nnum_gpu_blocks_override: 40"),
        ["program.num_kv_blocks: 9 -> 40"],
        ["num_gpu_blocks_override: 9 -> 40"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_named_for_the_programs_and_for_the_lock(
    run: Run, tmp_path: Path, change: str
) -> None:
    # B67
    edit, of_programs, of_lock = CHANGES[change]
    assert run("compile")[0] == 0
    edit(tmp_path)
    code, out, _ = run("explain")
    assert code == 1
    assert out.splitlines() == [
        f"{', '.join(NAMES)}: miss",
        "  1 input differs from the nearest entry's (there -> wanted):",
        *(f"    {line}" for line in of_programs),
        "model.lock: made from another model.yaml or config.json",
        *(f"    {line}" for line in of_lock),
        "",
        f"to mend it: nxbucket compile {tmp_path / 'model.yaml'}",
    ]
    assert run("compile")[0] == 0
    assert run("explain")[0] == 0


def test_another_toolchain_is_named_with_both_versions(run: Run, tmp_path: Path) -> None:
    assert run("compile", version="1")[0] == 0
    code, out, _ = run("explain", version="2")
    assert code == 1
    assert '    toolchain.version: "1" -> "2"' in out
    assert "model.lock: names artifacts of another toolchain: prefill_s32" in out
    # Somebody else filled the cache; the lock here is as it was.
    lock = (tmp_path / "model.lock").read_bytes()
    assert run("compile", version="2")[0] == 0
    (tmp_path / "model.lock").write_bytes(lock)
    explained = json.loads(run("explain", "--json", version="2")[1])
    assert {p["cache"] for p in explained["programs"]} == {"hit"}
    assert explained["lock"]["state"] == "other-toolchain"
    assert explained["lock"]["differences"] == [
        {"name": "toolchain.version", "there": "1", "wanted": "2"}
    ]
    assert explained["command"] == f"nxbucket compile {tmp_path / 'model.yaml'}"


def test_a_lock_for_another_target_names_both(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxbucket.compile.diagnosis.runnable_targets", list)
    assert run("compile", target="cpu-other")[0] == 0
    explained = json.loads(run("explain", "--json")[1])
    assert explained["lock"]["state"] == "other-target"
    assert "locked for cpu-other" in explained["lock"]["detail"]
    assert "cpu-null" in explained["lock"]["detail"]


def test_a_corrupt_artifact_is_named_with_its_file(run: Run, tmp_path: Path) -> None:
    assert run("compile")[0] == 0
    blob = damage(tmp_path)
    code, out, _ = run("explain")
    assert code == 1
    assert "prefill_s32, prefill_s64, decode_b2: hit" in out
    assert f"decode_b1: corrupt\n  {blob}: 1 bytes" in out
    assert f"decode_b1 is corrupt ({blob}" in out
    assert run("explain", "prefill_s32")[0] == 0
    assert run("compile")[0] == 0
    assert run("explain")[0] == 0


def test_what_the_lock_names_and_the_cache_lacks_is_listed(run: Run, tmp_path: Path) -> None:
    # B73
    assert run("compile")[0] == 0
    cache = ArtifactCache(tmp_path / "cache")
    for key, manifest in cache.manifests().items():
        if manifest.program.startswith("prefill"):
            cache.entry_path(key).unlink()
    explained = json.loads(run("explain", "--json")[1])
    assert explained["lock"]["state"] == "incomplete"
    assert explained["lock"]["faults"] == ["prefill_s32 is missing", "prefill_s64 is missing"]
    assert [p["cache"] for p in explained["programs"]] == ["miss", "miss", "hit", "hit"]


def test_a_lock_that_cannot_be_read_is_told_of(run: Run, tmp_path: Path) -> None:
    assert run("compile")[0] == 0
    (tmp_path / "model.lock").write_text("{}")
    code, out, _ = run("explain")
    assert code == 1
    assert "model.lock: not a lock file of ours" in out


def test_named_programs_alone_are_explained(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("explain", "decode_b1", "prefill_s64")
    assert (code, out.splitlines()[0]) == (1, "prefill_s64, decode_b1: miss")
    file = str(tmp_path / "model.yaml")
    explained = json.loads(run("explain", file, "decode_b2", "--json")[1])
    assert [p["name"] for p in explained["programs"]] == ["decode_b2"]


def test_a_program_there_is_not_is_wrong_usage(run: Run) -> None:
    code, _, err = run("explain", "decode_b3")
    assert code == 2
    assert "has no program decode_b3" in err
    assert "decode_b1, decode_b2" in err


def test_garbage_in_the_cache_is_no_entry_to_compare_with(run: Run, tmp_path: Path) -> None:
    entry = ArtifactCache(tmp_path / "cache").entry_path("a" * 64)
    entry.parent.mkdir(parents=True)
    entry.write_text('{"format": 1}')
    code, out, _ = run("explain")
    assert code == 1
    assert "the cache has no entry to compare with" in out
    assert json.loads(run("plan", "--json")[1])["to_compile"]["estimated_from"] == 0
