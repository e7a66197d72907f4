"""A checkpoint's safetensors as the weights a program takes: once, shared by every program."""

import json
import logging
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from nxbucket.compile.programs.weights import WeightSpec, weight_specs
from nxbucket.toolkit.architecture import Architecture
from nxbucket.toolkit.errors import ModelError

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies, which follow from config.json."""


def load_weights(model_dir: Path, architecture: Architecture, dtype: str) -> dict[str, Tensor]:
    """Every weight of `weight_specs(architecture)`, contiguous, in `dtype`, in that order.

    Raises ModelError, naming the tensor and the file, for a tensor that is missing, has another
    shape, or is there although nothing takes it.
    """
    files = checkpoint_files(model_dir)
    specs = weight_specs(architecture)
    _check_names(model_dir, architecture, specs, files)
    opened: dict[Path, Any] = {}
    try:
        for path in sorted(set(files.values())):
            opened[path] = _open(path)
        return {s.name: _weight(s, files, opened, getattr(torch, dtype)) for s in specs}
    finally:
        for handle in opened.values():
            handle.__exit__(None, None, None)


def checkpoint_files(model_dir: Path) -> dict[str, Path]:
    """Which file holds each tensor, from the index or the single file's header."""
    index = model_dir / INDEX_FILE
    if not index.is_file():
        single = model_dir / SINGLE_FILE
        if not single.is_file():
            raise ModelError(
                f"{model_dir}: no {SINGLE_FILE} and no {INDEX_FILE}",
                hint="point model: at a folder with safetensors weights",
            )
        with _open(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        files = {str(tensor): model_dir / str(name) for tensor, name in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ModelError(f"{index}: not a safetensors index: {err}", hint="fetch it again") from err
    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise ModelError(
            f"{index}: names files that are not there: {', '.join(missing)}",
            hint="fetch the missing files, or the index that belongs to these",
        )
    return files


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as err:
        raise ModelError(f"{path}: not a safetensors file: {err}", hint="fetch it again") from err


def _check_names(
    model_dir: Path, architecture: Architecture, specs: list[WeightSpec], files: dict[str, Path]
) -> None:
    wanted = {source for spec in specs for source in spec.sources}
    missing = sorted(wanted - set(files))
    if missing:
        hint = "the checkpoint is incomplete, or config.json belongs to another one"
        if missing == ["lm_head.weight"]:
            hint = "add the tensor, or set tie_word_embeddings: true in config.json if it is tied"
        raise ModelError(f"{model_dir}: missing tensors: {_some(missing)}", hint=hint)
    extra = {name for name in set(files) - wanted if not name.endswith(DERIVED_SUFFIX)}
    if architecture.tie_word_embeddings and "lm_head.weight" in extra:
        extra.discard("lm_head.weight")
        logger.warning(
            "%s: lm_head.weight is ignored: tie_word_embeddings makes the embedding the head",
            files["lm_head.weight"],
        )
    if extra:
        raise ModelError(
            f"{model_dir}: tensors that a {architecture.family} of this config.json does not have: "
            f"{_some(sorted(extra))}",
            hint="set what uses them in config.json (attention_bias, mlp_bias), or remove them",
        )


def _weight(
    spec: WeightSpec, files: dict[str, Path], opened: dict[Path, Any], dtype: torch.dtype
) -> Tensor:
    parts = []
    for i, source in enumerate(spec.sources):
        part: Tensor = opened[files[source]].get_tensor(source)
        if tuple(part.shape) != spec.source_shape(i):
            raise ModelError(
                f"{files[source]}: {source} is {list(part.shape)}, and config.json says "
                f"{list(spec.source_shape(i))}",
                hint="config.json and the weights belong to different models",
            )
        if not part.dtype.is_floating_point or part.dtype.itemsize == 1:
            raise ModelError(
                f"{files[source]}: {source} is {str(part.dtype).removeprefix('torch.')}",
                hint="quantized weights cannot be served yet; use a float32, bfloat16 or float16 "
                "checkpoint",
            )
        parts.append(part.to(dtype))
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
