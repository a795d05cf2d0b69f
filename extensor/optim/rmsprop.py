"""RMSprop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from extensor.optim.optimizer import Array, Optimizer, Option, check_range

__all__ = ["RMSprop"]


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

    Raises:
        ValueError: for an option out of range.
    """

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
    ) -> None:
        super().__init__(
            params,
            states=states,
            lr=lr,
            decay=decay,
            eps=eps,
            momentum=momentum,
            weight_decay=weight_decay,
        )

    def _check_options(self, options: Mapping[str, Option]) -> None:
        super()._check_options(options)
        check_range("decay", options["decay"], 0.0, 1.0)
        check_range("eps", options["eps"], math.ulp(0.0))
        check_range("momentum", options["momentum"], 0.0, 1.0)

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """The average of squared gradients, and a momentum buffer if there is momentum."""
        return ("square", "momentum") if options["momentum"] else ("square",)

    def update(
        self,
        backend: Any,
        weight: Array,
        grad: Array,
        state: Mapping[str, Array],
        scratch: tuple[Array, Array],
        options: Mapping[str, Any],
        step: int,
    ) -> None:
        """Move one stretch, in place."""
        xp = backend.xp
        one, two = scratch
        square = state["square"]
        if options["weight_decay"]:
            xp.multiply(weight, options["weight_decay"], out=two)
            two += grad
            grad = two
        xp.multiply(grad, grad, out=one)
        one *= 1.0 - options["decay"]
        square *= options["decay"]
        square += one
        xp.sqrt(square, out=one)
        one += options["eps"]
        xp.divide(grad, one, out=one)
        if options["momentum"]:
            buffer = state["momentum"]
            buffer *= options["momentum"]
            buffer += one
            xp.multiply(buffer, options["lr"], out=one)
        else:
            one *= options["lr"]
        weight -= one
