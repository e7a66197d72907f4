"""From a model file to the programs it needs."""

from math import ceil

from nxbucket.compile.program import BucketProgram, Phase
from nxbucket.toolkit.spec import DeploySpec


def plan_programs(spec: DeploySpec) -> list[BucketProgram]:
    """One program for each prefill entry, then one for each decode entry and context length.

    In the lists' order; max_model_len is the last context length, and every prefill's only one.
    """
    neuron = spec.neuron_config

    def program(phase: Phase, size: int, context_len: int | None = None) -> BucketProgram:
        return BucketProgram(
            phase=phase,
            size=size,
            architecture=spec.architecture,
            dtype=spec.dtype,
            block_size=spec.block_size,
            max_blocks=ceil((context_len or spec.max_model_len) / spec.block_size),
            num_kv_blocks=spec.num_kv_blocks,
            context_len=context_len,
            kv_segment_size=neuron.kv_segment_size,
        )

    contexts = (*(neuron.decode_context_length_buckets or ()), None)
    return [
        *(program("prefill", size) for size in neuron.num_batched_tokens_buckets),
        *(program("decode", n, context) for n in neuron.num_seqs_buckets for context in contexts),
    ]
