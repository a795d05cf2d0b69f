"""Random numbers of the data: functions of (seed, epoch, the item's place in its split).

They do not depend on batches, so a run that is cut into others sees the same data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extensor.random import Stream, philox4x32

__all__ = ["DATA_TENSOR", "ORDER_SLOT", "PICK_SLOT", "Draws", "stream_words"]

# Names the data's random bits apart from the layers', whose numbers count up from 0.
DATA_TENSOR = (1 << 24) - 1
ORDER_SLOT, SHIFT_SLOT, WINDOW_SLOT, NOISE_SLOT, PICK_SLOT = 0, 1, 2, 3, 4
FLIP_SLOT, ROTATE_SLOT, ERASE_SLOT, MASK_SLOT = 5, 6, 7, 8


def stream_words(stream: Stream, count: int, part: int = 0) -> np.ndarray:
    """The first ``count`` random uint32 words of a part of a stream, the same on every machine."""
    calls = np.arange(-(-count // 4), dtype=np.uint64)
    words = philox4x32((calls, np.uint64(part), *stream.counter_high), stream.key)
    return np.stack(words, axis=-1).reshape(-1)[:count]


@dataclass(frozen=True)
class Draws:
    """Random words for some items of a split in one epoch.

    Attributes:
        seed: of the run.
        epoch: of the run.
        indices: (N,), the items' places in their split.
    """

    seed: int
    epoch: int
    indices: np.ndarray

    def words(self, slot: int, part: int = 0) -> np.ndarray:
        """One uint32 word for each item, (N,): word ``indices[i]`` of a part of a stream."""
        stream = Stream(self.seed, self.epoch, DATA_TENSOR, slot)
        calls = (self.indices // 4).astype(np.uint64)
        four = philox4x32((calls, np.uint64(part), *stream.counter_high), stream.key)
        return np.stack(four)[self.indices % 4, np.arange(len(self.indices))]

    def uniform(self, slot: int, part: int = 0) -> np.ndarray:
        """One number in (0, 1) for each item, float64 (N,)."""
        return (self.words(slot, part) + 0.5) / 2.0**32
