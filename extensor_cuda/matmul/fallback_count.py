"""Counts of FP8 products that fell back to bfloat16, kept on the device: in all, and by layer."""

from __future__ import annotations

from typing import Any

from extensor_cuda.runtime.counters import Reserve

__all__ = ["FallbackCounter", "SharedCounter"]

Array = Any


class FallbackCounter:
    """How many products of FP8 operands ran in bfloat16, counted on the device.

    Args:
        reserve: where its counters come from, so that a capture may be the first to count.
    """

    def __init__(self, reserve: Reserve) -> None:
        self._reserve = reserve
        self._words: dict[int, list[Array]] = {}  # of each device; the first is nobody's own

    def _of_device(self) -> list[Array]:
        words = self._words.setdefault(self._reserve.device, [])
        if not words:
            words.append(self._reserve.word())
        return words

    @property
    def array(self) -> Array:
        """Uint32 of shape (), to which kernels add."""
        return self._of_device()[0]

    def another(self) -> Array:
        """An ``array`` of its own, which is counted here, too."""
        words = self._of_device()
        words.append(self._reserve.word())
        return words[-1]

    @property
    def count(self) -> int:
        """What was counted; waits for the GPU."""
        return sum(int(word) for words in self._words.values() for word in words)


class SharedCounter:
    """The share of a layer's GEMM in a `FallbackCounter`, made when a product can fall back.

    Args:
        whole: the counter.
        held: the share's own memory: see `extensor.backends.protocol.MatmulMethods.product`.
    """

    def __init__(self, whole: FallbackCounter, held: dict[str, Any]) -> None:
        self._whole, self._held = whole, held

    @property
    def array(self) -> Array:
        """Uint32 of shape (), to which kernels add."""
        words: list[Array]
        words = self._held.setdefault("words", [])
        if not words:
            words.append(self._whole.another())
            self._held["gained"] = _Gained(words)
        return words[0]


class _Gained:
    """What was added to a word since the last call; waits for the GPU."""

    def __init__(self, words: list[Array]) -> None:
        self._words, self._seen = words, 0

    def __call__(self) -> int:
        now = int(self._words[0])
        gained, self._seen = now - self._seen, now
        return gained
