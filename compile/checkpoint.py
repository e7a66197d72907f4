"""Whether a checkpoint is what its config.json says: files, names, shapes, dtypes. No torch.

`compile` asks before it compiles, `serve` before vLLM is imported, and loading the weights begins
with it. Only headers are read; `serve/weights.py` looks at the numbers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nxbucket.compile.programs.weights import WeightSpec, weight_specs
from nxbucket.compile.safetensors_header import StoredTensor, read_header
from nxbucket.toolkit.architecture import Architecture
from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt")
MAX_INDEX_BYTES = 16 << 20
HEAD = "lm_head.weight"
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies, which follow from config.json."""
FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Checkpoint:
    """`specs` are the weights programs take, `tensors` all that the files hold, by name."""

    specs: tuple[WeightSpec, ...]
    tensors: Mapping[str, StoredTensor]


def has_weights(model_dir: Path) -> bool:
    """False for a folder of configuration alone, as a compiling machine may have."""
    patterns = (INDEX_FILE, "*.safetensors", *PICKLES)
    return any(True for pattern in patterns for _ in model_dir.glob(pattern))


def check_checkpoint(model_dir: Path, architecture: Architecture) -> Checkpoint:
    """Raises ModelError, naming the tensor and the file, for one that is missing, of another shape
    or dtype, or there although nothing takes it; and for files that are not what they should be.
    """
    tensors = read_tensors(model_dir)
    specs = weight_specs(architecture)
    _check_names(model_dir, architecture, specs, set(tensors))
    for spec in specs:
        for i, source in enumerate(spec.sources):
            _check_tensor(tensors[source], spec.source_shape(i))
    return Checkpoint(tuple(specs), tensors)


def read_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """What the headers say: of the single file, or of the files the index names.

    Raises ModelError for an index that disagrees with the files, or leads out of the folder.
    """
    index = model_dir / INDEX_FILE
    if index.exists() or index.is_symlink():
        return _indexed_tensors(index)
    single = model_dir / SINGLE_FILE
    if single.exists() or single.is_symlink():
        _refuse_outside(single, [single])
        return read_header(single)
    shards = sorted(p.name for p in model_dir.glob("model-*.safetensors"))
    if shards:
        raise ModelError(
            f"{model_dir}: {_some(shards)} without {INDEX_FILE}, which says what belongs together",
            hint="fetch the index that belongs to these files",
        )
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


def _indexed_tensors(index: Path) -> dict[str, StoredTensor]:
    weight_map = _weight_map(index)
    paths = {name: index.parent / name for name in sorted(set(weight_map.values()))}
    odd = [name for name, path in paths.items() if path.name != name or "\0" in name]
    if odd:
        raise ModelError(
            f"{index}: names files that are not plain names in its folder: {_some(odd)}",
            hint="put every file of the checkpoint into one folder",
        )
    missing = [name for name, path in paths.items() if not _is_there(path)]
    if missing:
        raise ModelError(
            f"{index}: stale, or the download is incomplete: names files that are not there: "
            f"{_some(missing, 50)}",
            hint="fetch the missing files, or the index that belongs to these",
        )
    _refuse_outside(index, [index, *paths.values()])
    held = {name: read_header(path) for name, path in paths.items()}
    lost = sorted(tensor for tensor, name in weight_map.items() if tensor not in held[name])
    if lost:
        raise ModelError(
            f"{index}: stale: the files it names do not hold {_some(lost)}",
            hint="fetch the index that belongs to these files",
        )
    # What the index leaves out counts too: a tensor that nothing takes must not go unseen.
    tensors = {tensor: stored for name in paths for tensor, stored in held[name].items()}
    return tensors | {tensor: held[name][tensor] for tensor, name in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if not index.is_file():
            raise ValueError("not a file")
        with index.open("rb") as stream:
            content = stream.read(MAX_INDEX_BYTES + 1)
        if len(content) > MAX_INDEX_BYTES:
            raise ValueError(f"more than {MAX_INDEX_BYTES} bytes")
        raw = json.loads(content)
    except (OSError, ValueError, RecursionError) as err:
        reason = str(err)[:200]
        raise ModelError(
            f"{index}: not a safetensors index: {reason}", hint="fetch it again"
        ) from err
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
        raise ModelError(
            f"{index}: not a safetensors index: no weight_map from tensors to files",
            hint="fetch it again",
        )
    return weight_map


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a name too long for the file system


def _refuse_outside(origin: Path, paths: list[Path]) -> None:
    outside = [path.name for path in paths if _leads_outside(path)]
    if outside:
        raise ModelError(
            f"{origin}: links out of the folder: {_some(outside)}",
            hint="copy the files into the folder, or point model: at the folder they are in",
        )


def _leads_outside(path: Path) -> bool:
    """Whether `path` is a link to elsewhere. The hub's cache links snapshots to its own blobs."""
    folder = path.parent.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    try:
        return not any(path.resolve().is_relative_to(root) for root in allowed)
    except (OSError, RuntimeError):
        return True  # a link that leads to itself


def _check_names(
    model_dir: Path, architecture: Architecture, specs: list[WeightSpec], names: set[str]
) -> None:
    wanted = {source for spec in specs for source in spec.sources}
    missing = sorted(wanted - names)
    if missing:
        hint = "the checkpoint is incomplete, or config.json belongs to another one"
        if missing == [HEAD]:
            hint = "add the tensor, or set tie_word_embeddings: true in config.json if it is tied"
        raise ModelError(f"{model_dir}: missing tensors: {_some(missing)}", hint=hint)
    extra = {name for name in names - wanted if not name.endswith(DERIVED_SUFFIX)}
    if architecture.tie_word_embeddings:
        extra.discard(HEAD)
    if extra:
        raise ModelError(
            f"{model_dir}: tensors that a {architecture.family} of this config.json does not have: "
            f"{_some(sorted(extra))}",
            hint="set what uses them in config.json (attention_bias, mlp_bias), or remove them",
        )


def _check_tensor(tensor: StoredTensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise ModelError(
            f"{tensor.file}: {tensor.name} is {list(tensor.shape)}, and config.json says "
            f"{list(wanted)}",
            hint="config.json and the weights belong to different models",
        )
    if tensor.dtype not in FLOATS:
        raise ModelError(
            f"{tensor.file}: {tensor.name} is {tensor.dtype}",
            hint="quantized weights cannot be served yet; use a float32, bfloat16 or float16 "
            "checkpoint",
        )


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(show(name, 200) for name in names[:limit]) + more
