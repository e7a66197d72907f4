"""BoundArtifacts: one lock's programs, verified, loaded and run once. A server has no others."""

import bisect
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nxbucket.compile.program import Phase
from nxbucket.compile.signature import ProgramSignature
from nxbucket.serve import padding
from nxbucket.serve.loaders import Executable, loader_for
from nxbucket.serve.served import Served
from nxbucket.toolkit.errors import BindError

logger = logging.getLogger(__name__)


@dataclass
class BoundArtifacts:
    """Executables by phase and bucket. `prefill` and `decode` choose the smallest that fits."""

    executables: dict[tuple[Phase, int], Executable]
    executions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sizes = {
            phase: sorted(size for p, size in self.executables if p == phase)
            for phase in ("prefill", "decode")
        }
        self.executions = {executable.name: 0 for executable in self.executables.values()}

    @property
    def signature(self) -> ProgramSignature:
        """Any program's: KV cache and weights are the same in all."""
        return next(iter(self.executables.values())).signature

    @property
    def max_blocks(self) -> int:
        """Length of one row of the block table."""
        executable = self.executables["prefill", self._sizes["prefill"][0]]
        table = next(t for t in executable.signature.inputs if t.name == "block_table")
        return table.shape[-1]

    def bucket_for(self, phase: Phase, count: int) -> int:
        """The smallest bound bucket of at least `count`."""
        sizes = self._sizes[phase]
        position = bisect.bisect_left(sizes, count)
        if position == len(sizes):
            raise RuntimeError(f"no {phase} program for {count}: bound are {sizes}")
        return sizes[position]

    def run(self, phase: Phase, bucket: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """The program's logits, float32 [rows, vocab]."""
        executable = self.executables[phase, bucket]
        logits = executable.run(inputs)
        self.executions[executable.name] += 1
        return logits

    def bind(self, kv_cache: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        for executable in self.executables.values():
            executable.bind(kv_cache, weights)

    def smoke(self, vocab_size: int) -> None:
        """Run every program once on padding alone. Raises BindError if an output is not finite.

        Writes only the scratch slot.
        """
        start = time.monotonic()
        for (phase, size), executable in self.executables.items():
            logits = executable.run(self._smoke_inputs(phase, size))
            rows = 1 if phase == "prefill" else size
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

    def _smoke_inputs(self, phase: Phase, size: int) -> dict[str, Tensor]:
        one = torch.zeros(1, dtype=torch.int64)
        no_slot = torch.full((1,), padding.NO_SLOT)
        if phase == "prefill":
            return padding.prefill_inputs(size, self.max_blocks, one, one, no_slot, one)
        table = torch.zeros(1, self.max_blocks, dtype=torch.int32)
        return padding.decode_inputs(size, one, one, no_slot, table)


def load_artifacts(served: Served) -> BoundArtifacts:
    """Load every program of the lock's target; nothing is bound yet. Raises BindError."""
    manifests = served.verified_manifests()
    loader = loader_for(served.target)
    executables = {}
    for program in served.locked.programs:
        manifest = manifests[program.name]
        loader.check_host(manifest)
        path = served.cache.blob_path(program.blobs[0].digest)
        executables[program.phase, program.size] = loader.load(path, manifest)
    return BoundArtifacts(executables)
