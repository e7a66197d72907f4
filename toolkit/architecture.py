"""What config.json says about the graph: the fields that decide a bucket program, and no others.

`read_architecture` reads a model folder with nothing but the standard library, so that `validate`
and a warm `compile` stay free of torch and transformers. Defaults for fields a file leaves out are
those of transformers' LlamaConfig. Fields that do not touch the graph of a Llama (`sliding_window`,
`pretraining_tp`, token ids, initialisation, ...) are not looked at.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from nxbucket.toolkit.buckets import describe, show
from nxbucket.toolkit.errors import Problem, SpecError

FAMILIES = {"llama": "LlamaForCausalLM"}
"""model_type and the one class name in `architectures` that has our graph."""

MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `theta` is the base; the rest belongs to the llama3 form."""

    form: Literal["default", "llama3"]
    theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder's shape. All of it enters every artifact key; weights, names and paths do not."""

    family: Literal["llama"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: Rope


@dataclass(frozen=True)
class ModelConfig:
    """A model folder's config.json: the architecture, and what limits the model file."""

    architecture: Architecture
    max_position_embeddings: int
    dtype: str | None
    """As config.json names it, else as most weights are stored; None where neither says."""
    notes: tuple[str, ...] = ()


def read_architecture(model_dir: Path) -> ModelConfig:
    """Raises SpecError with everything wrong in config.json."""
    config = _Config(model_dir / "config.json")
    config.check_family()
    architecture, max_positions = _read_fields(config)
    named = config.dtype()
    if config.problems:
        raise SpecError(config.problems)
    assert architecture is not None
    stored = stored_dtype(model_dir)
    notes = []
    if config.get("tie_word_embeddings") is None:
        notes.append("config.json does not say tie_word_embeddings; Llama's default is false")
    if named and stored and named != stored:
        notes.append(f"config.json says {named}, most weights are {stored}; {named} holds")
    return ModelConfig(architecture, max_positions, named or stored, tuple(notes))


def _read_fields(config: "_Config") -> tuple[Architecture | None, int]:
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    head_dim = config.integer("head_dim", default=0, minimum=1)
    max_positions = config.integer("max_position_embeddings", default=2048)
    fields = {
        "vocab_size": config.integer("vocab_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "num_hidden_layers": config.integer("num_hidden_layers"),
        "rms_norm_eps": config.number("rms_norm_eps", default=1e-6),
        "tie_word_embeddings": config.boolean("tie_word_embeddings"),
        "attention_bias": config.boolean("attention_bias"),
        "mlp_bias": config.boolean("mlp_bias"),
    }
    rope = _read_rope(config)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        act = describe(config.get("hidden_act"))
        config.report(
            "hidden_act", "config-unsupported", f"hidden_act is {act}", "only silu works today"
        )
    if config.get("quantization_config") is not None:
        config.report(
            "quantization_config",
            "config-unsupported",
            "the checkpoint is quantized (quantization_config)",
            "not yet; use the float32, bfloat16 or float16 checkpoint of this model",
        )
    if not config.problems and config.get("head_dim") is None:
        if hidden_size % num_heads:
            message = f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
            config.report("num_attention_heads", "config-heads", message, "give head_dim")
        head_dim = hidden_size // num_heads
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
        return None, max_positions
    architecture = Architecture(
        family="llama",
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        **fields,  # type: ignore[arg-type]  # each was read with the type its field has
    )
    return architecture, max_positions


def _read_rope(config: "_Config") -> Rope | None:
    # transformers 5: the old name wins when both are there.
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(name) or {}
    if not isinstance(scaling, dict):
        config.report(
            name, "config-type", f"{name} is {describe(scaling)}, object wanted", "see Llama's"
        )
        return None
    rope = _Config(config.file, scaling, f"{name}.", config.problems)
    in_rope = rope.get("rope_theta") is not None
    theta = (rope if in_rope else config).number("rope_theta", default=10000.0)
    form = rope.get("rope_type") or rope.get("type") or "default"
    if form not in ("default", "llama3"):
        key = "rope_type" if rope.get("rope_type") else "type"
        message = f"RoPE form {describe(form)} is not supported"
        rope.report(key, "rope-unsupported", message, "works today: default, llama3")
        return None
    if rope.number("partial_rotary_factor", default=1.0) != 1.0:
        message = "partial_rotary_factor other than 1.0 is not supported"
        rope.report("partial_rotary_factor", "rope-unsupported", message, "works today: 1.0")
    if form == "default":
        return Rope("default", theta)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor")
    if not config.problems and low >= high:
        message = f"low_freq_factor {low} must be below high_freq_factor {high}"
        rope.report("low_freq_factor", "config-value", message, "Llama 3.1 has 1.0 and 4.0")
    return Rope("llama3", theta, factor, low, high, original)


class _Config:
    """A JSON object with typed access. What is wrong is noted, and a stand-in returned."""

    def __init__(
        self,
        file: Path,
        fields: dict[str, Any] | None = None,
        prefix: str = "",
        problems: list[Problem] | None = None,
    ) -> None:
        self.file = file
        self.problems: list[Problem] = [] if problems is None else problems
        self._prefix = prefix
        self._fields = self._load() if fields is None else fields

    def _load(self) -> dict[str, Any]:
        hint = "take the folder of a Hugging Face checkpoint, with config.json as published"
        try:
            with self.file.open("rb") as stream:
                content = stream.read(MAX_CONFIG_BYTES + 1)
        except FileNotFoundError:
            self._fail("config-missing", "the model folder has no config.json", hint)
        except (OSError, ValueError) as err:
            self._fail("config-unreadable", f"cannot be read: {err}", "check its owner and mode")
        if len(content) > MAX_CONFIG_BYTES:
            self._fail("config-too-large", "config.json is larger than 1 MiB", hint)
        try:
            loaded = json.loads(content)
        except json.JSONDecodeError as err:
            problem = Problem(
                "config-not-json", f"not JSON: {err.msg}", hint, self.file, err.lineno, err.colno
            )
            raise SpecError([problem]) from None
        except (ValueError, RecursionError):
            # Not UTF-8, an integer of thousands of digits, or nested deeper than Python's stack.
            self._fail("config-not-json", "not JSON that can be read", hint)
        if not isinstance(loaded, dict):
            self._fail("config-not-json", "config.json is not a JSON object", hint)
        return loaded

    def _fail(self, code: str, message: str, hint: str) -> NoReturn:
        raise SpecError([Problem(code, message, hint, self.file)])

    def get(self, key: str, default: Any = None) -> Any:
        """null and absent are the same thing: transformers writes either."""
        value = self._fields.get(key)
        return default if value is None else value

    def report(self, key: str, code: str, message: str, hint: str) -> None:
        self.problems.append(Problem(code, message, hint, self.file, key=self._prefix + key))

    def check_family(self) -> None:
        """Another family gives the fields another meaning: this problem stands alone."""
        model_type, classes = self.get("model_type"), self.get("architectures", [])
        works = ", ".join(FAMILIES)
        if not isinstance(model_type, str):
            found = "missing" if model_type is None else describe(model_type)
            self.report(
                "model_type", "model-unsupported", f"model_type is {found}", f"works today: {works}"
            )
        elif model_type not in FAMILIES:
            message = f"not yet: {show(model_type)}"
            self.report("model_type", "model-unsupported", message, f"works today: {works}")
        elif not isinstance(classes, list) or (classes and FAMILIES[model_type] not in classes):
            named = ", ".join(map(str, classes)) if isinstance(classes, list) else describe(classes)
            message = f"not yet: {show(named)}"
            hint = f"works today: {', '.join(FAMILIES.values())}"
            self.report("architectures", "model-unsupported", message, hint)
        if self.problems:
            raise SpecError(self.problems)

    def _wanted(self, key: str, wanted: str) -> None:
        name = self._prefix + key
        if self.get(key) is None:
            message = f"{name} is missing, {wanted} wanted"
            self.report(key, "config-missing-field", message, "take config.json as published")
        else:
            message = f"{name} is {describe(self.get(key))}, {wanted} wanted"
            self.report(key, "config-type", message, "take config.json as published")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value: object = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 1 << 31:
            self._wanted(key, "positive integer")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        # `value < 1e30` also keeps out integers no float can hold, NaN and infinity.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self._wanted(key, "positive number")
            return 1.0
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            self._wanted(key, "true or false")
            return False
        return value

    def dtype(self) -> str | None:
        """`dtype` is the newer name of `torch_dtype`; either may be null."""
        key = "dtype" if self.get("dtype") is not None else "torch_dtype"
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            self._wanted(key, "a dtype's name")
            return None
        return value.removeprefix("torch.")


def stored_dtype(model_dir: Path) -> str | None:
    """The dtype most tensors of the first safetensors file have, from its header alone.

    None when there is no such file or it cannot be read: loading the weights reports that better.
    """
    try:
        first = min(model_dir.glob("*.safetensors"), default=None)
        if first is None:
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
