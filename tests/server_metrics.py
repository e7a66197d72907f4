"""The /metrics text of a server that ran given steps, from prometheus_client itself."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from nxbucket.serve.size_bounds import EXACT_DECODE_SIZES, size_bounds
from nxbucket.toolkit.buckets import get_bucket_for_count


def metrics_text(
    chunks: Mapping[int, int],
    batches: Mapping[int, int],
    prefill_buckets: Sequence[int],
    decode_buckets: Sequence[int],
) -> str:
    """`chunks`, `batches`: real size -> steps."""
    registry = CollectorRegistry()
    for name, padding, sizes, buckets in (
        (
            "nxbucket_prefill_chunk_tokens",
            "nxbucket_prefill_padding_tokens",
            chunks,
            prefill_buckets,
        ),
        ("nxbucket_decode_batch_seqs", "nxbucket_decode_padding_seqs", batches, decode_buckets),
    ):
        bounds = size_bounds(buckets, EXACT_DECODE_SIZES if "decode" in name else 0)
        real = Histogram(name, name, buckets=bounds, registry=registry)
        padded = Histogram(
            padding, padding, ["bucket"], buckets=(0, 1, 16, 256, 4096), registry=registry
        )
        for size, steps in sizes.items():
            bucket = get_bucket_for_count(size, buckets)
            for _ in range(steps):
                real.observe(size)
                padded.labels(bucket).observe(bucket - size)
    return generate_latest(registry).decode()
