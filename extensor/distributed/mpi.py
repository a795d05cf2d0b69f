"""Ranks that are processes, over MPI: mpi4py on Open MPI or MPICH.

Collectives are MPI's non-blocking ones. MPI moves most of their bytes while somebody asks about
them, so `Work.done` is asked from time to time by whoever computes meanwhile. Arrays of a GPU go
through the CPU's memory.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.distributed.buffers import check_buffers, closed
from extensor.distributed.communicator import (
    BUCKET_BYTES,
    DEFAULT_TIMEOUT,
    Array,
    CollectiveTimeout,
    Op,
    Work,
    Works,
)
from extensor.distributed.shared_memory import SharedRows, open_window

__all__ = ["MPICommunicator"]

SPIN_SECONDS = 0.05
"""So long a rank asks without pause; a gradient of a small model is there by then."""
PAUSE_SECONDS = 0.0005
ANNOUNCE_SECONDS = 1.0
"""A rank that waits this long tells the others which collective it waits in."""
LISTEN_SECONDS = 0.5
"""After a timeout, at most, for what the other ranks announced."""


def _free(window: Any) -> None:
    window.Unlock_all()
    window.Free()


class _MPIWork:
    def __init__(
        self,
        ranks: MPICommunicator,
        what: str,
        request: Any,
        keep: Any,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._ranks, self._what, self._request = ranks, what, request
        self._keep = keep  # arrays must live as long as MPI writes to them
        self._finish = finish
        self._number = ranks._next_number()

    def done(self) -> bool:
        """See :meth:`extensor.distributed.Work.done`."""
        return bool(self._request.Test())

    def wait(self) -> None:
        """See :meth:`extensor.distributed.Work.wait`."""
        if not self._request.Test():
            self._ranks._wait(self._request, self._what, self._number)
        if self._finish is not None:
            self._finish()
            self._finish = None


class MPICommunicator:
    """A rank of an MPI program: see `Communicator` for its methods.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``; None is all ranks of the program. It is duplicated, so
            that other messages do not meet these.
        names: the ranks' numbers in the program, for messages; None are 0, 1, and so on.

    Raises:
        ImportError: if mpi4py is not installed, or finds no MPI library.

    >>> from extensor.distributed.mpi import MPICommunicator
    >>> ranks = MPICommunicator()    # doctest: +SKIP
    """

    bucket_bytes = BUCKET_BYTES

    def __init__(self, comm: Any = None, names: Sequence[int] | None = None) -> None:
        # Open MPI's UCX windows print an error where they have no device; none here needs them.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
        from mpi4py import MPI

        self._mpi = MPI
        world = MPI.COMM_WORLD if comm is None else comm
        self._comm, self._side = world.Dup(), world.Dup()
        self._ops = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
        self.rank, self.size = int(world.rank), int(world.size)
        self.timeout = DEFAULT_TIMEOUT
        self._names = list(range(self.size) if names is None else names)
        self._number, self._closed = 0, False
        self._announced: list[Any] = []
        self._windows: list[tuple[Any, list[weakref.ref[Array]]]] = []  # and their arrays
        self._heard = dict.fromkeys(range(self.size), -1)

    def all_reduce(self, buffer: Array, op: Op = "sum", out: Array | None = None) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_reduce`."""
        check_buffers("all_reduce", self.size, buffer, buffer if out is None else out, 1)
        if out is not None:
            apart = partial(self._comm.Iallreduce, op=self._ops[op])
            return self._start("all_reduce", apart, buffer, out)
        call = partial(self._comm.Iallreduce, self._mpi.IN_PLACE, op=self._ops[op])
        return self._in_place("all_reduce", call, buffer)

    def reduce_scatter(self, send: Array, recv: Array, op: Op = "sum") -> Work:
        """See :meth:`extensor.distributed.Communicator.reduce_scatter`."""
        check_buffers("reduce_scatter", self.size, send, recv, self.size)
        call = partial(self._comm.Ireduce_scatter_block, op=self._ops[op])
        return self._start("reduce_scatter", call, send, recv)

    def all_gather(self, send: Array, recv: Array) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_gather`."""
        check_buffers("all_gather", self.size, send, recv, -self.size)
        if isinstance(recv, np.ndarray) and np.may_share_memory(send, recv):
            call = partial(self._comm.Iallgather, self._mpi.IN_PLACE)
            return self._in_place("all_gather", call, recv)
        return self._start("all_gather", self._comm.Iallgather, send, recv)

    def all_gather_coalesced(self, sends: Sequence[Array], recvs: Sequence[Array]) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_gather_coalesced`."""
        return Works(list(map(self.all_gather, sends, recvs)))

    def all_to_all(self, send: Array, recv: Array) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_to_all`."""
        check_buffers("all_to_all", self.size, send, recv, 1)
        return self._start("all_to_all", self._comm.Ialltoall, send, recv)

    def broadcast(self, buffer: Array, root: int = 0) -> Work:
        """See :meth:`extensor.distributed.Communicator.broadcast`."""
        return self._in_place("broadcast", partial(self._comm.Ibcast, root=root), buffer)

    def barrier(self, timeout: float | None = None) -> None:
        """See :meth:`extensor.distributed.Communicator.barrier`."""
        self._check_open("barrier")
        before, self.timeout = self.timeout, self.timeout if timeout is None else timeout
        try:
            _MPIWork(self, "barrier", self._comm.Ibarrier(), None).wait()
        finally:
            self.timeout = before

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See :meth:`extensor.distributed.Communicator.all_gather_object`."""
        mine = np.frombuffer(pickle.dumps(obj), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.all_gather(np.array([mine.size], np.int64), lengths).wait()
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: mine.size] = mine
        gathered = np.empty((self.size, padded.size), np.uint8)
        self.all_gather(padded, gathered).wait()
        return [
            pickle.loads(row[:length].tobytes())
            for row, length in zip(gathered, lengths, strict=True)
        ]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """See :meth:`extensor.distributed.Communicator.broadcast_object`."""
        content = np.frombuffer(pickle.dumps(obj), np.uint8).copy()
        length = np.array([content.size], np.int64)
        self.broadcast(length, root).wait()
        if self.rank != root:
            content = np.empty(int(length[0]), np.uint8)
        self.broadcast(content, root).wait()
        return pickle.loads(content.tobytes())

    def beside(self, lane: int = 0) -> AbstractContextManager[bool]:
        """See :meth:`extensor.distributed.Communicator.beside`."""
        return nullcontext(False)

    def queued(self) -> Work:
        """See :meth:`extensor.distributed.Communicator.queued`."""
        return Works([])

    def peer_memory(self, nbytes: int, lane: int = 0) -> Unsupported:
        """See :meth:`extensor.distributed.Communicator.peer_memory`."""
        return Unsupported("ranks without GPUs")

    def shared_rows(self, nbytes: int) -> SharedRows | Unsupported:
        """See :meth:`extensor.distributed.Communicator.shared_rows`."""
        self._free_windows()
        found = open_window(self, self._mpi, self._comm, nbytes)
        if isinstance(found, Unsupported):
            return found
        window, rows = found
        self._windows.append((window, [weakref.ref(row) for row in rows]))

        def meet() -> Work:
            self._check_open("meet")
            window.Sync()
            return _MPIWork(self, "meet", self._comm.Ibarrier(), None, window.Sync)

        return SharedRows(rows, meet)

    def join(self) -> None:
        """See :meth:`extensor.distributed.Communicator.join`."""

    def synchronize(self) -> None:
        """See :meth:`extensor.distributed.Communicator.synchronize`."""

    def where(self) -> str:
        """This rank in words, for messages.

        Returns:
            Its number, machine and process.

        >>> from extensor.distributed.mpi import MPICommunicator
        >>> MPICommunicator().where()    # doctest: +SKIP
        'rank 0 of 4 (node1, process 4711)'
        """
        world = self._mpi.COMM_WORLD
        return f"rank {world.rank} of {world.size} ({socket.gethostname()}, process {os.getpid()})"

    def abort(self, code: int) -> None:
        """End the whole program, all ranks, now.

        Args:
            code: the exit code.

        >>> from extensor.distributed.mpi import MPICommunicator
        >>> MPICommunicator().abort(1)    # doctest: +SKIP
        """
        self._mpi.COMM_WORLD.Abort(code)

    def split(self, color: int) -> MPICommunicator:
        """See :meth:`extensor.distributed.Communicator.split`."""
        colors = self.all_gather_object(color)
        names = [self._names[rank] for rank, other in enumerate(colors) if other == color]
        members = self._comm.Split(color, self.rank)
        part = MPICommunicator(members, names)
        members.Free()  # the part has duplicates
        part.timeout = self.timeout
        return part

    def close(self) -> None:
        """See :meth:`extensor.distributed.Communicator.close`."""
        if self._closed:
            return
        self._free_windows()  # arrays that somebody has keep theirs, or the process would crash
        self._closed = True
        for comm in (self._comm, self._side):
            comm.Free()

    def _free_windows(self) -> None:
        """Give back shared memory of which no rank has an array left."""
        unread = [all(row() is None for row in rows) for _, rows in self._windows]
        everywhere = np.logical_and.reduce(self.all_gather_object(unread)).tolist()
        windows, self._windows = self._windows, []
        for (window, rows), free in zip(windows, everywhere, strict=True):
            if free:
                _free(window)
            else:
                self._windows.append((window, rows))

    # --- starting -------------------------------------------------------------------------------

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(closed(what))

    def _start(self, what: str, call: Callable[..., Any], send: Array, recv: Array) -> Work:
        self._check_open(what)
        if isinstance(recv, np.ndarray):
            return _MPIWork(self, what, call(send, recv), (send, recv))
        here, there = send.get(), np.empty(recv.shape, recv.dtype)
        return _MPIWork(self, what, call(here, there), (here, there), lambda: recv.set(there))

    def _in_place(self, what: str, call: Callable[..., Any], buffer: Array) -> Work:
        self._check_open(what)
        if isinstance(buffer, np.ndarray):
            return _MPIWork(self, what, call(buffer), buffer)
        here = buffer.get()
        return _MPIWork(self, what, call(here), here, lambda: buffer.set(here))

    # --- waiting --------------------------------------------------------------------------------

    def _next_number(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    def _wait(self, request: Any, what: str, number: int) -> None:
        began, announced = time.monotonic(), False
        while not request.Test():
            waited = time.monotonic() - began
            if waited > self.timeout:
                if not announced:
                    self._announce(number)
                raise CollectiveTimeout(
                    what,
                    rank=self._names[self.rank],
                    size=int(self._mpi.COMM_WORLD.size),
                    seconds=waited,
                    missing=[self._names[rank] for rank in self._missing(number)],
                )
            if not announced and waited > min(ANNOUNCE_SECONDS, self.timeout / 2):
                announced = True
                self._announce(number)
            time.sleep(0 if waited < SPIN_SECONDS else PAUSE_SECONDS)

    def _announce(self, number: int) -> None:
        """Tell all others, without waiting for them, which collective this rank waits in."""
        self._announced = [request for request in self._announced if not request[0].Test()]
        message = np.array([number], np.int64)
        for rank in range(self.size):
            if rank != self.rank:
                self._announced.append((self._side.Isend(message, dest=rank), message))
        self._listen()

    def _listen(self) -> None:
        status, message = self._mpi.Status(), np.empty(1, np.int64)
        while self._side.Iprobe(status=status):
            self._side.Recv(message, source=status.source)
            self._heard[status.source] = max(self._heard[status.source], int(message[0]))

    def _missing(self, number: int) -> list[int]:
        """The ranks that did not announce this collective."""
        self._heard[self.rank] = number
        until = time.monotonic() + min(LISTEN_SECONDS, self.timeout / 2)
        while time.monotonic() < until and min(self._heard.values()) < number:
            self._listen()
            time.sleep(PAUSE_SECONDS)
        return [rank for rank, heard in self._heard.items() if heard < number]
