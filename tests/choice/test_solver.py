"""The chosen lists are the best there are: compared with every list, one by one."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxbucket.toolkit.choice.solver import (
    Axis,
    Choice,
    best_lists,
    best_within,
    cost_of,
    steps_by_candidate,
)


def every_list(axis: Axis) -> list[Choice]:
    """Cost counted step by step, with none of the solver's arithmetic."""
    *others, last = axis.candidates
    cost_at = dict(zip(axis.candidates, axis.costs, strict=True))
    choices = []
    for count in range(axis.max_programs):
        for chosen in itertools.combinations(others, count):
            buckets = (*chosen, last)
            cost = 0
            for candidate, steps in zip(axis.candidates, axis.steps, strict=True):
                bucket = min(b for b in buckets if b >= candidate)
                cost += steps * cost_at[bucket]
            choices.append(Choice(buckets, cost))
    return choices


def used_by(axis: Axis, buckets: Sequence[int]) -> tuple[int, ...]:
    rows = [axis.used[axis.candidates.index(bucket)] for bucket in buckets]
    return tuple(map(sum, zip(*rows, strict=True)))


@st.composite
def axes(draw: st.DrawFn, num_budgets: int = 0) -> Axis:
    """Small numbers, so that ties are common; costs that stay equal from size to size, too."""
    n = draw(st.integers(1, 7))
    gaps = draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
    rises = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    steps = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    used = draw(st.lists(st.tuples(*[st.integers(0, 6)] * num_budgets), min_size=n, max_size=n))
    return Axis(
        tuple(itertools.accumulate(gaps)),
        tuple(itertools.accumulate(rises)),
        tuple(steps),
        draw(st.integers(1, 5)),
        tuple(used),
    )


@settings(max_examples=500, deadline=None)
@given(axes())
def test_no_list_is_cheaper_and_none_as_cheap_is_shorter(axis: Axis) -> None:
    lists = every_list(axis)
    for k, choice in enumerate(best_lists(axis), 1):
        allowed = [c for c in lists if len(c.buckets) <= k]
        least = min(c.cost for c in allowed)
        assert choice.cost == least == cost_of(axis, choice.buckets)
        assert choice in lists
        assert len(choice.buckets) == min(len(c.buckets) for c in allowed if c.cost == least)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(axes(num_budgets=2), min_size=1, max_size=2),
    st.tuples(st.integers(0, 25), st.integers(0, 25)),
)
def test_under_minutes_and_memory_no_pair_of_lists_is_cheaper(
    both: list[Axis], budgets: tuple[int, int]
) -> None:
    feasible = []
    for choices in itertools.product(*map(every_list, both)):
        rows = [used_by(axis, c.buckets) for axis, c in zip(both, choices, strict=True)]
        if all(map(int.__le__, map(sum, zip(*rows, strict=True)), budgets)):
            feasible.append((sum(c.cost for c in choices), sum(len(c.buckets) for c in choices)))
    found = best_within(both, budgets)
    if found is None:
        assert not feasible
        return
    rows = [used_by(axis, c.buckets) for axis, c in zip(both, found, strict=True)]
    assert all(map(int.__le__, map(sum, zip(*rows, strict=True)), budgets))
    assert all(choice in every_list(axis) for axis, choice in zip(both, found, strict=True))
    assert (sum(c.cost for c in found), sum(len(c.buckets) for c in found)) == min(feasible)


def test_with_budgets_to_spare_both_ways_agree() -> None:
    sizes = {s: (s * 7919) % 101 for s in range(1, 65)}
    candidates = tuple(range(1, 65))
    axis = Axis(
        candidates,
        candidates,
        steps_by_candidate(sizes, candidates),
        7,
        tuple((1, c) for c in candidates),
    )
    (choice,) = best_within([axis], [10**9, 10**9]) or []
    assert choice.cost == best_lists(axis)[-1].cost


def test_steps_go_to_the_smallest_candidate_that_holds_them() -> None:
    assert steps_by_candidate({1: 2, 128: 3, 129: 5, 200: 7}, (128, 200)) == (5, 12)


def test_costs_that_fall_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        Axis((1, 2), (5, 4), (1, 1), 1)
