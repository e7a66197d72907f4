"""What a server would do with a trace: the scheduler's own policy, on a clock that costs nothing.

`Replay` makes the decisions with the functions of `nxbucket.serve.policy`, as `NeuronScheduler`
does (sync; async scheduling frees a seat one step later), and takes each step's time from
`StepTimes`. Time is in whole nanoseconds, so the same input gives the same output everywhere.

A run of decode steps in which nothing can change (no request ends, none comes that could be
admitted) is taken in one go: the decision is the same for each of them.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nxbucket.serve.policy import (
    Decision,
    Limits,
    PaddingStats,
    RunState,
    decide,
    has_next_token,
    is_prefill,
    prefills_in_a_row,
    refuse_admission,
)
from nxbucket.toolkit.buckets import get_bucket_for_count
from nxbucket.toolkit.choice.step_times import StepTimes
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.errors import TraceError
from nxbucket.toolkit.spec import DeploySpec

NS = 1_000_000_000
DEFAULT_MAX_CONSECUTIVE_PREFILLS = 8
"""The scheduler's own (serve/scheduler_checks.py, which cannot be imported without vLLM)."""


@dataclass(frozen=True)
class Deployment:
    """What of a server decides which steps it takes. `num_kv_blocks` includes the null block."""

    name: str
    prefill_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    enable_prefix_caching: bool = True
    max_consecutive_prefills: int = DEFAULT_MAX_CONSECUTIVE_PREFILLS

    @classmethod
    def of(cls, spec: DeploySpec, name: str) -> "Deployment":
        neuron = spec.neuron_config
        return cls(
            name=name,
            prefill_buckets=neuron.num_batched_tokens_buckets,
            decode_buckets=neuron.num_seqs_buckets,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.effective_max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            block_size=spec.block_size,
            num_kv_blocks=spec.num_kv_blocks,
            enable_prefix_caching=spec.enable_prefix_caching,
        )


@dataclass(slots=True, eq=False)
class _Request:
    """What the policy reads of a request, and where its answer ends."""

    index: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    max_tokens: int
    last_token: int
    """`num_tokens` when the request is done."""
    num_output_placeholders: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """`times` equal steps, one after the other."""

    decision: Decision
    start_ns: int
    duration_ns: int
    """Of each."""
    times: int
    bucket: int
    """0 for an idle step, which lasts until the next request comes."""
    count: int
    """Tokens of a prefill, sequences of a decode."""
    requests: tuple[int, ...]
    """Rows of the trace."""
    finished: tuple[int, ...]
    """Those that end with the last of these steps."""
    num_waiting: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.times * self.duration_ns


class Replay:
    """The steps of one server, one trace. `refused` counts prompts that leave no room to answer."""

    def __init__(self, trace: Trace, deployment: Deployment, times: StepTimes) -> None:
        if trace.arrival_s is None or trace.output_tokens is None:
            missing = "arrival times" if trace.arrival_s is None else "output lengths"
            raise TraceError(
                f"{trace.name} has no {missing}: it cannot be replayed",
                hint="add a column arrival_s (seconds), and output_tokens",
            )
        self.refused = 0
        self._trace = trace
        self._arrival_s, self._output_tokens = trace.arrival_s, trace.output_tokens
        self._deployment = deployment
        self._limits = Limits(
            max_num_active_reqs=deployment.max_num_seqs,
            num_blocks=deployment.num_kv_blocks,
            block_size=deployment.block_size,
            max_model_len=deployment.max_model_len,
        )
        self._prefill_ns = {b: round(times.prefill_s(b) * NS) for b in deployment.prefill_buckets}
        self._decode_ns = {b: round(times.decode_s(b) * NS) for b in deployment.decode_buckets}
        self._now_ns = 0
        self._next_row = 0
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._num_prefills_in_a_row = 0
        self._admission_was_asked = False

    def steps(self) -> Iterator[Step]:
        """Until the last request is done."""
        while True:
            self._arrivals()
            if not self._running and not self._waiting:
                if self._next_row >= len(self._trace):
                    return
                yield self._idle()
                continue
            self._admission_was_asked = False
            prefilling = next((r for r in self._running if is_prefill(r)), None)
            state = RunState(
                has_prefill=prefilling is not None,
                has_decode=any(self._decodes(request) for request in self._running),
                num_prefills_in_a_row=self._num_prefills_in_a_row,
                max_consecutive_prefills=self._deployment.max_consecutive_prefills,
            )
            decision = decide(state, self._may_admit)
            self._num_prefills_in_a_row = prefills_in_a_row(state, decision, ran=True)
            if decision is Decision.ADMIT:
                prefilling = self._waiting.popleft()
                self._running.append(prefilling)
            if decision is Decision.DECODE:
                yield self._decode()
            elif prefilling is not None:
                yield self._prefill(decision, prefilling)
            else:
                raise AssertionError("a request waits, none runs, and none may be admitted")

    def _decodes(self, request: _Request) -> bool:
        return not is_prefill(request) and has_next_token(request, self._limits.max_model_len)

    def _may_admit(self) -> bool:
        self._admission_was_asked = True
        return (
            bool(self._waiting)
            and refuse_admission(self._limits, self._waiting[0], self._running) is None
        )

    def _arrivals(self) -> None:
        while (
            self._next_row < len(self._trace) and self._arrival_ns(self._next_row) <= self._now_ns
        ):
            request = self._request(self._next_row)
            if request is None:
                self.refused += 1
            else:
                self._waiting.append(request)
            self._next_row += 1

    def _arrival_ns(self, row: int) -> int:
        return round(self._arrival_s[row] * NS)

    def _request(self, row: int) -> _Request | None:
        """As the server admits it: a prompt must leave room for one token."""
        trace, limits = self._trace, self._limits
        prompt = trace.prompt_tokens[row]
        if prompt >= limits.max_model_len:
            return None
        output = max(1, self._output_tokens[row])
        cached = 0
        if trace.cached_tokens is not None and self._deployment.enable_prefix_caching:
            # Whole blocks, and never all of the prompt: its last token must be computed.
            cached = min(trace.cached_tokens[row], prompt - 1) // limits.block_size
            cached *= limits.block_size
        allowed = output if trace.max_tokens is None else max(output, trace.max_tokens[row])
        return _Request(
            index=row,
            num_prompt_tokens=prompt,
            num_tokens=prompt,
            num_computed_tokens=cached,
            max_tokens=allowed,
            last_token=min(prompt + output, limits.max_model_len),
        )

    def _idle(self) -> Step:
        start, self._now_ns = self._now_ns, self._arrival_ns(self._next_row)
        return Step(Decision.IDLE, start, self._now_ns - start, 1, 0, 0, (), (), 0)

    def _prefill(self, decision: Decision, request: _Request) -> Step:
        left = request.num_prompt_tokens - request.num_computed_tokens
        tokens = min(left, self._deployment.max_num_batched_tokens)
        bucket = get_bucket_for_count(tokens, self._deployment.prefill_buckets)
        start, duration = self._now_ns, self._prefill_ns[bucket]
        self._now_ns += duration
        request.num_computed_tokens += tokens
        finished: tuple[int, ...] = ()
        if not is_prefill(request):
            request.num_tokens += 1
            if request.num_tokens >= request.last_token:
                self._running.remove(request)
                finished = (request.index,)
        rows, waiting = (request.index,), len(self._waiting)
        return Step(decision, start, duration, 1, bucket, tokens, rows, finished, waiting)

    def _decode(self) -> Step:
        decoding = [request for request in self._running if not is_prefill(request)]
        bucket = get_bucket_for_count(len(decoding), self._deployment.decode_buckets)
        start, duration = self._now_ns, self._decode_ns[bucket]
        times = self._equal_steps(decoding, duration)
        self._now_ns += times * duration
        finished = []
        for request in decoding:
            request.num_computed_tokens += times
            request.num_tokens += times
            if request.num_tokens >= request.last_token:
                finished.append(request)
        for request in finished:
            self._running.remove(request)
        return Step(
            Decision.DECODE,
            start,
            duration,
            times,
            bucket,
            len(decoding),
            tuple(request.index for request in decoding),
            tuple(request.index for request in finished),
            len(self._waiting),
        )

    def _equal_steps(self, decoding: list[_Request], duration_ns: int) -> int:
        """How many decode steps follow before anything that a decision depends on can change."""
        if not self._admission_was_asked:
            # Decodes were due; the next step may be a prefill again.
            return 1
        steps = min(request.last_token - request.num_tokens for request in decoding)
        if not self._waiting and self._next_row < len(self._trace):
            # The step that is under way when a request comes is the last one.
            until = self._arrival_ns(self._next_row) - self._now_ns
            steps = min(steps, max(1, -(-until // duration_ns)) if duration_ns else 1)
        return steps


@dataclass
class Timeline:
    """Every step, runs of equal ones as one entry, in columns."""

    start_s: "array[float]" = field(default_factory=lambda: array("d"))
    end_s: "array[float]" = field(default_factory=lambda: array("d"))
    phase: bytearray = field(default_factory=bytearray)
    """0 idle, 1 prefill, 2 decode."""
    waiting: "array[int]" = field(default_factory=lambda: array("i"))


@dataclass
class Simulation:
    """What a replay was like. Times in seconds from the first request; one entry per request that
    was served, in the order of the trace."""

    deployment: Deployment
    stats: PaddingStats
    refused: int
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    arrival_s: "array[float]" = field(default_factory=lambda: array("d"))
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    """From arrival to the first token."""
    tpot_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Between tokens, of requests with more than one."""
    latency_s: "array[float]" = field(default_factory=lambda: array("d"))
    """From arrival to the last token."""
    output_tokens: int = 0
    end_s: float = 0.0
    chunk_sizes: Counter[int] = field(default_factory=Counter)
    """Tokens of a prefill step -> steps."""
    batch_sizes: Counter[int] = field(default_factory=Counter)
    """Sequences of a decode step -> steps."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Time in prefill, decode and idle."""
    bucket_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """Time in each bucket, by phase."""
    queue_s: dict[int, float] = field(default_factory=dict)
    """Length of the queue -> time it was that long."""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.end_s if self.end_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.rows) / self.end_s if self.end_s else 0.0

    @property
    def queue_mean(self) -> float:
        """Requests waiting, over all time."""
        total = sum(self.queue_s.values())
        return sum(n * s for n, s in self.queue_s.items()) / total if total else 0.0

    @property
    def queue_max(self) -> int:
        return max(self.queue_s, default=0)


PHASES = ("idle", "prefill", "decode")
_PHASE_OF = {
    Decision.IDLE: 0,
    Decision.ADMIT: 1,
    Decision.ADVANCE_PREFILL: 1,
    Decision.DECODE: 2,
}


def simulate(
    trace: Trace,
    deployment: Deployment,
    times: StepTimes,
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """Replay `trace`. `progress` gets the number of requests done. Raises TraceError."""
    replay = Replay(trace, deployment, times)
    stats = PaddingStats.for_buckets(deployment.prefill_buckets, deployment.decode_buckets)
    result = Simulation(deployment, stats, refused=0)
    size = len(trace)
    first_ns, last_ns = array("q", bytes(8 * size)), array("q", bytes(8 * size))
    made = array("i", bytes(4 * size))
    phase_ns = [0, 0, 0]
    bucket_ns: dict[str, Counter[int]] = {"prefill": Counter(), "decode": Counter()}
    queue_ns: Counter[int] = Counter()
    timeline = result.timeline
    done = 0
    for step in replay.steps():
        end, phase = step.end_ns, _PHASE_OF[step.decision]
        spent = end - step.start_ns
        phase_ns[phase] += spent
        queue_ns[step.num_waiting] += spent
        if phase:
            bucket_ns[PHASES[phase]][step.bucket] += spent
        if phase == 2:
            stats.record_decode(step.count, step.times)
            result.batch_sizes[step.count] += step.times
            for row in step.requests:
                made[row] += step.times
        elif phase == 1:
            stats.record_prefill(step.count)
            result.chunk_sizes[step.count] += 1
            # Of the last chunk that stays: the one the first token comes from.
            first_ns[step.requests[0]] = end
        for row in step.finished:
            last_ns[row] = end
            done += 1
        if progress is not None and step.finished:
            progress(done)
        timeline.start_s.append(step.start_ns / NS)
        timeline.end_s.append(end / NS)
        timeline.phase.append(phase)
        timeline.waiting.append(step.num_waiting)
        result.end_s = end / NS
    result.refused = replay.refused
    result.phase_s = {name: ns / NS for name, ns in zip(PHASES, phase_ns, strict=True)}
    result.bucket_s = {
        phase: {bucket: ns / NS for bucket, ns in sorted(spent.items())}
        for phase, spent in bucket_ns.items()
    }
    result.queue_s = {length: ns / NS for length, ns in sorted(queue_ns.items())}
    assert trace.arrival_s is not None
    for row in range(size):
        if not last_ns[row]:
            continue
        arrival = trace.arrival_s[row]
        result.rows.append(row)
        result.arrival_s.append(arrival)
        result.ttft_s.append(first_ns[row] / NS - arrival)
        result.latency_s.append(last_ns[row] / NS - arrival)
        if made[row]:
            result.tpot_s.append((last_ns[row] - first_ns[row]) / NS / made[row])
        result.output_tokens += 1 + made[row]
    return result
