"""The rest of the Python Array API standard (2025.12): shapes, sums along an axis, bits.

Arguments, names and special values are the standard's. What other names of this package
already do has the standard's name here as well (``concat`` is `concatenate`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import FUNCTIONS, BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import DTypeLike
from extensor.ops.arguments import (
    BAD_BROADCAST,
    NO_TENSOR,
    Operand,
    axis_index,
    pair,
    tensors_only,
    unary_samples,
)
from extensor.ops.arithmetic import clone, multiply, power, subtract, where
from extensor.ops.indexing import gather
from extensor.ops.parts import conj
from extensor.ops.reduce import cumsum, in_dtype, sum
from extensor.ops.shape import broadcast_to, concatenate, permute, swapaxes

__all__ = [
    "bitwise_left_shift", "bitwise_right_shift", "broadcast_arrays", "broadcast_shapes", "concat",
    "copysign", "cumulative_prod", "cumulative_sum", "diff", "matrix_transpose", "moveaxis",
    "nextafter", "permute_dims", "positive", "pow", "signbit", "take_along_axis", "unstack",
    "vecdot",
]  # fmt: skip

concat = concatenate
permute_dims = permute
positive = clone
pow = power


def _shift(name: str) -> Any:
    return {
        "forward": lambda backend, a, b: getattr(backend.xp, name.removeprefix("bitwise_"))(a, b),
        "no_vjp": "works on bits",
        "broadcasts": True,
        "samples": lambda rng: [Sample((rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (4,))))],
        "errors": (
            BadInput((np.zeros(3), np.zeros(3)), TypeError, "wanted integers"),
            BadInput((np.ones(2, int), np.array([1, -1])), ValueError, "0 or more"),
        ),
    }


def _shifted(name: str, a: Any, b: Any) -> ExTensor:
    operands = pair(name, a, b)
    for operand in operands:
        if not operand.dtype.is_integer:
            raise TypeError(f"{name}: wanted integers, got {operand.dtype.name}")
    by = operands[1].data
    if by.size and int(by.min()) < 0:
        raise ValueError(f"{name}: wanted shifts of 0 or more, got {int(by.min())}")
    return apply(name, *operands)


@primitive(**_shift("bitwise_left_shift"))
def bitwise_left_shift(x1: Operand, x2: Operand, /) -> ExTensor:
    """The bits of x1 moved up by x2, zeros coming in; x2 >= 0.

    Raises:
        TypeError, ValueError: for operands that are no integers, or a negative shift.
    """
    return _shifted("bitwise_left_shift", x1, x2)


@primitive(**_shift("bitwise_right_shift"))
def bitwise_right_shift(x1: Operand, x2: Operand, /) -> ExTensor:
    """floor(x1 / 2**x2): the bits of x1 moved down, copies of the sign coming in; x2 >= 0.

    Raises:
        TypeError, ValueError: for operands that are no integers, or a negative shift.
    """
    return _shifted("bitwise_right_shift", x1, x2)


def _floats(name: str, *operands: ExTensor) -> tuple[ExTensor, ...]:
    for operand in operands:
        if not operand.dtype.is_float:
            raise TypeError(
                f"{name}: wanted floats, got {operand.dtype.name}; convert with x.astype('float32')"
            )
    return operands


_NO_FLOATS = BadInput((np.ones(3, int), np.ones(3, int)), TypeError, "wanted floats")


@primitive(
    forward=lambda backend, x: backend.xp.signbit(x),
    no_vjp="gives truth values",
    samples=unary_samples(np.signbit),
    errors=(*NO_TENSOR, BadInput((np.ones(3, int),), TypeError, "wanted floats")),
)
def signbit(x: ExTensor, /) -> ExTensor:
    """Whether the sign bit is set: true for -0.0 and for a NaN with a sign.

    Raises:
        TypeError: for a tensor that is not of floats.
    """
    tensors_only("signbit", x)
    return apply("signbit", *_floats("signbit", x))


def _signed_samples(rng: np.random.Generator) -> list[Sample]:
    a, b = rng.uniform(0.5, 2, (3, 4)), rng.uniform(0.5, 2, (4,))
    a[0], b[1] = -a[0], -b[1]
    return [Sample((a, b), expected=np.copysign(a, b))]


@primitive(
    forward=lambda backend, a, b: backend.xp.copysign(a, b),
    vjps=(
        lambda g, out, a, b: where(signbit(a) == signbit(out), g, -g),
        lambda g, out, a, b: ExTensor.zeros_like(g),
    ),
    broadcasts=True,
    samples=_signed_samples,
    errors=(*BAD_BROADCAST, _NO_FLOATS),
)
def copysign(x1: Operand, x2: Operand, /) -> ExTensor:
    """The magnitude of x1 with the sign of x2, zeros and NaN included.

    Raises:
        TypeError: for operands that are not floats.
    """
    return apply("copysign", *_floats("copysign", *pair("copysign", x1, x2)))


@primitive(
    forward=lambda backend, a, b: backend.xp.nextafter(a, b),
    no_vjp="a step from one number of the dtype to the next",
    broadcasts=True,
    moves=True,  # 16-bit floats have neighbours of their own
    samples=lambda rng: [Sample((rng.normal(size=(3, 4)), rng.normal(size=(4,))))],
    errors=(*BAD_BROADCAST, _NO_FLOATS),
)
def nextafter(x1: Operand, x2: Operand, /) -> ExTensor:
    """The number of x1's dtype next to x1 towards x2; x2 where they are equal.

    Raises:
        TypeError: for operands that are not floats.
    """
    return apply("nextafter", *_floats("nextafter", *pair("nextafter", x1, x2)))


def _running(
    name: str,
    function: Callable[[ExTensor, int], ExTensor],
    first: int,
    x: ExTensor,
    axis: int | None,
    dtype: DTypeLike | None,
    include_initial: bool,
) -> ExTensor:
    """``function`` along the axis in the dtype asked for; after ``first``, if so wished."""
    tensors_only(name, x)
    if axis is None and x.ndim != 1:
        raise ValueError(f"{name}: wanted an axis for a tensor of {x.ndim} axes, got None")
    at = axis_index(name, 0 if axis is None else axis, x.ndim)
    total = in_dtype(x, dtype, lambda t: function(t, at))
    if not include_initial:
        return total
    shape = (*x.shape[:at], 1, *x.shape[at + 1 :])
    return concatenate([ExTensor.full(shape, first, total.dtype, device=x.device), total], at)


_RUNNING: dict[str, Any] = {
    "samples": lambda rng: [
        Sample((rng.normal(size=(4,)),)),
        Sample((rng.normal(size=(3, 4)),), {"axis": 0, "include_initial": True}),
    ],
    "errors": (
        BadInput((np.zeros((2, 3)),), ValueError, "wanted an axis"),
        BadInput((np.zeros((2, 3)),), ValueError, "wanted -2..1", {"axis": 2}),
    ),
}


@composite(**_RUNNING)
def cumulative_sum(
    x: ExTensor,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> ExTensor:
    """Running sums along ``axis`` (the only one if None), after a 0 if ``include_initial``.

    Raises:
        ValueError: for no axis where there are several, or one out of range.
    """
    return _running("cumulative_sum", cumsum, 0, x, axis, dtype, include_initial)


def _cumprod_vjp(g: ExTensor, out: ExTensor, x: ExTensor, axis: int) -> ExTensor:
    """before[j] * (g[j] + x[j+1] * (g[j+1] + ...)): no division, so right where x is zero."""
    factors, parts = unstack(x, axis=axis), unstack(g, axis=axis)
    if not factors:
        return g
    before = [ExTensor.ones_like(factors[0])]
    for factor in factors[:-1]:
        before.append(before[-1] * factor)
    after = [parts[-1]]
    for part, factor in zip(parts[-2::-1], factors[:0:-1], strict=True):
        after.append(part + factor * after[-1])
    each = [b * a for b, a in zip(before, reversed(after), strict=True)]
    return FUNCTIONS["stack"](each, axis)


@primitive(
    forward=lambda backend, x, axis: backend.xp.cumprod(x, axis=axis),
    vjps=(_cumprod_vjp,),
    reads="inputs",
    samples=lambda rng: [Sample((np.array([[1.5, 0.0, -2.0], [0.5, 3.0, 1.0]]), 1))],
    errors=(BadInput((np.zeros((2, 3)), 2), ValueError, "wanted -2..1"),),
)
def _cumprod(x: ExTensor, axis: int) -> ExTensor:
    """Running products along ``axis``."""
    tensors_only("cumprod", x)
    return apply("cumprod", x, axis=axis_index("cumprod", axis, x.ndim))


@composite(**_RUNNING)
def cumulative_prod(
    x: ExTensor,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> ExTensor:
    """Running products along ``axis`` (the only one if None), after a 1 if ``include_initial``.

    Raises:
        ValueError: for no axis where there are several, or one out of range.
    """
    return _running("cumulative_prod", _cumprod, 1, x, axis, dtype, include_initial)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)),), {"n": 2}),
        Sample((rng.normal(size=(3, 4)),), {"axis": 0}),
    ],
    errors=(BadInput((np.zeros(3),), ValueError, "0 or more", {"n": -1}),),
)
def diff(
    x: ExTensor,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: ExTensor | None = None,
    append: ExTensor | None = None,
) -> ExTensor:
    """The n-th differences of neighbours along ``axis``, of prepend, x and append together.

    Raises:
        ValueError: for a negative n, a bad axis, or parts that do not fit together.
    """
    tensors_only("diff", x)
    at = axis_index("diff", axis, x.ndim)
    if n < 0:
        raise ValueError(f"diff: n: wanted 0 or more, got {n}")
    if n == 0:
        return x
    parts = [part for part in (prepend, x, append) if part is not None]
    whole = concatenate(parts, at) if len(parts) > 1 else x
    before = (slice(None),) * at
    for _ in range(n):
        whole = subtract(whole[(*before, slice(1, None))], whole[(*before, slice(None, -1))])
    return whole


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3, 4)),))],
    errors=(BadInput((np.zeros(3),), ValueError, "two axes or more"),),
)
def matrix_transpose(x: ExTensor, /) -> ExTensor:
    """Give x with its last two axes exchanged.

    Raises:
        ValueError: for fewer than two axes.
    """
    tensors_only("matrix_transpose", x)
    if x.ndim < 2:
        raise ValueError(f"matrix_transpose: wanted two axes or more, got shape {x.shape}")
    return swapaxes(x, -2, -1)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)), 0, -1)),
        Sample((rng.normal(size=(2, 3, 4)), (0, 1), (-1, 0))),
    ],
    errors=(BadInput((np.zeros((2, 3)), (0, 1), 0), ValueError, "as many"),),
)
def moveaxis(
    x: ExTensor, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> ExTensor:
    """Give x with axes ``source`` at places ``destination``, the others in order.

    Raises:
        ValueError: unless there are as many sources as destinations, each named once.
    """
    tensors_only("moveaxis", x)
    given = (source if isinstance(source, tuple) else (source,),
             destination if isinstance(destination, tuple) else (destination,))  # fmt: skip
    old, new = ([axis_index("moveaxis", a, x.ndim) for a in axes] for axes in given)
    if not len(old) == len(new) == len(set(old)) == len(set(new)):
        raise ValueError(
            f"moveaxis: wanted as many sources as destinations, each once, got {source} and "
            f"{destination}"
        )
    order = [a for a in range(x.ndim) if a not in old]
    for place, axis in sorted(zip(new, old, strict=True)):
        order.insert(place, axis)
    return permute(x, order)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3)),), {"axis": 1})],
    errors=(BadInput((np.zeros((2, 3)),), ValueError, "wanted -2..1", {"axis": 2}),),
)
def unstack(x: ExTensor, /, *, axis: int = 0) -> tuple[ExTensor, ...]:
    """The slices of x along ``axis``, which they no longer have.

    Raises:
        ValueError: for an axis out of range.
    """
    tensors_only("unstack", x)
    before = (slice(None),) * axis_index("unstack", axis, x.ndim)
    return tuple(x[(*before, i)] for i in range(x.shape[len(before)]))


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all of these broadcast to.

    Raises:
        ValueError: if there is none.
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"broadcast_shapes: wanted shapes that broadcast, got {', '.join(map(str, shapes))}"
        ) from None


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(3, 1)), rng.normal(size=(4,))))],
    errors=(BadInput((np.zeros(2), np.zeros(3)), ValueError, "shapes that broadcast"),),
)
def broadcast_arrays(*arrays: ExTensor) -> list[ExTensor]:
    """Read-only views of all, repeated to their common shape.

    Raises:
        ValueError: for shapes that do not broadcast.
    """
    tensors_only("broadcast_arrays", *arrays)
    shape = broadcast_shapes(*(x.shape for x in arrays))
    return [broadcast_to(x, shape) for x in arrays]


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.integers(0, 4, (1, 2)))),
        Sample((rng.normal(size=(3, 4)), rng.integers(0, 3, (2, 4))), {"axis": 0}),
    ],
    errors=(BadInput((np.zeros((2, 3)), np.zeros(2, int)), ValueError, "as many axes"),),
)
def take_along_axis(x: ExTensor, indices: ExTensor, /, *, axis: int = -1) -> ExTensor:
    """`gather`, x and ``indices`` broadcasting against each other off ``axis``.

    Raises:
        IndexError: for a position out of range.
        TypeError, ValueError: for indices of another dtype or number of axes, or a bad axis.
    """
    tensors_only("take_along_axis", x, indices)
    if x.ndim != indices.ndim:
        raise ValueError(
            f"take_along_axis: wanted indices of as many axes as {x.shape}, got {indices.shape}"
        )
    at = axis_index("take_along_axis", axis, x.ndim)

    def with_length(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return (*shape[:at], n, *shape[at + 1 :])

    common = broadcast_shapes(with_length(x.shape, 1), with_length(indices.shape, 1))
    wide = broadcast_to(x, with_length(common, x.shape[at]))
    return gather(wide, broadcast_to(indices, with_length(common, indices.shape[at])), at)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.normal(size=(4,)))),
        Sample((rng.normal(size=(3, 4)), rng.normal(size=(3, 1))), {"axis": -2}),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "equal lengths"),
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "negative", {"axis": 0}),
    ),
)
def vecdot(x1: ExTensor, x2: ExTensor, /, *, axis: int = -1) -> ExTensor:
    """Dot products of vectors along ``axis`` (counted from the last), the rest broadcasting.

    Those of complex numbers take the conjugate of x1.

    Raises:
        ValueError: for vectors of two lengths, or an axis that is not negative or out of range.
    """
    tensors_only("vecdot", x1, x2)
    if axis >= 0:
        raise ValueError(f"vecdot: axis: wanted a negative one, got {axis}")
    first, second = (axis_index("vecdot", axis, x.ndim) for x in (x1, x2))
    if x1.shape[first] != x2.shape[second]:
        raise ValueError(f"vecdot: wanted equal lengths along {axis}, got {x1.shape}, {x2.shape}")
    left = conj(x1) if x1.dtype.is_complex else x1
    products = multiply(left, x2)
    return sum(products, axis, dtype=products.dtype)
