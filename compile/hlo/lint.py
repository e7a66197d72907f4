"""What can be known of a module before Neuron's compiler sees it: rules, each with its source.

The sources are AWS's pages of the Neuron SDK: error codes (NCC_...) and the known issues of
jax-neuronx. None of these rules was tried against the compiler. docs/hlo.md lists them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from nxbucket.compile.hlo.analysis import loop_rounds, temporaries
from nxbucket.compile.hlo.module import Computation, Instruction, Module, Shape
from nxbucket.compile.hlo.tensors import tensor_faults
from nxbucket.compile.signature import ProgramSignature
from nxbucket.toolkit.errors import CompileError

Severity = Literal["error", "warning"]

OPCODES = frozenset(
    {
        *("parameter", "constant", "iota", "tuple", "get-tuple-element", "while"),
        *("broadcast", "reshape", "transpose", "slice", "concatenate", "convert"),
        *("add", "subtract", "multiply", "divide", "maximum", "negate", "exponential"),
        *("cosine", "sine", "rsqrt", "compare", "and", "or", "not", "select"),
        *("dot", "reduce", "gather", "scatter"),
    }
)
"""What the rules of operators.py come to. One more is a decision, as a rule is."""

OPCODE_SOURCES = {
    "conditional": "jax-neuronx known issues: lax.cond is not supported",
    "sort": "jax-neuronx known issues: only some comparators",
    "topk": "NCC_EVRF013: not of integers",
    "reduce-precision": "jax-neuronx known issues: not supported",
    "rng-bit-generator": "NCC_EVRF006: one algorithm only",
    "power": "NCC_EVRF062: not of 64-bit integers",
    "reduce-window": "NCC_EVRF017, EVRF018, EVRF019: no dilation, two operands",
    "convolution": "NCC_EVRF010, EVRF011: not every dilation",
    "shift-right-arithmetic": "NCC_EVRF022: 32 bits only",
    "all-reduce": "NCC_EVRF061: not of integers",
    "reduce-scatter": "NCC_EVRF063: not of integers",
}

DTYPES = frozenset({"pred", "s32", "f32", "bf16", "f16"})

DTYPE_SOURCES = {
    "s64": "NCC_EVRF035, EVRF062: 64-bit integers are narrowed or refused",
    "u64": "NCC_ESFH002: 64-bit integers are narrowed to 32 bits or refused",
    "f64": "jax-neuronx known issues: no data type of Neuron's",
    "c64": "NCC_EVRF004: no complex types",
    "c128": "NCC_EVRF004: no complex types",
    "f8e4m3fn": "NCC_EVRF051: not on trn1 and trn2; NCC_ESPP047",
    "f8e4m3fnuz": "NCC_EVRF005: not supported",
    "f8e4m3b11fnuz": "NCC_EVRF005: not supported",
    "f8e5m2fnuz": "NCC_EVRF005: not supported",
    "f8e4m3": "NCC_EVRF052: not on hardware newer than trn3",
    "f4e2m1fn": "NCC_ESPP004: not supported for code generation",
}

INTEGERS = frozenset({"pred", *(f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64))})

MAX_ID = (1 << 31) - 1

LARGE_TEMPORARY_BYTES = 1 << 30
"""Ours: a value this large is a good part of a core's 12 to 24 GiB, beside weights and KV cache."""


@dataclass(frozen=True)
class Finding:
    """`rule` is stable and greppable; `instruction` is a name in the module, if it is about one."""

    severity: Severity
    rule: str
    message: str
    instruction: str | None = None

    def __str__(self) -> str:
        where = f"{self.instruction}: " if self.instruction else ""
        return f"{where}{self.message} [{self.rule}]"


Rule = Callable[[Module], Iterator[Finding]]


def lint(module: Module, signature: ProgramSignature | None = None) -> list[Finding]:
    """Errors first. With a program's `signature`, inputs, outputs and aliases are compared."""
    findings = [finding for rule in RULES for finding in rule(module)]
    if signature is not None:
        findings += _against(module, signature)
    return sorted(findings, key=lambda f: f.severity)


def refuse_errors(name: str, findings: Sequence[Finding]) -> None:
    """Raises CompileError with the first error; the others are counted."""
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        raise CompileError(
            f"{name}: its HLO is not for Neuron: {errors[0]}{more}",
            hint="the rules and their sources are in docs/hlo.md; a program that breaks one is "
            "a bug of nxbucket: please report it with the model's config.json",
        )


def _ids(module: Module) -> Iterator[Finding]:
    lowest, highest = module.id_range
    count = sum(len(c.instructions) for c in module.computations)
    if highest > MAX_ID or lowest < 0:
        yield Finding(
            "error",
            "ids",
            f"an id of {highest if lowest >= 0 else lowest}; Neuron's tools read 31 bits "
            "(pytorch/xla#9685)",
        )
    elif (lowest, highest) != (1, count):
        yield Finding("error", "ids", f"ids go from {lowest} to {highest}, not from 1 to {count}")


def _opcodes(module: Module) -> Iterator[Finding]:
    for instruction in module.instructions():
        if instruction.opcode == "custom-call":
            target = instruction.custom_call_target or "without a target"
            yield Finding(
                "error",
                "custom-call",
                f"custom call {target}: only AWS's own targets are known (NCC_EHCA005, EVRF015)",
                instruction.name,
            )
        elif instruction.opcode not in OPCODES:
            source = OPCODE_SOURCES.get(
                instruction.opcode, "NCC_EUOC002, EVRF001: an operator may be unsupported"
            )
            yield Finding(
                "error",
                "opcode",
                f"{instruction.opcode} is not among the {len(OPCODES)} opcodes of our lowering "
                f"({source})",
                instruction.name,
            )


def _dtypes(module: Module) -> Iterator[Finding]:
    for instruction in module.instructions():
        shapes = list(instruction.shape.arrays())
        for dtype in sorted({s.dtype for s in shapes} - DTYPES):
            source = DTYPE_SOURCES.get(dtype, "not a type of our lowering")
            yield Finding("error", "dtype", f"{dtype} ({source})", instruction.name)
        if any(s.dynamic for s in shapes):
            yield Finding(
                "error",
                "static-shape",
                f"the shape {instruction.shape} is dynamic (NCC_EMOD025)",
                instruction.name,
            )


def _dots(module: Module) -> Iterator[Finding]:
    for computation, dot in _of(module, "dot"):
        dtype = computation.operand(dot, 0).shape.dtype
        if dtype in INTEGERS:
            yield Finding(
                "error",
                "integer-dot",
                f"a dot of {dtype}: the engine computes in floating point (NCC_EVRF035)",
                dot.name,
            )


def _loops(module: Module) -> Iterator[Finding]:
    for computation, loop in _of(module, "while"):
        if loop_rounds(module, computation, loop) is None:
            yield Finding(
                "error",
                "static-loop",
                "a loop whose number of rounds is no constant (jax-neuronx known issues: only "
                "static while loops are supported)",
                loop.name,
            )


def _reductions(module: Module) -> Iterator[Finding]:
    for _, reduce in _of(module, "reduce"):
        if len(reduce.operands) != 2:
            yield Finding(
                "error",
                "variadic-reduce",
                f"a reduce of {len(reduce.operands) // 2} arrays (jax-neuronx known issues)",
                reduce.name,
            )


def _scatters(module: Module) -> Iterator[Finding]:
    for computation, scatter in _of(module, "scatter"):
        dtype = computation.operand(scatter, 0).shape.dtype
        combiner = module.by_id[scatter.called[0]].root.opcode
        if combiner != "parameter" and dtype in INTEGERS:
            yield Finding(
                "error",
                "integer-scatter",
                f"a scatter that combines {dtype} by {combiner}: it computes in f32, exact to 2^24 "
                "(NCC_EVRF016, EVRF060)",
                scatter.name,
            )


def _counted_indices(module: Module) -> Iterator[Finding]:
    """Of a gather or scatter: START_INDEX_MAP and SCATTER_DIMS_TO_OPERAND_DIMS are both field 3."""
    counters = _counter_ends(module)
    for opcode, code in (("gather", "NCC_EVRF056"), ("scatter", "NCC_EVRF031")):
        for computation, instruction in _of(module, opcode):
            end = _index_end(computation, computation.operand(instruction, 1), counters)
            dims = computation.operand(instruction, 0).shape.dims
            sizes = [dims[d] for d in instruction.numbers.get(3, ()) if 0 <= d < len(dims)]
            if end is not None and sizes and end > min(sizes):
                yield Finding(
                    "error",
                    "index-bounds",
                    f"indices from 0 to {end - 1} into a dimension of {min(sizes)} ({code}; "
                    "jax-neuronx known issues: a runtime error)",
                    instruction.name,
                )


def _counter_ends(module: Module) -> dict[tuple[int, int], int]:
    """By a loop's body and the counter's place in its state: one more than its last value."""
    ends = {}
    for computation, loop in _of(module, "while"):
        if loop_rounds(module, computation, loop) is not None:
            condition = module.by_id[loop.called[1]]
            counter, bound = (condition.operand(condition.root, side) for side in (0, 1))
            assert bound.scalar is not None
            ends[loop.called[0], counter.tuple_index] = bound.scalar
    return ends


def _index_end(
    computation: Computation, at: Instruction, counters: dict[tuple[int, int], int]
) -> int | None:
    """One more than the largest index, if it is an iota or a loop's counter in another shape."""
    while at.opcode in ("reshape", "broadcast", "transpose", "convert") and at.operands:
        at = computation.operand(at, 0)
    if at.opcode == "get-tuple-element" and computation.operand(at, 0).opcode == "parameter":
        return counters.get((computation.id, at.tuple_index))
    if at.opcode != "iota" or len(at.dimensions) != 1:
        return None
    (axis,) = at.dimensions
    return at.shape.dims[axis] if 0 <= axis < len(at.shape.dims) else None


def _aliases(module: Module) -> Iterator[Finding]:
    for kind, numbers in (
        ("output", [a.output for a in module.aliases]),
        ("parameter", [a.parameter for a in module.aliases]),
    ):
        for number, count in Counter(numbers).items():
            if count > 1:
                yield Finding("error", "alias", f"{kind} {number} is aliased {count} times")
    for alias in module.aliases:
        outputs, parameters = module.outputs, module.parameters
        if not 0 <= alias.output < len(outputs) or not 0 <= alias.parameter < len(parameters):
            yield Finding(
                "error",
                "alias",
                f"output {alias.output} is said to be parameter {alias.parameter}; there are "
                f"{len(outputs)} outputs and {len(parameters)} parameters",
            )
            continue
        given, made = parameters[alias.parameter], outputs[alias.output]
        if (given.shape.dtype, given.shape.dims) != (made.dtype, made.dims):
            yield Finding(
                "error",
                "alias",
                f"output {alias.output}, {made}, cannot be {given.name}, {given.shape}",
            )
        if not alias.must:
            yield Finding(
                "error", "alias", f"the alias of {given.name} is a may-alias: a copy is allowed"
            )


def _layouts(module: Module) -> Iterator[Finding]:
    """The runner binds tensors as they lie: items of the last dimension are neighbours."""
    named: list[tuple[str, Shape]] = [(p.name, p.shape) for p in module.parameters]
    named += [(f"output {i}", shape) for i, shape in enumerate(module.outputs)]
    for name, shape in named:
        if not shape.row_major:
            yield Finding("error", "layout", f"{name} is not row-major")


def _large_temporaries(module: Module) -> Iterator[Finding]:
    for temporary in temporaries(module)[:3]:
        if temporary.num_bytes > LARGE_TEMPORARY_BYTES:
            instruction = temporary.instruction
            yield Finding(
                "warning",
                "large-temporary",
                f"{instruction.shape} are {temporary.num_bytes / (1 << 30):.1f} GiB beside weights "
                "and KV cache (NCC_EOOM001, EOOM002, EVRF009); in model.yaml, "
                "neuron_config.kv_segment_size_buckets: [512] reads the KV cache in pieces, and "
                "smaller num_batched_tokens_buckets, num_seqs_buckets or max_model_len make all of "
                "them smaller",
                instruction.name,
            )


def _of(module: Module, opcode: str) -> Iterator[tuple[Computation, Instruction]]:
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == opcode:
                yield computation, instruction


RULES: tuple[Rule, ...] = (
    _ids,
    _opcodes,
    _dtypes,
    _dots,
    _loops,
    _reductions,
    _scatters,
    _counted_indices,
    _aliases,
    _layouts,
    _large_temporaries,
)


def _against(module: Module, signature: ProgramSignature) -> Iterator[Finding]:
    """The first fault of each kind: the others are most often the same one."""
    for faults in (
        tensor_faults("parameter", [str(p.shape) for p in module.parameters], signature.inputs),
        tensor_faults("output", [str(shape) for shape in module.outputs], signature.outputs),
        _name_faults(module, signature),
        _alias_faults(module, signature),
    ):
        for fault in islice(faults, 1):
            yield Finding("error", "signature", fault)


def _name_faults(module: Module, signature: ProgramSignature) -> Iterator[str]:
    for i, (there, wanted) in enumerate(zip(module.parameters, signature.inputs, strict=False)):
        if there.name != wanted.name:
            yield f"parameter {i} is named {there.name}, not {wanted.name}"


def _alias_faults(module: Module, signature: ProgramSignature) -> Iterator[str]:
    positions = {t.name: i for i, t in enumerate(signature.inputs)}
    wanted = [(i, positions[t.alias]) for i, t in enumerate(signature.outputs) if t.alias]
    there = sorted((a.output, a.parameter) for a in module.aliases)
    if there != wanted:
        yield f"its aliases, (output, parameter), are {there}, not {wanted}"
