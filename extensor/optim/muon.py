"""Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from extensor.optim.optimizer import Optimizer
from extensor.optim.params import Array, Option, Segment
from extensor.optim.rule import FRACTION

__all__ = ["Muon", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrix: Array, xp: Any) -> Array:
    """The matrix with all its singular values brought near 1 (0.7 to 1.2).

    Five steps of the quintic Newton-Schulz iteration X <- a X + (b A + c A^2) X, A = X X^T, from
    X / |X|; coefficients by Keller Jordan, 2024 ("Muon: an optimizer for hidden layers").

    Args:
        matrix: a float array of two axes.
        xp: its array module.

    Returns:
        The same shape.

    >>> import numpy as np
    >>> from extensor.optim.muon import orthogonalize
    >>> matrix = np.random.default_rng(0).standard_normal((8, 4))
    >>> values = np.linalg.svd(orthogonalize(matrix, np), compute_uv=False)
    >>> bool((values > 0.6).all() and (values < 1.3).all())
    True
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
        masters: whether bfloat16 parameters have float32 copies; see `Optimizer`.

    Raises:
        ValueError: for an option out of range, or a tensor of fewer than two axes.

    Source: Keller Jordan, 2024, "Muon: an optimizer for hidden layers in neural networks".

    >>> layer = et.nn.Linear(8, 8, bias=False, rng=0)
    >>> optimizer = et.optim.Muon(layer.parameters(), lr=0.02)
    >>> layer(et.ones((4, 8))).square().sum().backward()
    >>> optimizer.step()
    """

    ranges = MappingProxyType({**Optimizer.ranges, "momentum": FRACTION})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
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
            momentum=momentum,
            weight_decay=weight_decay,
        )
        for group in self.groups:
            for member in group.members:
                if member.param.ndim < 2:
                    raise ValueError(
                        f"params: {member.name}: expected a tensor of two axes or more, got shape "
                        f"{member.param.shape}; give it to AdamW or SGD"
                    )

    def slots(self, options: Mapping[str, Option]) -> tuple[str, ...]:
        """See :meth:`extensor.optim.Optimizer.slots`: the momentum buffer."""
        return ("momentum",)

    def prepare(
        self, xp: Any, whole: Segment, options: Mapping[str, Any]
    ) -> tuple[Array, Mapping[str, Any]]:
        """See :meth:`extensor.optim.Optimizer.prepare`.

        The orthogonal update in place of the gradient.
        """
        buffer = whole.state["momentum"]
        buffer *= options["momentum"]
        buffer += whole.grad
        ahead = whole.grad + options["momentum"] * buffer
        rows = ahead.shape[0]
        matrix = orthogonalize(ahead.reshape(rows, -1), xp)
        scale = math.sqrt(max(1.0, rows / max(matrix.shape[1], 1)))
        return (matrix * scale).reshape(ahead.shape), options

    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """See :meth:`extensor.optim.Optimizer.update`."""
        weight, step_by = part.weight, part.scratch[0]
        weight *= 1.0 - options["lr"] * options["weight_decay"]
        backend.xp.multiply(part.grad, options["lr"], out=step_by)
        weight -= step_by
