"""Check derivatives against central differences, in float64 and a random direction.

For a function f, a random direction v and a random weighting u of f's outputs,
let s(h) = <u, f(x + h v)>. The gradient says s'(0) = <f's VJP of u, v>, and
D(h) = (s(h) - s(-h)) / 2h says the same up to an error with two parts:

- truncation: D(h) - s'(0) = h**2 s'''/6 + O(h**4), so D(2h) - D(h) is three times that;
- rounding: s is a sum of terms of total magnitude S = sum |u f|, each known to a few
  units of 2**-53, so D(h) is known to about 2**-53 S / h.

A check passes if |s'(0) - D(h)| <= |D(2h) - D(h)| + 64 * 2**-53 * S / h. A check whose bound is too
loose is an error: the function has a kink at the point or close to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from extensor.autograd.functional import grad
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import float64

__all__ = ["gradcheck", "gradgradcheck"]

_UNIT = 2.0**-53
_ROUNDINGS = 64  # units per term of s, for chains of some dozens of operations
_STEP = 2.0**-17  # about the cube root of the unit, where both parts of the error are small
_LEFT = (
    "The result does not depend on the inputs: x.numpy(), x.detach(), et.no_grad() and functions "
    "of other libraries leave the graph"
)
_LOOSE = 1e-5  # a bound above this share of the terms' magnitude checks nothing

Function = Callable[..., Any]


def gradcheck(
    f: Function, inputs: ExTensor | Sequence[ExTensor], *, seed: int = 0, directions: int = 2
) -> bool:
    """Compare ``f``'s gradient with central differences.

    Args:
        f: gives a float64 tensor, or several; deterministic.
        inputs: its arguments: those that are float64 are moved and differentiated.
        seed: of the random directions.
        directions: how many are tried.

    Returns:
        True.

    Raises:
        AssertionError: if the two differ by more than the error bound in the module's docstring,
            or the bound says nothing because f is not smooth at the inputs.
        TypeError: if no input is float64.

    >>> et.testing.gradcheck(lambda x: et.sin(x).sum(), et.ExTensor([0.5, 1.0], dtype="float64"))
    True
    """
    points = [inputs] if isinstance(inputs, ExTensor) else list(inputs)
    moved = [i for i, x in enumerate(points) if x.dtype is float64]
    if not moved:
        raise TypeError(
            f"gradcheck: expected float64 inputs, got {', '.join(x.dtype.name for x in points)}; "
            "central differences need x.astype('float64')"
        )
    rng = np.random.default_rng(seed)
    for _ in range(directions):
        _check_direction(f, points, moved, rng)
    return True


def gradgradcheck(
    f: Function, inputs: ExTensor | Sequence[ExTensor], *, seed: int = 0, directions: int = 2
) -> bool:
    """`gradcheck` of ``f``'s gradient: compares second derivatives with differences of first ones.

    Args:
        f: gives a float64 tensor, or several; deterministic and twice differentiable.
        inputs: its arguments, as for `gradcheck`.
        seed: of the random directions.
        directions: how many are tried.

    Returns:
        True.

    Raises:
        AssertionError, TypeError: as `gradcheck`.

    >>> et.testing.gradgradcheck(lambda x: (x * x * x).sum(), et.ExTensor([0.5], dtype="float64"))
    True
    """
    points = [inputs] if isinstance(inputs, ExTensor) else list(inputs)
    moved = [i for i, x in enumerate(points) if x.dtype is float64]
    rng = np.random.default_rng(seed + 1)
    fresh = [_leaf(x) if i in moved else x for i, x in enumerate(points)]
    weights = [ExTensor(rng.normal(size=y.shape)) for y in _outputs(f(*fresh))]

    def slope(*args: ExTensor) -> list[ExTensor]:
        values = [
            x if x.requires_grad or i not in moved else _leaf(x)
            for i, x in enumerate(args[: len(points)])
        ]
        total = _weighted(_outputs(f(*values)), list(args[len(points) :]))
        return list(grad(total, [values[i] for i in moved], create_graph=True))

    return gradcheck(slope, [*points, *weights], seed=seed, directions=directions)


def _outputs(result: Any) -> list[ExTensor]:
    """The float64 outputs of a function."""
    all_of_them = [result] if isinstance(result, ExTensor) else list(result)
    return [y for y in all_of_them if y.dtype is float64]


def _leaf(x: ExTensor) -> ExTensor:
    leaf = x.detach()
    leaf.requires_grad = True
    return leaf


def _weighted(outputs: list[ExTensor], weights: list[ExTensor]) -> ExTensor:
    parts = [(y * w).sum() for y, w in zip(outputs, weights, strict=True)]
    return sum(parts[1:], parts[0])


def _check_direction(
    f: Function, points: list[ExTensor], moved: list[int], rng: np.random.Generator
) -> None:
    leaves = [_leaf(x) if i in moved else x for i, x in enumerate(points)]
    outputs = _outputs(f(*leaves))
    if not outputs:
        raise TypeError(
            "gradcheck: expected a function that gives float64 tensors, got none; a quantized or "
            "float32 step in it rounds away the differences that the check measures. The gradient "
            "of quantization is the identity by definition (straight-through)"
        )
    weights = [ExTensor(rng.normal(size=y.shape)) for y in outputs]
    directions = {i: rng.normal(size=points[i].shape) for i in moved}
    total = _weighted(outputs, weights)
    if total.requires_grad:
        slopes = grad(total, [leaves[i] for i in moved])
    else:
        slopes = [ExTensor.zeros(points[i].shape, float64) for i in moved]
    analytic = float(
        sum((np.sum(g.numpy() * directions[i]) for g, i in zip(slopes, moved, strict=True)), 0.0)
    )

    def at(h: float) -> tuple[float, float]:
        shifted = [
            _leaf(ExTensor(x.numpy() + h * directions[i])) if i in directions else x
            for i, x in enumerate(points)
        ]
        terms = [y.numpy() * w.numpy() for y, w in zip(_outputs(f(*shifted)), weights, strict=True)]
        return (float(sum(t.sum() for t in terms)), float(sum(np.abs(t).sum() for t in terms)))

    (plus, scale), (minus, _) = at(_STEP), at(-_STEP)
    slope = (plus - minus) / (2 * _STEP)
    wide_slope = (at(2 * _STEP)[0] - at(-2 * _STEP)[0]) / (4 * _STEP)
    size = sum(float(np.abs(g.numpy() * directions[i]).sum()) for g, i in zip(
        slopes, moved, strict=True
    ))  # fmt: skip
    bound = abs(wide_slope - slope) + _ROUNDINGS * _UNIT * (scale + size) / _STEP
    if not abs(analytic - slope) <= bound:
        left = "" if total.requires_grad else f". {_LEFT}"
        raise AssertionError(
            f"gradcheck: the gradient says {analytic!r}, central differences {slope!r}; they "
            f"differ by {abs(analytic - slope):.3g}, the error bound is {bound:.3g}{left}"
        )
    if bound > _LOOSE * max(scale, size, 1.0):
        raise AssertionError(
            f"gradcheck: the error bound {bound:.3g} says nothing beside values of "
            f"{max(scale, size):.3g}; choose inputs away from kinks and poles"
        )
