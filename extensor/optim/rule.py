"""What an optimizer defines of its own: the state it keeps, and how a parameter moves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from extensor.backends.protocol import FiniteQuery
from extensor.optim.params import Array, Option, Segment, check_range

__all__ = ["FRACTION", "NOT_NEGATIVE", "POSITIVE", "Range", "UpdateRule", "l2_gradient"]

Range = tuple[float, float]
FRACTION: Range = (0.0, 1.0)
POSITIVE: Range = (math.ulp(0.0), math.inf)
NOT_NEGATIVE: Range = (0.0, math.inf)


class UpdateRule(ABC):
    """What a subclass of `extensor.optim.Optimizer` defines."""

    squares: ClassVar[tuple[str, ...]] = ("square",)
    """Slots whose values are 0 or more and whose roots divide."""

    ranges: ClassVar[Mapping[str, Range]] = MappingProxyType(
        {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE}
    )
    """Options that are numbers: the least value allowed, and the bound below which they stay."""

    multi_tensor: bool = False
    """True if a backend's kernel makes the whole `update`, and `update_multi_tensor` of many."""

    @abstractmethod
    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """Names of the arrays kept for each parameter under these options.

        Args:
            options: a group's options.

        Returns:
            The names, in the order of the arrays' random streams.

        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.1, momentum=0.9)
        >>> optimizer.slots(optimizer.groups[0].options)
        ('momentum',)
        """

    @abstractmethod
    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """Move one flat segment, in place.

        Args:
            backend: the backend of the arrays.
            part: the arrays, with two of scratch.
            options: the group's options.
            step: how many updates this parameter has had, this one included.

        >>> class SignSGD(et.optim.Optimizer):
        ...     def slots(self, options):
        ...         return ()
        ...     def update(self, backend, part, options, step):
        ...         part.weight[...] -= options["lr"] * backend.xp.sign(part.grad)
        >>> w = et.nn.Parameter([1.0, 2.0])
        >>> w.square().sum().backward()
        >>> SignSGD([w], lr=0.5).step()
        >>> w.tolist()
        [0.5, 1.5]
        """

    def factors(self, options: Mapping[str, Any], step: int) -> Mapping[str, float]:
        """The numbers that a backend's kernel multiplies by in a parameter's numbered update.

        Only optimizers with `multi_tensor` have them; their `update` uses the same ones.

        Args:
            options: a group's options.
            step: how many updates this parameter has had, this one included.

        Returns:
            The numbers by name, as the backend's kernel expects them.

        Raises:
            TypeError: in an optimizer with `multi_tensor` that does not define them.

        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.1)
        >>> optimizer.factors(optimizer.groups[0].options, step=1)["lr"]
        0.1
        """
        raise TypeError(f"{type(self).__name__} says multi_tensor: expected factors of its own")

    def update_multi_tensor(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """Update whole parameters, in place, in one call of the backend.

        Args:
            backend: the backend of the arrays.
            parts: weight, gradient and state by slot of each: C-contiguous arrays of one size,
                whatever their shapes, weight and gradient float32, or both bfloat16; the state as
                it is stored.
            factors: of each, from `factors`.
            how: more for the backend: what `Backend.adam_multi_tensor` takes besides.

        Returns:
            Whether the gradients were finite, known once the backend has checked them.

        Raises:
            TypeError: in an optimizer with `multi_tensor` that does not define it.

        >>> import numpy as np
        >>> from extensor.backends.registry import get
        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.5)
        >>> w, g = np.ones(2, np.float32), np.ones(2, np.float32)
        >>> factors = optimizer.factors(optimizer.groups[0].options, step=1)
        >>> query = optimizer.update_multi_tensor(get("cpu"), [(w, g, {})], [factors])
        >>> w.tolist()
        [0.5, 0.5]
        """
        raise TypeError(
            f"{type(self).__name__} says multi_tensor: expected its update_multi_tensor"
        )

    @property
    def is_elementwise(self) -> bool:
        """Whether the update of a value reads that value of the gradient alone, of no other."""
        return type(self).prepare is UpdateRule.prepare

    def prepare(
        self, xp: Any, whole: Segment, options: Mapping[str, Any]
    ) -> tuple[Array, Mapping[str, Any]]:
        """Compute what needs a whole tensor: the gradient and the options that `update` gets.

        Args:
            xp: the array module.
            whole: the arrays, of the parameter's shape. Of them only the state may be written to.
            options: the group's options.

        Returns:
            The gradient and the options, here as they were given.

        >>> import numpy as np
        >>> from extensor.optim.params import Segment
        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.1)
        >>> optimizer.prepare(np, Segment(np.ones(1), np.ones(1), {}), {"lr": 0.1})
        (array([1.]), {'lr': 0.1})
        """
        return whole.grad, options

    def _check_options(self, options: Mapping[str, Option]) -> None:
        """Refuse options out of range; subclasses add what `ranges` cannot say."""
        for name, (low, below) in self.ranges.items():
            if name in options:
                check_range(name, options[name], low, below)


def l2_gradient(xp: Any, part: Segment, decay: float) -> Array:
    """The segment's gradient plus ``decay`` times the weight, in its last scratch array."""
    if not decay:
        return part.grad
    out = part.scratch[-1]
    xp.multiply(part.weight, decay, out=out)
    out += part.grad
    return out
