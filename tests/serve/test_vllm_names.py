"""The private names of vLLM 0.32 that nxbucket overrides or reads. None is promised to stay.

When vLLM is upgraded, this fails first and says which file of ours has to be looked at.
"""

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
from serve_fakes import SchedulerFactory, make_request
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = [pytest.mark.vllm]

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
GPU_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
PLATFORM = "vllm.platforms.interface:Platform"

# (where, name, parameters or None, the file of ours)
CALLABLES: list[tuple[str, str, list[str] | None, str]] = [
    (
        SCHEDULER,
        "__init__",
        [
            "self",
            "vllm_config",
            "kv_cache_config",
            "structured_output_manager",
            "block_size",
            "hash_block_size",
            "mm_registry",
            "include_finished_set",
            "log_stats",
        ],
        "serve/scheduler.py",
    ),
    (SCHEDULER, "schedule", ["self", "throttle_prefills"], "serve/scheduler.py"),
    (SCHEDULER, "_handle_blocked_waiting_request", ["self", "request"], "serve/scheduler.py"),
    (SCHEDULER, "get_request_counts", ["self"], "serve/scheduler.py"),
    (
        SCHEDULER,
        "_preempt_request",
        ["self", "request", "timestamp", "drop_stale_output"],
        "serve/scheduler.py",
    ),
    (
        SCHEDULER,
        "reset_prefix_cache",
        ["self", "reset_running_requests", "reset_connector"],
        "serve/scheduler.py",
    ),
    (
        "vllm.v1.core.sched.request_queue:",
        "create_request_queue",
        ["policy"],
        "serve/scheduler.py",
    ),
    (
        "vllm.v1.core.sched.request_queue:RequestQueue",
        "pop_request",
        ["self"],
        "serve/scheduler.py",
    ),
    (
        "vllm.v1.core.sched.request_queue:RequestQueue",
        "prepend_request",
        ["self", "request"],
        "serve/scheduler.py",
    ),
    (
        "vllm.v1.core.sched.request_queue:RequestQueue",
        "peek_request",
        ["self"],
        "serve/scheduler.py",
    ),
    (GPU_RUNNER, "_update_states", ["self", "scheduler_output"], "serve/runner.py"),
    (
        GPU_RUNNER,
        "_prepare_inputs",
        ["self", "scheduler_output", "num_scheduled_tokens"],
        "serve/runner.py",
    ),
    (
        GPU_RUNNER,
        "execute_model",
        ["self", "scheduler_output", "intermediate_tensors"],
        "serve/runner.py",
    ),
    (GPU_RUNNER, "sample_tokens", ["self", "grammar_output"], "serve/runner.py"),
    (
        GPU_RUNNER,
        "_bookkeeping_sync",
        [
            "self",
            "scheduler_output",
            "sampler_output",
            "logits",
            "hidden_states",
            "num_scheduled_tokens",
        ],
        "serve/runner.py",
    ),
    (
        GPU_RUNNER,
        "_get_prompt_logprobs_dict",
        ["self", "hidden_states", "num_scheduled_tokens"],
        "serve/runner.py",
    ),
    (GPU_RUNNER, "may_reinitialize_input_batch", None, "serve/runner.py"),
    (CPU_RUNNER, "__init__", ["self", "vllm_config", "device"], "serve/runner.py"),
    (CPU_RUNNER, "_postprocess_tensors", ["self"], "serve/runner.py"),
    (CPU_RUNNER, "load_model", ["self", "load_dummy_weights"], "serve/runner.py"),
    (
        CPU_RUNNER,
        "initialize_kv_cache",
        ["self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"],
        "serve/runner.py",
    ),
    (CPU_RUNNER, "get_kv_cache_spec", ["self"], "serve/runner.py"),
    (CPU_WORKER, "init_device", ["self"], "serve/worker.py"),
    (CPU_WORKER, "load_model", ["self", "load_dummy_weights"], "serve/worker.py"),
    (CPU_WORKER, "get_kv_cache_spec", ["self"], "serve/worker.py"),
    (CPU_WORKER, "get_supported_kv_cache_layouts", ["self"], "serve/worker.py"),
    (CPU_WORKER, "determine_available_memory", ["self"], "serve/worker.py"),
    (CPU_WORKER, "initialize_from_config", ["self", "kv_cache_config"], "serve/worker.py"),
    (CPU_WORKER, "compile_or_warm_up_model", ["self"], "serve/worker.py"),
    (CPU_WORKER, "execute_model", ["self", "scheduler_output"], "serve/worker.py"),
    (CPU_WORKER, "sample_tokens", ["self", "grammar_output"], "serve/worker.py"),
    (PLATFORM, "check_and_update_config", ["vllm_config"], "serve/platform.py"),
    (PLATFORM, "validate_request", ["processed_inputs", "params"], "serve/platform.py"),
    ("vllm.entrypoints.cli.serve:ServeSubcommand", "cmd", ["args"], "serve/launcher.py"),
    (
        "vllm.entrypoints.cli.serve:ServeSubcommand",
        "validate",
        ["self", "args"],
        "serve/launcher.py",
    ),
    (
        "vllm.entrypoints.cli.serve:ServeSubcommand",
        "subparser_init",
        ["self", "subparsers"],
        "serve/launcher.py",
    ),
]

SCHEDULER_ATTRIBUTES = [
    "_pause_state",
    "current_step",
    "kv_holding_waiting",
    "lora_config",
    "max_model_len",
    "max_num_active_reqs",
    "max_num_running_reqs",
    "num_waiting_for_streaming_input",
    "policy",
    "prev_step_scheduled_req_ids",
    "requests",
    "running",
    "waiting",
]
REQUEST_ATTRIBUTES = [
    "drop_stale_output",
    "lora_request",
    "max_tokens",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_prompt_tokens",
    "num_stale_output_tokens",
    "num_tokens",
]
OUTPUT_FIELDS = [
    "finished_req_ids",
    "kv_cache_block_copies",
    "new_block_ids_to_zero",
    "num_scheduled_tokens",
    "preempted_req_ids",
    "scheduled_cached_reqs",
    "scheduled_new_reqs",
    "total_num_scheduled_tokens",
]
EXECUTE_MODEL_STATE = (
    "scheduler_output",
    "logits",
    "spec_decode_metadata",
    "spec_decode_common_attn_metadata",
    "hidden_states",
    "sample_hidden_states",
    "aux_hidden_states",
    "ec_connector_output",
    "cudagraph_stats",
    "slot_mappings",
)


def changed(what: str, ours: str) -> str:
    return f"{what}, which {ours} uses: vLLM is pinned to 0.32.x, read that file before moving on"


def find(where: str) -> Any:
    module, _, name = where.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def test_vllm_is_the_pinned_version() -> None:
    import vllm

    assert vllm.__version__.startswith("0.32."), changed(f"vLLM is {vllm.__version__}", "serve/")


@pytest.mark.parametrize(
    ("where", "name", "parameters", "ours"), CALLABLES, ids=[f"{c[0]}.{c[1]}" for c in CALLABLES]
)
def test_callable_has_the_signature_we_rely_on(
    where: str, name: str, parameters: list[str] | None, ours: str
) -> None:
    found = getattr(find(where), name, None)
    assert callable(found), changed(f"{where}.{name} is gone", ours)
    if parameters is not None:
        now = list(inspect.signature(found).parameters)
        assert now == parameters, changed(f"{where}.{name} now takes {now}", ours)


def test_scheduler_and_requests_have_the_attributes_we_read(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    factory = SchedulerFactory.in_folder(tmp_path_factory.mktemp("tiny-llama"))
    scheduler = factory.scheduler(Scheduler)
    for name in SCHEDULER_ATTRIBUTES:
        assert hasattr(scheduler, name), changed(f"Scheduler.{name} is gone", "serve/scheduler.py")
    request = make_request("r")
    for name in REQUEST_ATTRIBUTES:
        assert hasattr(request, name), changed(f"Request.{name} is gone", "serve/policy.py")


def test_scheduler_output_has_the_fields_we_read_and_room_for_ours() -> None:
    output = find("vllm.v1.core.sched.output:SchedulerOutput")
    names = {field.name for field in dataclasses.fields(output)}
    for name in OUTPUT_FIELDS:
        assert name in names, changed(
            f"SchedulerOutput.{name} is gone", "serve/scheduler_output.py and serve/runner.py"
        )
    taken = names & {"num_scheduled_tokens_padded", "phase"}
    assert not taken, changed(f"SchedulerOutput has its own {taken}", "serve/scheduler_output.py")
    # `from_base` rebuilds the output from its instance dict: no slots, nothing cached in it.
    empty = vars(output.make_empty())
    assert empty.keys() == names, changed(
        "SchedulerOutput keeps more than its fields", "serve/scheduler_output.py"
    )


def test_cached_requests_have_the_fields_we_read() -> None:
    cached = find("vllm.v1.core.sched.output:CachedRequestData")
    names = {field.name for field in dataclasses.fields(cached)}
    for name in ("req_ids", "num_computed_tokens", "all_token_ids", "resumed_req_ids"):
        assert name in names, changed(f"CachedRequestData.{name} is gone", "serve/scheduler.py")


def test_async_scheduler_still_leaves_schedule_alone() -> None:
    assert "schedule" not in vars(AsyncScheduler), changed(
        "AsyncScheduler has a schedule() of its own", "serve/scheduler.py"
    )
    assert "_update_after_schedule" in vars(AsyncScheduler), changed(
        "AsyncScheduler._update_after_schedule is gone", "serve/scheduler.py"
    )


def test_pause_states_are_the_three_we_know() -> None:
    states = [state.name for state in find("vllm.v1.core.sched.interface:PauseState")]
    assert states == ["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"], changed(
        f"PauseState is now {states}", "serve/scheduler.py"
    )


def test_only_one_line_of_the_runner_reads_all_token_ids_and_only_when_async() -> None:
    """`NeuronScheduler._keep_token_ids_at_worker` leaves them out in sync mode."""
    module = find("vllm.v1.worker.gpu_model_runner:")
    lines = inspect.getsource(module).splitlines()
    readers = [i for i, line in enumerate(lines) if "req_data.all_token_ids" in line]
    assert len(readers) == 1, changed("all_token_ids has other readers", "serve/scheduler.py")
    before = "\n".join(lines[readers[0] - 5 : readers[0]])
    assert "if self.use_async_scheduling and num_output_tokens > 0:" in before, changed(
        "all_token_ids is read without async scheduling", "serve/scheduler.py"
    )


def test_the_prefill_boundary_is_still_vllms_own() -> None:
    source = inspect.getsource(find("vllm.v1.core.kv_cache_manager:"))
    assert "prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)" in source, (
        changed("vLLM's prefill boundary moved", "serve/policy.py")
    )


def test_execute_model_state_has_the_fields_we_fill() -> None:
    state = find("vllm.v1.worker.gpu_model_runner:ExecuteModelState")
    assert state._fields == EXECUTE_MODEL_STATE, changed(
        f"ExecuteModelState is now {state._fields}", "serve/runner.py"
    )


def test_runner_still_marks_rows_whose_sample_is_discarded() -> None:
    source = inspect.getsource(find(GPU_RUNNER))
    assert "self.discard_request_mask = self._make_buffer(" in source, changed(
        "GPUModelRunner.discard_request_mask is gone", "serve/runner.py"
    )


def test_platform_still_chooses_the_backend_of_small_compiles() -> None:
    platform = find(PLATFORM)
    assert hasattr(platform, "simple_compile_backend"), changed(
        "Platform.simple_compile_backend is gone", "serve/platform.py"
    )
