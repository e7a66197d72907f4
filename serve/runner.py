"""NeuronModelRunner: vLLM's request state and sampler around bound bucket programs.

Derived from vLLM 0.32's CPUModelRunner (facts: `_update_states`, `InputBatch`, `_prepare_inputs`,
`sample_tokens` and everything they reach are kept). What is ours is the device half: which program
runs, on which padded tensors, and the KV cache it updates. tests/serve/test_vllm_names.py holds the
list of private names used here.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from nxbucket.compile import padding
from nxbucket.compile.program import Bucket
from nxbucket.serve.binding import BoundArtifacts, load_artifacts
from nxbucket.serve.executable import Loader, Memory
from nxbucket.serve.loaders import loader_for
from nxbucket.serve.metrics import ProgramMetrics
from nxbucket.serve.scheduler_output import NeuronSchedulerOutput
from nxbucket.serve.served import Served
from nxbucket.serve.weights import load_weights
from nxbucket.toolkit.errors import BindError

logger = logging.getLogger(__name__)


class NeuronModelRunner(CPUModelRunner):
    """Runs exactly the programs of the lock; never builds a vLLM model and never compiles."""

    artifacts: BoundArtifacts
    loader: Loader[Any]
    memory: Memory

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Verify and load programs and weights. They are bound once the KV cache exists."""
        served = Served.from_vllm_config(self.vllm_config)
        if served.emulated:
            logger.warning(
                "emulating %s on XLA:CPU: correct, not fast; nothing here is a NEFF",
                served.lock.spec["target"],
            )
        self.loader = loader_for(served.target, emulate=served.emulated)
        self.artifacts = load_artifacts(served, self.loader)
        self.weights = load_weights(
            Path(self.model_config.model), served.architecture, served.dtype
        )
        # vLLM asks the model for logits of prompt tokens only, and those are refused at the door
        # (NeuronPlatform.validate_request). Anything else that touches it should fail by name.
        self.model = torch.nn.Module()

    def get_supported_generation_tasks(self) -> list[Any]:
        return ["generate"]

    def get_supported_pooling_tasks(self) -> list[Any]:
        return []

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One full-attention layer for each key cache of the programs' signature."""
        keys = [t for t in self.artifacts.signature.of_role("kv_cache") if t.name.startswith("key")]
        return {
            f"layers.{i}": FullAttentionSpec(
                block_size=key.shape[1],
                num_kv_heads=key.shape[2],
                head_size=key.shape[3],
                dtype=getattr(torch, key.dtype),
            )
            for i, key in enumerate(keys)
        }

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: Any = None,
    ) -> None:
        """Allocate the programs' KV cache, bind everything, and run each program once."""
        self.kv_cache_config = kv_cache_config
        self._kernel_block_sizes = [
            group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups
        ]
        self.attn_groups = [[] for _ in kv_cache_config.kv_cache_groups]
        self.may_reinitialize_input_batch(kv_cache_config)
        self._postprocess_tensors()  # the InputBatch may be a new one
        specs = list(self.artifacts.signature.of_role("kv_cache"))
        if kv_cache_config.num_blocks != specs[0].shape[0]:
            raise BindError(
                f"vLLM planned {kv_cache_config.num_blocks} KV blocks and the programs were "
                f"compiled for {specs[0].shape[0]}",
                hint="leave --num-gpu-blocks-override and KV memory to the lock",
            )
        # `self.kv_caches` stays empty: where keys and values are is the programs' own affair.
        self.memory = self.loader.place(self.artifacts.signature, self.weights)
        self.weights = {}  # the memory has them, perhaps as other bytes
        self.artifacts.bind(self.memory)
        self.artifacts.smoke(self.model_config.get_vocab_size())
        self.program_metrics = ProgramMetrics(self.artifacts.executables, self.loader.compiles)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's own, which copies blocks within `self.kv_caches`: there are none."""
        copies = scheduler_output.kv_cache_block_copies
        scheduler_output.kv_cache_block_copies = None
        correct_states = super()._update_states(scheduler_output)
        if copies:
            self.memory.copy_blocks(copies)
        return correct_states

    @torch.no_grad()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None
    ) -> Any:
        """Run the step's program; `sample_tokens` finishes the step, unless there was none."""
        if self.execute_model_state is not None:
            raise RuntimeError("sample_tokens() must be called after execute_model() returns None")
        correct_states = self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        assert isinstance(scheduler_output, NeuronSchedulerOutput)
        req_ids = self.input_batch.req_ids
        num_scheduled = np.array(
            [scheduler_output.num_scheduled_tokens[r] for r in req_ids], dtype=np.int32
        )
        logits_indices, _, _ = self._prepare_inputs(scheduler_output, num_scheduled)
        if scheduler_output.phase == "prefill":
            logits = self._prefill(scheduler_output)
        else:
            logits = self._decode()
        no_hidden_states = logits.new_empty((len(logits_indices), 0))
        self.execute_model_state = ExecuteModelState(
            scheduler_output=scheduler_output,
            logits=logits,
            spec_decode_metadata=None,
            spec_decode_common_attn_metadata=None,
            hidden_states=no_hidden_states,
            sample_hidden_states=no_hidden_states,
            aux_hidden_states=None,
            ec_connector_output=None,
            cudagraph_stats=None,
            slot_mappings=None,
        )
        self.kv_connector_output = None
        if correct_states is not None:
            correct_states()
        return None

    def _prefill(self, scheduler_output: NeuronSchedulerOutput) -> Tensor:
        """One request's chunk, in the bucket the scheduler chose. -> logits [1, vocab]"""
        (req_id,) = self.input_batch.req_ids
        num_tokens = scheduler_output.num_scheduled_tokens[req_id]
        padded = scheduler_output.num_scheduled_tokens_padded
        assert padded is not None
        bucket = Bucket("prefill", padded[req_id])
        positions = self.positions[:num_tokens]
        num_blocks = int(positions[-1]) // self._kernel_block_sizes[0] + 1
        table = self.input_batch.block_table[0]
        inputs = padding.prefill_inputs(
            bucket.size,
            self.artifacts.max_blocks(bucket),
            self.input_ids.gpu[:num_tokens],
            positions,
            table.slot_mapping.gpu[:num_tokens],
            table.block_table.gpu[0, :num_blocks],
        )
        logits = self.artifacts.run(bucket, inputs)
        self.program_metrics.ran(bucket, num_tokens)
        return logits

    def _decode(self) -> Tensor:
        """One token of each running request, in the smallest bucket. -> logits [requests, vocab]

        The scheduler does not choose here: the batch and its context lengths are what they are.
        """
        rows = self.input_batch.num_reqs
        longest = int(self.positions[:rows].max()) + 1
        bucket = self.artifacts.decode_bucket(rows, longest)
        table = self.input_batch.block_table[0]
        inputs = padding.decode_inputs(
            bucket.size,
            self.input_ids.gpu[:rows],
            self.positions[:rows],
            table.slot_mapping.gpu[:rows],
            table.block_table.gpu[:rows, : self.artifacts.max_blocks(bucket)],
        )
        logits = self.artifacts.run(bucket, inputs)
        self.program_metrics.ran(bucket, rows)
        return logits[:rows]

    def sample_tokens(self, grammar_output: Any) -> Any:  # type: ignore[override]
        """vLLM's own sampling, except after a chunk that is not the prompt's last.

        Nothing is sampled there: the token would be thrown away, and stock vLLM 0.32 on CPU dies in
        `_bookkeeping_sync` when it tries to rewind the generator of a seeded request.
        """
        state = self.execute_model_state
        if state is None or not self._is_unfinished_prefill(state.scheduler_output):
            return super().sample_tokens(grammar_output)
        self.execute_model_state = None
        self.input_batch.prev_sampled_token_ids = None
        self.input_batch.prev_req_id_to_index = {}
        req_ids = self.input_batch.req_ids.copy()
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[[] for _ in req_ids],
        )

    def _is_unfinished_prefill(self, scheduler_output: SchedulerOutput) -> bool:
        assert isinstance(scheduler_output, NeuronSchedulerOutput)
        return scheduler_output.phase == "prefill" and bool(self.discard_request_mask.np[0])

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        self.memory.fill_blocks(block_ids, 0)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bucket server has no dummy run: only bound programs ever run")
