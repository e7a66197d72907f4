"""What `verify-hlo` says: while it runs, as a table, as JSON."""

import sys
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nxbucket.compile.hlo.scope import layers_that_fit, memory_bytes
from nxbucket.compile.host_memory import available_bytes
from nxbucket.compile.program import BucketProgram
from nxbucket.toolkit import output
from nxbucket.toolkit.errors import EnvironmentProblem
from nxbucket.toolkit.plan_report import human_bytes
from nxbucket.toolkit.spec import DeploySpec

if TYPE_CHECKING:
    from nxbucket.compile.hlo.verify import CaseResult, ProgramResult

NUM_SHOWN = 5
"""Failing cases of a program that are printed; --json has all."""


def check_memory(programs: Sequence[BucketProgram], file: str) -> None:
    """Raises EnvironmentProblem before anything large is made."""
    available = available_bytes()
    largest = max(programs, key=memory_bytes)
    needed = memory_bytes(largest)
    if available == 0 or needed <= available:
        return
    fitting = min(layers_that_fit(p, available) for p in programs)
    layers = largest.architecture.num_hidden_layers
    hint = (
        f"nxbucket verify-hlo {file} --layers {fitting}: the first {fitting} of its {layers} layers"
        if fitting
        else "not even one layer fits: lower num_gpu_blocks_override, max_num_seqs or "
        "max_model_len in a copy of the model file, or use a host with more memory"
    )
    raise EnvironmentProblem(
        f"verifying {largest.name} needs about {human_bytes(needed)}, and this host has "
        f"{human_bytes(available)} available",
        hint=hint,
    )


class Counter:
    """On stderr: one line for each program, and on a terminal a running one that goes again."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._live = sys.stderr.isatty()

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def start(self, name: str) -> None:
        self._show(f"{name}: lowering and compiling for this host")

    def progress(self, what: str, done: int, total: int) -> None:
        self._show(f"{what}: case {done} of {total}")

    def finish(self, result: "ProgramResult") -> None:
        self._done += 1
        self._clear()
        said = "verified" if result.ok else "FAILED"
        line = (
            f"{result.program.name}: {said}, {len(result.cases)} cases, {result.seconds:.1f} s "
            f"[{self._done} of {self._total}]"
        )
        print(line, file=sys.stderr, flush=True)

    def _show(self, line: str) -> None:
        if self._live:
            self._clear()
            print(line, end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def print_results(results: "Sequence[ProgramResult]", of_layers: int) -> None:
    rows = [("program", "cases", "logits", "KV", "large scores", "16 bits", "HLO bytes", "sha256")]
    for r in results:
        strict, large = _by_limit(r)
        logits, kv = (f"{max(getattr(c, k) for c in strict):.1e}" for k in ("logits", "kv"))
        numbers = (logits, kv, _of_limit(large), _ratio(r), str(r.num_bytes), r.sha256[:16])
        rows.append((r.program.name, str(len(r.cases)), *numbers))
    output.print_table(rows)
    output.print_data("")
    output.print_table([("opcodes", _opcodes(results))])
    for r in results:
        for sentence in _complaints(r):
            output.print_warning(f"{r.program.name}: {sentence}")
    for note in _notes(results, of_layers):
        output.print_note(note)


def _by_limit(result: "ProgramResult") -> "tuple[list[CaseResult], list[CaseResult]]":
    """The cases with the usual limit, and those that have a wider one for their large scores."""
    from nxbucket.compile.hlo.verify import TOLERANCE

    strict = [c for c in result.cases if c.tolerance == TOLERANCE]
    return strict, [c for c in result.cases if c.tolerance != TOLERANCE]


def _of_limit(cases: "Sequence[CaseResult]") -> str:
    """The largest difference, and what it may be."""
    if not cases:
        return "-"
    return f"{max(c.difference for c in cases):.1e} of {cases[0].tolerance:g}"


def _ratio(result: "ProgramResult") -> str:
    """The error against a float32 truth, in units of eager torch's own."""
    low = result.low_precision
    return "-" if low is None else f"{low.logits / low.eager_logits:.2f}x"


def _opcodes(results: "Sequence[ProgramResult]") -> str:
    total: Counts[str] = Counts()
    for r in results:
        total.update(r.opcodes)
    return ", ".join(f"{opcode} {count}" for opcode, count in total.most_common())


def _complaints(result: "ProgramResult") -> Iterator[str]:
    from nxbucket.compile.hlo.verify import LOW_PRECISION_FACTOR

    yield from (str(finding) for finding in result.findings)
    failed = [c for c in result.cases if not c.ok]
    for case in failed[:NUM_SHOWN]:
        yield f"{case.name}: {case.worst}; the limit is {case.tolerance:g}"
    if len(failed) > NUM_SHOWN:
        yield f"{len(failed) - NUM_SHOWN} more cases differ"
    if (low := result.low_precision) is not None and not low.ok:
        if low.changed is not None:
            yield f"{low.dtype}: {low.changed}"
        else:
            yield (
                f"{low.dtype}: errors of {low.logits:.2e} (logits) and {low.kv:.2e} (KV), where "
                f"eager torch has {low.eager_logits:.2e} and {low.eager_kv:.2e}; "
                f"{LOW_PRECISION_FACTOR} times that is the bound"
            )


def _notes(results: "Sequence[ProgramResult]", of_layers: int) -> Iterator[str]:
    from nxbucket.compile.hlo.verify import SHIFTED_TOLERANCE, TOLERANCE

    arch = results[0].program.architecture
    if arch.num_hidden_layers < of_layers:
        yield f"the first {arch.num_hidden_layers} of {of_layers} layers"
    ok = sum(r.ok for r in results)
    num_large = sum(len(_by_limit(r)[1]) for r in results)
    large = f", and within {SHIFTED_TOLERANCE:g} in the {num_large} cases of large scores"
    yield (
        f"{ok} of {len(results)} programs equal eager torch within {TOLERANCE:g} in float32 on "
        f"XLA:CPU{large if num_large else ''}; that a Neuron compiler takes them is not checked"
    )


def results_as_json(
    spec: DeploySpec, results: "Sequence[ProgramResult]", seed: int, of_layers: int
) -> dict[str, Any]:
    from nxbucket.compile.hlo.verify import LOW_PRECISION_FACTOR, TOLERANCE

    return {
        "ok": all(r.ok for r in results),
        "file": str(spec.path),
        "target": spec.target,
        "seed": seed,
        "tolerance": TOLERANCE,
        "low_precision_factor": LOW_PRECISION_FACTOR,
        "layers": results[0].program.architecture.num_hidden_layers,
        "of_layers": of_layers,
        "programs": [
            {
                "name": r.program.name,
                "ok": r.ok,
                "dtype": r.program.dtype,
                "sha256": r.sha256,
                "hlo_bytes": r.num_bytes,
                "opcodes": r.opcodes,
                "findings": [asdict(f) for f in r.findings],
                "max_difference": _finite(max(c.difference for c in r.cases)),
                "cases": [
                    {
                        "name": c.name,
                        "logits": _finite(c.logits),
                        "kv": _finite(c.kv),
                        "tolerance": c.tolerance,
                        "worst": {
                            "tensor": c.worst.tensor,
                            "index": list(c.worst.index),
                            "expected": _finite(c.worst.expected),
                            "found": _finite(c.worst.found),
                        },
                    }
                    for c in r.cases
                ],
                "low_precision": None
                if r.low_precision is None
                else {
                    key: _finite(value) if isinstance(value, float) else value
                    for key, value in asdict(r.low_precision).items()
                    if key != "changed"
                }
                | {"ok": r.low_precision.ok},
                "seconds": r.seconds,
            }
            for r in results
        ],
    }


def _finite(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if abs(value) < float("inf") else str(value)
