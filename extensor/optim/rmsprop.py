"""Optimizers that divide by the root of squared gradients: Adagrad sums them, RMSprop averages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from extensor.optim.optimizer import Optimizer
from extensor.optim.params import Option, Segment
from extensor.optim.rule import FRACTION, POSITIVE, l2_gradient

__all__ = ["Adagrad", "RMSprop"]


class Adagrad(Optimizer):
    """Adagrad (Duchi et al., JMLR 12 (2011)), diagonal form; weight decay as an L2 gradient.

    s += g^2;  w -= lr g / (sqrt(s) + eps).

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more.
        eps: added to the denominator, above 0.
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.

    >>> w = et.nn.Parameter([1.0, -2.0])
    >>> optimizer = et.optim.Adagrad([w], lr=0.5)
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.numpy().round(4)
    array([ 0.5, -1.5], dtype=float32)
    """

    ranges = MappingProxyType({**Optimizer.ranges, "eps": POSITIVE})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
        masters: bool = True,
    ) -> None:
        super().__init__(
            params, states=states, masters=masters, lr=lr, eps=eps, weight_decay=weight_decay
        )

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """See :meth:`extensor.optim.Optimizer.slots`: the sum of the squared gradients."""
        return ("square",)

    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """See :meth:`extensor.optim.Optimizer.update`."""
        xp = backend.xp
        one, square = part.scratch[0], part.state["square"]
        grad = l2_gradient(xp, part, options["weight_decay"])
        xp.multiply(grad, grad, out=one)
        square += one
        xp.sqrt(square, out=one)
        one += options["eps"]
        xp.divide(grad, one, out=one)
        one *= options["lr"]
        weight = part.weight
        weight -= one


class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012), with momentum; weight decay as an L2 gradient.

    s = decay s + (1 - decay) g^2;  u = g / (sqrt(s) + eps);  w -= lr u, or with momentum
    b = momentum b + u;  w -= lr b.

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more.
        decay: of the average of squares, in [0, 1).
        eps: added to the denominator, above 0.
        momentum: in [0, 1).
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.

    >>> w = et.nn.Parameter([1.0, -2.0])
    >>> optimizer = et.optim.RMSprop([w], lr=0.01)
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.numpy().round(4)
    array([ 0.9, -1.9], dtype=float32)
    """

    ranges = MappingProxyType(
        {**Optimizer.ranges, "decay": FRACTION, "eps": POSITIVE, "momentum": FRACTION}
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        decay: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
        masters: bool = True,
    ) -> None:
        super().__init__(
            params,
            states=states,
            masters=masters,
            lr=lr,
            decay=decay,
            eps=eps,
            momentum=momentum,
            weight_decay=weight_decay,
        )

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """See :meth:`extensor.optim.Optimizer.slots`.

        The average of squared gradients, and a momentum buffer if there is momentum.
        """
        return ("square", "momentum") if options["momentum"] else ("square",)

    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """See :meth:`extensor.optim.Optimizer.update`."""
        xp = backend.xp
        one, square = part.scratch[0], part.state["square"]
        grad = l2_gradient(xp, part, options["weight_decay"])
        xp.multiply(grad, grad, out=one)
        one *= 1.0 - options["decay"]
        square *= options["decay"]
        square += one
        xp.sqrt(square, out=one)
        one += options["eps"]
        xp.divide(grad, one, out=one)
        if options["momentum"]:
            buffer = part.state["momentum"]
            buffer *= options["momentum"]
            buffer += one
            xp.multiply(buffer, options["lr"], out=one)
        else:
            one *= options["lr"]
        weight = part.weight
        weight -= one
