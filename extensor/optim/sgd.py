"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from extensor.backends.protocol import FiniteQuery
from extensor.optim.optimizer import Array, Optimizer, Option, check_range

__all__ = ["SGD"]


class SGD(Optimizer):
    """Gradient descent with momentum, Nesterov's look-ahead and L2 weight decay.

    With g' = g + weight_decay w and the buffer b = momentum b + g', the weight moves by -lr d,
    where d = g' + momentum b under ``nesterov``, else d = b (Sutskever et al., ICML 2013, in the
    form that keeps lr out of the buffer).

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more.
        momentum: in [0, 1).
        nesterov: whether to look ahead; needs momentum.
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.

    Raises:
        ValueError: for an option out of range, or Nesterov without momentum.
    """

    fused = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
    ) -> None:
        super().__init__(
            params,
            states=states,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )

    def _check_options(self, options: Mapping[str, Option]) -> None:
        super()._check_options(options)
        check_range("momentum", options["momentum"], 0.0, 1.0)
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("nesterov: wanted momentum above 0 with it, got 0")

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """A momentum buffer, if there is momentum."""
        return ("momentum",) if options["momentum"] else ()

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
        buffer = state["momentum"] if options["momentum"] else None
        factors = (options["lr"], options["momentum"], options["weight_decay"])
        backend.sgd(weight, grad, buffer, *factors, options["nesterov"])

    def update_each(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """Move whole parameters, in place, in one call."""
        arrays = [
            (w, g, state["momentum"] if mine["momentum"] else None)
            for (w, g, state), mine in zip(parts, factors, strict=True)
        ]
        found: FiniteQuery = backend.sgd_multi_tensor(arrays, factors, **how)
        return found

    def factors_each(
        self, steps: Sequence[int], options: Mapping[str, Any]
    ) -> list[Mapping[str, float]]:
        """What a backend's kernel multiplies by, for parameters in such steps."""
        fixed = {
            "lr": options["lr"],
            "momentum": options["momentum"],
            "decay": options["weight_decay"],
            "nesterov": options["nesterov"],
        }
        factors = {step: fixed | {"step": step} for step in set(steps)}
        return [factors[step] for step in steps]
