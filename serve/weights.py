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
PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt")
HEAD = "lm_head.weight"
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
        weights = {s.name: _weight(s, files, opened, getattr(torch, dtype)) for s in specs}
        if architecture.tie_word_embeddings and HEAD in files:
            head: Tensor = opened[files[HEAD]].get_tensor(HEAD)
            if not torch.equal(head.to(getattr(torch, dtype)), weights["embed_tokens"]):
                logger.warning(
                    "%s: %s is ignored, and differs from the embedding that "
                    "tie_word_embeddings makes the head",
                    files[HEAD],
                    HEAD,
                )
        return weights
    finally:
        for handle in opened.values():
            handle.__exit__(None, None, None)


def checkpoint_files(model_dir: Path) -> dict[str, Path]:
    """Which file holds each tensor, from the headers of the files: the single one, or the index's.

    Raises ModelError for an index that disagrees with the files, or leads out of the folder.
    """
    index = model_dir / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    single = model_dir / SINGLE_FILE
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single)
    pickles = sorted(p.name for pattern in PICKLES for p in model_dir.glob(pattern))
    if pickles:
        raise ModelError(
            f"{model_dir}: the weights are pickle files ({_some(pickles)}), which are never read; "
            "safetensors wanted",
            hint="take the checkpoint's safetensors, or write them with transformers: "
            "from_pretrained(...).save_pretrained(...)",
        )
    raise ModelError(
        f"{model_dir}: no {SINGLE_FILE} and no {INDEX_FILE}",
        hint="point model: at a folder with safetensors weights",
    )


def _indexed_files(index: Path) -> dict[str, Path]:
    weight_map = _weight_map(index)
    paths = {name: index.parent / name for name in sorted(set(weight_map.values()))}
    odd = [name for name, path in paths.items() if path.name != name]
    if odd:
        raise ModelError(
            f"{index}: names files that are not plain names in its folder: {_some(odd)}",
            hint="put every file of the checkpoint into one folder",
        )
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        raise ModelError(
            f"{index}: stale, or the download is incomplete: names files that are not there: "
            f"{', '.join(missing)}",
            hint="fetch the missing files, or the index that belongs to these",
        )
    outside = [path.name for path in (index, *paths.values()) if _leads_outside(path)]
    if outside:
        raise ModelError(
            f"{index}: links out of the folder: {_some(outside)}",
            hint="copy the files into the folder, or point model: at the folder they are in",
        )
    held = {name: _tensor_names(path) for name, path in paths.items()}
    lost = sorted(tensor for tensor, name in weight_map.items() if tensor not in held[name])
    if lost:
        raise ModelError(
            f"{index}: stale: the files it names do not hold {_some(lost)}",
            hint="fetch the index that belongs to these files",
        )
    # What the index leaves out counts too: a tensor that nothing takes must not go unseen.
    files = {tensor: paths[name] for name in paths for tensor in held[name]}
    return files | {tensor: paths[name] for tensor, name in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as err:
        raise ModelError(f"{index}: not a safetensors index: {err}", hint="fetch it again") from err
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
        raise ModelError(
            f"{index}: not a safetensors index: no weight_map from tensors to files",
            hint="fetch it again",
        )
    return weight_map


def _leads_outside(path: Path) -> bool:
    """Whether `path` is a link to elsewhere. The hub's cache links snapshots to its own blobs."""
    folder = path.parent.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    return not any(path.resolve().is_relative_to(root) for root in allowed)


def _tensor_names(path: Path) -> set[str]:
    with _open(path) as handle:
        return set(handle.keys())


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
        if missing == [HEAD]:
            hint = "add the tensor, or set tie_word_embeddings: true in config.json if it is tied"
        raise ModelError(f"{model_dir}: missing tensors: {_some(missing)}", hint=hint)
    extra = {name for name in set(files) - wanted if not name.endswith(DERIVED_SUFFIX)}
    if architecture.tie_word_embeddings:
        extra.discard(HEAD)
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
