"""Each rule of the operator table against torch itself."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop_op

from nxbucket.compile.hlo.lowering import decomposed, interpreter_of
from nxbucket.compile.hlo.operators import RULES
from nxbucket.toolkit.errors import CompileError

generator = torch.Generator().manual_seed(7)
X = torch.randn(3, 4, 5, generator=generator)
Y = torch.randn(3, 4, 5, generator=generator)
M = torch.randn(4, 6, generator=generator)
N = torch.randn(6, 5, generator=generator)
I = torch.tensor([2, 0, 2], dtype=torch.int32)  # noqa: E741
J = torch.arange(12, dtype=torch.int32).view(3, 4)
B = X > 0

Function = Callable[..., Tensor]

CASES: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "add": (torch.add, (X, Y)),
    "add a number": (lambda x: x + 1.5, (X,)),
    "add, broadcast": (torch.add, (X, Y[0, :1])),
    "add, int to float": (torch.add, (X, J[:, :, None])),
    "add, bf16 to float": (torch.add, (X, Y.bfloat16())),
    "sub": (torch.sub, (X, Y)),
    "number minus": (lambda x: 1 - x, (X,)),
    "mul": (torch.mul, (X, Y)),
    "mul ints": (lambda j: j * 3, (J,)),
    "div": (torch.div, (X, Y)),
    "div by a number": (lambda x: x / 3, (X,)),
    "maximum": (torch.maximum, (X, Y)),
    "neg": (torch.neg, (X,)),
    "exp": (torch.exp, (X,)),
    "cos": (torch.cos, (X,)),
    "sin": (torch.sin, (X,)),
    "rsqrt": (torch.rsqrt, (X.abs(),)),
    "sigmoid": (torch.sigmoid, (X,)),
    "silu": (F.silu, (X,)),
    "silu, bf16": (F.silu, (X.bfloat16(),)),
    "square": (lambda x: x.pow(2), (X,)),
    "less": (lambda x, y: x < y, (X, Y)),
    "less or equal": (lambda x, y: x <= y, (J, I[:, None])),
    "greater or equal": (lambda x, y: x >= y, (J, I[:, None])),
    "greater": (lambda x, y: x > y, (X, Y)),
    "equals a number": (lambda j: j == 2, (J,)),
    "below a number": (lambda j: j < 5, (J,)),
    "and": (torch.bitwise_and, (B, Y > 0)),
    "not": (torch.logical_not, (B,)),
    "where": (torch.where, (B, X, Y)),
    "where, broadcast": (torch.where, (B[:, :1], X, Y[0])),
    "where, number": (lambda b, x: torch.where(b, x, 0), (B, X)),
    "to bf16 and back": (lambda x: x.bfloat16().float(), (X,)),
    "alias": (torch.ops.aten.alias.default, (X,)),
    "to half": (lambda x: x.half(), (X,)),
    "int to float": (lambda j: j.float(), (J,)),
    "bool to float": (lambda b: b.float(), (B,)),
    "full": (lambda x: x + torch.full((5,), 2.0), (X,)),
    "full_like": (lambda x: torch.full_like(x, -3), (X,)),
    "zeros_like": (torch.zeros_like, (X,)),
    "arange": (lambda j: j + torch.arange(4, dtype=torch.int32), (J,)),
    "arange, start and step": (lambda j: j + torch.arange(2, 10, 2, dtype=torch.int32), (J,)),
    "view": (lambda x: x.view(12, 5), (X,)),
    "view, -1": (lambda x: x.view(-1, 2, 5), (X,)),
    "unsqueeze": (lambda x: x.unsqueeze(-1) + x.unsqueeze(1).sum(), (X,)),
    "expand": (lambda i: i[:, None].expand(-1, 4) + 0, (I,)),
    "expand, new axis": (lambda i: i.expand(2, 3) + 0, (I,)),
    "repeat": (lambda i: i.repeat(4), (I,)),
    "repeat, axes": (lambda j: j.repeat(2, 1, 3), (J,)),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous(), (X,)),
    "transpose": (lambda x: x.transpose(-1, -2) @ x, (X,)),
    "cat": (lambda x, y: torch.cat((x, y), -1), (X, Y)),
    "slice": (lambda x: x[:, 1:3] * 1, (X,)),
    "slice, from the end": (lambda x: x[..., -2:] * 1, (X,)),
    "slice, step": (lambda x: x[..., ::2] * 1, (X,)),
    "slice, nothing": (lambda x: x[:, 3:2].sum() + x, (X,)),
    "select": (lambda x: x[:, 2] * 1, (X,)),
    "select, from the end": (lambda x: x[:, -1] * 1, (X,)),
    "split": (lambda x: torch.split(x, [1, 3], 1)[1] * 1, (X,)),
    "chunk": (lambda m: m.chunk(2, -1)[1] * 1, (M,)),
    "pad": (lambda j: F.pad(j, (1, 2), value=7), (J,)),
    "pad, two axes": (lambda x: F.pad(x, (0, 0, 2, 1)), (X,)),
    "mm": (torch.mm, (M, N)),
    "linear": (F.linear, (X, torch.randn(7, 5, generator=generator))),
    "linear with bias": (F.linear, (M, N.T.contiguous(), torch.ones(5))),
    "bmm": (lambda x, y: x @ y.transpose(1, 2), (X, Y)),
    "sum": (lambda x: x.sum(-1, keepdim=True), (X,)),
    "mean": (lambda x: x.mean(-1, keepdim=True), (X,)),
    "mean, two axes": (lambda x: x.mean((0, 2)), (X,)),
    "amax": (lambda x: x.amax(-1, keepdim=True), (X,)),
    "max of all": (lambda j: j.max(), (J,)),
    "any": (lambda b: b.any(-1, keepdim=True), (B,)),
    "softmax": (lambda x: x.softmax(-1), (X,)),
    "softmax, another axis": (lambda x: x.softmax(0), (X,)),
    "embedding": (lambda j: F.embedding(j, torch.arange(24.0).view(12, 2)), (J,)),
    "index_select": (lambda x, i: x.index_select(0, i), (X, I)),
    "index_select, inner axis": (lambda x, i: x.index_select(1, i), (X, I)),
    "index": (lambda x, i: x[i], (X, I)),
    "index by a table": (lambda m, j: m[(j < 6).int()], (M, J)),
    "index, inner axis": (lambda x, i: x[:, i], (X, I)),
    "index_put": (lambda x, i: x.index_put((i[:2],), torch.ones(2, 4, 5)), (X, I)),
    "index_put, broadcast": (lambda x, i: x.index_put((i[:2],), torch.ones(5)), (X, I)),
    "index_put by slot": (
        lambda x, slots: x.index_put((slots // 4, slots % 4), torch.ones(2, 5)),
        (X, 5 * I[:2]),
    ),
    "attention": (
        lambda x, b: F.scaled_dot_product_attention(x, x, x, attn_mask=b),
        (X[None], torch.tril(torch.ones(4, 4)).bool()[None, None]),
    ),
}


class Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def in_hlo(function: Function, tensors: tuple[Tensor, ...]) -> np.ndarray[Any, Any]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = decomposed(torch.export.export(Module(function), tensors, strict=False))
    constants = {**exported.constants, **exported.state_dict}
    lifted = [
        array(constants[str(spec.target)])
        for spec in exported.graph_signature.input_specs
        if spec.target is not None
    ]
    run = interpreter_of(exported)
    (result,) = jax.jit(lambda *inputs: run(*lifted, *inputs))(*map(array, tensors))
    return np.asarray(result)


def array(tensor: Tensor) -> jax.Array:
    if tensor.dtype == torch.bfloat16:
        return jax.numpy.asarray(tensor.float().numpy(), dtype=jax.numpy.bfloat16)
    return jax.numpy.asarray(tensor.numpy())


@pytest.mark.parametrize("name", CASES)
def test_a_rule_computes_what_torch_does(name: str) -> None:
    function, tensors = CASES[name]
    expected = function(*tensors)
    found = in_hlo(function, tensors)
    assert found.shape == tuple(expected.shape)
    assert found.dtype.name == str(expected.dtype).removeprefix("torch.")
    tolerance = 1e-6 if expected.dtype in (torch.float32, torch.int32, torch.bool) else 2e-2
    np.testing.assert_allclose(
        found.astype(np.float32), expected.float().numpy(), rtol=tolerance, atol=tolerance
    )


def test_every_rule_is_used_by_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    for operator, found in dict(RULES).items():

        def spying(
            *args: Any, _found: Any = found, _operator: Any = operator, **kwargs: Any
        ) -> Any:
            used.add(_operator)
            return _found(*args, **kwargs)

        monkeypatch.setitem(RULES, operator, spying)
    for function, tensors in CASES.values():
        in_hlo(function, tensors)
    assert {str(operator) for operator in RULES} - {str(operator) for operator in used} == set()


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (torch.erf, "aten.erf.default"),
        (lambda x: torch.sort(x)[0], "aten.sort.default"),
        (lambda x: x.pow(3), "exponent 3"),
        (lambda x: x.cumsum(0), "aten.cumsum.default"),
    ],
)
def test_an_operator_without_a_rule_is_named_with_its_line(function: Function, named: str) -> None:
    with pytest.raises(CompileError, match=named) as caught:
        in_hlo(function, (X,))
    assert "test_operators.py, line" in str(caught.value)
    assert "compile/hlo/operators.py" in str(caught.value.hint)


def loop(condition: Callable[..., Tensor]) -> Function:
    def function(x: Tensor) -> Tensor:
        def body(i: Tensor, total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, total + x * i

        start: Any = (torch.zeros((), dtype=torch.int32), torch.zeros_like(x))
        result: Any = while_loop_op(condition, body, start, (x,))
        total: Tensor = result[1]
        return total

    return function


def test_a_loop_runs_its_fixed_number_of_rounds() -> None:
    found = in_hlo(loop(lambda i, total, x: i < 4), (X,))
    np.testing.assert_allclose(found, (6 * X).numpy(), rtol=1e-6)


def test_an_early_end_of_a_loop_is_left_out() -> None:
    found = in_hlo(loop(lambda i, total, x: (i < 4) & (total.sum() < -1e9)), (X,))
    np.testing.assert_allclose(found, (6 * X).numpy(), rtol=1e-6)


def test_a_loop_without_a_fixed_number_of_rounds_is_refused() -> None:
    with pytest.raises(CompileError, match="fixed number of rounds"):
        in_hlo(loop(lambda i, total, x: total.sum() < 3), (X,))
