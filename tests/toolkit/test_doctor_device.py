"""`nxbucket doctor` on a Neuron model file: device, packages, emulation, and a lock for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import model_folder
from nxbucket.serve.neuron_host import package_hint
from nxbucket.toolkit import doctor
from nxbucket.toolkit.doctor import Check, Status
from nxbucket.toolkit.doctor_device import check_devices, check_emulation, check_packages

GOOD_JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
NO_JAX: dict[str, str | None] = {"jax": None, "jaxlib": None}


def status(check: Check) -> str:
    """The status, with a `!` where it means that the host lacks something."""
    if check.status is not Status.OK:
        assert check.mend, check
    return check.status + ("!" if check.missing else "")


def test_devices_are_listed_and_their_absence_is_no_failure() -> None:
    file = Path("my model.yaml")
    check = check_devices("trn2", [], file)
    assert status(check) == "warn"
    assert check.mend is not None
    assert "nxbucket serve 'my model.yaml' --emulate runs" in check.mend
    devices = [Path(f"/dev/neuron{i}") for i in range(16)]
    assert status(check_devices("trn2", devices, file)) == "ok"
    assert check_devices("trn2", devices, file).message == (
        "neuron0, neuron1, neuron2, neuron3, ... (16 in all)"
    )


@pytest.mark.parametrize(
    ("versions", "has_device", "expected"),
    [
        ({"torch-neuronx": "2.9.0.2.13"}, True, "ok"),
        ({"libtorch-neuronx-lite": "0.1"}, True, "ok"),
        ({}, True, "fail!"),
        ({}, False, "warn"),
        ({"torch-neuronx": "1.0"}, True, "fail!"),
        ({"torch-neuronx": "1.0"}, False, "warn"),
    ],
)
def test_packages_are_needed_where_there_is_a_device(
    versions: dict[str, str], has_device: bool, expected: str
) -> None:
    assert status(check_packages(versions, has_device=has_device)) == expected


@pytest.mark.parametrize(
    ("versions", "torch", "hint"),
    [
        ({}, "2.9.1", "pip install torch-neuronx --extra-index-url"),
        ({}, None, "pip install torch-neuronx --extra-index-url"),
        ({}, "2.13.0+cpu", "each torch-neuronx known so far is for torch 2.9 or below, and torch"),
        ({"torch-neuronx": "1.0"}, "2.13.0", "pip uninstall -y torch-neuronx; each torch-neuronx"),
        ({"torch-neuronx": "1.0"}, "2.9.0", "pip uninstall -y torch-neuronx; pip install torch-"),
    ],
)
def test_no_hint_puts_another_torch_under_vllm(
    versions: dict[str, str], torch: str | None, hint: str
) -> None:
    said = package_hint(versions, torch)
    assert said.startswith(hint)
    assert ("pip install torch-neuronx" in said) == ("docs/hardware.md, point 1" not in said)


@pytest.mark.parametrize(
    ("versions", "has_device", "expected"),
    [
        (GOOD_JAX, False, "ok"),
        (NO_JAX, True, "warn"),
        (NO_JAX, False, "fail!"),
        ({"jax": "0.9.0", "jaxlib": "0.9.0"}, False, "fail!"),
    ],
)
def test_a_host_with_neither_device_nor_jax_can_serve_nothing(
    versions: dict[str, str | None], has_device: bool, expected: str
) -> None:
    assert status(check_emulation(versions, has_device=has_device)) == expected


@pytest.fixture
def neuron_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NXBUCKET_CACHE_DIR", str(tmp_path / "cache"))
    model_folder(tmp_path / "model")
    file = tmp_path / "model.yaml"
    file.write_text("model: ./model\ntarget: trn2\nmax_model_len: 128\n")
    return file


def test_they_are_there_for_a_neuron_model_file_alone(
    neuron_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    checks = {check.name: check for check in doctor.examine(neuron_file)}
    assert {"neuron device", "torch-neuronx", "emulation"} <= checks.keys()
    # Target cpu's compiler is not missed.
    assert checks["c++"].status is Status.WARN
    neuron_file.write_text(neuron_file.read_text().replace("trn2", "cpu"))
    checks = {check.name: check for check in doctor.examine(neuron_file)}
    assert not {"neuron device", "torch-neuronx", "emulation"} & checks.keys()


HEAVY = """
import json, sys
from pathlib import Path
from nxbucket.toolkit.doctor import examine
examine(Path(sys.argv[1]))
print(json.dumps([m for m in ("torch", "vllm", "jax", "jaxlib") if m in sys.modules]))
"""


def test_nothing_heavy_is_imported(neuron_file: Path) -> None:
    command = [sys.executable, "-c", HEAVY, str(neuron_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
