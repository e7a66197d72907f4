"""How long a step takes in each bucket: measured, computed from a chip's peak, or assumed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from nxbucket.toolkit.choice.costs import Costs, Curve
from nxbucket.toolkit.errors import UsageError
from nxbucket.toolkit.spec import DeploySpec

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step by bucket. A larger bucket never takes less: what a measurement says
    against it is noise, and the smaller bucket's time stands."""

    prefill_s: Callable[[int], float]
    """By tokens."""
    decode_s: Callable[[int], float]
    """By sequences."""
    source: str
    """Where the times come from, as a sentence's end."""
    is_assumed: bool = False


ASSUMED = StepTimes(
    prefill_s=lambda tokens: 0.010 + 0.00002 * tokens,
    decode_s=lambda seqs: 0.010 + 0.0001 * seqs,
    source="assumed: prefill 10 ms + 20 us per token, decode 10 ms + 0.1 ms per sequence",
    is_assumed=True,
)
"""Where nothing is known. It decides how many requests decode at once, and nothing else."""


def from_costs(costs: Costs, file: str) -> StepTimes:
    """Raises UsageError if a phase has no step_s."""
    for phase in ("prefill", "decode"):
        if not getattr(costs, phase).step_s:
            raise UsageError(
                f"{file}: {phase}.step_s is empty: no step of that phase has a time",
                hint='add it, e.g. "step_s": {"128": 0.006, "2048": 0.05}, in seconds by bucket',
            )
    return StepTimes(
        Curve.rising(costs.prefill.step_s),
        Curve.rising(costs.decode.step_s),
        f"{file}: {costs.source}",
    )


def of_roofline(spec: DeploySpec, target: str) -> StepTimes:
    """The least time `target`'s published peak allows: max(FLOPs / peak, bytes / bandwidth).

    Williams et al., "Roofline: an insightful visual performance model", 2009. One rank with its
    share of a chip's arithmetic and bandwidth. Bytes are the weights and the KV cache that a step
    reads, FLOPs those of compile/cost.py: both are straight lines in the bucket, so two sizes give
    them exactly. An embedding table of its own is looked up, not read. Real steps take longer.
    """
    from nxbucket.compile.neuron.hardware import CHIP_OF, logical_cores
    from nxbucket.toolkit.spec_reader import LNC_OF

    if target not in CHIP_OF:
        raise UsageError(
            f"--roofline {target}: no such target", hint=f"one of {', '.join(CHIP_OF)}"
        )
    lnc = spec.compiler.lnc if target == spec.target else LNC_OF[target][0]
    assert lnc is not None
    chip, ranks = CHIP_OF[target], logical_cores(target, lnc)
    flops_per_s, bytes_per_s = chip.bf16_flops_per_s / ranks, chip.hbm_bytes_per_s / ranks

    def seconds(phase: str) -> Callable[[int], float]:
        (flops_0, flops_1), (bytes_0, bytes_1) = _work(spec, phase)
        return lambda size: max(
            (flops_0 + flops_1 * size) / flops_per_s, (bytes_0 + bytes_1 * size) / bytes_per_s
        )

    return StepTimes(
        seconds("prefill"),
        seconds("decode"),
        f"roofline of one rank of {chip.name} at LNC {lnc}: {flops_per_s / 1e12:.4g} TFLOP/s bf16, "
        f"{bytes_per_s / 1e9:.4g} GB/s; real steps take longer",
    )


def _work(spec: DeploySpec, phase: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """FLOPs and bytes read of a step, each as a + b x bucket."""
    from nxbucket.compile.cost import EMBEDDING, HEAD, cost_of
    from nxbucket.compile.plan import plan_programs
    from nxbucket.compile.program import ITEM_BYTES, kv_bytes_per_token

    program = next(p for p in plan_programs(spec) if p.phase == phase and p.context_len is None)
    one, two = (cost_of(replace(program, size=size)) for size in (1, 2))
    slope = two.flops - one.flops
    weights = {tensor.name: tensor for tensor in program.signature.of_role("weight")}
    weight_bytes = one.weight_bytes
    if HEAD in weights:
        table = weights[EMBEDDING]
        weight_bytes -= table.num_elements * ITEM_BYTES[table.dtype]
    # The whole block table is read: by each sequence of a decode, once by a prefill.
    context = spec.max_blocks_per_seq * spec.block_size
    kv_bytes = context * kv_bytes_per_token(spec.architecture, spec.dtype)
    reads = (weight_bytes, kv_bytes) if phase == "decode" else (weight_bytes + kv_bytes, 0)
    return (one.flops - slope, slope), reads
