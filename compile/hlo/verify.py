"""Is a module what its program is? The exact bytes on XLA:CPU against eager torch.

float32: logits and every written key and value within 1e-4, and every slot of the KV cache that the
step does not write the same to the last bit (only the scratch slot may hold anything). Weights are
random and scaled so that logits are near 1.

A program of 16 bits is verified twice. Its float32 twin, which differs in dtypes only, as above;
then itself: over all cases, the root mean square of its distance from a float32 truth (the same
weights and KV cache, widened) is at most LOW_PRECISION_FACTOR times eager torch's own. There is no
tighter bound: each rounds at other places.
"""

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np
import torch
from torch import Tensor

from nxbucket.compile.hlo.analysis import analyse
from nxbucket.compile.hlo.cases import Case, cases_of, kv_before, random_weights
from nxbucket.compile.hlo.lint import Finding, lint
from nxbucket.compile.hlo.lowering import lower
from nxbucket.compile.hlo.module import read_module
from nxbucket.compile.hlo.xla_cpu import XlaCpuProgram
from nxbucket.compile.program import SCRATCH_SLOT, BucketProgram
from nxbucket.compile.programs.families import program_module

TOLERANCE = 1e-4
SHIFTED_TOLERANCE = 1e-2
"""For the cases whose scores are near 50: float32 is that much coarser there, layer after layer."""
LOW_PRECISION_FACTOR = 1.5

Progress = Callable[[str, int, int], None]
"""What is done (a program's name and dtype), how many cases of how many."""


@dataclass(frozen=True)
class Difference:
    """The worst of one tensor: `amount` is inf for a NaN, and for a bit that had to stay."""

    tensor: str
    index: tuple[int, ...]
    expected: float
    found: float
    amount: float

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return f"{self.tensor}[{place}] is {self.found:.7g}, not {self.expected:.7g}"


@dataclass(frozen=True)
class CaseResult:
    name: str
    logits: float
    """The largest difference of any."""
    kv: float
    worst: Difference
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def difference(self) -> float:
        return max(self.logits, self.kv)


@dataclass(frozen=True)
class LowPrecision:
    """Root mean square errors against a float32 truth, over all cases."""

    dtype: str
    logits: float
    eager_logits: float
    kv: float
    eager_kv: float
    changed: Difference | None
    """A slot that nobody wrote and that is not what it was, or a NaN."""

    @property
    def ok(self) -> bool:
        factor = LOW_PRECISION_FACTOR
        within = self.logits <= factor * self.eager_logits and self.kv <= factor * self.eager_kv
        return within and self.changed is None


@dataclass(frozen=True)
class ProgramResult:
    """`sha256` is the canonical module's, in the plan's dtype."""

    program: BucketProgram
    sha256: str
    num_bytes: int
    opcodes: dict[str, int]
    findings: list[Finding]
    cases: list[CaseResult]
    low_precision: LowPrecision | None
    seconds: float

    @property
    def worst(self) -> CaseResult:
        return max(self.cases, key=lambda c: c.difference / c.tolerance)

    @property
    def ok(self) -> bool:
        return (
            all(case.ok for case in self.cases)
            and not any(f.severity == "error" for f in self.findings)
            and (self.low_precision is None or self.low_precision.ok)
        )


class Weights:
    """Random ones for an architecture, in float32 and, when asked for, in another dtype."""

    def __init__(self, program: BucketProgram, seed: int = 0) -> None:
        self._wide = random_weights(program.architecture, seed)

    def narrowed(self, dtype: str) -> dict[str, Tensor]:
        return {name: w.to(getattr(torch, dtype)) for name, w in self._wide.items()}

    @property
    def float32(self) -> dict[str, Tensor]:
        return self._wide


def verify_program(
    program: BucketProgram,
    weights: Weights,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> ProgramResult:
    """Lowers, lints, compiles for this host, runs all cases. Raises CompileError, as `lower`."""
    started = time.monotonic()
    payload = lower_quietly(program)
    module = read_module(payload)
    twin = replace(program, dtype="float32")
    same = program.dtype == "float32"
    reference = Reference(twin, weights.float32, seed)
    cases = check(payload if same else lower_quietly(twin), reference, progress)
    low = None if same else check_low_precision(payload, program, weights, seed, progress)
    return ProgramResult(
        program,
        hashlib.sha256(payload).hexdigest(),
        len(payload),
        analyse(module).opcodes,
        lint(module, program.signature),
        cases,
        low,
        time.monotonic() - started,
    )


def lower_quietly(program: BucketProgram) -> bytes:
    """torch warns of its own insides while it exports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return lower(program)


@dataclass(frozen=True)
class Expected:
    """A step's KV cache before, and what eager torch makes of it."""

    case: Case
    before: dict[str, Tensor]
    logits: Tensor
    written: dict[str, Tensor]
    """By KV tensor: the rows at `case.slots`."""


class Reference:
    """The program in eager torch, on all its cases."""

    def __init__(self, program: BucketProgram, weights: Mapping[str, Tensor], seed: int) -> None:
        self.program = program
        self.weights = weights
        self.cases = cases_of(program, seed)
        self._module = program_module(program)

    def __iter__(self) -> Iterator[Expected]:
        for case in self.cases:
            yield self.expected(case, kv_before(self.program, case))

    def expected(self, case: Case, before: dict[str, Tensor]) -> Expected:
        caches = {name: kv.clone() for name, kv in before.items()}
        tensors = {**case.inputs, **caches, **self.weights}
        with torch.no_grad():
            logits = self._module(*(tensors[t.name] for t in self.program.signature.inputs))
        written = {name: kv.flatten(0, 1)[case.slots] for name, kv in caches.items()}
        return Expected(case, before, logits[: case.rows], written)


class Runner:
    """A module on XLA:CPU, with these weights, given by name."""

    def __init__(
        self,
        payload: bytes,
        program: BucketProgram,
        weights: Mapping[str, Tensor],
        *,
        quick: bool = False,
    ) -> None:
        self._executable = XlaCpuProgram(payload, quick=quick)
        self._signature = program.signature
        self._weights = {name: to_jax(w, copy=False) for name, w in weights.items()}

    def optimised_text(self) -> str:
        return self._executable.optimised_text()

    def __call__(self, expected: Expected) -> tuple[Tensor, dict[str, Tensor]]:
        """All logits, and the KV cache after."""
        given = {
            **{name: to_jax(t) for name, t in expected.case.inputs.items()},
            # Copies: the module takes these buffers over.
            **{name: to_jax(t) for name, t in expected.before.items()},
            **self._weights,
        }
        outputs = self._executable([given[t.name] for t in self._signature.inputs])
        logits, *caches = map(to_torch, outputs)
        names = [t.name for t in self._signature.outputs][1:]
        return logits, dict(zip(names, caches, strict=True))


def check(
    payload: bytes,
    reference: Reference,
    progress: Progress = lambda *_: None,
) -> list[CaseResult]:
    run = Runner(payload, reference.program, reference.weights)
    results = []
    name, total = reference.program.name, len(reference.cases)
    for number, expected in enumerate(reference, 1):
        results.append(compare(expected, *run(expected)))
        progress(f"{name} float32", number, total)
    return results


def compare(expected: Expected, logits: Tensor, caches: Mapping[str, Tensor]) -> CaseResult:
    case = expected.case
    differences = [_largest("logits", logits[: case.rows], expected.logits)]
    for name, rows in expected.written.items():
        difference = _largest(name, caches[name].flatten(0, 1)[case.slots], rows)
        differences.append(_at_slot(difference, case))
        if (changed := _changed(name, expected, caches[name])) is not None:
            differences.append(changed)
    worst = max(differences, key=lambda d: d.amount)
    kv = max(d.amount for d in differences[1:])
    tolerance = SHIFTED_TOLERANCE if case.shifted else TOLERANCE
    return CaseResult(case.name, differences[0].amount, kv, worst, tolerance)


def _largest(tensor: str, found: Tensor, expected: Tensor) -> Difference:
    amounts = (found - expected).abs().nan_to_num(nan=float("inf"))
    at = tuple(int(i) for i in np.unravel_index(int(amounts.argmax()), amounts.shape))
    return Difference(tensor, at, float(expected[at]), float(found[at]), float(amounts[at]))


def _at_slot(difference: Difference, case: Case) -> Difference:
    """The index in the KV cache flattened over blocks, in place of that among the written rows."""
    row, *rest = difference.index
    return replace(difference, index=(int(case.slots[row]), *rest))


def _changed(name: str, expected: Expected, cache: Tensor) -> Difference | None:
    """The first slot that this step must leave alone and that has another bit."""
    bits = torch.int32 if cache.dtype == torch.float32 else torch.int16
    before, after = (t.flatten(0, 1) for t in (expected.before[name], cache))
    differs = (before.view(bits) != after.view(bits)).flatten(1).any(1)
    differs[expected.case.slots] = False
    differs[SCRATCH_SLOT] = False
    if not differs.any():
        return None
    slot = int(differs.nonzero()[0])
    inner = (before[slot].view(bits) != after[slot].view(bits)).nonzero()[0].tolist()
    at = (slot, *inner)
    return Difference(name, at, float(before[at]), float(after[at]), float("inf"))


def check_low_precision(
    payload: bytes, program: BucketProgram, weights: Weights, seed: int, progress: Progress
) -> LowPrecision:
    narrow = weights.narrowed(program.dtype)
    wide = {name: w.float() for name, w in narrow.items()}
    eager = Reference(program, narrow, seed)
    truth = Reference(replace(program, dtype="float32"), wide, seed)
    run = Runner(payload, program, narrow)
    squares = {"logits": [0.0, 0.0], "kv": [0.0, 0.0]}
    counts = {"logits": 0, "kv": 0}
    changed: Difference | None = None

    def add(kind: str, true: Tensor, ours: Tensor, theirs: Tensor) -> None:
        for i, values in enumerate((ours, theirs)):
            squares[kind][i] += float((values.float() - true).double().square().sum())
        counts[kind] += true.numel()

    for number, expected in enumerate(eager, 1):
        case = expected.case
        wide_before = {name: kv.float() for name, kv in expected.before.items()}
        true = truth.expected(case, wide_before)
        logits, caches = run(expected)
        add("logits", true.logits, logits[: case.rows], expected.logits)
        for name, rows in expected.written.items():
            ours = caches[name].flatten(0, 1)[case.slots]
            add("kv", true.written[name], ours, rows)
            changed = changed or _changed(name, expected, caches[name])
        progress(f"{program.name} {program.dtype}", number, len(eager.cases))
    errors = {kind: [(total / counts[kind]) ** 0.5 for total in squares[kind]] for kind in squares}
    (logits_error, eager_logits), (kv_error, eager_kv) = errors["logits"], errors["kv"]
    return LowPrecision(program.dtype, logits_error, eager_logits, kv_error, eager_kv, changed)


def to_jax(tensor: Tensor, copy: bool = True) -> jax.Array:
    """`copy=False` may share the tensor's memory: nobody may write to it then."""
    if tensor.dtype == torch.bfloat16:
        array = tensor.view(torch.int16).numpy().view(jax.dtypes.bfloat16)
    else:
        array = tensor.numpy()
    return jax.numpy.array(array, copy=True) if copy else jax.device_put(array)


def to_torch(array: jax.Array) -> Tensor:
    held = np.asarray(array)
    if held.dtype == jax.dtypes.bfloat16:
        return torch.from_numpy(held.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(held.copy())
