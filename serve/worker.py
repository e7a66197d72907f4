"""NeuronWorker: vLLM's CPU worker with our model runner."""

import multiprocessing
import os

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from nxbucket.compile.parent_death import die_with_parent
from nxbucket.serve.runner import NeuronModelRunner
from nxbucket.serve.served import Served


class NeuronWorker(CPUWorker):
    model_runner: NeuronModelRunner

    def init_device(self) -> None:
        """CPUWorker.init_device of 0.32 with our runner, less its checks of LD_PRELOAD."""
        _die_with_the_server()
        self.device = torch.device("cpu")
        os.environ["VLLM_DIST_IDENT"] = self.distributed_init_method.rpartition(":")[2]
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        self.model_runner = NeuronModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Exactly what the programs were compiled for, whatever this host has free."""
        return Served.from_vllm_config(self.vllm_config).kv_cache_bytes

    def get_supported_kv_cache_layouts(self) -> list[str]:
        # vLLM asks its attention layers; there are none here.
        return [layout.name for layout in get_supported_kv_cache_layouts([])]

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to compile: the programs were run once when the KV cache was bound."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def nxbucket_executions(self) -> dict[str, int]:
        """Executions by program, for /nxbucket/buckets."""
        return dict(self.model_runner.artifacts.executions)


def _die_with_the_server() -> None:
    """If this is a process that vLLM started: killed with its parent, even where that is kill -9.

    An engine that outlives its server keeps weights and KV cache in memory for nobody.
    """
    if multiprocessing.parent_process() is not None:
        die_with_parent()
