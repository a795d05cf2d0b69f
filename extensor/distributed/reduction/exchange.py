"""How the ranks' packed integers meet: by collectives, or in memory that all of them read.

Both hand the same rows of bytes to the same kernels, so that the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from extensor.backends.protocol.reduction import PeerRows
from extensor.distributed.communicator import Communicator, Work
from extensor.distributed.peer_memory import PeerMemory
from extensor.distributed.reduction.base import Array, Steps

__all__ = ["CollectiveExchange", "PeerExchange", "make_exchange"]

Rows = Generator[Work, None, Array | PeerRows]
Pack = Callable[[Array], None]
"""Writes uint8 of shape (rows, bytes)."""
ALIGNMENT = 256


class CollectiveExchange:
    """Bytes travel by the communicator's collectives.

    Args:
        ranks: the communicator.
        xp: the array module.
        part: bytes of a rank's part of the bucket.
    """

    path = "collectives"

    def __init__(self, ranks: Communicator, xp: Any, part: int) -> None:
        self.ranks, self._xp, self._part = ranks, xp, part

    def run(self, steps: Steps, read: Array) -> Steps:
        """The collectives of a reduction."""
        return steps

    def all_to_all(self, pack: Pack) -> Rows:
        """Pack a part for each rank: this rank's part of all of them, in any order."""
        sent, received = (self._xp.empty((self.ranks.size, self._part), np.uint8) for _ in range(2))
        pack(sent)
        yield self.ranks.all_to_all(sent, received)
        return received

    def all_gather(self, pack: Pack, whole: bool = False) -> Rows:
        """Pack one row, a part or the whole bucket: the rows of all ranks, in order."""
        nbytes = self._part * (self.ranks.size if whole else 1)
        rows = self._xp.empty((self.ranks.size, nbytes), np.uint8)
        mine = rows[self.ranks.rank : self.ranks.rank + 1]
        pack(mine)
        yield self.ranks.all_gather(mine, rows)
        return rows


class PeerExchange:
    """Kernels read the other ranks' rows where these packed them.

    Args:
        ranks: the communicator.
        memory: room for a bucket and a part of it.
        part: bytes of a rank's part of the bucket.
        lane: in whose order the memory is used.
    """

    path = "peer memory"

    def __init__(self, ranks: Communicator, memory: PeerMemory, part: int, lane: int) -> None:
        self._ranks, self._memory, self._lane = ranks, memory, lane
        mine, behind = ranks.rank * part, peer_bytes(ranks.size, part) - part
        self._parts = memory.mine(0, ranks.size, part), memory.addends(mine, part)
        self._row = memory.mine(behind, 1, part), memory.rows(behind, part)
        whole = ranks.size * part
        self._whole = memory.mine(0, 1, whole), memory.rows(0, whole)

    def run(self, steps: Steps, read: Array) -> Steps:
        """Queue all of a reduction, then hand out the work to wait for.

        What it reads is kept until then: its memory may be of another stream than the lane's.
        """
        with self._ranks.beside(self._lane):
            for work in steps:  # none: barriers are queued
                work.wait()
            self._memory.barrier()  # before this rank packs again, all have read
            last = self._ranks.queued()
        yield last

    def all_to_all(self, pack: Pack) -> Rows:
        """See `CollectiveExchange.all_to_all`."""
        return self._met(pack, self._parts)

    def all_gather(self, pack: Pack, whole: bool = False) -> Rows:
        """See `CollectiveExchange.all_gather`."""
        return self._met(pack, self._whole if whole else self._row)

    def _met(self, pack: Pack, place: tuple[Array, PeerRows]) -> Rows:
        mine, rows = place
        pack(mine)
        self._memory.barrier()
        yield from ()
        return rows


def peer_bytes(size: int, part: int) -> int:
    """What a bucket needs of each rank's memory: its parts, and one more behind them."""
    return -(-size * part // ALIGNMENT) * ALIGNMENT + part


def make_exchange(
    ranks: Communicator, xp: Any, part: int, lane: int
) -> CollectiveExchange | PeerExchange:
    """Peer memory where the ranks have it. All ranks call this together.

    Args:
        ranks: the communicator.
        xp: the array module of the device.
        part: bytes of a rank's part of the bucket.
        lane: as for `Communicator.beside`.
    """
    if xp is np or ranks.size == 1:
        return CollectiveExchange(ranks, xp, part)
    memory = ranks.peer_memory(peer_bytes(ranks.size, part), lane)
    if isinstance(memory, PeerMemory):
        return PeerExchange(ranks, memory, part, lane)
    found = CollectiveExchange(ranks, xp, part)
    found.path = f"collectives: {memory.reason}"
    return found
