from typing import Any

import pytest

from nxbucket.toolkit.refusals import refused_key, refused_serve_argument


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("--max-model-len", "8", "max_model_len"),
        ("max_model_len", 8, "max_model_len"),
        ("--max-model", "8", "max_model_len"),
        ("--block-size=16", True, "block_size"),
        ("-tp", "2", "tensor_parallel_size"),
        ("--dtype", "half", "dtype"),
        ("--no-enable-prefix-caching", True, "enable_prefix_caching"),
        ("--additional-config.neuron_config", "{}", "neuron_config"),
    ],
)
def test_an_argument_model_yaml_decides_names_its_key(name: str, value: Any, key: str) -> None:
    refusal = refused_serve_argument(name, value)
    assert refusal is not None
    assert f"set {key} in model.yaml" in refusal[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--speculative-config", "{}"),
        ("--kv-cache-dtype", "fp8"),
        ("--quantization", "awq"),
        ("-q", "awq"),
        ("--enable-lora", True),
        ("--lora-modules", "a=b"),
        ("-pp", "2"),
        ("--data-parallel-size", "4"),
        ("--runner", "pooling"),
        ("--gpu-memory-utilization", "0.9"),
        ("--long-prefill-token-threshold", "64"),
        ("--enforce-eager", True),
        ("--compilation-config.level", "3"),
        ("--swap-space", "4"),
        ("--trust-remote-code", True),
        ("--no-enable-chunked-prefill", True),
        ("--enable-chunked-prefill", False),
    ],
)
def test_what_cannot_hold_is_refused_with_why_and_what_to_do(name: str, value: Any) -> None:
    refusal = refused_serve_argument(name, value)
    assert refusal is not None
    assert all(refusal)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--port", "8000"),
        ("--host", "0.0.0.0"),
        ("--served-model-name", ["a", "b"]),
        ("--model-name-of-mine", "x"),
        ("--tokenizer", "x"),
        ("--load-format", "auto"),
        ("--max-logprobs", "5"),
        ("--pipeline-parallel-size", "1"),
        ("--data-parallel-size", 1),
        ("--quantization", None),
        ("--enable-lora", False),
        ("--enable-chunked-prefill", True),
        ("--kv-cache-dtype", "auto"),
        ("--device-ids", "0"),
    ],
)
def test_other_arguments_and_values_that_hold_anyway_pass(name: str, value: Any) -> None:
    assert refused_serve_argument(name, value) is None


def test_true_is_not_the_number_one() -> None:
    assert refused_key("pipeline_parallel_size", True) is not None
    assert refused_key("pipeline_parallel_size", 1) is None
