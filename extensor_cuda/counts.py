"""What quantizers count, on the device: read when somebody asks.

Outside a recording a call's counters are its own. While a step is recorded they are memory that all
its repetitions add to, and reading gives what came since the last time.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from extensor.quant.array import QuantStats
from extensor_cuda.recording import current

__all__ = ["Counters", "Counts"]

Array = Any


class Counters:
    """So many uint64 counters that start at zero, in pairs: saturated and flushed values.

    Attributes:
        array: what a kernel adds to.
    """

    def __init__(self, number: int, xp: Any) -> None:
        self.recording = current()
        self._chunk = self._start = 0
        if self.recording is None:
            self.array = xp.zeros(number, dtype=np.uint64)
        else:
            self.array, self._chunk, self._start = self.recording.counters(number)

    def read(self, start: int, stop: int) -> np.ndarray:
        """What some of them hold; waits for the kernels."""
        if self.recording is None:
            return np.asarray(self.array[start:stop].get())
        held = self.recording.read_counters(self._chunk)
        return held[self._start + start : self._start + stop]


class Counts:
    """What one operand's quantizer counted; it does not hold the operand.

    Args:
        counters: those of several operands.
        part: the first and the last but one of this operand's.
        size: how many values go in at a time.
        cut: uint32 of shape (): not zero if bfloat16 did not hold a value; or None.
        near: under a spec with ``rebased``, counters and a part of them, in pairs: values that
            changed for the sake of neighbours' scales, and those of them that became zero.

    Attributes:
        stays: whether there will be more to read: of a step that the GPU repeats.
    """

    def __init__(
        self,
        counters: Counters,
        part: tuple[int, int],
        size: int,
        cut: Array | None = None,
        near: tuple[Counters, tuple[int, int]] | None = None,
    ) -> None:
        self.counters, self.part, self.size, self.cut, self.near = counters, part, size, cut, near
        self.stays = counters.recording is not None
        self._seen = np.zeros(4, np.int64)  # repetitions, saturated, flushed and changed values

    def again(self) -> Counts:
        """Of the same operand used once more."""
        return Counts(self.counters, self.part, self.size, self.cut, self.near)

    def __call__(self) -> QuantStats:
        """The counts, or those since the last call; waits for the kernel."""
        recording = self.counters.recording
        if recording is not None and not recording.replays:
            return QuantStats()
        if self.cut is not None and int(self.cut):
            message = "an operand held values below 2**-125 that bfloat16 cuts"
            warnings.warn(f"{message}; scale the loss up", RuntimeWarning, stacklevel=2)
        saturated, flushed = self.counters.read(*self.part).reshape(-1, 2).sum(axis=0).tolist()
        changed = 0
        if self.near is not None:
            counters, part = self.near
            changed, gone = counters.read(*part).reshape(-1, 2).sum(axis=0).tolist()
            flushed += gone
        times = 1 if recording is None else recording.replays
        now = np.array([times, saturated, flushed, changed])
        gained = now - self._seen
        if self.stays:
            self._seen = now
        repeats, *counts = gained.tolist()
        return QuantStats(self.size * repeats, *counts)
