"""The steps a server takes for a trace: the scheduler's own policy, on a clock that costs nothing.

`Replay` makes the decisions with the functions of `nxbucket.serve.policy`, as `NeuronScheduler`
does (sync; async scheduling frees a seat one step later), and takes each step's time from
`StepTimes`. Time is in whole nanoseconds, so the same input gives the same output everywhere.

A run of decode steps in which no request ends and none comes is taken in one go: the decision is
the same for each of them.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from nxbucket.serve.policy import (
    DEFAULT_MAX_CONSECUTIVE_PREFILLS,
    Decision,
    Limits,
    RunState,
    decide,
    has_next_token,
    is_prefill,
    prefills_in_a_row,
    refuse_admission,
)
from nxbucket.toolkit.buckets import get_bucket_for_count
from nxbucket.toolkit.choice.step_times import NS_PER_S, StepTimes
from nxbucket.toolkit.choice.trace import Trace, usable_cache
from nxbucket.toolkit.errors import TraceError

MAX_NS = (1 << 63) // 2
"""What a column of 64 bits holds, and more than anybody replays."""


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
    """`repeats` equal steps, one after the other."""

    decision: Decision
    start_ns: int
    duration_ns: int
    """Of each."""
    repeats: int
    bucket: int
    """0 for an idle step, which lasts until the next request comes."""
    real: int
    """Tokens of a prefill, sequences of a decode, without padding."""
    requests: tuple[int, ...]
    """Rows of the trace."""
    finished: tuple[int, ...]
    """Those that end with the last of these steps."""
    num_waiting: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.repeats * self.duration_ns


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
        self._prefill_ns = {
            b: round(times.prefill_s(b) * NS_PER_S) for b in deployment.prefill_buckets
        }
        self._decode_ns = {
            b: round(times.decode_s(b) * NS_PER_S) for b in deployment.decode_buckets
        }
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
                yield self._checked(self._idle())
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
                yield self._checked(self._decode())
            elif prefilling is not None:
                yield self._checked(self._prefill(decision, prefilling))
            else:
                raise AssertionError("a request waits, none runs, and none may be admitted")

    def _checked(self, step: Step) -> Step:
        if step.end_ns > MAX_NS:
            raise TraceError(
                f"{self._trace.name}: the replay goes beyond {MAX_NS // NS_PER_S} s, which is "
                "centuries",
                hint="look at the arrivals' unit and at the step times: both are in seconds",
            )
        return step

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
        return round(self._arrival_s[row] * NS_PER_S)

    def _request(self, row: int) -> _Request | None:
        """As the server admits it: a prompt must leave room for one token."""
        trace, limits = self._trace, self._limits
        prompt = trace.prompt_tokens[row]
        if prompt >= limits.max_model_len:
            return None
        output = max(1, self._output_tokens[row])
        cached = 0
        if trace.cached_tokens is not None and self._deployment.enable_prefix_caching:
            cached = usable_cache(prompt, trace.cached_tokens[row], limits.block_size)
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
        if self._next_row < len(self._trace):
            # The step that is under way when a request comes is the last one. Steps of no time are
            # all done before it comes.
            until = self._arrival_ns(self._next_row) - self._now_ns
            if duration_ns:
                steps = min(steps, max(1, -(-until // duration_ns)))
        return steps
