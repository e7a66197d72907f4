"""What `nxbucket doctor` says of a Neuron host; a model file for the cpu sees none of it."""

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from neuron_bench import NeuronBench
from neuronx_cc_stand_in import StandIn, install
from null_compiler import model_file

from nxbucket.serve.neuron_host import LNC_VARIABLE, logical_core_of_host
from nxbucket.toolkit.doctor import Check, Status
from nxbucket.toolkit.doctor_neuron import (
    check_compiler,
    check_neuron_environment,
    check_placeholders,
)
from nxbucket.toolkit.spec import DeploySpec, load_spec


@pytest.fixture
def spec(tmp_path: Path) -> DeploySpec:
    """For trn2, logical cores of 2."""
    return load_spec(model_file(tmp_path, extra="target: trn2\n"))


def test_a_compiler_is_named_with_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{install(tmp_path)}{os.pathsep}{os.defpath}")
    check = check_compiler("trn2")
    assert check.status is Status.OK
    assert f"2.27.5334.0+f702b353, {tmp_path / 'neuronx-cc'}; targets inf2" in check.message
    for name, value in StandIn(targets=("trn1", "inf2")).environ().items():
        monkeypatch.setenv(name, value)
    check = check_compiler("trn2")
    assert (check.status, check.missing) == (Status.FAIL, False)
    assert "trn2 is not among them" in check.message
    (tmp_path / "neuronx-cc").write_text("#!/bin/sh\nexit 1\n")
    check = check_compiler("trn2")
    assert (check.status, check.missing) == (Status.FAIL, True)


def test_no_compiler_is_what_this_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    check = check_compiler("trn2")
    assert (check.status, check.missing) == (Status.FAIL, True)
    assert "an environment of its own" in (check.mend or "")
    assert '~/neuronx-cc/bin/pip install "neuronx-cc==VERSION"' in (check.mend or "")


def test_placeholders_are_told_from_aws_s_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_placeholders() == Check("neuron packages", Status.OK, "none installed")
    versions = {"neuronx-cc": "1.0.0", "libneuronxla": "2.2.8201.0"}

    def version(package: str) -> str:
        try:
            return versions[package]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(importlib.metadata, "version", version)
    check = check_placeholders()
    assert (check.status, check.missing) == (Status.FAIL, True)
    assert check.message == "neuronx-cc 1.0.0: empty placeholders from PyPI"
    assert "--extra-index-url https://pip.repos.neuron.amazonaws.com" in (check.mend or "")
    versions |= {"neuronx-cc": "2.27.5334.0+f702b353", "torch-neuronx": "1.0"}
    assert check_placeholders().mend == "pip uninstall -y torch-neuronx"
    del versions["torch-neuronx"]
    assert (
        check_placeholders().message == "neuronx-cc 2.27.5334.0+f702b353, libneuronxla 2.2.8201.0"
    )


def test_variables_that_get_in_the_way(spec: DeploySpec, tmp_path: Path) -> None:
    file = tmp_path / "logical_nc_config"

    def statuses(environ: dict[str, str], lnc_of_file: str | None = None) -> list[str]:
        file.unlink(missing_ok=True)
        if lnc_of_file is not None:
            file.write_text(f"# comment\nNEURON_LOGICAL_NC_CONFIG={lnc_of_file}\n")
        checks = check_neuron_environment(spec, environ, file)
        assert all(c.mend for c in checks if c.status is not Status.OK)
        return [c.status.value for c in checks]

    assert statuses({}) == ["ok"]
    assert statuses({"NEURON_LOGICAL_NC_CONFIG": "2"}) == ["ok"]
    assert statuses({"NEURON_LOGICAL_NC_CONFIG": "1"}) == ["fail"]
    assert statuses({}, "1") == ["fail"]
    assert statuses({"NEURON_LOGICAL_NC_CONFIG": "2"}, "1") == ["ok"]
    both = {"NEURON_RT_ALLOW_LEGACY_NEFF": "1", "NEURON_CC_FLAGS": "--cache_dir=/x"}
    assert statuses(both) == ["warn", "warn"]
    assert logical_core_of_host({}, file) is None
    file.write_text("# comment\nNEURON_LOGICAL_NC_CONFIG=1\n")
    assert logical_core_of_host({}, file) == ("1", f"{LNC_VARIABLE} in {file}")


def test_doctor_asks_for_neuron_only_where_the_model_file_does(tmp_path: Path) -> None:
    def names(bench: NeuronBench) -> list[str]:
        return [c["name"] for c in json.loads(bench.run("doctor", "--json").stdout)["checks"]]

    neuron = {"neuronx-cc", "neuron packages", "neuron environment"}
    bench = NeuronBench(tmp_path)
    assert neuron <= set(names(bench))
    assert "compiles for cpu-" not in bench.run("doctor").stdout
    bench = NeuronBench(tmp_path, "")
    assert not neuron & set(names(bench))
    assert "compiles for cpu-" in bench.run("doctor").stdout
