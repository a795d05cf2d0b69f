"""Mixtures of experts on any array module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from extensor.backends.generic.core import BFLOAT16, FLOAT32
from extensor.backends.generic.matmul import GenericMatmul
from extensor.backends.generic.nn import GenericNn
from extensor.backends.protocol import Array, GatedExperts
from extensor.quant.array import QuantArray

__all__ = ["GenericExperts"]


class GenericExperts(GenericMatmul, GenericNn):
    """Gated feed-forward networks, and those that tokens choose."""

    def weight_only_gated(
        self,
        x: Array,
        weights: Sequence[QuantArray],
        dtype: str,
        alpha: float,
        limit: float | None,
    ) -> Array:
        """See the protocol."""
        gate, up = self.weight_only_matmuls(x, weights, dtype)
        return self.gated_silu(gate, up, alpha, limit)

    def gated_experts(
        self, x: Array, weights: Array, chosen: Array, experts: GatedExperts
    ) -> Array:
        """See the protocol: one expert after the other."""
        made = self.xp.zeros((*chosen.shape, experts.downs[0].shape[0]), dtype=FLOAT32)
        biases = experts.biases or ([None] * len(experts.gates),) * 3
        networks = zip(zip(*experts.layers, strict=True), zip(*biases, strict=True), strict=True)
        for number, (matrices, added) in enumerate(networks):
            token, choice = self.xp.nonzero(chosen == number)
            if len(token):
                y = self._gated_network(x[token], matrices, added, experts)
                made[token, choice] = y.astype(FLOAT32)
        dtype = BFLOAT16 if x.dtype == weights.dtype == BFLOAT16 else FLOAT32
        total = self.xp.zeros((len(x), made.shape[-1]), dtype=FLOAT32)
        for at in range(chosen.shape[1]):
            part = weights[:, at, None].astype(FLOAT32) * made[:, at]
            total += self._narrow(part, dtype.name).astype(FLOAT32)
        return self._narrow(total, dtype.name)

    def _gated_network(
        self, x: Array, matrices: Sequence[Any], biases: Sequence[Any], experts: GatedExperts
    ) -> Array:
        """What one expert makes of rows."""
        name = x.dtype.name

        def layer(rows: Array, at: int) -> Array:
            y = self.weight_only_matmul(rows, matrices[at], name)
            if biases[at] is None:
                return y
            return self._narrow(self._wide(y) + self._wide(biases[at]), name)

        sides = self._wide(layer(x, 0)), self._wide(layer(x, 1))
        hidden = self.gated_silu(*sides, experts.alpha, experts.limit)
        return layer(self._narrow(hidden, name), 2)
