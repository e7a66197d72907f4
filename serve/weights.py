"""A checkpoint's safetensors as the weights a program takes: once, shared by every program."""

import logging
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from nxbucket.compile.checkpoint import HEAD, check_checkpoint
from nxbucket.compile.programs.weights import WeightSpec
from nxbucket.compile.safetensors_header import StoredTensor
from nxbucket.toolkit.architecture import Architecture
from nxbucket.toolkit.errors import ModelError

logger = logging.getLogger(__name__)


def load_weights(model_dir: Path, architecture: Architecture, dtype: str) -> dict[str, Tensor]:
    """Every weight of `weight_specs(architecture)`, contiguous, in `dtype`, in that order.

    Raises ModelError, naming the tensor and the file, for what `check_checkpoint` refuses and for a
    number that is none (NaN, infinity) or becomes infinite in `dtype`.
    """
    checkpoint = check_checkpoint(model_dir, architecture)
    files = _Files()
    try:
        weights = {
            spec.name: _weight(spec, [checkpoint.tensors[s] for s in spec.sources], files, dtype)
            for spec in checkpoint.specs
        }
        if architecture.tie_word_embeddings and HEAD in checkpoint.tensors:
            stored = checkpoint.tensors[HEAD]
            head = files.read(stored).to(getattr(torch, dtype))
            if not torch.equal(head, weights["embed_tokens"]):
                logger.warning(
                    "%s: %s is ignored, and differs from the embedding that "
                    "tie_word_embeddings makes the head",
                    stored.file,
                    HEAD,
                )
        return weights
    finally:
        files.close()


class _Files:
    """The files tensors are read from, each opened when it is first needed."""

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}

    def read(self, stored: StoredTensor) -> Tensor:
        try:
            if stored.file not in self._opened:
                self._opened[stored.file] = safetensors.safe_open(stored.file, framework="pt")
            tensor: Tensor = self._opened[stored.file].get_tensor(stored.name)
        except (OSError, safetensors.SafetensorError) as err:
            message = f"{stored.file}: not a safetensors file: {err}"
            raise ModelError(message, hint="fetch it again") from err
        return tensor

    def close(self) -> None:
        for handle in self._opened.values():
            handle.__exit__(None, None, None)


def _weight(spec: WeightSpec, sources: list[StoredTensor], files: _Files, dtype: str) -> Tensor:
    wanted = getattr(torch, dtype)
    parts = []
    for stored in sources:
        part = files.read(stored)
        _check_finite(part, stored, wanted, dtype)
        parts.append(part.to(wanted))
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def _check_finite(part: Tensor, stored: StoredTensor, wanted: torch.dtype, dtype: str) -> None:
    """Smallest and largest tell all, without a mask in memory: NaN is either; casts keep order."""
    extremes = torch.stack(torch.aminmax(part))
    if not bool(extremes.isfinite().all()):
        raise ModelError(
            f"{stored.file}: {stored.name} holds NaN or infinity",
            hint="the checkpoint is damaged, or its training diverged; fetch it again",
        )
    if not bool(extremes.to(wanted).isfinite().all()):
        raise ModelError(
            f"{stored.file}: {stored.name} reaches {float(extremes.abs().max()):.4g}, which is "
            f"infinite in {dtype}",
            hint="set dtype: bfloat16 or float32 in the model file and compile again",
        )
