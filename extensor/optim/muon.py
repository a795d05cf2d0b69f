"""Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from extensor.optim.optimizer import Array, Optimizer, Option, check_range

__all__ = ["Muon", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrix: Array, xp: Any) -> Array:
    """The matrix with all its singular values brought near 1 (0.7 to 1.2).

    Five steps of the quintic Newton-Schulz iteration X <- a X + (b A + c A^2) X, A = X X^T, from
    X / |X|; coefficients by Keller Jordan, 2024 ("Muon: an optimizer for hidden layers").
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (xp.linalg.norm(x) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


class Muon(Optimizer):
    """Momentum whose update of each weight matrix is made orthogonal, with decoupled decay.

    m = momentum m + g;  u = orthogonalize(g + momentum m) sqrt(max(1, rows / columns));
    w = (1 - lr weight_decay) w - lr u. Axes after the first are taken as one.

    Args:
        params: tensors of two axes or more: hidden weights. Biases, norms, embeddings and heads
            belong to another optimizer.
        lr: learning rate, 0 or more.
        momentum: in [0, 1).
        weight_decay: 0 or more.
        states: how the state is stored; see `Optimizer`.

    Raises:
        ValueError: for an option out of range, or a tensor of fewer than two axes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        states: str = "float32",
    ) -> None:
        super().__init__(params, states=states, lr=lr, momentum=momentum, weight_decay=weight_decay)
        for group in self.groups:
            for member in group.members:
                if member.param.ndim < 2:
                    raise ValueError(
                        f"params: {member.name}: wanted a tensor of two axes or more, got shape "
                        f"{member.param.shape}; give it to AdamW or SGD"
                    )

    def _check_options(self, options: Mapping[str, Option]) -> None:
        super()._check_options(options)
        check_range("momentum", options["momentum"], 0.0, 1.0)

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """The momentum buffer."""
        return ("momentum",)

    def prepare(
        self,
        xp: Any,
        weight: Array,
        grad: Array,
        state: Mapping[str, Array],
        options: Mapping[str, Any],
    ) -> tuple[Array, Mapping[str, Any]]:
        """The orthogonal update in place of the gradient."""
        buffer = state["momentum"]
        buffer *= options["momentum"]
        buffer += grad
        look = grad + options["momentum"] * buffer
        rows = weight.shape[0]
        matrix = orthogonalize(look.reshape(rows, -1), xp)
        scale = math.sqrt(max(1.0, rows / max(matrix.shape[1], 1)))
        return (matrix * scale).reshape(weight.shape), options

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
        one, _ = scratch
        weight *= 1.0 - options["lr"] * options["weight_decay"]
        backend.xp.multiply(grad, options["lr"], out=one)
        weight -= one
