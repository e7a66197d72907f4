"""Segments and context lengths for real: AOTInductor's programs, and a server of the example."""

import json
import os
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from eager_server import EagerServer, Running, Shapes
from null_compiler import model_file
from servers import ROOT, Server, nxbucket_serve, run_nxbucket

from nxbucket.compile.programs.weights import weight_specs
from nxbucket.serve.binding import load_artifacts
from nxbucket.serve.loaders import CpuLoader
from nxbucket.serve.served import resolve
from nxbucket.toolkit.architecture import Architecture

LONG = "  kv_segment_size_buckets: [{segment}]\n  decode_context_length_buckets: {contexts}\n"


def with_long_context(text: str, segment: int, contexts: list[int]) -> str:
    section = "neuron_config:\n"
    assert section in text
    return text.replace(section, section + LONG.format(segment=segment, contexts=contexts))


# The compiled programs


def random_weights(architecture: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.3
        for spec in weight_specs(architecture)
    }


def decoded(server: EagerServer) -> list[Running]:
    """One sequence within a segment, one that grows out of the shorter context: 1 + 3 blocks."""
    seqs = [server.start([(7 * i + n) % 320 for i in range(n)]) for n in (25, 61)]
    for seq in seqs:
        server.prefill_all(seq, 16)
        for token in range(6):
            seq.tokens.append(token)
            server.decode([seq])
    return seqs


@pytest.mark.aot
def test_compiled_loops_equal_the_eager_program_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NXBUCKET_CACHE_DIR", raising=False)
    file = model_file(tmp_path, (16,), (1,))
    file.write_text(with_long_context(file.read_text(), 32, [64]))
    env = {k: v for k, v in os.environ.items() if k != "NXBUCKET_CACHE_DIR"}
    done = run_nxbucket("compile", str(file), "--json", env=env)
    assert done.returncode == 0, done.stderr
    assert [p["name"] for p in json.loads(done.stdout)["programs"]] == [
        "prefill_s16",
        "decode_b1_ctx64",
        "decode_b1",
    ]
    spec, served = resolve(file)
    artifacts = load_artifacts(served, CpuLoader())
    weights = random_weights(spec.architecture)
    shapes = Shapes((16,), (1,), 32, 4, 5, contexts=(64,), segment=32)
    compiled = EagerServer(
        spec.architecture, weights, shapes, load=lambda p: artifacts.executables[p.bucket]
    )
    eager = EagerServer(spec.architecture, weights, replace(shapes, contexts=(), segment=None))
    for ours, expected in zip(decoded(compiled), decoded(eager), strict=True):
        torch.testing.assert_close(
            torch.stack(ours.logits), torch.stack(expected.logits), rtol=0, atol=1e-4
        )
        assert torch.stack(ours.logits).std() > 0.1
    # 26 to 31 tokens, and 62 to 64 of 62 to 67, fit the shorter context.
    assert compiled.artifacts.executions["decode_b1_ctx64"] == 6 + 3
    assert compiled.artifacts.executions["decode_b1"] == 3


# The server


CASES = [(40, 30), (120, 40), (300, 20)]
"""Prompt and answer in tokens: within 128, from 128 into 256, beyond 256."""


def prompts() -> list[str]:
    texts = sorted((ROOT / "examples" / "tiny-llama" / "text").glob("*.txt"))
    known = "\n".join(path.read_text() for path in texts)
    return [known[500 * i : 500 * i + length] for i, (length, _) in enumerate(CASES)]


def texts_of(server: Server) -> list[str]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        return [
            client.completions.create(
                model="tiny-llama",
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            .choices[0]
            .text
            for prompt, (_, max_tokens) in zip(prompts(), CASES, strict=True)
        ]


def executions(server: Server) -> dict[str, int]:
    prefix = 'nxbucket_program_executions_total{program="'
    return {
        name[len(prefix) :].split('"')[0]: int(value)
        for name, value in server.metrics().items()
        if name.startswith(prefix)
    }


@pytest.mark.engine
def test_a_server_with_segments_and_contexts_gives_the_same_texts(
    example: Path, artifact_env: dict[str, str], tmp_path: Path
) -> None:
    text = with_long_context(example.read_text(), 64, [128, 256])
    # Fewer buckets, fewer compiles: 1 + 1 x 3 programs.
    text = text.replace("[32, 64, 128]", "[128]").replace("[1, 2, 4]", "[4]")
    model_yaml = tmp_path / "model.yaml"
    model_yaml.write_text(text.replace("./model", str(example.parent / "model")))
    done = run_nxbucket("compile", str(model_yaml), env=artifact_env)
    assert done.returncode == 0, done.stderr
    with nxbucket_serve(example, tmp_path / "plain.log", env=artifact_env) as server:
        expected = texts_of(server)
    with nxbucket_serve(model_yaml, tmp_path / "long.log", env=artifact_env) as server:
        texts = texts_of(server)
        ran = executions(server)
        bound = json.loads(server.get("/nxbucket/buckets")[1])["programs"]
    assert texts == expected
    assert all(len(set(answer)) > 5 for answer in texts)
    # A request's first token comes from its prefill; the step that makes token n + 1 reads the
    # prompt and n tokens. 121 to 128 of the second request's contexts fit the shortest program.
    assert ran["decode_b4_ctx128"] == 29 + 8
    assert ran["decode_b4_ctx256"] == 39 - 8
    assert ran["decode_b4"] == 19
    assert {(p["name"], p["context_len"]): p["executions"] for p in bound} == {
        ("prefill_s128", None): 1 + 1 + 3,
        ("decode_b4_ctx128", 128): 37,
        ("decode_b4_ctx256", 256): 31,
        ("decode_b4", None): 19,
    }
