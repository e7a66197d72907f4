"""How much of a program this host can verify: the memory it takes, and fewer layers of it."""

from dataclasses import replace

from nxbucket.compile.program import BucketProgram

FLOAT32_COPIES, LOW_PRECISION_BYTES = 2, 16
"""Weights: torch's and perhaps XLA's; in 16 bits both those, the float32 truth, and the float32
copies that XLA makes on a host's processor."""
KV_BYTES = 20
"""Per value: before, eager torch's, XLA's and what came out, in float32, and one to compare."""
SCORE_COPIES = 4


def memory_bytes(program: BucketProgram) -> int:
    """About the most that `verify_program` holds at once; on the high side."""
    weights = sum(t.num_elements for t in program.signature.of_role("weight"))
    kv = sum(t.num_elements for t in program.signature.of_role("kv_cache"))
    each = 4 * FLOAT32_COPIES if program.dtype == "float32" else LOW_PRECISION_BYTES
    keys = program.kv_segment_size or program.max_blocks * program.block_size
    arch = program.architecture
    # Of one layer: scores, and for a decode the gathered keys and values.
    scores = program.size * arch.num_attention_heads * keys
    sequences = program.size if program.phase == "decode" else 1
    gathered = 2 * sequences * arch.num_key_value_heads * arch.head_dim * keys
    return each * weights + KV_BYTES * kv + 4 * SCORE_COPIES * (scores + gathered)


def first_layers(program: BucketProgram, count: int) -> BucketProgram:
    """The same program of a model with no more than its first `count` layers."""
    arch = program.architecture
    count = min(count, arch.num_hidden_layers)
    windowed = tuple(i for i in arch.windowed_layers if i < count)
    shorter = replace(arch, num_hidden_layers=count, windowed_layers=windowed)
    return replace(program, architecture=shorter)


def layers_that_fit(program: BucketProgram, available: int) -> int:
    """0 if not even one does."""
    layers = program.architecture.num_hidden_layers
    fitting = (
        n for n in range(layers, 0, -1) if memory_bytes(first_layers(program, n)) <= available
    )
    return next(fitting, 0)
