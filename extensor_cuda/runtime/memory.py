"""Memory of the GPU, from cupy's pools."""

from __future__ import annotations

from typing import Any

__all__ = ["allocate"]


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
