"""Memory of the GPU, from cupy's pools."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["ALLOCATORS", "allocate", "lasting"]


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


class _Allocators(threading.local):
    lasting: Callable[[], AbstractContextManager[Any]] = nullcontext


ALLOCATORS = _Allocators()
"""Of this thread: another program whose allocator serves for a while sets ``lasting``."""


def lasting() -> AbstractContextManager[Any]:
    """A context that allocates what outlives the call, and so cannot be another program's."""
    return ALLOCATORS.lasting()
