"""Lion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from extensor.backends.protocol import FiniteQuery
from extensor.optim.optimizer import Optimizer
from extensor.optim.params import Array, Option, Segment, check_betas
from extensor.optim.rule import FRACTION

__all__ = ["Lion"]


class Lion(Optimizer):
    """Lion (arXiv 2302.06675, program 1): the sign of an interpolated momentum.

    w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w);  m = beta2 m + (1 - beta2) g.

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more; every weight moves by it, so a tenth of Adam's.
        betas: each in [0, 1); in a group, ``beta1`` and ``beta2``.
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.

    >>> w = et.nn.Parameter([1.0, -2.0])
    >>> optimizer = et.optim.Lion([w], lr=0.25)
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.tolist()
    [0.75, -1.75]
    """

    ranges = MappingProxyType({**Optimizer.ranges, "beta1": FRACTION, "beta2": FRACTION})
    multi_tensor = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
        masters: bool = True,
    ) -> None:
        beta1, beta2 = check_betas(betas)
        super().__init__(
            params,
            states=states,
            masters=masters,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
        )

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """See :meth:`extensor.optim.Optimizer.slots`: the average of the gradient."""
        return ("mean",)

    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """See :meth:`extensor.optim.Optimizer.update`."""
        backend.lion(part.weight, part.grad, part.state["mean"], self.factors(options, step))

    def update_multi_tensor(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """See :meth:`extensor.optim.Optimizer.update_multi_tensor`."""
        arrays = [(w, g, state["mean"]) for w, g, state in parts]
        found: FiniteQuery = backend.lion_multi_tensor(arrays, factors, **how)
        return found

    def factors(self, options: Mapping[str, Any], step: int) -> dict[str, float]:
        """See :meth:`extensor.optim.Optimizer.factors`.

        ``keep`` is 1 - lr shrink; a device that reads the learning rate by itself computes it.
        """
        lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
        return {
            "step": step,
            "lr": lr,
            "shrink": options["weight_decay"],
            "keep": 1.0 - lr * options["weight_decay"],
            "momentum": beta1,
            "take1": 1.0 - beta1,
            "keep2": beta2,
            "take2": 1.0 - beta2,
        }
