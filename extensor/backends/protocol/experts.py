"""Mixtures of experts, run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from extensor.backends.protocol.core import Array
from extensor.quant.array import QuantArray

__all__ = ["ExpertMethods", "GatedExperts"]


class GatedExperts(NamedTuple):
    """Feed-forward networks down(gated_silu(gate(x), up(x))) with packed weights.

    Attributes:
        gates: matrices (N, K), blocked along K, one of each expert.
        ups: the same.
        downs: matrices (K, N), blocked along N.
        biases: vectors of the three kinds, one of each expert; None: there are none.
        alpha: of the sigmoid.
        limit: of gates and what they multiply, or None.
    """

    gates: Sequence[QuantArray]
    ups: Sequence[QuantArray]
    downs: Sequence[QuantArray]
    biases: tuple[Sequence[Array], Sequence[Array], Sequence[Array]] | None
    alpha: float
    limit: float | None

    @property
    def layers(self) -> tuple[Sequence[QuantArray], ...]:
        """The three kinds of matrices."""
        return self.gates, self.ups, self.downs


class ExpertMethods(Protocol):
    """Gated feed-forward networks, and those that tokens choose."""

    def weight_only_gated(
        self,
        x: Array,
        weights: Sequence[QuantArray],
        dtype: str,
        alpha: float,
        limit: float | None,
    ) -> Array:
        """`gated_silu` of the `weight_only_matmul` of x with two weights, rounded to a dtype."""
        ...

    def gated_experts(
        self, x: Array, weights: Array, chosen: Array, experts: GatedExperts
    ) -> Array:
        """The weighted sum of what the chosen experts give for each token, (T, K).

        Products, sums with biases and gates are rounded to x's dtype, and what an expert gives
        times its weight to the wider of x's dtype and that of weights. The sum is float32, the
        first choice's first, and rounded to that dtype once.

        Args:
            x: tokens (T, K), float32 or bfloat16.
            weights: of the choices (T, active), float32 or bfloat16.
            chosen: numbers of experts, int64 (T, active).
            experts: all of them; biases are of x's dtype.
        """
        ...
