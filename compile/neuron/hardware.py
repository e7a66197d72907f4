"""What nxbucket knows of AWS's chips: memory, cores and published peaks, by target.

From about-neuron/arch/neuron-hardware of the SDK's documentation (inferentia2, trainium, trainium2,
trainium3); memory per core is a division. Its guides for kernel writers have other bandwidths for
Trainium3, 4.7 TB/s, and in one release for Trainium2, 3 TB/s. Nothing was measured.
"""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """Physical cores of one chip, its HBM, and what AWS publishes as its peaks.

    `bf16_flops_per_s` is of dense products: 190 TFLOPS on Inferentia2 and Trainium1, 667 on
    Trainium2, 671 on Trainium3. `hbm_bytes_per_s`: 820 GiB/s on the first two, 2.9 and 4.9 TB/s.
    """

    name: str
    cores: int
    hbm_bytes: int
    bf16_flops_per_s: float
    hbm_bytes_per_s: float


INFERENTIA2 = Chip("Inferentia2", 2, 32 * GIB, 190e12, 820.0 * GIB)
TRAINIUM1 = Chip("Trainium1", 2, 32 * GIB, 190e12, 820.0 * GIB)
TRAINIUM2 = Chip("Trainium2", 8, 96 * GIB, 667e12, 2.9e12)
TRAINIUM3 = Chip("Trainium3", 8, 144 * GIB, 671e12, 4.9e12)

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
