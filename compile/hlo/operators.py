"""What each torch operator of a bucket program is in HLO: one rule each, by way of `jax.lax`.

Only `lax`, never `jnp`, whose functions bring calls and index checks of their own, and 32-bit
integers only: Neuron has no wider ones that are safe to use. An operator without a rule is an
error; the bucket programs are ours, so a new one is a decision, not an accident.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

aten = torch.ops.aten

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.dtype("float32"),
    torch.bfloat16: jax.dtypes.bfloat16,
    torch.float16: np.dtype("float16"),
    torch.int32: np.dtype("int32"),
    torch.int64: np.dtype("int32"),
    torch.bool: np.dtype("bool"),
}

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""By operator overload. A rule takes the operator's arguments and, as `out`, its fake result: whose
dtype says what torch's type promotion came to."""


def rule(*operators: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = function
        return function

    return register


def _constant(value: Any, dtype: Any) -> Array:
    return lax.full((), value, dtype)


def _broadcast(x: Array, shape: Sequence[int]) -> Array:
    if x.shape == tuple(shape):
        return x
    offset = len(shape) - x.ndim
    return lax.broadcast_in_dim(x, tuple(shape), tuple(range(offset, len(shape))))


def _operand(x: Any, dtype: Any, shape: Sequence[int]) -> Array:
    """A tensor or a number, as an array of this dtype and shape."""
    if not isinstance(x, jax.Array):
        return lax.full(tuple(shape), x, dtype)
    return _broadcast(lax.convert_element_type(x, dtype), shape)


def _elementwise(function: Callable[..., Array]) -> Rule:
    """Arguments take the dtype and shape of the result."""

    def lowered(*args: Any, out: torch.Tensor, **_: Any) -> Array:
        return function(*(_operand(x, DTYPES[out.dtype], out.shape) for x in args))

    return lowered


def _comparison(function: Callable[[Array, Array], Array]) -> Rule:
    def lowered(x: Array, y: Any, *, out: torch.Tensor) -> Array:
        dtype = (
            x.dtype if not isinstance(y, jax.Array) else jax.numpy.promote_types(x.dtype, y.dtype)
        )
        return function(_operand(x, dtype, out.shape), _operand(y, dtype, out.shape))

    return lowered


RULES.update(
    {
        aten.add.Tensor: _elementwise(lax.add),
        aten.sub.Tensor: _elementwise(lax.sub),
        aten.mul.Tensor: _elementwise(lax.mul),
        aten.mul.Scalar: _elementwise(lax.mul),
        aten.div.Tensor: _elementwise(lax.div),
        aten.maximum.default: _elementwise(lax.max),
        aten.bitwise_and.Tensor: _elementwise(lax.bitwise_and),
        aten.logical_not.default: _elementwise(lax.bitwise_not),
        aten.neg.default: _elementwise(lax.neg),
        aten.exp.default: _elementwise(lax.exp),
        aten.cos.default: _elementwise(lax.cos),
        aten.sin.default: _elementwise(lax.sin),
        aten.rsqrt.default: _elementwise(lax.rsqrt),
        aten.sigmoid.default: _elementwise(lax.logistic),
        aten.eq.Scalar: _comparison(lax.eq),
        aten.lt.Scalar: _comparison(lax.lt),
        aten.lt.Tensor: _comparison(lax.lt),
        aten.le.Tensor: _comparison(lax.le),
        aten.ge.Tensor: _comparison(lax.ge),
        aten.gt.Tensor: _comparison(lax.gt),
    }
)


@rule(aten.pow.Tensor_Scalar)
def _pow(x: Array, exponent: float, *, out: torch.Tensor) -> Array:
    if exponent != 2:
        raise NotImplementedError(f"the exponent {exponent}")
    return lax.mul(x, x)


@rule(aten.where.self)
def _where(condition: Array, x: Array, y: Array, *, out: torch.Tensor) -> Array:
    dtype = DTYPES[out.dtype]
    chosen = _broadcast(condition, out.shape)
    return lax.select(chosen, _operand(x, dtype, out.shape), _operand(y, dtype, out.shape))


@rule(aten._to_copy.default, aten.clone.default, aten.alias.default)
def _convert(x: Array, *, out: torch.Tensor, **_: Any) -> Array:
    return lax.convert_element_type(x, DTYPES[out.dtype])


@rule(aten._assert_tensor_metadata.default)
def _nothing(*_: Any, **__: Any) -> None:
    return None


@rule(aten.scalar_tensor.default, aten.full.default, aten.full_like.default)
def _full(*args: Any, out: torch.Tensor, **_: Any) -> Array:
    value = args[0] if not out.shape and not isinstance(args[0], (list, jax.Array)) else args[1]
    return lax.full(tuple(out.shape), value, DTYPES[out.dtype])


@rule(aten.arange.start_step)
def _arange(start: int, end: int, step: int = 1, *, out: torch.Tensor, **_: Any) -> Array:
    dtype = DTYPES[out.dtype]
    counted = lax.iota(dtype, out.shape[0])
    if step != 1:
        counted = lax.mul(counted, _operand(step, dtype, out.shape))
    return counted if start == 0 else lax.add(counted, _operand(start, dtype, out.shape))


@rule(aten.view.default, aten.unsqueeze.default)
def _reshape(x: Array, *_: Any, out: torch.Tensor) -> Array:
    return lax.reshape(x, tuple(out.shape))


@rule(aten.expand.default)
def _expand(x: Array, *_: Any, out: torch.Tensor, **__: Any) -> Array:
    return _broadcast(x, out.shape)


@rule(aten.repeat.default)
def _repeat(x: Array, repeats: Sequence[int], *, out: torch.Tensor) -> Array:
    offset = len(repeats) - x.ndim
    interleaved = [size for r, n in zip(repeats[offset:], x.shape, strict=True) for size in (r, n)]
    axes = tuple(offset + 2 * i + 1 for i in range(x.ndim))
    return lax.reshape(
        lax.broadcast_in_dim(x, (*repeats[:offset], *interleaved), axes), tuple(out.shape)
    )


@rule(aten.permute.default)
def _permute(x: Array, axes: Sequence[int], *, out: torch.Tensor) -> Array:
    return lax.transpose(x, tuple(axis % x.ndim for axis in axes))


@rule(aten.cat.default)
def _cat(parts: Sequence[Array], axis: int = 0, *, out: torch.Tensor) -> Array:
    return lax.concatenate(list(parts), axis % out.ndim)


@rule(aten.slice.Tensor)
def _slice(
    x: Array,
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
    *,
    out: torch.Tensor,
) -> Array:
    first, last, _ = slice(start, end).indices(x.shape[axis])
    return lax.slice_in_dim(x, first, max(first, last), step, axis)


@rule(aten.select.int)
def _select(x: Array, axis: int, index: int, *, out: torch.Tensor) -> Array:
    index %= x.shape[axis]
    return lax.reshape(lax.slice_in_dim(x, index, index + 1, 1, axis), tuple(out.shape))


@rule(aten.split_with_sizes.default)
def _split(x: Array, sizes: Sequence[int], axis: int = 0, *, out: Any) -> list[Array]:
    edges = [0, *np.cumsum(sizes).tolist()]
    return [lax.slice_in_dim(x, a, b, 1, axis % x.ndim) for a, b in itertools.pairwise(edges)]


@rule(aten.constant_pad_nd.default)
def _pad(x: Array, pad: Sequence[int], value: float = 0, *, out: torch.Tensor) -> Array:
    """As concatenations: `pad` is one more opcode that a device's compiler would have to know."""
    for i in range(len(pad) // 2):
        axis = x.ndim - 1 - i

        def filled(size: int, x: Array = x, axis: int = axis) -> list[Array]:
            shape = tuple(size if a == axis else n for a, n in enumerate(x.shape))
            return [lax.full(shape, value, x.dtype)] if size else []

        parts = [*filled(pad[2 * i]), x, *filled(pad[2 * i + 1])]
        x = lax.concatenate(parts, axis) if len(parts) > 1 else x
    return x


@rule(aten.mm.default)
def _mm(x: Array, y: Array, *, out: torch.Tensor) -> Array:
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())))


def times_transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [m, k], y [n, k] -> [m, n]. Stands for a linear layer in a graph about to be lowered."""
    return x @ y.T


@rule(times_transposed)
def _times_transposed(x: Array, y: Array, *, out: torch.Tensor) -> Array:
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())))


@rule(aten.bmm.default)
def _bmm(x: Array, y: Array, *, out: torch.Tensor) -> Array:
    return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))


@rule(aten.addmm.default)
def _addmm(bias: Array, x: Array, y: Array, *, out: torch.Tensor) -> Array:
    return lax.add(_mm(x, y, out=out), _broadcast(bias, out.shape))


def _axes(x: Array, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    if axes is None or axes == []:  # torch's two ways to say all of them
        return tuple(range(x.ndim))
    return tuple(a % x.ndim for a in ([axes] if isinstance(axes, int) else axes))


def _reduction(reduce: Callable[[Array, tuple[int, ...]], Array]) -> Rule:
    def lowered(
        x: Array,
        axes: int | Sequence[int] | None = None,
        keep: bool = False,
        *,
        out: torch.Tensor,
        **_: Any,
    ) -> Array:
        return lax.reshape(reduce(x, _axes(x, axes)), tuple(out.shape))

    return lowered


RULES[aten.sum.dim_IntList] = _reduction(lax.reduce_sum)
RULES[aten.amax.default] = _reduction(lax.reduce_max)
RULES[aten.max.default] = _reduction(lax.reduce_max)
RULES[aten.any.dim] = _reduction(lax.reduce_or)


@rule(aten.mean.dim)
def _mean(
    x: Array, axes: Sequence[int], keep: bool = False, *, out: torch.Tensor, **_: Any
) -> Array:
    count = math.prod(x.shape[a] for a in _axes(x, axes))
    total = lax.reshape(lax.reduce_sum(x, _axes(x, axes)), tuple(out.shape))
    return lax.mul(total, _operand(1.0 / count, x.dtype, out.shape))


@rule(aten._softmax.default)
def _softmax(x: Array, axis: int, half_to_float: bool = False, *, out: torch.Tensor) -> Array:
    axis %= x.ndim
    kept = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    highest = _broadcast(lax.reshape(lax.reduce_max(x, (axis,)), kept), x.shape)
    powers = lax.exp(lax.sub(x, highest))
    return lax.div(powers, _broadcast(lax.reshape(lax.reduce_sum(powers, (axis,)), kept), x.shape))


def _take(x: Array, indices: Array, axis: int) -> Array:
    """Slices of `x` along `axis`. Every index is in bounds: the runner maps -1 to a real slot."""
    rest = [n for i, n in enumerate(x.shape) if i != axis]
    offset_dims = tuple(i if i < axis else i + indices.ndim for i in range(len(rest)))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=offset_dims, collapsed_slice_dims=(axis,), start_index_map=(axis,)
    )
    sizes = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    starts = lax.expand_dims(indices, (indices.ndim,))
    # CLIP comes out as a bare gather; the other modes add compares and selects.
    return lax.gather(x, starts, numbers, sizes, mode=lax.GatherScatterMode.CLIP)


@rule(aten.embedding.default)
def _embedding(weight: Array, indices: Array, *_: Any, out: torch.Tensor) -> Array:
    return _take(weight, indices, 0)


@rule(aten.index_select.default)
def _index_select(x: Array, axis: int, indices: Array, *, out: torch.Tensor) -> Array:
    return _take(x, indices, axis)


@rule(aten.index.Tensor)
def _index(x: Array, indices: Sequence[Array | None], *, out: torch.Tensor) -> Array:
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise NotImplementedError("indexing by more than one tensor")
    axis, index = given[0]
    return _take(x, index, axis)


def put_slots(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """cache [blocks, block_size, ...], its first two axes one: rows at `slots`."""
    return cache.flatten(0, 1).index_put((slots,), rows).view_as(cache)


@rule(put_slots)
def _put_slots(cache: Array, slots: Array, rows: Array, *, out: torch.Tensor) -> Array:
    flat = lax.reshape(cache, (cache.shape[0] * cache.shape[1], *cache.shape[2:]))
    return lax.reshape(_put_rows(flat, slots, rows), cache.shape)


@rule(aten.index_put.default)
def _index_put(
    x: Array,
    indices: Sequence[Array],
    values: Array,
    accumulate: bool = False,
    *,
    out: torch.Tensor,
) -> Array:
    """Rows of `x` replaced. Padding rows share the scratch slot: any of them may win there."""
    if accumulate or len(indices) != 1:
        raise NotImplementedError("index_put that adds, or by more than one tensor")
    return _put_rows(x, indices[0], values)


def _put_rows(x: Array, index: Array, values: Array) -> Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    rows = _broadcast(values, (index.shape[0], *x.shape[1:]))
    return lax.scatter(
        x,
        lax.expand_dims(index, (1,)),
        rows,
        numbers,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
