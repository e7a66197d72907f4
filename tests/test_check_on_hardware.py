"""scripts/check_on_hardware.py where there is no hardware: it goes as far as it can and says so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import ROOT


@pytest.mark.engine
@pytest.mark.usefixtures("emulated_example")  # its graphs are in the cache
def test_it_goes_up_to_what_is_missing_and_names_it(
    tmp_path: Path, artifact_env: dict[str, str]
) -> None:
    script = str(ROOT / "scripts" / "check_on_hardware.py")
    # A PATH without AWS's tools, wherever this runs.
    env = {**os.environ, **artifact_env, "PATH": "/usr/bin:/bin"}
    options = ("--target", "trn2", "--variants", "float32", "--work-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, script, *options], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    outcomes = dict(re.findall(r"\| (.+) \| \*\*(\w+)\*\* \|", done.stdout))
    assert outcomes == {
        "host": "ok",
        "devices": "missing",
        "packages": "ok",
        "neuronx-cc": "missing",
        "classes of torch.classes.neuron": "missing",
        "field numbers of MetaNeff": "missing",
        "float32: lower every program": "ok",
        "float32: serve the graphs emulated": "ok",
        "float32: compile every program": "missing",
        "float32: read the NEFFs": "skipped",
        "float32: serve on the device": "skipped",
        "float32: time a decode step": "skipped",
    }
    assert done.stdout.startswith("## nxbucket without a Neuron device: trn2\n")
    assert " years ago our fathers brought forth" in done.stdout
    assert "no /dev/neuron*: no device, or no driver" in done.stdout
    assert "pip install neuronx-cc --extra-index-url" in done.stdout
    for name in (str(tmp_path), str(ROOT), str(Path.home()) + "/"):
        assert name not in done.stdout
    assert "neuronx-cc: missing" in done.stderr
