"""vLLM's scheduler with prefill and decode in separate steps, each in a compiled bucket.

The decisions are in `nxbucket.serve.policy`; this module shows vLLM the requests that may run,
lets it schedule them, and puts everything back.
"""

import enum
import logging
import time
from collections import deque
from itertools import chain
from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from nxbucket.serve.metrics import SchedulerMetrics
from nxbucket.serve.policy import (
    Decision,
    PaddingStats,
    Refusal,
    RunState,
    WaitReason,
    decide,
    has_next_token,
    is_prefill,
    prefill_end,
    prefills_in_a_row,
    refuse_admission,
)
from nxbucket.serve.scheduler_checks import SchedulerSettings, check_scheduler_config
from nxbucket.serve.scheduler_output import NeuronSchedulerOutput, Phase

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
MIN_SCAN = 32
"""Blocked requests looked past in one step; see `NeuronScheduler._pop_ready`."""


class SchedulerState(enum.Enum):
    IDLE = "idle"
    ACTIVE_PREFILL = "active_prefill"
    ACTIVE_DECODE = "active_decode"


class _Held:
    """The queues while vLLM schedules: vLLM sees the views, the full queues are here."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.waiting_view = create_request_queue(scheduler.policy)
        self.kv_view = create_request_queue(scheduler.policy)
        self.waiting: RequestQueue = self.waiting_view
        self.kv_holding: RequestQueue = self.kv_view
        # Popped from the front of a full queue and not in its view.
        self.skipped_waiting: list[Request] = []
        self.skipped_kv: list[Request] = []
        self.running: list[Request] = []
        self.running_is_older = True

    def take(self, scheduler: Scheduler) -> None:
        self.waiting, scheduler.waiting = scheduler.waiting, self.waiting_view
        self.kv_holding, scheduler.kv_holding_waiting = scheduler.kv_holding_waiting, self.kv_view

    def hold_running(self, scheduler: Scheduler, shown: list[Request], *, older: bool) -> None:
        kept = set(shown)
        self.running = [r for r in scheduler.running if r not in kept]
        self.running_is_older = older
        scheduler.running = shown

    def restore(self, scheduler: Scheduler) -> None:
        """Everything back in admission order: the oldest first, in all three queues.

        vLLM preempts `running[-1]` under FCFS, which must never be the oldest request.
        """
        if self.running:
            shown = scheduler.running
            scheduler.running = (
                self.running + shown if self.running_is_older else shown + self.running
            )
            self.running = []
        for full, view, skipped in (
            (self.waiting, self.waiting_view, self.skipped_waiting),
            (self.kv_holding, self.kv_view, self.skipped_kv),
        ):
            while view:  # not admitted after all, or preempted by vLLM
                skipped.append(view.pop_request())
            while skipped:
                full.prepend_request(skipped.pop())
        scheduler.waiting, scheduler.kv_holding_waiting = self.waiting, self.kv_holding
        self.waiting, self.kv_holding = self.waiting_view, self.kv_view


class NeuronScheduler(Scheduler):
    """Prefill or decode, never both, one prefill at a time, every chunk in a bucket.

    Policy (decided in `nxbucket.serve.policy`):
        - A step is one chunk of one request's prefill, or one token for every running decode.
        - Prefill goes first. After `max_consecutive_prefills` prefill steps in a row while decodes
          wait (additional_config["nxbucket"], default 8) the decodes get one step; 0 lets a stream
          of prefills starve the decodes, as the specification does.
        - After a prefill that could schedule nothing, the decodes run: they free the blocks.
        - Requests are admitted in the order of the queue (FCFS, or vLLM's priority). A request
          that is not ready (its grammar compiles, its session waits for input) keeps its place and
          lets others pass. A ready one that lacks a seat, KV blocks or a LoRA slot blocks those
          behind it, so it waits at most for the requests that run now. Seats are not preempted:
          an urgent request goes before all that wait, not before those that run.
        - A request reserves its worst case in KV blocks: prompt + max_tokens, at most
          max_model_len. So vLLM never preempts for lack of blocks, and its `watermark` has no
          effect. Streaming sessions, which can outgrow what they reserved, are the exception: the
          first one that waits with blocks in hand is tried whenever nothing runs.
        - A preemption asked for through the API (a prefix cache reset) is resumed as a prefill
          of prompt and outputs, in chunks.
        - The prefix cache is looked up by vLLM at admission, not on arrival.
        - The queues are whole between steps and cost the same however long they are: they are
          swapped for empty ones, not copied. Only a run of blocked requests at the front is walked.

    What the scheduler cannot serve is refused at start (`nxbucket.serve.scheduler_checks`).
    """

    uses_async_scheduling: ClassVar[bool] = False

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        # Before vLLM's own: a KV connector would already be running.
        settings: SchedulerSettings = check_scheduler_config(
            vllm_config, kv_cache_config, needs_async=self.uses_async_scheduling
        )
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.max_prefills_per_batch = 1
        self.max_num_seqs = self.max_num_running_reqs
        self.max_consecutive_prefills = settings.max_consecutive_prefills
        self.num_batched_tokens_buckets = settings.num_batched_tokens_buckets
        self.num_seqs_buckets = settings.num_seqs_buckets
        self.stats = PaddingStats.for_buckets(
            self.num_batched_tokens_buckets, self.num_seqs_buckets
        )
        self.stall_reason: str | None = None
        """Why nothing runs although requests wait; None while the engine makes progress."""
        self._state = SchedulerState.IDLE
        self._held = _Held(self)
        self._prefill_stalled = False
        self._num_prefills_in_a_row = 0
        self._scan_limit = MIN_SCAN
        self._clock = time.monotonic
        self._logged_at = self._clock()
        self._logged_executions = 0
        self._limits = settings.limits
        self._metrics = SchedulerMetrics([state.value for state in SchedulerState])

    @property
    def state(self) -> SchedulerState:
        return self._state

    @property
    def _max_kv_concurrent(self) -> int:
        return self._limits.max_kv_concurrent

    @property
    def total_padding_tokens(self) -> int:
        return self.stats.prefill_padding

    @property
    def at_capacity(self) -> bool:
        """Every seat is taken; a paused streaming session keeps its seat."""
        seats = len(self.running) + self.num_waiting_for_streaming_input
        return seats >= self.max_num_active_reqs

    @property
    def has_prefill_in_running(self) -> bool:
        return any(is_prefill(request) for request in self.running)

    @property
    def holdback_queue(self) -> deque[Request]:
        """What is not running, in the order it will be tried. A copy, to look at."""
        return deque(chain(self.kv_holding_waiting, self.waiting))

    def can_schedule(self, request: Request) -> bool:
        """Whether `request`, ready and at the head of its queue, may be admitted now.

        The answer's reason is in `stats.head_wait`.
        """
        loras: set[int] = set()
        if self.lora_config and request.lora_request:
            loras = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
            loras.add(request.lora_request.lora_int_id)
        held = self._held  # empty between steps, when kv_holding_waiting is whole
        holding = chain(self.kv_holding_waiting, held.kv_holding, held.skipped_kv)
        self.stats.head_wait = refuse_admission(
            self._limits,
            request,
            self.running,
            holding=[r for r in holding if r is not request],
            num_paused_sessions=self.num_waiting_for_streaming_input,
            num_offered=len(held.waiting_view) + len(held.kv_view),
            loras=loras,
        )
        return self.stats.head_wait is None

    def schedule(self, throttle_prefills: bool = False) -> NeuronSchedulerOutput:
        # `throttle_prefills` is vLLM's balancing between data-parallel ranks. It is passed on, but
        # with the decodes held back vLLM has nothing to protect and never defers a prefill.
        running = self.running
        prefilling = [request for request in running if is_prefill(request)]
        being_prefilled = set(prefilling)
        decoding = [r for r in running if r not in being_prefilled] if prefilling else running
        state = RunState(
            has_prefill=bool(prefilling),
            has_decode=any(has_next_token(r, self.max_model_len) for r in decoding),
            is_paused=self._pause_state == PauseState.PAUSED_ALL,
            prefill_stalled=self._prefill_stalled,
            num_prefills_in_a_row=self._num_prefills_in_a_row,
            max_consecutive_prefills=self.max_consecutive_prefills,
        )
        held = self._held
        held.take(self)
        try:
            decision = decide(state, self._offer_next)
            if decision is Decision.ADVANCE_PREFILL:
                held.hold_running(self, prefilling[:1], older=True)
            elif decision is Decision.ADMIT:
                held.hold_running(self, [], older=True)
            elif decision is Decision.DECODE and prefilling:
                held.hold_running(self, decoding, older=False)
            num_decodes_held = len(held.running) if decision is not Decision.DECODE else 0
            base_output = self._call_base_schedule(throttle_prefills)
        finally:
            held.restore(self)

        ran = bool(base_output.num_scheduled_tokens)
        tried_prefill = decision in (Decision.ADVANCE_PREFILL, Decision.ADMIT)
        self._prefill_stalled = tried_prefill and not ran
        self._num_prefills_in_a_row = prefills_in_a_row(state, decision, ran=ran)

        output = self._apply_padding(base_output)
        self._keep_token_ids_at_worker(output)
        self._update_state(output)
        self.stats.num_decodes_held_back = num_decodes_held
        self._record_step(output)
        return output

    def _call_base_schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        """vLLM's own `schedule`, on what is left in the queues. Once per step: it consumes
        finished and preempted ids."""
        return super().schedule(throttle_prefills)

    def _offer_next(self) -> bool:
        """Move the request that may be admitted now into vLLM's view."""
        held = self._held
        if not held.waiting and not held.kv_holding:
            self.stats.head_wait = None
            return False
        if self.at_capacity:
            self.stats.head_wait = Refusal(WaitReason.SEATS, needed=self.max_num_active_reqs)
            return False
        # As in vLLM, requests that hold blocks go first, and they alone while new ones are paused.
        candidate = self._pop_ready(held.kv_holding, held.skipped_kv)
        view, skipped = held.kv_view, held.skipped_kv
        holds_blocks = candidate is not None
        if candidate is None and self._pause_state == PauseState.UNPAUSED:
            candidate = self._pop_ready(held.waiting, held.skipped_waiting)
            view, skipped = held.waiting_view, held.skipped_waiting
        if candidate is None:
            self.stats.head_wait = Refusal(WaitReason.NOT_READY)
            return False
        # Two sessions that wait with blocks in hand could refuse each other for ever.
        if not self.can_schedule(candidate) and not (holds_blocks and not self.running):
            skipped.append(candidate)
            return False
        view.add_request(candidate)
        return True

    def _pop_ready(self, queue: RequestQueue, skipped: list[Request]) -> Request | None:
        """The first request vLLM would not skip, popped; those before it go to `skipped`.

        While decodes run, a step looks past a bounded number of blocked requests. The bound
        doubles while it hides everything behind it, so no ready request stays out of sight.
        """
        limit = self._scan_limit if self.running else len(queue)
        start = len(skipped)
        while queue and len(skipped) - start < limit:
            request = queue.pop_request()
            # Promotes a request whose grammar is ready; asking twice does no harm. The second test
            # is vLLM's too: output of an earlier turn is still on its way to the client.
            if self._handle_blocked_waiting_request(request) and not (
                request.num_stale_output_tokens and not request.drop_stale_output
            ):
                self._scan_limit = max(MIN_SCAN, 2 * (len(skipped) - start))
                return request
            skipped.append(request)
        if queue and self.running:
            self._scan_limit *= 2
        return None

    def _apply_padding(self, output: SchedulerOutput) -> NeuronSchedulerOutput:
        """Padded sizes beside the real ones, and the check that the step has one phase.

        The phase of a row comes from the counts in the output: those of the requests have already
        advanced (`_update_after_schedule`).
        """
        num_computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        num_computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        padded = dict(output.num_scheduled_tokens)
        prefills = []
        for req_id, num_tokens in padded.items():
            if num_computed[req_id] < prefill_end(self.requests[req_id]):
                prefills.append(req_id)
            elif num_tokens != 1:
                raise RuntimeError(f"decode of {req_id} has {num_tokens} tokens, expected 1")
        num_decodes = len(padded) - len(prefills)
        if prefills and num_decodes:
            raise RuntimeError(
                f"Neuron constraint violated: Mixed prefill ({len(prefills)}) "
                f"and decode ({num_decodes}) in the same batch."
            )
        if len(prefills) > self.max_prefills_per_batch:
            raise RuntimeError(f"{len(prefills)} prefills in one batch, expected 1")
        phase: Phase = "idle"
        if prefills:
            phase = "prefill"
            padded[prefills[0]] = self.stats.record_prefill(padded[prefills[0]])
        elif num_decodes:
            phase = "decode"
            self.stats.record_decode(num_decodes)
        return NeuronSchedulerOutput.from_base(output, padded, phase)

    def _keep_token_ids_at_worker(self, output: NeuronSchedulerOutput) -> None:
        """Do not send the decodes' token ids again after a prefill step.

        vLLM sends `all_token_ids` of each request that was not in the step before. Only
        `GPUModelRunner._update_states` reads them, and only with async scheduling, where the worker
        caches placeholders; in sync mode it keeps the ids itself (`_bookkeeping_sync`). A forced
        preemption clears the set (`reset_prefix_cache`) and takes its requests out of `running`.
        """
        if output.phase == "prefill" and not self.uses_async_scheduling:
            self.prev_step_scheduled_req_ids.update(r.request_id for r in self.running)

    def _update_state(self, output: NeuronSchedulerOutput) -> None:
        num_running, num_waiting = self.get_request_counts()
        if not num_running and num_waiting == self.num_waiting_for_streaming_input:
            self._state = SchedulerState.IDLE
        elif output.phase == "prefill":
            self._state = SchedulerState.ACTIVE_PREFILL
        elif output.phase == "decode":
            self._state = SchedulerState.ACTIVE_DECODE

    def _record_step(self, output: NeuronSchedulerOutput) -> None:
        """Called once per step, when the queues are whole again."""
        num_running, self.stats.num_held_back = self.get_request_counts()
        self._metrics.record(self._state.value, self.stats.num_held_back)
        self._log_stall(output, num_running)
        now = self._clock()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            executions = self.stats.num_executions
            if executions != self._logged_executions:
                self._logged_executions = executions
                logger.info("padding since start: %s", self.stats.summary())

    def _log_stall(self, output: NeuronSchedulerOutput, num_running: int) -> None:
        """Say once per stall what the head of the queue waits for. Nothing to say if paused."""
        num_runnable = self.stats.num_held_back - self.num_waiting_for_streaming_input
        if (
            output.phase != "idle"
            or num_running
            or not num_runnable
            or self._pause_state != PauseState.UNPAUSED
        ):
            self.stall_reason = None
            return
        if self.stall_reason is None:
            queue = self.kv_holding_waiting or self.waiting
            head = queue.peek_request().request_id
            wait = self.stats.head_wait or "could not be scheduled by vLLM"
            self.stall_reason = f"head request {head} {wait}"
            logger.warning("nothing runs and %d requests wait: %s", num_runnable, self.stall_reason)


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):
    """`NeuronScheduler` with the output placeholders of async scheduling.

    One step is scheduled ahead of the one that runs; the worker has to keep the sampled ids.
    """

    uses_async_scheduling: ClassVar[bool] = True

    def _call_base_schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        return AsyncScheduler.schedule(self, throttle_prefills)
