"""From a bucket program to the HloModuleProto a Neuron compiler is given.

torch.export (fake tensors, no weights in memory) -> one `jax.lax` rule per operator (operators.py)
-> StableHLO -> HloModuleProto -> canonical bytes (canonical.py). The same programs as the cpu
target's: there is no second model code.

jax runs on the host's processor here and only writes graphs; nothing of the model is computed.
"""

import operator
import re
from collections.abc import Callable
from typing import Any

# isort: off
from nxbucket.compile.hlo import jax_setup  # noqa: F401  # before jax
# isort: on

import jax
import torch
from jax import lax
from jaxlib import _jax
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from nxbucket.compile.hlo.canonical import canonical_module
from nxbucket.compile.hlo.operators import DTYPES, RULES, put_slots, times_transposed
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.programs.families import program_module
from nxbucket.compile.signature import ProgramSignature
from nxbucket.toolkit.errors import CompileError

SOURCE_LINE = re.compile(r'File "[^"]*?([^"/]+/[^"/]+)", line (\d+)')


def lower(program: BucketProgram) -> bytes:
    """The canonical HloModuleProto: parameters in the signature's order, the outputs as a tuple.

    Raises CompileError naming the operator and the program's line if one has no rule.
    """
    exported = export(program)
    function = _as_function(exported, program.signature)
    shapes = [
        jax.ShapeDtypeStruct(t.shape, DTYPES[getattr(torch, t.dtype)])  # type: ignore[no-untyped-call]
        for t in program.signature.inputs
    ]
    # Without keep_unused, a parameter nobody reads would vanish and the others move up.
    lowered = jax.jit(function, keep_unused=True).lower(*shapes)
    computation = _jax.mlir.mlir_module_to_xla_computation(
        str(lowered.compiler_ir("stablehlo")), use_tuple_args=False, return_tuple=True
    )
    return canonical_module(computation.as_serialized_hlo_module_proto(), program.signature)


def export(program: BucketProgram) -> ExportedProgram:
    with FakeTensorMode():
        inputs = tuple(
            torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in program.signature.inputs
        )
    with torch.no_grad():
        return decomposed(torch.export.export(program_module(program), inputs, strict=False))


def decomposed(traced: ExportedProgram) -> ExportedProgram:
    """In core ATen operators, updates of inputs as outputs."""
    exported: ExportedProgram = traced.run_decompositions()
    _fold_transposes(exported.graph_module.graph)
    _fold_slots(exported.graph_module.graph)
    exported.graph_module.graph.eliminate_dead_code()
    return exported


def _fold_transposes(graph: torch.fx.Graph) -> None:
    """x @ w.T as one product: turning a weight round would be a copy as large as it is."""
    for n in list(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)):
        x, turned = n.args
        if turned.target is torch.ops.aten.permute.default and list(turned.args[1]) == [1, 0]:
            with graph.inserting_before(n):
                product = graph.call_function(times_transposed, (x, turned.args[0]))
            product.meta = n.meta
            n.replace_all_uses_with(product)


def _fold_slots(graph: torch.fx.Graph) -> None:
    """cache[slot // block_size, slot % block_size] = rows, by slot: without an integer division,
    of which no page says that Neuron does it exactly."""
    for n in list(graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)):
        cache, indices, rows, *_ = n.args
        slots = _slots_of(indices, cache.meta["val"].shape[1])
        if slots is not None:
            with graph.inserting_before(n):
                written = graph.call_function(put_slots, (cache, slots, rows))
            written.meta = n.meta
            n.replace_all_uses_with(written)


def _slots_of(indices: Any, block_size: int) -> torch.fx.Node | None:
    """`slots` of [slots // block_size, slots % block_size]."""
    if len(indices) != 2:
        return None
    block, offset = indices
    floored = block.target is torch.ops.aten.div.Tensor_mode and block.kwargs == {
        "rounding_mode": "floor"
    }
    remains = offset.target is torch.ops.aten.remainder.Scalar
    slots: torch.fx.Node = block.args[0]
    same = floored and remains and block.args == offset.args == (slots, block_size)
    return slots if same else None


def _as_function(exported: ExportedProgram, signature: ProgramSignature) -> Callable[..., Any]:
    """A function of the signature's inputs that returns its outputs, both in order."""
    graph = exported.graph_signature
    constants = [
        jax.numpy.asarray(_buffer(exported, str(spec.target)).numpy())
        for spec in graph.input_specs
        if spec.kind is InputKind.BUFFER
    ]
    assert all(spec.kind is InputKind.USER_INPUT for spec in graph.input_specs[len(constants) :])
    names = [spec.arg.name for spec in graph.input_specs[len(constants) :]]
    name_of = dict(zip(names, (t.name for t in signature.inputs), strict=True))
    positions = {
        name_of[str(spec.target)] if spec.kind is OutputKind.USER_INPUT_MUTATION else None: i
        for i, spec in enumerate(graph.output_specs)
    }
    order = [positions[t.alias] for t in signature.outputs]

    run = interpreter_of(exported)

    def function(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        results = run(*constants, *inputs)
        return tuple(results[i] for i in order)

    return function


def interpreter_of(exported: ExportedProgram) -> Callable[..., Any]:
    """The graph as a function jax can trace: lifted constants first, then the inputs."""

    def run(*arguments: jax.Array) -> Any:
        return _Interpreter(exported.graph_module).run(*arguments, enable_io_processing=False)

    return run


def _buffer(exported: ExportedProgram, target: str) -> torch.Tensor:
    held = exported.constants.get(target)
    tensor: torch.Tensor = exported.state_dict[target] if held is None else held
    return tensor


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph of torch operators on jax's tracers."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        if n.target is torch.ops.higher_order.while_loop:
            return self._loop(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        found = RULES.get(n.target)
        if found is None:
            raise CompileError(
                f"{n.target} has no rule for HLO{_place(n)}",
                hint="write the program without it, or add a rule to compile/hlo/operators.py",
            )
        try:
            return found(*args, **kwargs, out=n.meta.get("val"))
        except NotImplementedError as err:
            raise CompileError(
                f"{n.target} has no rule for {err}{_place(n)}",
                hint="write the program without it, or extend the rule in compile/hlo/operators.py",
            ) from err

    def _loop(self, n: torch.fx.Node) -> list[Any]:
        """A loop of a fixed number of rounds, the only kind Neuron's compiler takes.

        What else the condition asks is a chance to end early, and is left out: see
        programs/segments.py for why more rounds change nothing.
        """
        arguments: Any = self.map_nodes_to_values(n.args, n)
        condition, body, carried, operands = arguments
        rounds = _rounds(condition, n)

        def keep_on(state: Any) -> Any:
            return lax.lt(state[0], lax.full((), rounds, state[0].dtype))

        def step(state: Any) -> Any:
            return tuple(_Interpreter(body).run(*state, *operands, enable_io_processing=False))

        return list(lax.while_loop(keep_on, step, tuple(carried)))


def _rounds(condition: torch.fx.GraphModule, n: torch.fx.Node) -> int:
    """N of `counter < N`, which the condition is or is and-ed with; the counter comes first."""
    counter = next(node for node in condition.graph.nodes if node.op == "placeholder")
    result: Any = condition.graph.output_node().args[0]
    joined = result.target is torch.ops.aten.bitwise_and.Tensor
    for term in result.args if joined else (result,):
        if term.target is torch.ops.aten.lt.Scalar and term.args[0] is counter:
            return int(term.args[1])
    raise CompileError(
        f"a loop without a fixed number of rounds has no HLO for Neuron{_place(n)}",
        hint="and its condition with `counter < number`, the counter its first operand",
    )


def _place(n: torch.fx.Node) -> str:
    found = SOURCE_LINE.findall(n.meta.get("stack_trace") or "")
    return f" ({found[-1][0]}, line {found[-1][1]})" if found else ""
