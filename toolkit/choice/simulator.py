"""What a replay was like for those who sent the requests, and for the hardware."""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from nxbucket.serve.policy import Decision, PaddingStats
from nxbucket.toolkit.choice.replay import Deployment, Replay
from nxbucket.toolkit.choice.step_times import NS_PER_S, StepTimes
from nxbucket.toolkit.choice.trace import Trace

NOT_SERVED = -1


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
    """Length of the queue when a step began -> time in such steps."""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.end_s if self.end_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.rows) / self.end_s if self.end_s else 0.0

    @property
    def overload(self) -> str | None:
        """A sentence, if the server cannot keep up: its figures are then those of a queue that
        grows for as long as requests come."""
        if not self.rows:
            return None
        last = self.arrival_s[-1]
        behind = self.end_s - last
        usual = sorted(self.latency_s)[len(self.latency_s) // 2]
        # With room to spare the last answers come soon after the last request.
        has_room = self.phase_s["idle"] > 0.01 * self.end_s or behind <= 0.1 * last
        if has_room or last == 0:
            return None
        return (
            f"the server cannot keep up: {behind:,.0f} s of work are left when the last request "
            f"comes, and half of all take {usual:,.0f} s or longer"
        )

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
    first_ns, last_ns = array("q", [0]) * size, array("q", [NOT_SERVED]) * size
    made = array("i", [0]) * size
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
            stats.record_decode(step.real, step.repeats)
            result.batch_sizes[step.real] += step.repeats
            for row in step.requests:
                made[row] += step.repeats
        elif phase == 1:
            stats.record_prefill(step.real)
            result.chunk_sizes[step.real] += 1
            # Of the last chunk that stays: the one the first token comes from.
            first_ns[step.requests[0]] = end
        for row in step.finished:
            last_ns[row] = end
            done += 1
        if progress is not None and step.finished:
            progress(done)
        timeline.start_s.append(step.start_ns / NS_PER_S)
        timeline.end_s.append(end / NS_PER_S)
        timeline.phase.append(phase)
        timeline.waiting.append(step.num_waiting)
        result.end_s = end / NS_PER_S
    result.refused = replay.refused
    result.phase_s = {name: ns / NS_PER_S for name, ns in zip(PHASES, phase_ns, strict=True)}
    result.bucket_s = {
        phase: {bucket: ns / NS_PER_S for bucket, ns in sorted(spent.items())}
        for phase, spent in bucket_ns.items()
    }
    result.queue_s = {length: ns / NS_PER_S for length, ns in sorted(queue_ns.items())}
    assert trace.arrival_s is not None
    for row in range(size):
        if last_ns[row] == NOT_SERVED:
            continue
        arrival = trace.arrival_s[row]
        result.rows.append(row)
        result.arrival_s.append(arrival)
        result.ttft_s.append(first_ns[row] / NS_PER_S - arrival)
        result.latency_s.append(last_ns[row] / NS_PER_S - arrival)
        if made[row]:
            result.tpot_s.append((last_ns[row] - first_ns[row]) / NS_PER_S / made[row])
        result.output_tokens += 1 + made[row]
    return result
