"""Gradients sent as integers of 8 or 16 bits with one exponent for 32 values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.distributed.communicator import Communicator
from extensor.distributed.reduction.base import BLOCK, Array, Steps
from extensor.distributed.reduction.exchange import make_exchange
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

    Ranks whose GPUs reach each other's memory read the integers there: `path` says so, or what
    prevents it. The bits are the same.

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
        part = self.shard_size * bits // 8 + self.shard_size // BLOCK
        self._exchange = make_exchange(ranks, self.xp, part, self.number)
        self.path = self._exchange.path
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

    def _pack(self, step: int) -> Callable[[Array], None]:
        """What packs this rank's sum into rows."""
        how = self._how("sent", self.size // BLOCK, step)
        return lambda rows: self.backend.mxint_pack(self._take(), self.bits, *how, rows)

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        return self._exchange.run(self._mean_of_part(out, divisor, step), self._sum)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        mean = self._whole_mean if self._one_step else self._mean_of_means
        return self._exchange.run(mean(out, divisor, step), self._sum)

    def _mean_of_part(self, out: Array, divisor: float, step: int) -> Steps:
        received = yield from self._exchange.all_to_all(self._pack(step))
        self.backend.mxint_unpack(received, self.bits, divisor, True, out)

    def _mean_of_means(self, out: Array, divisor: float, step: int) -> Steps:
        """Each rank packs the mean of its part once more; all read all of them."""
        received = yield from self._exchange.all_to_all(self._pack(step))
        how = self._how("mean", self.shard_size // BLOCK, step)

        def pack(row: Array) -> None:
            self.backend.mxint_repack(received, self.bits, divisor, *how, row)

        rows = yield from self._exchange.all_gather(pack)
        self.backend.mxint_unpack(rows, self.bits, 1.0, False, out)

    def _whole_mean(self, out: Array, divisor: float, step: int) -> Steps:
        """Each of two ranks gets the other's integers and makes the whole mean, to the same bits.

        It sends as many bytes, in one exchange instead of two.
        """
        rows = yield from self._exchange.all_gather(self._pack(step), whole=True)
        stream = self._how("mean", 0, step)[0]
        self.backend.mxint_repack(rows, self.bits, divisor, stream, 0, None, out)
