"""Step traces of the schedulers against vLLM's own: events in, one letter or row per step out.

`row N` is the N-th hole of the specification's algorithm against vLLM 0.32, `BNN` a case seen
elsewhere. A scenario runs on three schedulers: both of ours must pass it, and the specification's
literal algorithm must fail it, or the test would show nothing.
"""

import copy
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_fakes import (
    BLOCK,
    Engine,
    SchedulerFactory,
    SpecLiteralScheduler,
    counting_queue_access,
    full_attention_group,
    grammar_is_ready,
    make_request,
    num_free_blocks,
    wait_for_grammar,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from nxbucket.serve.policy import WaitReason
from nxbucket.serve.scheduler import NeuronAsyncScheduler, NeuronScheduler, SchedulerState
from nxbucket.serve.scheduler_output import NeuronSchedulerOutput

pytestmark = [pytest.mark.vllm]

OURS = [NeuronScheduler, NeuronAsyncScheduler]
Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> SchedulerFactory:
    return SchedulerFactory.in_folder(tmp_path_factory.mktemp("tiny-llama"))


def ours(
    factory: SchedulerFactory, cls: type[Scheduler] = NeuronScheduler, **kwargs: Any
) -> Engine:
    return Engine(factory.scheduler(cls, **kwargs))


def neuron(engine: Engine) -> NeuronScheduler:
    assert isinstance(engine.scheduler, NeuronScheduler)
    return engine.scheduler


def session(name: str, num_prompt: int = 20, max_tokens: int = 2) -> Request:
    request = make_request(name, num_prompt, max_tokens)
    request.resumable = True
    return request


# Scenarios: rows of the table of holes.


def row_02_priority_queue(build: Build) -> None:
    engine = build(scheduling_policy="priority")
    engine.add(*(make_request(f"p{p}", priority=p, max_tokens=1) for p in (5, 3, 9, 1)))
    engine.run_to_end()
    assert list(engine.generated) == ["p1", "p3", "p5", "p9"]


def row_03_grammar_at_the_head(build: Build) -> None:
    engine = build()
    engine.add(make_request("running"))
    engine.run(3)
    engine.add(wait_for_grammar(make_request("blocked")), make_request("plain"))
    assert "i" not in engine.run(8)
    assert engine.generated["plain"] > 1


def row_04_session_holds_blocks(build: Build) -> None:
    engine = build()
    engine.add(make_request("running"))
    engine.run(2)
    engine.add(session("s"))
    engine.run(6)
    assert len(engine.scheduler.kv_holding_waiting) == 1
    engine.add(session("s"))
    engine.run(6)
    assert engine.generated["s"] == 4


def row_05_null_block(build: Build) -> None:
    engine = build(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_blocks=16)
    engine.add(*(make_request(f"r{i}", 60, max_tokens=4) for i in range(4)))
    engine.run_to_end(60)


def row_06_short_prompts_grow(build: Build) -> None:
    engine = build(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_blocks=16)
    requests = [make_request(f"r{i}", 30, max_tokens=34) for i in range(4)]
    engine.add(*requests)
    engine.run_to_end(200)
    assert [r.num_preemptions for r in requests] == [0, 0, 0, 0]


def row_07_pause_for_new_requests(build: Build) -> None:
    engine = build()
    engine.add(make_request("running", max_tokens=5))
    engine.run(2)
    engine.add(make_request("waiting"))
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run(8)
    assert engine.finish_reasons == {"running": "length"}
    assert engine.scheduler.get_num_unfinished_requests() == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run(2)
    assert "waiting" in engine.rows[-2].tokens


def row_08_lora_slots(build: Build) -> None:
    engine = build(enable_lora=True, max_loras=1, max_lora_rank=8)
    for i in (1, 2):
        request = make_request(f"r{i}", max_tokens=4)
        request.lora_request = LoRARequest(f"adapter{i}", i, "folder")
        engine.add(request)
    engine.run_to_end(60)
    assert not any({"r1", "r2"} <= row.tokens.keys() for row in engine.rows)


def row_10_resumed_request(build: Build) -> None:
    engine = build(max_num_batched_tokens=64)
    engine.add(make_request("r", 20, max_tokens=400))
    engine.run(200)
    engine.drain()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run(8)
    resumed = engine.rows[200:]
    assert [row.letter for row in resumed] == list("ppppdddd")
    assert [len(row.tokens) for row in resumed] == [1] * 8
    assert {row.padded["r"] for row in resumed[:4]} == {64}


def row_11_active_seqs(build: Build) -> None:
    engine = build(max_num_active_seqs=2)
    engine.add(*(make_request(f"r{i}") for i in range(4)))
    engine.run(6)
    assert len(engine.scheduler.running) == 2


def row_12_paused_session_keeps_its_seat(build: Build) -> None:
    engine = build(max_num_seqs=2)
    engine.add(session("s"))
    engine.run(4)
    engine.add(make_request("a"), make_request("b"))
    engine.run(6)
    assert len(engine.scheduler.running) == 1


def row_13_admission_order(build: Build) -> None:
    engine = build()
    engine.add(*(make_request(f"r{i}") for i in range(4)))
    engine.run(5)
    assert [r.request_id for r in engine.scheduler.running] == ["r0", "r1", "r2", "r3"]


SCENARIOS = [
    row_02_priority_queue,
    row_03_grammar_at_the_head,
    row_04_session_holds_blocks,
    row_05_null_block,
    row_06_short_prompts_grow,
    row_07_pause_for_new_requests,
    row_08_lora_slots,
    row_10_resumed_request,
    row_11_active_seqs,
    row_12_paused_session_keeps_its_seat,
    row_13_admission_order,
]
# Passed by the literal algorithm, because the fake spells the queue methods as 0.32 does.
LITERAL_PASSES = {row_02_priority_queue}


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_hole_is_closed(
    factory: SchedulerFactory, scenario: Callable[[Build], None], cls: type[Scheduler]
) -> None:
    scenario(lambda **kwargs: ours(factory, cls, **kwargs))


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s not in LITERAL_PASSES])
def test_the_specifications_own_algorithm_has_the_hole(
    factory: SchedulerFactory, scenario: Callable[[Build], None]
) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        scenario(lambda **kwargs: ours(factory, SpecLiteralScheduler, **kwargs))


@pytest.mark.parametrize(("cap", "tokens"), [(None, 4), (4, 8), (0, 0)])
def test_row_09_a_stream_of_prefills_lets_decodes_through_at_the_cap(
    factory: SchedulerFactory, cap: int | None, tokens: int
) -> None:
    config = {} if cap is None else {"nxbucket": {"max_consecutive_prefills": cap}}
    engine = ours(factory, additional_config=config)
    engine.add(make_request("victim"))
    engine.run(2)
    before = engine.generated["victim"]
    engine.add(*(make_request(f"r{i}", max_tokens=1) for i in range(60)))
    engine.run(40)
    assert engine.generated["victim"] - before == tokens


def test_row_09_holds_inside_one_long_prompt(factory: SchedulerFactory) -> None:
    engine = ours(
        factory,
        max_num_batched_tokens=64,
        additional_config={"nxbucket": {"max_consecutive_prefills": 2}},
    )
    engine.add(make_request("a"))
    engine.run(2)
    engine.add(make_request("long", 64 * 6))
    assert engine.run(10) == "ppdppdppdd"
    assert [r.request_id for r in engine.scheduler.running] == ["a", "long"]


def test_row_15_blocks_of_waiting_sessions_are_counted(factory: SchedulerFactory) -> None:
    engine = ours(factory, max_model_len=128, max_num_batched_tokens=128, num_blocks=17)
    engine.add(session("s", 100, 4))
    engine.run(5)
    engine.add(make_request("a", 100, 28), make_request("b", 100, 28))
    engine.run(10)
    assert [r.request_id for r in engine.scheduler.running] == ["a"]
    assert str(neuron(engine).stats.head_wait) == "waits for 8 KV blocks, 1 not reserved"
    engine.abort("s")
    engine.run_to_end()
    assert engine.generated["b"] == 28


def test_two_sessions_that_both_hold_blocks_do_not_wait_for_each_other(
    factory: SchedulerFactory,
) -> None:
    engine = ours(factory, max_model_len=256, max_num_batched_tokens=256, num_blocks=17)
    for name in ("s1", "s2"):
        engine.add(session(name, 100, 2))
        engine.run(4)
    engine.add(session("s1", 20, 120), session("s2", 20, 120))
    engine.run(4)
    assert engine.generated["s1"] > 2


def test_row_16_the_default_buckets_hold_every_chunk(factory: SchedulerFactory) -> None:
    engine = ours(factory, max_num_batched_tokens=6000, max_model_len=8192, max_num_seqs=6)
    assert neuron(engine).num_batched_tokens_buckets == (128, 256, 512, 1024, 2048, 4096, 6000)
    assert neuron(engine).num_seqs_buckets == (1, 2, 4, 6)
    engine.add(make_request("r", 5000))
    assert engine.step().padded == {"r": 6000}


# Refused at start.


def refused(
    factory: SchedulerFactory, cls: type[Scheduler] = NeuronScheduler, **kwargs: Any
) -> str:
    with pytest.raises(ValueError) as error:
        factory.scheduler(cls, **kwargs)
    return str(error.value)


def test_row_14_kv_cache_below_one_request_is_refused(factory: SchedulerFactory) -> None:
    message = refused(factory, max_model_len=1024, num_blocks=64)
    assert message == (
        "the KV cache has 64 blocks of 16 tokens, one request of max_model_len=1024 needs 65 (one "
        "is vLLM's null block): raise num_gpu_blocks_override or lower max_model_len"
    )
    assert neuron(ours(factory, max_model_len=1024, num_blocks=65))._max_kv_concurrent == 1


def test_row_17_b54_long_prefill_threshold_is_refused(factory: SchedulerFactory) -> None:
    message = refused(factory, long_prefill_token_threshold=128)
    assert message.startswith(
        "long_prefill_token_threshold has no effect with one prefill per step"
    )


@pytest.mark.parametrize(
    ("neuron_config", "message"),
    [
        (
            {"num_batched_tokens_buckets": [128, 256]},
            "the last of num_batched_tokens_buckets must be 512 (the smaller of "
            "max_num_batched_tokens and max_model_len), is 256",
        ),
        (
            {"num_seqs_buckets": [1, 2]},
            "the last of num_seqs_buckets must be 4 (max_num_seqs), is 2",
        ),
        ({"num_seqs_buckets": [4, 1]}, "num_seqs_buckets must ascend without repeats, is [4, 1]"),
    ],
)
def test_buckets_are_checked_again(
    factory: SchedulerFactory, neuron_config: dict[str, Any], message: str
) -> None:
    assert refused(factory, additional_config={"neuron_config": neuron_config}) == message


@pytest.mark.parametrize("cap", [-1, 1.5, True, "8"])
def test_a_cap_that_is_no_count_is_refused(factory: SchedulerFactory, cap: object) -> None:
    message = refused(factory, additional_config={"nxbucket": {"max_consecutive_prefills": cap}})
    assert message == f"max_consecutive_prefills must be 0 (no limit) or more, is {cap!r}"


@pytest.mark.parametrize(
    ("cls", "is_async", "message"),
    [
        (NeuronScheduler, True, "async_scheduling is on, which needs NeuronAsyncScheduler"),
        (NeuronAsyncScheduler, False, "async_scheduling is off, which needs NeuronScheduler"),
    ],
)
def test_the_class_must_match_the_async_flag(
    factory: SchedulerFactory, cls: type[Scheduler], is_async: bool, message: str
) -> None:
    assert refused(factory, cls, is_async=is_async) == message


def test_only_one_group_of_full_attention_is_served(factory: SchedulerFactory) -> None:
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=64
    )
    hybrid = [full_attention_group(), KVCacheGroupSpec(["w"], window)]
    expected = "the model must have one KV cache group with full attention, has "
    assert refused(factory, kv_groups=hybrid) == expected + "FullAttentionSpec, SlidingWindowSpec"
    assert refused(factory, kv_groups=hybrid[1:]) == expected + "SlidingWindowSpec"
    assert refused(factory, kv_groups=[]) == expected + "none"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("speculative_config", "speculative decoding is not supported: remove speculative_config"),
        (
            "kv_transfer_config",
            "KV and encoder-cache connectors are not supported: remove the transfer config",
        ),
        (
            "ec_transfer_config",
            "KV and encoder-cache connectors are not supported: remove the transfer config",
        ),
    ],
)
def test_what_is_not_built_is_refused(factory: SchedulerFactory, field: str, message: str) -> None:
    config = copy.copy(factory.config())
    object.__setattr__(config, field, object())
    assert refused(factory, config=config) == message


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("is_encoder_decoder", "encoder-decoder models are not supported"),
        (
            "supports_multimodal_inputs",
            "multimodal inputs are not supported: set limit_mm_per_prompt to 0 for every modality",
        ),
    ],
)
def test_encoders_are_refused(factory: SchedulerFactory, field: str, message: str) -> None:
    model = SimpleNamespace(
        max_model_len=1024,
        is_encoder_decoder=False,
        supports_multimodal_inputs=False,
        skip_tokenizer_init=True,
    )
    setattr(model, field, True)
    config = copy.copy(factory.config())
    object.__setattr__(config, "model_config", model)
    assert refused(factory, config=config) == message


def test_all_problems_are_named_at_once(factory: SchedulerFactory) -> None:
    message = refused(factory, NeuronScheduler, is_async=True, num_blocks=2)
    assert message.count("; ") == 1
    assert "async_scheduling is on" in message
    assert "needs 65" in message


def test_b23_without_chunked_prefill_a_prompt_above_the_budget_is_refused_by_vllm(
    factory: SchedulerFactory,
) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        factory.config(enable_chunked_prefill=False, max_num_batched_tokens=512, max_model_len=1024)


def test_b26_a_budget_above_max_model_len_is_cut_to_it(factory: SchedulerFactory) -> None:
    buckets = [128, 512, 1024]
    engine = ours(
        factory,
        max_model_len=1024,
        max_num_batched_tokens=8192,
        max_num_seqs=2,
        additional_config={"neuron_config": {"num_batched_tokens_buckets": buckets}},
    )
    engine.add(make_request("r", 1000, 5))
    assert engine.step().padded == {"r": 1024}


# The specification's own promises.


def test_a_trace_of_chunks_and_decodes(factory: SchedulerFactory) -> None:
    engine = ours(
        factory,
        additional_config={"neuron_config": {"num_batched_tokens_buckets": [128, 256, 512]}},
    )
    engine.add(make_request("a", 600, 3), make_request("b", 20, 3), make_request("c", 1, 1))
    assert engine.run_to_end() == "ppppddi"
    rows = [(row.letter, row.tokens, row.padded) for row in engine.rows]
    assert rows == [
        ("p", {"a": 512}, {"a": 512}),
        ("p", {"a": 88}, {"a": 128}),
        ("p", {"b": 20}, {"b": 128}),
        ("p", {"c": 1}, {"c": 128}),
        ("d", {"a": 1, "b": 1}, {"a": 1, "b": 1}),
        ("d", {"a": 1, "b": 1}, {"a": 1, "b": 1}),
        ("i", {}, {}),
    ]
    assert neuron(engine).total_padding_tokens == 40 + 108 + 127
    assert engine.generated == {"a": 3, "b": 3, "c": 1}


def test_states_follow_the_steps(factory: SchedulerFactory) -> None:
    engine = ours(factory)
    states = [neuron(engine).state]
    engine.add(make_request("a", 600, 2))
    while engine.scheduler.has_requests():
        engine.step()
        states.append(neuron(engine).state)
    prefill, decode = SchedulerState.ACTIVE_PREFILL, SchedulerState.ACTIVE_DECODE
    assert states == [SchedulerState.IDLE, prefill, prefill, decode, SchedulerState.IDLE]


def test_the_names_of_the_specification_answer(factory: SchedulerFactory) -> None:
    engine = ours(factory, max_num_seqs=2)
    scheduler = neuron(engine)
    requests = [make_request(f"r{i}", 600) for i in range(4)]
    engine.add(*requests)
    assert scheduler.can_schedule(requests[0])
    engine.run(1)
    assert scheduler.has_prefill_in_running
    assert not scheduler.can_schedule(requests[1])
    assert list(scheduler.holdback_queue) == requests[1:]
    engine.run(3)
    assert scheduler.at_capacity
    assert not scheduler.can_schedule(requests[2])
    assert scheduler.stats.head_wait is not None
    assert scheduler.stats.head_wait.reason is WaitReason.SEATS
    assert scheduler.stats.num_held_back == 2
    assert scheduler.max_prefills_per_batch == 1


def test_the_output_reaches_a_worker_process_whole(factory: SchedulerFactory) -> None:
    engine = ours(factory)
    engine.add(make_request("a", 20))
    output = pickle.loads(pickle.dumps(engine.scheduler.schedule(False), protocol=5))
    assert isinstance(output, NeuronSchedulerOutput)
    assert (output.phase, output.num_scheduled_tokens_padded) == ("prefill", {"a": 128})
    assert output.num_scheduled_tokens == {"a": 20}


@pytest.mark.parametrize("cls", OURS)
def test_queues_are_whole_again_when_vllm_raises(
    factory: SchedulerFactory, cls: type[NeuronScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ours(factory, cls)
    engine.add(make_request("a"), make_request("b"))
    engine.run(3)
    engine.add(wait_for_grammar(make_request("blocked")), make_request("c"), make_request("d"))

    def fail(self: object, throttle: bool) -> SchedulerOutput:
        raise RuntimeError("from vLLM")

    monkeypatch.setattr(cls, "_call_base_schedule", fail)
    with pytest.raises(RuntimeError, match="from vLLM"):
        engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["a", "b"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["blocked", "c", "d"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_decode_step_touches_a_long_queue_only_at_its_head(
    factory: SchedulerFactory, policy: str
) -> None:
    engine = ours(factory, max_num_seqs=4, num_blocks=80, scheduling_policy=policy)
    engine.add(make_request("a", 20, 900))
    engine.run(1)
    engine.add(*(make_request(f"r{i}", 20, 900) for i in range(10_000)))
    with counting_queue_access(engine.scheduler) as counts:
        assert engine.run(20) == "d" * 20
    # The head is asked once a step whether it fits, and put back.
    assert counts == {"pop": 20, "iter": 0, "prepend": 20}


def test_vllm_is_called_once_per_step(factory: SchedulerFactory) -> None:
    engine = ours(factory)
    engine.add(*(make_request(f"r{i}", 600, 5) for i in range(3)))
    engine.run_to_end()
    assert engine.scheduler.current_step == len(engine.rows)


# Token ids that need not be sent again (sync).


def sent_again(engine: Engine) -> set[str]:
    output = engine.scheduler.schedule(False)
    return set(output.scheduled_cached_reqs.all_token_ids)


@pytest.mark.parametrize(("cls", "sent"), [(NeuronScheduler, set()), (NeuronAsyncScheduler, {"a"})])
def test_a_phase_switch_sends_token_ids_again_only_when_async(
    factory: SchedulerFactory, cls: type[Scheduler], sent: set[str]
) -> None:
    engine = ours(factory, cls)
    engine.add(make_request("a"))
    engine.run(3)
    engine.add(make_request("b"))
    assert engine.run(1) == "p"
    assert sent_again(engine) == sent


def test_a_resumed_request_gets_its_token_ids(factory: SchedulerFactory) -> None:
    engine = ours(factory)
    engine.add(make_request("a"), make_request("b"))
    engine.run(4)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    first = engine.scheduler.schedule(False)
    assert first.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert set(first.scheduled_cached_reqs.all_token_ids) == {"a"}


# Cases.


@pytest.mark.parametrize("cls", OURS)
def test_b31_one_token_requests_take_no_decode_step(
    factory: SchedulerFactory, cls: type[Scheduler]
) -> None:
    engine = ours(factory, cls)
    free = num_free_blocks(engine.scheduler)
    engine.add(*(make_request(f"r{i}", 50, max_tokens=1) for i in range(100)))
    assert "d" not in engine.run_to_end()
    assert set(engine.generated.values()) == {1}
    assert len(engine.generated) == 100
    assert num_free_blocks(engine.scheduler) == free


def cached_at_admission(engine: Engine, name: str) -> int:
    return next(row.cached[name] for row in engine.rows if name in row.tokens)


def test_b33_the_hash_chain_survives_a_full_hit(factory: SchedulerFactory) -> None:
    engine = ours(factory, enable_prefix_caching=True)
    tokens = list(range(3, 3 + 192))
    for name, length in (("p1", 128), ("p2", 128), ("p3", 192), ("p4", 192)):
        engine.add(make_request(name, max_tokens=2, prompt=tokens[:length]))
        engine.run_to_end()
    hits = [cached_at_admission(engine, name) for name in ("p1", "p2", "p3", "p4")]
    assert hits[0] == 0
    assert [hit >= want for hit, want in zip(hits[1:], (96, 96, 160), strict=True)] == [True] * 3


def test_b34_hits_are_counted_at_admission_not_on_arrival(factory: SchedulerFactory) -> None:
    engine = ours(
        factory,
        enable_prefix_caching=True,
        max_num_seqs=1,
        max_model_len=128,
        max_num_batched_tokens=128,
        num_blocks=9,
    )
    prefix = list(range(3, 99))
    engine.add(make_request("a", max_tokens=1, prompt=prefix))
    engine.run_to_end()
    engine.add(make_request("b", 100, 28), make_request("c", max_tokens=1, prompt=prefix))
    engine.run_to_end()
    assert cached_at_admission(engine, "c") == 0


def test_b35_chunks_still_to_be_computed_are_no_hit(factory: SchedulerFactory) -> None:
    engine = ours(factory, enable_prefix_caching=True, max_num_batched_tokens=256)
    prefix = list(range(3, 3 + 600))
    engine.add(
        make_request("a", max_tokens=2, prompt=[*prefix, *[900] * 10]),
        make_request("b", max_tokens=2, prompt=[*prefix, *[901] * 10]),
    )
    engine.run_to_end()
    first = next(i for i, row in enumerate(engine.rows) if "b" in row.tokens)
    computed = sum(row.tokens.get("a", 0) for row in engine.rows[:first])
    assert computed == 610
    assert cached_at_admission(engine, "b") == 592  # the full blocks of the shared 600


def test_b36_the_bucket_is_chosen_after_the_hit(factory: SchedulerFactory) -> None:
    engine = ours(factory, enable_prefix_caching=True)
    shared, tail = list(range(3, 259)), list(range(300, 509))
    engine.add(make_request("a", max_tokens=1, prompt=[*shared, *[999] * 209]))
    engine.run_to_end()
    engine.add(make_request("b", max_tokens=1, prompt=[*shared, *tail]))
    row = engine.step()
    assert (row.cached, row.tokens, row.padded) == ({"b": 256}, {"b": 209}, {"b": 256})


def test_b29_padding_is_never_negative(factory: SchedulerFactory) -> None:
    engine = ours(
        factory,
        max_num_batched_tokens=256,
        additional_config={"neuron_config": {"num_batched_tokens_buckets": [128, 256]}},
    )
    engine.add(*(make_request(f"r{n}", n, 1) for n in range(1, 301)))
    engine.run_to_end()
    assert all(row.padded[n] >= row.tokens[n] for row in engine.rows for n in row.tokens)
    assert {size for row in engine.rows for size in row.padded.values()} == {128, 256}


@pytest.mark.parametrize("cls", OURS)
def test_b41_a_grammar_that_fails_ends_only_its_request(
    factory: SchedulerFactory, cls: type[Scheduler]
) -> None:
    engine = ours(factory, cls)
    bad = wait_for_grammar(make_request("bad"))
    grammar_is_ready(bad, ValueError("no such rule"))
    engine.add(bad, make_request("good", max_tokens=5))
    engine.run_to_end()
    assert engine.finish_reasons == {"bad": "error", "good": "length"}


def test_b42_a_structured_head_and_three_plain_requests_all_finish(
    factory: SchedulerFactory,
) -> None:
    engine = ours(factory)
    head = wait_for_grammar(make_request("head", max_tokens=3))
    engine.add(head, *(make_request(f"r{i}", max_tokens=3) for i in range(3)))
    engine.run(2)
    grammar_is_ready(head)
    engine.run_to_end()
    assert engine.generated == {"head": 3, "r0": 3, "r1": 3, "r2": 3}


def test_b43_aborted_structured_requests_give_their_seats_back(
    factory: SchedulerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ours(factory)
    names = [f"slow{i}" for i in range(4)]
    engine.add(*(wait_for_grammar(make_request(name)) for name in names))
    with caplog.at_level(logging.WARNING, logger="nxbucket.serve.scheduler"):
        assert engine.run(3) == "iii"
    stall = "head request slow0 waits for its grammar or its input"
    assert neuron(engine).stall_reason == stall
    assert [r.getMessage() for r in caplog.records] == [
        f"nothing runs and 4 requests wait: {stall}"
    ]
    engine.add(*(make_request(f"plain{i}", max_tokens=3) for i in range(4)))
    engine.run(1)
    assert neuron(engine).stall_reason is None
    engine.abort(*names)
    engine.run_to_end()
    assert engine.generated == {f"plain{i}": 3 for i in range(4)}


def test_b45_a_head_that_is_not_ready_keeps_its_place(factory: SchedulerFactory) -> None:
    engine = ours(factory)
    head = wait_for_grammar(make_request("head"))
    engine.add(head, *(make_request(f"r{i}", max_tokens=3) for i in range(5)))
    engine.run(2)
    grammar_is_ready(head)
    engine.run(1)
    admitted = [next(iter(row.tokens)) for row in engine.rows]
    assert admitted == ["r0", "r1", "head"]


def test_a_ready_request_behind_many_blocked_ones_is_found(factory: SchedulerFactory) -> None:
    engine = ours(factory)
    engine.add(make_request("running"))
    engine.run(1)
    engine.add(*(wait_for_grammar(make_request(f"slow{i}")) for i in range(200)))
    engine.add(make_request("plain"), make_request("next"))
    letters = engine.run(6)
    # Steps that see only blocked requests (32, 64 and 128 of them) decode.
    assert letters == "dddppd"
    assert [r.request_id for r in engine.scheduler.waiting] == [f"slow{i}" for i in range(200)]


def test_b47_an_urgent_request_goes_before_those_that_wait_not_those_that_run(
    factory: SchedulerFactory,
) -> None:
    engine = ours(factory, max_num_seqs=2, scheduling_policy="priority")
    engine.add(*(make_request(f"low{i}", max_tokens=30, priority=10) for i in range(3)))
    engine.run(2)
    engine.add(make_request("urgent", max_tokens=5, priority=-1))
    engine.run(10)
    assert {r.request_id for r in engine.scheduler.running} == {"low0", "low1"}
    engine.run_to_end()
    assert list(engine.generated) == ["low0", "low1", "urgent", "low2"]


def test_b48_preempted_requests_go_before_later_arrivals(factory: SchedulerFactory) -> None:
    engine = ours(factory, max_model_len=128, max_num_batched_tokens=128, num_blocks=17)
    requests = [make_request(f"r{i}", 60, 68) for i in range(4)]
    engine.add(*requests)
    engine.run(10)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.add(*(make_request(f"new{i}", 5, 5) for i in range(20)))
    engine.run_to_end()
    finished = [name for name in engine.finish_reasons if name.startswith("r")]
    assert finished == ["r0", "r1", "r2", "r3"]
    assert [r.num_preemptions for r in requests] == [1, 1, 0, 0]


def test_b57_a_large_head_is_not_starved_and_says_what_it_waits_for(
    factory: SchedulerFactory,
) -> None:
    engine = ours(factory, max_num_seqs=8, num_blocks=66)
    engine.add(make_request("running", 400, 100))
    engine.run(2)
    engine.add(make_request("large", 600, 40))
    engine.add(*(make_request(f"small{i}", 5, 5) for i in range(5)))
    engine.run(5)
    assert str(neuron(engine).stats.head_wait) == "waits for 40 KV blocks, 33 not reserved"
    engine.run_to_end()
    assert list(engine.generated)[:2] == ["running", "large"]
    assert len(engine.generated) == 7


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_is_no_stall(factory: SchedulerFactory, state: PauseState) -> None:
    engine = ours(factory)
    engine.add(make_request("a"))
    engine.scheduler.set_pause_state(state)
    assert engine.run(3) == "iii"
    assert neuron(engine).stall_reason is None
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.run(2) == "pd"


def test_an_abort_between_chunks_leaves_nothing_behind(factory: SchedulerFactory) -> None:
    engine = ours(factory)
    free = num_free_blocks(engine.scheduler)
    engine.add(make_request("a", 900), make_request("b", 20, 2))
    engine.run(1)
    engine.abort("a")
    assert engine.run_to_end() == "pdi"
    assert num_free_blocks(engine.scheduler) == free


def test_padding_is_logged_at_most_every_ten_seconds_and_only_after_traffic(
    factory: SchedulerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ours(factory)
    scheduler = neuron(engine)
    now = scheduler._clock()
    scheduler._clock = lambda: now
    engine.add(make_request("a", 20, 50))
    with caplog.at_level(logging.INFO, logger="nxbucket.serve.scheduler"):
        engine.run(5)
        now += 10
        engine.run(5)
        now += 9
        engine.run(1)
        engine.abort("a")
        now += 30
        engine.run(2)
        now += 30
        engine.run(2)
    assert [record.getMessage() for record in caplog.records] == [
        "padding since start: prefill 20 tokens + 108 padding (84.4%), buckets 128:1 256:0 512:0; "
        "decode 5 rows + 0 padding (0.0%), buckets 1:5 2:0 4:0; 0 requests held back",
        "padding since start: prefill 20 tokens + 108 padding (84.4%), buckets 128:1 256:0 512:0; "
        "decode 10 rows + 0 padding (0.0%), buckets 1:10 2:0 4:0; 0 requests held back",
    ]


def test_priority_preempts_nobody_when_blocks_are_short(factory: SchedulerFactory) -> None:
    engine = ours(
        factory,
        max_model_len=64,
        max_num_batched_tokens=64,
        num_blocks=9,
        scheduling_policy="priority",
    )
    requests = [make_request(f"r{i}", 30, 34, priority=-i) for i in range(4)]
    engine.add(*requests)
    engine.run_to_end()
    assert [r.num_preemptions for r in requests] == [0] * 4
    assert all(r.status == RequestStatus.FINISHED_LENGTH_CAPPED for r in requests)
