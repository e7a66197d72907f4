"""The names targets have in a lock, without the compilers that make them."""

import re

from nxbucket.toolkit.errors import UsageError
from nxbucket.toolkit.spec import DeploySpec

HLO_TARGET = "hlo"
"""The graphs themselves, as `compile --emulate` stores them."""

NEURON_TARGET = re.compile(r"((?:trn|inf)[0-9]+n?)-lnc([12])")


def neuron_target(target: str, lnc: int) -> str:
    return f"{target}-lnc{lnc}"


def parse_neuron_target(name: str) -> tuple[str, int] | None:
    """`trn2-lnc2` -> ("trn2", 2); None for the name of no Neuron target."""
    found = NEURON_TARGET.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def check_emulation(spec: DeploySpec) -> None:
    """Raises UsageError for a model file with nothing to emulate."""
    if spec.target == "cpu":
        raise UsageError(
            "--emulate runs what a Neuron device would on this processor, and "
            f"{spec.path.name} is for target cpu, which runs here anyway",
            hint="leave --emulate out, or set target: trn2 in the model file",
        )
