"""Ranks that are threads of one process: for tests, and one rank alone."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.distributed.buffers import check_buffers
from extensor.distributed.communicator import (
    BUCKET_BYTES,
    DEFAULT_TIMEOUT,
    Array,
    CollectiveMismatch,
    CollectiveTimeout,
    Op,
    Work,
    Works,
)
from extensor.distributed.shared_memory import SharedRows

__all__ = ["LocalCommunicator", "run_ranks"]

T = TypeVar("T")
REDUCE: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class _Call:
    """One collective: what each rank has brought to it."""

    def __init__(self) -> None:
        self.brought: dict[int, tuple[Any, Any]] = {}
        self.left = 0


class _Group:
    """What the ranks share: the collectives under way, by number."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: dict[int, _Call] = {}
        self.parts: dict[tuple[int, int], _Group] = {}


class _LocalWork:
    def __init__(
        self, ranks: LocalCommunicator, number: int, finish: Callable[[list[Any]], None]
    ) -> None:
        self._ranks, self._number, self._finish = ranks, number, finish
        self._ended = False

    def done(self) -> bool:
        """See :meth:`extensor.distributed.Work.done`."""
        if not self._ended:
            with self._ranks._group.changed:
                call = self._ranks._group.calls[self._number]
                if len(call.brought) < self._ranks.size:
                    return False
            self.wait()
        return True

    def wait(self) -> None:
        """See :meth:`extensor.distributed.Work.wait`."""
        if not self._ended:
            self._ended = True
            self._finish(self._ranks._collect(self._number))


class LocalCommunicator:
    """A rank that is a thread: see `Communicator` for its methods.

    Sums add the ranks' arrays in the order of ranks. Alone it is the communicator of one process.

    Args:
        rank: the number of this rank.
        size: how many there are.
        group: what the ranks of one `run_ranks` share; None for one rank alone.

    >>> from extensor.distributed import LocalCommunicator
    >>> alone = LocalCommunicator()
    >>> alone.rank, alone.size, alone.all_gather_object("x")
    (0, 1, ['x'])
    """

    bucket_bytes = BUCKET_BYTES

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self.timeout = rank, size, DEFAULT_TIMEOUT
        self._group = group or _Group()
        self._number = 0

    def all_reduce(self, buffer: Array, op: Op = "sum", out: Array | None = None) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_reduce`."""
        recv = buffer if out is None else out
        check_buffers("all_reduce", self.size, buffer, recv, 1)

        def finish(arrays: list[Any]) -> None:
            if self.size > 1 or out is not None:
                recv[...] = _reduced(arrays, op).reshape(recv.shape)

        return self._start("all_reduce", op, buffer, finish)

    def reduce_scatter(self, send: Array, recv: Array, op: Op = "sum") -> Work:
        """See :meth:`extensor.distributed.Communicator.reduce_scatter`."""
        check_buffers("reduce_scatter", self.size, send, recv, self.size)

        def finish(arrays: list[Any]) -> None:
            parts = [self._part(array, self.rank) for array in arrays]
            recv.reshape(-1)[...] = _reduced(parts, op)

        return self._start("reduce_scatter", op, send, finish)

    def all_gather(self, send: Array, recv: Array) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_gather`."""
        check_buffers("all_gather", self.size, send, recv, -self.size)

        def finish(arrays: list[Any]) -> None:
            recv.reshape(-1)[...] = np.concatenate([array.reshape(-1) for array in arrays])

        return self._start("all_gather", "", send, finish)

    def all_gather_coalesced(self, sends: Sequence[Array], recvs: Sequence[Array]) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_gather_coalesced`."""
        return Works(list(map(self.all_gather, sends, recvs)))

    def all_to_all(self, send: Array, recv: Array) -> Work:
        """See :meth:`extensor.distributed.Communicator.all_to_all`."""
        check_buffers("all_to_all", self.size, send, recv, 1)

        def finish(arrays: list[Any]) -> None:
            parts = [self._part(array, self.rank) for array in arrays]
            recv.reshape(-1)[...] = np.concatenate(parts)

        return self._start("all_to_all", "", send, finish)

    def broadcast(self, buffer: Array, root: int = 0) -> Work:
        """See :meth:`extensor.distributed.Communicator.broadcast`."""

        def finish(arrays: list[Any]) -> None:
            if self.rank != root:
                buffer[...] = arrays[root]

        return self._start("broadcast", root, buffer, finish)

    def barrier(self, timeout: float | None = None) -> None:
        """See :meth:`extensor.distributed.Communicator.barrier`."""
        before, self.timeout = self.timeout, self.timeout if timeout is None else timeout
        try:
            self._collect(self._bring("barrier", None))
        finally:
            self.timeout = before

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See :meth:`extensor.distributed.Communicator.all_gather_object`."""
        brought = self._collect(self._bring("all_gather_object", pickle.dumps(obj)))
        return [pickle.loads(each) for each in brought]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """See :meth:`extensor.distributed.Communicator.broadcast_object`."""
        mine = pickle.dumps(obj) if self.rank == root else None
        return pickle.loads(self._collect(self._bring("broadcast_object", mine))[root])

    def split(self, color: int) -> LocalCommunicator:
        """See :meth:`extensor.distributed.Communicator.split`."""
        colors = self.all_gather_object(color)
        members = [rank for rank, other in enumerate(colors) if other == color]
        with self._group.changed:
            group = self._group.parts.setdefault((self._number, color), _Group())
        part = LocalCommunicator(members.index(self.rank), len(members), group)
        part.timeout = self.timeout
        return part

    def close(self) -> None:
        """See :meth:`extensor.distributed.Communicator.close`."""

    # --- what all of them are made of -----------------------------------------------------------

    def _part(self, array: Array, rank: int) -> Array:
        """The flat part of an array that belongs to a rank."""
        return array.reshape(self.size, -1)[rank]

    def beside(self, lane: int = 0) -> AbstractContextManager[bool]:
        """See :meth:`extensor.distributed.Communicator.beside`."""
        return nullcontext(False)

    def queued(self) -> Work:
        """See :meth:`extensor.distributed.Communicator.queued`."""
        return Works([])

    def peer_memory(self, nbytes: int, lane: int = 0) -> Unsupported:
        """See :meth:`extensor.distributed.Communicator.peer_memory`."""
        return Unsupported("ranks without GPUs")

    def shared_rows(self, nbytes: int) -> SharedRows:
        """See :meth:`extensor.distributed.Communicator.shared_rows`."""
        rows = self._collect(self._bring("shared_rows", np.zeros(nbytes, np.uint8)))

        def meet() -> Work:
            return _LocalWork(self, self._bring("meet", None), lambda brought: None)

        return SharedRows(rows, meet)

    def join(self) -> None:
        """See :meth:`extensor.distributed.Communicator.join`."""

    def synchronize(self) -> None:
        """See :meth:`extensor.distributed.Communicator.synchronize`."""

    def _start(
        self, name: str, option: Any, send: Array, finish: Callable[[list[Any]], None]
    ) -> Work:
        what = f"{name} {option} of {send.size} {send.dtype}"
        brought = send.copy() if self.size > 1 else send
        return _LocalWork(self, self._bring(what, brought), finish)

    def _bring(self, what: str, value: Any) -> int:
        """Hand in this rank's part of its next collective; returns the collective's number."""
        number, self._number = self._number, self._number + 1
        with self._group.changed:
            call = self._group.calls.setdefault(number, _Call())
            call.brought[self.rank] = what, value
            self._group.changed.notify_all()
        return number

    def _collect(self, number: int) -> list[Any]:
        """What all ranks brought to a collective, once they have."""
        began, group = time.monotonic(), self._group
        with group.changed:
            call = group.calls[number]
            while len(call.brought) < self.size:
                waited = time.monotonic() - began
                if waited > self.timeout:
                    raise CollectiveTimeout(
                        call.brought[self.rank][0],
                        rank=self.rank,
                        size=self.size,
                        seconds=waited,
                        missing=sorted(set(range(self.size)) - call.brought.keys()),
                    )
                group.changed.wait(min(0.05, self.timeout))
            called = [call.brought[rank][0] for rank in range(self.size)]
            values = [call.brought[rank][1] for rank in range(self.size)]
            call.left += 1
            if call.left == self.size:
                del group.calls[number]
        if len(set(called)) > 1:
            each = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(called))
            raise CollectiveMismatch(f"expected the same collective on all ranks, got {each}")
        return values


def _reduced(arrays: list[Any], op: Op) -> Any:
    total = arrays[0].copy()
    for array in arrays[1:]:
        REDUCE[op](total, array, out=total)
    return total


def run_ranks(size: int, program: Callable[[LocalCommunicator], T]) -> list[T]:
    """Run a program on ranks that are threads, each with its communicator.

    Args:
        size: how many ranks.
        program: what each runs.

    Returns:
        What the program returned, in the order of ranks.

    Raises:
        BaseException: what a rank raised; of several, what is no timeout of waiting for another.

    >>> import numpy as np
    >>> from extensor.distributed import run_ranks
    >>> def program(ranks):
    ...     array = np.arange(3) + ranks.rank
    ...     ranks.all_reduce(array).wait()
    ...     return array.tolist()
    >>> run_ranks(2, program)
    [[1, 3, 5], [1, 3, 5]]
    """
    group = _Group()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(LocalCommunicator(rank, size, group))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.05)
    if errors:
        raise next((e for e in errors if not isinstance(e, CollectiveTimeout)), errors[0])
    return results
