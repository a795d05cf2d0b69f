"""What quantizers count on the device, read when somebody asks.

Outside a capture each call has counters of its own. In a captured step the counters are memory that
all replays add to, and reading them gives what came since the last reading.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from extensor.quant.array import QuantStats
from extensor_cuda.runtime.capture import current_capture
from extensor_cuda.runtime.memory import lasting

__all__ = ["Counters", "OperandCounts"]

Array = Any


class Counters:
    """So many uint64 counters that start at zero, alternately of saturated and flushed values.

    Attributes:
        array: the counters on the device.
        capture: the capture that they belong to, or None.
    """

    def __init__(self, number: int, xp: Any) -> None:
        self.capture = current_capture()
        self._chunk = self._start = 0
        if self.capture is None:
            with lasting():
                self.array = xp.zeros(number, dtype=np.uint64)
        else:
            self.array, self._chunk, self._start = self.capture.counters(number)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Counters ``start`` to ``stop`` on the host; waits for the kernels."""
        if self.capture is None:
            return np.asarray(self.array[start:stop].get())
        held = self.capture.read_counters(self._chunk)
        return held[self._start + start : self._start + stop]


class OperandCounts:
    """What the quantizer of one operand counted. Does not keep the operand alive.

    Args:
        counters: those of several operands.
        part: where this operand's counters start and stop.
        size: how many values a call quantizes.
        cut: uint32 of shape (), not zero if bfloat16 did not hold a value; or None.
        rebased: of an operand rebased to shared scales, counters and a part of them: values that
            rebasing changed, alternating with those of them that became zero.

    Attributes:
        replayed: whether a captured step goes on adding to them.
    """

    def __init__(
        self,
        counters: Counters,
        part: tuple[int, int],
        size: int,
        cut: Array | None = None,
        rebased: tuple[Counters, tuple[int, int]] | None = None,
    ) -> None:
        self.counters, self.part, self.size = counters, part, size
        self.cut, self.rebased = cut, rebased
        self.replayed = counters.capture is not None
        self._seen = np.zeros(4, np.int64)  # replays, saturated, flushed and changed values

    def again(self) -> OperandCounts:
        """The counts of the same operand used once more."""
        return OperandCounts(self.counters, self.part, self.size, self.cut, self.rebased)

    def __call__(self) -> QuantStats:
        """The counts; in a captured step those since the last call. Waits for the kernel."""
        capture = self.counters.capture
        if capture is not None and not capture.replays:
            return QuantStats()
        if self.cut is not None and int(self.cut):
            message = "an operand held values below 2**-125 that bfloat16 cuts"
            warnings.warn(f"{message}; scale the loss up", RuntimeWarning, stacklevel=2)
        saturated, flushed = self.counters.read(*self.part).reshape(-1, 2).sum(axis=0).tolist()
        changed = 0
        if self.rebased is not None:
            counters, part = self.rebased
            changed, gone = counters.read(*part).reshape(-1, 2).sum(axis=0).tolist()
            flushed += gone
        calls = 1 if capture is None else capture.replays
        now = np.array([calls, saturated, flushed, changed])
        gained = now - self._seen
        if self.replayed:
            self._seen = now
        times, *counts = gained.tolist()
        return QuantStats(self.size * times, *counts)
