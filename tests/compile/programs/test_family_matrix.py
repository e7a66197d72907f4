"""Family x RoPE form x head form x dtype, eagerly, against Hugging Face. `-rP` prints the table.

float32: the largest difference of any logit, at every chunk and every decode step. 16 bits: the
root mean square error against a float32 truth, and Hugging Face's own in that dtype.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import EagerServer, Running
from hf_models import ALL_ROPES, Reference, write_checkpoint
from torch import Tensor

from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.architecture import FAMILIES, read_architecture
from nxbucket.toolkit.errors import SpecError
from nxbucket.toolkit.spec import load_spec

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
HEADS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},  # B96
    # B93, and one key/value head. head_dim is 8: the tables of longrope are made for it.
    "MQA, heads wider than hidden": {"num_attention_heads": 8, "num_key_value_heads": 1}
    | {"head_dim": 8},
}
FORMS = [name for name in ALL_ROPES if "old spelling" not in name]


def run(folder: Path, dtype: str) -> list[Running]:
    """Below and beyond the 32 positions that llama3 and yarn started from."""
    architecture = read_architecture(folder).architecture
    server = EagerServer(architecture, load_weights(folder, architecture, dtype), dtype=dtype)
    return [
        server.generate([5, 17, 80, 2, 9, 33, 61, 7, 40], num_new=4, budget=16),
        server.generate([(7 * i * i + 3 * i) % 96 for i in range(48)], num_new=12, budget=16),
    ]


def errors(seqs: list[Running], reference: Reference) -> Tensor:
    return torch.cat(
        [torch.stack(s.logits) - reference.logits(s.tokens)[torch.tensor(s.ends) - 1] for s in seqs]
    )


@pytest.mark.parametrize("rope", ALL_ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rope_and_head_form_equals_hugging_face(
    tmp_path: Path, family: str, rope: str
) -> None:
    for head, config in HEADS.items():
        folder = write_checkpoint(tmp_path / head, family=family, rope=rope, **config)
        seqs = run(folder, "float32")
        difference = float(errors(seqs, Reference.load(folder)).abs().max())
        print(f"| {family} | {rope} | {head} | float32 | {difference:.1e} |")
        assert difference <= TOLERANCE, head
        # Or equality would show little.
        assert torch.stack(seqs[1].logits).std() > 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bits_are_as_near_the_truth_as_hugging_face_in_16_bits(
    tmp_path: Path, family: str, dtype: str
) -> None:
    ours, theirs = [], []
    for rope in FORMS:
        for head, config in HEADS.items():
            folder = tmp_path / f"{rope} {head}"
            write_checkpoint(folder, family=family, rope=rope, checkpoint=dtype, **config)
            seqs, truth = run(folder, dtype), Reference.load(folder)
            own = errors(seqs, truth)
            same_dtype = Reference.load(folder, dtype)
            other = torch.cat(
                [
                    (same_dtype.logits(s.tokens) - truth.logits(s.tokens))[torch.tensor(s.ends) - 1]
                    for s in seqs
                ]
            )
            rms, their_rms = (float(e.pow(2).mean().sqrt()) for e in (own, other))
            print(f"| {family} | {rope} | {head} | {dtype} | {rms:.1e} (HF {their_rms:.1e}) |")
            ours.append(own)
            theirs.append(other)
    ratio = float((torch.cat(ours).pow(2).mean() / torch.cat(theirs).pow(2).mean()).sqrt())
    print(f"| {family} | all | all | {dtype} | {ratio:.2f} times Hugging Face's error |")
    assert ratio <= 1.2


LONGROPE = {
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 128,
}
REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "dynamic beyond max_position_embeddings": (257, {"type": "dynamic", "factor": 2.0}),
    "longrope beyond its original positions": (129, {"type": "longrope", **LONGROPE}),
    "su": (128, {"type": "su", **LONGROPE}),
    "mrope": (128, {"type": "mrope", "mrope_section": [2, 1, 1]}),
    "ntk": (128, {"rope_type": "ntk", "factor": 2.0}),
    "proportional": (128, {"rope_type": "proportional", "factor": 2.0}),
    "dynamic with alpha": (128, {"rope_type": "dynamic", "alpha": 1000.0}),
    "a RoPE for each kind of layer": (128, {"full_attention": {"rope_type": "default"}}),
    "half the head rotated": (128, {"rope_type": "default", "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_static_program_cannot_do_is_refused_in_a_sentence(
    tmp_path: Path, family: str, refused: str
) -> None:
    length, scaling = REFUSED[refused]
    write_checkpoint(tmp_path / "model", family=family)
    config = tmp_path / "model" / "config.json"
    text = config.read_text().rstrip().removesuffix("}")
    config.write_text(f'{text}, "rope_scaling": {scaling!r} }}'.replace("'", '"'))
    file = tmp_path / "model.yaml"
    file.write_text(f"model: model\nmax_model_len: {length}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    [problem] = caught.value.problems
    print(f"| {family} | {refused} | any | any | {problem.message}; {problem.hint} |")
    assert len(problem.message) > 20
    assert problem.hint
