"""Products with a blocked right operand: the codes are multiplied as they are stored.

`matmul` and `linear` come here for blocked operands. The left operand is blocked, float32 or
bfloat16; float16 is widened to float32. The backend's `path` says which code multiplies, and where
that decodes. Only these are products of dequantized values:

- the left operand alone is blocked;
- the other operand is float64 or complex;
- tiles of several rows on the right, (..., K, N) of three axes or more blocked along K: the rows of
  a tile lie in several matrices. `linear` with each matrix multiplies what is stored.

A left operand of more than two axes is one matrix beside a matrix on the right. Only where tiles of
several rows do not divide the rows of its matrices is there a product for each matrix. Gradients
are products of dequantized values, straight-through.

`extensor.ops.prequantized` has the layer's product, which quantizes its activations by a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import Sample, blocked_rule, primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.generic.quantize import weight_activations
from extensor.backends.protocol import Array, Backend
from extensor.dtypes import float32, promote
from extensor.ops.joining import concatenate
from extensor.ops.matmul import as_rows
from extensor.ops.quantize import dequantize, quantize
from extensor.quant import views
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec

__all__ = ["grouped_weight_only_linear", "matrix_product", "weight_only_linear"]

_FLOAT32 = np.dtype(np.float32)


def _check_axis(op: str, side: str, tensor: ExTensor, axis: int) -> None:
    if tensor.dtype.is_blocked and tensor.spec.axis != axis:
        raise ValueError(
            f"{op}: {side} is blocked along axis {tensor.spec.axis}, expected the contraction axis "
            f"{axis}; quantize it with axis={axis}, or call .dequantize()"
        )


def _stays_packed(a: ExTensor, b: ExTensor) -> bool:
    """Whether a and b are multiplied as they are stored; see the module's docstring."""
    if not b.dtype.is_blocked or promote(a.dtype, b.dtype) is not float32:
        return False
    tile = b.spec.tile
    separate = (
        b.ndim == 2 or b.spec.axis == b.ndim - 1
    )  # else a tile's rows lie in several matrices
    return separate or not isinstance(tile, tuple) or tile[0] == 1


@blocked_rule("matmul")
def _matmul(a: ExTensor, b: ExTensor) -> ExTensor:
    _check_axis("matmul", "the left operand", a, a.ndim - 1)
    _check_axis("matmul", "the right operand", b, max(b.ndim - 2, 0))
    if _stays_packed(a, b):
        return _block_scaled_matmul(a, b)
    return apply("matmul", dequantize(a), dequantize(b))


@blocked_rule("linear")
def _linear(x: ExTensor, weight: ExTensor, *bias: ExTensor) -> ExTensor:
    _check_axis("linear", "the input", x, x.ndim - 1)
    _check_axis("linear", "the weight", weight, 1)
    if _stays_packed(x, weight):
        y = _block_scaled_matmul(x, weight)
    else:
        y = apply("linear", dequantize(x), dequantize(weight))
    return y + bias[0] if bias else y


def weight_only_linear(x: ExTensor, weight: ExTensor, bias: ExTensor | None) -> ExTensor:
    """`linear` of a layer that has checked its input, with fewer questions in the usual case.

    Args:
        x: (..., K).
        weight: (N, K), blocked.
        bias: (N,), or None.

    Returns:
        (..., N), float32.

    Raises:
        ValueError: for a weight that is blocked along the other axis.
    """
    if x.dtype is not float32 or weight.data.spec.axis != 1:
        return _linear(x, weight) if bias is None else _linear(x, weight, bias)
    y = apply("block_scaled_matmul", x, weight)
    return y if bias is None else y + bias


def _contracted_last(b: QuantArray) -> QuantArray:
    last = len(b.shape) - 1
    return b if b.spec.axis == last else views.transpose(b, (*range(last - 1), last, last - 1))


def _product(backend: Backend, a: Any, b: QuantArray) -> Array:
    if (
        b.spec.axis == 1
        and len(b.shape) == 2
        and not isinstance(a, QuantArray)
        and a.dtype is _FLOAT32
    ):
        rows = a if a.ndim == 2 else a.reshape((math.prod(a.shape[:-1]), a.shape[-1]))
        out = backend.weight_only_matmul(rows, b)
        return out if a.ndim == 2 else out.reshape((*a.shape[:-1], b.shape[0]))
    b = _contracted_last(b)
    if not isinstance(a, QuantArray):
        a = weight_activations(backend, a)
    rows = _as_matrix(a) if len(b.shape) == 2 else None
    if rows is not None:
        return matrix_product(backend, rows, b).reshape((*a.shape[:-1], b.shape[0]))
    return _batch_product(backend, a, b)


def _as_matrix(a: Any) -> Any:
    """(..., K) as (rows, K), not decoded; None where tiles of several rows forbid it."""
    if isinstance(a, QuantArray):
        return views.as_matrix(a)
    return a.reshape((math.prod(a.shape[:-1]), a.shape[-1]))


def matrix_product(backend: Backend, a: Any, b: QuantArray, dtype: str = "float32") -> Array:
    """The product of (M, K), blocked or values, and a blocked (N, K): (M, N)."""
    product = (
        backend.block_scaled_matmul if isinstance(a, QuantArray) else backend.weight_only_matmul
    )
    return product(a, b) if dtype == "float32" else product(a, b, dtype)


def _batch_product(backend: Backend, a: Any, b: QuantArray) -> Array:
    """The products of (..., M, K) and (..., N, K), leading axes broadcasting: (..., M, N)."""
    before, after = a.shape[:-2], b.shape[:-2]
    lead = np.broadcast_shapes(before, after)
    shape = (*lead, a.shape[-2], b.shape[-2])
    if isinstance(a, QuantArray) and before == after:
        return backend.block_scaled_matmul(_as_stack(a), _as_stack(b)).reshape(shape)
    out = backend.xp.empty((math.prod(lead), *shape[-2:]), dtype=np.float32)
    left, right = _matrices(a), views.unstack(b)
    for i, (j, k) in enumerate(zip(_places(before, lead), _places(after, lead), strict=True)):
        out[i] = matrix_product(backend, left[j], right[k])
    return out.reshape(shape)


def _as_stack(q: QuantArray) -> QuantArray:
    return views.reshape(q, (math.prod(q.shape[:-2]), *q.shape[-2:]))


def _matrices(a: Any) -> Sequence[Any]:
    if isinstance(a, QuantArray):
        return views.unstack(a)
    stack: Sequence[Any] = a.reshape((math.prod(a.shape[:-2]), *a.shape[-2:]))
    return stack


def _places(shape: tuple[int, ...], lead: tuple[int, ...]) -> list[int]:
    """For each place of ``lead``, in order, which entry of ``shape`` broadcasts to it."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    places: list[int] = np.broadcast_to(numbers, lead).ravel().tolist()
    return places


def _left_vjp(g: ExTensor, out: None, a: ExTensor, b: ExTensor) -> ExTensor:
    values = dequantize(b)
    return g @ (values if b.spec.axis == b.ndim - 1 else values.swapaxes(-1, -2))


def _right_vjp(g: ExTensor, out: None, a: ExTensor, b: ExTensor) -> ExTensor:
    a = dequantize(a)
    if b.ndim == 2:
        a, g = as_rows(a), as_rows(g)
    transposed = b.spec.axis == b.ndim - 1
    return g.swapaxes(-1, -2) @ a if transposed else a.swapaxes(-1, -2) @ g


def _product_samples(rng: np.random.Generator) -> Iterator[Sample]:
    a, b = (ExTensor(rng.standard_normal((n, 40)).astype(np.float32)) for n in (5, 3))
    yield Sample((quantize(a, QuantSpec("mxfp4")), quantize(b, QuantSpec("mxfp4"))))
    yield Sample((a, quantize(b, QuantSpec("nvfp4"))))
    stack = ExTensor(rng.standard_normal((2, 4, 40)).astype(np.float32))
    yield Sample((stack, quantize(b, QuantSpec("mxfp4"))))
    yield Sample((quantize(stack, QuantSpec("mxfp4")), quantize(stack, QuantSpec("mxfp8_e4m3"))))


def _replay(backend: Backend, arrays: tuple[Any, QuantArray], params: dict[str, Any]) -> Any:
    """The product of float32 rows and a packed matrix, chosen once."""
    a, b = arrays
    if isinstance(a, QuantArray) or a.dtype != np.float32 or len(b.shape) != 2 or a.ndim < 2:
        return None
    b = _contracted_last(b)
    rows, shape = (math.prod(a.shape[:-1]), a.shape[-1]), (*a.shape[:-1], b.shape[0])
    multiply = backend.bound_weight_only(a.reshape(rows), b)
    return lambda a, _: multiply(a.reshape(rows)).reshape(shape)


@primitive(
    forward=_product,
    replay=_replay,
    vjps=(_left_vjp, _right_vjp),
    broadcasts=True,
    reads="inputs",
    mixed=True,
    takes_blocked=True,
    samples=_product_samples,
)
def _block_scaled_matmul(a: ExTensor, b: ExTensor) -> ExTensor:
    """A product that decodes nothing beforehand: float32, whatever a's dtype.

    Args:
        a: (..., M, K), or (..., K) where b is a matrix; blocked along K, or dense.
        b: blocked, which is what says how it lies: (..., N, K) along its last axis, (..., K, N)
            along the one before.
    """
    return apply("block_scaled_matmul", a, b)


def _rows_of_groups(x: ExTensor, ends: Sequence[int]) -> list[ExTensor]:
    return [x[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def _grouped_vjp(
    index: int, g: ExTensor, out: None, x: ExTensor, *weights: ExTensor, ends: tuple[int, ...]
) -> ExTensor:
    """Straight-through; of x, one weight is decoded at a time."""
    groups = _rows_of_groups(g, ends)
    if index:
        return groups[index - 1].swapaxes(0, 1) @ _rows_of_groups(x, ends)[index - 1]
    return concatenate(
        [rows @ dequantize(weight) for rows, weight in zip(groups, weights, strict=True)]
    )


def _grouped_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = ExTensor(rng.standard_normal((5, 64)).astype(np.float32))
    weights = [rng.standard_normal((3, 64)).astype(np.float32) for _ in range(2)]
    yield Sample((x, [quantize(ExTensor(w), QuantSpec("mxfp4")) for w in weights], (1, 5)))


@primitive(
    forward=lambda backend, x, *weights, ends: backend.grouped_weight_only_matmul(x, weights, ends),
    vjp_at=_grouped_vjp,
    reads="inputs",
    mixed=True,
    takes_blocked=True,
    samples=_grouped_samples,
)
def _grouped_weight_only_matmul(
    x: ExTensor, weights: Sequence[ExTensor], ends: Sequence[int]
) -> ExTensor:
    """See `grouped_weight_only_linear`."""
    return grouped_weight_only_linear(x, weights, ends)


def grouped_weight_only_linear(
    x: ExTensor, weights: Sequence[ExTensor], ends: Sequence[int]
) -> ExTensor:
    """`linear` of each group of rows, by layers that have checked their input.

    Args:
        x: (M, K), the rows of each group together; float32 or bfloat16.
        weights: (N, K) each, blocked along K.
        ends: where each group's rows end, one or more to a group.

    Returns:
        (M, N), float32.
    """
    return apply("grouped_weight_only_matmul", x, *weights, ends=tuple(ends))
