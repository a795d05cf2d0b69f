"""Optimizer steps in place, on one parameter or on many in one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from extensor.backends.capture import UpdateGuard
from extensor.backends.protocol.core import Array
from extensor.random import Stream

__all__ = ["FiniteQuery", "OptimMethods"]

FiniteQuery = Callable[[], list[bool]]
"""Waits, and says of each array whether it is without NaN and infinity."""


class OptimMethods(Protocol):
    """Updates of parameters and of lists of arrays."""

    multi_tensor_states: Collection[str]
    """Kinds of optimizer state with which many parameters are best updated in one call."""

    def sgd(
        self,
        weight: Array,
        grad: Array,
        buffer: Array | None,
        lr: float,
        momentum: float,
        decay: float,
        nesterov: bool,
    ) -> None:
        """One step of gradient descent in place, on vectors; see `extensor.optim.SGD`."""
        ...

    def adam(
        self,
        weight: Array,
        grad: Array,
        mean: Array,
        square: Array,
        factors: Mapping[str, float],
    ) -> None:
        """One step of Adam in place, on vectors; see `extensor.optim.Adam`."""
        ...

    def lion(self, weight: Array, grad: Array, mean: Array, factors: Mapping[str, float]) -> None:
        """One step of Lion in place, on vectors; see `extensor.optim.Lion`."""
        ...

    def sgd_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array | None]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
        stop: Array | None = None,
    ) -> FiniteQuery:
        """`sgd` on each (weight, grad, buffer); all else as for `adam_multi_tensor`.

        Factors are lr, momentum, decay, nesterov and step.
        """
        ...

    def lion_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
        stop: Array | None = None,
    ) -> FiniteQuery:
        """`lion` on each (weight, grad, mean); all else as for `adam_multi_tensor`.

        Factors are lr, shrink, keep, momentum, take1, keep2, take2 and step.
        """
        ...

    def adam_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array, Array]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
        stop: Array | None = None,
    ) -> FiniteQuery:
        """`adam` on each (weight, grad, mean, square), with the factors of each.

        Arrays are float32 and C-contiguous; those of one part have one size, whatever their shapes.
        With `multi_tensor_states` weight and gradient may both be bfloat16 instead, or the weight
        in blocks under `extensor.optim.states.block_spec` beside a bfloat16 gradient, in rows of
        whole blocks, of one format in all parts: the update is in float32, and the weight is
        rounded stochastically; and a gradient may be `RowSums`, with rows of a multiple of 4 values
        in an array of less than 2^32.
        A factor ``decay`` times the weight is added to the gradient first; the gradient is not
        written. Mean and square may be stored in another way that `multi_tensor_states` names, the
        same in all parts: bfloat16 arrays, or blocks of flat arrays as `extensor.optim.states` has
        them. They are written in place, with random bits from a factor ``step`` and ``numbers``.

        Args:
            parts: the arrays of each parameter.
            factors: the numbers of each parameter's step.
            guard: while a step is captured, what the device decides about the update.
            check_finite: do nothing if a gradient holds NaN or infinity.
            cache: kept from call to call; a backend may store there what it derives from arrays
                that stay, together with these arrays.
            numbers: each part's tensor number, for its random bits.
            stop: with ``check_finite``, uint32 of shape () that calls share, raised by a gradient
                that is not finite: later calls do nothing either.

        Returns:
            With ``check_finite``, what says of each gradient whether it is finite. The device may
            be busy until it is called.
        """
        ...

    def stochastic_bfloat16(self, values: Array, stream: Stream) -> Array:
        """Flat floats -> bfloat16, rounded by adding 16 random bits before truncation.

        NaN and infinity stay. Word ``i // 2 % 4096`` of block ``i // 8192`` of the stream has value
        i's bits, those of even values in its lower half.
        """
        ...

    def scale_multi_tensor(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """Multiply each array in place by a number, or by an array of shape () on the device.

        The factor of a bfloat16 array is float32, and the product is rounded to nearest.
        """
        ...

    def square_sum_multi_tensor(self, arrays: Sequence[Array]) -> float | Array:
        """The sum of all squares in float64, in an order that depends on sizes alone.

        A number, or an array of shape () where the device computes it without waiting.
        """
        ...

    def all_finite(self, x: Array) -> bool:
        """Whether no value of a float array is NaN or infinite."""
        ...

    def all_finite_multi_tensor(self, arrays: Sequence[Array]) -> list[bool]:
        """`all_finite` of each array."""
        ...
