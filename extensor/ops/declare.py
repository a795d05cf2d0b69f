"""What declarations of operations share: elementwise rules, sample inputs and bad inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from extensor.autograd.primitive import BadInput, Declaration, Sample, primitive

__all__ = [
    "BAD_BROADCAST", "NO_TENSOR", "array_function", "binary_samples", "quiet", "unary_primitive",
    "unary_samples", "without_gradient",
]  # fmt: skip

Samples = Callable[["np.random.Generator"], Iterator[Sample]]

BAD_BROADCAST = (BadInput((np.zeros((2, 3)), np.zeros((2,))), ValueError, "that broadcast"),)
"""Refused by every operation that broadcasts."""

NO_TENSOR = (BadInput(("three",), TypeError, "expected an ExTensor"),)
"""Refused by every unary operation."""


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose infinities and NaNs are part of its definition: numpy need not warn."""

    def silenced(*args: Any, **params: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args, **params)

    return silenced


def array_function(name: str) -> Callable[..., Any]:
    """The forward that calls a function of the backend's array module by its name."""
    return lambda backend, *arrays: getattr(backend.xp, name)(*arrays)


def binary_samples(
    reference: Callable[..., Any] | None = None, low: float = -2.0, high: float = 2.0
) -> Samples:
    """Two arrays: of one shape, broadcasting both ways, and without axes."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for first, second in (((3, 4), (3, 4)), ((2, 1, 3), (4, 1)), ((), (3,))):
            a, b = rng.uniform(low, high, first), rng.uniform(low, high, second)
            yield Sample((a, b), expected=reference(a, b) if reference else None)

    return samples


def unary_samples(
    reference: Callable[..., Any] | None = None,
    low: float = -2.0,
    high: float = 2.0,
    apart_from: tuple[float, ...] = (),
) -> Samples:
    """One array, its values at least 0.05 from the points where the function is not smooth."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for shape in ((3, 4), (), (2, 0)):
            x = rng.uniform(low, high, shape)
            for point in apart_from:
                x = np.where(np.abs(x - point) < 0.05, point + 0.1, x)
            x = np.asarray(x)
            yield Sample((x,), expected=reference(x) if reference else None)

    return samples


def unary_primitive(
    function: str | Callable[[Any, Any], Any],
    vjp: Callable[[Any, Any, Any], Any],
    samples: Samples | tuple[float, float],
    *,
    fused: Literal[True] | Callable[[Any, Any, Any, Any], Any] | None = None,
    **declared: Any,
) -> Declaration:
    """Declare an elementwise function of one tensor.

    Args:
        function: the forward ``(backend, x)``, or the name of the array module's function, whose
            warnings are silenced.
        vjp: ``(g, out, x)`` -> the gradient of x.
        samples: see `Primitive`; for a named function the range of its sample inputs will do.
        fused: True if ``vjp`` is written in operators alone, which raw arrays have too; or the
            gradient of raw arrays, ``(xp, g, out, x)``.
        declared: further fields of `Primitive`; integers become float32 if not told.
    """
    if not callable(samples):
        assert isinstance(function, str)
        samples = unary_samples(getattr(np, function), *samples)
    if fused:

        def operators(xp: Any, g: Any, out: Any, x: Any) -> Any:
            return vjp(g, out, x)

        raw = operators if fused is True else fused
        declared["fused_vjp"] = lambda backend, g, out, inputs, needs: (
            raw(backend.xp, g, out, inputs[0]),
        )
    forward = quiet(array_function(function)) if isinstance(function, str) else function
    declared.setdefault("to_float", True)
    declared.setdefault("errors", NO_TENSOR)
    return primitive(forward=forward, vjps=(vjp,), samples=samples, **declared)


def without_gradient(name: str, why: str, samples: Samples, **declared: Any) -> Declaration:
    """Declare a function of the array module that has no gradient, for the reason ``why``."""
    return primitive(forward=array_function(name), no_vjp=why, samples=samples, **declared)
