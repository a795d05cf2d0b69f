"""AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from extensor.optim.adam import Adam

__all__ = ["AdamW"]


class AdamW(Adam):
    """Adam whose weight decay acts on the weight itself: ``w *= 1 - lr * weight_decay`` first.

    Source: arXiv 1711.05101, algorithm 2, with the schedule folded into ``lr``. Arguments and
    errors as for `Adam`.
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
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, states=states)
