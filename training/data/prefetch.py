"""Batches made ahead, by a thread, in the order they would have come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

__all__ = ["prefetch"]

T = TypeVar("T")


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
    if depth == 0:
        return (item for item in items)
    return _ahead(items, depth)


def _ahead(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    made: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
    ended = threading.Event()

    def put(kind: str, value: Any) -> bool:
        while not ended.is_set():
            try:
                made.put((kind, value), timeout=0.05)  # looks now and then whether to stop
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
        except BaseException as error:  # raised again where it belongs
            put("error", error)
        else:
            put("end", None)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = made.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        ended.set()
        thread.join()
