"""Arithmetic, elementwise with broadcasting; conversions of dtype and copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.mode import MODE
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import DType, DTypeLike, as_dtype, dtype_of
from extensor.ops.arguments import Operand, as_tensor, as_tensors, tensors_only
from extensor.ops.declare import BAD_BROADCAST, NO_TENSOR, binary_samples, quiet, unary_samples

__all__ = [
    "add", "astype", "clip", "clone", "divide", "floor_divide", "maximum", "minimum", "multiply",
    "negative", "power", "remainder", "subtract", "where",
]  # fmt: skip


@primitive(
    forward=lambda backend, a, b: backend.add(a, b),
    vjps=(lambda g, out, a, b: g, lambda g, out, a, b: g),
    fused_vjp=lambda backend, g, out, inputs, needs: (g, g),
    broadcasts=True,
    reads="nothing",
    samples=binary_samples(np.add),
    errors=BAD_BROADCAST,
)
def add(a: Operand, b: Operand) -> ExTensor:
    """The sum ``a + b``, elementwise.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape; blocked operands give float32.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.add(et.ExTensor([1.0, 2.0]), 0.5).tolist()
        [1.5, 2.5]
    """
    return apply("add", *as_tensors("add", a, b))


@primitive(
    forward=lambda backend, a, b: a - b,
    vjps=(lambda g, out, a, b: g, lambda g, out, a, b: -g),
    fused_vjp=lambda backend, g, out, inputs, needs: (g, -g if needs[1] else None),
    broadcasts=True,
    reads="nothing",
    samples=binary_samples(np.subtract),
    errors=BAD_BROADCAST,
)
def subtract(a: Operand, b: Operand) -> ExTensor:
    """The difference ``a - b``, elementwise.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape; blocked operands give float32.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.subtract(et.ExTensor([1.0, 2.0]), 0.5).tolist()
        [0.5, 1.5]
    """
    return apply("subtract", *as_tensors("subtract", a, b))


@primitive(
    forward=lambda backend, a, b: a * b,
    vjps=(lambda g, out, a, b: g * b, lambda g, out, a, b: g * a),
    fused_vjp=lambda backend, g, out, inputs, needs: (
        g * inputs[1] if needs[0] else None,
        g * inputs[0] if needs[1] else None,
    ),
    broadcasts=True,
    reads="inputs",
    samples=binary_samples(np.multiply),
    errors=BAD_BROADCAST,
)
def multiply(a: Operand, b: Operand) -> ExTensor:
    """The product ``a * b``, elementwise.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape; blocked operands give float32.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.multiply(et.ExTensor([[1.0], [2.0]]), et.ExTensor([3.0, 4.0])).tolist()
        [[3.0, 4.0], [6.0, 8.0]]
    """
    return apply("multiply", *as_tensors("multiply", a, b))


@primitive(
    forward=quiet(lambda backend, a, b: a / b),
    vjps=(lambda g, out, a, b: g / b, lambda g, out, a, b: -g * out / b),
    fused_vjp=lambda backend, g, out, inputs, needs: (
        g / inputs[1] if needs[0] else None,
        -g * out / inputs[1] if needs[1] else None,
    ),
    broadcasts=True,
    to_float=True,
    samples=binary_samples(np.divide, 0.5, 2.0),
    errors=BAD_BROADCAST,
)
def divide(a: Operand, b: Operand) -> ExTensor:
    """The quotient ``a / b``, elementwise; division by zero gives infinities and NaN.

    Args:
        a: the dividend.
        b: the divisor; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape; integers and blocked operands give float32.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.divide(et.ExTensor([1, 1, 0]), et.ExTensor([2, 0, 0])).tolist()
        [0.5, inf, nan]
    """
    return apply("divide", *as_tensors("divide", a, b))


@quiet
def _power(backend: Any, a: Any, b: Any) -> Any:
    return backend.xp.power(a, b)


def _power_exponent_vjp(g: ExTensor, out: ExTensor, a: ExTensor, b: ExTensor) -> ExTensor:
    # 0**b is 0 for every b > 0, so its derivative is 0, not 0 * log(0).
    safe = where(a > 0, a, 1.0)
    return g * out * safe.log()


def _power_base_vjp(g: ExTensor, out: ExTensor, a: ExTensor, b: ExTensor) -> ExTensor:
    # Where b is 0 the function is constant, and a**(b - 1) may be infinite.
    return g * where(b == 0, 0.0, b * power(a, where(b == 0, 1.0, b - 1)))


@primitive(
    forward=_power,
    vjps=(_power_base_vjp, _power_exponent_vjp),
    broadcasts=True,
    samples=binary_samples(np.power, 0.5, 2.0),
    errors=BAD_BROADCAST,
)
def power(a: Operand, b: Operand) -> ExTensor:
    """The power ``a ** b``, elementwise; NaN for a negative a and a b that is not whole (IEEE 754).

    Args:
        a: the base.
        b: the exponent; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape; blocked operands give float32.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.power(et.ExTensor([2.0, 9.0, -1.0]), et.ExTensor([3.0, 0.5, 0.5])).tolist()
        [8.0, 3.0, nan]
    """
    return apply("power", *as_tensors("power", a, b))


@primitive(
    forward=lambda backend, x: -x,
    vjps=(lambda g, out, x: -g,),
    fused_vjp=lambda backend, g, out, inputs, needs: (-g,),
    reads="nothing",
    samples=unary_samples(np.negative),
    errors=NO_TENSOR,
)
def negative(x: ExTensor) -> ExTensor:
    """The negated values, ``-x``.

    Args:
        x: any shape.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.negative(et.ExTensor([1.0, -2.0])).tolist()
        [-1.0, 2.0]
    """
    tensors_only("negative", x)
    return apply("negative", x)


_STEPS = "a step function: its derivative is zero wherever there is one"


@quiet
def _floor_divide(backend: Any, a: Any, b: Any) -> Any:
    xp = backend.xp
    whole = xp.floor_divide(a, b)
    if whole.dtype.kind in "iu":
        return whole
    # Beside an infinity the standard has the floor of the quotient with its sign, numpy NaN or -1.
    infinite = xp.isinf(a) | xp.isinf(b)
    return xp.where(infinite, a / b, whole).astype(whole.dtype, copy=False)


@primitive(
    forward=_floor_divide,
    no_vjp=_STEPS,
    broadcasts=True,
    samples=binary_samples(np.floor_divide, 0.5, 2.0),
    errors=BAD_BROADCAST,
)
def floor_divide(a: Operand, b: Operand) -> ExTensor:
    """The largest whole number not above ``a / b``; ``a / b`` itself if one operand is infinite.

    Args:
        a: the dividend.
        b: the divisor; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.floor_divide(et.ExTensor([7, -7]), 2).tolist()
        [3, -4]
    """
    return apply("floor_divide", *as_tensors("floor_divide", a, b))


@primitive(
    forward=quiet(lambda backend, a, b: backend.xp.remainder(a, b)),
    vjps=(lambda g, out, a, b: g, lambda g, out, a, b: -g * floor_divide(a, b)),
    broadcasts=True,
    reads="inputs",
    samples=lambda rng: [
        Sample((np.array([5.3, -5.3, 1.0]), np.array([2.0, 2.0, 3.0]))),
    ],
    errors=BAD_BROADCAST,
)
def remainder(a: Operand, b: Operand) -> ExTensor:
    """The remainder ``a - b * floor(a / b)``, with the sign of b, as Python's ``%``.

    Args:
        a: the dividend.
        b: the divisor; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.remainder(et.ExTensor([7, -7]), 3).tolist()
        [1, 2]
    """
    return apply("remainder", *as_tensors("remainder", a, b))


def _apart(rng: np.random.Generator) -> list[Sample]:
    a = rng.uniform(-2, 2, (3, 4))
    b = a + rng.choice([-1.0, 1.0], (3, 4)) * rng.uniform(0.1, 1, (3, 4))
    return [Sample((a, b)), Sample((a, np.array(10.0)))]


def _share_of_ties(picked: ExTensor, other: ExTensor, g: ExTensor, out: ExTensor) -> ExTensor:
    """All of g where ``picked`` won, half of it where the two are equal."""
    return g * ((picked == out).astype(g.dtype) / ((other == out).astype(g.dtype) + 1.0))


@primitive(
    forward=lambda backend, a, b: backend.xp.maximum(a, b),
    vjps=(
        lambda g, out, a, b: _share_of_ties(a, b, g, out),
        lambda g, out, a, b: _share_of_ties(b, a, g, out),
    ),
    broadcasts=True,
    samples=_apart,
    errors=BAD_BROADCAST,
)
def maximum(a: Operand, b: Operand) -> ExTensor:
    """The larger of a and b, elementwise; equal values share the gradient.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape; NaN where either is NaN.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.maximum(et.ExTensor([1.0, 5.0]), 3.0).tolist()
        [3.0, 5.0]
    """
    return apply("maximum", *as_tensors("maximum", a, b))


@primitive(
    forward=lambda backend, a, b: backend.xp.minimum(a, b),
    vjps=(
        lambda g, out, a, b: _share_of_ties(a, b, g, out),
        lambda g, out, a, b: _share_of_ties(b, a, g, out),
    ),
    broadcasts=True,
    samples=_apart,
    errors=BAD_BROADCAST,
)
def minimum(a: Operand, b: Operand) -> ExTensor:
    """The smaller of a and b, elementwise; equal values share the gradient.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape; NaN where either is NaN.

    Raises:
        ValueError: for shapes that do not broadcast.

    Example:
        >>> et.minimum(et.ExTensor([1.0, 5.0]), 3.0).tolist()
        [1.0, 3.0]
    """
    return apply("minimum", *as_tensors("minimum", a, b))


def _clip_samples(rng: np.random.Generator) -> list[Sample]:
    x = np.array([[-2.0, -0.5, 0.3], [0.9, 1.5, 3.0]])
    return [
        Sample((x, -1.0, 1.0), expected=np.clip(x, -1, 1)),
        Sample((x,), {"max": 0.5}, expected=np.minimum(x, 0.5)),
    ]


@composite(
    samples=_clip_samples,
    errors=(BadInput((np.zeros(3), 2.0, 1.0), ValueError, "min <= max"),),
)
def clip(x: ExTensor, min: Operand | None = None, max: Operand | None = None) -> ExTensor:
    """Limit values to the range from ``min`` to ``max``.

    The gradient passes strictly between the bounds. NaN stays NaN, and a bound that is NaN gives
    NaN. Without bounds the result is a copy.

    Args:
        x: any shape.
        min: the lower bound, broadcast to x; None for no bound.
        max: the upper bound, likewise.

    Returns:
        The dtype of x; that of the bounds where floats bound integers.

    Raises:
        ValueError: for numbers with ``min > max``.

    Example:
        >>> et.clip(et.ExTensor([-2.0, 0.5, 3.0]), 0.0, 1.0).tolist()
        [0.0, 0.5, 1.0]
    """
    tensors_only("clip", x)
    if min is None and max is None:
        return clone(x)
    if isinstance(min, (int, float)) and isinstance(max, (int, float)) and min > max:
        raise ValueError(f"clip: expected min <= max, got {min} and {max}")
    result = x
    if min is not None:
        bound = as_tensor("clip", min, x)
        result = where((result > bound) | (result != result), result, bound)
    if max is not None:
        bound = as_tensor("clip", max, x)
        result = where((result < bound) | (result != result), result, bound)
    # A bound of a wider dtype does not widen x.
    return result.astype(x.dtype) if result.dtype.kind == x.dtype.kind else result


@primitive(
    forward=lambda backend, condition, a, b: backend.xp.where(condition, a, b).astype(
        a.dtype, copy=False
    ),  # cupy widens bfloat16
    vjps=(
        None,
        lambda g, out, condition, a, b: apply("where", condition, *as_tensors("where", g, 0.0)),
        lambda g, out, condition, a, b: apply("where", condition, *as_tensors("where", 0.0, g)),
    ),
    broadcasts=True,
    reads="inputs",
    moves=True,
    samples=lambda rng: [
        Sample((rng.random((3, 4)) > 0.5, rng.normal(size=(3, 4)), rng.normal(size=(4,)))),
        Sample((rng.random((3, 1)) > 0.5, rng.normal(size=(3, 4)), rng.normal(size=()))),
    ],
    errors=(
        BadInput((np.zeros(3), np.zeros(3), np.zeros(3)), TypeError, "expected a bool condition"),
        BadInput((np.zeros(3, bool), np.zeros(3), np.zeros(2)), ValueError, "that broadcast"),
    ),
)
def where(condition: ExTensor, a: Operand, b: Operand) -> ExTensor:
    """Take the values of a where ``condition`` is true and those of b elsewhere.

    Args:
        condition: bool.
        a: the values where it is true.
        b: the values where it is false; all three shapes broadcast.

    Returns:
        The promoted dtype of a and b, and the broadcast shape.

    Raises:
        TypeError: if the condition is not a bool tensor.
        ValueError: for shapes that do not broadcast.

    Example:
        >>> x = et.ExTensor([1.0, -2.0])
        >>> et.where(x > 0, x, 0.0).tolist()
        [1.0, 0.0]
    """
    tensors_only("where", condition)
    if condition.dtype.kind != "bool":
        raise TypeError(
            f"where: expected a bool condition, got {condition.dtype.name}; use condition != 0"
        )
    if not isinstance(a, ExTensor) and not isinstance(b, ExTensor):
        a = as_tensor("where", a if isinstance(a, np.ndarray) else [a]).reshape(np.shape(a))
    return apply("where", condition, *as_tensors("where", a, b))


def _cast(backend: Any, x: Any, dtype: DType) -> Any:
    """X as ``dtype``: floats round (or become Inf), what an integer cannot hold is an error."""
    if dtype.is_integer and dtype_of(x).kind != "bool" and x.size:
        limits, xp = np.iinfo(dtype.numpy), backend.xp
        low, high = x.min(), x.max()  # NaN passes through both
        if dtype_of(x).is_float:
            low, high = xp.trunc(low.astype(np.float64)), xp.trunc(high.astype(np.float64))
        if not (limits.min <= low.item() and high.item() <= limits.max):
            raise ValueError(
                f"astype: expected values within {dtype.name}'s {limits.min}..{limits.max}, got "
                f"{x.min()}..{x.max()}, an overflow; clip them or take a wider dtype"
            )
    return x.astype(dtype.numpy) if dtype_of(x) is dtype else backend.cast(x, dtype.numpy)


@primitive(
    forward=quiet(_cast),
    vjps=(lambda g, out, x, dtype: g.astype(x.dtype),),
    reads="nothing",
    moves=True,
    samples=lambda rng: [Sample((rng.normal(size=(3, 4)), "float64"))],
    errors=(
        BadInput((np.zeros(3), "flaot32"), ValueError, "did you mean"),
        BadInput((np.array([1, np.nan]), "int32"), ValueError, "within int32's"),
        BadInput((np.array([np.inf]), "uint8"), ValueError, "within uint8's"),
        BadInput((np.array([2.0**63]), "int64"), ValueError, "within int64's"),
        BadInput((np.array([256, 0]), "uint8"), ValueError, "0..255, got 0..256, an overflow"),
    ),
)
def astype(
    x: ExTensor, dtype: DTypeLike, *, copy: bool = True, device: str | None = None
) -> ExTensor:
    """Convert x to another dtype, rounded to nearest even.

    Floats become integers by dropping the fraction. A blocked dtype quantizes.

    Args:
        x: any shape.
        dtype: dense or blocked.
        copy: copy even if x has the dtype already; the method ``x.astype`` gives x itself.
        device: of the result; x's own if None.

    Returns:
        The values of x in ``dtype``, differentiable between floats.

    Raises:
        ValueError: if an integer dtype cannot hold a value (NaN and Inf too).
        TypeError: for an element grid without a scale, and from complex numbers to real ones.

    Example:
        >>> et.astype(et.ExTensor([1.9, -1.9]), "int32").tolist()
        [1, -1]
    """
    tensors_only("astype", x)
    target = as_dtype(dtype)
    if device is not None and device != x.device:
        return astype(x.to(device), target, copy=False)
    if target is x.dtype:
        return clone(x) if copy else x
    if target.is_complex and x.requires_grad and MODE.enabled:
        raise TypeError(
            f"astype: {target.name} tensors have no gradients here, and x requires one; use "
            "x.detach()"
        )
    if x.dtype.is_complex and not target.is_complex and target.kind != "bool":
        raise TypeError(
            f"astype: {target.name} would lose the imaginary part; use et.real(x) or et.imag(x)"
        )
    if target.is_blocked or x.dtype.is_blocked:
        return x.astype(target)
    return apply("astype", x, dtype=target)


@primitive(
    forward=lambda backend, x: x.copy(),
    vjps=(lambda g, out, x: g,),
    reads="nothing",
    moves=True,
    samples=unary_samples(np.array),
    errors=NO_TENSOR,
)
def clone(x: ExTensor) -> ExTensor:
    """Copy x to memory of its own; the copy is part of the graph.

    Args:
        x: any shape and dtype; a blocked tensor's codes and scales are copied.

    Returns:
        The shape and dtype of x.

    Example:
        >>> x = et.ExTensor([1.0, 2.0])
        >>> y = et.clone(x)
        >>> y[0] = 5.0
        >>> x.tolist(), y.tolist()
        ([1.0, 2.0], [5.0, 2.0])
    """
    tensors_only("clone", x)
    return apply("clone", x)
