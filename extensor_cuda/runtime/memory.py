"""Memory of the GPU, from cupy's pools."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

__all__ = ["ALLOCATORS", "PoolLog", "allocate", "empty", "lasting"]


def allocate(cupy: Any, pool: Any, size: int) -> Any:
    """Memory of a pool of cupy's, which gives back what it keeps before it fails.

    Raises:
        MemoryError: naming the bytes asked for and free; what was allocated before stays usable.
    """
    try:
        return pool.malloc(size)
    except cupy.cuda.memory.OutOfMemoryError as error:
        free, total = cupy.cuda.runtime.memGetInfo()
        raise MemoryError(
            f"device 'cuda': requested {size} bytes, {free} of {total} are free; use smaller "
            "batches, or drop tensors that are no longer needed"
        ) from error


class PoolLog:
    """A log of the blocks that cupy's pools hand out: see `extensor.backends.protocol.MemoryLog`.

    Sizes are the pool's: multiples of 512 bytes.
    """

    def __init__(self, cupy: Any) -> None:
        events: list[tuple[int, int]] = []

        class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
            name = "extensor_ledger"

            def malloc_postprocess(self, **block: Any) -> None:
                events.append((block["mem_ptr"], block["mem_size"]))

            def free_postprocess(self, **block: Any) -> None:
                events.append((block["mem_ptr"], -1))

        self._events, self._hook = events, Hook()

    def __enter__(self) -> None:
        self._hook.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hook.__exit__(*error)

    def mark(self, block: int, label: int) -> None:
        """See the protocol."""
        self._events.append((block, -2 - label))

    def events(self) -> np.ndarray[Any, Any]:
        """See the protocol."""
        return np.array(self._events, np.int64).reshape(-1, 2)


class _Allocators(threading.local):
    lasting: Callable[[], AbstractContextManager[Any]] = nullcontext
    empty: Callable[[tuple[int, ...], np.dtype[Any]], Any] | None = None
    fallback: int = 1 << 25


ALLOCATORS = _Allocators()
"""Of this thread: another program whose allocator serves for a while sets ``lasting``, ``empty``,
and how many bytes an operand of a product's fallback may take, which is seldom needed: fewer take
more launches.
"""


def lasting() -> AbstractContextManager[Any]:
    """A context that allocates what outlives the call, and so cannot be another program's."""
    return ALLOCATORS.lasting()


def empty(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array for a result, which another program whose allocator serves can take over at once."""
    made, dtype = ALLOCATORS.empty, np.dtype(dtype)
    return xp.empty(shape, dtype) if made is None else made(shape, dtype)
