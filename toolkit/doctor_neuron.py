"""What `nxbucket doctor` looks at for a Neuron target only. No device is asked for anything."""

from collections.abc import Mapping
from pathlib import Path

from nxbucket.compile.neuron.libneuronxla import find_libneuronxla
from nxbucket.compile.neuron.neuronx_cc import (
    INSTALL,
    find_neuronx_cc,
    missing_compiler,
    placeholder_version,
    probe,
)
from nxbucket.serve.neuron_host import LNC_FILE, LNC_VARIABLE, logical_core_of_host
from nxbucket.toolkit.doctor import NEURONX_CC, Check, Status
from nxbucket.toolkit.errors import EnvironmentProblem
from nxbucket.toolkit.packages import installed_versions
from nxbucket.toolkit.spec import DeploySpec

PACKAGES = ("neuronx-cc", "libneuronxla", "torch-neuronx")


def neuron_checks(spec: DeploySpec, environ: Mapping[str, str]) -> list[Check]:
    return [
        check_compiler(spec.target),
        check_placeholders(),
        *check_neuron_environment(spec, environ, LNC_FILE),
    ]


def check_compiler(target: str) -> Check:
    name = NEURONX_CC
    path = find_neuronx_cc()
    if path is None:
        if (library := find_libneuronxla()) is not None:
            message = f"no command, but libneuronxla {library.version}, which is compiled with"
            return Check(name, Status.OK, message)
        problem = missing_compiler()
        return Check(name, Status.FAIL, problem.message, problem.hint, missing=True)
    try:
        compiler = probe(path)
    except EnvironmentProblem as err:
        return Check(name, Status.FAIL, err.message, err.hint, missing=True)
    listed = ", ".join(compiler.targets) or "none that could be read"
    message = f"{compiler.version}, {path}; targets {listed}"
    if compiler.targets and target not in compiler.targets:
        mend = "set target to one of these, or install a neuronx-cc that knows it"
        return Check(name, Status.FAIL, f"{message}; {target} is not among them", mend)
    return Check(name, Status.OK, message)


def check_placeholders() -> Check:
    """PyPI has empty packages of version 1 under these names."""
    name = "neuron packages"
    empty = {p: v for p in PACKAGES if (v := placeholder_version(p)) is not None}
    if empty:
        shown = ", ".join(f"{package} {version}" for package, version in empty.items())
        message = f"{shown}: empty placeholders from PyPI"
        names = " ".join(empty)
        mend = f"pip uninstall -y {names}"
        if set(empty) - {"torch-neuronx"}:
            mend += f"; {INSTALL}"
        return Check(name, Status.FAIL, message, mend, missing=True)
    found = [f"{p} {v}" for p, v in installed_versions(PACKAGES).items()]
    return Check(name, Status.OK, ", ".join(found) or "none installed")


def check_neuron_environment(
    spec: DeploySpec, environ: Mapping[str, str], lnc_file: Path
) -> list[Check]:
    """One for each variable that gets in the way."""
    name = "neuron environment"
    checks = []
    here = logical_core_of_host(environ, lnc_file)
    if here is not None and here[0] != str(spec.compiler.lnc):
        lnc, source = here
        message = (
            f"{source} says {lnc}, and the programs are for logical cores of {spec.compiler.lnc}: "
            "the runtime does not take them"
        )
        mend = f"export {LNC_VARIABLE}={spec.compiler.lnc}, or set compiler.lnc: {lnc} and compile"
        checks.append(Check(name, Status.FAIL, message, mend))
    if environ.get("NEURON_RT_ALLOW_LEGACY_NEFF"):
        message = (
            "NEURON_RT_ALLOW_LEGACY_NEFF is set: the runtime would try programs of another chip, "
            "which may stall"
        )
        checks.append(Check(name, Status.WARN, message, "unset NEURON_RT_ALLOW_LEGACY_NEFF"))
    if flags := environ.get("NEURON_CC_FLAGS"):
        message = f"NEURON_CC_FLAGS={flags} is for frameworks and ignored here"
        mend = "unset NEURON_CC_FLAGS; options for neuronx-cc go into compiler.flags"
        checks.append(Check(name, Status.WARN, message, mend))
    return checks or [Check(name, Status.OK, "no Neuron variable gets in the way")]
