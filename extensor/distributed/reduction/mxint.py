"""Gradients sent as integers of 8 or 16 bits with one exponent for 32 values."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.distributed.communicator import Communicator
from extensor.distributed.reduction.base import BLOCK, Array, Steps
from extensor.distributed.reduction.float_sum import FloatSum
from extensor.random import Stream

__all__ = ["Mxint"]

FIRST_TENSOR = 3 << 22
"""Buckets' random streams are numbered from here; see `extensor.optim.states`."""


class Mxint(FloatSum):
    """Integers of 8 or 16 bits that share an exponent in blocks of 32, as in OCP's MXINT8.

    Every rank sends each part of the bucket to the part's owner, who adds integers: the result does
    not depend on algorithm, bucket or topology. The mean goes back in the same form. Micro-batches
    of one rank are added in float32 first.

    With error feedback (arXiv 1901.09847, algorithm 2) what rounding leaves over is added to the
    next step's gradient; without it rounding is stochastic. A gradient above 127/128 of 2^128
    counts as infinite. Below the least exponent, 2^-127, values round to multiples of 2^-133 (8
    bits) or 2^-141. Zeros lose their sign.

    Args:
        size: as for `GradientReduction`.
        ranks: the communicator.
        bits: 8 or 16.
        error_feedback: whether to keep what rounding leaves over.
        how: the other arguments of `GradientReduction`.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import Mxint
    >>> Mxint(32, LocalCommunicator(), bits=8).bits
    8
    """

    def __init__(
        self,
        size: int,
        ranks: Communicator,
        *,
        bits: int,
        error_feedback: bool = True,
        **how: Any,
    ) -> None:
        super().__init__(size, ranks, **how)
        self.bits, self._code = bits, np.dtype(f"int{bits}")
        if error_feedback:
            self._left["sent"] = self.xp.zeros(size, np.float32)
            self._left["mean"] = self.xp.zeros(self.shard_size, np.float32)

    def _value_bytes(self) -> tuple[float, float]:
        one = self.bits / 8 + 1 / BLOCK
        return one, one

    def _pack(self, x: Array, parts: int, left: str, step: int) -> Array:
        """Codes and exponents of each part, one after the other: uint8 of shape (parts, bytes)."""
        residual, stream = self._left.get(left), None
        if residual is None:
            stream = Stream(self.seed, step, FIRST_TENSOR + self.number, left == "mean")
        first = self.ranks.rank * (x.size // BLOCK)
        return self.backend.mxint_pack(x, self.bits, parts, stream, first, residual)

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        send = self._pack(self._take(), self.ranks.size, "sent", step)
        recv = self.xp.empty_like(send)
        yield self.ranks.all_to_all(send, recv)
        self.backend.mxint_unpack(recv, self.bits, divisor, True, out)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        mine = self.xp.empty(self.shard_size, np.float32)
        yield from self._reduce_scatter(mine, divisor, step)
        send = self._pack(mine, 1, "mean", step)
        recv = self.xp.empty((self.ranks.size, send.size), np.uint8)
        yield self.ranks.all_gather(send, recv)
        self.backend.mxint_unpack(recv, self.bits, 1.0, False, out)
