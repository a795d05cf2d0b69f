"""Gradients sent as integers of 8 or 16 bits with one exponent for 32 values."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from extensor.distributed.communicator import Communicator, Work
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
    next step's gradient; without it rounding is stochastic, by 15 random bits a value (7 of 16-bit
    integers). A gradient above 127/128 of 2^128
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
        # Rounding the whole mean instead of half of it costs a GPU less than a second collective.
        self._one_step = ranks.size == 2 and not error_feedback and self.backend.name == "cuda"

    def _value_bytes(self) -> tuple[float, float]:
        one = self.bits / 8 + 1 / BLOCK
        return one, one

    def _how(self, left: str, blocks: int, step: int) -> tuple[Stream | None, int, Array | None]:
        """How a part is rounded: random bits, the number of its first block, what was left over."""
        residual, stream = self._left.get(left), None
        if residual is None:
            tensor, mean = FIRST_TENSOR + self.number, left == "mean"
            stream = Stream(self.seed, step, tensor, mean, clock=self.clock)
        return stream, self.ranks.rank * blocks, residual

    def _packed(self, parts: int, size: int) -> Array:
        """Room for the codes and exponents of parts with so many values."""
        return self.xp.empty((parts, size * self.bits // 8 + size // BLOCK), np.uint8)

    def _sent(self, step: int) -> Generator[Work, None, Array]:
        """All ranks' integers of this rank's part."""
        size = self.ranks.size
        send, recv = (self._packed(size, self.shard_size) for _ in range(2))
        how = self._how("sent", self.size // BLOCK, step)
        self.backend.mxint_pack(self._take(), self.bits, *how, send)
        yield self.ranks.all_to_all(send, recv)
        return recv

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        recv = yield from self._sent(step)
        self.backend.mxint_unpack(recv, self.bits, divisor, True, out)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        if self._one_step:
            yield from self._exchange(out, divisor, step)
            return
        received = yield from self._sent(step)
        rows = self._packed(self.ranks.size, self.shard_size)
        mine = rows[self.ranks.rank : self.ranks.rank + 1]
        how = self._how("mean", self.shard_size // BLOCK, step)
        self.backend.mxint_repack(received, self.bits, divisor, *how, mine)
        yield self.ranks.all_gather(mine, rows)
        self.backend.mxint_unpack(rows, self.bits, 1.0, False, out)

    def _exchange(self, out: Array, divisor: float, step: int) -> Steps:
        """Each of two ranks gets the other's integers and makes the whole mean, to the same bits.

        It sends as many bytes, in one collective instead of two.
        """
        rows, rank = self._packed(2, self.size), self.ranks.rank
        mine = rows[rank : rank + 1]
        how = self._how("sent", self.size // BLOCK, step)
        self.backend.mxint_pack(self._take(), self.bits, *how, mine)
        yield self.ranks.all_gather(mine, rows)
        stream = self._how("mean", 0, step)[0]
        self.backend.mxint_repack(rows, self.bits, divisor, stream, 0, None, out)
