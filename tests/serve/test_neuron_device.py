"""The contract between the loader for a device and AWS's classes, kept by a stand-in of them.

The stand-in runs each program's graph on XLA:CPU, so that numbers are those a device has to give.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_server import ARCHITECTURE, EagerServer, Shapes, eager
from neuron_stand_in import NEFF, Device, MetaNeff
from torch import Tensor

from nxbucket.compile.hlo.compiler import lower_to_hlo
from nxbucket.compile.manifest import Blob, BlobRole, Manifest
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.serve import neuron_device, neuron_host, nrt_errors
from nxbucket.serve.metaneff import metaneff
from nxbucket.serve.neuron_device import DeviceMemory, NeuronLoader
from nxbucket.serve.torch_neuron import ROUTES, TorchNeuron
from nxbucket.toolkit.errors import EnvironmentProblem, NxbucketError
from nxbucket.toolkit.spec_reader import LNC_OF

SHAPES = Shapes(prefill=(4, 8), decode=(2,), block_size=4, max_blocks=5, num_kv_blocks=11)
PROGRAMS = SHAPES.programs(ARCHITECTURE, "float32")
ROUTE_NAMES = ("Executor", "SPMDModel")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[BlobRole, Path]]:
    """By program, what a Neuron artifact holds; the NEFF is the stand-in's."""
    folder = tmp_path_factory.mktemp("artifacts")
    found: dict[str, dict[BlobRole, Path]] = {}
    for program in PROGRAMS:
        graph = lower_to_hlo(program).payload
        neff, hlo = folder / f"{program.name}.neff", folder / f"{program.name}.hlo"
        neff.write_bytes(NEFF + graph)
        hlo.write_bytes(graph)
        found[program.name] = {"program": neff, "hlo": hlo}
    return found


def manifest(program: BucketProgram = PROGRAMS[0], target: str = "trn2-lnc2") -> Manifest:
    return Manifest(
        key_kind="input",
        program=program.name,
        target=target,
        inputs={},
        graph_key="0" * 64,
        signature=program.signature,
        blobs=(Blob("program", "0" * 64, 1), Blob("hlo", "1" * 64, 1)),
        toolchain={},
        lower_s=0.0,
        compile_s=0.0,
        peak_rss_bytes=0,
        log_sha256="0" * 64,
    )


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {s.name: torch.randn(s.shape, generator=generator) for s in weight_specs(ARCHITECTURE)}


def loader_on(device: Device, *routes: str, faults: tuple[str, ...] = ()) -> NeuronLoader:
    return NeuronLoader(lambda lnc: device.connected(*routes), lambda *_: list(faults))


def served_on(device: Device, route: str, files: dict[str, dict[BlobRole, Path]]) -> EagerServer:
    """All programs loaded, and given one memory."""
    loader = loader_on(device, route)

    def memory(_: Any, weights: dict[str, Tensor]) -> DeviceMemory:
        return loader.place(PROGRAMS[0].signature, weights)

    return EagerServer(
        ARCHITECTURE,
        random_weights(),
        SHAPES,
        filler=None,
        load=lambda p: loader.load(files[p.name], manifest(p)),
        memory=memory,
    )


def refusal(action: Callable[[], object]) -> NxbucketError:
    with pytest.raises(NxbucketError) as caught:
        action()
    assert caught.value.hint
    return caught.value


# What a step computes, and in which order things happen


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_several_programs_share_one_cache_and_answer_as_the_eager_ones(
    route: str, files: dict[str, dict[BlobRole, Path]]
) -> None:
    device = Device()
    ours = served_on(device, route, files)
    theirs = EagerServer(ARCHITECTURE, random_weights(), SHAPES, load=eager)
    for server in (ours, theirs):
        server.artifacts.smoke(ARCHITECTURE.vocab_size)
    answers = []
    for server in (ours, theirs):
        # A prefill in two buckets, then decodes: each reads what another program wrote.
        first, second = server.start(list(range(1, 12))), server.start([5, 3, 9])
        server.prefill_all(first, 8)
        server.prefill_all(second, 4)
        server.decode_greedily([first, second], 5)
        answers.append((first, second))
    for a, b in zip(*answers, strict=True):
        assert a.tokens == b.tokens
        torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_all_programs_are_loaded_then_weights_go_up_once_then_each_is_given_them(
    route: str, files: dict[str, dict[BlobRole, Path]]
) -> None:
    device = Device()
    server = served_on(device, route, files)
    given = ["initialize"] * len(PROGRAMS) if route == "SPMDModel" else []
    assert device.events == ["load"] * len(PROGRAMS) + ["weights"] + given
    server.artifacts.smoke(ARCHITECTURE.vocab_size)
    assert device.events[-len(PROGRAMS) :] == ["execute"] * len(PROGRAMS)
    assert device.events.count("weights") == 1


def test_an_executor_gets_the_caches_own_tensors_as_outputs(
    files: dict[str, dict[BlobRole, Path]],
) -> None:
    loader = loader_on(Device(), "Executor")
    program = loader.load(files["decode_b2"], manifest(PROGRAMS[-1]))
    memory = loader.place(PROGRAMS[-1].signature, random_weights())
    program.bind(memory)
    calls: list[tuple[tuple[Tensor, ...], list[Tensor]]] = []
    program._executor.execute = lambda inputs, outputs: calls.append((inputs, outputs))  # type: ignore[attr-defined]
    inputs = {
        t.name: torch.ones(t.shape, dtype=torch.int32)
        for t in PROGRAMS[-1].signature.of_role("input")
    }
    program.run(inputs)
    ((taken, given),) = calls
    signature = PROGRAMS[-1].signature
    by_name = memory.kv_cache | memory.weights
    for spec, tensor in zip(signature.inputs, taken, strict=True):
        assert spec.role == "input" or tensor is by_name[spec.name]
    for spec, tensor in zip(signature.outputs, given, strict=True):
        assert spec.alias is None or tensor is memory.kv_cache[spec.alias]


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_blocks_are_filled_and_copied_on_the_device(
    route: str, files: dict[str, dict[BlobRole, Path]]
) -> None:
    loader = loader_on(Device(), route)
    loader.load(files["decode_b2"], manifest(PROGRAMS[-1]))
    memory = loader.place(PROGRAMS[-1].signature, random_weights())
    memory.fill_blocks([3, 5], 7.0)
    memory.copy_blocks([(3, 1), (1, 5)])
    for cache in memory.kv_cache.values():
        values = cache.flatten(1)[:, 0].tolist()
        # All at once: block 5 is what block 1 was.
        assert values == [0, 7, 0, 7, 0, 0, 0, 0, 0, 0, 0]


# What is refused


def test_an_input_of_another_dtype_or_shape_never_reaches_the_device(
    files: dict[str, dict[BlobRole, Path]],
) -> None:
    device = Device()
    server = served_on(device, "Executor", files)
    executable = server.artifacts.executables[PROGRAMS[0].bucket]
    good = {
        t.name: torch.ones(t.shape, dtype=torch.int32) for t in PROGRAMS[0].signature.inputs[:6]
    }
    for bad in (good["positions"].long(), good["positions"][:-1]):
        with pytest.raises(RuntimeError, match="prefill_s4: positions is"):
            executable.run({**good, "positions": bad})
    assert "execute" not in device.events


@pytest.mark.parametrize("damage", [lambda x: x.half(), lambda x: x[:, 1:]])
def test_logits_of_another_dtype_or_shape_are_an_error(
    damage: Callable[[Tensor], Tensor], files: dict[str, dict[BlobRole, Path]]
) -> None:
    # An Executor writes into a tensor of ours, whose dtype and shape are right.
    server = served_on(Device(damage=damage), "SPMDModel", files)
    with pytest.raises(RuntimeError, match=r"logits is .*, compiled as float32 \[1, 13\]"):
        server.artifacts.smoke(ARCHITECTURE.vocab_size)


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_nan_from_the_device_stops_the_start(
    route: str, files: dict[str, dict[BlobRole, Path]]
) -> None:
    server = served_on(Device(damage=lambda x: x * float("nan")), route, files)
    assert "smoke run" in refusal(lambda: server.artifacts.smoke(ARCHITECTURE.vocab_size)).message


def test_a_weight_or_cache_that_does_not_fit_is_refused_by_name(
    files: dict[str, dict[BlobRole, Path]],
) -> None:
    loader = loader_on(Device(), "Executor")
    program = loader.load(files["decode_b2"], manifest(PROGRAMS[-1]))
    weights = random_weights()
    weights["norm"] = weights["norm"].bfloat16()
    memory = loader.place(PROGRAMS[-1].signature, weights)
    assert (
        "takes norm as float32 [8]; the server has bfloat16 [8]"
        in refusal(lambda: program.bind(memory)).message
    )


def test_what_the_neff_check_says_is_said_with_program_and_path(
    files: dict[str, dict[BlobRole, Path]],
) -> None:
    loader = loader_on(Device(), "Executor", faults=("is for trn1, not for trn2", "is cut off"))
    error = refusal(lambda: loader.load(files["decode_b2"], manifest(PROGRAMS[-1])))
    assert f"decode_b2: {files['decode_b2']['program']} is for trn1" in error.message
    assert "it is cut off" in error.message


def test_an_artifact_without_a_neff_is_refused(files: dict[str, dict[BlobRole, Path]]) -> None:
    loader = loader_on(Device(), "Executor")
    only_hlo: dict[BlobRole, Path] = {"hlo": files["decode_b2"]["hlo"]}
    assert "holds no NEFF" in refusal(lambda: loader.load(only_hlo, manifest())).message


@pytest.mark.parametrize(
    ("event", "route"),
    [
        ("load", "Executor"),
        ("weights", "Executor"),
        ("load", "SPMDModel"),
        ("weights", "SPMDModel"),
        ("initialize", "SPMDModel"),
    ],
)
@pytest.mark.parametrize("status", nrt_errors.STATUSES, ids=lambda s: s.name)
def test_a_status_at_the_start_is_a_sentence_and_a_mend(
    status: nrt_errors.Status, event: str, route: str, files: dict[str, dict[BlobRole, Path]]
) -> None:
    device = Device(fail={event: f'nrt_something status={status.code} message="Some Failure"'})
    error = refusal(lambda: served_on(device, route, files))
    assert status.sentence in error.message
    assert f"{status.name}, status {status.code}" in error.message
    assert error.hint == status.mend


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_a_status_while_serving_is_one_too(
    route: str, files: dict[str, dict[BlobRole, Path]]
) -> None:
    device = Device()
    server = served_on(device, route, files)
    device.fail["execute"] = "nrt_execute failed: NRT_EXEC_OOB"
    with pytest.raises(RuntimeError) as caught:
        server.generate([1, 2, 3], 1, 4)
    assert "prefill_s4: it read or wrote outside of a tensor (NRT_EXEC_OOB, status 1006" in str(
        caught.value
    )
    assert "to mend it: " in str(caught.value)
    device.fail["execute"] = "something else"
    with pytest.raises(RuntimeError, match=r"^something else$"):
        server.generate([1, 2, 3], 1, 4)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('nrt_tensor_allocate status=4 message="Allocation Failure"', 4),
        ("Could not load the model status=4 message=Allocation Failure", 4),
        ("nrt_load_collectives failed, status: 9", 9),
        ("Failure: NRT_RESOURCE in nrt_load()", 4),
        ("status code 10", 10),
        ("status=1", None),
        ("exit status of 40 processes", None),
        ("", None),
    ],
)
def test_a_status_is_found_in_what_runtimes_were_seen_to_say(text: str, code: int | None) -> None:
    status = nrt_errors.find_status(text)
    assert (None if status is None else status.code) == code


# Which class


@pytest.mark.parametrize(
    ("environ", "then"),
    [
        ({}, {"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_NUM_CORES": "1"}),
        (
            {"NEURON_LOGICAL_NC_CONFIG": "", "NEURON_RT_VISIBLE_CORES": "3"},
            {"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VISIBLE_CORES": "3"},
        ),
        (
            {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_NUM_CORES": "4"},
            {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_NUM_CORES": "4"},
        ),
    ],
)
def test_the_runtime_is_told_what_nothing_else_says(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], then: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", environ)
    TorchNeuron.imported(2)
    assert environ == then


def test_every_neuron_target_has_a_class() -> None:
    assert ROUTES.keys() == LNC_OF.keys()


@pytest.mark.parametrize(
    ("target", "registered", "route"),
    [
        ("trn2", ("Executor", "SPMDModel"), "Executor"),
        ("trn2", ("SPMDModel",), "SPMDModel"),
        ("trn3", ("Executor", "SPMDModel"), "Executor"),
        ("trn1", ("Executor", "SPMDModel"), "SPMDModel"),
        ("inf2", ("SPMDModel",), "SPMDModel"),
        ("trn3", ("SPMDModel",), None),
        ("trn1", ("Executor",), None),
        ("trn2", (), None),
    ],
)
def test_the_class_for_a_target(
    target: str, registered: tuple[str, ...], route: str | None
) -> None:
    neuron = Device().connected(*registered)
    if route is None:
        error = refusal(lambda: neuron.route(target))
        assert isinstance(error, EnvironmentProblem)
        assert target in error.message
    else:
        assert neuron.route(target) == route


def test_torch_itself_registers_neither() -> None:
    neuron = TorchNeuron(torch.classes.neuron, torch.ops.neuron)
    assert isinstance(refusal(lambda: neuron.route("trn2")), EnvironmentProblem)


# What SPMDModel is told


def test_the_metaneff_says_what_the_signature_says() -> None:
    program = dataclasses.replace(PROGRAMS[-1], dtype="bfloat16")
    signature = program.signature
    meta = MetaNeff(metaneff(signature, b"the graph"))
    assert meta.graph == b"the graph"
    kinds = {"input": "USER_INPUT", "kv_cache": "INPUT_STATE", "weight": "INPUT_WEIGHT"}
    numbers = {"float32": 1, "int32": 2, "bfloat16": 14}
    assert [t.name for t in meta.inputs] == [f"input{i}" for i in range(len(signature.inputs))]
    assert [t.name for t in meta.outputs] == [f"output{i}" for i in range(len(signature.outputs))]
    for spec, told in zip(signature.inputs, meta.inputs, strict=True):
        assert (told.key, told.shape, told.type) == (spec.name, spec.shape, kinds[spec.role])
        assert told.data_type == numbers[spec.dtype]
    names = [t.name for t in signature.inputs]
    assert meta.aliases == {
        i: names.index(t.alias) for i, t in enumerate(signature.outputs) if t.alias is not None
    }


def test_the_metaneffs_bytes_are_those_of_the_public_example() -> None:
    # Input 0 of float32 [1, 1, 1, 32], USER_INPUT; here with the key that NxD adds.
    signature = PROGRAMS[0].signature
    first = dataclasses.replace(signature.inputs[0], dtype="float32", shape=(1, 1, 1, 32))
    only = dataclasses.replace(signature, inputs=(first,), outputs=())
    tensor = b"\x0a\x06input0" + b"\x12\x04\x01\x01\x01\x20" + b"\x18\x01" + b"\x38\x01"
    tensor += b"\x42\x09input_ids"
    assert metaneff(only) == b"\x0a" + bytes([len(tensor)]) + tensor


# The host


@pytest.fixture
def aws_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with AWS's package."""
    monkeypatch.setattr(
        neuron_device, "installed_packages", lambda: {"torch-neuronx": "2.9.0.2.13"}
    )
    monkeypatch.setattr(neuron_device, "LNC_FILE", tmp_path / "logical_nc_config")
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)


@pytest.mark.usefixtures("aws_host")
def test_a_host_with_the_package_is_accepted() -> None:
    NeuronLoader().check_host(manifest())


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({}, "neither torch-neuronx nor libtorch-neuronx-lite"),
        ({"torch-neuronx": "1.0.0"}, "torch-neuronx 1.0.0 is PyPI's empty placeholder"),
    ],
)
@pytest.mark.usefixtures("aws_host")
def test_a_host_without_awss_packages_is_told_where_they_are(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(neuron_device, "installed_packages", lambda: versions)
    error = refusal(lambda: NeuronLoader().check_host(manifest()))
    assert isinstance(error, EnvironmentProblem)
    assert says in error.message
    assert error.hint is not None
    assert "docs/hardware.md, point 1" in error.hint
    monkeypatch.setattr(neuron_device, "installed_version", lambda _: "2.9.0")
    hint = refusal(lambda: NeuronLoader().check_host(manifest())).hint
    assert hint is not None
    assert "https://pip.repos.neuron.amazonaws.com" in hint


@pytest.mark.usefixtures("aws_host")
def test_another_logical_core_is_refused_with_where_it_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "logical_nc_config"
    file.write_text("# set by us\nNEURON_LOGICAL_NC_CONFIG=1\n")
    error = refusal(lambda: NeuronLoader().check_host(manifest()))
    assert f"logical cores of 2; NEURON_LOGICAL_NC_CONFIG in {file} says 1" in error.message
    # The variable wins over the file.
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    NeuronLoader().check_host(manifest())
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert (
        "NEURON_LOGICAL_NC_CONFIG says 1"
        in refusal(lambda: NeuronLoader().check_host(manifest())).message
    )


def test_device_files_are_the_drivers_own(tmp_path: Path) -> None:
    for name in ("neuron0", "neuron11", "neuron", "neuron-x", "neuron_core", "null"):
        (tmp_path / name).touch()
    assert [p.name for p in neuron_host.neuron_devices(tmp_path)] == ["neuron0", "neuron11"]


@pytest.mark.usefixtures("aws_host")
def test_an_artifact_of_no_neuron_target_is_refused() -> None:
    assert (
        "no Neuron target"
        in refusal(lambda: NeuronLoader().check_host(manifest(target="cpu-x86-64-v3"))).message
    )
