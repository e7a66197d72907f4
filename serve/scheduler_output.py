"""What the scheduler hands to the worker: vLLM's `SchedulerOutput` and the padded sizes."""

from dataclasses import dataclass
from typing import Literal

from vllm.v1.core.sched.output import SchedulerOutput

Phase = Literal["prefill", "decode", "idle"]


@dataclass
class NeuronSchedulerOutput(SchedulerOutput):
    """A step with one phase and the size of each row's tensor.

    `num_scheduled_tokens` stays the real count: vLLM advances `num_computed_tokens` by it. vLLM
    pickles the object to the workers, so both extra fields arrive there. Empty outputs that vLLM
    makes itself (`make_empty`) are plain `SchedulerOutput`s.
    """

    num_scheduled_tokens_padded: dict[str, int] | None = None
    phase: Phase = "idle"

    @classmethod
    def from_base(
        cls, output: SchedulerOutput, padded: dict[str, int], phase: Phase
    ) -> "NeuronSchedulerOutput":
        return cls(**vars(output), num_scheduled_tokens_padded=padded, phase=phase)
