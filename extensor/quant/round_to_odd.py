"""Rounding floats to odd, in fewer bits: rounding the result further gives the float's rounding.

Rounding to odd cuts a float's low bits and sets the last bit that stays if any of them was set. A
later rounding to p bits, to nearest with any rule for ties, then gives what the float itself gives,
if p + 2 bits stayed, and so does every comparison with a number of p + 1 bits. MX quantization to
nearest is made of those: the scale is a power of two that follows from the block's maximum, and
codes have p bits at most. So it gives the same codes, scales and counts from 12 bits of a float32
in MXFP4, or 16 in MXFP6 and MXFP8, in blocks of any shape: also in the patches of a convolution,
where each value lies in several blocks.

Float scales, stochastic rounding, transforms and searched scales read all bits of a value.

A float32 below 2**-126 has fewer leading bits, so that 12 or 16 bits do not hold it (`OddFloats`),
and looking for one waits for a GPU. There, more bits hold all values (`OddPlanes`): no MX scale is
below 2**-127, so that no code rounds to less than 2**(e - m - 127), where 2**e is the least normal
element and m are its mantissa bits; a quarter of that is the last bit that is kept. That is a
float's last bit with 3 - e + m mantissa bits: 13 bits in MXFP4, 15 and 16 in MXFP6, 21 in MXFP8
E4M3.

Source: Boldo, Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd", IEEE Transactions on Computers 57(4), 2008, theorem 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.dtypes import bfloat16, dtype_of
from extensor.quant.scale_rules import E8M0_SEARCHES
from extensor.quant.spec import QuantSpec

__all__ = ["OddFloats", "OddPlanes", "odd_bits", "odd_nbytes", "odd_planes", "round_to_odd"]

Array = Any

_SMALLEST_NORMAL = 1 << 23  # its bits in float32
_SEGMENT = 1 << 15  # values that stay in a core's cache from pass to pass
_GROUP = 32  # values that share words of `OddPlanes`


@dataclass(frozen=True, eq=False)
class OddFloats:
    """An array rounded to odd.

    Attributes:
        high: the upper 8 or 16 bits of each value, flat.
        low: 4 bits more, two values a byte; None: no more.
        shape: of the array.
        dtype: of the array.

    >>> import numpy as np
    >>> from extensor.quant.round_to_odd import round_to_odd
    >>> kept = round_to_odd(np.array([1.0, 1.0001], np.float32), 12, np)
    >>> kept.values(np).tolist(), kept.nbytes
    ([1.0, 1.125], 3)
    """

    high: Array
    low: Array | None
    shape: tuple[int, ...]
    dtype: Any

    @property
    def arrays(self) -> Sequence[Array]:
        """What is kept."""
        return (self.high,) if self.low is None else (self.high, self.low)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(int(array.nbytes) for array in self.arrays)

    def values(self, xp: Any) -> Array:
        """The rounded values.

        Args:
            xp: the array module.

        Returns:
            An array of the shape and dtype.

        >>> import numpy as np
        >>> from extensor.quant.round_to_odd import round_to_odd
        >>> round_to_odd(np.float32([[3.0]]), 16, np).values(np).tolist()
        [[3.0]]
        """
        count = len(self.high)
        words = xp.empty(count, np.uint32)
        for start in range(0, count, _SEGMENT):
            part = words[start : start + _SEGMENT]
            part[...] = self.high[start : start + _SEGMENT]
            if self.low is None:
                part <<= np.uint32(16)
                continue
            part <<= np.uint32(24)
            nibbles = self.low[start // 2 : (start + len(part) + 1) // 2].astype(np.uint32)
            part[0::2] |= (nibbles & np.uint32(0xF)) << np.uint32(20)
            part[1::2] |= (nibbles[: len(part) // 2] >> np.uint32(4)) << np.uint32(20)
        if self.dtype != np.float32:
            return (words >> 16).astype(np.uint16).view(self.dtype).reshape(self.shape)
        return words.view(np.float32).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class OddPlanes:
    """An array rounded to odd, of any number of bits: word b of a group has bit b of 32 values.

    Attributes:
        words: uint32 (groups of 32 values, bits), the lowest bit first; the last group is padded.
        shape: of the array.
        dtype: of the array.

    >>> import numpy as np
    >>> from extensor.quant.round_to_odd import odd_planes
    >>> kept = odd_planes(np.array([1.0, 1.0001, 1e-45], np.float32), 13, np)
    >>> kept.values(np).tolist() == [1.0, 1.0625, 2.0**-130], kept.nbytes
    (True, 52)
    """

    words: Array
    shape: tuple[int, ...]
    dtype: Any

    @property
    def arrays(self) -> Sequence[Array]:
        """What is kept."""
        return (self.words,)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return int(self.words.nbytes)

    def values(self, xp: Any) -> Array:
        """The rounded values: see `OddFloats.values`."""
        lanes = xp.arange(_GROUP, dtype=np.uint32)
        bits, count = self.words.shape[1], math.prod(self.shape)
        kept = xp.zeros((len(self.words), _GROUP), np.uint32)
        for bit in range(bits):
            plane = self.words[:, bit, None] >> lanes & np.uint32(1)
            kept |= plane << np.uint32(bit)
        words = kept.reshape(-1)[:count].astype(_words_of(self.dtype))
        words <<= words.dtype.type(8 * words.itemsize - bits)
        return words.view(self.dtype).reshape(self.shape)


def odd_bits(spec: QuantSpec, dtype: np.dtype[Any], subnormals: bool = False) -> int | None:
    """How many bits of a value quantizing reads.

    Args:
        spec: how it will be quantized.
        dtype: of the values.
        subnormals: whether values below 2**-126 are held, too, as `OddPlanes` has them.

    Returns:
        12 or 16, or any number with ``subnormals``; None where that is not enough, or no fewer than
        the values have.

    >>> import numpy as np
    >>> from extensor.quant.round_to_odd import odd_bits
    >>> [odd_bits(et.QuantSpec(f), np.dtype("float32")) for f in ("mxfp4", "mxfp8_e4m3", "nvfp4")]
    [12, 16, None]
    """
    if dtype == np.float32:
        width = 32
    elif dtype_of(np.empty(0, dtype)) is bfloat16:
        width = 16
    else:
        return None
    plain = spec.is_mx and spec.rounding == "nearest_even" and spec.statistic == "amax"
    if spec.transform or spec.rule in E8M0_SEARCHES or spec.rebased or spec.eden:
        return None
    element = spec.row.element
    if not plain or not element.is_float or spec.kernel_gap or spec.element_scale != 1.0:
        return None
    if subnormals:
        needed = 1 + 8 + 3 - element.min_exponent + element.mantissa_bits
        return needed if needed < width else None
    needed = 1 + 8 + element.mantissa_bits + 2  # the leading bit is not stored
    return next((bits for bits in (12, 16) if needed <= bits < width), None)


def odd_nbytes(bits: int, shape: tuple[int, ...], planes: bool = False) -> int:
    """Bytes of an array that is rounded to odd.

    Args:
        bits: 12 or 16; any number of `OddPlanes`.
        shape: of the array.
        planes: whether it is stored as `OddPlanes`.

    >>> from extensor.quant.round_to_odd import odd_nbytes
    >>> odd_nbytes(12, (3, 5)), odd_nbytes(13, (3, 5), planes=True)
    (23, 52)
    """
    count = math.prod(shape)
    if planes:
        return 4 * bits * -(-count // _GROUP)
    return 2 * count if bits == 16 else count + -(-count // 2)


def round_to_odd(x: Array, bits: int, xp: Any) -> OddFloats | None:
    """Cut an array's floats; waits for the device.

    Args:
        x: float32 or bfloat16.
        bits: 12 or 16.
        xp: the array module.

    Returns:
        The rounded floats; None where a value is subnormal, whose leading bit is not the first.

    >>> import numpy as np
    >>> from extensor.quant.round_to_odd import round_to_odd
    >>> round_to_odd(np.float32([1e-40]), 12, np) is None
    True
    """
    flat = xp.ascontiguousarray(x).reshape(-1)
    words = flat.view(np.uint32) if x.dtype == np.float32 else flat.view(np.uint16)
    high = xp.empty(len(words), np.uint16 if bits == 16 else np.uint8)
    low = None if bits == 16 else xp.zeros(-(-len(words) // 2), np.uint8)
    for start in range(0, len(words), _SEGMENT):
        kept = _cut(words[start : start + _SEGMENT], bits)
        if kept is None:
            return None
        stop = start + len(kept)
        if low is None:
            high[start:stop] = kept
            continue
        high[start:stop] = kept >> 4
        nibbles = kept.astype(np.uint8)
        low[start // 2 : (stop + 1) // 2] = nibbles[0::2] & 0xF
        low[start // 2 : stop // 2] |= nibbles[1::2] << 4
    return OddFloats(high, low, tuple(x.shape), x.dtype)


def odd_planes(x: Array, bits: int, xp: Any) -> OddPlanes:
    """Cut an array's floats, subnormal ones, too; does not wait.

    Args:
        x: float32 or bfloat16.
        bits: fewer than the values have.
        xp: the array module.

    Returns:
        The rounded floats.

    >>> import numpy as np
    >>> from extensor.quant.round_to_odd import odd_planes
    >>> odd_planes(np.float32([3.0]), 13, np).values(np).tolist()
    [3.0]
    """
    words = xp.ascontiguousarray(x).reshape(-1).view(_words_of(x.dtype))
    kept = xp.zeros(-(-len(words) // _GROUP) * _GROUP, np.uint32)
    kept[: len(words)] = _odd(words, bits)
    groups, lanes = kept.reshape(-1, _GROUP), xp.arange(_GROUP, dtype=np.uint32)
    planes = xp.empty((len(groups), bits), np.uint32)
    for bit in range(bits):
        of_all = (groups >> np.uint32(bit) & np.uint32(1)) << lanes
        planes[:, bit] = of_all.sum(axis=1, dtype=np.uint32)
    return OddPlanes(planes, tuple(x.shape), x.dtype)


def _words_of(dtype: Any) -> Any:
    """The integers that hold floats of a dtype."""
    return np.uint32 if dtype == np.float32 else np.uint16


def _cut(words: Array, bits: int) -> Array | None:
    """The upper bits of floats rounded to odd, uint16; None if a value is subnormal."""
    one, width = words.dtype.type, 8 * words.dtype.itemsize
    magnitude = words & one((1 << (width - 1)) - 1)
    magnitude -= one(1)  # zero becomes the largest
    if bool((magnitude < one((_SMALLEST_NORMAL >> (32 - width)) - 1)).any()):
        return None
    return _odd(words, bits).astype(np.uint16, copy=False)


def _odd(words: Array, bits: int) -> Array:
    """The upper bits of floats, the last one set where a bit that is cut was."""
    one, cut = words.dtype.type, 8 * words.dtype.itemsize - bits
    kept = words >> one(cut)
    kept |= (words & one((1 << cut) - 1)) != 0
    return kept
