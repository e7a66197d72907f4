"""A small model of each family compiled for real, beside its eager programs and Hugging Face."""

from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import EagerServer, Running, Shapes, eager
from hf_models import Reference, write_checkpoint

from nxbucket.compile.cpu import CpuCompiler
from nxbucket.compile.manifest import Blob, Manifest
from nxbucket.compile.program import BucketProgram
from nxbucket.serve.loaders import CpuExecutable, CpuLoader
from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.architecture import read_architecture

pytestmark = pytest.mark.aot

SHAPES = Shapes(prefill=(8,), decode=(2,), block_size=4, max_blocks=8, num_kv_blocks=17)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope": "llama3", "attention_bias": True},
    "qwen2": {"family": "qwen2", "rope": "linear", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "rope": "yarn"},
    "mistral": {"family": "mistral", "rope": "longrope", "sliding_window": 8},
}


@pytest.mark.parametrize("model", MODELS)
def test_compiled_programs_equal_eager_ones_and_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    # The compiler points this at its work folder; pytest puts it back.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=1, **MODELS[model])
    arch = read_architecture(folder).architecture
    weights = load_weights(folder, arch, "float32")
    compiled = {
        program.name: compiled_program(program, tmp_path / program.name)
        for program in SHAPES.programs(arch, "float32")
    }

    def load(program: BucketProgram) -> CpuExecutable:
        return compiled[program.name]

    for filler in (0.0, float("nan")):
        ours = EagerServer(arch, weights, SHAPES, load=load, filler=filler)
        theirs = EagerServer(arch, weights, SHAPES, load=eager, filler=filler)
        addresses = {name: kv.data_ptr() for name, kv in ours.kv_cache.items()}
        ours.artifacts.smoke(arch.vocab_size)
        ours_seqs, their_seqs = run_two_sequences(ours), run_two_sequences(theirs)

        from_hugging_face = from_eager = 0.0
        reference = Reference.load(folder)
        for a, b in zip(ours_seqs, their_seqs, strict=True):
            assert a.tokens == b.tokens
            logits = torch.stack(a.logits)
            expected = reference.logits(a.tokens)[torch.tensor(a.ends) - 1]
            from_eager = max(from_eager, float((logits - torch.stack(b.logits)).abs().max()))
            from_hugging_face = max(from_hugging_face, float((logits - expected).abs().max()))
        print(f"max difference: eager {from_eager:.1e}, Hugging Face {from_hugging_face:.1e}")
        assert from_eager < 1e-5
        assert from_hugging_face < 1e-4
        # In place: where it was, and what the eager programs wrote.
        assert {name: kv.data_ptr() for name, kv in ours.kv_cache.items()} == addresses
        for name, kv in ours.written_kv().items():
            torch.testing.assert_close(kv, theirs.written_kv()[name], rtol=0, atol=1e-5)


def compiled_program(program: BucketProgram, work_dir: Path) -> CpuExecutable:
    work_dir.mkdir()
    compiler = CpuCompiler()
    toolchain = compiler.toolchain()
    files = compiler.compile(compiler.lower(program), work_dir)
    manifest = Manifest(
        key_kind="input",
        program=program.name,
        target=toolchain.target,
        inputs={},
        graph_key="0" * 64,
        signature=program.signature,
        blobs=(Blob("program", "0" * 64, 1),),
        toolchain=dict(toolchain.versions),
        lower_s=0.0,
        compile_s=0.0,
        peak_rss_bytes=0,
        log_sha256="0" * 64,
    )
    loader = CpuLoader()
    loader.check_host(manifest)
    return loader.load(files, manifest)


def run_two_sequences(server: EagerServer) -> list[Running]:
    """Prompts of several chunks, one past llama3's first positions; a full batch, a padded one."""
    first, second = server.start(list(range(1, 22))), server.start([5, 3, 90])
    server.prefill_all(first, 8)
    server.prefill_all(second, 2)
    server.decode_greedily([first, second], 6)
    server.decode_greedily([first], 5)
    return [first, second]
