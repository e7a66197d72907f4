"""bfloat16: how far from a float32 truth our programs are, and stock vLLM on the same checkpoint.

Both see the same tokens; the error is that of the logprobs of the whole vocabulary.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from eager_server import EagerServer, Shapes
from hf_models import Reference, write_checkpoint
from servers import run_script
from torch import Tensor

from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.architecture import FAMILIES, read_architecture

pytestmark = pytest.mark.engine

NUM_SEQUENCES = 8
LENGTH = 96
PREFILLED = 32
"""The rest is decoded, one token at a time."""


def our_logprobs(folder: Path, sequences: list[list[int]]) -> Tensor:
    """After each of the tokens from PREFILLED on, the last excepted."""
    architecture = read_architecture(folder).architecture
    weights = load_weights(folder, architecture, "bfloat16")
    shapes = Shapes((16,), (8,), block_size=32, max_blocks=4, num_kv_blocks=33)
    server = EagerServer(architecture, weights, shapes, dtype="bfloat16")
    seqs = [server.start(s[:PREFILLED]) for s in sequences]
    for seq in seqs:
        server.prefill_all(seq, 16)
    for i in range(PREFILLED, LENGTH - 1):
        for seq, tokens in zip(seqs, sequences, strict=True):
            seq.tokens.append(tokens[i])
        server.decode(seqs)
    kept = LENGTH - PREFILLED
    return torch.stack([torch.stack(seq.logits[-kept:]) for seq in seqs]).log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_bfloat16_error_is_that_of_stock_vllm(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(
        tmp_path / "model",
        family=family,
        rope="llama3",
        checkpoint="bfloat16",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        head_dim=32,  # the smallest that stock vLLM's CPU attention takes
    )
    chosen = random.Random(1)
    sequences = [chosen.choices(range(96), k=LENGTH) for _ in range(NUM_SEQUENCES)]
    (tmp_path / "sequences.json").write_text(json.dumps(sequences))
    run_script(
        "stock_logprobs.py",
        str(tmp_path / "sequences.json"),
        str(folder),
        str(tmp_path / "out.json"),
        "bfloat16",
    )
    stock = torch.tensor(json.loads((tmp_path / "out.json").read_text()))[:, PREFILLED - 1 :]
    reference = Reference.load(folder)
    truth = torch.stack([reference.logits(s)[PREFILLED - 1 : -1] for s in sequences])
    truth = truth.log_softmax(-1)
    in_bfloat16 = Reference.load(folder, "bfloat16")
    theirs = torch.stack([in_bfloat16.logits(s)[PREFILLED - 1 : -1] for s in sequences])
    ours = our_logprobs(folder, sequences)
    assert ours.shape == stock.shape == truth.shape
    errors = {"ours": ours, "vLLM": stock, "Hugging Face": theirs.log_softmax(-1)}
    rms = {name: float((e - truth).pow(2).mean().sqrt()) for name, e in errors.items()}
    worst = {name: float((e - truth).abs().max()) for name, e in errors.items()}
    print(
        f"| {family} | "
        + " | ".join(f"{name}: rms {rms[name]:.2e}, max {worst[name]:.2e}" for name in errors)
        + f" | {rms['ours'] / rms['vLLM']:.2f} |"
    )
    assert rms["ours"] <= 1.2 * rms["vLLM"]
