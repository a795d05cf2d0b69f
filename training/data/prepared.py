"""Prepared data sets, kept in the cache: parsed once, then mapped from one file.

A prepared file is named by the checksums of what it was made of and by the version of the code that
made it, so a change of either is another file. It is written atomically, with the checksum of each
array; a damaged one is made anew, since nothing but time is lost with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np

from extensor.io import CheckpointError, load_checkpoint, save_checkpoint

from .fetch import cache_directory

__all__ = ["prepared"]

Arrays = Mapping[str, np.ndarray]


def prepared(name: str, made_of: str, version: int, make: Callable[[], Arrays]) -> Arrays:
    """Arrays that ``make`` gives, from the cache where it has them.

    Args:
        name: the data set's; its folder in the cache.
        made_of: the checksums of the files that ``make`` reads.
        version: raised whenever ``make`` changes what it gives.
        make: parses the files; its errors pass through, and leave nothing behind.

    Raises:
        OSError: if the cache cannot be written to.
    """
    key = hashlib.sha256(f"{made_of} {version}".encode()).hexdigest()[:16]
    path = cache_directory() / name / f"prepared-{key}.safetensors"
    if path.is_file():
        try:
            kept = load_checkpoint(path)
        except CheckpointError:
            pass
        else:
            found = {k: v for k, v in kept.tensors.items() if isinstance(v, np.ndarray)}
            if kept.metadata.get("sha256") == _checksums(found):
                return found
    arrays = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, arrays, {"made_of": made_of, "sha256": _checksums(arrays)})
    return arrays


def _checksums(arrays: Arrays) -> dict[str, str]:
    return {
        name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        for name, array in arrays.items()
    }
