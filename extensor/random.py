"""Counter-based random bits (Philox4x32-10), the same on every backend.

Random bits are an argument, never hidden state. A `Stream` names the tensor and step that the bits
are for; a block and a position in it select the word. The order in which blocks are visited does
not matter, so threads and GPUs draw the same bits.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC'11, section 3.3 (Philox); constants as in Random123.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["DeviceClock", "Stream", "philox4x32", "philox_call", "random_words"]

Array = Any

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_INTEGERS = (int, np.integer)


@dataclass(frozen=True)
class Stream:
    """Names one tensor's random bits in one step.

    Attributes:
        seed: 64-bit seed of the run.
        step: 32-bit optimizer step.
        tensor: 24-bit number of the layer or tensor.
        slot: 7-bit operand slot (which GEMM, which operand).
        column: whether the blocks run down columns of the matrix.
        clock: the object whose ``step`` this is; a captured step (`extensor.capture`) reads it
            again in each replay. A `DeviceClock` stands for the step. None: ``step`` is constant.

    Raises:
        ValueError: for a number that does not fit its bits.

    Example:
        >>> from extensor.random import Stream
        >>> Stream(seed=7, step=2, tensor=1).counter_high
        (2, 256)
    """

    seed: int
    step: int = 0
    tensor: int = 0
    slot: int = 0
    column: bool = False
    clock: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, bits in (
            ("seed", self.seed, 64),
            ("step", self.step, 32),
            ("tensor", self.tensor, 24),
            ("slot", self.slot, 7),
        ):
            if not isinstance(value, _INTEGERS) or not 0 <= value < 1 << bits:
                raise ValueError(f"{name}: expected an int in 0..2**{bits} - 1, got {value!r}")

    @property
    def key(self) -> tuple[int, int]:
        """The two 32-bit key words."""
        return self.seed & _MASK, self.seed >> 32

    @property
    def counter_high(self) -> tuple[int, int]:
        """The third and fourth counter word."""
        return self.step, self.tensor << 8 | self.slot << 1 | int(self.column)


@dataclass(frozen=True, eq=False)
class DeviceClock:
    """Step and use of a layer that another program keeps on a GPU, which alone reads them.

    Attributes:
        array: an integer of 64 bits, of shape (): the step, and in the upper half the use.

    Example:
        >>> import numpy as np
        >>> from extensor.random import DeviceClock
        >>> int(DeviceClock(np.array(3 + (2 << 32))).without_use.array)
        3
    """

    array: Array

    @cached_property
    def without_use(self) -> DeviceClock:
        """The clock of a weight, which has the same bits in all uses of a step."""
        return DeviceClock(self.array & _MASK)


def philox4x32(
    counter: tuple[Array, Array, Array, Array], key: tuple[int, int], xp: Any = np
) -> tuple[Array, Array, Array, Array]:
    """Ten rounds of Philox4x32.

    Args:
        counter: four broadcastable arrays of uint32.
        key: two 32-bit words.
        xp: the array module.

    Returns:
        Four uint32 arrays of the counters' broadcast shape.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11,
    section 3.3.

    Example:
        >>> from extensor.random import philox4x32
        >>> [hex(int(word)) for word in philox4x32((0, 0, 0, 0), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    words = _ten_rounds(tuple(xp.asarray(c, dtype=xp.uint64) for c in counter), key)
    return tuple(w.astype(xp.uint32) for w in xp.broadcast_arrays(*words))


def philox_call(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """`philox4x32` of one counter, in Python's integers: numpy takes twenty times as long.

    Args:
        counter: four 32-bit words.
        key: two 32-bit words.

    Returns:
        Four 32-bit words.

    Example:
        >>> from extensor.random import philox_call
        >>> hex(philox_call((0, 0, 0, 0), (0, 0))[0])
        '0x6627e8d5'
    """
    return _ten_rounds(counter, key)


def _ten_rounds(counter: Any, key: tuple[int, int]) -> Any:
    """Of integers, or of arrays of uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def random_words(
    stream: Stream, block_index: Array, block_size: int, rbits: int, xp: Any = np
) -> Array:
    """Random 32-bit words for stochastic rounding, one per position of each block.

    The word of position p in block b comes from counter (p // 4, b, step, tensor/slot/column): it
    is output word p % 4. With ``rbits=8`` one output feeds 16 positions: p takes byte p % 16
    (little-endian) of counter (p // 16, b, ...), placed in the middle of its bucket, ``byte * 2**24
    + 2**23``, so that one rounding rule (up exactly when ``frac * 2**32 > word``) serves both.

    Args:
        stream: names the bits.
        block_index: each block's C-order position in the scales array.
        block_size: positions in a block.
        rbits: random bits per position, 32 or 8.
        xp: the array module.

    Returns:
        uint32 of shape (len(block_index), block_size).

    Raises:
        ValueError: if a block index is 2**32 or more.

    Example:
        >>> from extensor.random import Stream, random_words
        >>> random_words(Stream(seed=0), [0, 1], 4, 32).shape
        (2, 4)
    """
    block = xp.asarray(block_index, dtype=xp.uint64)[:, None]
    if block.size and int(block.max()) >= 1 << 32:
        raise ValueError(f"random_words: expected fewer than 2**32 blocks, got {int(block.max())}")
    calls = -(-block_size // (128 // rbits))
    call = xp.arange(calls, dtype=xp.uint64)[None, :]
    words = xp.stack(philox4x32((call, block, *stream.counter_high), stream.key, xp), axis=-1)
    if rbits == 8:
        bytes_ = xp.stack(
            [(words >> xp.uint32(8 * i)) & xp.uint32(0xFF) for i in range(4)], axis=-1
        )
        words = (bytes_ << xp.uint32(24)) | xp.uint32(1 << 23)
    return words.reshape(len(block), calls * (128 // rbits))[:, :block_size]
