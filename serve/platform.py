"""NeuronPlatform: vLLM's CPU platform with our scheduler, worker and model runner.

vLLM imports this while `vllm.config` is being imported, so that nothing of vLLM's but its platforms
can be imported at the top.
"""

import logging
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from nxbucket.serve.served import Served
from nxbucket.toolkit.errors import BindError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NeuronPlatform(CpuPlatform):
    """`_enum` stays CPU on purpose: many of vLLM's code paths ask `is_cpu()`.

    `device_type` stays "cpu" also on a host with a Neuron device. vLLM's share of a step, batches
    and the sampler, works on this host's tensors; only programs, their weights and the KV cache are
    on the device, and that is the loader's affair. NOT VERIFIED with AWS's packages imported.
    """

    simple_compile_backend = "eager"
    """vLLM's sampler has a torch.compile in its logprobs path: with inductor it would compile C++
    at the first such request, and fail where there is no compiler."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Called several times and in several processes: every line must bear repetition."""
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        # CpuPlatform forces both: it has no use for the first, and binds OpenMP threads in `mp`.
        want_async = bool(scheduler.async_scheduling)
        executor = parallel.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = want_async
        parallel.distributed_executor_backend = executor
        if vllm_config.model_config is None:
            return
        _share_vllm_logging()
        check_shapes(vllm_config)
        parallel.worker_cls = "nxbucket.serve.worker.NeuronWorker"
        name = "NeuronAsyncScheduler" if want_async else "NeuronScheduler"
        scheduler.scheduler_cls = f"nxbucket.serve.scheduler.{name}"

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Raises VLLMValidationError, which the server answers with 400."""
        if getattr(params, "prompt_logprobs", None) is not None:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                "prompt_logprobs (and echo with logprobs) needs programs that return the logits of "
                "every prompt token; this server's return those of the last one",
                parameter="prompt_logprobs",
            )


def _share_vllm_logging() -> None:
    """Our log lines go where vLLM's go. It configures only its own logger, in every process."""
    ours, theirs = logging.getLogger("nxbucket"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers, ours.propagate = theirs.handlers[:], False
        ours.setLevel(theirs.level)


def check_shapes(vllm_config: "VllmConfig") -> None:
    """Raises BindError, with both values, where vLLM is about to use shapes not the lock's."""
    served = Served.from_vllm_config(vllm_config)
    spec = served.lock.spec
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    pairs = {
        "dtype": (str(model.dtype).removeprefix("torch."), spec["dtype"]),
        "max_model_len": (model.max_model_len, spec["max_model_len"]),
        "max_num_seqs": (scheduler.max_num_seqs, spec["max_num_seqs"]),
        "max_num_batched_tokens": (
            scheduler.max_num_batched_tokens,
            spec["max_num_batched_tokens"],
        ),
        "block_size": (cache.block_size, spec["block_size"]),
        "num_gpu_blocks_override": (
            cache.num_gpu_blocks_override,
            served.locked.num_kv_blocks,
        ),
        "tensor_parallel_size": (vllm_config.parallel_config.tensor_parallel_size, 1),
    }
    wrong = [f"{key} is {a}, locked {b}" for key, (a, b) in pairs.items() if a != b]
    if wrong:
        raise BindError(
            f"vLLM was given other shapes than {served.lock_file} names: {'; '.join(wrong)}",
            hint=f"edit {served.model_file} and compile, or leave these to the lock",
        )
