"""Rotary embedding as config.json describes it: every spelling of one meaning gives one value.

What a text of any length up to `PositionLimit` needs is fixed here, since a compiled program has
one table. Two forms change their table with the length of the text: `dynamic` beyond
max_position_embeddings, `longrope` beyond original_max_position_embeddings. Below that both are
exact, and that is their limit; above it they could not be served with a cached prefix.

Formulas and defaults are those of transformers' modeling_rope_utils.py.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from nxbucket.toolkit.buckets import describe, show
from nxbucket.toolkit.config_json import ConfigJson

FORMS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
UNSUPPORTED_KEYS = ("mrope_section", "alpha", "use_fope", "rope_dim")
"""They change the meaning of a form we know."""
LENGTH_KEYS = (
    *("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length"),
    *("max_seq_length", "seq_len"),
)
"""vLLM takes the smallest of these and max_position_embeddings, and refuses to serve more."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `theta` is the base; each other field belongs to some forms only.

    `attention_factor` multiplies cos and sin. `dynamic` is not here: within its limit it is
    `default`.
    """

    form: Literal["default", "linear", "llama3", "yarn", "longrope"]
    theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None
    short_factor: tuple[float, ...] | None = None


@dataclass(frozen=True)
class PositionLimit:
    """How many tokens a text may have, and what says so."""

    tokens: int
    reason: str


@dataclass(frozen=True)
class _Reading:
    """What the reader of a form needs. `rope` is the RoPE's own object in `config`."""

    rope: ConfigJson
    config: ConfigJson
    theta: float
    positions: int
    limit: PositionLimit
    head_dim: int | None


def read_rope(
    config: ConfigJson, default_positions: int, head_dim: int | None
) -> tuple[Rope | None, PositionLimit]:
    """None where a problem was noted. `head_dim` is None where it is unknown."""
    positions = config.integer("max_position_embeddings", default=default_positions)
    shortest, named = positions, f"the model's max_position_embeddings {positions}"
    for key in LENGTH_KEYS:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < shortest:
            shortest, named = value, f"the model's {key} {value}"
    limit = PositionLimit(shortest, named)
    if config.number("partial_rotary_factor", default=1.0) != 1.0:
        _refuse_partial(config)
        return None, limit
    # transformers 5: the old name wins when both are there.
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(name) or {}
    if not isinstance(scaling, dict):
        message = f"{name} is {describe(scaling)}, object wanted"
        config.report(name, "config-type", message, "see Llama's")
        return None, limit
    rope = config.child(name, scaling)
    form = _form(rope, scaling)
    if form is None:
        return None, limit
    in_rope = rope.get("rope_theta") is not None
    theta = (rope if in_rope else config).number("rope_theta", default=10000.0)
    before = len(config.problems)
    reading = _Reading(rope, config, theta, positions, limit, head_dim)
    read, limit = _READERS[form](reading)
    return (read if len(config.problems) == before else None), limit


def _form(rope: ConfigJson, scaling: dict[str, Any]) -> str | None:
    new, old = rope.get("rope_type"), rope.get("type")
    form = new or old or "default"
    key = "rope_type" if new else "type"
    works = f"works today: {', '.join(FORMS)}"
    if form not in FORMS:
        named = show(form) if isinstance(form, str) else describe(form)
        rope.report(key, "rope-unsupported", f"RoPE form {named} is not supported", works)
        return None
    if new and old and new != old:
        message = f"rope_type is {describe(new)} and type is {describe(old)}: which?"
        rope.report("type", "rope-unsupported", message, "delete the one that is wrong")
        return None
    for name, value in scaling.items():
        if name in UNSUPPORTED_KEYS and value is not None and value is not False:
            message = f"RoPE with {name} is not supported"
            rope.report(name, "rope-unsupported", message, works)
            return None
        if isinstance(value, dict):
            message = f"RoPE of its own for some layers ({show(name)}) is not supported"
            rope.report(name, "rope-unsupported", message, "one for all layers works today")
            return None
    if rope.number("partial_rotary_factor", default=1.0) != 1.0:
        _refuse_partial(rope)
        return None
    return str(form)


def _refuse_partial(config: ConfigJson) -> None:
    message = "partial_rotary_factor other than 1.0 is not supported"
    config.report("partial_rotary_factor", "rope-unsupported", message, "works today: 1.0")


def _default(at: _Reading) -> tuple[Rope, PositionLimit]:
    return Rope("default", at.theta), at.limit


def _linear(at: _Reading) -> tuple[Rope, PositionLimit]:
    factor = at.rope.number("factor")
    # vLLM's reading: max_position_embeddings is what the model had before it was scaled.
    tokens = min(int(at.limit.tokens * factor), (1 << 31) - 1)
    reason = f"{at.limit.reason} times the factor {factor:g} of its linear RoPE"
    return Rope("linear", at.theta, factor), PositionLimit(max(tokens, 1), reason)


def _dynamic(at: _Reading) -> tuple[Rope, PositionLimit]:
    factor = at.rope.number("factor")
    reason = (
        f"{at.limit.reason}: beyond it dynamic RoPE changes with the length of the text, which a "
        "compiled program cannot follow"
    )
    # vLLM's limit is the product, which a factor below 1 makes the smaller one.
    tokens = max(1, min(at.limit.tokens, int(at.limit.tokens * factor)))
    return Rope("default", at.theta), PositionLimit(tokens, reason)


def _llama3(at: _Reading) -> tuple[Rope, PositionLimit]:
    before = len(at.config.problems)
    low, high = at.rope.number("low_freq_factor"), at.rope.number("high_freq_factor")
    original = _original(at, None)
    factor = at.rope.number("factor")
    if len(at.config.problems) == before and low >= high:
        message = f"low_freq_factor {low} must be below high_freq_factor {high}"
        at.rope.report("low_freq_factor", "config-value", message, "Llama 3.1 has 1.0 and 4.0")
    return Rope("llama3", at.theta, factor, low, high, original), at.limit


def _yarn(at: _Reading) -> tuple[Rope, PositionLimit]:
    factor = at.rope.number("factor")
    original = _original(at, at.positions)
    fast, slow = at.rope.number("beta_fast", default=32.0), at.rope.number("beta_slow", default=1.0)
    if fast < slow:
        message = f"beta_fast {fast:g} must not be below beta_slow {slow:g}"
        at.rope.report("beta_fast", "config-value", message, "the usual ones are 32 and 1")
    if at.theta <= 1:
        message = f"yarn with rope_theta {at.theta:g}: it must be above 1"
        at.rope.report("rope_theta", "config-value", message, "take config.json as published")
    form = Rope(
        "yarn",
        at.theta,
        factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=at.rope.boolean("truncate", default=True),
        attention_factor=_yarn_attention_factor(at.rope, factor),
    )
    if int(original * factor) > at.limit.tokens:
        reason = (
            f"{at.limit.reason}, which for yarn is the extended length: to use all of it set "
            f"max_position_embeddings to {int(original * factor)} in config.json"
        )
        return form, PositionLimit(at.limit.tokens, reason)
    return form, at.limit


def _yarn_attention_factor(rope: ConfigJson, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if not (rope.get("mscale") and rope.get("mscale_all_dim")):  # 0 is none, too
        return scale(1.0)
    return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))


def _longrope(at: _Reading) -> tuple[Rope, PositionLimit]:
    original = _original(at, None)
    short = _factors(at, "short_factor")
    _factors(at, "long_factor")
    if at.rope.get("attention_factor") is not None:
        attention = at.rope.number("attention_factor")
    else:
        factor = at.rope.number("factor", default=at.positions / original)
        attention = 1.0
        if factor > 1 and original > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
    form = Rope("longrope", at.theta, attention_factor=attention, short_factor=short)
    reason = (
        f"original_max_position_embeddings {original}: beyond it longrope changes its table with "
        "the length of the text, which a compiled program cannot follow"
    )
    if original < at.limit.tokens:
        return form, PositionLimit(original, reason)
    return form, at.limit


def _factors(at: _Reading, key: str) -> tuple[float, ...]:
    values = at.rope.get(key)
    numbers = isinstance(values, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1e30 for v in values
    )
    if not numbers:
        message = f"{key} is {describe(values)}, a list of positive numbers wanted"
        at.rope.report(key, "config-type", message, "take config.json as published")
        return ()
    if at.head_dim is not None and len(values) != at.head_dim // 2:
        message = f"{key} has {len(values)} numbers; half of head_dim {at.head_dim} wanted"
        at.rope.report(key, "config-value", message, "take config.json as published")
    return tuple(float(v) for v in values)


def _original(at: _Reading, default: int | None) -> int:
    """original_max_position_embeddings, which some files have beside the RoPE's own object."""
    key = "original_max_position_embeddings"
    inner, outer = at.rope.get(key), at.config.get(key)
    if outer is not None and inner is not None and inner != outer:
        message = f"{key} is {describe(inner)} here and {describe(outer)} beside it: which?"
        at.rope.report(key, "config-value", message, "delete the one that is wrong")
        return 1
    if outer is not None:
        return at.config.integer(key)
    return at.rope.integer(key, default=default)


_READERS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
