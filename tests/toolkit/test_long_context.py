"""The two lists for long contexts: every rule, its code, place and mend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import model_folder
from nxbucket.toolkit.errors import Problem, SpecError
from nxbucket.toolkit.long_context import check_context_lengths, check_kv_segment_sizes
from nxbucket.toolkit.spec import DeploySpec, load_spec
from nxbucket.toolkit.validate import Limits

Load = Callable[..., DeploySpec]
SEGMENTS = "neuron_config.kv_segment_size_buckets"
CONTEXTS = "neuron_config.decode_context_length_buckets"
LIMITS = Limits(Path("model.yaml"), frozenset(), target="cpu", max_model_len=4096, block_size=32)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write_and_load(neuron_config: str, *lines: str) -> DeploySpec:
        model_folder(tmp_path / "llama", max_position_embeddings=131072)
        file = tmp_path / "model.yaml"
        file.write_text("\n".join(["model: llama", *lines, "neuron_config:", neuron_config, ""]))
        return load_spec(file)

    return write_and_load


def problems(load: Load, neuron_config: str, *lines: str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load(neuron_config, *lines)
    return caught.value.problems


def test_both_are_off_unless_given(load: Load) -> None:
    for text in ("", "  kv_segment_size_buckets: null\n  decode_context_length_buckets:"):
        spec = load(text)
        assert spec.neuron_config.kv_segment_size_buckets is None
        assert spec.neuron_config.kv_segment_size is None
        assert spec.neuron_config.decode_context_length_buckets is None
        assert {SEGMENTS, CONTEXTS} <= spec.defaulted


def test_both_are_read_as_aws_writes_them(load: Load) -> None:
    spec = load("  kv_segment_size_buckets: [512]\n  decode_context_length_buckets: [512, 1024]")
    assert spec.neuron_config.kv_segment_size == 512
    assert spec.neuron_config.decode_context_length_buckets == (512, 1024)
    assert not {SEGMENTS, CONTEXTS} & spec.defaulted
    resolved = spec.resolved()["neuron_config"]
    assert resolved["kv_segment_size_buckets"] == [512]
    assert resolved["decode_context_length_buckets"] == [512, 1024]


@pytest.mark.parametrize("size", [32, 4096, 4064])
def test_a_segment_is_any_number_of_whole_blocks_on_the_cpu(load: Load, size: int) -> None:
    assert load(f"  kv_segment_size_buckets: [{size}]").neuron_config.kv_segment_size == size


def test_a_segment_may_be_max_model_len_rounded_up_to_whole_blocks(load: Load) -> None:
    load("  kv_segment_size_buckets: [128]", "max_model_len: 100")
    [problem] = problems(load, "  kv_segment_size_buckets: [160]", "max_model_len: 100")
    assert (problem.code, problem.key) == ("segment-size", f"{SEGMENTS}[0]")
    assert problem.hint == "give 128 or less, or delete the line"


@pytest.mark.parametrize(
    ("text", "code", "key", "says", "hint"),
    [
        ("[]", "bucket-empty", SEGMENTS, "is empty", "delete the line"),
        ("512", "wrong-type", SEGMENTS, "integer 512", "kv_segment_size_buckets: [512]"),
        ("[512, 1024]", "segment-one-value", f"{SEGMENTS}[1]", "only one value today", "[1024]"),
        ("[48]", "segment-size", f"{SEGMENTS}[0]", "block_size 32, its default", "32 or 64"),
        ("[16]", "segment-size", f"{SEGMENTS}[0]", "no multiple", "nearest: 32"),
        ("[8192]", "segment-size", f"{SEGMENTS}[0]", "above max_model_len 4096", "4096 or less"),
        ("[0]", "bucket-not-positive", f"{SEGMENTS}[0]", "is 0", "remove 0"),
        ("[true]", "bucket-not-integer", f"{SEGMENTS}[0]", "boolean true", "integer"),
        ("[1_024]", "bucket-not-integer", f"{SEGMENTS}[0]", "1_024", "write 1024"),
        ('["512"]', "bucket-not-integer", f"{SEGMENTS}[0]", "string 512", "remove the quotes"),
    ],
)
def test_each_rule_of_the_segment_size(
    load: Load, text: str, code: str, key: str, says: str, hint: str
) -> None:
    [problem] = problems(load, f"  kv_segment_size_buckets: {text}")
    assert (problem.code, problem.key) == (code, key)
    assert says in problem.message
    assert hint in problem.hint
    assert (problem.line, problem.column is not None) == (3, True)


@pytest.mark.parametrize(
    ("text", "code", "key", "says", "hint"),
    [
        ("[]", "bucket-empty", CONTEXTS, "is empty", "max_model_len is always there"),
        ("512", "wrong-type", CONTEXTS, "integer 512", "decode_context_length_buckets: [512]"),
        ("[1024, 512]", "bucket-not-ascending", f"{CONTEXTS}[1]", "ascend", "[512, 1024]"),
        ("[512, 512]", "bucket-not-ascending", f"{CONTEXTS}[1]", "repeats", "[512]"),
        ("[512, 4096]", "context-length", f"{CONTEXTS}[1]", "below max_model_len 4096", "added"),
        ("[9999]", "context-length", f"{CONTEXTS}[0]", "below max_model_len", "remove 9999"),
        ("[500]", "context-length", f"{CONTEXTS}[0]", "no multiple of 32", "480 or 512"),
        ("[-32]", "bucket-not-positive", f"{CONTEXTS}[0]", "is -32", "remove -32"),
        ("[512.0]", "bucket-not-integer", f"{CONTEXTS}[0]", "float 512.0", "write 512"),
    ],
)
def test_each_rule_of_the_context_lengths(
    load: Load, text: str, code: str, key: str, says: str, hint: str
) -> None:
    [problem] = problems(load, f"  decode_context_length_buckets: {text}")
    assert (problem.code, problem.key) == (code, key)
    assert says in problem.message
    assert hint in problem.hint
    assert problem.line == 3


def test_all_problems_of_both_lists_are_reported_at_once(load: Load) -> None:
    found = problems(
        load, "  kv_segment_size_buckets: [7]\n  decode_context_length_buckets: [100, yes, 9000]"
    )
    assert [p.code for p in found] == [
        "segment-size",
        "context-length",
        "bucket-not-integer",
        "context-length",
    ]


def test_a_wrong_limit_is_reported_once_and_not_blamed_on_the_lists(load: Load) -> None:
    [problem] = problems(
        load,
        "  kv_segment_size_buckets: [64]\n  decode_context_length_buckets: [64]",
        "block_size: x",
    )
    assert problem.key == "block_size"


def on_neuron(**changes: int) -> Limits:
    values: dict[str, Any] = {"max_model_len": 16384, "block_size": 32, **changes}
    return Limits(Path("model.yaml"), frozenset(), target="trn2", **values)


@given(st.integers(1, 20000))
def test_on_neuron_a_segment_is_one_of_aws_s_sizes(size: int) -> None:
    found = check_kv_segment_sizes([size], "k", on_neuron())
    assert (not found) == (size in (512, 1024, 2048, 4096, 8192))
    assert not found or "trn2 takes 512, 1024, 2048, 4096, 8192" in found[0].message


@given(st.integers(1, 20000))
def test_on_neuron_a_context_is_a_multiple_of_128(length: int) -> None:
    # Whatever block_size is: a last block may be partly beyond the context.
    found = check_context_lengths([length], "k", on_neuron(block_size=48))
    assert (not found) == (length % 128 == 0 and length < 16384)


@given(st.lists(st.integers(-64, 5000), max_size=4))
def test_a_context_list_passes_exactly_if_it_keeps_every_rule(values: list[int]) -> None:
    good = bool(values) and values == sorted(set(values))
    good = good and all(v > 0 and v % 32 == 0 and v < 4096 for v in values)
    assert (not check_context_lengths(values, "k", LIMITS)) == good


@given(st.lists(st.sampled_from([-1, 0, 31, 32, 48, 64, 4096, 4128]), max_size=2))
def test_a_segment_list_passes_exactly_if_it_keeps_every_rule(values: list[int]) -> None:
    good = len(values) == 1 and values[0] in (32, 64, 4096)
    assert (not check_kv_segment_sizes(values, "k", LIMITS)) == good
