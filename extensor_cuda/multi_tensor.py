"""Optimizer steps, scaling and checks of many tensors in one launch, to the CPU's bits.

Functions as in `extensor_cuda.nn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from extensor.backends.unsupported import Unsupported
from extensor_cuda.dispatch import Call, unless
from extensor_cuda.kernels.optim import optimizer as kernels

__all__ = [
    "adam_multi_tensor",
    "all_finite_multi_tensor",
    "largest_multi_tensor",
    "lion_multi_tensor",
    "scale_multi_tensor",
    "sgd_multi_tensor",
    "square_sum_multi_tensor",
]

Array = Any
Parts = Sequence[Sequence[Any]]
Factors = Sequence[Mapping[str, float]]


def adam_multi_tensor(xp: Any, parts: Parts, factors: Factors, *how: Any, **more: Any) -> Call:
    """See the protocol. One launch, one more with ``check_finite``."""
    update = kernels.Update(*how, **more)
    return lambda: kernels.step(kernels.ADAM, parts, factors, update, xp)


def sgd_multi_tensor(xp: Any, parts: Parts, factors: Factors, *how: Any, **more: Any) -> Call:
    """See the protocol. One launch, one more with ``check_finite``."""
    update = kernels.Update(*how, **more)
    return lambda: kernels.step(kernels.SGD, parts, factors, update, xp)


def lion_multi_tensor(xp: Any, parts: Parts, factors: Factors, *how: Any, **more: Any) -> Call:
    """See the protocol. One launch, one more with ``check_finite``."""
    update = kernels.Update(*how, **more)
    return lambda: kernels.step(kernels.LION, parts, factors, update, xp)


def _gap(arrays: Sequence[Array]) -> Unsupported | None:
    if all(kernels.supports(a) for a in arrays):
        return None
    return Unsupported("no contiguous float32 or bfloat16 arrays")


def all_finite_multi_tensor(xp: Any, arrays: Sequence[Array]) -> Call:
    """See the protocol. One launch, and one wait for the GPU."""
    return unless(_gap(arrays), lambda: kernels.finite(arrays, xp))


def largest_multi_tensor(xp: Any, arrays: Sequence[Array]) -> Call:
    """See the protocol. One launch."""
    return unless(_gap(arrays), lambda: kernels.largest(arrays, xp))


def scale_multi_tensor(xp: Any, arrays: Sequence[Array], factor: float | Array) -> Call:
    """See the protocol. One launch."""
    return unless(_gap(arrays), lambda: kernels.scale(arrays, factor, xp))


def square_sum_multi_tensor(xp: Any, arrays: Sequence[Array]) -> Call:
    """See the protocol. Two launches."""
    return unless(_gap(arrays), lambda: kernels.square_sum(arrays, xp))
