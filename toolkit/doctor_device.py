"""What `nxbucket doctor` looks at for serving a Neuron target: the device, its packages, emulation.

No device is asked for anything, and nothing of AWS's is imported.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nxbucket.compile.explain import emulate_command
from nxbucket.serve.emulation import INSTALL, installed_jax, jax_problem
from nxbucket.serve.neuron_host import (
    installed_packages,
    neuron_devices,
    package_hint,
    package_problem,
)
from nxbucket.toolkit.doctor import Check, Status
from nxbucket.toolkit.packages import installed_version
from nxbucket.toolkit.spec import DeploySpec


def device_checks(spec: DeploySpec) -> list[Check]:
    devices = neuron_devices()
    return [
        check_devices(spec.target, devices, spec.path),
        check_packages(installed_packages(), has_device=bool(devices)),
        check_emulation(installed_jax(), has_device=bool(devices)),
    ]


def check_devices(target: str, devices: Sequence[Path], model_file: Path) -> Check:
    """A warning, not a failure: programs are compiled and emulated without one."""
    name = "neuron device"
    if not devices:
        emulate = emulate_command("serve", model_file)
        mend = f"without one, {emulate} runs the same graphs on this processor"
        return Check(name, Status.WARN, f"no /dev/neuron*; {target} is served on one", mend)
    shown = ", ".join(path.name for path in devices[:4]) + (", ..." if len(devices) > 4 else "")
    return Check(name, Status.OK, f"{shown} ({len(devices)} in all)")


def check_packages(versions: Mapping[str, str], *, has_device: bool) -> Check:
    """Only a host with a device needs them."""
    name = "torch-neuronx"
    if problem := package_problem(versions):
        status = Status.FAIL if has_device else Status.WARN
        return Check(
            name,
            status,
            problem,
            package_hint(versions, installed_version("torch")),
            missing=has_device,
        )
    return Check(name, Status.OK, ", ".join(f"{p} {v}" for p, v in versions.items()))


def check_emulation(versions: Mapping[str, str | None], *, has_device: bool) -> Check:
    """A host with neither a device nor this can serve nothing of a Neuron model file."""
    name = "emulation"
    if problem := jax_problem(versions):
        status = Status.WARN if has_device else Status.FAIL
        return Check(name, status, problem, INSTALL, missing=not has_device)
    shown = ", ".join(f"{package} {version}" for package, version in versions.items())
    return Check(name, Status.OK, f"{shown}: --emulate works here")
