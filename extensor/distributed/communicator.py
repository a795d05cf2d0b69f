"""What training on several ranks asks of whatever carries the bytes.

A collective is an operation that every rank of a communicator calls, in the same order. One that
takes arrays starts at once and is finished by ``wait`` of the `Work` that it returns; until then
its arrays must not be touched. Arrays are C-contiguous: numpy's on the CPU, cupy's on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from extensor.backends.unsupported import Unsupported
from extensor.distributed.peer_memory import PeerMemory
from extensor.distributed.shared_memory import SharedRows

__all__ = [
    "CollectiveMismatch", "CollectiveTimeout", "Communicator", "Op", "Work", "Works",
]  # fmt: skip

Array = Any
Op = Literal["sum", "max", "min"]

BUCKET_BYTES = 4 << 20
"""`Communicator.bucket_bytes` through the memory of a machine or between machines."""
DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective may take: a rank may be compiling its kernels."""


class CollectiveTimeout(RuntimeError):  # noqa: N818 - a kind of timeout
    """A collective did not end in time.

    Args:
        what: the collective.
        rank: who waited.
        size: how many ranks there are.
        seconds: for how long.
        missing: the ranks that did not call it.

    Attributes:
        missing: the same, in order.

    >>> from extensor.distributed import CollectiveTimeout
    >>> CollectiveTimeout("barrier", rank=0, size=4, seconds=2.0, missing=[3]).missing
    [3]
    """

    def __init__(
        self, what: str, *, rank: int, size: int, seconds: float, missing: Sequence[int]
    ) -> None:
        self.missing = sorted(missing)
        names = ", ".join(map(str, self.missing))
        who = f"rank{'s' if len(self.missing) > 1 else ''} {names}"
        if self.missing:
            why = f"for {who}, which did not call it; the way out: see what {who} printed"
        else:
            why = "though every rank called it; the way out: see whether the network is up"
        super().__init__(
            f"{what}: rank {rank} of {size} waited {seconds:.3g} s {why}, or give --rank-timeout "
            "more seconds"
        )


class CollectiveMismatch(RuntimeError):  # noqa: N818 - beside CollectiveTimeout
    """Ranks called different collectives, or the same with arrays that do not fit.

    >>> import numpy as np
    >>> from extensor.distributed import CollectiveMismatch, run_ranks
    >>> try:
    ...     run_ranks(2, lambda ranks: ranks.all_reduce(np.zeros(3 + ranks.rank)).wait())
    ... except CollectiveMismatch as error:
    ...     print(str(error)[:46])
    expected the same collective on all ranks, got
    """


class Work(Protocol):
    """A collective under way.

    >>> import numpy as np
    >>> from extensor.distributed import LocalCommunicator
    >>> work = LocalCommunicator().all_reduce(np.ones(3))
    >>> work.wait()
    """

    def done(self) -> bool:
        """Whether it has ended; asking also drives it on, where no thread of its own does.

        Returns:
            True after the last byte has arrived.

        >>> import numpy as np
        >>> from extensor.distributed import LocalCommunicator
        >>> LocalCommunicator().all_reduce(np.ones(3)).done()
        True
        """

    def wait(self) -> None:
        """Return when the result is there.

        Raises:
            CollectiveTimeout: if it takes longer than the communicator's ``timeout``.

        >>> import numpy as np
        >>> from extensor.distributed import LocalCommunicator
        >>> LocalCommunicator().all_reduce(np.ones(3)).wait()
        """


class Works:
    """Several collectives under way, as one `Work`.

    Args:
        works: in the order in which they were started.

    >>> from extensor.distributed.communicator import Works
    >>> Works([]).done()
    True
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        """See :meth:`extensor.distributed.Work.done`."""
        return all(work.done() for work in self._works)

    def wait(self) -> None:
        """See :meth:`extensor.distributed.Work.wait`."""
        for work in self._works:
            work.wait()


class Communicator(Protocol):
    """Ranks that call collectives together.

    Attributes:
        rank: this process's number, from 0.
        size: how many ranks there are.
        timeout: seconds that `Work.wait` and the blocking collectives wait; may be set at any
            time, also while another call waits.
        bucket_bytes: of float32 gradients that are best reduced at once: small enough that sums
            begin while the backward pass goes on, large enough for the link.

    >>> from extensor.distributed import run_ranks
    >>> run_ranks(2, lambda ranks: (ranks.rank, ranks.size))
    [(0, 2), (1, 2)]
    """

    rank: int
    size: int
    timeout: float
    bucket_bytes: int

    def all_reduce(self, buffer: Array, op: Op = "sum", out: Array | None = None) -> Work:
        """Replace the array, on all ranks, by the sum, maximum or minimum over ranks.

        Args:
            buffer: the same shape and dtype on all ranks. Sums of integers must fit: some MPIs
                saturate. NCCL adds integers of 8, 32 and 64 bits alone.
            op: ``"sum"``, ``"max"`` or ``"min"``.
            out: as many values of that dtype, for the result; None is ``buffer`` itself.

        Returns:
            The work; the result is there after its ``wait``.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     array = np.array([ranks.rank, 5])
        ...     ranks.all_reduce(array).wait()
        ...     return array.tolist()
        >>> run_ranks(2, program)
        [[1, 10], [1, 10]]
        """

    def reduce_scatter(self, send: Array, recv: Array, op: Op = "sum") -> Work:
        """Reduce, and give rank r the r-th of ``size`` equal parts.

        Args:
            send: ``size`` times as many values as ``recv``.
            recv: gets this rank's part of the result.
            op: as in `all_reduce`.

        Returns:
            The work.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     part = np.empty(1, np.int64)
        ...     ranks.reduce_scatter(np.array([1, 2]), part).wait()
        ...     return part.tolist()
        >>> run_ranks(2, program)
        [[2], [4]]
        """

    def all_gather(self, send: Array, recv: Array) -> Work:
        """Put the arrays of all ranks, in the order of ranks, into ``recv`` on all ranks.

        Args:
            send: this rank's values, as many on every rank; perhaps its own part of ``recv``.
            recv: ``size`` times as many values.

        Returns:
            The work.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     all_of_them = np.empty(2, np.int64)
        ...     ranks.all_gather(np.array([ranks.rank]), all_of_them).wait()
        ...     return all_of_them.tolist()
        >>> run_ranks(2, program)
        [[0, 1], [0, 1]]
        """

    def all_gather_coalesced(self, sends: Sequence[Array], recvs: Sequence[Array]) -> Work:
        """`all_gather` of several arrays, of any dtypes, in one go.

        Args:
            sends: as for `all_gather`, one after the other.
            recvs: for each of them.

        Returns:
            The work of all.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     wholes = np.empty(2, np.int64), np.empty(2, np.uint8)
        ...     mine = np.array([ranks.rank]), np.array([7], np.uint8)
        ...     ranks.all_gather_coalesced(mine, wholes).wait()
        ...     return [whole.tolist() for whole in wholes]
        >>> run_ranks(2, program)[0]
        [[0, 1], [7, 7]]
        """

    def all_to_all(self, send: Array, recv: Array) -> Work:
        """Give rank r the r-th of ``size`` equal parts of each rank's array.

        Args:
            send: part r goes to rank r.
            recv: as many values; part r comes from rank r.

        Returns:
            The work.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     received = np.empty(2, np.int64)
        ...     ranks.all_to_all(10 * ranks.rank + np.arange(2), received).wait()
        ...     return received.tolist()
        >>> run_ranks(2, program)
        [[0, 10], [1, 11]]
        """

    def broadcast(self, buffer: Array, root: int = 0) -> Work:
        """Replace the array on all ranks by the one of ``root``.

        Args:
            buffer: the same shape and dtype on all ranks.
            root: the rank whose values are taken.

        Returns:
            The work.

        >>> import numpy as np
        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     array = np.array([ranks.rank])
        ...     ranks.broadcast(array, root=1).wait()
        ...     return array.tolist()
        >>> run_ranks(2, program)
        [[1], [1]]
        """

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank has called it.

        Args:
            timeout: seconds; None is the communicator's.

        Raises:
            CollectiveTimeout: if a rank does not come in time.

        >>> from extensor.distributed import run_ranks
        >>> run_ranks(2, lambda ranks: ranks.barrier(timeout=10.0))
        [None, None]
        """

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks.

        Args:
            obj: any object that pickle takes.

        Returns:
            A list in the order of ranks.

        >>> from extensor.distributed import run_ranks
        >>> run_ranks(2, lambda ranks: ranks.all_gather_object(f"rank {ranks.rank}"))[0]
        ['rank 0', 'rank 1']
        """

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """The object of ``root``.

        Args:
            obj: any object that pickle takes; only that of ``root`` counts.
            root: whose.

        Returns:
            The object, on all ranks.

        >>> from extensor.distributed import run_ranks
        >>> run_ranks(2, lambda ranks: ranks.broadcast_object(ranks.rank, root=1))
        [1, 1]
        """

    def split(self, color: int) -> Communicator:
        """The communicator of the ranks that give one number, in their order here.

        All ranks call this together. Its ``timeout`` is this one's as it is now.

        Args:
            color: not negative.

        Returns:
            A communicator beside this one; its collectives and this one's may be under way at once.

        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     half = ranks.split(ranks.rank % 2)
        ...     return half.all_gather_object(ranks.rank)
        >>> run_ranks(4, program)
        [[0, 2], [1, 3], [0, 2], [1, 3]]
        """

    def close(self) -> None:
        """Give back connections, and memory that other ranks read, of a communicator of `split`.

        All its ranks call this together, when nothing of it is under way and no captured graph
        holds its calls. Closed a second time, it does nothing. The communicator that was split
        goes on.

        >>> from extensor.distributed import run_ranks
        >>> def program(ranks):
        ...     half = ranks.split(ranks.rank % 2)
        ...     half.barrier()
        ...     half.close()
        ...     return ranks.all_gather_object(half.size)
        >>> run_ranks(2, program)
        [[1, 1], [1, 1]]
        """

    def beside(self, lane: int = 0) -> AbstractContextManager[bool]:
        """Let a GPU do what is called inside beside what it computes outside.

        Arrays that are made inside are given back inside, too, or after `join`.

        Args:
            lane: what is called with one number comes in order; with another one it may overlap.

        Returns:
            A context manager. It gives True where `Work.wait` inside returns at once, because
            what follows inside comes after the collective in any case.

        >>> from extensor.distributed import LocalCommunicator
        >>> with LocalCommunicator().beside() as queued:
        ...     print(queued)
        False
        """

    def queued(self) -> Work:
        """What this process has queued inside `beside` so far, to wait for.

        Returns:
            The work; without a GPU nothing is queued.

        >>> from extensor.distributed import LocalCommunicator
        >>> LocalCommunicator().queued().done()
        True
        """

    def peer_memory(self, nbytes: int, lane: int = 0) -> PeerMemory | Unsupported:
        """Memory on each rank's GPU that the other ranks' GPUs read. All ranks call this together.

        Args:
            nbytes: the least size, the same on all ranks.
            lane: as for `beside`; what uses the memory is called there.

        Returns:
            The memory, the same one for one lane while it is large enough; or why there is none.

        >>> from extensor.distributed import LocalCommunicator
        >>> LocalCommunicator().peer_memory(256).reason
        'ranks without GPUs'
        """

    def shared_rows(self, nbytes: int) -> SharedRows | Unsupported:
        """Memory of the machine that all ranks read. All ranks call this together.

        Args:
            nbytes: of each rank, the same on all.

        Returns:
            The memory, until `close`; or why there is none.

        >>> from extensor.distributed import LocalCommunicator
        >>> len(LocalCommunicator().shared_rows(256).rows)
        1
        """

    def join(self) -> None:
        """Let what follows come after all that was called inside `beside`.

        This process goes on, so that the GPU need not wait for it.

        Raises:
            CollectiveTimeout: if what was called some time ago takes longer than ``timeout``.

        >>> from extensor.distributed import LocalCommunicator
        >>> LocalCommunicator().join()
        """

    def synchronize(self) -> None:
        """Return when the device has done all that this process has queued, a graph's replay, too.

        Does nothing while a CUDA graph is captured, and where collectives are waited for anyway.

        Raises:
            CollectiveTimeout: if it takes longer than ``timeout``.

        >>> from extensor.distributed import LocalCommunicator
        >>> LocalCommunicator().synchronize()
        """
