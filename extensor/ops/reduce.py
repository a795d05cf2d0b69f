"""Reductions: over an axis, several axes, or all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.pullback import sum_to as _sum_to
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import DTypeLike, as_dtype
from extensor.ops.arguments import Axis, axis_index, axis_tuple, broadcasts, tensors_only
from extensor.ops.declare import quiet
from extensor.ops.joining import stack

__all__ = [
    "all", "any", "argmax", "argmin", "cumsum", "logsumexp", "max", "mean", "min", "prod", "std",
    "sum", "var",
]  # fmt: skip


def _samples(
    reference: Callable[..., Any] | None = None, further: Sequence[dict[str, Any]] = ()
) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Samples over axes, and one for each of ``further`` keywords, ours and then numpy's."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for shape, axis, keepdims in (
            ((3, 4), None, False),
            ((2, 3, 4), 1, False),
            ((2, 3, 4), (0, -1), True),
        ):
            x = rng.normal(size=shape)
            kwargs: dict[str, Any] = {"axis": axis, "keepdims": keepdims}
            yield Sample((x,), kwargs, expected=reference(x, **kwargs) if reference else None)
        for kwargs in further:
            x = rng.normal(size=(3, 4))
            assert reference is not None
            theirs = {"ddof" if k == "correction" else k: v for k, v in kwargs.items()}
            yield Sample((x,), kwargs, expected=reference(x, **theirs))

    return samples


_ERRORS = (
    BadInput((np.zeros((2, 3)), 2), ValueError, "expected -2..1"),
    BadInput((np.zeros((2, 3)), (0, 0)), ValueError, "each axis once"),
    BadInput((np.zeros((2, 3)), "rows"), TypeError, "expected an int"),
)


def _expand(g: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    """Give the reduced axes of a tensor or an array back, with length 1."""
    if keepdims or not axis:
        return g
    shape = list(g.shape)
    for a in axis:
        shape.insert(a, 1)
    return g.reshape(tuple(shape))


def _reduced(name: str, x: ExTensor, axis: Axis, keepdims: bool) -> ExTensor:
    tensors_only(name, x)
    return apply(name, x, axis=axis_tuple(name, axis, len(x.shape)), keepdims=bool(keepdims))


def _count(shape: tuple[int, ...], axis: tuple[int, ...]) -> int:
    return math.prod(shape[a] for a in axis)


def _share(count: float) -> float:
    """1 / count; NaN for a count of 0 or less, as the Array API standard requires."""
    return 1.0 / count if count > 0 else math.nan


def in_dtype(
    x: ExTensor, dtype: DTypeLike | None, function: Callable[[ExTensor], ExTensor]
) -> ExTensor:
    """``function(x)`` computed in ``dtype``: floats are converted first, integers wrap around.

    Integers are totalled before they are narrowed: a total that fits ``dtype`` is right.
    """
    if dtype is None:
        return function(x)
    target = as_dtype(dtype)
    if not target.is_integer or x.dtype.is_inexact or x.dtype.is_blocked:
        return function(x.astype(target)).astype(target)
    return wrap(function(x).data.astype(target.numpy), x.backend)


@primitive(
    forward=lambda backend, x, axis, keepdims: x.sum(axis=axis, keepdims=keepdims),
    vjps=(lambda g, out, x, axis, keepdims: _expand(g, axis, keepdims).broadcast_to(x.shape),),
    fused_vjp=lambda backend, g, out, inputs, needs, axis, keepdims: (
        backend.xp.broadcast_to(_expand(g, axis, keepdims), inputs[0].shape),
    ),
    reads="nothing",
    samples=_samples(np.sum),
    errors=_ERRORS,
)
def sum(
    x: ExTensor, axis: Axis = None, keepdims: bool = False, *, dtype: DTypeLike | None = None
) -> ExTensor:
    """The sum over axes; integers and bool give int64 (or uint64).

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.
        dtype: the dtype to compute in; integers wrap around, as all integer arithmetic does.

    Returns:
        The shape of x without the reduced axes; 0 for no values.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> x = et.ExTensor([[1, 2], [3, 4]])
        >>> et.sum(x).item(), et.sum(x, axis=0).tolist()
        (10, [4, 6])
    """
    if dtype is not None:
        tensors_only("sum", x)
        return in_dtype(x, dtype, lambda t: sum(t, axis, keepdims))
    return _reduced("sum", x, axis, keepdims)


@primitive(
    forward=_sum_to,
    vjps=(lambda g, out, x, shape: g.broadcast_to(x.shape),),
    reads="nothing",
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)), (3, 1))),
        Sample((rng.normal(size=(2, 3)), (2, 3))),
    ],
    errors=(BadInput((np.zeros((2, 3)), (2,)), ValueError, "broadcasts to"),),
)
def sum_to(x: ExTensor, shape: tuple[int, ...]) -> ExTensor:
    """Give x summed over the axes along which ``shape`` broadcasts to its shape.

    Raises:
        ValueError: if ``shape`` does not broadcast to x's.
    """
    tensors_only("sum_to", x)
    if not broadcasts(shape, x.shape):
        raise ValueError(f"sum_to: expected a shape that broadcasts to {x.shape}, got {shape}")
    return apply("sum_to", x, shape=tuple(shape))


def _mean(backend: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    if _count(x.shape, axis) == 0:  # numpy warns
        return x.sum(axis=axis, keepdims=keepdims) * x.dtype.type(math.nan)
    return x.mean(axis=axis, keepdims=keepdims)


@primitive(
    forward=quiet(_mean),
    vjps=(
        lambda g, out, x, axis, keepdims: (
            _expand(g, axis, keepdims) * _share(_count(x.shape, axis))
        ).broadcast_to(x.shape),
    ),
    fused_vjp=lambda backend, g, out, inputs, needs, axis, keepdims: (
        backend.xp.broadcast_to(
            _expand(g, axis, keepdims) * _share(_count(inputs[0].shape, axis)),
            inputs[0].shape,
        ),
    ),
    reads="nothing",
    to_float=True,
    samples=_samples(np.mean),
    errors=_ERRORS,
)
def mean(x: ExTensor, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """The mean over axes; NaN for no values.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        The shape of x without the reduced axes; integers give float32.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> et.mean(et.ExTensor([[1, 2], [3, 5]]), axis=1).tolist()
        [1.5, 4.0]
    """
    return _reduced("mean", x, axis, keepdims)


def _prod_vjp(
    g: ExTensor, out: ExTensor, x: ExTensor, axis: tuple[int, ...], keepdims: bool
) -> ExTensor:
    """For each value the product of all others, before and after it, without division."""
    kept = [a for a in range(x.ndim) if a not in axis]
    order = (*kept, *axis)
    flat = x.permute(order).reshape((*(x.shape[a] for a in kept), _count(x.shape, axis)))
    if not x.size:
        return x * 0.0
    parts = [flat[..., i] for i in range(flat.shape[-1])]
    before, after = [parts[0] * 0.0 + 1.0], [parts[-1] * 0.0 + 1.0]
    for part in parts[:-1]:
        before.append(before[-1] * part)
    for part in parts[:0:-1]:
        after.append(after[-1] * part)
    others = stack([b * a for b, a in zip(before, reversed(after), strict=True)], axis=-1)
    others = others.reshape(tuple(x.shape[a] for a in order))
    inverse = tuple(int(i) for i in np.argsort(order))
    return _expand(g, axis, keepdims) * others.permute(inverse)


@primitive(
    forward=lambda backend, x, axis, keepdims: backend.xp.prod(x, axis=axis, keepdims=keepdims),
    vjps=(_prod_vjp,),
    reads="inputs",
    samples=_samples(np.prod),
    errors=_ERRORS,
)
def prod(
    x: ExTensor, axis: Axis = None, keepdims: bool = False, *, dtype: DTypeLike | None = None
) -> ExTensor:
    """The product over axes; its gradient holds where factors are zero.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.
        dtype: the dtype to compute in; integers wrap around, as all integer arithmetic does.

    Returns:
        The shape of x without the reduced axes; 1 for no values.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> et.prod(et.ExTensor([2.0, 3.0, 4.0])).item()
        24.0
    """
    if dtype is not None:
        tensors_only("prod", x)
        return in_dtype(x, dtype, lambda t: prod(t, axis, keepdims))
    return _reduced("prod", x, axis, keepdims)


def _extreme_vjp(
    g: ExTensor, out: ExTensor, x: ExTensor, axis: tuple[int, ...], keepdims: bool
) -> ExTensor:
    """Equal extremes share the gradient evenly."""
    reached = (x == _expand(out, axis, keepdims)).astype(g.dtype).detach()
    return _expand(g, axis, keepdims) * (reached / reached.sum(axis, keepdims=True))


_EMPTY = (BadInput((np.zeros((0, 3)), 0), ValueError, "no values"),)


def _extreme(name: str, x: ExTensor, axis: Axis, keepdims: bool) -> ExTensor:
    tensors_only(name, x)
    axes = axis_tuple(name, axis, x.ndim)
    if _count(x.shape, axes) == 0:
        raise ValueError(f"{name}: no values along axes {axes} of shape {x.shape}")
    return apply(name, x, axis=axes, keepdims=bool(keepdims))


@primitive(
    forward=lambda backend, x, axis, keepdims: x.max(axis=axis, keepdims=keepdims),
    vjps=(_extreme_vjp,),
    samples=_samples(np.max),
    errors=(*_ERRORS, *_EMPTY),
)
def max(x: ExTensor, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """The largest value over axes; equal ones share the gradient.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        The shape of x without the reduced axes; NaN where there is one.

    Raises:
        TypeError, ValueError: for a bad axis, or no values along it.

    Example:
        >>> et.max(et.ExTensor([[1.0, 5.0], [7.0, 2.0]]), axis=1).tolist()
        [5.0, 7.0]
    """
    return _extreme("max", x, axis, keepdims)


@primitive(
    forward=lambda backend, x, axis, keepdims: x.min(axis=axis, keepdims=keepdims),
    vjps=(_extreme_vjp,),
    samples=_samples(np.min),
    errors=(*_ERRORS, *_EMPTY),
)
def min(x: ExTensor, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """The smallest value over axes; equal ones share the gradient.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        The shape of x without the reduced axes; NaN where there is one.

    Raises:
        TypeError, ValueError: for a bad axis, or no values along it.

    Example:
        >>> et.min(et.ExTensor([[1.0, 5.0], [7.0, 2.0]]), axis=1).tolist()
        [1.0, 2.0]
    """
    return _extreme("min", x, axis, keepdims)


@composite(
    samples=_samples(np.var, [{"correction": 1}, {"axis": 1, "correction": 0.5}]), errors=_ERRORS
)
def var(x: ExTensor, axis: Axis = None, keepdims: bool = False, correction: float = 0) -> ExTensor:
    """The variance over axes, ``sum((x - mean) ** 2) / (n - correction)``, in two passes.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.
        correction: subtracted from the number of values; 1 gives the unbiased estimate.

    Returns:
        The shape of x without the reduced axes; NaN for no more values than ``correction``.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> x = et.ExTensor([1.0, 3.0])
        >>> et.var(x).item(), et.var(x, correction=1).item()
        (1.0, 2.0)
    """
    tensors_only("var", x)
    axes = axis_tuple("var", axis, x.ndim)
    deviation = x - mean(x, axes, keepdims=True)
    share = _share(_count(x.shape, axes) - correction)
    return sum(deviation * deviation, axes, keepdims) * share


@composite(samples=_samples(np.std, [{"correction": 1}]), errors=_ERRORS)
def std(x: ExTensor, axis: Axis = None, keepdims: bool = False, correction: float = 0) -> ExTensor:
    """The standard deviation over axes: the square root of `var`.

    The gradient is not defined where the variance is zero.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.
        correction: subtracted from the number of values; 1 for the unbiased variance.

    Returns:
        The shape of x without the reduced axes; NaN for no more values than ``correction``.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> et.std(et.ExTensor([1.0, 5.0])).item()
        2.0
    """
    return var(x, axis, keepdims, correction).sqrt()


def _arg_samples(rng: np.random.Generator) -> list[Sample]:
    x = rng.normal(size=(3, 4))
    return [Sample((x,)), Sample((x, 0)), Sample((x, -1), {"keepdims": True})]


_POSITIONS = "gives positions"
_ARG_ERRORS = (
    BadInput((np.zeros((2, 3)), 2), ValueError, "expected -2..1"),
    BadInput((np.zeros((0, 3)), 0), ValueError, "no values"),
)


def _position(name: str, x: ExTensor, axis: int | None, keepdims: bool) -> ExTensor:
    tensors_only(name, x)
    if axis is not None:
        axis = axis_index(name, axis, x.ndim)
    if (x.size if axis is None else x.shape[axis]) == 0:
        raise ValueError(f"{name}: no values in shape {x.shape} along axis {axis}")
    return apply(name, x, axis=axis, keepdims=bool(keepdims))


@primitive(
    forward=lambda backend, x, axis, keepdims: backend.xp.argmax(x, axis=axis, keepdims=keepdims),
    no_vjp=_POSITIONS,
    samples=_arg_samples,
    errors=_ARG_ERRORS,
)
def argmax(x: ExTensor, axis: int | None = None, keepdims: bool = False) -> ExTensor:
    """The position of the first largest value; NaN counts as largest.

    Args:
        x: any shape.
        axis: the axis to search; the position in ``x.ravel()`` if None.
        keepdims: keep the axis, with length 1.

    Returns:
        int64, the shape of x without the axis.

    Raises:
        TypeError, ValueError: for a bad axis, or no values.

    Example:
        >>> et.argmax(et.ExTensor([[1.0, 5.0], [7.0, 2.0]]), axis=1).tolist()
        [1, 0]
    """
    return _position("argmax", x, axis, keepdims)


@primitive(
    forward=lambda backend, x, axis, keepdims: backend.xp.argmin(x, axis=axis, keepdims=keepdims),
    no_vjp=_POSITIONS,
    samples=_arg_samples,
    errors=_ARG_ERRORS,
)
def argmin(x: ExTensor, axis: int | None = None, keepdims: bool = False) -> ExTensor:
    """The position of the first smallest value; NaN counts as smallest.

    Args:
        x: any shape.
        axis: the axis to search; the position in ``x.ravel()`` if None.
        keepdims: keep the axis, with length 1.

    Returns:
        int64, the shape of x without the axis.

    Raises:
        TypeError, ValueError: for a bad axis, or no values.

    Example:
        >>> et.argmin(et.ExTensor([[1.0, 5.0], [7.0, 2.0]])).item()
        0
    """
    return _position("argmin", x, axis, keepdims)


@primitive(
    forward=lambda backend, x, axis, keepdims: backend.xp.any(x, axis=axis, keepdims=keepdims),
    no_vjp="gives truth values",
    samples=_samples(np.any),
    errors=_ERRORS,
)
def any(x: ExTensor, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """Whether at least one value over axes is not zero; False for no values.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        bool, the shape of x without the reduced axes.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> et.any(et.ExTensor([[0, 0], [0, 1]]), axis=1).tolist()
        [False, True]
    """
    return _reduced("any", x, axis, keepdims)


@primitive(
    forward=lambda backend, x, axis, keepdims: backend.xp.all(x, axis=axis, keepdims=keepdims),
    no_vjp="gives truth values",
    samples=_samples(np.all),
    errors=_ERRORS,
)
def all(x: ExTensor, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """Whether all values over axes are not zero; True for no values.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        bool, the shape of x without the reduced axes.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> et.all(et.ExTensor([[1, 2], [0, 1]]), axis=1).tolist()
        [True, False]
    """
    return _reduced("all", x, axis, keepdims)


@quiet
def _logsumexp(backend: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    xp = backend.xp
    top = x.max(axis=axis, keepdims=True)
    shift = xp.where(xp.isfinite(top), top, 0)  # all -inf gives -inf, an inf gives inf
    out = xp.log(xp.exp(x - shift).sum(axis=axis, keepdims=True)) + shift
    return out if keepdims else out.squeeze(axis)


@primitive(
    forward=_logsumexp,
    vjps=(
        lambda g, out, x, axis, keepdims: (
            _expand(g, axis, keepdims) * (x - _expand(out, axis, keepdims)).exp()
        ),
    ),
    to_float=True,
    samples=_samples(lambda x, axis, keepdims: np.log(np.exp(x).sum(axis, keepdims=keepdims))),
    errors=(*_ERRORS, *_EMPTY),
)
def logsumexp(x: ExTensor, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """The logarithm of the sum of exponentials over axes, ``log(sum(exp(x)))``, without overflow.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        The shape of x without the reduced axes; integers give float32.

    Raises:
        TypeError, ValueError: for a bad axis, or no values along it.

    Example:
        >>> et.logsumexp(et.ExTensor([1000.0, 1000.0]))
        ExTensor(shape=(), dtype=float32, device=cpu,
          1000.6932)
    """
    return _extreme("logsumexp", x, axis, keepdims)


@primitive(
    forward=lambda backend, x, axis: backend.xp.cumsum(x, axis=axis),
    vjps=(lambda g, out, x, axis: g.flip(axis).cumsum(axis).flip(axis),),
    reads="nothing",
    samples=lambda rng: [Sample((rng.normal(size=(3, 4)), axis)) for axis in (0, -1)],
    errors=(BadInput((np.zeros((2, 3)), 2), ValueError, "expected -2..1"),),
)
def cumsum(x: ExTensor, axis: int) -> ExTensor:
    """Running sums along an axis.

    Args:
        x: one axis or more.
        axis: the axis to sum along.

    Returns:
        The shape of x; position i holds the sum of the values 0..i.

    Raises:
        TypeError, ValueError: for an axis that is no int or out of range.

    Example:
        >>> et.cumsum(et.ExTensor([1, 2, 3]), 0).tolist()
        [1, 3, 6]
    """
    tensors_only("cumsum", x)
    return apply("cumsum", x, axis=axis_index("cumsum", axis, x.ndim))
