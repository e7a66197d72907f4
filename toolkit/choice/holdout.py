"""Whether lists that were the best for some requests are good for the next ones, too."""

from dataclasses import dataclass

from nxbucket.compile.program import Phase
from nxbucket.toolkit.choice.advise import Advice, Goal, advise
from nxbucket.toolkit.choice.deployments import deployment_of
from nxbucket.toolkit.choice.simulator import Simulation, simulate
from nxbucket.toolkit.choice.step_times import StepTimes
from nxbucket.toolkit.choice.trace import Trace, part_of, share_of
from nxbucket.toolkit.choice.workload import Lists, ServerLimits, StepSizes, Use, chunk_sizes

MAX_REPLAYED = 20_000
"""Requests of a trace that are replayed for the decode batches: minutes of traffic, in a second."""


@dataclass(frozen=True)
class Holdout:
    """A list chosen on the first half of a trace, on the second half, which it has not seen."""

    phase: Phase
    fitted_on: int
    """Requests."""
    scored_on: int
    fitted: Use
    there: Advice
    """What the second half itself asks for."""

    @property
    def best(self) -> Use:
        return self.there.best

    @property
    def powers_of_two(self) -> Use:
        return self.there.compared["powers_of_two"]


def replay_of(
    trace: Trace, limits: ServerLimits, times: StepTimes, now: Lists, servers: int = 1
) -> Simulation | None:
    """A replay that counts decode batches; None if the trace cannot be replayed.

    Of one server's share, with the lists that run now, or powers of two: the batches depend on how
    long steps take, and so on the lists, but little.
    """
    if not trace.can_be_replayed:
        return None
    share = share_of(trace, servers)
    first = part_of(share, range(min(len(share), MAX_REPLAYED)))
    return simulate(first, deployment_of(limits, first, now), times)


def batches_of(replay: Simulation | None) -> StepSizes | None:
    """Decode steps by their sequences; None if there are none: a prefill yields a token itself."""
    if replay is None or not replay.batch_sizes:
        return None
    return StepSizes.exactly(replay.batch_sizes)


def hold_out(goal: Goal, trace: Trace, now: Lists, servers: int = 1) -> list[Holdout]:
    """One for each list; empty for a trace too short to be halved."""
    half = len(trace) // 2
    parts = [part_of(trace, range(half)), part_of(trace, range(half, len(trace)))]
    chunks = [chunk_sizes(part, goal.limits).chunks for part in parts]
    if not all(sizes.counts for sizes in chunks):
        return []
    replays = [replay_of(part, goal.limits, goal.times, now, servers) for part in parts]
    batches = [batches_of(replay) for replay in replays]
    if not all(batches):
        batches = [None, None]
    before, there = (advise(goal, c, b, now) for c, b in zip(chunks, batches, strict=True))
    sizes = (half, len(trace) - half)
    scores = [_score(before[0], there[0], *sizes)]
    if before[1] is not None and there[1] is not None:
        replayed = [0 if replay is None else len(replay.rows) for replay in replays]
        scores.append(_score(before[1], there[1], *replayed))
    return scores


def _score(before: Advice, there: Advice, fitted_on: int, scored_on: int) -> Holdout:
    fitted = there.use_of(before.best.buckets)
    return Holdout(there.phase, fitted_on, scored_on, fitted, there)
