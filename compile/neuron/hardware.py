"""What nxbucket knows of AWS's chips: memory and cores, by target.

From about-neuron/arch/neuron-hardware of the SDK's documentation; memory per core is a division.
Nothing was measured.
"""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """Physical cores of one chip, and its HBM."""

    name: str
    cores: int
    hbm_bytes: int


INFERENTIA2 = Chip("Inferentia2", 2, 32 * GIB)
TRAINIUM1 = Chip("Trainium1", 2, 32 * GIB)
TRAINIUM2 = Chip("Trainium2", 8, 96 * GIB)
TRAINIUM3 = Chip("Trainium3", 8, 144 * GIB)

CHIP_OF = {
    "inf2": INFERENTIA2,
    "trn1": TRAINIUM1,
    "trn1n": TRAINIUM1,
    "trn2": TRAINIUM2,
    "trn3": TRAINIUM3,
}


def logical_cores(target: str, lnc: int) -> int:
    """Of one chip: the ranks it has room for."""
    return CHIP_OF[target].cores // lnc


def hbm_bytes_per_rank(target: str, lnc: int) -> int:
    """A rank's fair share. A lone rank of one core reaches its neighbour's half as well."""
    return CHIP_OF[target].hbm_bytes // logical_cores(target, lnc)
