"""What a plan says: each program's cost and state, what a server will need, what to think about."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nxbucket.compile.build import plan
from nxbucket.compile.cache import ArtifactCache, CacheChoice, Corrupt, Hit, Lookup
from nxbucket.compile.compiler import CompilerSpec
from nxbucket.compile.cost import CompileTimes, Cost, Memory, compile_times, cost_of, memory_of
from nxbucket.compile.explain import emulate_command
from nxbucket.compile.host_memory import available_bytes
from nxbucket.compile.lockfile import lock_path
from nxbucket.compile.plan import plan_programs
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.targets import neuron_target
from nxbucket.toolkit import output
from nxbucket.toolkit.buckets import SMALLEST_DEFAULT_PREFILL_BUCKET
from nxbucket.toolkit.errors import EnvironmentProblem
from nxbucket.toolkit.spec import DeploySpec

SHORT_TAIL = 40
"""Tokens after a prefix-cache hit, in the example of the hint: a question below a long document."""


@dataclass(frozen=True)
class PlannedRow:
    """`compile_s` was recorded for a hit, and is estimated otherwise, if it can be.

    `key` and `found` are None where this host lacks the compiler that the key is made from.
    """

    name: str
    key: str | None
    found: Lookup | None
    cost: Cost
    compile_s: float | None
    compile_s_from: Literal["recorded", "estimated"] | None

    @property
    def cache(self) -> str:
        if self.found is None:
            return "unknown (no neuronx-cc here)"
        return type(self.found).__name__.lower()

    @property
    def corrupt(self) -> str | None:
        return self.found.reason if isinstance(self.found, Corrupt) else None


@dataclass(frozen=True)
class PlanReport:
    """`lacks`: what keeps this host from compiling. `toolchain` is the lock's then, or empty."""

    spec: DeploySpec
    choice: CacheChoice
    target: str
    toolchain: Mapping[str, str]
    lacks: EnvironmentProblem | None
    rows: list[PlannedRow]
    times: CompileTimes | None
    memory: Memory
    available_bytes: int

    @property
    def unknown(self) -> bool:
        return not self.toolchain

    @property
    def missing(self) -> list[PlannedRow]:
        return [row for row in self.rows if row.cache != "hit"]

    @property
    def compile_s(self) -> float | None:
        """Of all that is missing, one at a time."""
        seconds = [row.compile_s for row in self.missing]
        return None if None in seconds else sum(s for s in seconds if s is not None)

    @property
    def kv_requests(self) -> int:
        """Requests of max_model_len tokens that the KV blocks hold. The null block holds none."""
        return (self.spec.num_kv_blocks - 1) // self.spec.max_blocks_per_seq

    @property
    def kv_tokens(self) -> int:
        return (self.spec.num_kv_blocks - 1) * self.spec.block_size


def make_plan_report(
    spec: DeploySpec, cache: ArtifactCache, choice: CacheChoice, compiler: CompilerSpec
) -> PlanReport:
    programs = plan_programs(spec)
    keys: list[tuple[str | None, Lookup | None]]
    lacks: EnvironmentProblem | None
    try:
        planned = plan(spec, cache, compiler)
    except EnvironmentProblem as err:
        if not compiler.is_neuron:
            raise
        # Sizes need no compiler; keys do.
        target, lacks = neuron_target(spec.target, compiler.options["lnc"]), err
        toolchain: Mapping[str, str] = {}
        keys = [(None, None)] * len(programs)
    else:
        target, lacks = planned.toolchain.target, planned.lacks
        toolchain = planned.toolchain.versions
        keys = [(p.key, p.found) for p in planned.programs]
    all_hit = all(isinstance(found, Hit) for _, found in keys)
    times = None if all_hit else compile_times(cache.manifests(), target)
    return PlanReport(
        spec,
        choice,
        target,
        toolchain,
        lacks,
        [_row(p, key, found, times) for p, (key, found) in zip(programs, keys, strict=True)],
        times,
        memory_of(programs),
        available_bytes(),
    )


def _row(
    program: BucketProgram, key: str | None, found: Lookup | None, times: CompileTimes | None
) -> PlannedRow:
    cost = cost_of(program)
    if isinstance(found, Hit):
        seconds = found.manifest.lower_s + found.manifest.compile_s
        return PlannedRow(program.name, key, found, cost, seconds, "recorded")
    if times is None:
        return PlannedRow(program.name, key, found, cost, None, None)
    return PlannedRow(program.name, key, found, cost, times.estimate_s(program), "estimated")


def padding_hint(spec: DeploySpec) -> str | None:
    """One prefill bucket and prefix caching: the short rest of a long prompt pays for all of it."""
    buckets = spec.neuron_config.num_batched_tokens_buckets
    small = SMALLEST_DEFAULT_PREFILL_BUCKET
    if not spec.enable_prefix_caching or len(buckets) > 1 or buckets[0] <= small:
        return None
    waste = 100 * (1 - SHORT_TAIL / buckets[0])
    return (
        f"with prefix caching, what is left of a prompt after a hit is often short, and here it "
        f"pays for {buckets[0]} tokens: {SHORT_TAIL} are {waste:.0f} % padding; a small bucket "
        f"mends that: num_batched_tokens_buckets: [{small}, {buckets[0]}]"
    )


def memory_warning(spec: DeploySpec, memory: Memory, available: int) -> str | None:
    """Target cpu serves from this host's memory, a Neuron target from its core's.

    0 available: nothing says how much this host has. A Neuron target does not need this host's.
    """
    hbm = hbm_bytes(spec)
    room = available if hbm is None else hbm
    if room == 0 or memory.total_bytes <= room:
        return None
    has = f"this host has {human_bytes(available)} available"
    if hbm is not None:
        has = (
            f"a rank of {spec.target} has {human_bytes(hbm)} of HBM at compiler.lnc "
            f"{spec.compiler.lnc}: neuronx-cc would end with NCC_EVRF009"
        )
    return (
        f"a server needs {human_bytes(memory.total_bytes)} (weights "
        f"{human_bytes(memory.weight_bytes)}, KV cache {human_bytes(memory.kv_cache_bytes)}), and "
        f"{has}; max_model_len, max_num_seqs and num_gpu_blocks_override decide the KV cache"
    )


def hbm_bytes(spec: DeploySpec) -> int | None:
    """A rank's share of its chip's memory; None for target cpu."""
    if spec.target == "cpu" or spec.compiler.lnc is None:
        return None
    from nxbucket.compile.neuron.hardware import hbm_bytes_per_rank

    return hbm_bytes_per_rank(spec.target, spec.compiler.lnc)


def print_plan(report: PlanReport) -> None:
    rows = [("program", "cache", "FLOPs", "I/O bytes", "compile s", "key")]
    for row in report.rows:
        seconds = "-" if row.compile_s is None else f"{row.compile_s:.1f}"
        about = "~" if row.compile_s_from == "estimated" else ""
        key, cost = row.key or "-", row.cost
        rows.append(
            (
                row.name,
                row.cache,
                human(cost.flops),
                str(cost.io_bytes),
                about + seconds,
                key,
            )
        )
    output.print_table(rows)
    output.print_data("")
    output.print_table(list(_summary(report)))
    for row in report.rows:
        if row.corrupt is not None:
            output.print_warning(f"{row.name}: {row.corrupt}")
    if warning := memory_warning(report.spec, report.memory, report.available_bytes):
        output.print_warning(warning)
    if hint := padding_hint(report.spec):
        output.print_note(hint)
    if report.unknown and report.lacks is not None:
        output.print_note(f"{report.lacks.message}: keys, and what the cache has, are unknown")
        output.print_hint(f"{emulate_command('plan', report.spec.path)} knows those of the graphs")
        return
    if report.lacks is not None:
        output.print_note(lack_of(report.lacks, report.spec))
    count = f"{len(report.missing)} of {len(report.rows)}"
    output.print_note(f"{count} would be compiled for {report.target}")


def lack_of(problem: EnvironmentProblem, spec: DeploySpec) -> str:
    """Why keys are not those of this host's compiler."""
    return f"{problem.message}: keys are for the compiler that {lock_path(spec.path).name} names"


def _summary(report: PlanReport) -> Iterator[tuple[str, str]]:
    spec, memory = report.spec, report.memory
    yield "weights", _exact(memory.weight_bytes)
    blocks = spec.num_kv_blocks
    yield (
        "KV cache",
        f"{_exact(memory.kv_cache_bytes)}; {blocks} blocks of {spec.block_size} tokens, one of "
        f"them the null block",
    )
    yield (
        "",
        f"{report.kv_requests} requests of max_model_len {spec.max_model_len}; {report.kv_tokens} "
        f"tokens in all",
    )
    yield "I/O", f"{_exact(memory.io_bytes)}; the largest program's"
    hbm = hbm_bytes(spec)
    room = f"free here {_free(report.available_bytes)}"
    if hbm is not None:
        room = f"HBM {human_bytes(hbm)}; working memory of a program comes on top"
    yield ("per rank", f"{_exact(memory.total_bytes)}; {room}")
    yield "to compile", _to_compile(report)
    defaults = ", ".join(f"{key} {_plain(value)}" for key, value in defaults_of(spec).items())
    yield "defaults", defaults or "none"


def _to_compile(report: PlanReport) -> str:
    if report.unknown:
        return f"unknown; {len(report.rows)} programs at most"
    if not report.missing:
        return "nothing"
    count = f"{len(report.missing)} programs"
    if report.compile_s is None or report.times is None:
        return f"{count}; no record of how long one takes on {report.target}"
    return (
        f"{count}; about {report.compile_s:.0f} s one at a time, estimated per layer from "
        f"{report.times.num_recorded} recorded"
    )


def defaults_of(spec: DeploySpec) -> dict[str, Any]:
    """The keys left out of the model file that have a value all the same."""
    config = spec.resolved()
    values = {}
    for dotted in sorted(spec.defaulted):
        section, _, key = dotted.partition(".")
        value = config.get(section)
        if key:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and value not in ([], {}):
            values[dotted] = value
    return values


def plan_as_json(report: PlanReport) -> dict[str, Any]:
    spec, memory = report.spec, report.memory
    return {
        "ok": True,
        "file": str(spec.path),
        "target": report.target,
        "toolchain": dict(report.toolchain),
        "lacks": report.lacks and report.lacks.message,
        "cache_dir": str(report.choice.root),
        "programs": [
            {
                "name": row.name,
                "key": row.key,
                "cache": "unknown" if row.found is None else row.cache,
                "reason": row.corrupt,
                **asdict(row.cost),
                "compile_s": row.compile_s,
                "compile_s_from": row.compile_s_from,
            }
            for row in report.rows
        ],
        "memory_per_rank": {
            **asdict(memory),
            "total_bytes": memory.total_bytes,
            "available_bytes": report.available_bytes,
            "hbm_bytes": hbm_bytes(spec),
        },
        "kv_cache": {
            "num_blocks": spec.num_kv_blocks,
            "block_size": spec.block_size,
            "requests_at_max_model_len": report.kv_requests,
            "tokens": report.kv_tokens,
        },
        "to_compile": {
            "programs": None if report.unknown else len(report.missing),
            "compile_s": None if report.unknown else report.compile_s,
            "estimated_from": report.times.num_recorded if report.times else 0,
        },
        "defaults": defaults_of(spec),
        "warnings": _present(memory_warning(spec, memory, report.available_bytes)),
        "hints": _present(padding_hint(spec)),
    }


def _present(text: str | None) -> list[str]:
    return [] if text is None else [text]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _free(available: int) -> str:
    return human_bytes(available) if available else "unknown"


def _exact(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({human_bytes(num_bytes)})"


def human(count: float) -> str:
    """1140000000000 -> 1.14T."""
    value, unit = _scaled(count, 1000, ("", "k", "M", "G", "T", "P"))
    return f"{value:.3g}{unit}"


def human_bytes(count: float) -> str:
    value, unit = _scaled(count, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))
    return f"{value:.1f} {unit}"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    for unit in units[:-1]:
        if value < step:
            return value, unit
        value /= step
    return value, units[-1]
