"""Neuron plans through vLLM, emulated: what the tests against stock vLLM do not cover."""

import json
from pathlib import Path

import pytest
from example_model import example_in
from servers import run_nxbucket

pytestmark = pytest.mark.engine

PROMPT = "Four score and seven"
ANSWER = " years ago our fathers brought forth on this continent"
LIMITS = {"num_batched_tokens_buckets": "[128]", "num_seqs_buckets": "[2]", "max_num_seqs": "2"}
LONG = {
    **LIMITS,
    "num_seqs_buckets": "[2]\n  kv_segment_size_buckets: [512]"
    "\n  decode_context_length_buckets: [128, 512]",
}


def generated(
    folder: Path, env: dict[str, str], prompt: str, **changes: str
) -> tuple[str, list[int]]:
    """Compiled for emulation, and asked once."""
    model_file = str(example_in(folder, target="trn2", **changes))
    done = run_nxbucket("compile", model_file, "--emulate", "--json", env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == "hlo"
    options = ("--emulate", "--prompt", prompt, "--max-tokens", str(len(ANSWER)), "--json")
    done = run_nxbucket("generate", model_file, *options, env=env)
    assert done.returncode == 0, done.stderr
    assert "emulating trn2 on XLA:CPU: correct, not fast; nothing here is a NEFF" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    return answer["text"], answer["token_ids"]


def test_segments_and_shorter_contexts(tmp_path: Path, artifact_env: dict[str, str]) -> None:
    # The prompt takes two chunks, and its answer runs past the first context length.
    prompt = "x" * 60 + "\n\n" + PROMPT
    text, _ = generated(tmp_path, artifact_env, prompt, **LONG)
    assert text == ANSWER


def test_bfloat16(tmp_path: Path, artifact_env: dict[str, str]) -> None:
    # No claim of equal text, but a model that knows it by heart starts it.
    text, tokens = generated(tmp_path, artifact_env, PROMPT, **LIMITS, dtype="bfloat16")
    assert len(tokens) == len(ANSWER)
    assert text[:10] == ANSWER[:10]
