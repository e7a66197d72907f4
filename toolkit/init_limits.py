"""What `nxbucket init` puts into a model file: limits of its own, or those of a profile.

A profile that plans with the model on one rank is taken whole. Of one that is refused today, mostly
for its ranks, what holds on one rank is taken, and what is not is said.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from nxbucket.compile.neuron.hardware import GIB, hbm_bytes_per_rank
from nxbucket.compile.neuron.instances import target_of
from nxbucket.compile.program import ITEM_BYTES, kv_bytes_per_token
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.toolkit.architecture import Architecture, ModelConfig
from nxbucket.toolkit.buckets import get_default_num_seqs_buckets
from nxbucket.toolkit.model_folder import FoundModel
from nxbucket.toolkit.profile_check import Verdict, judge
from nxbucket.toolkit.profiles import Profile, load_profile, match
from nxbucket.toolkit.spec_reader import DTYPES, LNC_OF, MAX_DEFAULT_MODEL_LEN, TARGETS
from nxbucket.toolkit.validate import BLOCK_SIZE_MULTIPLES

MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 2048
BLOCK_SIZE = 32
PREFILL_BUCKETS = (128, 512, 2048)
"""Each four times the one before: at most three quarters of a step above 128 are padding."""
DECODE_BUCKETS = (1, 2, 4, 8)
SHORTEST_TEXT = 1024
"""A profile of less is somebody's test, and used only if it is named."""

WRITTEN = frozenset({
    "target", "dtype", "tensor_parallel_size", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "num_gpu_blocks_override", "enable_prefix_caching",
    "neuron_config",
})  # fmt: skip
"""Keys that `init` has a place for. What else a profile has is written as it is."""
LISTS = frozenset({"num_batched_tokens_buckets", "num_seqs_buckets"})


@dataclass(frozen=True)
class Limits:
    """`prefill_sizes`, `decode_sizes`: those below the last bucket count, which the limits give."""

    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    target: str = "cpu"
    max_num_seqs: int = MAX_NUM_SEQS
    block_size: int = BLOCK_SIZE
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    prefill_sizes: tuple[int, ...] = PREFILL_BUCKETS
    decode_sizes: tuple[int, ...] = DECODE_BUCKETS
    more: Mapping[str, Any] | None = None
    more_neuron_config: Mapping[str, Any] | None = None
    profile: Profile | None = None
    """What they are from, if from a profile at all."""

    @property
    def prefill_buckets(self) -> list[int]:
        last = min(self.max_num_batched_tokens, self.max_model_len)
        return [*(size for size in self.prefill_sizes if size < last), last]

    @property
    def decode_buckets(self) -> list[int]:
        last = self.max_num_seqs
        return [*(size for size in self.decode_sizes if size < last), last]

    @property
    def kv_blocks(self) -> int:
        """Without vLLM's null block."""
        if self.num_gpu_blocks_override is not None:
            return self.num_gpu_blocks_override - 1
        return self.max_num_seqs * ceil(self.max_model_len / self.block_size)

    def bytes_needed(self, architecture: Architecture) -> int:
        tokens = self.kv_blocks * self.block_size
        kv_bytes = tokens * kv_bytes_per_token(architecture, self.dtype)
        return kv_bytes + num_weights(architecture) * ITEM_BYTES[self.dtype]


def num_weights(architecture: Architecture) -> int:
    return sum(prod(spec.shape) for spec in weight_specs(architecture))


def own_limits(config: ModelConfig, target: str = "cpu") -> Limits:
    length = min(config.max_position_embeddings, MAX_DEFAULT_MODEL_LEN)
    # One request at a time is prefilled, so a step is never longer than a request.
    budget = max(MAX_NUM_SEQS, min(MAX_NUM_BATCHED_TOKENS, length))
    dtype = config.dtype if config.dtype in DTYPES else "float32"
    return Limits(dtype, length, budget, target)


def choose_limits(
    model: str,
    found: FoundModel,
    config: ModelConfig,
    file: Path,
    *,
    instance: str | None = None,
    profile: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Limits:
    """Raises UsageError for an instance type or a profile that is none."""
    target = None if instance is None else target_of(instance)
    # A downloaded folder mostly has its repository's name.
    name = model if found.commit is not None else found.folder.resolve().name
    if profile is not None:
        candidates = [load_profile(profile)]
        if candidates[0] not in match(name, profiles=candidates):
            published = ", ".join(candidates[0].published.models) or "no model"
            say(f"profile {profile} was published for {published}")
    else:
        candidates = [
            candidate
            for candidate in match(name, instance, target)
            if _length(candidate) >= SHORTEST_TEXT
        ]
    if not candidates:
        return own_limits(config, target or "cpu")
    # Without either option the file is for this host, as it is without a profile.
    named = candidates[0].target if profile is not None else None
    own = own_limits(config, target or (named if named in TARGETS else None) or "cpu")

    def with_model(candidate: Profile) -> Verdict:
        given = {
            "target": own.target,
            **({} if "dtype" in candidate.config else {"dtype": own.dtype}),
        }
        return judge(candidate, model, file=file, commit_of=lambda *_: found.commit, **given)

    verdicts = [(candidate, with_model(candidate)) for candidate in candidates]
    for candidate, verdict in verdicts:
        if not verdict.problems and verdict.unread is None:
            say(f"limits and lists of profile {candidate.name}: {candidate.published.title}")
            return _whole(own, candidate, verdict.values)
    candidate, verdict = verdicts[0]
    return _what_holds(own, config, candidate, verdict, say)


def _length(profile: Profile) -> int:
    length = profile.config.get("max_model_len", MAX_DEFAULT_MODEL_LEN)
    return length if type(length) is int else 0


def _whole(own: Limits, profile: Profile, values: Mapping[str, Any]) -> Limits:
    """Its values, checked with this model; a list it leaves out is ours."""
    lists = values["neuron_config"]
    prefill, decode = own.prefill_sizes, get_default_num_seqs_buckets(values["max_num_seqs"])
    if "num_batched_tokens_buckets" in profile.neuron_config:
        prefill = lists["num_batched_tokens_buckets"]
    if "num_seqs_buckets" in profile.neuron_config:
        decode = lists["num_seqs_buckets"]
    return Limits(
        dtype=values["dtype"],
        max_model_len=values["max_model_len"],
        max_num_batched_tokens=values["max_num_batched_tokens"],
        target=own.target,
        max_num_seqs=values["max_num_seqs"],
        block_size=values["block_size"],
        num_gpu_blocks_override=values["num_gpu_blocks_override"],
        enable_prefix_caching=values["enable_prefix_caching"],
        prefill_sizes=tuple(prefill),
        decode_sizes=tuple(decode),
        more={k: v for k, v in profile.config.items() if k not in WRITTEN},
        more_neuron_config={k: v for k, v in profile.neuron_config.items() if k not in LISTS},
        profile=profile,
    )


def _what_holds(
    own: Limits,
    config: ModelConfig,
    profile: Profile,
    verdict: Verdict,
    say: Callable[[str], None],
) -> Limits:
    """Of a profile that is refused: limits that one rank has room for, lists that are lists."""
    taken: list[str] = []
    left: list[str] = []
    limits = _with_sizes(own, config, profile, taken, left)
    limits = _with_lists(limits, own, profile, taken)
    size = profile.config.get("block_size")
    multiple = BLOCK_SIZE_MULTIPLES.get(own.target, 1)
    if type(size) is int and size % multiple == 0 and 0 < size <= limits.max_model_len:
        limits = replace(limits, block_size=size)
        taken.append("block_size")
    if isinstance(shared := profile.config.get("enable_prefix_caching"), bool):
        limits = replace(limits, enable_prefix_caching=shared)
        taken.append("enable_prefix_caching")
    why = "; ".join(problem.message for problem in verdict.problems) or verdict.unread
    say(f"profile {profile.name} ({profile.published.title}) is refused today: {why}")
    for reason in left:
        say(f"not taken from it: {reason}")
    say(
        f"taken from it: {', '.join(taken) or 'nothing'}; the rest is init's own. "
        f"`nxbucket profiles show {profile.name}` prints it"
    )
    return replace(limits, profile=profile) if taken else limits


def _with_sizes(
    own: Limits, config: ModelConfig, profile: Profile, taken: list[str], left: list[str]
) -> Limits:
    """max_model_len and max_num_seqs decide the KV cache: both, or neither."""
    sizes = {
        key: value
        for key in ("max_model_len", "max_num_seqs")
        if type(value := profile.config.get(key)) is int and value > 0
    }
    if not sizes:
        return own
    length = sizes.get("max_model_len", own.max_model_len)
    wanted = replace(
        own, max_model_len=length, max_num_seqs=sizes.get("max_num_seqs", own.max_num_seqs)
    )
    shown = " and ".join(f"{key} {value}" for key, value in sizes.items())
    if wanted.max_model_len > config.max_position_embeddings:
        left.append(f"{shown}: the model has {config.max_position_embeddings} positions")
        return own
    # Without a Neuron target there is no rank to measure by but that which it was published for.
    target = own.target if own.target != "cpu" else profile.target
    if target in LNC_OF:
        room = hbm_bytes_per_rank(target, LNC_OF[target][0])
        needed = wanted.bytes_needed(config.architecture)
        if needed > room:
            left.append(
                f"{shown}: weights and KV cache would take {needed / GIB:.1f} GiB, a rank of "
                f"{target} has {room / GIB:.1f} GiB"
            )
            return own
    taken += sizes
    budget = max(wanted.max_num_seqs, min(own.max_num_batched_tokens, wanted.max_model_len))
    return replace(
        wanted,
        max_num_batched_tokens=budget,
        decode_sizes=tuple(get_default_num_seqs_buckets(wanted.max_num_seqs)),
    )


def _with_lists(limits: Limits, own: Limits, profile: Profile, taken: list[str]) -> Limits:
    """A list of one entry rests on many ranks, or on a stack that pads to it: init's is better."""
    prefill = _sizes(profile.neuron_config.get("num_batched_tokens_buckets"))
    if len(prefill) > 1:
        last = min(prefill[-1], limits.max_model_len)
        budget = max(limits.max_num_seqs, last)
        longer = replace(limits, max_num_batched_tokens=budget, prefill_sizes=prefill)
        if len(longer.prefill_buckets) > 1:
            limits = longer
            taken.append("num_batched_tokens_buckets")
    decode = _sizes(profile.neuron_config.get("num_seqs_buckets"))
    if len(decode) > 1 and limits.max_num_seqs == decode[-1]:
        limits = replace(limits, decode_sizes=decode)
        taken.append("num_seqs_buckets")
    return limits


def _sizes(value: Any) -> tuple[int, ...]:
    """A list of the profile, where it is one that ascends."""
    if not isinstance(value, list) or not all(type(v) is int and v > 0 for v in value):
        return ()
    return tuple(value) if value == sorted(set(value)) else ()
