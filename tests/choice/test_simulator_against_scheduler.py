"""The simulator decides as the real `NeuronScheduler` does, step by step, on the same arrivals."""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import serve_fakes
from serve_fakes import BLOCK, Engine, SchedulerFactory
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from nxbucket.serve.policy import Decision
from nxbucket.serve.scheduler import NeuronScheduler
from nxbucket.toolkit.choice.replay import Deployment, Replay
from nxbucket.toolkit.choice.step_times import NS_PER_S, StepTimes
from nxbucket.toolkit.choice.trace import Trace

pytestmark = [pytest.mark.vllm]

END = 8
"""A token that ends an answer before the client's max_tokens."""
TIMES = StepTimes(
    prefill_s=lambda tokens: 0.001 * tokens,
    decode_s=lambda seqs: 0.010 + 0.001 * seqs,
    source="the test",
)


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> SchedulerFactory:
    return SchedulerFactory.in_folder(tmp_path_factory.mktemp("tiny-llama"))


@dataclass(frozen=True)
class Case:
    """`gap_s`: between arrivals, on average. `num_blocks` below what all seats may need makes the
    KV admission refuse."""

    seed: int
    gap_s: float
    num_seqs: int
    num_blocks: int
    max_consecutive_prefills: int
    is_asked_for_more: bool


CASES = [
    Case(1, 0.20, 4, 20_000, 8, is_asked_for_more=False),
    Case(2, 0.02, 8, 20_000, 2, is_asked_for_more=False),
    Case(3, 0.05, 8, 40, 8, is_asked_for_more=True),
    Case(4, 0.10, 6, 33, 0, is_asked_for_more=True),
    Case(5, 0.60, 3, 25, 1, is_asked_for_more=True),
]
MAX_MODEL_LEN = 256
PREFILL_BUCKETS = (16, 32, 64)
STEPS_PER_CASE = 2_500


def trace_of(case: Case, num_requests: int = 1_500) -> Trace:
    rng = random.Random(case.seed)
    arrival, arrivals = 0.0, []
    for _ in range(num_requests):
        # Bursts: some come in the very same moment, some just behind.
        arrival += rng.choice([0.0, 0.003, rng.expovariate(1 / case.gap_s)])
        arrivals.append(round(arrival, 6))
    prompts = [rng.randint(1, rng.choice([20, 100, MAX_MODEL_LEN])) for _ in arrivals]
    outputs = [rng.randint(1, rng.choice([2, 10, 60])) for _ in arrivals]
    more = [output + rng.choice([0, 1, 30, 500]) for output in outputs]
    return Trace(
        "random",
        array("i", prompts),
        array("i", outputs),
        array("d", arrivals),
        max_tokens=array("i", more) if case.is_asked_for_more else None,
    )


@dataclass(frozen=True)
class Ran:
    phase: str
    tokens: dict[str, int]
    bucket: int


def simulated(trace: Trace, deployment: Deployment) -> Iterator[tuple[int, Ran]]:
    """(when, what) of every step that computes something."""
    for step in Replay(trace, deployment, TIMES).steps():
        if step.decision is Decision.IDLE:
            continue
        is_decode = step.decision is Decision.DECODE
        for i in range(step.repeats):
            tokens = {f"r{row}": 1 if is_decode else step.real for row in step.requests}
            ran = Ran("decode" if is_decode else "prefill", tokens, step.bucket)
            yield step.start_ns + i * step.duration_ns, ran


def make_request(trace: Trace, row: int) -> Request:
    assert trace.output_tokens is not None
    output = trace.output_tokens[row]
    asked = output if trace.max_tokens is None else trace.max_tokens[row]
    params = SamplingParams(temperature=0, max_tokens=asked, stop_token_ids=[END], ignore_eos=True)
    return Request(
        request_id=f"r{row}",
        prompt_token_ids=[10 + (row * 31 + i) % 900 for i in range(trace.prompt_tokens[row])],
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class EndingEngine(Engine):
    """Answers end at the trace's length, by a stop token where the client allowed more."""

    def __init__(self, scheduler: Scheduler, trace: Trace) -> None:
        super().__init__(scheduler)
        self.trace = trace

    def sample(self, scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
        made = SAMPLE(scheduler, output)
        assert self.trace.output_tokens is not None
        for name, tokens in zip(made.req_ids, made.sampled_token_ids, strict=True):
            request = scheduler.requests[name]
            if tokens and request.num_output_tokens + 1 == self.trace.output_tokens[int(name[1:])]:
                tokens[:] = [END]
        return made


SAMPLE = serve_fakes._sample


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_the_same_steps_in_the_same_order(
    case: Case, factory: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_buckets = tuple(sorted({1, 2, case.num_seqs}))
    config = factory.config(
        max_num_seqs=case.num_seqs,
        max_num_batched_tokens=PREFILL_BUCKETS[-1],
        max_model_len=MAX_MODEL_LEN,
    )
    config.additional_config = {
        "neuron_config": {
            "num_batched_tokens_buckets": list(PREFILL_BUCKETS),
            "num_seqs_buckets": list(decode_buckets),
        },
        "nxbucket": {"max_consecutive_prefills": case.max_consecutive_prefills},
    }
    scheduler = factory.scheduler(NeuronScheduler, num_blocks=case.num_blocks, config=config)
    assert isinstance(scheduler, NeuronScheduler)
    trace = trace_of(case)
    assert trace.arrival_s is not None
    engine = EndingEngine(scheduler, trace)
    monkeypatch.setattr(serve_fakes, "_sample", engine.sample)
    deployment = Deployment(
        name="the same",
        prefill_buckets=PREFILL_BUCKETS,
        decode_buckets=decode_buckets,
        max_num_seqs=case.num_seqs,
        max_num_batched_tokens=PREFILL_BUCKETS[-1],
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        num_kv_blocks=case.num_blocks,
        max_consecutive_prefills=case.max_consecutive_prefills,
    )

    waits: set[str] = set()
    now_ns = next_row = num_steps = 0
    for at_ns, expected in simulated(trace, deployment):
        # The clock is the scheduler's: it goes on by what it has just run, and jumps when idle.
        if not scheduler.has_unfinished_requests():
            while trace.prompt_tokens[next_row] >= MAX_MODEL_LEN:
                next_row += 1
            now_ns = max(now_ns, round(trace.arrival_s[next_row] * NS_PER_S))
        while next_row < len(trace) and round(trace.arrival_s[next_row] * NS_PER_S) <= now_ns:
            if trace.prompt_tokens[next_row] < MAX_MODEL_LEN:
                engine.add(make_request(trace, next_row))
            next_row += 1
        row = engine.step()
        size = next(iter(row.padded.values())) if row.phase == "prefill" else 0
        if row.phase == "decode":
            size = next(b for b in decode_buckets if b >= len(row.tokens))
        assert (now_ns, Ran(row.phase, row.tokens, size)) == (at_ns, expected), f"step {num_steps}"
        seconds = TIMES.prefill_s(size) if row.phase == "prefill" else TIMES.decode_s(size)
        now_ns += round(seconds * NS_PER_S)
        num_steps += 1
        if (wait := scheduler.stats.head_wait) is not None:
            waits.add(wait.reason.value)
        if num_steps == STEPS_PER_CASE:
            break
    assert num_steps == STEPS_PER_CASE, "the trace is too short"
    if case.num_blocks < 100:
        assert "kv_blocks" in waits, "the case does not test KV admission"
