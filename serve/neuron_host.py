"""What a host says of its Neuron devices and of AWS's packages. Imports neither torch nor AWS's."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nxbucket.toolkit.errors import EnvironmentProblem
from nxbucket.toolkit.packages import AWS_INDEX, installed_versions, is_placeholder

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
LNC_FILE = Path("/opt/aws/neuron/logical_nc_config")
PACKAGES = ("torch-neuronx", "libtorch-neuronx-lite")
"""Either brings the classes; the second is named in AWS's plugin documentation of 2026."""
KNOWN_TORCH = (2, 9)
"""The newest torch that a torch-neuronx is known for."""


def neuron_devices(folder: Path = Path("/dev")) -> list[Path]:
    """The driver's device files: /dev/neuron0, /dev/neuron1, ..."""
    return sorted(p for p in folder.glob("neuron*") if p.name.removeprefix("neuron").isdecimal())


def check_device(target: str, emulate: str) -> None:
    """Raises EnvironmentProblem where there is none; `emulate` is the command that needs none."""
    if not neuron_devices():
        raise EnvironmentProblem(
            f"what is locked is for {target}, and this host has no Neuron device (/dev/neuron*)",
            hint=f"serve on a host with one; {emulate} runs the same graphs on this processor",
        )


def installed_packages() -> dict[str, str]:
    return installed_versions(PACKAGES)


def package_problem(versions: Mapping[str, str]) -> str | None:
    """A sentence if nothing here can bring torch.classes.neuron."""
    if not versions:
        return f"a Neuron device is served through torch-neuronx, and {_neither(PACKAGES)} is here"
    if len(_empty(versions)) == len(versions):
        shown = ", ".join(f"{p} {v}" for p, v in versions.items())
        return f"{shown} is PyPI's empty placeholder; AWS's index has the real package"
    return None


def package_hint(versions: Mapping[str, str], torch: str | None) -> str:
    """`torch`: this environment's, which pip must not replace: vLLM is made for it."""
    steps = [f"pip uninstall -y {package}" for package in _empty(versions)]
    if torch is not None and _release(torch) > KNOWN_TORCH:
        newest = ".".join(map(str, KNOWN_TORCH))
        steps.append(
            f"each {PACKAGES[0]} known so far is for torch {newest} or below, and torch {torch} is "
            "here: see docs/hardware.md, point 1, before any pip install"
        )
    else:
        steps.append(f"pip install {PACKAGES[0]} --extra-index-url {AWS_INDEX}")
    return "; ".join(steps)


def _empty(versions: Mapping[str, str]) -> list[str]:
    """No placeholder of the other package is known."""
    return [p for p, v in versions.items() if p == "torch-neuronx" and is_placeholder(v)]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"[0-9]+", version)[:2])


def _neither(names: Iterable[str]) -> str:
    return f"neither {' nor '.join(names)}"


def logical_core_of_host(environ: Mapping[str, str], file: Path) -> tuple[str, str] | None:
    """What this host's runtime is told, and where; None if nothing says."""
    if value := environ.get(LNC_VARIABLE):
        return value, LNC_VARIABLE
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.strip().partition("=")
        if key == LNC_VARIABLE and value.strip():
            return value.strip(), f"{LNC_VARIABLE} in {file}"
    return None
