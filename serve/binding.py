"""BoundArtifacts: one lock's programs, verified, loaded and run once. A server has no others."""

import bisect
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxbucket.compile import padding
from nxbucket.compile.program import Bucket, Phase
from nxbucket.compile.signature import ProgramSignature
from nxbucket.serve.executable import Executable, Loader, Memory
from nxbucket.serve.served import Served
from nxbucket.toolkit.errors import BindError

logger = logging.getLogger(__name__)


@dataclass
class BoundArtifacts:
    """Executables by bucket. `bucket_for` and `decode_bucket` choose the smallest that fits."""

    executables: dict[Bucket, Executable[Any]]
    executions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sizes = {
            phase: sorted({bucket.size for bucket in self.executables if bucket.phase == phase})
            for phase in ("prefill", "decode")
        }
        self._contexts = sorted({b.context_len for b in self.executables if b.context_len})
        self._table_lengths = {
            bucket: next(t for t in e.signature.inputs if t.name == "block_table").shape[-1]
            for bucket, e in self.executables.items()
        }
        self.executions = {executable.name: 0 for executable in self.executables.values()}

    @property
    def signature(self) -> ProgramSignature:
        """Any program's: KV cache and weights are the same in all."""
        return next(iter(self.executables.values())).signature

    def max_blocks(self, bucket: Bucket) -> int:
        """Length of one row of the program's block table."""
        return self._table_lengths[bucket]

    def bucket_for(self, phase: Phase, count: int) -> Bucket:
        """The smallest bound bucket of at least `count`, for contexts up to max_model_len."""
        sizes = self._sizes[phase]
        position = bisect.bisect_left(sizes, count)
        if position == len(sizes):
            raise RuntimeError(f"no {phase} program for {count}: bound are {sizes}")
        return Bucket(phase, sizes[position])

    def decode_bucket(self, rows: int, longest: int) -> Bucket:
        """The smallest batch that holds `rows`; of its programs, the shortest for `longest`.

        `longest`: tokens of the longest sequence, the one this step writes included.
        """
        bucket = self.bucket_for("decode", rows)
        position = bisect.bisect_left(self._contexts, longest)
        if position == len(self._contexts):
            return bucket
        return bucket._replace(context_len=self._contexts[position])

    def run(self, bucket: Bucket, inputs: Mapping[str, Tensor]) -> Tensor:
        """The program's logits, float32 [rows, vocab]."""
        executable = self.executables[bucket]
        logits = executable.run(inputs)
        self.executions[executable.name] += 1
        return logits

    def bind(self, memory: Memory) -> None:
        """Give all programs the same weights and KV cache."""
        for executable in self.executables.values():
            executable.bind(memory)

    def smoke(self, vocab_size: int) -> None:
        """Run every program once on padding alone. Raises BindError if an output is not finite.

        Writes only the scratch slot.
        """
        start = time.monotonic()
        for bucket, executable in self.executables.items():
            logits = executable.run(self._smoke_inputs(bucket))
            rows = 1 if bucket.phase == "prefill" else bucket.size
            if logits.shape != (rows, vocab_size) or not bool(torch.isfinite(logits).all()):
                raise BindError(
                    f"{executable.name} fails its smoke run: logits {list(logits.shape)}, "
                    f"{int((~torch.isfinite(logits)).sum())} of them not finite",
                    hint="check the weights for NaN; if they are sound, compile again",
                )
        logger.info(
            "bound %d programs; smoke runs took %.2f s",
            len(self.executables),
            time.monotonic() - start,
        )

    def _smoke_inputs(self, bucket: Bucket) -> dict[str, Tensor]:
        one = torch.zeros(1, dtype=torch.int64)
        no_slot = torch.full((1,), padding.NO_SLOT)
        max_blocks = self.max_blocks(bucket)
        if bucket.phase == "prefill":
            return padding.prefill_inputs(bucket.size, max_blocks, one, one, no_slot, one)
        table = torch.zeros(1, max_blocks, dtype=torch.int32)
        return padding.decode_inputs(bucket.size, one, one, no_slot, table)


def load_artifacts(served: Served, loader: Loader[Any]) -> BoundArtifacts:
    """Load every program of the lock's target; nothing is bound yet. Raises BindError."""
    manifests = served.verified_manifests()
    executables = {}
    for program in served.locked.programs:
        manifest = manifests[program.name]
        loader.check_host(manifest)
        paths = {blob.role: served.cache.blob_path(blob.digest) for blob in program.blobs}
        executables[program.bucket] = loader.load(paths, manifest)
    return BoundArtifacts(executables)
