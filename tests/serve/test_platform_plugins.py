"""Another platform of vLLM's in the same environment, e.g. AWS's own plugin."""

import logging
import os
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from nxbucket.serve import engine_args
from nxbucket.serve.engine_args import other_platforms, prepare_environment
from nxbucket.toolkit.errors import EnvironmentProblem

AWS = "vllm_neuron"


class Package:
    name = "vllm-neuron"


def installed(*points: tuple[str, str]) -> EntryPoints:
    """As (name, group); those named as AWS's come in its package."""
    made = []
    for name, group in points:
        point: Any = EntryPoint(name, "module:function", group)
        vars(point)["dist"] = Package if name == AWS else None
        made.append(point)
    return EntryPoints(made)


@pytest.fixture(autouse=True)
def both_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed(
        ("nxbucket", "vllm.platform_plugins"),
        (AWS, "vllm.platform_plugins"),
        (AWS, "vllm.general_plugins"),
        ("lora_resolver", "vllm.general_plugins"),
        ("nxbucket_http", "vllm.endpoint_plugins"),
    )
    monkeypatch.setattr("importlib.metadata.entry_points", found.select)
    monkeypatch.setattr(engine_args, "_check_vllm", lambda: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_it_stays_off_with_all_that_bears_its_name(caplog: pytest.LogCaptureFixture) -> None:
    assert other_platforms() == {AWS: "vllm-neuron"}
    with caplog.at_level(logging.WARNING):
        prepare_environment()
    assert os.environ["VLLM_PLUGINS"] == "nxbucket,lora_resolver,nxbucket_http"
    assert "vllm_neuron (vllm-neuron), another platform of vLLM's stays off" in caplog.text


@pytest.mark.parametrize(
    ("chosen", "hint"),
    [
        (f"{AWS},lora_resolver", "export VLLM_PLUGINS=lora_resolver"),
        (AWS, "unset VLLM_PLUGINS"),
    ],
)
def test_where_it_was_chosen_the_command_that_mends_it_is_named(
    monkeypatch: pytest.MonkeyPatch, chosen: str, hint: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", chosen)
    with pytest.raises(EnvironmentProblem, match=r"VLLM_PLUGINS names vllm_neuron \(vllm-neu") as e:
        prepare_environment()
    assert e.value.hint == hint


def test_a_choice_without_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    prepare_environment()
    assert os.environ["VLLM_PLUGINS"] == "lora_resolver,nxbucket,nxbucket_http"


def test_if_vllm_takes_it_all_the_same_the_package_to_remove_is_named() -> None:
    assert "pip uninstall vllm-neuron" in engine_args._platform_hint()
