"""One pool of threads for torch's kernels and the C++ core's.

The idle threads of a pool wait by spinning. Two pools would take the cores from each other in every
layer, so the core's loops run on torch's OpenMP threads: as many as `torch.set_num_threads` says,
or only the calling one where EXTENSOR_NUM_THREADS is 1.
"""

from __future__ import annotations

import ctypes

import torch

from extensor.backends import registry

__all__ = ["share_threads"]


def share_threads() -> bool:
    """Let the C++ core use torch's threads.

    Returns:
        Whether it does: not without the core, nor where torch has another runtime than GNU's
        OpenMP. Then the core goes on with its own threads.

    >>> from extensor.torch.threads import share_threads
    >>> isinstance(share_threads(), bool)
    True
    """
    core = getattr(registry.get("cpu"), "core", None)
    if core is None or "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return False
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel  # torch loads its libraries for all to see
    except AttributeError:
        return False
    core.use_openmp(ctypes.cast(parallel, ctypes.c_void_p).value)
    return True
