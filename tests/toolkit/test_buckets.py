from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxbucket.toolkit.buckets import (
    check_bucket_list,
    get_bucket_for_count,
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)
from nxbucket.toolkit.errors import Problem

FILE = Path("model.yaml")


def check(values: list[object], last: int | None) -> list[Problem]:
    return check_bucket_list(values, file=FILE, key="b", last=last, last_rule="the limit")


def codes(values: list[object], last: int | None) -> list[str]:
    return [problem.code for problem in check(values, last)]


@pytest.mark.parametrize(
    ("count", "bucket"), [(0, 128), (1, 128), (128, 128), (129, 256), (300, 317), (317, 317)]
)
def test_the_smallest_bucket_that_holds_the_count_is_chosen(count: int, bucket: int) -> None:
    assert get_bucket_for_count(count, [128, 256, 317]) == bucket


def test_a_count_above_every_bucket_is_an_error() -> None:
    with pytest.raises(ValueError, match="no bucket holds 318"):
        get_bucket_for_count(318, (128, 256, 317))


@settings(deadline=None)
@given(st.sets(st.integers(1, 10_000), min_size=1), st.integers(1, 10_000))
def test_no_smaller_bucket_would_do(sizes: set[int], count: int) -> None:
    buckets = sorted(sizes)
    fitting = [b for b in buckets if b >= count]
    if fitting:
        assert get_bucket_for_count(count, buckets) == min(fitting)
    else:
        with pytest.raises(ValueError):
            get_bucket_for_count(count, buckets)


@pytest.mark.parametrize(
    ("maximum", "buckets"),
    [
        (1, [1]),
        (100, [100]),
        (128, [128]),
        (129, [128, 129]),
        (317, [128, 256, 317]),
        (2000, [128, 256, 512, 1024, 2000]),
        (8192, [128, 256, 512, 1024, 2048, 4096, 8192]),
    ],
)
def test_default_prefill_buckets(maximum: int, buckets: list[int]) -> None:
    assert get_default_num_batched_tokens_buckets(maximum) == buckets


@pytest.mark.parametrize(
    ("maximum", "buckets"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_default_decode_buckets(maximum: int, buckets: list[int]) -> None:
    assert get_default_num_seqs_buckets(maximum) == buckets


@settings(deadline=None)
@given(st.integers(1, 1 << 40))
def test_default_lists_keep_every_rule(maximum: int) -> None:
    for buckets in (
        get_default_num_batched_tokens_buckets(maximum),
        get_default_num_seqs_buckets(maximum),
    ):
        assert check([*buckets], maximum) == []


def test_an_empty_list_says_what_it_must_end_in() -> None:
    [problem] = check([], 64)
    assert problem.code == "bucket-empty"
    assert "64" in problem.message


@pytest.mark.parametrize("item", [True, 256.0, "256", "25 6", None, [256], {}], ids=repr)
def test_an_item_that_is_no_integer_is_named_with_its_index(item: object) -> None:
    [problem] = check([128, item, 512], 512)
    assert problem.code == "bucket-not-integer"
    assert problem.key == "b[1]"


@pytest.mark.parametrize("item", [0, -128])
def test_an_item_below_one_is_named_with_its_index(item: int) -> None:
    [problem] = check([128, item, 512], 512)
    assert (problem.code, problem.key) == ("bucket-not-positive", "b[1]")
    assert str(item) in problem.message


def test_only_the_first_pair_out_of_order_is_reported() -> None:
    [problem] = check([1, 4, 2, 8, 3], 8)
    assert problem.code == "bucket-not-ascending"
    assert "2 at index 2 is below 4 at index 1" in problem.message
    assert problem.hint == "in order, and each once: [1, 2, 3, 4, 8]"


def test_a_repeated_bucket_is_out_of_order() -> None:
    [problem] = check([1, 8, 8, 32], 32)
    assert "8 at index 2 repeats 8 at index 1" in problem.message


def test_every_rule_is_reported_in_one_go() -> None:
    assert codes([4, 2, True, 0], 8) == [
        "bucket-not-integer",
        "bucket-not-positive",
        "bucket-not-ascending",
    ]
    assert codes([4, 2], 8) == ["bucket-not-ascending", "bucket-last"]


def test_the_last_value_is_not_checked_while_the_limit_is_unknown() -> None:
    assert check([1, 2], None) == []


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(), st.booleans(), st.floats(), st.text(), st.none())))
def test_checking_never_changes_the_list(values: list[object]) -> None:
    before = [*values]
    check(values, 8)
    assert list(map(repr, values)) == list(map(repr, before))


# real-configs.md: (prefill, its limit, decode, its limit)
REAL_LISTS: dict[str, tuple[list[object], int, list[object], int]] = {
    "R01": ([128], 128, [1], 1),
    "R02": ([2048], 2048, [2], 2),
    "R03": ([8192], 8192, [4], 4),
    "R06": ([512], 512, [1], 1),
    "R07": ([1024], 1024, [4], 4),
    "R08": ([8192], 8192, [8], 8),
    "R09": ([128, 256, 512, 1024, 2048, 4096], 4096, [1], 1),
    "R11": ([8192], 8192, [4], 4),
    "R13": ([128, 256, 512, 1024, 2048, 4096], 4096, [1, 2, 4, 8], 8),
    "R14": ([256], 256, [1, 2, 4, 8], 8),
    "R15": ([512, 1024, 2048, 4096, 8192], 8192, [1, 2, 4, 8], 8),
    "R16": ([256, 512, 1024, 2048, 4096, 8192, 10240, 12288, 16384], 16384, [1], 1),
    "R18": ([10240, 16384], 16384, [16], 16),
    "R19": ([256, 512, 1024, 2048, 4096, 8192, 10240, 16384], 16384, [1], 1),
    "R21": ([256, 512, 1024], 1024, [1], 1),
    "R22": ([5120, 32768], 32768, [1], 1),
    "R23": ([256, 512, 1024, 2048], 2048, [4], 4),
    "R27": ([128, 512, 1024, 2048], 2048, [8], 8),
    "R28": ([4096], 4096, [1, 4, 8, 16, 32, 48], 48),
}


@pytest.mark.parametrize("name", REAL_LISTS)
def test_published_lists_keep_the_rules(name: str) -> None:
    prefill, max_tokens, decode, max_seqs = REAL_LISTS[name]
    assert check(prefill, max_tokens) == []
    assert check(decode, max_seqs) == []
