"""Places of a captured step's arrays: no two that live at once overlap, whatever the step does."""

from __future__ import annotations

import itertools
import types
import weakref
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extensor_cuda.runtime import placement
from extensor_cuda.runtime.placement import Life, LifeLog, PlacedMemory, least, place

UNIT, LEAST = 512, 1024


class Pool:
    """Memory at addresses that are never used again; counts what is held."""

    def __init__(self) -> None:
        self.held = 0

    def malloc(self, size: int) -> Any:
        memory = Memory(next(ADDRESSES) * (1 << 30), size)
        self.held += size
        weakref.finalize(memory, self._back, size)
        return Pointer(memory, 0)

    def _back(self, size: int) -> None:
        self.held -= size


ADDRESSES = itertools.count(1)


class Memory:
    """`cupy.cuda.UnownedMemory`."""

    def __init__(self, ptr: int, size: int, owner: Any = None, device: int = 0) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class Pointer:
    """`cupy.cuda.MemoryPointer`."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.mem, self.ptr - self.mem.ptr + offset)


def fake_cupy() -> Any:
    current = types.SimpleNamespace(ptr=1)
    cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(id=0),
        MemoryPointer=Pointer,
        UnownedMemory=Memory,
        get_current_stream=lambda: current,
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
    )
    return types.SimpleNamespace(cuda=cuda, current=current)


@pytest.fixture(autouse=True, scope="module")
def small_arrays_are_placed() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(placement, "LEAST", LEAST)
    yield
    patch.undo()


Events = list[tuple[int, int]]
"""Of a step: (size, 0) makes an array, (0, i) drops the i-th of those that live, around."""


def run(allocator: Any, events: Events) -> tuple[dict[int, tuple[int, int]], dict[int, Any]]:
    """Makes and drops arrays; where each lay, by its number, and those that still live."""
    spans: dict[int, tuple[int, int]] = {}
    alive: dict[int, Any] = {}
    for size, which in events:
        if size:
            number = len(spans)
            alive[number] = allocator(size)
            spans[number] = alive[number].ptr, alive[number].ptr + size
            others = [spans[i] for i in alive if i != number]
            assert not any(a < spans[number][1] and spans[number][0] < b for a, b in others)
        elif alive:
            alive.pop(sorted(alive)[which % len(alive)])
    return spans, alive


STEP = st.lists(
    st.tuples(st.sampled_from([0, 0, 100, 1024, 1500, 2048, 5000]), st.integers(0, 9)), max_size=40
)


@given(STEP)
@example([(2048, 0), (1024, 0), (0, 0), (2048, 0), (0, 0), (0, 0)])
def test_the_same_step_lies_in_one_allocation_and_never_overlaps(events: Events) -> None:
    cupy, pool = fake_cupy(), Pool()
    log = LifeLog(cupy, pool, pool, cupy.current)
    _, left = run(log, events)
    sizes = [-(-size // UNIT) * UNIT for size, _ in events if size >= LEAST]
    assert [life.size for life in log.lives] == sizes
    again = PlacedMemory(log, captured := Pool())
    spans, alive = run(again, events)
    large = [span for span in spans.values() if span[1] - span[0] >= LEAST]
    assert again.nbytes <= sum(sizes)
    if large:
        first = min(first for first, _ in large)
        assert max(stop for _, stop in large) <= first + again.nbytes
    left.clear()
    alive.clear()
    del again
    assert (pool.held, captured.held) == (0, 0)


@given(STEP, STEP)
def test_another_step_never_overlaps_either(events: Events, others: Events) -> None:
    cupy = fake_cupy()
    log = LifeLog(cupy, Pool(), Pool(), cupy.current)
    run(log, events)
    run(PlacedMemory(log, Pool()), others)


LIVES = st.lists(
    st.builds(
        lambda size, begin, steps: Life(size, begin, begin + steps if steps else float("inf")),
        st.integers(1, 9), st.integers(0, 30), st.integers(0, 12),
    ),
    max_size=25,
)  # fmt: skip


@given(LIVES)
def test_places_by_brute_force(lives: list[Life]) -> None:
    offsets, total = place(lives)
    taken: dict[tuple[int, int], int] = {}
    for number, (at, life) in enumerate(zip(offsets, lives, strict=True)):
        for time in range(life.begin, int(min(life.end, 50))):
            for byte in range(at, at + life.size):
                assert taken.setdefault((time, byte), number) == number
    used = [byte for _, byte in taken]
    assert total == (max(used) + 1 if used else 0)
    most = max((sum(1 for t, _ in taken if t == time) for time in range(50)), default=0)
    assert most <= total <= sum(life.size for life in lives)


def test_holes_of_a_pool_close() -> None:
    """Where each would lie behind the last, a small array that stays costs a hole of 8 and of 9."""
    lives = [Life(8, 0, 2), Life(1, 1, 9), Life(9, 3, 5), Life(10, 6, 8)]
    assert place(lives)[1] == 11


def test_an_array_keeps_its_memory_after_the_step() -> None:
    cupy, pool = fake_cupy(), Pool()
    log = LifeLog(cupy, Pool(), Pool(), cupy.current)
    _, kept = run(log, [(2048, 0), (0, 0), (4096, 0)])
    again = PlacedMemory(log, pool)
    _, kept = run(again, [(2048, 0), (0, 0), (4096, 0)])
    del again
    assert pool.held >= 4096
    kept.clear()
    assert pool.held == 0


def test_what_another_stream_makes_is_not_placed() -> None:
    cupy = fake_cupy()
    log = LifeLog(cupy, Pool(), Pool(), types.SimpleNamespace(ptr=2))
    run(log, [(2048, 0)])
    assert log.lives == []


class Forgetful(dict[int, tuple[int, int]]):
    """Says that nothing lives."""

    def values(self) -> Any:
        return []


def test_a_place_that_is_given_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy()
    log = LifeLog(cupy, Pool(), Pool(), cupy.current)
    run(log, [(2048, 0), (0, 0), (2048, 0), (0, 0)])
    longer = [(2048, 0), (2048, 0)]
    run(PlacedMemory(log, Pool()), longer)
    again = PlacedMemory(log, Pool())
    monkeypatch.setattr(again, "_taken", Forgetful())
    with pytest.raises(AssertionError):
        run(again, longer)


HARD = (
    Life(2, 0, 9), Life(4, 1, 3), Life(6, 2, 7), Life(3, 4, 5), Life(3, 6, 11), Life(4, 8, 12),
    Life(6, 10, 13),
)  # fmt: skip


def test_an_order_is_searched_that_takes_no_more_than_lives_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets, total = place(HARD)
    assert total == least(HARD) == 13
    for (a, one), (b, other) in itertools.combinations(zip(offsets, HARD, strict=True), 2):
        apart = a + one.size <= b or b + other.size <= a
        assert apart or one.end <= other.begin or other.end <= one.begin
    monkeypatch.setattr(placement, "_PAIRS", 0)
    assert place(HARD)[1] == 15  # the best of the first three orders
