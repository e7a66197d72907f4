"""Which requests run in the next step, and what padding that costs. Pure: no vLLM, no torch.

`NeuronScheduler` only carries these decisions out, so a simulator that calls the same functions
decides the same. Sizes are in tokens unless the name says blocks, seats or rows.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from nxbucket.toolkit.buckets import get_bucket_for_count


class Decision(enum.Enum):
    """What one step does. Prefill and decode never share a step."""

    ADVANCE_PREFILL = "advance_prefill"
    """Run the next chunk of the request that is being prefilled; decodes are held back."""
    ADMIT = "admit"
    """Run the first chunk of the request at the head of the queue; decodes are held back."""
    DECODE = "decode"
    """One token for every running decode; what still prefills is held back."""
    IDLE = "idle"
    """Nothing can run."""


DEFAULT_MAX_CONSECUTIVE_PREFILLS = 8
"""Prefill steps in a row while decodes wait; the next step is theirs."""


class SchedulableRequest(Protocol):
    """What the policy reads of a request; `vllm.v1.request.Request` has it."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_output_placeholders(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...


def prefill_end(request: SchedulableRequest) -> int:
    """The position where prefill ends: vLLM's own boundary (v1/core/kv_cache_manager.py).

    `num_tokens - 1` makes the replay of prompt and outputs after a preemption a prefill, too. The
    placeholders of async scheduling are not in `num_tokens`, so they never move the boundary.
    """
    return max(request.num_prompt_tokens, request.num_tokens - 1)


def is_prefill(request: SchedulableRequest) -> bool:
    return request.num_computed_tokens < prefill_end(request)


def has_next_token(request: SchedulableRequest, max_model_len: int) -> bool:
    """Whether a decode has a token to compute now.

    False for a request whose last token is still in flight (async scheduling): vLLM skips it, and
    a step taken for its sake would be empty. Same tests as the running loop of
    v1/core/sched/scheduler.py.
    """
    placeholders = request.num_output_placeholders
    computed = request.num_computed_tokens
    last = request.num_prompt_tokens + request.max_tokens
    if placeholders > 0 and computed + 2 - placeholders >= last:
        return False
    return request.num_tokens + placeholders > computed and computed + 1 < max_model_len


@dataclass(frozen=True, slots=True)
class RunState:
    """What `decide` needs to know about the running requests."""

    has_prefill: bool
    """A running request has prompt left to compute."""
    has_decode: bool
    """A running request has a next token to decode."""
    is_paused: bool = False
    """Nothing at all may run (vLLM's PAUSED_ALL)."""
    prefill_stalled: bool = False
    """The step before tried a prefill and could schedule nothing."""
    num_prefills_in_a_row: int = 0
    """Prefill steps since decodes were last served, counted only while decodes waited."""
    max_consecutive_prefills: int = 0
    """How many of those are allowed; 0 is no limit."""


def decide(state: RunState, may_admit: Callable[[], bool]) -> Decision:
    """Prefill first, one request at a time, unless the decodes are due.

    Decodes are due after a prefill that went nowhere (or they would wait for blocks that only they
    can free) and after `max_consecutive_prefills`. `may_admit` is asked only if an admission would
    be next: asking may move a request.
    """
    if state.is_paused:
        return Decision.IDLE
    limit = state.max_consecutive_prefills
    decodes_due = state.has_decode and (
        state.prefill_stalled or 0 < limit <= state.num_prefills_in_a_row
    )
    if not decodes_due:
        if state.has_prefill:
            return Decision.ADVANCE_PREFILL
        if may_admit():
            return Decision.ADMIT
    return Decision.DECODE if state.has_decode else Decision.IDLE


def prefills_in_a_row(state: RunState, decision: Decision, *, ran: bool) -> int:
    """The next state's `num_prefills_in_a_row`; `ran`: the step had something to compute."""
    if not state.has_decode or decision is Decision.DECODE:
        return 0
    is_prefill_step = decision in (Decision.ADVANCE_PREFILL, Decision.ADMIT)
    return state.num_prefills_in_a_row + (is_prefill_step and ran)


class WaitReason(enum.Enum):
    """Why the head of the queue is not admitted, in the order of the checks."""

    SEATS = "seats"
    PREFILL_RUNNING = "prefill_running"
    PREFILL_BATCH_FULL = "prefill_batch_full"
    KV_BLOCKS = "kv_blocks"
    LORAS = "loras"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An admission that has to wait: `needed` of something of which `available` is left."""

    reason: WaitReason
    needed: int = 0
    available: int = 0

    def __str__(self) -> str:
        match self.reason:
            case WaitReason.SEATS:
                return f"waits for a seat, all {self.needed} are taken"
            case WaitReason.PREFILL_RUNNING:
                return "waits for the prefill in progress"
            case WaitReason.PREFILL_BATCH_FULL:
                return f"waits: a step takes {self.needed} prefill"
            case WaitReason.KV_BLOCKS:
                return f"waits for {self.needed} KV blocks, {self.available} not reserved"
            case WaitReason.LORAS:
                return f"waits for a LoRA slot, all {self.needed} are in use"
            case WaitReason.NOT_READY:
                return "waits for its grammar or its input"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the deployment can hold; constant after start."""

    max_num_active_reqs: int
    num_blocks: int
    """As vLLM counts them: with the null block."""
    block_size: int
    max_model_len: int
    max_loras: int | None = None
    max_prefills_per_batch: int = 1

    @property
    def num_usable_blocks(self) -> int:
        """`BlockPool` keeps block 0 as the null block (v1/core/block_pool.py)."""
        return self.num_blocks - 1

    @property
    def max_kv_concurrent(self) -> int:
        """How many requests of `max_model_len` fit at once, whatever they ask for."""
        return self.num_usable_blocks // self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.max_model_len) // self.block_size)

    def worst_case_blocks(self, request: SchedulableRequest) -> int:
        """The most blocks a request can come to hold: its prompt and all tokens it may ask for."""
        return self.blocks_for(request.num_prompt_tokens + request.max_tokens)

    def reserved_blocks(
        self, running: Iterable[SchedulableRequest], holding: Iterable[SchedulableRequest]
    ) -> int:
        """Blocks promised: running requests may grow, waiting ones that hold blocks do not."""
        promised = sum(self.worst_case_blocks(request) for request in running)
        return promised + sum(self.blocks_for(r.num_computed_tokens) for r in holding)


def refuse_admission(
    limits: Limits,
    candidate: SchedulableRequest,
    running: Collection[SchedulableRequest],
    *,
    holding: Collection[SchedulableRequest] = (),
    num_paused_sessions: int = 0,
    num_offered: int = 0,
    loras: Collection[int] = (),
) -> Refusal | None:
    """Why `candidate` cannot be admitted now; None if it can.

    `holding` waits but owns KV blocks, `num_paused_sessions` wait for input but keep their seat,
    `num_offered` are already offered to this step, `loras` would be in use with the candidate.

    Every request reserves its worst case, so one that is admitted never runs out of blocks. While
    fewer than `max_kv_concurrent` requests hold blocks, no sum is needed.
    """
    if len(running) + num_paused_sessions >= limits.max_num_active_reqs:
        return Refusal(WaitReason.SEATS, needed=limits.max_num_active_reqs)
    if any(is_prefill(request) for request in running):
        return Refusal(WaitReason.PREFILL_RUNNING)
    if num_offered >= limits.max_prefills_per_batch:
        return Refusal(WaitReason.PREFILL_BATCH_FULL, needed=limits.max_prefills_per_batch)
    if len(running) + len(holding) >= limits.max_kv_concurrent:
        needed = limits.worst_case_blocks(candidate)
        available = limits.num_usable_blocks - limits.reserved_blocks(running, holding)
        if needed > available:
            return Refusal(WaitReason.KV_BLOCKS, needed=needed, available=available)
    if limits.max_loras is not None and len(loras) > limits.max_loras:
        return Refusal(WaitReason.LORAS, needed=limits.max_loras)
    return None


def check_buckets(name: str, buckets: Sequence[int], last: int, last_is: str) -> tuple[int, ...]:
    """The bucket list as the scheduler may use it; a ValueError sentence if it may not."""
    wrong = [b for b in buckets if type(b) is not int or b < 1]
    if not buckets or wrong:
        raise ValueError(f"{name} must be positive whole numbers, is {list(buckets)}")
    if any(a >= b for a, b in pairwise(buckets)):
        raise ValueError(f"{name} must ascend without repeats, is {list(buckets)}")
    if buckets[-1] != last:
        raise ValueError(f"the last of {name} must be {last} ({last_is}), is {buckets[-1]}")
    return tuple(buckets)


@dataclass(slots=True)
class BucketUse:
    """How often one bucket ran, and how much of what it computed was asked for.

    Counted in tokens for prefill buckets and in rows for decode buckets.
    """

    executions: int = 0
    real: int = 0
    padding: int = 0


@dataclass
class PaddingStats:
    """Use of every bucket since start; a bucket that never ran is there with zeros."""

    prefill: dict[int, BucketUse] = field(default_factory=dict)
    decode: dict[int, BucketUse] = field(default_factory=dict)
    num_held_back: int = 0
    """Waiting requests after the last step."""
    num_decodes_held_back: int = 0
    """Running requests the last step left out for a prefill."""
    head_wait: Refusal | None = None
    """Why the head of the queue was not admitted in the last step that looked at it."""

    @classmethod
    def for_buckets(cls, prefill: Iterable[int], decode: Iterable[int]) -> "PaddingStats":
        return cls({b: BucketUse() for b in prefill}, {b: BucketUse() for b in decode})

    def record_prefill(self, num_tokens: int) -> int:
        """Count a chunk; returns its bucket."""
        return _record(self.prefill, num_tokens)

    def record_decode(self, num_rows: int, steps: int = 1) -> int:
        """Count a decode batch, or several alike; returns its bucket."""
        return _record(self.decode, num_rows, steps)

    @property
    def num_executions(self) -> int:
        return sum(use.executions for use in (*self.prefill.values(), *self.decode.values()))

    @property
    def prefill_padding(self) -> int:
        return sum(use.padding for use in self.prefill.values())

    @property
    def prefill_real(self) -> int:
        return sum(use.real for use in self.prefill.values())

    def summary(self) -> str:
        """One line for the log: totals since start, then `bucket:executions`."""
        return (
            f"prefill {_shares(self.prefill, 'tokens')}; decode {_shares(self.decode, 'rows')}; "
            f"{self.num_held_back} requests held back"
        )


def _record(uses: dict[int, BucketUse], count: int, steps: int = 1) -> int:
    bucket = get_bucket_for_count(count, tuple(uses))
    use = uses[bucket]
    use.executions += steps
    use.real += count * steps
    use.padding += (bucket - count) * steps
    return bucket


def padding_share(uses: Mapping[int, BucketUse]) -> float:
    """Padding of all that the buckets executed."""
    real = sum(use.real for use in uses.values())
    padding = sum(use.padding for use in uses.values())
    return padding / (real + padding) if padding else 0.0


def _shares(uses: dict[int, BucketUse], unit: str) -> str:
    real = sum(use.real for use in uses.values())
    padding = sum(use.padding for use in uses.values())
    share = padding_share(uses)
    counts = " ".join(f"{bucket}:{use.executions}" for bucket, use in uses.items())
    return f"{real} {unit} + {padding} padding ({share:.1%}), buckets {counts}"
