"""Prefetching: a thread makes the next batches ahead, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

__all__ = ["prefetch"]

T = TypeVar("T")
END = object()


def prefetch(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """The items of an iterable, up to ``depth`` of them made ahead in a thread of their own.

    An error while an item is made is raised where that item would have come. Closing the generator
    (or leaving it to be collected) ends the thread; nothing is made before the first is asked for.

    Args:
        items: any iterable; only the thread touches it.
        depth: how many may wait, 0 or more; 0 makes them here and now, without a thread.

    Raises:
        ValueError: for a depth below 0.
    """
    if depth < 0:
        raise ValueError(f"depth: expected a whole number, 0 or more, got {depth}")
    return _ahead(iter(items), depth)


def _ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    if depth == 0:
        yield from items
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        waiting = deque(pool.submit(next, items, END) for _ in range(depth + 1))
        while (item := waiting.popleft().result()) is not END:
            waiting.append(pool.submit(next, items, END))
            yield cast(T, item)
    finally:
        pool.shutdown(cancel_futures=True)
