"""An engine from inside: what reaches the programs, what they read, what a preemption changes."""

import json
from typing import Any

import pytest
from servers import run_script

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["example", "emulated_example"])
def inside(
    request: pytest.FixtureRequest,
    artifact_env: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """On target cpu, and with a Neuron target's graphs on XLA:CPU."""
    out = tmp_path_factory.mktemp("inside") / "out.json"
    emulate = ["--emulate"] if request.param == "emulated_example" else []
    model_file = request.getfixturevalue(request.param)
    run_script("in_process.py", str(model_file), str(out), *emulate, env=artifact_env)
    return {**json.loads(out.read_text()), "emulated": bool(emulate)}


def test_every_shape_that_reaches_an_executable_is_a_bound_programs(inside: dict[str, Any]) -> None:
    assert inside["calls"]
    for program, shapes in inside["calls"]:
        signature = [shape for _, shape in inside["signatures"][program]]
        assert json.loads(shapes) == signature
    # Both phases were exercised in more than one bucket.
    assert len({name for name, _ in inside["calls"]}) >= 5


def test_padding_per_bucket_is_the_sum_recomputed_from_the_steps(inside: dict[str, Any]) -> None:
    assert inside["padding"] == inside["recomputed"]
    assert sum(total[2] for total in inside["padding"]["prefill"].values()) > 0


def test_nan_in_every_block_that_nobody_owns_changes_nothing(inside: dict[str, Any]) -> None:
    assert inside["poisoned"] == inside["plain"]


def test_a_forced_preemption_of_everything_changes_no_token(inside: dict[str, Any]) -> None:
    assert inside["preempted"] >= 4
    assert [tokens for tokens, _ in inside["resumed"]] == [t for t, _ in inside["plain"]]


def test_neither_dynamo_nor_inductor_did_anything(inside: dict[str, Any]) -> None:
    assert inside["compiles"] == {}


def test_xla_compiled_nothing_once_the_programs_were_bound(inside: dict[str, Any]) -> None:
    assert inside["compiles_of_loader"] == 0


def test_jax_is_imported_only_where_something_is_emulated(inside: dict[str, Any]) -> None:
    assert inside["jax"] is inside["emulated"]
