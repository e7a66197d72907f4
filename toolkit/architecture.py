"""What config.json says about the graph: the fields that decide a bucket program, and no others.

`read_architecture` reads a model folder with nothing but the standard library, so that `validate`
and a warm `compile` stay free of torch and transformers. Defaults for fields a file leaves out are
those of transformers' config class of the family. Fields that do not touch the graph
(`pretraining_tp`, token ids, initialisation, ...) are not looked at.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from nxbucket.toolkit.buckets import describe, show
from nxbucket.toolkit.config_json import ConfigJson
from nxbucket.toolkit.errors import SpecError
from nxbucket.toolkit.rope import PositionLimit, Rope, read_rope

__all__ = ["FAMILIES", "Architecture", "ModelConfig", "Rope", "read_architecture", "stored_dtype"]

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type and the one class name in `architectures` that has our graph."""

NEVER_NULL: dict[str, tuple[str, ...]] = {
    "any": ("hidden_act", "max_position_embeddings", "tie_word_embeddings", "use_cache"),
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": ("attention_dropout", "num_key_value_heads"),
    "qwen2": ("attention_dropout", "max_window_layers", "use_sliding_window"),
    "qwen3": (
        "attention_bias",
        "attention_dropout",
        "head_dim",
        "max_window_layers",
        "use_sliding_window",
    ),
}
"""Fields whose classes in transformers have a type without None."""

OTHER_FAMILIES_KEYS = (
    "ada_rms_norm_t_cond", "attention_multiplier", "bias", "embedding_multiplier",
    "llama_4_scaling", "logit_scale", "logits_scaling", "residual_multiplier", "rotary_emb_base",
    "rotary_emb_fraction", "rotary_pct",
)  # fmt: skip
"""Fields that vLLM reads for any model, or near relatives of our families have."""

ALIASES = {"LLaMAForCausalLM": "LlamaForCausalLM"}
"""What the first converted Llamas call themselves."""

DEFAULT_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
MAX_LAYERS = 1024
"""Several times what has been published. Every layer costs planning time and memory."""
MAX_HEADER_BYTES = 16 << 20
"""Of a safetensors file. The library takes 100 MB; a header of ours lists a thousand tensors, and
JSON of 100 MB can take gigabytes to read."""

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True)
class Architecture:
    """A decoder's shape. All of it enters every artifact key; weights, names and paths do not.

    A layer in `windowed_layers` sees the last `sliding_window` tokens, itself included; the others
    see all. `sliding_window` is None where there is no such layer.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: Rope
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if layer in self.windowed_layers else None

    def within(self, max_model_len: int) -> "Architecture":
        """The same for texts of this length: a window that holds all of one is none."""
        if self.sliding_window is None or self.sliding_window < max_model_len:
            return self
        return replace(self, sliding_window=None, windowed_layers=())

    def as_json(self) -> dict[str, Any]:
        """Equal to what reading it back from a file gives: lists, no tuples."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Architecture":
        """Of what `as_json` gave. Raises ValueError for what it could not have given."""
        rope, layers = dict(raw["rope"]), raw["windowed_layers"]
        short = rope["short_factor"]
        if not isinstance(layers, list) or not isinstance(short, list | None):
            raise ValueError("architecture: a list is wanted")
        rope["short_factor"] = None if short is None else tuple(short)
        return cls(**{**raw, "windowed_layers": tuple(layers), "rope": Rope(**rope)})


@dataclass(frozen=True)
class ModelConfig:
    """A model folder's config.json: the architecture, and what limits the model file."""

    architecture: Architecture
    max_position_embeddings: int
    """The most tokens of one text; `positions_reason` says where the number is from."""
    dtype: str | None
    """As config.json names it, else as most weights are stored; None where neither says."""
    notes: tuple[str, ...] = ()
    positions_reason: str = ""


def read_architecture(model_dir: Path) -> ModelConfig:
    """Raises SpecError with everything wrong in config.json."""
    config = ConfigJson(model_dir / "config.json")
    family = _read_family(config)
    notes: list[str] = []
    architecture, limit = _read_fields(config, family, notes)
    named = config.dtype()
    if config.problems:
        raise SpecError(config.problems)
    assert architecture is not None
    stored = stored_dtype(model_dir)
    if config.get("tie_word_embeddings") is None:
        default = f"the default of {FAMILIES[family]} is false"
        notes.append(f"config.json does not say tie_word_embeddings; {default}")
    if named and stored and named != stored:
        notes.append(f"config.json says {named}, most weights are {stored}; {named} holds")
    return ModelConfig(architecture, limit.tokens, named or stored, tuple(notes), limit.reason)


def _read_family(config: ConfigJson) -> Family:
    """Another family gives the fields another meaning: this problem stands alone."""
    model_type, classes = config.get("model_type"), config.get("architectures", [])
    works = ", ".join(FAMILIES)
    known: tuple[Family, ...] = get_args(Family)
    for family in known:
        if family == model_type:
            break
    else:
        message = f"not yet: {show(model_type)}" if isinstance(model_type, str) else ""
        found = "missing" if model_type is None else describe(model_type)
        message = message or f"model_type is {found}"
        config.report("model_type", "model-unsupported", message, f"works today: {works}")
        raise SpecError(config.problems)
    named = [ALIASES.get(c, c) for c in classes if isinstance(c, str)] if _is_list(classes) else []
    if not _is_list(classes) or (classes and FAMILIES[family] not in named):
        shown = ", ".join(map(str, classes)) if _is_list(classes) else describe(classes)
        message = f"not yet: {show(shown)} as a {family}"
        hint = (
            f"works today: {', '.join(FAMILIES.values())}, each with its own model_type; if this "
            f"is a plain {family} under another name, name {FAMILIES[family]} in config.json"
        )
        config.report("architectures", "model-unsupported", message, hint)
        raise SpecError(config.problems)
    return family


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _read_fields(
    config: ConfigJson, family: Family, notes: list[str]
) -> tuple[Architecture | None, PositionLimit]:
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = _read_kv_heads(config, family, num_heads)
    # Qwen3's config class alone has a number of its own.
    head_dim = config.integer("head_dim", default=128 if family == "qwen3" else 0)
    num_layers = config.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        message = f"num_hidden_layers is {num_layers}; more than {MAX_LAYERS} is no model of ours"
        config.report("num_hidden_layers", "config-value", message, "take config.json as published")
        num_layers = 1
    fields = {
        "vocab_size": config.integer("vocab_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "rms_norm_eps": config.number("rms_norm_eps", default=1e-6),
        "tie_word_embeddings": config.boolean("tie_word_embeddings"),
        **_read_biases(config, family),
    }
    sizes_known = not config.problems
    # transformers' Llama class, through which vLLM reads config.json, insists even with a head_dim.
    if sizes_known and hidden_size % num_heads and (family == "llama" or not head_dim):
        message = f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
        hint = "take config.json as published" if family == "llama" else "give head_dim"
        config.report("num_attention_heads", "config-heads", message, hint)
        sizes_known = False
    head_dim = head_dim or hidden_size // num_heads
    window, windowed = _read_window(config, family, num_layers, notes)
    rope, limit = read_rope(config, DEFAULT_POSITIONS[family], head_dim if sizes_known else None)
    _refuse_other_graphs(config)
    _refuse_nulls(config, family)
    _refuse_types_of_others(config)
    if not config.problems:
        if num_heads % num_kv_heads:
            message = (
                f"num_attention_heads {num_heads} is no multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
            hint = "each key/value head serves the same number of query heads"
            config.report("num_key_value_heads", "config-heads", message, hint)
        if head_dim % 2:
            message = f"head_dim {head_dim} is odd; rotary embedding turns pairs"
            config.report("head_dim", "config-heads", message, "an even head_dim is needed")
    if config.problems or rope is None:
        return None, limit
    architecture = Architecture(
        family=family,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        qk_norm=family == "qwen3",
        sliding_window=window,
        windowed_layers=windowed,
        **fields,  # type: ignore[arg-type]  # each was read with the type its field has
    )
    return architecture, limit


def _read_kv_heads(config: ConfigJson, family: Family, num_heads: int) -> int:
    """null means as many as heads; left out, only a Llama means that."""
    if family != "llama" and not config.has("num_key_value_heads"):
        return config.integer("num_key_value_heads")
    return config.integer("num_key_value_heads", default=num_heads)


def _read_biases(config: ConfigJson, family: Family) -> dict[str, bool]:
    attention = config.boolean("attention_bias")
    mlp = config.boolean("mlp_bias") if family == "llama" else False
    if family == "qwen2":
        return {"qkv_bias": True, "o_bias": False, "mlp_bias": mlp}
    if family == "mistral" and attention:
        message = "attention_bias is true, and a Mistral has no biases"
        config.report("attention_bias", "config-unsupported", message, "delete it, or take a Llama")
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": mlp}


def _read_window(
    config: ConfigJson, family: Family, num_layers: int, notes: list[str]
) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that have it, as transformers' config class of the family reads it.

    A Llama never looks at sliding_window. A Mistral that leaves it out has 4096, with null none.
    Qwen's holds only with use_sliding_window, and from layer max_window_layers on.
    """
    kinds = config.get("layer_types")
    sliding: tuple[int, ...] = ()
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not _is_list(kinds) or len(kinds) != num_layers or any(k not in known for k in kinds):
            message = f"layer_types is {describe(kinds)}, one of {', '.join(known)} for each layer"
            config.report("layer_types", "config-type", message + " wanted", "see Qwen3's")
            return None, ()
        sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        if sliding and (family in ("llama", "mistral") or not config.boolean("use_sliding_window")):
            message = "layer_types has sliding_attention where nothing says that a window is used"
            hint = "works today: qwen2 and qwen3 with use_sliding_window: true"
            config.report("layer_types", "config-unsupported", message, hint)
    if family == "llama" or (family != "mistral" and not config.boolean("use_sliding_window")):
        return None, ()
    if config.has("sliding_window") and config.get("sliding_window") is None:
        return None, ()
    if not config.has("sliding_window"):
        default = f"the default of {FAMILIES[family]} is 4096"
        notes.append(f"config.json does not say sliding_window; {default}")
    window = config.integer("sliding_window", default=4096)
    first = 0 if family == "mistral" else config.integer("max_window_layers", 28, minimum=0)
    windowed = tuple(range(first, num_layers)) if kinds is None else sliding
    return (window, windowed) if windowed else (None, ())


def _refuse_nulls(config: ConfigJson, family: Family) -> None:
    """A null where transformers 5 wants a value: vLLM could not load what was compiled."""
    for key in (*NEVER_NULL["any"], *NEVER_NULL[family]):
        if config.has(key) and config.get(key) is None:
            hint = f"delete the line for the default of {FAMILIES[family]}, or give a value"
            config.report(key, "config-null", f"{key} is null, which transformers refuses", hint)


def _refuse_types_of_others(config: ConfigJson) -> None:
    """Types that a graph does not care for, and transformers 5 refuses when a server starts."""

    def is_id(value: object) -> bool:
        return type(value) is int

    def is_id_or_ids(value: object) -> bool:
        return is_id(value) or (isinstance(value, list) and all(map(is_id, value)))

    fields: dict[str, tuple[Callable[[object], bool], str]] = {
        "bos_token_id": (is_id, "an integer"),
        "pad_token_id": (is_id, "an integer"),
        "eos_token_id": (is_id_or_ids, "an integer or a list of integers"),
        "rms_norm_eps": (lambda value: type(value) is float, "a number with a decimal point"),
        "initializer_range": (lambda value: type(value) is float, "a number with a decimal point"),
        "use_cache": (lambda value: type(value) is bool, "true or false"),
    }
    noted = {problem.key for problem in config.problems}
    for key, (fits, wanted) in fields.items():
        value = config.get(key)
        if value is not None and key not in noted and not fits(value):
            message = f"{key} is {describe(value)}, which transformers refuses: {wanted} wanted"
            config.report(key, "config-type", message, "take config.json as published")
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    dtype = config.get(key)
    if isinstance(dtype, str) and dtype.startswith("torch."):
        message = f"{key} is {dtype!r}, which transformers refuses"
        config.report(key, "config-type", message, f"write {dtype.removeprefix('torch.')!r}")


def _refuse_other_graphs(config: ConfigJson) -> None:
    """Fields that turn one of our families into something that computes otherwise."""
    unsupported = {
        "quantization_config": (
            "the checkpoint is quantized (quantization_config)",
            "not yet; use the float32, bfloat16 or float16 checkpoint of this model",
        ),
        "dual_chunk_attention_config": (
            "attention in two chunks (dual_chunk_attention_config) is not supported",
            "below its chunk_size it changes nothing: delete it from config.json to serve that",
        ),
        **{
            key: (
                f"{key} changes what the model computes, and of our families' classes none "
                "in transformers reads it",
                "take config.json as published, or delete the line if the weights do without it",
            )
            for key in OTHER_FAMILIES_KEYS
        },
        "qk_norm": ("qk_norm is set; of our families Qwen3 alone has such norms", "not yet"),
    }
    for key, (message, hint) in unsupported.items():
        if config.get(key) not in (None, False):
            config.report(key, "config-unsupported", message, hint)
    if config.get("is_causal") not in (None, True):
        message = "is_causal is not true: a model that makes embeddings, not text"
        config.report("is_causal", "config-unsupported", message, "take one that writes text")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        message = f"hidden_act is {describe(config.get('hidden_act'))}"
        config.report("hidden_act", "config-unsupported", message, "only silu works today")


def stored_dtype(model_dir: Path) -> str | None:
    """The dtype most tensors of the first safetensors file have, from its header alone.

    None when there is no such file or it cannot be read: loading the weights reports that better.
    """
    try:
        first = min(model_dir.glob("*.safetensors"), default=None)
        if first is None or not first.is_file():
            return None
        with first.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_HEADER_BYTES:
                return None
            header = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    dtypes = Counter(
        str(tensor["dtype"])
        for name, tensor in header.items()
        if name != "__metadata__" and isinstance(tensor, dict) and "dtype" in tensor
    )
    if not dtypes:
        return None
    [(most_common, _)] = dtypes.most_common(1)
    return _SAFETENSORS_DTYPES.get(most_common, most_common.lower())
