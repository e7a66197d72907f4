"""vLLM's real scheduler in this process: a tiny model folder, a fake worker, one row per step."""

import json
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    # vLLM imports inductor, which imports this module, which decorates with a deprecated name.
    warnings.filterwarnings("ignore", "`torch.jit.script_method`", DeprecationWarning)
    import torch.utils.mkldnn

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_max_concurrency_for_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@dataclass
class SchedulerFactory:
    """Builds schedulers on one model folder; engine configs are made once per set of arguments."""

    model: Path
    _configs: dict[str, VllmConfig]

    @classmethod
    def in_folder(cls, folder: Path) -> "SchedulerFactory":
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
        init_none_hash(sha256)
        return cls(folder, {})

    def config(self, *, is_async: bool = False, **engine_args: Any) -> VllmConfig:
        args: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "max_model_len": 1024,
            "enable_prefix_caching": False,
            **engine_args,
        }
        key = repr(sorted(args.items())) + str(is_async)
        if key not in self._configs:
            config = EngineArgs(
                str(self.model),
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                block_size=BLOCK,
                **args,
            ).create_engine_config()
            # vLLM's CPU platform turns async off; the deployment's platform restores it.
            config.scheduler_config.async_scheduling = is_async
            self._configs[key] = config
        return self._configs[key]

    def scheduler(
        self,
        scheduler_cls: type[Scheduler],
        *,
        num_blocks: int = 20_000,
        kv_groups: list[KVCacheGroupSpec] | None = None,
        is_async: bool | None = None,
        config: VllmConfig | None = None,
        **engine_args: Any,
    ) -> Scheduler:
        if is_async is None:
            is_async = issubclass(scheduler_cls, AsyncScheduler)
        config = config or self.config(is_async=is_async, **engine_args)
        config.cache_config.num_gpu_blocks = num_blocks
        groups = kv_groups if kv_groups is not None else [full_attention_group()]
        return scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )


def full_attention_group(name: str = "layer") -> KVCacheGroupSpec:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return KVCacheGroupSpec([name], spec)


def make_request(
    name: str,
    num_prompt: int = 20,
    max_tokens: int = 100,
    *,
    prompt: list[int] | None = None,
    priority: int = 0,
    arrival: float | None = None,
) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if prompt is None:
        seed = sum(name.encode())
        prompt = [(seed * 31 + i) % 1000 + 3 for i in range(num_prompt)]
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        priority=priority,
        arrival_time=arrival,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def wait_for_grammar(request: Request) -> Request:
    """As if its grammar were being compiled; `grammar_is_ready` ends it."""
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=True)  # type: ignore[assignment]
    return request


def grammar_is_ready(request: Request, grammar: object | None = None) -> None:
    assert request.structured_output_request is not None
    request.structured_output_request.grammar = grammar or _AnyGrammar()  # type: ignore[assignment]


class _AnyGrammar:
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False


@dataclass(frozen=True)
class Row:
    """One step as the worker sees it."""

    phase: str
    tokens: dict[str, int]
    padded: dict[str, int]
    cached: dict[str, int]
    """Tokens each request had computed (or hit in the prefix cache) before the step."""

    @property
    def letter(self) -> str:
        return self.phase[0]


class Engine:
    """Drives a scheduler as EngineCore does: `depth` 2 schedules one step ahead (async)."""

    def __init__(self, scheduler: Scheduler, depth: int | None = None) -> None:
        self.scheduler = scheduler
        self.depth = depth or (2 if isinstance(scheduler, AsyncScheduler) else 1)
        self.rows: list[Row] = []
        self.generated: dict[str, int] = {}
        self.finish_reasons: dict[str, str] = {}
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def step(self) -> Row:
        output = self.scheduler.schedule(False)
        row = _row(output)
        self.rows.append(row)
        self._in_flight.append((output, _sample(self.scheduler, output)))
        if len(self._in_flight) >= self.depth:
            self._process()
        return row

    def run(self, num_steps: int) -> str:
        """One letter per step: p(refill), d(ecode), i(dle)."""
        return "".join(self.step().letter for _ in range(num_steps))

    def run_to_end(self, max_steps: int = 2_000) -> str:
        letters = ""
        while self.scheduler.has_requests():
            assert len(letters) < max_steps, f"no end in sight: ...{letters[-40:]}"
            letters += self.step().letter
            if not self.scheduler.has_requests():
                self.drain()
        return letters

    def drain(self) -> None:
        while self._in_flight:
            self._process()

    def _process(self) -> None:
        for core in self.scheduler.update_from_output(*self._in_flight.popleft()).values():
            for out in core.outputs:
                name = out.request_id
                self.generated[name] = self.generated.get(name, 0) + len(out.new_token_ids)
                if out.finish_reason is not None:
                    self.finish_reasons[name] = str(out.finish_reason)


def _row(output: SchedulerOutput) -> Row:
    cached = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    data = output.scheduled_cached_reqs
    cached.update(zip(data.req_ids, data.num_computed_tokens, strict=True))
    tokens = dict(output.num_scheduled_tokens)
    phase = getattr(output, "phase", "mixed" if tokens else "idle")
    padded = getattr(output, "num_scheduled_tokens_padded", None)
    return Row(phase, tokens, dict(padded if padded is not None else tokens), cached)


def _sample(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """One token for each row whose chunk ends its known tokens, as a worker decides it."""
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=sampled,
    )


def num_free_blocks(scheduler: Scheduler) -> int:
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class SpecLiteralScheduler(Scheduler):
    """The specification's `schedule()`, word for word but for two calls vLLM 0.32 would not
    survive: the queue methods by their new names, and `throttle_prefills`.

    Here to show that the tests bite: it must fail them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.holdback_queue: deque[Request] = deque()
        self.max_num_seqs = self.max_num_running_reqs
        ratio = get_max_concurrency_for_kv_cache_config(self.vllm_config, self.kv_cache_config)
        self._max_kv_concurrent = int(ratio) if int(ratio) > 0 else self.max_num_seqs

    def is_prefill(self, request: Request) -> bool:
        return request.num_computed_tokens < request.num_prompt_tokens

    def can_schedule(self, request: Request) -> bool:
        return not (
            len(self.running) >= self.max_num_seqs
            or any(map(self.is_prefill, self.running))
            or len(self.waiting) >= 1
            or len(self.running) >= self._max_kv_concurrent
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        while self.waiting:
            self.holdback_queue.append(self.waiting.pop_request())
        while self.holdback_queue and self.can_schedule(self.holdback_queue[0]):
            self.waiting.add_request(self.holdback_queue.popleft())
        held: list[Request] = []
        if any(map(self.is_prefill, self.running)):
            held = [r for r in self.running if not self.is_prefill(r)]
            self.running = [r for r in self.running if self.is_prefill(r)]
        elif self.waiting:
            held, self.running = self.running, []
        output = super().schedule(throttle_prefills)
        self.running = self.running + held
        while self.holdback_queue:
            self.waiting.add_request(self.holdback_queue.popleft())
        row = _row(output)
        prefills = [n for n, c in row.cached.items() if c < self.requests[n].num_prompt_tokens]
        if prefills and len(prefills) < len(row.tokens):
            raise RuntimeError("Mixed prefill and decode in the same batch")
        output.phase = "prefill" if prefills else "decode" if row.tokens else "idle"  # type: ignore[attr-defined]
        return output


@contextmanager
def counting_queue_access(scheduler: Scheduler) -> Iterator[dict[str, int]]:
    """Replace the waiting queue by one that counts what is done to it."""
    counts = {"pop": 0, "iter": 0, "prepend": 0}
    base = type(scheduler.waiting)

    class CountingQueue(base):  # type: ignore[misc, valid-type]
        def pop_request(self) -> Request:
            counts["pop"] += 1
            request: Request = super().pop_request()
            return request

        def prepend_request(self, request: Request) -> None:
            counts["prepend"] += 1
            super().prepend_request(request)

        def __iter__(self) -> Iterator[Request]:
            for request in super().__iter__():
                counts["iter"] += 1
                yield request

    queue = CountingQueue()
    while scheduler.waiting:
        queue.add_request(scheduler.waiting.pop_request())
    scheduler.waiting = queue
    counts.update(pop=0, iter=0, prepend=0)
    yield counts
