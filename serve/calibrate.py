"""`nxbucket calibrate`: how long a step of each bound program takes here, as a server runs it.

The engine is the one `generate` has: scheduler, program, sampler and output handling in this
process. Each step is timed whole, and counted for the program that ran in it.
"""

import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nxbucket.compile.lockfile import LockedProgram
from nxbucket.compile.manifest import BlobRole, Manifest, blob_of
from nxbucket.compile.program import Bucket, Phase
from nxbucket.serve.engine_args import check_platform, locked_args, preflight
from nxbucket.serve.offline import COMMAND
from nxbucket.serve.policy import Limits
from nxbucket.serve.served import Served, resolve
from nxbucket.toolkit.buckets import get_bucket_for_count
from nxbucket.toolkit.choice.costs import Costs, PhaseCosts

if TYPE_CHECKING:
    from vllm import LLM

SEED = 20261130


@dataclass(frozen=True)
class Repeats:
    """Steps whose median is taken; one before them is not counted."""

    prefill: int = 7
    decode: int = 30

    def of(self, phase: Phase) -> int:
        return self.prefill if phase == "prefill" else self.decode


@dataclass(frozen=True)
class Batch:
    """Requests that are sent together, and alone, so that some program runs."""

    prompt_lens: tuple[int, ...]
    max_tokens: int

    def blocks(self, limits: Limits) -> int:
        """What the scheduler reserves for them."""
        return sum(limits.blocks_for(length + self.max_tokens) for length in self.prompt_lens)


def calibrate(
    path: Path,
    *,
    remote: str | None = None,
    repeats: Repeats = Repeats(),
    check: Callable[[str], None] = lambda target: None,
    note: Callable[[str], None] = lambda sentence: None,
) -> Costs:
    """Measure every program of the lock that `path` stands for. Raises what `engine_args` does.

    `check` is told the target before anything slow begins, and may raise; `note` is told each
    program's time as it is known.
    """
    # What needs no device is `generate --emulate`: an emulated step says nothing of a device's.
    spec, served = resolve(path, command=COMMAND)
    check(served.target)
    preflight(spec, served, COMMAND, remote=remote)
    manifests = served.verified_manifests()
    engine = SteppedEngine(locked_args(spec, served), served.architecture.vocab_size)
    step_s = measure(engine, served, repeats, note)
    source = source_sentence(served, repeats)
    return costs_of(served.target, source, step_s, served.locked.programs, manifests, served.runs)


def measure(
    engine: "SteppedEngine",
    served: Served,
    repeats: Repeats,
    note: Callable[[str], None] = lambda sentence: None,
) -> dict[Bucket, float]:
    """The median step of each program that a request can reach."""
    step_s = {}
    for bucket, batch in plan(served, repeats):
        if batch is None:
            note(f"{bucket.name}: no request reaches it; left out")
            continue
        times = engine.measure(bucket.name, batch, repeats.of(bucket.phase))
        step_s[bucket] = statistics.median(times)
        least, median, most = (1e3 * s for s in (min(times), step_s[bucket], max(times)))
        note(
            f"{bucket.name}: {median:.2f} ms, the median of {len(times)} steps "
            f"({least:.2f} to {most:.2f})"
        )
    return step_s


def plan(served: Served, repeats: Repeats) -> Iterator[tuple[Bucket, Batch | None]]:
    """What to send for each bucket; None if nothing can reach it."""
    locked = served.locked
    limits = Limits(
        max_num_active_reqs=int(served.lock.spec["max_num_seqs"]),
        num_blocks=locked.num_kv_blocks,
        block_size=int(served.lock.spec["block_size"]),
        max_model_len=int(served.lock.spec["max_model_len"]),
    )
    for size in locked.num_batched_tokens_buckets:
        batch = prefill_batch(size, locked.num_batched_tokens_buckets, limits)
        yield Bucket("prefill", size), batch
    longest = 0
    if locked.decode_context_length_buckets:
        longest = locked.decode_context_length_buckets[-1]
    if locked.kv_segment_size_buckets:
        longest = max(longest, limits.max_model_len - repeats.decode - 2)
    for size in locked.num_seqs_buckets:
        yield Bucket("decode", size), decode_batch(size, repeats.decode + 1, longest, limits)


def prefill_batch(size: int, buckets: Sequence[int], limits: Limits) -> Batch | None:
    """One prompt as long as the bucket. One token of max_model_len is the answer's."""
    length = min(size, limits.max_model_len - 1)
    if length < 1 or get_bucket_for_count(length, tuple(buckets)) != size:
        return None
    return Batch((length,), 1)


def decode_batch(rows: int, steps: int, longest: int, limits: Limits) -> Batch | None:
    """`rows` requests that decode together for `steps` steps, or for fewer if room is short.

    `longest`: the tokens that one of them has to have before its first decode, if any. The others
    take an eighth of max_model_len, or less if the KV cache is small.
    """
    for others in _halved(max(1, limits.max_model_len // 8)):
        first = max(longest, others)
        for fewer in _halved(steps):
            # The first token is the prefill's. The longest comes last: its many chunks are done
            # when the first step is timed.
            batch = Batch((*[others] * (rows - 1), first), fewer + 1)
            if (
                first + batch.max_tokens <= limits.max_model_len
                and batch.blocks(limits) <= limits.num_usable_blocks
            ):
                return batch
    return None


def _halved(number: int) -> Iterator[int]:
    while number:
        yield number
        number //= 2


class SteppedEngine:
    """vLLM's engine in this process, stepped by hand."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        vocab_size: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.llm = _start(arguments)
        self.clock = clock
        self._vocab_size = vocab_size
        self._random = random.Random(SEED)
        self._num_requests = 0

    def measure(self, program: str, batch: Batch, repeats: int) -> list[float]:
        """Seconds of `repeats` steps of `program`; one before them is not counted."""
        times: list[float] = []
        while len(times) <= repeats:
            found = [spent for ran, spent in self.run(batch) if ran == program]
            if not found:
                raise RuntimeError(f"{batch} does not run {program}")
            times += found
        return times[1 : repeats + 1]

    def run(self, batch: Batch) -> list[tuple[str, float]]:
        """Serve the batch to its end: the program and the seconds of each step."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(
            temperature=0.0, max_tokens=batch.max_tokens, ignore_eos=True, detokenize=False
        )
        for length in batch.prompt_lens:
            # Never the same prompt twice, or the prefix cache would have it.
            prompt = self._random.choices(range(self._vocab_size), k=length)
            engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
            self._num_requests += 1
        steps = []
        before = self.executions()
        while engine.has_unfinished_requests():
            start = self.clock()
            engine.step()
            spent = self.clock() - start
            after = self.executions()
            steps += [(name, spent) for name, count in after.items() if count > before[name]]
            before = after
        return steps

    def executions(self) -> dict[str, int]:
        (executions,) = self.llm.collective_rpc("nxbucket_executions")
        return dict(executions)


def _start(arguments: Mapping[str, Any]) -> "LLM":
    # In this process, so that a step is a call; one after the other, so that it is a whole step.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    # It warns of the chat template that an engine without a tokenizer lacks, with a traceback.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    check_platform()
    additional = arguments["additional_config"]
    # All prompts first: a decode batch is complete when its first step is timed.
    ours = {**additional["nxbucket"], "max_consecutive_prefills": 0}
    return LLM(
        **{
            **arguments,
            "async_scheduling": False,
            # A server's tokenizer is in its front end, which is another process.
            "skip_tokenizer_init": True,
            "additional_config": {**additional, "nxbucket": ours},
        },
        disable_log_stats=True,
    )


def costs_of(
    target: str,
    source: str,
    step_s: Mapping[Bucket, float],
    programs: Sequence[LockedProgram],
    manifests: Mapping[str, Manifest],
    runs: BlobRole,
) -> Costs:
    """Of the decode programs, those for max_model_len: costs are by batch alone."""

    def phase_costs(phase: Phase) -> PhaseCosts:
        mine = [p for p in programs if p.phase == phase and p.context_len is None]
        blobs = {p.size: blob_of(p.blobs, runs) for p in mine}
        compiled = {p.size: manifests[p.name] for p in mine}
        return PhaseCosts(
            step_s={p.size: round(step_s[p.bucket], 7) for p in mine if p.bucket in step_s},
            compile_s={size: round(m.lower_s + m.compile_s, 3) for size, m in compiled.items()},
            program_bytes={size: blob.size_bytes for size, blob in blobs.items() if blob},
        )

    return Costs(
        format=1,
        target=target,
        source=source,
        prefill=phase_costs("prefill"),
        decode=phase_costs("decode"),
    )


def source_sentence(served: Served, repeats: Repeats) -> str:
    locked = served.locked
    contexts = ""
    if locked.decode_context_length_buckets:
        contexts = "; decode with the programs for max_model_len"
    if locked.kv_segment_size_buckets:
        contexts += "; decode with one sequence near max_model_len, prefill at a prompt's beginning"
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return (
        f"nxbucket calibrate on {datetime.now(UTC).date()}, {_processor()}, "
        f"{len(os.sched_getaffinity(0))} cores, OMP_NUM_THREADS {threads}: medians of "
        f"{repeats.prefill} prefill and {repeats.decode} decode steps, greedy{contexts}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line for line in lines if line.startswith("model name")), "")
    return name.partition(":")[2].strip() or "a processor without a name"
