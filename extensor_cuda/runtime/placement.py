"""Where the large arrays of a captured step lie: placed beforehand, by their lives in its warm-up.

A pool places an array where memory is free when it comes, and holes between others add up: a third
of a transformer block's memory. A captured step repeats one sequence of lives. So its arrays are
placed in one allocation, each at the lowest place where nothing else lies during its life, the best
of three orders ("greedy by size" and its like, Pisarchyk and Lee, arXiv 2001.03288). From that one
others are tried: the array that ends last in memory goes to an earlier turn.

Nothing relies on the lives being the same again: an array takes the place of the next of its size,
and comes from the pool where there is none or something else lies there.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from extensor_cuda.runtime.memory import allocate

__all__ = ["LEAST", "Life", "LifeLog", "PlacedMemory", "StepAllocator", "least", "place", "placed"]

LEAST = 1 << 20
"""Bytes of the smallest array that is placed: there are many smaller ones, in little memory."""
_UNIT = 512
"""Places are multiples of it, as blocks of cupy's pool are."""
_PAIRS = 1 << 22
"""How many pairs of arrays the search for an order may look at: a second or so."""


class Life(NamedTuple):
    """Bytes of an array, and when it was made and dropped; infinity: it outlives the step."""

    size: int
    begin: int
    end: float = math.inf


def place(lives: Sequence[Life]) -> tuple[list[int], int]:
    """The place of each array, and the bytes of all.

    >>> place([Life(4, 0, 1), Life(2, 1, 3), Life(3, 2, 3)])
    ([0, 0, 2], 5)
    """
    last = max((one.begin for one in lives), default=0) + 1
    weights: tuple[Callable[[int, float], float], ...] = (
        lambda size, steps: size * steps,
        lambda size, steps: steps,
        lambda size, steps: size,
    )
    found = []
    for weight in weights:
        keys = [-weight(one.size, min(one.end, last) - one.begin) for one in lives]
        order = sorted(range(len(lives)), key=keys.__getitem__)
        found.append((*placed(lives, order), order))
    return _searched(lives, *min(found, key=lambda one: one[1]))


def least(lives: Sequence[Life]) -> int:
    """The most bytes that live at once: no placing takes fewer.

    >>> least([Life(4, 0, 1), Life(2, 1, 3), Life(3, 2, 3)])
    5
    """
    moments = [(one.end, -one.size) for one in lives] + [(one.begin, one.size) for one in lives]
    return max(accumulate((size for _, size in sorted(moments)), initial=0))


def placed(lives: Sequence[Life], order: Sequence[int]) -> tuple[list[int], int]:
    """Each array at the lowest place that is free during its life, in an order; as `place`.

    >>> placed([Life(4, 0, 1), Life(2, 1, 3), Life(3, 2, 3)], range(3))
    ([0, 0, 2], 5)
    """
    offsets = [0] * len(lives)
    placed: list[tuple[int, Life]] = []
    total = 0
    for i in order:
        one, at = lives[i], 0
        for offset, other in placed:  # by their places
            if other.begin < one.end and one.begin < other.end:
                if offset - at >= one.size:
                    break
                at = max(at, offset + other.size)
        offsets[i] = at
        insort(placed, (at, one), key=lambda two: two[0])
        total = max(total, at + one.size)
    return offsets, total


def _searched(
    lives: Sequence[Life], offsets: list[int], total: int, order: Sequence[int]
) -> tuple[list[int], int]:
    """The best places of many orders, from one that was good: `place`."""
    bound, best = least(lives), (offsets, total)
    for turns in ((0,), (0, 2)):  # to the front; to the front and halfway, one after the other
        now, there, end = list(order), offsets, total
        for number in range(_PAIRS // (2 * len(lives) ** 2) if lives else 0):
            if best[1] == bound:
                return best
            at = max(k for k, i in enumerate(now) if there[i] + lives[i].size == end)
            divisor = turns[number % len(turns)]
            now.insert(at // divisor if divisor else 0, now.pop(at))
            there, end = placed(lives, now)
            best = min(best, (there, end), key=lambda one: one[1])
    return best


@dataclass(eq=False)
class _Held:
    """Keeps an array's memory, and tells when the array is dropped."""

    memory: Any
    dropped: Callable[[], object]

    def __del__(self) -> None:
        self.dropped()


def _pointer(cupy: Any, held: _Held, size: int) -> Any:
    """Memory as cupy's allocators give it, whose owner is ``held``."""
    device = cupy.cuda.Device().id
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(held.memory.ptr, size, held, device), 0)


@dataclass(eq=False)
class StepAllocator:
    """Memory of a captured step, large arrays apart: a small one that lasts would split a block.

    Attributes:
        cupy: the module.
        small: cupy's pool of arrays below `LEAST`, and of other streams'.
        pool: cupy's pool of the others.
        stream: of the step.
    """

    cupy: Any
    small: Any
    pool: Any
    stream: Any

    def __call__(self, size: int) -> Any:
        """Memory, as cupy's allocators give it."""
        size = -(-size // _UNIT) * _UNIT
        # What another stream still reads when it is dropped must not be written by this one.
        if size < LEAST or self.cupy.cuda.get_current_stream().ptr != self.stream.ptr:
            return allocate(self.cupy, self.small, size)
        return self._large(size)

    def _large(self, size: int) -> Any:
        return allocate(self.cupy, self.pool, size)


@dataclass(eq=False)
class LifeLog(StepAllocator):
    """An allocator that notes the lives of large arrays: `lives`, in the order of their making."""

    lives: list[Life] = field(default_factory=list)
    _now: int = 0

    def _large(self, size: int) -> Any:
        index = len(self.lives)
        memory = super()._large(size)
        self.lives.append(Life(size, self._now))
        self._now += 1

        def dropped() -> None:
            self.lives[index] = self.lives[index]._replace(end=self._now)
            self._now += 1

        return _pointer(self.cupy, _Held(memory, dropped), size)


class PlacedMemory(StepAllocator):
    """An allocator that places the arrays of a `LifeLog` when they are made again.

    Args:
        log: of the step before.
        pool: cupy's, for the allocation of all places and for what has none.
    """

    def __init__(self, log: LifeLog, pool: Any) -> None:
        super().__init__(log.cupy, log.small, pool, log.stream)
        self._offsets, self.nbytes = place(log.lives)
        self._arena: Any = allocate(self.cupy, pool, self.nbytes) if self.nbytes else None
        self._left: dict[int, deque[int]] = {}  # by size: those that were not made again yet
        for index, life in enumerate(log.lives):
            self._left.setdefault(life.size, deque()).append(index)
        self._taken: dict[int, tuple[int, int]] = {}  # by index: from and to

    def _large(self, size: int) -> Any:
        if not self._left.get(size):
            return super()._large(size)
        index = self._left[size].popleft()
        first = self._offsets[index]
        if any(begin < first + size and first < end for begin, end in tuple(self._taken.values())):
            return super()._large(size)
        self._taken[index] = first, first + size
        held = _Held(self._arena + first, lambda: self._taken.pop(index, None))
        return _pointer(self.cupy, held, size)
