"""Adagrad."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from extensor.optim.optimizer import Array, Optimizer, Option, check_range

__all__ = ["Adagrad"]


class Adagrad(Optimizer):
    """Adagrad (Duchi et al., JMLR 12 (2011)), diagonal form; weight decay as an L2 gradient.

    s += g^2;  w -= lr g / (sqrt(s) + eps).

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more.
        eps: added to the denominator, above 0.
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
    ) -> None:
        super().__init__(params, states=states, lr=lr, eps=eps, weight_decay=weight_decay)

    def _check_options(self, options: Mapping[str, Option]) -> None:
        super()._check_options(options)
        check_range("eps", options["eps"], math.ulp(0.0))

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """The sum of the squared gradients."""
        return ("square",)

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
        square += one
        xp.sqrt(square, out=one)
        one += options["eps"]
        xp.divide(grad, one, out=one)
        one *= options["lr"]
        weight -= one
