from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxbucket.serve.policy import (
    Decision,
    Limits,
    PaddingStats,
    RunState,
    WaitReason,
    check_buckets,
    decide,
    has_next_token,
    is_prefill,
    refuse_admission,
)


@dataclass
class FakeRequest:
    num_prompt_tokens: int = 20
    max_tokens: int = 10
    num_computed_tokens: int = 0
    num_outputs: int = 0
    num_output_placeholders: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_outputs


def decoding(**fields: int) -> FakeRequest:
    request = FakeRequest(num_outputs=1, **fields)
    request.num_computed_tokens = request.num_prompt_tokens
    return request


LIMITS = Limits(max_num_active_reqs=4, num_blocks=17, block_size=16, max_model_len=64)


@pytest.mark.parametrize(
    ("state", "may_admit", "expected"),
    [
        (RunState(has_prefill=False, has_decode=False), False, Decision.IDLE),
        (RunState(has_prefill=False, has_decode=False), True, Decision.ADMIT),
        (RunState(has_prefill=True, has_decode=True), True, Decision.ADVANCE_PREFILL),
        (RunState(has_prefill=False, has_decode=True), True, Decision.ADMIT),
        (RunState(has_prefill=False, has_decode=True), False, Decision.DECODE),
        (RunState(has_prefill=True, has_decode=True, is_paused=True), True, Decision.IDLE),
    ],
)
def test_prefill_goes_before_decode(state: RunState, may_admit: bool, expected: Decision) -> None:
    assert decide(state, lambda: may_admit) is expected


@pytest.mark.parametrize("has_prefill", [True, False])
def test_decodes_run_after_a_prefill_that_went_nowhere(has_prefill: bool) -> None:
    stalled = RunState(has_prefill=has_prefill, has_decode=True, prefill_stalled=True)
    assert decide(stalled, lambda: True) is Decision.DECODE


def test_a_stalled_prefill_is_tried_again_when_no_decode_can_run() -> None:
    stalled = RunState(has_prefill=False, has_decode=False, prefill_stalled=True)
    assert decide(stalled, lambda: True) is Decision.ADMIT


@pytest.mark.parametrize(
    ("in_a_row", "limit", "decodes"), [(3, 4, False), (4, 4, True), (99, 0, False)]
)
def test_decodes_run_after_so_many_prefills_in_a_row(
    in_a_row: int, limit: int, decodes: bool
) -> None:
    state = RunState(
        has_prefill=True,
        has_decode=True,
        num_prefills_in_a_row=in_a_row,
        max_consecutive_prefills=limit,
    )
    assert (decide(state, lambda: False) is Decision.DECODE) is decodes


def test_nobody_is_offered_while_a_prefill_runs_or_decodes_are_due() -> None:
    def offered() -> bool:
        raise AssertionError("asked")

    decide(RunState(has_prefill=True, has_decode=False), offered)
    decide(RunState(has_prefill=False, has_decode=True, prefill_stalled=True), offered)


def test_replay_after_a_preemption_is_a_prefill_up_to_the_last_known_token() -> None:
    resumed = FakeRequest(num_prompt_tokens=20, num_outputs=30)
    resumed.num_computed_tokens = 48
    assert is_prefill(resumed)
    resumed.num_computed_tokens = 49
    assert not is_prefill(resumed)


def test_placeholders_of_async_scheduling_do_not_make_a_decode_a_prefill() -> None:
    request = FakeRequest(num_computed_tokens=21, num_output_placeholders=2)
    assert not is_prefill(request)


def test_a_request_whose_last_token_is_in_flight_has_no_next_token() -> None:
    request = FakeRequest(max_tokens=3, num_computed_tokens=21, num_outputs=1)
    request.num_output_placeholders = 1
    assert has_next_token(request, 1024)
    request.num_computed_tokens, request.num_outputs = 22, 2
    assert not has_next_token(request, 1024)


def test_the_null_block_is_not_usable() -> None:
    assert LIMITS.num_usable_blocks == 16
    assert LIMITS.max_kv_concurrent == 4
    assert Limits(4, num_blocks=16, block_size=16, max_model_len=64).max_kv_concurrent == 3


@pytest.mark.parametrize(
    ("candidate", "blocks"),
    [
        (FakeRequest(1, 1), 1),
        (FakeRequest(16, 1), 2),
        (FakeRequest(60, 4), 4),
        (FakeRequest(60, 999), 4),
    ],
)
def test_worst_case_is_prompt_plus_max_tokens_up_to_max_model_len(
    candidate: FakeRequest, blocks: int
) -> None:
    assert LIMITS.worst_case_blocks(candidate) == blocks


def test_admission_is_refused_in_the_order_of_the_specification() -> None:
    limits = Limits(2, num_blocks=5, block_size=16, max_model_len=64, max_loras=1)
    new = FakeRequest(60, 4)

    def reason(running: list[FakeRequest], **kwargs: object) -> WaitReason | None:
        refusal = refuse_admission(limits, new, running, **kwargs)  # type: ignore[arg-type]
        return refusal.reason if refusal else None

    assert reason([]) is None
    assert reason([FakeRequest(), FakeRequest()], num_offered=1) is WaitReason.SEATS
    assert reason([FakeRequest()], num_paused_sessions=1) is WaitReason.SEATS
    assert reason([FakeRequest()], num_offered=1) is WaitReason.PREFILL_RUNNING
    assert reason([decoding()], num_offered=1) is WaitReason.PREFILL_BATCH_FULL
    assert reason([decoding()], loras={1, 2}) is WaitReason.KV_BLOCKS
    assert reason([], loras={1, 2}) is WaitReason.LORAS


def test_blocks_that_waiting_requests_hold_are_not_promised_again() -> None:
    holder = FakeRequest(60, 4, num_computed_tokens=33)
    refusal = refuse_admission(
        Limits(4, num_blocks=7, block_size=16, max_model_len=64),
        FakeRequest(60, 4),
        [],
        holding=[holder],
    )
    assert refusal is not None
    assert str(refusal) == "waits for 4 KV blocks, 3 not reserved"


def test_short_requests_share_what_would_hold_one_of_max_model_len() -> None:
    limits = Limits(8, num_blocks=5, block_size=16, max_model_len=64)
    running = [decoding(num_prompt_tokens=4, max_tokens=4) for _ in range(3)]
    assert refuse_admission(limits, FakeRequest(8, 8), running) is None
    assert refuse_admission(limits, FakeRequest(8, 9), running) is not None


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=20))
def test_what_is_admitted_never_outgrows_the_cache(sizes: list[tuple[int, int]]) -> None:
    limits = Limits(20, num_blocks=14, block_size=16, max_model_len=64)
    running: list[FakeRequest] = []
    for prompt, max_tokens in sizes:
        candidate = decoding(num_prompt_tokens=prompt, max_tokens=max_tokens)
        if refuse_admission(limits, candidate, running) is None:
            running.append(candidate)
    assert sum(map(limits.worst_case_blocks, running)) <= limits.num_usable_blocks
    assert running


@pytest.mark.parametrize(
    ("buckets", "sentence"),
    [
        ([], "sizes must be positive whole numbers, is []"),
        ([0, 8], "sizes must be positive whole numbers, is [0, 8]"),
        ([True, 8], "sizes must be positive whole numbers, is [True, 8]"),
        ([8, 4], "sizes must ascend without repeats, is [8, 4]"),
        ([8, 8], "sizes must ascend without repeats, is [8, 8]"),
        ([1, 4], "the last of sizes must be 8 (max_num_seqs), is 4"),
    ],
)
def test_a_wrong_bucket_list_is_refused_in_a_sentence(buckets: list[int], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        check_buckets("sizes", buckets, 8, "max_num_seqs")
    assert str(error.value) == sentence


def test_padding_is_counted_per_bucket() -> None:
    stats = PaddingStats.for_buckets([128, 512], [1, 4])
    assert [stats.record_prefill(n) for n in (1, 128, 129)] == [128, 128, 512]
    assert [stats.record_decode(n) for n in (1, 3)] == [1, 4]
    assert stats.prefill[128].padding == 127
    assert (stats.prefill_real, stats.prefill_padding) == (258, 127 + 383)
    assert (stats.decode[4].real, stats.decode[4].padding) == (3, 1)
    assert stats.summary() == (
        "prefill 258 tokens + 510 padding (66.4%), buckets 128:2 512:1; "
        "decode 4 rows + 1 padding (20.0%), buckets 1:1 4:1; 0 requests held back"
    )
