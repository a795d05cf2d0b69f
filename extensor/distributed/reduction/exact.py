"""Sums of gradients as fixed-point integers: the same bits for any order and number of ranks.

docs/adr/0022-order-free-gradient-sums.md proves the bound.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from extensor.distributed.communicator import Work
from extensor.distributed.reduction.base import BLOCK, NONFINITE, Array, GradientReduction, Steps

__all__ = ["Exact"]


class Exact(GradientReduction):
    """Fixed-point sums: the same bits for any order, any buckets and any number of ranks.

    A block's unit is at most 2^-9 ulp of its largest gradient over all micro-batches and ranks.
    Each gradient is truncated to a multiple of the unit; the sum is exact; the mean is rounded
    once. NaN or infinity anywhere in a block makes the block NaN. A sum of zeros is +0.

    >>> import numpy as np
    >>> from extensor.distributed import run_ranks
    >>> from extensor.distributed.reduction import Exact
    >>> grads = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    >>> def program(ranks):
    ...     reduction, mean = Exact(128, ranks), np.empty(128, np.float32)
    ...     for grad in grads[ranks.rank :: ranks.size]:
    ...         reduction.add(grad)
    ...     reduction.all_reduce(mean, divisor=4).wait()
    ...     return mean.tobytes()
    >>> len({mean for ranks in (1, 2, 4) for mean in run_ranks(ranks, program)})
    1
    """

    most_micro_batches = 1 << 15  # sums of 48-bit integers in 63 bits, and of 16-bit ones in 31

    _single: Array = None
    _limbs: Array = None
    _anchors: Array = None

    def _value_bytes(self) -> tuple[float, float]:
        return 8.0 + 2.0 / BLOCK, 4.0

    def _anchors_of(self, grad: Array) -> Array:
        field = self.xp.maximum(self.backend.block_max(grad) >> np.uint32(23), 1)
        return self.xp.where(field == 255, NONFINITE, field >> np.uint32(4)).astype(np.uint8)

    def _add(self, grad: Array) -> None:
        """One micro-batch is kept as it is; with the second, limbs begin."""
        anchors = self._anchors_of(grad)
        if not self.count:
            self._single, self._anchors = grad, anchors
            return
        if self._single is not None:
            if self._limbs is None:
                self._limbs = self.xp.empty((3, self.size), np.int32)
            self._limbs[...] = 0
            self.backend.add_limbs(self._limbs, self._single, self._anchors, self._anchors)
            self._single = None
        after = self.xp.maximum(self._anchors, anchors)
        self.backend.add_limbs(self._limbs, grad, self._anchors, after)
        self._anchors = after

    def _total(self) -> Generator[Work, None, tuple[Array, Array]]:
        """This rank's sum under the anchors of all ranks, and these."""
        xp, single, before = self.xp, self._single, self._anchors
        self._single = self._anchors = None
        if before is None:
            after = xp.zeros(self.size // BLOCK, np.uint8)
            yield self.ranks.all_reduce(after, "max")
            return xp.zeros(self.size, np.int64), after
        after = before.copy()
        yield self.ranks.all_reduce(after, "max")
        if single is not None:
            return self.backend.fixed_point(single, after), after
        return self.backend.limb_total(self._limbs, before, after), after

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        total, anchors = yield from self._total()
        mine = total
        if self.ranks.size > 1:
            mine = self.xp.empty(self.shard_size, np.int64)
            yield self.ranks.reduce_scatter(total, mine)
        anchors = anchors.reshape(self.ranks.size, -1)[self.ranks.rank]
        out[...] = self.backend.fixed_point_mean(mine, anchors, divisor)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        if self.ranks.size == 1:
            yield from self._reduce_scatter(out, divisor, step)
            return
        mine = self.xp.empty(self.shard_size, np.float32)
        yield from self._reduce_scatter(mine, divisor, step)
        yield self.ranks.all_gather(mine, out)
