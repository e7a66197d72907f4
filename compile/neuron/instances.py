"""AWS's instance types with Neuron chips: how many chips each has.

From about-neuron/arch/neuron-hardware of the SDK's documentation (inf2-, trn1- and trn2-arch). It
names no instance type with Trainium3, only UltraServers of 64 and 144 chips: there are none here.
"""

from dataclasses import dataclass

from nxbucket.compile.neuron.hardware import CHIP_OF, logical_cores
from nxbucket.toolkit.errors import UsageError
from nxbucket.toolkit.refusals import nearest


@dataclass(frozen=True)
class Instance:
    name: str
    target: str
    chips: int

    def logical_cores(self, lnc: int) -> int:
        """The ranks it has room for, `lnc` physical cores each."""
        return self.chips * logical_cores(self.target, lnc)


INSTANCES = {
    instance.name: instance
    for instance in (
        Instance("inf2.xlarge", "inf2", 1),
        Instance("inf2.8xlarge", "inf2", 1),
        Instance("inf2.24xlarge", "inf2", 6),
        Instance("inf2.48xlarge", "inf2", 12),
        Instance("trn1.2xlarge", "trn1", 1),
        Instance("trn1.32xlarge", "trn1", 16),
        Instance("trn1n.32xlarge", "trn1n", 16),
        Instance("trn2.48xlarge", "trn2", 16),
        Instance("trn2u.48xlarge", "trn2", 16),
    )
}


def target_of(instance: str) -> str:
    """Of an instance type; a target stands for all of its own. Raises UsageError for neither."""
    if instance in CHIP_OF:
        return instance
    if instance in INSTANCES:
        return INSTANCES[instance].target
    near = nearest(instance, INSTANCES)
    hint = f"did you mean {near}? " if near else ""
    raise UsageError(
        f"no instance type {instance} is known here",
        hint=f"{hint}known: {', '.join(INSTANCES)}; a target does as well: {', '.join(CHIP_OF)}",
    )
