"""Layers with a window against Hugging Face: prefill, chunked prefill, cached prefix, decode."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import EagerServer, Running
from hf_models import Reference, write_checkpoint

from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.architecture import read_architecture

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "sliding_window": 8},
    "qwen2, second layer": {  # B101
        "family": "qwen2",
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3, first layer": {
        "family": "qwen3",
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral, window of one": {"family": "mistral", "sliding_window": 1},
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(96), k=length)


class Both:
    def __init__(self, folder: Path, **config: Any) -> None:
        write_checkpoint(folder, rope="yarn", **config)
        self.architecture = read_architecture(folder).architecture
        self.weights = load_weights(folder, self.architecture, "float32")
        self.reference = Reference.load(folder)

    def server(self) -> EagerServer:
        return EagerServer(self.architecture, self.weights)

    def difference(self, seqs: list[Running]) -> float:
        """From Hugging Face, over every step of every sequence."""
        worst = 0.0
        for seq in seqs:
            expected = self.reference.logits(seq.tokens)[torch.tensor(seq.ends) - 1]
            worst = max(worst, float((torch.stack(seq.logits) - expected).abs().max()))
        print(f"max difference: {worst:.1e}")
        return worst


@pytest.fixture(params=WINDOWS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return Both(tmp_path, **WINDOWS[request.param])


def test_every_position_of_a_prompt_of_40_equals_hugging_face(both: Both) -> None:
    # B103: a prefill of each length up to past the window, then chunks, then decodes.
    assert both.architecture.windowed_layers
    prompt = prompt_of(40)
    server = both.server()
    seqs = []
    for length in range(1, 17):
        seq = server.start(prompt[:length])
        server.prefill(seq, length)
        seqs.append(seq)
    for budget in (16, 5, 1):
        seqs.append(both.server().generate(prompt, num_new=12, budget=budget))
    assert both.difference(seqs) < 1e-4


def test_a_cached_prefix_and_a_batch_of_lengths_equal_hugging_face(both: Both) -> None:
    server = both.server()
    first = server.generate(prompt_of(30), num_new=3, budget=16)
    second = server.start_after_prefix(first.tokens[:21] + prompt_of(9, seed=5), first)
    assert second.computed == 20
    server.prefill_all(second, 16)
    third = server.start(prompt_of(3, seed=6))
    server.prefill_all(third, 16)
    server.decode_greedily([first, second, third], 10)
    assert both.difference([first, second, third]) < 1e-4


def test_leaving_the_window_out_or_one_off_would_show(tmp_path: Path) -> None:
    both = Both(tmp_path, family="mistral", sliding_window=8)
    both.architecture = read_architecture(tmp_path).architecture.within(8)
    assert both.architecture.sliding_window is None
    seq = both.server().generate(prompt_of(40), num_new=4, budget=16)
    assert both.difference([seq]) > 1e-2
    for window in (7, 9):
        other = write_checkpoint(
            tmp_path / str(window), family="mistral", rope="yarn", sliding_window=window
        )
        both.architecture = read_architecture(other).architecture
        seq = both.server().generate(prompt_of(40), num_new=4, budget=16)
        assert both.difference([seq]) > 1e-2
