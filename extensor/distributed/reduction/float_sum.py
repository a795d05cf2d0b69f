"""Sums of gradients in float32, sent as float32 or as bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.distributed.communicator import Communicator
from extensor.distributed.reduction.base import Array, GradientReduction, Steps
from extensor.distributed.shared_memory import SharedRows

__all__ = ["Bfloat16", "Float32", "FloatSum"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_RELEASED = Unsupported("whole gradients give back their memory")


class FloatSum(GradientReduction):
    """Micro-batches of one rank are added in float32, in order."""

    _sum: Array = None
    _owned = False

    def _add(self, grad: Array) -> None:
        if not self.count:
            self._sum, self._owned = grad, False
            return
        with _no_warnings():
            if self._owned:
                self._sum += grad
            else:
                self._sum, self._owned = self._sum + grad, True

    def _take(self) -> Array:
        """The sum of this rank, zeros of no micro-batch; the next one begins anew."""
        total, self._sum = self._sum, None
        return self.xp.zeros(self.size, np.float32) if total is None else total


class Float32(FloatSum):
    """Float32 sums, as the communicator makes them: the order is its own.

    Processes of one machine put them into memory that all read. There each rank adds its part of
    all sums, in the order of ranks, and reads the others' parts.

    Args:
        size: values in the bucket.
        ranks: the communicator.
        how: the other arguments of `GradientReduction`.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import Float32
    >>> Float32(64, LocalCommunicator()).shard_size
    64
    """

    def __init__(self, size: int, ranks: Communicator, **how: Any) -> None:
        super().__init__(size, ranks, **how)
        self._shared: SharedRows | None = None
        if self.xp is np and ranks.size > 1:
            # A sum, and the part that this rank adds. Nobody reads the sum after the second
            # meeting, nor the part after the first one of the next sum.
            nbytes = 4 * (size + self.shard_size)
            shared = ranks.shared_rows(nbytes) if self.lasting else _RELEASED
            if isinstance(shared, Unsupported):
                self.path = f"collectives: {shared.reason}"
            else:
                self.path, self._shared = "shared memory", shared
                rows = [row.view(np.float32) for row in shared.rows]
                part = slice(ranks.rank * self.shard_size, (ranks.rank + 1) * self.shard_size)
                self._row, self._mine = rows[ranks.rank][:size], rows[ranks.rank][size:]
                self._addends = [row[part] for row in rows]
                self._parts = [row[size:] for row in rows]

    def buffer(self) -> Array:
        """See :meth:`extensor.distributed.GradientReduction.buffer`."""
        return super().buffer() if self._shared is None else self._row

    def _value_bytes(self) -> tuple[float, float]:
        return 4.0, 4.0

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        if self._shared is None:
            yield self.ranks.reduce_scatter(self._take(), out)
        else:
            yield from self._add_part(self._shared, out)
        _divide(out, divisor)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        if self._shared is None:
            yield self.ranks.all_reduce(self._take(), out=out)
        else:
            yield from self._add_part(self._shared, self._mine)
            np.concatenate(self._parts, out=out)
        _divide(out, divisor)

    def _add_part(self, shared: SharedRows, out: Array) -> Steps:
        """Add this rank's part of all sums, between two meetings."""
        total = self._take()
        if total is not self._row:
            self._row[...] = total
        yield shared.meet()
        first, second, *others = self._addends
        with _no_warnings():
            np.add(first, second, out=out)
            for other in others:
                out += other
        yield shared.meet()


class Bfloat16(FloatSum):
    """Bfloat16 on the wire; the owner of a part adds in float32, in the order of ranks.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.reduction import Bfloat16
    >>> Bfloat16(64, LocalCommunicator()).size
    64
    """

    def _value_bytes(self) -> tuple[float, float]:
        return 2.0, 2.0

    def _encode(self, x: Array) -> Array:
        codes: Array = self.backend.cast(x, BFLOAT16).view(np.uint16)
        return codes

    def _decode(self, codes: Array) -> Array:
        return self.backend.cast(codes.view(BFLOAT16), np.dtype(np.float32))

    def _reduce_scatter(self, out: Array, divisor: float, step: int) -> Steps:
        send = self._encode(self._take())
        recv = self.xp.empty_like(send)
        yield self.ranks.all_to_all(send, recv)
        first, *others = recv.reshape(self.ranks.size, -1)
        out[...] = self._decode(first)
        with _no_warnings():
            for part in others:
                out += self._decode(part)
        _divide(out, divisor)

    def _all_reduce(self, out: Array, divisor: float, step: int) -> Steps:
        mine = self.xp.empty(self.shard_size, np.float32)
        yield from self._reduce_scatter(mine, divisor, step)
        recv = self.xp.empty(self.size, np.uint16)
        yield self.ranks.all_gather(self._encode(mine), recv)
        out[...] = self._decode(recv)


def _no_warnings() -> np.errstate:
    """Sums may be infinite or NaN, as MPI's are: who checks gradients finds that on all ranks."""
    return np.errstate(over="ignore", invalid="ignore")


def _divide(sums: Array, divisor: float) -> None:
    """Divide in place; where micro-batches carry their share, as in training, nothing is left."""
    if divisor != 1.0:
        sums /= np.float32(divisor)
