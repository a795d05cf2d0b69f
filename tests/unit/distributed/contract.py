"""What every communicator must do: each collective against numpy's own answer.

The same checks run on ranks that are threads, on processes under mpirun, and on NCCL's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from extensor.distributed import Communicator
from extensor.distributed.shared_memory import SharedRows

DTYPES = ("int8", "int16", "int32", "int64", "float32", "uint8")


def check_collectives(
    ranks: Communicator, dtype: str, on_device: Callable[[Any], Any] = np.asarray
) -> None:
    """Start all collectives at once, then look at their results."""
    size, rank = ranks.size, ranks.rank
    rng = np.random.default_rng(size)
    given = rng.integers(0, 30, (size, size, 5)).astype(dtype)
    mine = on_device(given[rank])
    total, largest, least, from_last = (mine.copy() for _ in range(4))
    apart = on_device(np.zeros_like(mine))
    parts = [on_device(np.zeros(5, dtype)) for _ in range(2)]
    gathered, exchanged = on_device(np.zeros(given.shape, dtype)), on_device(np.zeros_like(mine))
    own = np.zeros(given.shape, dtype)
    own[rank] = given[rank]
    in_place = on_device(own)
    both = [on_device(np.zeros(given.shape, dtype)), on_device(np.zeros((size, 3), np.uint8))]
    numbers = on_device(np.full(3, rank, np.uint8))
    works = [
        ranks.all_reduce(total),
        ranks.all_reduce(largest, "max"),
        ranks.all_reduce(mine, out=apart),
        ranks.all_reduce(least, "min"),
        ranks.reduce_scatter(mine, parts[0]),
        ranks.reduce_scatter(mine, parts[1], "max"),
        ranks.all_gather(mine, gathered),
        ranks.all_gather(in_place[rank], in_place),
        ranks.all_gather_coalesced([mine, numbers], both),
        ranks.all_to_all(mine, exchanged),
        ranks.broadcast(from_last, size - 1),
    ]
    for work in works:
        work.wait()
    assert all(work.done() for work in works)
    results = (
        total, apart, largest, least, *parts, gathered, in_place, both[0], exchanged, from_last
    )  # fmt: skip
    expected: Sequence[np.ndarray] = [
        given.sum(0, dtype=dtype), given.sum(0, dtype=dtype), given.max(0), given.min(0),
        given.sum(0, dtype=dtype)[rank], given.max(0)[rank], given, given,
        given, given[:, rank], given[-1],
    ]  # fmt: skip
    assert host(both[1]).tolist() == [[each] * 3 for each in range(size)]
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(host(got), want)


def host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def check_objects(ranks: Communicator) -> None:
    """Objects, and a barrier that all pass."""
    ranks.barrier(timeout=30.0)
    mine = {"rank": ranks.rank}
    assert ranks.all_gather_object(mine) == [{"rank": rank} for rank in range(ranks.size)]
    assert ranks.broadcast_object(mine, root=ranks.size - 1) == {"rank": ranks.size - 1}


def check_shared_rows(ranks: Communicator) -> None:
    """What each rank wrote before a meeting is what all read after it."""
    shared = ranks.shared_rows(8)
    assert isinstance(shared, SharedRows), shared
    for turn in range(3):
        shared.rows[ranks.rank][:] = 10 * turn + ranks.rank
        shared.meet().wait()
        seen = [row.tolist() for row in shared.rows]
        shared.meet().wait()  # before the next turn writes
        assert seen == [[10 * turn + rank] * 8 for rank in range(ranks.size)]


def check_split(ranks: Communicator, on_device: Callable[[Any], Any] = np.asarray) -> None:
    """Rows and columns of ranks, whose collectives and all ranks' own do not meet."""
    rows, columns = ranks.split(ranks.rank // 2), ranks.split(ranks.rank % 2)
    everyone = range(ranks.size)
    for part, members in (
        (rows, [r for r in everyone if r // 2 == ranks.rank // 2]),
        (columns, [r for r in everyone if r % 2 == ranks.rank % 2]),
    ):
        assert (part.rank, part.size) == (members.index(ranks.rank), len(members))
        assert part.timeout == ranks.timeout
        assert part.all_gather_object(ranks.rank) == members
    given = [on_device(np.full(3, ranks.rank + 1, np.int32)) for _ in range(3)]
    works = [part.all_reduce(x) for part, x in zip((columns, ranks, rows), given, strict=True)]
    for work in reversed(works):
        work.wait()
    both = ranks.rank // 2 * 2
    expected = (
        sum(r + 1 for r in everyone if r % 2 == ranks.rank % 2),
        sum(r + 1 for r in everyone),
        sum(r + 1 for r in everyone if r // 2 * 2 == both),
    )
    assert [host(x).tolist() for x in given] == [[each] * 3 for each in expected]
    for part in (columns, rows, rows):
        part.close()
    numbers = on_device(np.full(3, 1, np.int32))
    ranks.all_reduce(numbers).wait()  # goes on
    assert host(numbers).tolist() == [ranks.size] * 3
