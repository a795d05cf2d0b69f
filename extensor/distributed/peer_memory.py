"""Memory of GPUs that ranks of one machine read directly, by CUDA's IPC (run over NVLink).

A kernel that reads what the other ranks made does in one pass what a collective and a kernel do in
two, and needs no fixed time of NCCL's. Each rank opens the others' memory once; a barrier on the
GPU says when they have written it.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np

from extensor.backends.protocol.reduction import PeerRows
from extensor.backends.registry import get as get_backend
from extensor.backends.unsupported import Unsupported

__all__ = ["PeerMemory", "open_peer_memory"]

Array = Any
FLAG_BYTES = 256
"""Of the barrier, before the rows; as `Backend.peer_barrier` has them."""
MOST_RANKS = 32
LAZY_ENABLE_PEER_ACCESS = 1


class PeerMemory:
    """As many bytes on each rank's GPU, which all of these ranks read.

    Args:
        xp: the array module.
        rank: this rank's number.
        addresses: of each rank's memory, on this GPU.
        nbytes: how many there are for rows.
        owner: what keeps this rank's own memory.

    Attributes:
        nbytes: the same.
    """

    def __init__(self, xp: Any, rank: int, addresses: list[int], nbytes: int, owner: Any) -> None:
        self.nbytes, self._xp, self._rank = nbytes, xp, rank
        self._addresses, device = addresses, xp.cuda.runtime.getDevice()
        self._owner = owner
        self._pinned = xp.cuda.alloc_pinned_memory(4)
        self._stop = np.frombuffer(self._pinned, np.uint32, 1)
        self._stop[0] = 0
        self._whole = []
        for address in addresses:
            size = FLAG_BYTES + nbytes
            memory = xp.cuda.UnownedMemory(address, size, owner, device)
            pointer = xp.cuda.MemoryPointer(memory, 0)
            self._whole.append(xp.ndarray((size,), np.uint8, pointer))
        self._flags = self._rows(0, FLAG_BYTES, range(len(addresses)))

    def mine(self, offset: int, parts: int, nbytes: int) -> Array:
        """This rank's rows: uint8 of shape (parts, nbytes)."""
        start = FLAG_BYTES + offset
        return self._whole[self._rank][start : start + parts * nbytes].reshape(parts, nbytes)

    def rows(self, offset: int, nbytes: int) -> PeerRows:
        """A row of each rank, in order."""
        return self._rows(FLAG_BYTES + offset, nbytes, range(len(self._whole)), self._rank)

    def addends(self, offset: int, nbytes: int) -> PeerRows:
        """The same for a sum, which has no order: this rank's row is the first."""
        size = len(self._whole)
        ranks = [(self._rank + other) % size for other in range(size)]
        return self._rows(FLAG_BYTES + offset, nbytes, ranks)

    def barrier(self) -> None:
        """Let what follows on the current stream come after what all ranks queued before theirs.

        Raises:
            RuntimeError: after `stop`: kernels would read what the others have not written yet.
        """
        if self._stop[0]:
            raise RuntimeError(
                "peer memory: the GPU no longer waits for the other ranks, since one did not come "
                "in time; the way out: start all ranks anew"
            )
        get_backend("cuda").peer_barrier(self._flags, self._rank, self._stop)

    def stop(self) -> None:
        """Let the GPU no longer wait for the other ranks."""
        self._stop[0] = 1

    def close(self, host: Any) -> None:
        """Close the others' memory, and give back this rank's own; all ranks call this together.

        Args:
            host: a communicator of these ranks.
        """
        close_handles(self._xp, self._addresses, self._rank, host)
        del self._whole, self._flags, self._owner

    def _rows(self, start: int, nbytes: int, ranks: Any, first: int = 0) -> PeerRows:
        addresses = np.array([self._addresses[rank] + start for rank in ranks], np.uint64)
        rows = tuple(self._whole[rank][start : start + nbytes] for rank in ranks)
        return PeerRows(rows, self._xp.asarray(addresses), first)


def open_peer_memory(host: Any, xp: Any, nbytes: int) -> PeerMemory | Unsupported:
    """Memory that all ranks read, or why there is none. All ranks call this together.

    Args:
        host: a communicator of these ranks that carries objects.
        xp: the array module, on this rank's GPU.
        nbytes: for rows, on each rank.
    """
    runtime, rank = xp.cuda.runtime, host.rank
    memory, handle, reason = None, b"", ""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        reason = "NCCL_P2P_DISABLE=1"
    elif host.size > MOST_RANKS:
        reason = f"more than {MOST_RANKS} ranks"
    else:
        try:
            memory = xp.cuda.Memory(FLAG_BYTES + nbytes)
            runtime.memset(memory.ptr, 0, FLAG_BYTES)
            runtime.deviceSynchronize()
            handle = runtime.ipcGetMemHandle(memory.ptr)
        except runtime.CUDARuntimeError as error:
            reason = _said(rank, error)
    everyone = host.all_gather_object((socket.gethostname(), handle, reason))
    machines, handles, reasons = zip(*everyone, strict=True)
    addresses: list[int] = []
    if len(set(machines)) > 1:
        reason = "ranks on several machines"
    elif not any(reasons):
        try:
            for other, each in enumerate(handles):
                addresses.append(
                    memory.ptr if other == rank and memory is not None  # none opens its own
                    else runtime.ipcOpenMemHandle(each, LAZY_ENABLE_PEER_ACCESS)
                )  # fmt: skip
        except runtime.CUDARuntimeError as error:
            reason = _said(rank, error)
    reasons = host.all_gather_object(reason)
    if any(reasons):
        close_handles(xp, addresses, rank, host)
        return Unsupported(next(each for each in reasons if each))
    return PeerMemory(xp, rank, addresses, nbytes, memory)


def close_handles(xp: Any, addresses: list[int], rank: int, host: Any) -> None:
    """Close what a rank has opened of others; its own memory may go once none has it open."""
    for other, address in enumerate(addresses):
        if other != rank:
            xp.cuda.runtime.ipcCloseMemHandle(address)
    host.barrier()


def _said(rank: int, error: Exception) -> str:
    return f"rank {rank}: {' '.join(str(error).split())}"
