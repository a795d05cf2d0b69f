"""Adam."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from extensor.backends.protocol import FiniteQuery
from extensor.optim.optimizer import Array, Optimizer, Option, check_betas, check_range

__all__ = ["Adam"]


class Adam(Optimizer):
    """Adam with bias correction (arXiv 1412.6980, algorithm 1); weight decay as an L2 gradient.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    w -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more.
        betas: decay of the two averages, each in [0, 1); in a group, ``beta1`` and ``beta2``.
        eps: added to the denominator, above 0.
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.
    """

    decoupled = False
    fused = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
    ) -> None:
        beta1, beta2 = check_betas(betas)
        super().__init__(
            params,
            states=states,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
        )

    def _check_options(self, options: Mapping[str, Option]) -> None:
        super()._check_options(options)
        check_range("beta1", options["beta1"], 0.0, 1.0)
        check_range("beta2", options["beta2"], 0.0, 1.0)
        check_range("eps", options["eps"], math.ulp(0.0))

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """The averages of the gradient and of its square."""
        return ("mean", "square")

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
        _, two = scratch
        factors = self._factors(options, step)
        if decay := factors["decay"]:
            backend.xp.multiply(weight, decay, out=two)
            two += grad
            grad = two
        backend.adam(weight, grad, state["mean"], state["square"], factors)

    def update_each(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """Move whole parameters, in place, in one call."""
        arrays = [(w, g, state["mean"], state["square"]) for w, g, state in parts]
        found: FiniteQuery = backend.adam_multi_tensor(arrays, factors, **how)
        return found

    def factors_each(
        self, steps: Sequence[int], options: Mapping[str, Any]
    ) -> list[Mapping[str, float]]:
        """What a backend's kernel multiplies by, for parameters in such steps."""
        factors = {step: self._factors(options, step) for step in set(steps)}
        return [factors[step] for step in steps]

    def _factors(self, options: Mapping[str, Any], step: int) -> dict[str, float]:
        """What a step multiplies by; ``decay`` is that of an L2 gradient.

        ``rate`` and ``keep`` are also given in parts, lr / correct and 1 - lr shrink: what a device
        computes that reads the learning rate by itself.
        """
        lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
        decay = options["weight_decay"]
        shrink, correct = (decay if self.decoupled else 0.0), 1.0 - beta1**step
        return {
            "step": step,
            "lr": lr,
            "shrink": shrink,
            "correct": correct,
            "keep": 1.0 - lr * shrink,
            "take1": 1.0 - beta1,
            "keep2": beta2,
            "take2": 1.0 - beta2,
            "widen": 1.0 / math.sqrt(1.0 - beta2**step),
            "eps": options["eps"],
            "rate": lr / correct,
            "decay": 0.0 if self.decoupled else decay,
        }
