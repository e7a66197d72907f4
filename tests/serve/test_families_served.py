"""Models of other families compiled and served for real: vLLM takes their config, we their text."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hf_models import Reference, write_checkpoint
from servers import run_nxbucket, run_script

pytestmark = pytest.mark.engine

MODELS: dict[str, dict[str, Any]] = {
    # Longer than max_position_embeddings, as its RoPE allows; no class named in config.json.
    "mistral": {"family": "mistral", "rope": "linear", "sliding_window": 8}
    | {"max_position_embeddings": 24},
    "qwen2": {"family": "qwen2", "rope": "yarn", "tie_word_embeddings": True, "sliding_window": 8}
    | {"use_sliding_window": True, "max_window_layers": 1},  # B101
    "qwen3": {"family": "qwen3", "rope": "longrope", "attention_bias": True},
}


def answers(folder: Path, model_file: Path, cases: list[dict[str, Any]], **env: str) -> Any:
    (folder / "cases.json").write_text(json.dumps(cases))
    run_script(
        "greedy.py",
        str(folder / "cases.json"),
        str(model_file),
        str(folder / "out.json"),
        env=env,
    )
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_hugging_face(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "model", **MODELS[name])
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    model_file = tmp_path / "model.yaml"
    model_file.write_text(
        "model: model\nmax_model_len: 96\nmax_num_batched_tokens: 32\nmax_num_seqs: 2\n"
        "neuron_config: {num_batched_tokens_buckets: [32], num_seqs_buckets: [2]}\n"
        "artifacts: {cache: cache}\n"
    )
    done = run_nxbucket("compile", str(model_file))
    assert done.returncode == 0, done.stderr
    chosen = random.Random(3)
    prompts = [chosen.choices(range(96), k=length) for length in (1, 7, 33, 70)]
    sampling = {"max_tokens": 16, "ignore_eos": True}
    got = answers(
        tmp_path, model_file, [{"prompt_token_ids": p, "sampling": sampling} for p in prompts]
    )
    reference = Reference.load(folder)
    for prompt, answer in zip(prompts, got, strict=True):
        tokens = list(prompt)
        for _ in range(16):
            tokens.append(int(reference.logits(tokens)[-1].argmax()))
        assert answer["token_ids"] == tokens[len(prompt) :]


def test_every_end_token_of_both_files_ends_and_obeys_min_tokens(
    tmp_path: Path, example: Path, artifact_env: dict[str, str]
) -> None:
    # B51, B98: one id in config.json, a list in generation_config.json.
    shutil.copytree(example.parent, tmp_path / "copy")
    ends = [257, ord("v"), ord("r")]
    generation_config = tmp_path / "copy" / "model" / "generation_config.json"
    generation_config.write_text(json.dumps({"eos_token_id": ends}))
    prompt = list(b"Four score")
    cases: list[dict[str, Any]] = [
        {"prompt_token_ids": prompt, "sampling": sampling}
        for sampling in (
            {"max_tokens": 60, "ignore_eos": True},
            {"max_tokens": 60},
            {"max_tokens": 60, "min_tokens": 20},
        )
    ]
    whole, ended, later = answers(tmp_path, tmp_path / "copy" / "model.yaml", cases, **artifact_env)
    assert bytes(whole["token_ids"]).startswith(b" and seven years ago")
    assert len(whole["token_ids"]) == 60
    assert bytes(ended["token_ids"]) == b" and sev"
    assert ended["finish_reason"] == "stop"
    assert len(later["token_ids"]) >= 20
    assert not set(ends) & set(later["token_ids"][:19])
