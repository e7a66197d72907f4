"""What `nxbucket serve` and `generate` refuse, before vLLM is imported: a sentence and a mend."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from example_model import ARTIFACTS, variant
from servers import run_nxbucket

pytestmark = pytest.mark.aot  # the example has to be compiled, once

IMPORT_VLLM_S = 4
"""Importing vLLM takes longer than this; what is refused before it is answered sooner."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def refused(model_file: Path, *vllm_args: str, env: dict[str, str]) -> tuple[int, str]:
    start = time.monotonic()
    done = run_nxbucket("serve", str(model_file), "--", *vllm_args, env=env)
    assert "Traceback" not in done.stderr + done.stdout
    assert "hint: " in done.stderr
    assert time.monotonic() - start < 10 * IMPORT_VLLM_S
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--max-model-len", "8"], "max_model_len"),
        (["--max_model_len=8"], "max_model_len"),
        (["--block-size", "16"], "block_size"),
        (["--dtype", "bfloat16"], "dtype"),
        (["-tp", "2"], "tensor_parallel_size"),
        (["--tensor-parallel-size=2"], "tensor_parallel_size"),
        (["--max-num-seqs", "64"], "max_num_seqs"),
        (["--num-gpu-blocks-override", "7"], "num_gpu_blocks_override"),
        (["--speculative-config", "{}"], "speculative_config"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype"),
        (["--quantization", "awq"], "quantization"),
        (["--enable-lora"], "enable_lora"),
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size"),
        (["--data-parallel-size", "2"], "data_parallel_size"),
        (["--scheduler-cls", "x.Y"], "scheduler_cls"),
        (["--additional-config", "{}"], "additional_config"),
        (["--long-prefill-token-threshold", "64"], "long_prefill_token_threshold"),
        (["--port", "1", "--no-enable-chunked-prefill"], "enable_chunked_prefill"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_cannot_hold_are_refused_by_name(
    example: Path, artifact_env: dict[str, str], arguments: list[str], key: str
) -> None:
    status, message = refused(example, *arguments, env=artifact_env)
    assert status == 2
    assert key in message


def test_without_a_lock_the_command_that_writes_one_is_named(
    example: Path, artifact_env: dict[str, str], folder: Path
) -> None:
    model_file = variant(example, folder)
    model_file.with_suffix(".lock").unlink()
    status, message = refused(model_file, env=artifact_env)
    assert status == 1
    assert "no lock file" in message
    assert f"nxbucket compile {model_file}" in message


def test_a_lock_of_another_model_file_names_the_keys_that_changed(
    example: Path, artifact_env: dict[str, str], folder: Path
) -> None:
    model_file = variant(example, folder, max_num_batched_tokens="64")
    text = model_file.read_text().replace("[32, 64, 128]", "[32, 64]")
    model_file.write_text(text)
    status, message = refused(model_file, env=artifact_env)
    assert status == 1
    assert "max_num_batched_tokens: 128 -> 64" in message
    assert "num_batched_tokens_buckets" in message


# B67
def test_a_config_json_that_changed_after_the_compile_is_named_by_field(
    example: Path, artifact_env: dict[str, str], folder: Path
) -> None:
    shutil.copytree(example.parent, folder / "copy")
    config = folder / "copy" / "model" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "rms_norm_eps": 1e-3}))
    status, message = refused(folder / "copy" / "model.yaml", env=artifact_env)
    assert status == 1
    assert "config.json.rms_norm_eps: 1e-05 -> 0.001" in message


def without_last_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_another_layer(folder: Path) -> None:
    shutil.copyfile(folder / "model.safetensors", folder / "other.safetensors")
    index = {"weight_map": {"model.layers.99.mlp.up_proj.weight": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_last_byte, "truncated"),
        (pickled, "never read"),
        (with_another_layer, "stale"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    ],
)
def test_a_checkpoint_that_is_not_what_was_compiled_for_stops_the_start(
    example: Path,
    artifact_env: dict[str, str],
    folder: Path,
    damage: Callable[[Path], None],
    says: str,
) -> None:
    shutil.copytree(example.parent, folder / "copy")
    damage(folder / "copy" / "model")
    status, message = refused(folder / "copy" / "model.yaml", env=artifact_env)
    assert status == 1
    assert says in message


# B73, B86, B125
def test_missing_and_damaged_artifacts_are_listed_each(example: Path, folder: Path) -> None:
    cache = folder / "cache"
    shutil.copytree(ARTIFACTS, cache)
    lock = json.loads(example.with_suffix(".lock").read_text())
    programs = {p["name"]: p for t in lock["targets"].values() for p in t["programs"]}
    gone = programs["prefill_s64"]["key"]
    (cache / "entries" / gone[:2] / f"{gone}.json").unlink()
    blob = programs["decode_b2"]["blobs"][0]["digest"]
    path = cache / "blobs" / "sha256" / blob[:2] / blob
    path.write_bytes(path.read_bytes()[:1000])
    status, message = refused(example, env={"NXBUCKET_CACHE_DIR": str(cache)})
    assert status == 1
    assert "prefill_s64 is missing" in message
    assert "decode_b2 is corrupt" in message
    assert "1000 bytes" in message
    assert "prefill_s32" not in message


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"format": 99}', b"null"])
def test_a_garbage_lock_is_a_sentence(
    example: Path, artifact_env: dict[str, str], folder: Path, content: bytes
) -> None:
    model_file = variant(example, folder)
    model_file.with_suffix(".lock").write_bytes(content)
    status, message = refused(model_file, env=artifact_env)
    assert status == 1
    assert "not a lock file of ours" in message


def test_an_edited_lock_is_found_out(
    example: Path, artifact_env: dict[str, str], folder: Path
) -> None:
    model_file = variant(example, folder)
    lock = model_file.with_suffix(".lock")
    lock.write_text(lock.read_text().replace('"max_num_seqs": 4', '"max_num_seqs": 8'))
    status, message = refused(model_file, env=artifact_env)
    assert status == 1
    assert "`spec` was edited" in message


def test_vllm_target_device_in_the_environment_is_refused_by_name(
    example: Path, artifact_env: dict[str, str]
) -> None:
    env = {**artifact_env, "VLLM_TARGET_DEVICE": "cpu"}
    status, message = refused(example, env=env)
    assert status == 3
    assert "VLLM_TARGET_DEVICE" in message


@pytest.mark.engine
def test_generate_prints_text_or_json_and_nothing_else_on_stdout(
    example: Path, artifact_env: dict[str, str]
) -> None:
    options = ("--prompt", "Four score and seven", "--max-tokens", "20")
    done = run_nxbucket("generate", str(example), *options, "--json", env=artifact_env)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    assert answer["text"] == " years ago our fathe"
    assert answer["token_ids"] == list(answer["text"].encode())
    assert answer["finish_reason"] == "length"
    plain = run_nxbucket("generate", str(example), *options, env=artifact_env)
    assert plain.stdout == " years ago our fathe\n"


@pytest.mark.engine
def test_generate_refuses_a_prompt_over_the_limit(
    example: Path, artifact_env: dict[str, str]
) -> None:
    done = run_nxbucket(
        "generate", str(example), "--prompt", "x" * 3000, "--json", env=artifact_env
    )
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert "1024" in error["message"]
    assert "Traceback" not in done.stderr
