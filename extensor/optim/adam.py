"""Adam, and AdamW with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from extensor.backends.protocol import FiniteQuery
from extensor.optim.optimizer import Optimizer
from extensor.optim.params import Array, Option, Segment, check_betas
from extensor.optim.rule import FRACTION, POSITIVE, l2_gradient

__all__ = ["Adam", "AdamW"]


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
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.

    >>> w = et.nn.Parameter([1.0, -2.0])
    >>> optimizer = et.optim.Adam([w], lr=0.1)
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.numpy().round(4)
    array([ 0.9, -1.9], dtype=float32)
    """

    ranges = MappingProxyType(
        {**Optimizer.ranges, "beta1": FRACTION, "beta2": FRACTION, "eps": POSITIVE}
    )
    decoupled = False  # whether weight decay acts on the weight itself
    multi_tensor = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
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
            eps=eps,
            weight_decay=weight_decay,
        )

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """See :meth:`extensor.optim.Optimizer.slots`.

        The averages of the gradient and of its square.
        """
        return ("mean", "square")

    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """See :meth:`extensor.optim.Optimizer.update`."""
        factors = self.factors(options, step)
        grad = l2_gradient(backend.xp, part, factors["decay"])
        backend.adam(part.weight, grad, part.state["mean"], part.state["square"], factors)

    def update_multi_tensor(
        self,
        backend: Any,
        parts: Sequence[tuple[Array, Array, Mapping[str, Array]]],
        factors: Sequence[Mapping[str, float]],
        **how: Any,
    ) -> FiniteQuery:
        """See :meth:`extensor.optim.Optimizer.update_multi_tensor`."""
        arrays = [(w, g, state["mean"], state["square"]) for w, g, state in parts]
        found: FiniteQuery = backend.adam_multi_tensor(arrays, factors, **how)
        return found

    def factors(self, options: Mapping[str, Any], step: int) -> dict[str, float]:
        """See :meth:`extensor.optim.Optimizer.factors`.

        The numbers that an update multiplies by; ``decay`` is that of an L2 gradient.

        ``rate`` is lr / correct and ``keep`` 1 - lr shrink. Their parts are given too, for a device
        that reads the learning rate by itself.
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


class AdamW(Adam):
    """Adam whose weight decay acts on the weight itself: ``w *= 1 - lr * weight_decay`` first.

    Args:
        params: see `Optimizer`.
        lr: learning rate, 0 or more.
        betas: decay of the two averages, each in [0, 1); in a group, ``beta1`` and ``beta2``.
        eps: added to the denominator, above 0.
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.

    Source: arXiv 1711.05101, algorithm 2, with the schedule folded into ``lr``.

    >>> layer = et.nn.Linear(64, 64, rng=0)
    >>> optimizer = et.optim.AdamW(layer.named_parameters(), lr=1e-3, states="mxfp8_e4m3")
    >>> layer(et.ones((8, 64))).mean().backward()
    >>> optimizer.step()
    >>> optimizer.nbytes
    8580
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        states: str = "float32",
        masters: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, states=states, masters=masters)
