"""Gradient reduction on any array module: integer operations on the bits of float32.

Integers and float64 only: cupy's own kernels flush float32's subnormal numbers to zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from extensor.backends.generic.core import GenericCore
from extensor.backends.protocol import Array
from extensor.backends.protocol.reduction import PeerRows
from extensor.random import Stream, random_words

__all__ = ["GenericReduction"]

BLOCK = 32
NONFINITE = 255
_INFINITY = 0x7F800000


class GenericReduction(GenericCore):
    """Gradients as integers under a block's exponent; see the protocol."""

    def block_max(self, x: Array) -> Array:
        """The bits of each block's greatest magnitude."""
        return (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).reshape(-1, BLOCK).max(axis=1)

    def largest_multi_tensor(self, arrays: Sequence[Array]) -> Array:
        """See the protocol."""
        found = []
        for x in arrays:
            bits = self.block_max(x.reshape(-1))
            if int(bits.max()) >= _INFINITY:  # some of a block may be finite
                bits = x.reshape(-1).view(np.uint32) & np.uint32(0x7FFFFFFF)
                bits = self.xp.where(bits < _INFINITY, bits, np.uint32(0))
            found.append(bits.max())
        return self.xp.stack(found)

    def block_square_sums(self, x: Array) -> Array:
        """Float64 holds the square of a float32 exactly."""
        wide = self.xp.zeros(-(-x.size // BLOCK) * BLOCK)
        wide[: x.size] = x
        rows = (wide * wide).reshape(-1, BLOCK // 8, 8)
        sums = ((rows[:, 0] + rows[:, 1]) + rows[:, 2]) + rows[:, 3]
        for _ in range(3):
            sums = sums[:, 0::2] + sums[:, 1::2]
        return sums[:, 0]

    def fixed_point(self, x: Array, anchors: Array) -> Array:
        """Significand times 2^24, shifted right by the distance to the top of the anchor."""
        xp, bits = self.xp, x.view(np.uint32)
        anchor = anchors.astype(np.int64).repeat(BLOCK)
        shift = xp.clip(16 * anchor + 15 - self._field(bits), 0, 63)
        wide = self._significand(bits).astype(np.int64)
        magnitude = xp.where(anchor == NONFINITE, np.int64(0), (wide << np.int64(24)) >> shift)
        return xp.where(bits >> np.uint32(31) != 0, -magnitude, magnitude)

    def add_limbs(self, limbs: Array, x: Array, before: Array, after: Array) -> None:
        """Limbs move down by a place for each step of the anchor, and the lowest are dropped."""
        xp = self.xp
        kept = (after != NONFINITE).repeat(BLOCK)
        raised = after.astype(np.int64).repeat(BLOCK) - before.astype(np.int64).repeat(BLOCK)
        limbs[...] = xp.where(kept, self._raised(limbs, raised), limbs)
        value = self.fixed_point(x, after)
        magnitude, sign = xp.abs(value), xp.sign(value).astype(np.int32)
        for place in range(3):
            digit = (magnitude >> np.int64(32 - 16 * place)) & np.int64(0xFFFF)
            limbs[place] += sign * digit.astype(np.int32)

    def limb_total(self, limbs: Array, before: Array, after: Array) -> Array:
        """The raised limbs, put together."""
        raised = after.astype(np.int64).repeat(BLOCK) - before.astype(np.int64).repeat(BLOCK)
        high, middle, low = self._raised(limbs, raised).astype(np.int64)
        total = high * np.int64(1 << 32) + middle * np.int64(1 << 16) + low
        return self.xp.where((after != NONFINITE).repeat(BLOCK), total, np.int64(0))

    def _raised(self, limbs: Array, raised: Array) -> Array:
        zero = self.xp.zeros_like(limbs[0])
        return self.xp.stack(
            [
                sum(
                    (self.xp.where(raised == place - of, limbs[of], zero) for of in range(place)),
                    self.xp.where(raised == 0, limbs[place], zero),
                )
                for place in range(3)
            ]
        )

    def fixed_point_mean(self, total: Array, anchors: Array, divisor: float) -> Array:
        """Total times the unit, in float64, divided and rounded to float32."""
        xp = self.xp
        unit = xp.exp2(16.0 * anchors.astype(np.float64) - 159.0)
        unit[anchors == NONFINITE] = np.nan
        return (total.astype(np.float64) * unit.repeat(BLOCK) / divisor).astype(np.float32)

    def mxint(
        self,
        x: Array,
        exponents: Array,
        bits: int,
        stream: Stream | None,
        first_block: int,
        residual: Array | None,
    ) -> Array:
        """Rounded to a multiple of the unit, or to 23 - bits places behind it and then at random.

        In float32 both are one fused multiply-add to a number whose last place is that one.
        """
        xp = self.xp
        exponent = exponents.astype(np.int64).repeat(BLOCK)
        # Of integers: cupy's kernels read subnormal numbers as zeros.
        value = self._significand(x.view(np.uint32)).astype(np.float64)
        value *= xp.exp2((self._field(x.view(np.uint32)) - 150).astype(np.float64))
        value = xp.where(x.view(np.uint32) >> np.uint32(31) != 0, -value, value)
        units = value * xp.exp2((125 + bits - exponent).astype(np.float64))
        if stream is None:
            codes = xp.rint(units)
        else:
            places = np.float64(1 << (23 - bits))
            dither = self._dither(stream, first_block, len(exponents), 23 - bits)
            codes = xp.floor(xp.rint(units * places + dither) / places)
        codes = xp.where(exponent == NONFINITE, 0.0, codes).astype(np.int64)
        if residual is not None:
            left = value - codes * xp.exp2((exponent - 125 - bits).astype(np.float64))
            residual[...] = xp.where(exponent == NONFINITE, 0.0, left).astype(np.float32)
        return codes.astype(np.int8 if bits == 8 else np.int16)

    def _dither(self, stream: Stream, first_block: int, blocks: int, places: int) -> Array:
        """Random integers of so many bits: a word serves two values, the low half first."""
        numbers = first_block + self.xp.arange(blocks)
        words = random_words(stream, numbers, BLOCK // 2, 32, self.xp)
        halves = self.xp.stack([words, words >> np.uint32(16)], axis=-1).reshape(-1)
        return halves & np.uint32((1 << places) - 1)

    def mxint_pack(
        self,
        x: Array,
        bits: int,
        stream: Stream | None,
        first_block: int,
        residual: Array | None,
        out: Array,
    ) -> None:
        """Exponents by integers on the bits of the blocks' maxima, and `mxint` under them."""
        xp = self.xp
        if residual is not None:
            x = x + residual
        most = self.block_max(x).astype(np.int64)
        exponents = xp.minimum((most + ((1 << (25 - bits)) - 1)) >> 23, NONFINITE)
        exponents = exponents.astype(np.uint8)
        left = None if residual is None else xp.empty_like(x)
        codes = self.mxint(x, exponents, bits, stream, first_block, left)
        if residual is not None:
            residual[...] = xp.where((exponents == NONFINITE).repeat(BLOCK), residual, left)
        codes = codes.view(np.uint8).reshape(len(out), -1)
        out[:, : codes.shape[1]] = codes
        out[:, codes.shape[1] :] = exponents.reshape(len(out), -1)

    def mxint_unpack(
        self, packed: Array | PeerRows, bits: int, divisor: float, add: bool, out: Array
    ) -> None:
        """Codes and exponents apart, and their `mxint_mean`."""
        xp, code = self.xp, np.dtype(f"int{bits}")
        if isinstance(packed, PeerRows):
            packed = xp.stack(packed.rows)
        values = packed.shape[1] * BLOCK // (BLOCK * code.itemsize + 1)
        end = values * code.itemsize
        codes = xp.ascontiguousarray(packed[:, :end]).view(code)
        exponents = xp.ascontiguousarray(packed[:, end:])
        if not add:
            codes, exponents = codes.reshape(1, -1), exponents.reshape(1, -1)
        out[...] = self.mxint_mean(codes, exponents, divisor)

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
        """`mxint_unpack` and `mxint_pack`."""
        xp, pitch = self.xp, packed.shape[1]
        mean = xp.empty(pitch * BLOCK // (BLOCK * bits // 8 + 1), np.float32)
        self.mxint_unpack(packed, bits, divisor, True, mean)
        again = out if out.dtype == np.uint8 else xp.empty((1, pitch), np.uint8)
        self.mxint_pack(mean, bits, stream, first_block, residual, again)
        if again is not out:
            self.mxint_unpack(again, bits, 1.0, False, out)

    def mxint_mean(self, codes: Array, exponents: Array, divisor: float) -> Array:
        """Each rank's integers in the unit of the largest exponent, times 2^-32, and their sum."""
        xp, bits = self.xp, 8 * codes.dtype.itemsize
        most = exponents.max(axis=0)
        behind = xp.minimum((most - exponents).astype(np.int64), 63).repeat(BLOCK, axis=1)
        total = ((codes.astype(np.int64) << np.int64(32)) >> behind).sum(axis=0)
        unit = xp.exp2(most.astype(np.float64) - (125.0 + bits + 32.0))
        unit[most == NONFINITE] = np.nan
        return (total.astype(np.float64) * unit.repeat(BLOCK) / divisor).astype(np.float32)

    def peer_barrier(self, flags: PeerRows, rank: int, stop: Array) -> None:
        """Numbers that only grow, modulo 2^32; the host waits."""
        words = [row.view(np.uint32) for row in flags.rows]
        there, written = (words[rank][half : half + len(words)] for half in (0, 32))
        written += np.uint32(1)
        for peer, word in enumerate(words):
            word[rank] = written[peer]
        while ((there - written).view(np.int32) < 0).any() and not stop[0]:
            time.sleep(0)

    def _field(self, bits: Array) -> Array:
        """Exponent fields, 1 for subnormal numbers: int64."""
        return self.xp.maximum((bits >> np.uint32(23)) & np.uint32(255), 1).astype(np.int64)

    def _significand(self, bits: Array) -> Array:
        normal = (bits & np.uint32(0x7F800000)) != 0
        return (bits & np.uint32(0x7FFFFF)) | (normal.astype(np.uint32) << np.uint32(23))
