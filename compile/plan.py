"""From a model file to the programs it needs."""

from nxbucket.compile.program import BucketProgram, Phase
from nxbucket.toolkit.spec import DeploySpec


def plan_programs(spec: DeploySpec) -> list[BucketProgram]:
    """One program for each entry of both lists, prefill first, in the lists' order."""

    def program(phase: Phase, size: int) -> BucketProgram:
        return BucketProgram(
            phase=phase,
            size=size,
            architecture=spec.architecture,
            dtype=spec.dtype,
            block_size=spec.block_size,
            max_blocks=spec.max_blocks_per_seq,
            num_kv_blocks=spec.num_kv_blocks,
        )

    neuron = spec.neuron_config
    return [
        *(program("prefill", size) for size in neuron.num_batched_tokens_buckets),
        *(program("decode", size) for size in neuron.num_seqs_buckets),
    ]
