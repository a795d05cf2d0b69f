"""Embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.creation import Seed
from extensor.autograd.recording import replayed
from extensor.autograd.tensor import ExTensor, wrap
from extensor.nn import init
from extensor.nn.checks import check_size
from extensor.nn.module import Module
from extensor.ops.arguments import tensors_only
from extensor.ops.indexing import take

__all__ = ["Embedding"]


class Embedding(Module):
    """A table of vectors, looked up by integers.

    Args:
        count: how many vectors, 1 or more.
        size: their length, 1 or more.
        std: standard deviation of the initial normal values.
        rng: draws them; see `init.as_rng`.

    Attributes:
        weight: float32 (count, size); or blocked along its last axis, then the vectors that are
            looked up are decoded.

    Raises:
        ValueError: for sizes below 1; when called, for a number outside 0..count - 1.
        TypeError: when called with anything but an integer tensor.

    >>> table = et.nn.Embedding(count=100, size=16, rng=0)
    >>> table(et.ExTensor([[1, 2, 3]])).shape
    (1, 3, 16)
    """

    role = "embedding"

    weight: ExTensor

    def __init__(self, count: int, size: int, std: float = 0.02, rng: Seed = None) -> None:
        self.count, self.size = check_size("count", count), check_size("size", size)
        shape = count, size

        def draw(rng: np.random.Generator) -> Any:
            return (rng.standard_normal(shape) * std).astype(np.float32)

        self.weight = init.parameter(shape, draw, rng)

    def forward(self, index: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: integers of any shape (...) -> (..., size)."""
        tensors_only("Embedding", index)
        if not index.dtype.is_integer:
            raise TypeError(f"Embedding: expected integers, got {index.dtype.name}")
        backend = index.backend

        def check(numbers: Any) -> None:
            def error() -> ValueError:
                return ValueError(
                    f"Embedding: expected numbers in 0..{self.count - 1}, got "
                    f"{int(numbers.min())}..{int(numbers.max())}; use numbers of the "
                    "vocabulary that the layer was made for, or a layer of more vectors"
                )

            backend.refuse((numbers < 0) | (numbers >= self.count), error)

        replayed("Embedding", check, index.data)
        if not self.weight.is_blocked or self.weight.is_blocked_parameter:
            return take(self.weight, index, axis=0)
        # The rows of a blocked matrix are no operation's result: a captured step takes them anew.
        return wrap(replayed("Embedding", self._decoded_rows, index.data), backend)

    def _decoded_rows(self, index: Any) -> Any:
        rows = take(self.weight, wrap(index, self.weight.backend), axis=0)
        return rows.dequantize().data

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"{self.count}, {self.size}"
