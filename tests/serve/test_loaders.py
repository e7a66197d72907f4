"""What an artifact must be before it runs here, and what a call to it must look like."""

import dataclasses
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxbucket.compile.manifest import Blob, Manifest
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.serve import loaders
from nxbucket.serve.emulation import EmulatingLoader
from nxbucket.serve.executable import HostMemory
from nxbucket.serve.loaders import CpuExecutable, CpuLoader, loader_for
from nxbucket.serve.neuron_device import NeuronLoader
from nxbucket.toolkit.architecture import Architecture, Rope
from nxbucket.toolkit.errors import BindError

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    rope=Rope("default", 10000.0),
)
DECODE = BucketProgram("decode", 4, ARCHITECTURE, "float32", 4, 3, 9)


def manifest(**toolchain: str) -> Manifest:
    """An entry as the cpu compiler writes it here, for a host with AVX2, but for `toolchain`."""
    return Manifest(
        key_kind="input",
        program=DECODE.name,
        target="cpu-x86-64-v3",
        inputs={},
        graph_key="0" * 64,
        signature=DECODE.signature,
        blobs=(Blob("program", "0" * 64, 1),),
        toolchain={"torch": torch.__version__, "march": "x86-64-v3", **toolchain},
        lower_s=0.0,
        compile_s=0.0,
        peak_rss_bytes=0,
        log_sha256="0" * 64,
    )


@pytest.fixture
def avx2_host(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
    monkeypatch.setattr(loaders, "host_cpu_flags", lambda: flags)


def refusal(action: Callable[..., object], *args: Any) -> BindError:
    with pytest.raises(BindError) as caught:
        action(*args)
    assert caught.value.hint
    return caught.value


@pytest.mark.usefixtures("avx2_host")
def test_what_was_compiled_here_is_accepted() -> None:
    CpuLoader().check_host(manifest())


@pytest.mark.usefixtures("avx2_host")
@pytest.mark.parametrize("version", ["2.12.0+cpu", "2.13.0", ""])
def test_another_torch_is_refused_with_both_versions(version: str) -> None:
    error = refusal(CpuLoader().check_host, manifest(torch=version))
    assert "decode_b4" in error.message
    assert f"torch {version}" in error.message
    assert torch.__version__ in error.message


@pytest.mark.usefixtures("avx2_host")
def test_a_toolchain_that_names_no_torch_or_no_march_is_refused() -> None:
    for missing in ("torch", "march"):
        toolchain = {k: v for k, v in manifest().toolchain.items() if k != missing}
        refusal(CpuLoader().check_host, dataclasses.replace(manifest(), toolchain=toolchain))


@pytest.mark.usefixtures("avx2_host")
def test_a_march_this_processor_lacks_is_refused_with_what_it_lacks() -> None:
    error = refusal(CpuLoader().check_host, manifest(march="x86-64-v4"))
    assert "decode_b4" in error.message
    assert "x86-64-v4" in error.message
    assert "avx512bw" in error.message
    assert error.hint is not None
    assert "march" in error.hint


@pytest.mark.usefixtures("avx2_host")
def test_an_unknown_march_is_refused() -> None:
    assert "znver9" in refusal(CpuLoader().check_host, manifest(march="znver9")).message


def test_known_targets_have_a_loader_and_others_a_refusal() -> None:
    assert isinstance(loader_for("cpu-x86-64-v3"), CpuLoader)
    assert isinstance(loader_for("trn2-lnc2"), NeuronLoader)
    assert isinstance(loader_for("trn2-lnc2", emulate=True), EmulatingLoader)
    assert isinstance(loader_for("hlo", emulate=True), EmulatingLoader)
    for target in ("hlo", "trn2", "trn2-lnc3", "gpu", ""):
        error = refusal(loader_for, target)
        assert target in error.message


def test_a_file_that_is_no_package_is_refused_by_program_and_path(tmp_path: Path) -> None:
    garbage, empty_zip = tmp_path / "garbage", tmp_path / "empty"
    garbage.write_bytes(b"not a zip" * 100)
    with zipfile.ZipFile(empty_zip, "w") as archive:
        archive.writestr("program/data", "nothing")
    for path in (garbage, empty_zip, tmp_path / "not-there"):
        error = refusal(CpuLoader().load, {"program": path}, manifest())
        assert "decode_b4" in error.message
        assert str(path) in error.message
        assert error.hint is not None
        assert "nxbucket compile" in error.hint


# Executable


def kv_cache() -> dict[str, Tensor]:
    return {t.name: torch.zeros(t.shape) for t in DECODE.signature.of_role("kv_cache")}


def weights() -> dict[str, Tensor]:
    return {w.name: torch.zeros(w.shape) for w in weight_specs(ARCHITECTURE)}


def inputs() -> dict[str, Tensor]:
    shapes = {t.name: t.shape for t in DECODE.signature.of_role("input")}
    return {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}


class Recorder:
    """Stands for a program; keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        self.calls.append(tensors)
        return torch.zeros(4, 11)


def test_a_program_is_called_with_the_signatures_order() -> None:
    called, kv, loaded, given = Recorder(), kv_cache(), weights(), inputs()
    executable = CpuExecutable("decode_b4", DECODE.signature, called)
    executable.bind(HostMemory(dict(reversed(kv.items())), dict(reversed(loaded.items()))))
    executable.run(dict(reversed(given.items())))
    by_name = given | kv | loaded
    [call] = called.calls
    assert len(call) == len(DECODE.signature.inputs)
    for tensor, spec in zip(call, DECODE.signature.inputs, strict=True):
        assert tensor is by_name[spec.name]


@pytest.mark.parametrize("name", list(inputs()))
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.long(),
        lambda t: t.float(),
        lambda t: t[:-1],
        lambda t: t[None],
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack([t, t], -1)[..., 0],
    ],
)
def test_an_input_of_another_dtype_shape_or_layout_is_refused_by_name(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    called = Recorder()
    executable = CpuExecutable("decode_b4", DECODE.signature, called)
    executable.bind(HostMemory(kv_cache(), weights()))
    given = inputs()
    given[name] = change(given[name])
    with pytest.raises(RuntimeError, match=f"decode_b4: {name} is"):
        executable.run(given)
    assert not called.calls


@pytest.mark.parametrize("name", ["key.0", "value.0", "embed_tokens", "layers.0.qkv", "norm"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.bfloat16(),
        lambda t: t[..., :-1].contiguous(),
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: None,
    ],
)
def test_a_cache_or_weight_that_does_not_fit_is_refused_by_name(
    name: str, change: Callable[[Tensor], Tensor | None]
) -> None:
    kv, loaded = kv_cache(), weights()
    holder = kv if name in kv else loaded
    changed = change(holder.pop(name))
    if changed is not None:
        holder[name] = changed
    executable = CpuExecutable("decode_b4", DECODE.signature, Recorder())
    error = refusal(lambda: executable.bind(HostMemory(kv, loaded)))
    assert name in error.message


@pytest.mark.aot
def test_a_package_for_wider_vectors_than_this_processors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The manifest may be wrong: the package says itself which instructions it holds.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    exported = torch.export.export(torch.nn.ReLU(), (torch.zeros(4),))
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "relu.pt2")
    )
    blob = Path(shutil.copy(package, tmp_path / "blob"))
    CpuLoader().load({"program": blob}, manifest())
    monkeypatch.setattr(loaders, "host_cpu_flags", lambda: frozenset({"sse2"}))
    error = refusal(CpuLoader().load, {"program": blob}, manifest())
    assert "this processor lacks" in error.message
