"""Lists for the shipped traces, and what is said of them."""

import itertools
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nxbucket.toolkit.choice.advise import Goal, advise, grid_of, make_goal
from nxbucket.toolkit.choice.advise_report import advice_text, verdict
from nxbucket.toolkit.choice.advise_run import AdviseOptions, make_advice
from nxbucket.toolkit.choice.costs import Curve
from nxbucket.toolkit.choice.holdout import batches_of, hold_out, replay_of
from nxbucket.toolkit.choice.inputs import LimitOptions
from nxbucket.toolkit.choice.step_times import ASSUMED, StepTimes
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.trace_reader import find_trace, read_trace
from nxbucket.toolkit.choice.workload import (
    ServerLimits,
    StepSizes,
    chunk_sizes,
    chunked,
    percentile_list,
    use_of,
)
from nxbucket.toolkit.errors import TraceError, UsageError


def goal(
    tokens: int, entries: int, grid: int, *, seqs: int = 8, times: StepTimes = ASSUMED
) -> Goal:
    return make_goal(
        ServerLimits(tokens, seqs),
        times,
        max_prefill_entries=entries,
        max_decode_entries=entries,
        grid=grid,
    )


def steps(**counts: int) -> StepSizes:
    """steps(s10=5): five steps of size 10."""
    return StepSizes.exactly({int(name[1:]): count for name, count in counts.items()})


def shipped(name: str) -> Trace:
    return read_trace(find_trace(name))


@pytest.mark.parametrize(
    ("name", "tokens", "programs", "grid", "best", "powers_of_two"),
    [
        ("azure_conv_2023", 8192, 7, 128, 14.31, 30.4),
        ("azure_code_2023", 8192, 7, 128, 19.26, 27.7),
        ("azure_conv_2023", 2048, 5, 64, 9.17, None),
        ("azure_code_2023", 2048, 5, 64, 9.07, None),
    ],
)
def test_padding_of_the_published_traces(
    name: str, tokens: int, programs: int, grid: int, best: float, powers_of_two: float | None
) -> None:
    wanted = goal(tokens, programs, grid)
    prompts = chunk_sizes(shipped(name), wanted.limits)
    prefill, _ = advise(wanted, prompts.chunks, None)
    assert prompts.refused == 0
    assert round(100 * prefill.best.padding_share, 2) <= best
    assert len(prefill.best.buckets) <= programs
    assert prefill.best.buckets[-1] == tokens
    assert all(bucket % grid == 0 for bucket in prefill.best.buckets)
    if powers_of_two is not None:
        usual = prefill.compared["powers_of_two"].padding_share
        assert round(100 * usual, 1) == powers_of_two


def test_a_list_chosen_on_the_first_half_serves_the_second() -> None:
    for name in ("azure_conv_2023", "azure_code_2023"):
        wanted = goal(8192, 7, 128)
        scores = {h.phase: h for h in hold_out(wanted, shipped(name), {})}
        prefill = scores["prefill"]
        assert abs(prefill.fitted_on - prefill.scored_on) <= 1
        assert prefill.best.executed <= prefill.fitted.executed < prefill.powers_of_two.executed
        assert prefill.fitted.real == prefill.best.real, "the same requests"


def test_decode_batches_come_from_a_replay_and_a_gain_of_nothing_is_called_that() -> None:
    wanted = goal(8192, 4, 128)
    trace = shipped("azure_conv_2023")
    batches = batches_of(replay_of(trace, wanted.limits, ASSUMED, {}))
    assert batches is not None
    assert set(batches.counts) <= set(range(1, 9))
    _, decode = advise(wanted, chunk_sizes(trace, wanted.limits).chunks, batches)
    assert decode is not None
    assert decode.best.padding_share <= decode.compared["powers_of_two"].padding_share
    assert "nothing to gain over powers of two" in (verdict(decode) or "")
    assert "[8] would nearly do" in (verdict(decode) or "")


def test_with_step_times_the_time_is_made_least_and_not_the_padding() -> None:
    """Steps that take no longer with size: padding is free, and one program does."""
    flat = StepTimes(lambda tokens: 1.0, lambda seqs: 1.0, "flat")
    sizes = steps(s10=5, s100=5, s1000=5)
    by_tokens = goal(1000, 3, 1, times=flat)
    by_time = replace(by_tokens, minimizes="time")
    assert advise(by_tokens, sizes, None)[0].best.buckets == (10, 100, 1000)
    assert advise(by_time, sizes, None)[0].best.buckets == (1000,)


def every_list(sizes: StepSizes, last: int, grid: int) -> list[tuple[int, tuple[int, ...]]]:
    lists = [
        (*chosen, last)
        for count in range(4)
        for chosen in itertools.combinations(range(grid, last, grid), count)
    ]
    return [(use_of(sizes, buckets).executed, buckets) for buckets in lists]


@pytest.mark.parametrize("minutes", [40, 70, 120, 400])
@pytest.mark.parametrize("mib", [300, 700, 5000])
@pytest.mark.parametrize("contexts", [1, 3])
def test_minutes_and_memory_are_for_all_programs_of_both_lists(
    minutes: int, mib: int, contexts: int
) -> None:
    chunks = steps(s30=9, s100=4, s130=7, s260=5, s500=3, s512=2)
    batches = steps(s1=50, s3=20, s4=10)
    plain = goal(512, 4, 64, seqs=4)
    wanted = replace(
        plain,
        prefill=replace(
            plain.prefill,
            compile_s=Curve(((0, 300), (512, 1500))),
            program_bytes=Curve(((0, 5e7), (512, 3e8))),
        ),
        decode=replace(
            plain.decode,
            compile_s=Curve(((0, 200), (4, 600))),
            program_bytes=Curve(((0, 4e7), (4, 8e7))),
            programs_per_entry=contexts,
        ),
        max_compile_s=60 * minutes,
        max_program_bytes=mib << 20,
    )

    def keeps(prefill: tuple[int, ...], decode: tuple[int, ...]) -> bool:
        """In the solver's units: milliseconds and bytes, each program rounded."""
        spent = held = 0
        for wants, buckets in ((wanted.prefill, prefill), (wanted.decode, decode)):
            assert wants.compile_s is not None
            assert wants.program_bytes is not None
            each = wants.programs_per_entry
            spent += sum(each * round(1000 * wants.compile_s(b)) for b in buckets)
            held += sum(each * round(wants.program_bytes(b)) for b in buckets)
        return spent <= 60_000 * minutes and held <= mib << 20

    feasible = [
        p + d
        for p, prefill in every_list(chunks, 512, 64)
        for d, decode in every_list(batches, 4, 1)
        if keeps(prefill, decode)
    ]
    if not feasible:
        with pytest.raises(UsageError, match="no list keeps the budget"):
            advise(wanted, chunks, batches)
        return
    prefill, decode = advise(wanted, chunks, batches)
    assert decode is not None
    assert keeps(prefill.best.buckets, decode.best.buckets)
    assert prefill.best.executed + decode.best.executed == min(feasible)
    verdict(prefill), verdict(decode)


def test_a_decode_list_that_stays_counts_in_the_budget() -> None:
    plain = goal(512, 4, 64, seqs=4)
    minute = Curve(((1, 60),))
    wanted = replace(
        plain,
        prefill=replace(plain.prefill, compile_s=minute),
        decode=replace(plain.decode, compile_s=minute),
        max_compile_s=5 * 60,
    )
    chunks = steps(s30=9, s100=4, s130=7, s260=5, s500=3)
    assert len(advise(wanted, chunks, None)[0].best.buckets) == 2, "beside 1, 2 and 4"
    now = {"decode": (4,)}
    assert len(advise(wanted, chunks, None, now)[0].best.buckets) == 4  # type: ignore[arg-type]


def test_the_verdict_goes_by_what_was_made_least() -> None:
    """Above 5 sequences a step takes five times as long: what powers of two pad into."""
    times = StepTimes(lambda tokens: 1.0, lambda seqs: 1.0 if seqs <= 5 else 5.0, "a jump")
    wanted = replace(goal(64, 4, 1, times=times), minimizes="time")
    _, decode = advise(wanted, steps(s1=1), steps(s5=100, s8=1))
    assert decode is not None
    assert decode.best.buckets == (5, 8)
    assert verdict(decode) is None
    _, easy = advise(wanted, steps(s1=1), steps(s4=100, s8=1))
    assert easy is not None
    assert "as good as powers of two with 2 entries instead of 4" in (verdict(easy) or "")


def test_chunks_of_long_prompts_cached_ones_and_those_refused() -> None:
    trace = Trace(
        "t", array("i", [100, 250, 300, 999, 1000]), cached_tokens=array("i", [0, 47, 300, 0, 0])
    )
    limits = ServerLimits(200, 8, max_model_len=1000, block_size=10)
    found = chunk_sizes(trace, limits)
    # 250 less 4 whole blocks; of 300 the last block is computed; 999 in five chunks.
    assert found.chunks.counts == {100: 1, 200: 5, 10: 2, 199: 1}
    assert found.refused == 1
    without = replace(limits, enable_prefix_caching=False)
    assert chunk_sizes(trace, without).chunks.counts == {100: 2, 200: 6, 50: 1, 199: 1}
    assert chunked({400: 2}, 200) == {200: 4}


def test_a_trace_of_prompts_that_are_all_too_long_is_told(tmp_path: Path) -> None:
    file = tmp_path / "long.csv"
    file.write_text("prompt_tokens\n5000\n")
    with pytest.raises(TraceError, match="refuses them all"):
        make_advice(options(trace=str(file), limits=LimitOptions(1024, 8, 4096)))


def test_percentile_lists() -> None:
    sizes = {10: 1, 20: 1, 30: 1, 40: 1}
    assert percentile_list(sizes, 4, 1, 64) == (10, 20, 30, 64)
    assert percentile_list(sizes, 2, 16, 64) == (32, 64)
    assert percentile_list({}, 3, 16, 64) == (64,)


def test_the_default_grid_holds_the_buckets_that_run() -> None:
    assert grid_of(()) == grid_of((128, 512, 2048)) == grid_of((128, 999)) == 128
    assert grid_of((32, 64, 128)) == 32
    assert grid_of((7, 8)) == 1


def options(**changes: object) -> AdviseOptions:
    base = AdviseOptions(trace="azure_code_2023", limits=LimitOptions(8192, 8), max_programs=5)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_text_is_yaml_and_holds_the_lists() -> None:
    report, spec = make_advice(options())
    assert spec is None
    pasted = yaml.safe_load(advice_text(report))
    assert pasted == {"neuron_config": {k: list(v) for k, v in report.lists.items()}}
    assert set(report.lists) == {"num_batched_tokens_buckets", "num_seqs_buckets"}
    assert any("assumed step times" in note for note in report.notes)


def test_lengths_alone_give_a_prefill_list_and_say_why_no_decode_list(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens\n100\n900\n")
    report, _ = make_advice(options(trace=str(lengths), limits=LimitOptions(1024, 8)))
    assert report.decode is None
    assert "no arrival times" in report.decode_from
    assert report.prefill.best.buckets == (128, 1024)
    assert "num_seqs_buckets" not in advice_text(report)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trace": None}, "either --trace or --metrics is wanted"),
        ({"metrics": "m.txt"}, "one of the two"),
        ({"max_programs": 0}, "--max-programs is 0"),
        ({"grid": 0}, "--grid is 0"),
        ({"max_compile_minutes": 10.0}, "--max-compile-minutes: no record"),
        ({"max_program_bytes": 10}, "--max-program-memory: nothing says"),
        ({"minimize": "time"}, "no step has a time"),
        ({"roofline": "trn2"}, "--roofline needs a model file"),
        ({"trace": None, "metrics": "m.txt", "requests": 3}, "--requests is for a trace"),
        ({"limits": LimitOptions(-1)}, "--max-num-batched-tokens is -1"),
        ({"requests": 0}, "--requests is 0"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        make_advice(options(**changes))
    assert caught.value.hint
