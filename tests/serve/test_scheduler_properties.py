"""Random traffic on vLLM's real scheduler: what must hold in every step, whatever happens.

Adds, aborts, pauses, forced preemptions and slow grammars, under both queue policies, with and
without the prefix cache, sync and async with one step scheduled ahead.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_fakes import (
    Engine,
    Row,
    SchedulerFactory,
    grammar_is_ready,
    make_request,
    num_free_blocks,
    wait_for_grammar,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from nxbucket.serve.scheduler import NeuronAsyncScheduler, NeuronScheduler

pytestmark = [pytest.mark.vllm]

MAX_MODEL_LEN = 256
BUCKETS = [16, 32, 64]


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> SchedulerFactory:
    return SchedulerFactory.in_folder(tmp_path_factory.mktemp("tiny-llama"))


@dataclass
class Traffic:
    """A run with its invariants: `step` checks them all."""

    engine: Engine
    scheduler: NeuronScheduler
    requests: list[Request] = field(default_factory=list)
    compiling: list[Request] = field(default_factory=list)
    num_idle: int = 0
    admissions: list[str] = field(default_factory=list)

    def add(self, num_prompt: int, max_tokens: int, priority: int, *, slow_grammar: bool) -> None:
        n = len(self.requests)
        prompt = [3 + n % 3] * (num_prompt // 2) + [10 + n % 900] * (num_prompt - num_prompt // 2)
        request = make_request(
            f"r{n}", max_tokens=max_tokens, prompt=prompt, priority=priority, arrival=float(n)
        )
        if slow_grammar:
            self.compiling.append(wait_for_grammar(request))
        self.requests.append(request)
        self.engine.add(request)

    def finish_grammar(self, index: int) -> None:
        if self.compiling:
            grammar_is_ready(self.compiling.pop(index % len(self.compiling)))

    def abort(self, index: int) -> None:
        if self.requests:
            self.engine.abort(self.requests[index % len(self.requests)].request_id)

    def preempt_all(self) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def pause(self, state: PauseState) -> None:
        self.scheduler.set_pause_state(state)

    def ready_in_order(self) -> list[str]:
        paused = self.scheduler.pause_state != PauseState.UNPAUSED
        return [
            r.request_id
            for r in ([] if paused else self.scheduler.holdback_queue)
            if r.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            or r.structured_output_request.grammar is not None  # type: ignore[union-attr]
        ]

    def step(self) -> Row:
        scheduler = self.scheduler
        ready = self.ready_in_order()
        was_running = {r.request_id for r in scheduler.running}
        preemptions = sum(r.num_preemptions for r in self.requests)
        row = self.engine.step()
        names = row.tokens.keys()

        assert row.phase in ("prefill", "decode", "idle")
        if row.phase == "prefill":
            assert len(names) == 1
            (size,) = row.padded.values()
            assert size in BUCKETS
            assert size >= max(row.tokens.values())
        else:
            assert set(row.tokens.values()) <= {1}
        admitted = names - was_running
        assert len(admitted) <= 1
        assert not admitted or admitted == {ready[0]}, "not the first ready request"
        self.admissions += admitted
        order = [self.latest_admission(r.request_id) for r in scheduler.running]
        assert order == sorted(order), "not in the order of admission"
        assert sum(r.num_preemptions for r in self.requests) == preemptions
        assert len(scheduler.running) <= scheduler.max_num_seqs
        if ready and not was_running:
            assert row.phase == "prefill" or row.padded == {ready[0]: 1}
        waiting = [r.request_id for r in scheduler.holdback_queue]
        assert len(set(waiting)) == len(waiting)
        assert not scheduler._held.waiting_view
        assert not scheduler._held.kv_view
        # Requests wait for a step only if they may not run or if their last token is in flight.
        can_run = was_running or ready
        self.num_idle = (
            self.num_idle + 1 if row.phase == "idle" and can_run and not self.is_paused else 0
        )
        assert self.num_idle <= self.engine.depth
        return row

    def latest_admission(self, name: str) -> int:
        return len(self.admissions) - self.admissions[::-1].index(name)

    @property
    def is_paused(self) -> bool:
        return self.scheduler.pause_state == PauseState.PAUSED_ALL

    def finish(self, free_blocks: int) -> None:
        self.pause(PauseState.UNPAUSED)
        while self.compiling:
            self.finish_grammar(0)
        for _ in range(20_000):
            if not self.scheduler.has_requests():
                break
            self.step()
            if not self.scheduler.has_requests():
                self.engine.drain()
        assert not self.scheduler.requests
        assert num_free_blocks(self.scheduler) == free_blocks
        self.check_totals()

    def check_totals(self) -> None:
        rows = self.engine.rows
        prefills = [row for row in rows if row.phase == "prefill"]
        padding = sum(sum(row.padded.values()) - sum(row.tokens.values()) for row in prefills)
        real = sum(sum(row.tokens.values()) for row in prefills)
        stats = self.scheduler.stats
        assert (stats.prefill_real, stats.prefill_padding) == (real, padding)
        assert self.scheduler.total_padding_tokens == padding
        decodes = [len(row.tokens) for row in rows if row.phase == "decode"]
        assert sum(use.real for use in stats.decode.values()) == sum(decodes)
        assert stats.num_executions == len(prefills) + len(decodes)


add = st.tuples(
    st.just("add"),
    st.sampled_from([1, 5, 15, 16, 17, 63, 64, 65, 130, 200]),
    st.sampled_from([1, 2, 3, 20, 56]),
    st.integers(0, 2),
    st.booleans() | st.just(False),
)
# Equal requests that outgrow their prompts, more than fit: what makes blocks run short.
burst = st.tuples(
    st.just("burst"), st.integers(2, 8), st.sampled_from([16, 30, 60]), st.sampled_from([34, 56])
)
operations = st.lists(
    add
    | burst
    | st.tuples(st.just("step"), st.integers(1, 8))
    | st.tuples(st.just("step"), st.integers(1, 40))
    | st.tuples(st.just("abort"), st.integers(0, 99))
    | st.tuples(st.just("grammar"), st.integers(0, 99))
    | st.tuples(st.just("preempt"))
    | st.tuples(st.just("pause"), st.sampled_from(list(PauseState))),
    max_size=60,
)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
@given(
    operations=operations,
    max_num_seqs=st.sampled_from([1, 4, 8]),
    num_blocks=st.sampled_from([17, 20, 24, 200]),
    prefix_cache=st.booleans(),
    cap=st.sampled_from([0, 1, 4]),
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_step_keeps_the_promises(
    *,
    factory: SchedulerFactory,
    cls: type[NeuronScheduler],
    policy: str,
    operations: list[tuple],  # type: ignore[type-arg]
    max_num_seqs: int,
    num_blocks: int,
    prefix_cache: bool,
    cap: int,
) -> None:
    scheduler = factory.scheduler(
        cls,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=prefix_cache,
        scheduling_policy=policy,
        additional_config={
            "neuron_config": {"num_batched_tokens_buckets": BUCKETS},
            "nxbucket": {"max_consecutive_prefills": cap},
        },
    )
    assert isinstance(scheduler, NeuronScheduler)
    free_blocks = num_free_blocks(scheduler)
    traffic = Traffic(Engine(scheduler), scheduler)
    for name, *args in operations:
        match name:
            case "add":
                prompt, max_tokens, priority, slow_grammar = args
                traffic.add(prompt, max_tokens, priority, slow_grammar=slow_grammar)
            case "burst":
                for _ in range(args[0]):
                    traffic.add(args[1], args[2], 0, slow_grammar=False)
            case "step":
                for _ in range(args[0]):
                    traffic.step()
            case "abort":
                traffic.abort(*args)
            case "grammar":
                traffic.finish_grammar(*args)
            case "preempt":
                traffic.preempt_all()
            case "pause":
                traffic.pause(*args)
    traffic.finish(free_blocks)


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_b44_two_hundred_requests_with_aborts_and_blocks_for_three_all_end(
    factory: SchedulerFactory, cls: type[NeuronScheduler]
) -> None:
    scheduler = factory.scheduler(
        cls,
        num_blocks=3 * MAX_MODEL_LEN // 16 + 1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        additional_config={"neuron_config": {"num_batched_tokens_buckets": BUCKETS}},
    )
    assert isinstance(scheduler, NeuronScheduler)
    free_blocks = num_free_blocks(scheduler)
    traffic = Traffic(Engine(scheduler), scheduler)
    for i in range(200):
        traffic.add(1 + i * 37 % 255, 1 + i * 13 % 60, 0, slow_grammar=False)
        if i % 3 == 0:
            traffic.abort(i - i * 7 % (i + 1))
        for _ in range(i % 5):
            traffic.step()
    traffic.finish(free_blocks)
