"""Ranks that are threads: every collective against numpy's own answer."""

from __future__ import annotations

import numpy as np
import pytest

from extensor.distributed import CollectiveMismatch, CollectiveTimeout, LocalCommunicator, run_ranks

SIZES = (1, 2, 3, 4)
DTYPES = ("int8", "int16", "int32", "int64", "float32", "uint8")


def arrays(size: int, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(size)
    return [rng.integers(0, 9, shape).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives(size: int, dtype: str) -> None:
    given = arrays(size, (size, 5), dtype)

    def program(ranks: LocalCommunicator) -> list[np.ndarray]:
        mine = given[ranks.rank]
        total, largest, least, from_last = (mine.copy() for _ in range(4))
        part, gathered = np.empty(5, dtype), np.empty((size, size, 5), dtype)
        exchanged = np.empty_like(mine)
        works = [  # all under way at once
            ranks.all_reduce(total),
            ranks.all_reduce(largest, "max"),
            ranks.all_reduce(least, "min"),
            ranks.reduce_scatter(mine, part),
            ranks.all_gather(mine, gathered),
            ranks.all_to_all(mine, exchanged),
            ranks.broadcast(from_last, size - 1),
        ]
        for work in works:
            work.wait()
        assert all(work.done() for work in works)
        return [total, largest, least, part, gathered, exchanged, from_last]

    stacked = np.stack(given)
    for rank, got in enumerate(run_ranks(size, program)):
        expected = [
            stacked.sum(0, dtype=dtype), stacked.max(0), stacked.min(0),
            stacked.sum(0, dtype=dtype)[rank], stacked, stacked[:, rank], given[-1],
        ]  # fmt: skip
        for want, have in zip(expected, got, strict=True):
            assert have.dtype == dtype
            np.testing.assert_array_equal(have, want)


def test_objects() -> None:
    def program(ranks: LocalCommunicator) -> tuple[list[object], object]:
        ranks.barrier()
        mine = {"rank": ranks.rank}
        return ranks.all_gather_object(mine), ranks.broadcast_object(mine, root=2)

    gathered = [{"rank": rank} for rank in range(3)]
    assert run_ranks(3, program) == [(gathered, {"rank": 2})] * 3


def test_a_missing_rank_is_named() -> None:
    def program(ranks: LocalCommunicator) -> None:
        ranks.timeout = 0.1
        if ranks.rank != 1:
            ranks.barrier()

    with pytest.raises(CollectiveTimeout, match="for rank 1, which did not call it") as caught:
        run_ranks(3, program)
    assert caught.value.missing == [1]


def test_different_collectives_are_refused() -> None:
    def program(ranks: LocalCommunicator) -> None:
        ranks.all_reduce(np.zeros(3 + ranks.rank)).wait()

    with pytest.raises(CollectiveMismatch, match="rank 1: all_reduce sum of 4 float64"):
        run_ranks(2, program)


@pytest.mark.parametrize(
    ("method", "send", "recv", "message"),
    [
        ("all_gather", np.zeros(2), np.zeros(2), "2 times fewer values"),
        ("reduce_scatter", np.zeros(2), np.zeros(2), "2 times as many values"),
        ("all_to_all", np.zeros(3), np.zeros(3), "a multiple of 2"),
        ("all_gather", np.zeros(2), np.zeros(4, "f4"), "one dtype"),
        ("all_to_all", np.zeros((4, 4)).T[:, :2], np.zeros((4, 2)), "C-contiguous"),
    ],
)
def test_buffers_that_do_not_fit(
    method: str, send: np.ndarray, recv: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(LocalCommunicator(0, 2), method)(send, recv)
