"""Gradient reduction: gradients as integers under a block's exponent, whose sums have no order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from extensor.backends.protocol.core import Array
from extensor.random import Stream

__all__ = ["PeerRows", "ReductionMethods"]


@dataclass(frozen=True)
class PeerRows:
    """Rows of as many bytes, each in the memory of a rank's GPU, that this rank's GPU reads.

    Attributes:
        rows: uint8 of shape (bytes,), for each rank.
        addresses: theirs, uint64, on this GPU.
        first: the row that is best read first, so that ranks do not all read one GPU at once.
    """

    rows: tuple[Array, ...]
    addresses: Array
    first: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """As of one array of these rows."""
        return len(self.rows), self.rows[0].size


class ReductionMethods(Protocol):
    """Integers that stand for gradients; `extensor.distributed.reduction` sums them over ranks.

    All arrays are flat and in whole blocks of 32 values. A block's anchor or exponent is one byte;
    255 marks a block with NaN or infinity.
    """

    def block_max(self, x: Array) -> Array:
        """Of each block of float32 the greatest magnitude, as its bits: uint32."""
        ...

    def largest_multi_tensor(self, arrays: Sequence[Array]) -> Array:
        """The bits of each float32 array's greatest finite magnitude: uint32 of shape (arrays,).

        Arrays may be of any shape.
        """
        ...

    def block_square_sums(self, x: Array) -> Array:
        """The sum of each block's squares in float64, in one order; the last block may be short.

        Value i of a block goes to sum i mod 8, from first to last; then neighbours are added.
        """
        ...

    def fixed_point(self, x: Array, anchors: Array) -> Array:
        """float32 -> int64 in units of 2^(16 anchor - 159), truncated toward zero.

        A block's anchor is its greatest exponent field (1 for subnormal numbers) divided by 16, or
        more. Magnitudes are below 2^48. A block that is not finite gives zeros.
        """
        ...

    def add_limbs(self, limbs: Array, x: Array, before: Array, after: Array) -> None:
        """Add float32 values to sums of 16-bit limbs, in place, and raise the sums' anchors.

        Args:
            limbs: int32 of shape (3, n), the most significant first: of each value of
                `fixed_point` bits 32 to 47, 16 to 31 and 0 to 15, with its sign.
            x: what is added.
            before: the anchors of ``limbs``.
            after: the anchors afterwards; no smaller, and large enough for ``x``.
        """
        ...

    def limb_total(self, limbs: Array, before: Array, after: Array) -> Array:
        """The sums as int64 in the unit of the anchors ``after``, no smaller than ``before``."""
        ...

    def fixed_point_mean(self, total: Array, anchors: Array, divisor: float) -> Array:
        """Sums of `fixed_point`, divided: float32, rounded from float64; NaN for anchor 255."""
        ...

    def mxint(
        self,
        x: Array,
        exponents: Array,
        bits: int,
        stream: Stream | None,
        first_block: int,
        residual: Array | None,
    ) -> Array:
        """float32 -> int8 or int16 in units of 2^(exponent - 125 - bits).

        Args:
            x: magnitudes of at most 2^(bits - 1) - 1 units.
            exponents: of the blocks.
            bits: 8 or 16.
            stream: random bits, for stochastic rounding; None rounds to nearest, ties to even.
            first_block: the number of the first block in the stream.
            residual: written with ``x`` minus the rounded values.
        """
        ...

    def mxint_pack(
        self,
        x: Array,
        bits: int,
        stream: Stream | None,
        first_block: int,
        residual: Array | None,
        out: Array,
    ) -> None:
        """float32 -> uint8 of shape (parts, bytes): each part's codes, then its exponents.

        Codes are those of `mxint`; a block's exponent is the least that holds its values.

        Args:
            x: the values.
            bits: 8 or 16.
            stream: as for `mxint`.
            first_block: as for `mxint`.
            residual: added to ``x`` first, and then written as by `mxint`; that of a block that is
                not finite stays.
            out: the result; its first length is the number of equal parts.
        """
        ...

    def mxint_unpack(
        self, packed: Array | PeerRows, bits: int, divisor: float, add: bool, out: Array
    ) -> None:
        """The mean of what `mxint_pack` gave, as `mxint_mean` has it, into float32.

        Args:
            packed: uint8 of shape (parts, bytes), or those of ranks.
            bits: 8 or 16.
            divisor: of the sum.
            add: whether parts are added up; else they are one after the other in the result.
            out: the result.
        """
        ...

    def mxint_repack(
        self,
        packed: Array | PeerRows,
        bits: int,
        divisor: float,
        stream: Stream | None,
        first_block: int,
        residual: Array | None,
        out: Array,
    ) -> None:
        """The mean of the parts that `mxint_pack` gave, added up, and packed again as one part.

        Args:
            packed: uint8 of shape (parts, bytes), or those of ranks.
            bits: 8 or 16.
            divisor: of the sum.
            stream: of the second rounding, as for `mxint_pack`.
            first_block: as for `mxint_pack`.
            residual: as for `mxint_pack`.
            out: uint8 of shape (1, bytes) for the codes and exponents, or float32 for the values
                that they stand for.
        """
        ...

    def mxint_mean(self, codes: Array, exponents: Array, divisor: float) -> Array:
        """The sum over ranks of what `mxint` gave, divided: float32; NaN for exponent 255.

        Integers are added in the unit of the largest exponent, times 2^-32; what a smaller exponent
        has below that is rounded down.

        Args:
            codes: int8 or int16 of shape (ranks, n).
            exponents: uint8 of shape (ranks, n / 32).
            divisor: of the sum.
        """
        ...

    def peer_barrier(self, flags: PeerRows, rank: int, stop: Array) -> None:
        """Let what this rank queues next come after what all ranks queued before their barrier.

        Args:
            flags: 256 bytes of each rank, zeros at first: 32 numbers that the others write, how
                often they were here, and 32 of what it wrote to them.
            rank: this rank's number.
            stop: one uint32 of the host; once it is not 0, nobody is waited for.
        """
        ...
