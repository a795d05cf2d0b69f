"""LARS."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from extensor.optim.optimizer import Array, Option, check_range
from extensor.optim.sgd import SGD

__all__ = ["LARS"]


class LARS(SGD):
    """Momentum SGD whose step in each tensor is proportional to the tensor's norm.

    With g' = g + weight_decay w, the gradient is multiplied by
    ``trust |w| / (|g| + weight_decay |w|)``, or by 1 where either norm is 0 (arXiv 1708.03888,
    section 5); then momentum as in `SGD`.

    Args:
        params: see `Optimizer`; biases and norms are best left to a group with SGD.
        lr: learning rate, 0 or more.
        momentum: in [0, 1).
        weight_decay: 0 or more.
        trust: the share of a tensor's norm that a step may be, above 0.
        states: how the state is stored; see `Optimizer`.

    Raises:
        ValueError: for an option out of range.
    """

    fused = False  # `prepare` comes first

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        *,
        states: str = "float32",
    ) -> None:
        super(SGD, self).__init__(
            params,
            states=states,
            lr=lr,
            momentum=momentum,
            nesterov=False,
            weight_decay=weight_decay,
            trust=trust,
        )

    def _check_options(self, options: Mapping[str, Option]) -> None:
        super()._check_options(options)
        check_range("trust", options["trust"], math.ulp(0.0))

    def prepare(
        self,
        xp: Any,
        weight: Array,
        grad: Array,
        state: Mapping[str, Array],
        options: Mapping[str, Any],
    ) -> tuple[Array, Mapping[str, Any]]:
        """The gradient with its weight decay, scaled to the weight's norm."""
        decay = options["weight_decay"]
        size, slope = float(xp.linalg.norm(weight)), float(xp.linalg.norm(grad))
        ratio = options["trust"] * size / (slope + decay * size) if size and slope else 1.0
        scaled = (grad + decay * weight) * ratio
        return scaled, {**options, "weight_decay": 0.0}
