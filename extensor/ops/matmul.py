"""Matrix products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import bfloat16
from extensor.ops.arguments import as_tensors, axis_index, tensors_only

__all__ = ["dot", "inner", "linear", "matmul", "outer", "tensordot"]


def _matmul(backend: Any, a: Any, b: Any) -> Any:
    return backend.matmul(a, b)


def _left_vjp(g: ExTensor, out: None, a: ExTensor, b: ExTensor) -> ExTensor:
    return apply("matmul", g, b.swapaxes(-1, -2))


def _right_vjp(g: ExTensor, out: None, a: ExTensor, b: ExTensor) -> ExTensor:
    if b.ndim == 2 and a.ndim > 2:
        a, g = as_rows(a), as_rows(g)
    return apply("matmul", a.swapaxes(-1, -2), g)


def _fused_vjp(backend: Any, g: Any, out: None, inputs: Any, needs: Any) -> Any:
    a, b = inputs
    left = backend.matmul(g, b.swapaxes(-1, -2)) if needs[0] else None
    if not needs[1]:
        return left, None
    if b.ndim == 2 and a.ndim > 2:
        a, g = as_rows(a), as_rows(g)
    return left, backend.matmul(a.swapaxes(-1, -2), g)


def _matmul_samples(rng: np.random.Generator) -> list[Sample]:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    shapes = [((2, 3), (3, 4)), ((2, 3, 4), (4, 2)), ((2, 1, 3, 4), (3, 4, 2))]
    shapes += [((4,), (4,)), ((3,), (3, 4)), ((2, 3, 4), (4,))]
    made = [(rng.normal(size=a), rng.normal(size=b)) for a, b in shapes]
    return [Sample(p, expected=np.matmul(*p)) for p in made]


@primitive(
    forward=_matmul,
    vjps=(_left_vjp, _right_vjp),
    fused_vjp=_fused_vjp,
    broadcasts=True,
    reads="inputs",
    samples=_matmul_samples,
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros((2, 3))), ValueError, "expected 3 rows on the right"),
        BadInput((np.zeros((2, 3)), 2.0), ValueError, "one axis or more"),
        BadInput((np.zeros((2, 2, 3)), np.zeros((3, 3, 2))), ValueError, "that broadcast"),
    ),
)
def matmul(a: ExTensor, b: ExTensor) -> ExTensor:
    """The matrix product of (..., M, K) and (..., K, N), leading axes broadcasting.

    A vector on the left is a row, on the right a column, and its axis is not in the result. Blocked
    operands must be blocked along K. A product with a blocked right operand multiplies what is
    stored; `extensor.ops.block_scaled` lists the products that dequantize first.

    Args:
        a: (..., M, K) or (K,).
        b: (..., K, N) or (K,).

    Returns:
        (..., M, N), of the promoted dtype; float32 of blocked operands.

    Raises:
        ValueError: if the K's differ, leading axes do not broadcast, an operand has no axes, or is
            blocked along another axis.

    Example:
        >>> a = et.ExTensor([[1.0, 2.0], [3.0, 4.0]])
        >>> et.matmul(a, et.ExTensor([1.0, 1.0])).tolist()
        [3.0, 7.0]
    """
    a, b = as_tensors("matmul", a, b)
    ka, kb = a.shape, b.shape
    if not ka or not kb:
        raise ValueError(
            f"matmul: expected tensors of one axis or more, got shapes {ka} and {kb}; use a * b"
        )
    if ka[-1] != kb[-2 if len(kb) > 1 else 0]:
        raise ValueError(
            f"matmul: expected {ka[-1]} rows on the right for shape {ka} on the left, got shape "
            f"{kb}"
        )
    if len(ka) > 1 and len(kb) > 1:
        return apply("matmul", a, b)
    left = a.reshape((1, ka[0])) if len(ka) == 1 else a
    right = b.reshape((kb[0], 1)) if len(kb) == 1 else b
    product = apply("matmul", left, right)
    shape = product.shape
    rows = shape[-2:-1] if len(ka) > 1 else ()
    columns = shape[-1:] if len(kb) > 1 else ()
    return product.reshape((*shape[:-2], *rows, *columns))


def _linear(backend: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    rows = backend.matmul(as_rows(x), weight.T, bias)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def as_rows(x: Any) -> Any:
    """(..., n) -> (rows, n), of an array or a tensor; -1 would not do where n is 0."""
    return x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


def _linear_fused(backend: Any, g: Any, out: None, inputs: Any, needs: Any) -> Any:
    x, weight = inputs[:2]
    rows = as_rows(g)
    grads = [None, None, None]
    if needs[0]:
        grads[0] = backend.matmul(rows, weight).reshape(x.shape)
    if needs[1]:
        grads[1] = backend.matmul(rows.T, as_rows(x))
    if len(needs) > 2 and needs[2]:
        wide = np.dtype(np.float32) if rows.dtype == bfloat16.numpy else rows.dtype
        grads[2] = backend.leading_sum(backend.cast(rows, wide), 1)
    return grads[: len(needs)]


def _linear_samples(rng: np.random.Generator) -> list[Sample]:
    weight, bias = rng.normal(size=(3, 4)), rng.normal(size=3)
    inputs = [rng.normal(size=(*lead, 4)) for lead in ((), (2,), (2, 5))]
    made = [Sample((x, weight, bias), expected=x @ weight.T + bias) for x in inputs]
    return [*made, Sample((inputs[1], weight), expected=inputs[1] @ weight.T)]


@primitive(
    forward=_linear,
    vjps=(
        lambda g, out, x, weight, bias=None: apply("matmul", as_rows(g), weight).reshape(x.shape),
        lambda g, out, x, weight, bias=None: apply("matmul", as_rows(g).swapaxes(0, 1), as_rows(x)),
        lambda g, out, x, weight, bias: as_rows(g).sum(axis=0),
    ),
    fused_vjp=_linear_fused,
    reads="inputs",
    slots=("layer",),
    samples=_linear_samples,
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros((3, 2))), ValueError, "inputs of 2"),
        BadInput((np.zeros((2, 3)), np.zeros(3)), ValueError, "weights (N, K)"),
        BadInput((np.zeros((2, 0)), np.zeros((2, 0))), ValueError, "weights (N, K)"),
        BadInput((np.zeros((2, 3)), np.zeros((4, 3)), np.zeros(3)), ValueError, "bias of shape"),
    ),
)
def linear(x: ExTensor, weight: ExTensor, bias: ExTensor | None = None) -> ExTensor:
    """The product of a linear layer, ``x weight^T + bias``.

    Blocked operands must be blocked along K, their last axis. Blocked weights are multiplied as
    they are stored, as by `matmul`.

    Args:
        x: (..., K).
        weight: (N, K), K and N of 1 or more.
        bias: (N,); None for none.

    Returns:
        (..., N), of the promoted dtype; float32 of blocked operands.

    Raises:
        TypeError, ValueError: for shapes that do not go together, or a K or N of 0.

    Example:
        >>> weight, bias = et.ExTensor([[1.0, 2.0], [0.0, 1.0]]), et.ExTensor([0.5, 0.0])
        >>> et.linear(et.ExTensor([3.0, 4.0]), weight, bias).tolist()
        [11.5, 4.0]
    """
    given = () if bias is None else (bias,)
    tensors_only("linear", x, weight, *given)
    shape = weight.shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"linear: expected weights (N, K), each 1 or more, got shape {shape}")
    if not x.shape or x.shape[-1] != shape[1]:
        raise ValueError(f"linear: expected inputs of {shape[1]} in the last axis, got {x.shape}")
    if given and given[0].shape != shape[:1]:
        raise ValueError(f"linear: expected a bias of shape {shape[:1]}, got {given[0].shape}")
    return apply("linear", x, weight, *given)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(3,)), rng.normal(size=(3,))))],
    errors=(BadInput((np.zeros(3), np.zeros(4)), ValueError, "expected 3 rows"),),
)
def dot(a: ExTensor, b: ExTensor) -> ExTensor:
    """The product of two vectors; of more axes whatever `matmul` makes of them.

    Args:
        a: (K,), or as `matmul` takes.
        b: (K,), likewise.

    Returns:
        A single value for two vectors.

    Raises:
        ValueError: as `matmul`.

    Example:
        >>> et.dot(et.ExTensor([1.0, 2.0]), et.ExTensor([3.0, 4.0])).item()
        11.0
    """
    return matmul(a, b)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(3,)), rng.normal(size=(2,))))],
    errors=(BadInput((np.zeros((3, 1)), np.zeros(4)), ValueError, "expected vectors"),),
)
def outer(a: ExTensor, b: ExTensor) -> ExTensor:
    """The products of all pairs of values of two vectors.

    Args:
        a: (M,).
        b: (N,).

    Returns:
        (M, N), of the promoted dtype.

    Raises:
        TypeError, ValueError: for a tensor that is no vector.

    Example:
        >>> et.outer(et.ExTensor([1, 2]), et.ExTensor([3, 4, 5])).tolist()
        [[3, 4, 5], [6, 8, 10]]
    """
    tensors_only("outer", a, b)
    if a.ndim != 1 or b.ndim != 1:
        raise ValueError(f"outer: expected vectors, got shapes {a.shape} and {b.shape}")
    return a.expand_dims(1) * b.expand_dims(0)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3)), rng.normal(size=(4, 3))))],
    errors=(BadInput((np.zeros((2, 3)), np.zeros((2, 4))), ValueError, "last axes"),),
)
def inner(a: ExTensor, b: ExTensor) -> ExTensor:
    """Products summed over the last axes of both operands.

    Args:
        a: (..., K).
        b: (..., K).

    Returns:
        The other axes of a, followed by those of b.

    Raises:
        TypeError, ValueError: for last axes of different lengths.

    Example:
        >>> et.inner(et.ExTensor([[1, 2], [3, 4]]), et.ExTensor([1, 10])).tolist()
        [21, 43]
    """
    tensors_only("inner", a, b)
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"inner: expected equal last axes, got shapes {a.shape} and {b.shape}")
    return tensordot(a, b, ([-1], [-1]))


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)), rng.normal(size=(3, 4, 2)))),
        Sample((rng.normal(size=(2, 3)), rng.normal(size=(3, 2)), ([0, 1], [1, 0]))),
        Sample((rng.normal(size=(2,)), rng.normal(size=(3,)), 0)),
    ],
    errors=(BadInput((np.zeros((2, 3)), np.zeros((2, 3)), 1), ValueError, "same lengths"),),
)
def tensordot(a: ExTensor, b: ExTensor, axes: Any = 2) -> ExTensor:
    """Products summed over pairs of axes.

    Args:
        a: any shape.
        b: any shape.
        axes: n for the last n axes of a and the first n of b, or ``(axes of a, axes of b)``.

    Returns:
        The other axes of a, followed by those of b.

    Raises:
        TypeError, ValueError: for bad axes, or pairs of different lengths.

    Example:
        >>> et.tensordot(et.ones((2, 3)), et.ones((3, 2)), axes=1).tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    tensors_only("tensordot", a, b)
    if isinstance(axes, int):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise ValueError(
                f"tensordot: axes: expected 0..{min(a.ndim, b.ndim)} for shapes {a.shape} and "
                f"{b.shape}, got {axes}"
            )
        first = list(range(a.ndim - axes, a.ndim))
        second = list(range(axes))
    else:
        first = [axis_index("tensordot", i, a.ndim) for i in axes[0]]
        second = [axis_index("tensordot", i, b.ndim) for i in axes[1]]
    summed = [a.shape[i] for i in first]
    if summed != [b.shape[i] for i in second]:
        raise ValueError(
            f"tensordot: expected pairs of axes of the same lengths, got axes {first} of {a.shape} "
            f"and {second} of {b.shape}"
        )
    rows = [i for i in range(a.ndim) if i not in first]
    columns = [i for i in range(b.ndim) if i not in second]
    inner_size = math.prod(summed)
    high, wide = [a.shape[i] for i in rows], [b.shape[i] for i in columns]
    left = a.permute((*rows, *first)).reshape((math.prod(high), inner_size))
    right = b.permute((*second, *columns)).reshape((inner_size, math.prod(wide)))
    return matmul(left, right).reshape((*high, *wide))
