"""Memory of one machine that the processes of all ranks read: MPI's shared windows.

Source: MPI 4.1, sections 12.2.3 (MPI_Win_allocate_shared) and 12.7 (the unified memory model).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported

__all__ = ["SharedRows", "open_window"]

Array = Any
FOLDER = "/dev/shm"
SPARE = 1 << 20
PAUSE_SECONDS = 0.001


class SharedRows:
    """As many bytes of each rank, which all of these ranks read.

    Args:
        rows: uint8 of shape (bytes,), of each rank.
        meet: starts a barrier. What ranks wrote before theirs is read after its ``wait``.

    >>> from extensor.distributed import run_ranks
    >>> def program(ranks):
    ...     shared = ranks.shared_rows(1)
    ...     shared.rows[ranks.rank][0] = ranks.rank + 5
    ...     shared.meet().wait()
    ...     return [int(row[0]) for row in shared.rows]
    >>> run_ranks(2, program)
    [[5, 6], [5, 6]]
    """

    def __init__(self, rows: Sequence[Array], meet: Callable[[], Any]) -> None:
        self.rows, self.meet = list(rows), meet


def open_window(
    ranks: Any, mpi: Any, comm: Any, nbytes: int
) -> tuple[Any, list[Array]] | Unsupported:
    """An MPI window in which each rank has so many bytes, and its rows; or why there is none.

    Args:
        ranks: a communicator that carries objects.
        mpi: the module ``mpi4py.MPI``.
        comm: of the same ranks.
        nbytes: of each rank.
    """
    near = comm.Split_type(mpi.COMM_TYPE_SHARED)
    reason = "ranks on several machines" if near.size < comm.size else ""
    near.Free()
    # All are here: so none of them is awaited elsewhere while the folder is theirs alone.
    reasons = [each for each in ranks.all_gather_object(reason) if each]
    if reasons:
        return Unsupported(reasons[0])
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            reason = stack.enter_context(_room(comm.size * nbytes, ranks.timeout))
        return _allocate(ranks, mpi, comm, nbytes, ranks.broadcast_object(reason))


def _allocate(
    ranks: Any, mpi: Any, comm: Any, nbytes: int, reason: str
) -> tuple[Any, list[Array]] | Unsupported:
    if reason:
        return Unsupported(reason)
    window = None
    try:
        window = mpi.Win.Allocate_shared(nbytes, 1, comm=comm)
    except mpi.Exception as error:
        reason = f"rank {ranks.rank}: {' '.join(str(error).split())}"
    reasons = [each for each in ranks.all_gather_object(reason) if each]
    if window is None or reasons:
        return Unsupported(reasons[0])
    window.Lock_all()
    rows = [np.frombuffer(window.Shared_query(rank)[0], np.uint8) for rank in range(comm.size)]
    rows[comm.rank][:] = 0  # so that the memory is taken before the next window asks for some
    ranks.barrier()
    return window, rows


@contextlib.contextmanager
def _room(nbytes: int, seconds: float) -> Iterator[str]:
    """What the machine lacks for so many bytes; inside, no other group of this user takes some.

    Args:
        nbytes: expected.
        seconds: how long others are waited for.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(f"{FOLDER}/extensor-{os.getuid()}.lock", "w"))
        except OSError:  # nobody takes room there
            yield _gap(nbytes)
            return
        import fcntl  # of systems that have the folder

        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    yield f"{FOLDER}: other ranks have allocated there for {seconds:.3g} s"
                    return
                time.sleep(PAUSE_SECONDS)
        yield _gap(nbytes)


def _gap(nbytes: int) -> str:
    """What a machine lacks for so many bytes: Open MPI's ranks would wait for ever without them."""
    if not os.path.isdir(FOLDER):
        return ""
    free = shutil.disk_usage(FOLDER).free
    if free >= nbytes + SPARE:
        return ""
    return f"{FOLDER} has {free / 1e6:.0f} MB free, expected {(nbytes + SPARE) / 1e6:.0f}"
