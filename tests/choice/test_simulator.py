"""What the simulator says of a trace small enough to be counted by hand."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxbucket.serve.policy import Decision
from nxbucket.toolkit.choice.costs import Costs
from nxbucket.toolkit.choice.replay import Deployment, Replay
from nxbucket.toolkit.choice.simulate_report import quantile, simulation_as_json
from nxbucket.toolkit.choice.simulator import Simulation, simulate
from nxbucket.toolkit.choice.step_times import ASSUMED, StepTimes, from_costs
from nxbucket.toolkit.choice.trace import Trace, part_of
from nxbucket.toolkit.errors import TraceError, UsageError

TIMES = StepTimes(lambda tokens: tokens / 100, lambda seqs: 0.5, "the test")
SERVER = Deployment(
    name="server",
    prefill_buckets=(100, 200),
    decode_buckets=(1, 2),
    max_num_seqs=2,
    max_num_batched_tokens=200,
    max_model_len=1000,
    block_size=10,
    num_kv_blocks=201,
)


def trace(
    *requests: tuple[float, int, int],
    cached_tokens: list[int] | None = None,
    max_tokens: list[int] | None = None,
) -> Trace:
    """(arrival, prompt, output) of each."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace(
        "test",
        array("i", prompts),
        array("i", outputs),
        array("d", arrivals),
        None if cached_tokens is None else array("i", cached_tokens),
        None if max_tokens is None else array("i", max_tokens),
    )


def replay(of: Trace, server: Deployment = SERVER) -> Simulation:
    return simulate(of, server, TIMES)


def test_two_requests_by_hand() -> None:
    """r0: chunks of 200 (2 s) and 50 (1 s), then 3 tokens. r1 comes at 2.5 s and runs from 3 s."""
    done = replay(trace((0, 250, 3), (2.5, 90, 2)))
    assert list(done.ttft_s) == [3.0, 1.5]
    # From 4 s both decode: r1's last token at 4.5 s, r0's second to last; then r0 alone.
    assert list(done.latency_s) == [5.0, 2.0]
    assert list(done.tpot_s) == [1.0, 0.5]
    assert done.chunk_sizes == {200: 1, 50: 1, 90: 1}
    assert done.batch_sizes == {2: 1, 1: 1}
    assert done.phase_s == {"idle": 0.0, "prefill": 4.0, "decode": 1.0}
    assert done.output_tokens_per_s == 1.0
    assert done.bucket_s == {"prefill": {100: 2.0, 200: 2.0}, "decode": {1: 0.5, 2: 0.5}}
    # r1 comes in the step from 2 to 3 s, and is out of the queue when the next one begins.
    assert done.queue_s == {0: 5.0}
    assert simulation_as_json(done)["prefill"]["padding_share"] == 0.15


def test_a_seat_that_is_taken_is_waited_for() -> None:
    done = replay(trace((0, 100, 5), (0, 100, 5), (0, 100, 1)))
    assert done.ttft_s[2] == pytest.approx(2 + 2 + 1)
    assert done.queue_max == 2


def test_those_who_come_while_a_long_answer_is_decoded_are_in_the_queue() -> None:
    """One seat; r0 takes until 50.5 s; ten come at 1, 2, ... 10 s and wait."""
    one_seat = replace(SERVER, max_num_seqs=1, decode_buckets=(1,))
    late = [(float(i), 100, 1) for i in range(1, 11)]
    done = replay(trace((0, 100, 100), *late), one_seat)
    assert done.queue_max == 10
    waited = sum(first - 1.0 for first in done.ttft_s[1:])
    assert done.queue_mean * done.end_s == pytest.approx(waited, rel=0.02)


def test_steps_that_take_no_time_lose_nobody() -> None:
    free = StepTimes(lambda tokens: 0.0, lambda seqs: 0.0, "free")
    done = simulate(trace((0, 100, 3), (0, 100, 1), (1, 5, 2)), SERVER, free)
    assert list(done.rows) == [0, 1, 2]
    assert done.output_tokens == 6


def test_an_idle_server_jumps_to_the_next_request() -> None:
    done = replay(trace((0, 10, 1), (100, 10, 1)))
    assert done.phase_s["idle"] == 99.0
    assert list(done.ttft_s) == [1.0, 1.0]


def test_what_the_prefix_cache_has_is_not_computed() -> None:
    done = replay(trace((0, 250, 1), cached_tokens=[239]))
    assert done.chunk_sizes == {20: 1}, "whole blocks of 10"
    off = replace(SERVER, enable_prefix_caching=False)
    assert replay(trace((0, 250, 1), cached_tokens=[239]), off).chunk_sizes == {200: 1, 50: 1}
    assert replay(trace((0, 250, 1), cached_tokens=[250])).chunk_sizes == {10: 1}


def test_a_prompt_without_room_for_an_answer_is_refused_and_a_long_answer_ends_at_the_limit() -> (
    None
):
    done = replay(trace((0, 1000, 5), (0, 999, 5), (0, 1, 2000)))
    assert done.refused == 1
    assert list(done.rows) == [1, 2]
    assert done.output_tokens == 1 + 999


def test_kv_blocks_are_reserved_for_what_a_client_may_ask_for() -> None:
    small = replace(SERVER, num_kv_blocks=101, max_num_seqs=2)
    modest = replay(trace((0, 100, 9), (0, 100, 1)), small)
    greedy = replay(trace((0, 100, 9), (0, 100, 1), max_tokens=[900, 900]), small)
    assert modest.ttft_s[1] == 2.0
    assert greedy.ttft_s[1] == 1.0 + 8 * 0.5 + 1.0, "behind the first one's last token"


def test_without_arrivals_there_is_nothing_to_replay() -> None:
    with pytest.raises(TraceError, match="no arrival times"):
        replay(Trace("t", array("i", [1]), array("i", [1])))
    with pytest.raises(TraceError, match="no output lengths"):
        replay(Trace("t", array("i", [1]), None, array("d", [0.0])))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 2000), st.integers(1, 1100), st.integers(0, 40)), min_size=1
        )
    )
    arrivals = sorted(gap / 100 for gap, _, _ in rows)
    return trace(*((a, p, o) for a, (_, p, o) in zip(arrivals, rows, strict=True)))


@settings(max_examples=100, deadline=None)
@given(traces(), st.sampled_from([0, 1, 8]), st.sampled_from([101, 201]))
def test_every_request_ends_and_the_sums_agree(given_: Trace, limit: int, blocks: int) -> None:
    server = replace(SERVER, max_consecutive_prefills=limit, num_kv_blocks=blocks)
    done = replay(given_, server)
    assert given_.output_tokens is not None
    served = [row for row, prompt in enumerate(given_.prompt_tokens) if prompt < 1000]
    assert list(done.rows) == served
    assert done.refused == len(given_) - len(served)
    assert sum(n * c for n, c in done.chunk_sizes.items()) == sum(
        given_.prompt_tokens[row] for row in served
    )
    assert done.output_tokens == sum(
        min(max(1, given_.output_tokens[row]), 1000 - given_.prompt_tokens[row]) for row in served
    )
    assert sum(done.phase_s.values()) == pytest.approx(done.end_s)
    assert sum(done.queue_s.values()) == pytest.approx(done.end_s)
    assert all(0 < first <= last for first, last in zip(done.ttft_s, done.latency_s, strict=True))
    again = replay(given_, server)
    assert simulation_as_json(again) == simulation_as_json(done)
    assert list(again.ttft_s) == list(done.ttft_s)


@settings(max_examples=50, deadline=None)
@given(traces())
def test_steps_follow_each_other_without_a_gap(given_: Trace) -> None:
    at = 0
    for step in Replay(given_, SERVER, TIMES).steps():
        assert step.start_ns == at
        at = step.end_ns
        assert step.bucket >= step.real or step.decision is Decision.IDLE


def test_a_part_of_a_trace_starts_its_own_clock() -> None:
    part = part_of(trace((5, 1, 1), (7, 2, 2), (9, 3, 3), max_tokens=[1, 2, 3]), range(1, 3))
    assert list(part.arrival_s or ()) == [0.0, 2.0]
    assert list(part.prompt_tokens) == [2, 3]
    assert list(part.max_tokens or ()) == [2, 3]


def test_quantiles_are_nearest_rank() -> None:
    assert [quantile([1, 2, 3, 4], q) for q in (1, 50, 75, 99)] == [1, 2, 3, 4]
    assert quantile([], 50) is None


def test_times_of_a_costs_file_never_fall_with_size() -> None:
    costs = Costs.model_validate(
        {
            "format": 1,
            "target": "t",
            "source": "s",
            "prefill": {"step_s": {"128": 0.2, "256": 0.1, "512": 0.3}},
            "decode": {"step_s": {"4": 0.1}},
        }
    )
    times = from_costs(costs, "costs.json")
    assert [times.prefill_s(n) for n in (128, 192, 256, 384)] == pytest.approx(
        [0.2, 0.2, 0.2, 0.25]
    )
    assert times.prefill_s(768) == pytest.approx(0.4), "the line goes on"
    assert times.prefill_s(1) == 0.2, "and does not go down to nothing"
    assert times.decode_s(1) == times.decode_s(64) == 0.1
    empty = costs.model_copy(update={"decode": costs.decode.model_copy(update={"step_s": {}})})
    with pytest.raises(UsageError, match=r"decode\.step_s is empty"):
        from_costs(empty, "costs.json")
    assert ASSUMED.is_assumed
