"""What quantizers count on the device, read when somebody asks.

Outside a capture each call has counters of its own. In a captured step the counters are memory that
all replays add to, and reading them gives what came since the last reading. The step may be
captured by extensor or by another program, which then says so in `CAPTURED`.
"""

from __future__ import annotations

import threading
import warnings
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from extensor.quant.array import QuantStats
from extensor_cuda.runtime.capture import current_capture
from extensor_cuda.runtime.memory import lasting

__all__ = ["CAPTURED", "Counters", "CountingCapture", "OperandCounts", "Reserve", "zeros"]

Array = Any
_RESERVED = 1 << 12


class CountingCapture(Protocol):
    """A capture whose replays are counted."""

    @property
    def replays(self) -> int:
        """How many there were."""
        ...

    def counters(self, number: int) -> tuple[Array, int, int] | None:
        """See `StepCapture.counters`; None where the capture cannot count them."""
        ...

    def read_counters(self, chunk: int) -> np.ndarray:
        """See `StepCapture.read_counters`."""
        ...


class _Captured(threading.local):
    capture: CountingCapture | None = None


CAPTURED = _Captured()
"""Of this thread: another program that captures what is launched sets ``capture``."""


@lru_cache(maxsize=256)
def _zeros(xp: Any, device: int, stream: int, count: int) -> Array:
    return xp.zeros(count, dtype=np.uint32)


def zeros(xp: Any, count: int) -> Array:
    """So many uint32 zeros for a launch that leaves them as it found them.

    One stream's launches share them, since they follow each other, and so do a captured step's.
    """
    if (capture := current_capture()) is not None:
        return capture.zeros(count)
    runtime, stream = xp.cuda.runtime, xp.cuda.get_current_stream().ptr
    if runtime.streamIsCapturing(stream):  # another program's graph sets its own to zero
        return xp.zeros(count, dtype=np.uint32)
    return _zeros(xp, runtime.getDevice(), stream, count)


class Reserve:
    """Counters that last, for captures, in which no such memory can be made or cleared once.

    What is handed out is zero and is not handed out again: a graph may add to it at any time.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self._left: dict[int, Array] = {}

    @property
    def device(self) -> int:
        """The number of the current device."""
        return int(self.xp.cuda.runtime.getDevice())

    def refill(self, number: int = 0) -> None:
        """Have so many uint64 counters at least; outside of captures."""
        left = self._left.get(self.device)
        if left is None or left.size < max(number, _RESERVED // 2):
            with lasting():
                self._left[self.device] = self.xp.zeros(max(2 * number, _RESERVED), np.uint64)

    def take(self, number: int) -> Array | None:
        """So many uint64 counters; None if fewer are left."""
        left = self._left.get(self.device)
        if left is None or left.size < number:
            return None
        self._left[self.device] = left[number:]
        return left[:number]

    def word(self) -> Array:
        """A uint32 of shape () to count with."""
        capture = current_capture()
        if capture is None and CAPTURED.capture is None:
            self.refill()
        word = self.take(1)
        if word is None and capture is not None:
            word = capture.persistent(np.zeros(1, np.uint64))
        if word is None:  # of a capture that cannot count
            word = self.xp.zeros(1, np.uint64)
        return word.view(np.uint32)[:1].reshape(())


class Counters:
    """So many uint64 counters that start at zero, alternately of saturated and flushed values.

    Attributes:
        array: the counters on the device.
        capture: the capture that they belong to, or None.
    """

    def __init__(self, number: int, xp: Any) -> None:
        self.capture: CountingCapture | None = current_capture() or CAPTURED.capture
        self._chunk = self._start = 0
        found = None if self.capture is None else self.capture.counters(number)
        if found is not None:
            self.array, self._chunk, self._start = found
            return
        self.capture = None
        with lasting():
            self.array = xp.zeros(number, dtype=np.uint64)

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
