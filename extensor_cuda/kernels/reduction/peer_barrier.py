"""A barrier of ranks whose GPUs reach each other's memory, as a kernel of one warp."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.protocol.reduction import PeerRows
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["peer_barrier", "source"]

_THREADS = 32  # as in peer_barrier.cu


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "peer_barrier.cu", {})


def peer_barrier(flags: PeerRows, rank: int, stop: Any) -> None:
    """Let what follows on this stream come after what all ranks queued before theirs."""
    ranks = (np.int32(rank), np.int32(len(flags.rows)))
    launch(
        source(), "peer_barrier", 1, _THREADS, flags.addresses, np.uint64(stop.ctypes.data), *ranks
    )
