"""The communicator of the ranks that a program was started with."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from typing import Any

from extensor.backends.registry import get as get_backend
from extensor.distributed.agree import check_same
from extensor.distributed.communicator import Communicator
from extensor.distributed.local import LocalCommunicator
from extensor.launcher import launched_rank

__all__ = ["connect", "on_device"]

LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def connect() -> Any:
    """The communicator of all ranks that the program was started with.

    Where the launcher put several ranks on one machine and EXTENSOR_NUM_THREADS is not set, they
    share its CPUs.

    Returns:
        A `Communicator`: over MPI under ``mpirun`` or ``srun --mpi=pmix``, else of one rank.

    Raises:
        ImportError: if ranks were launched and mpi4py or its MPI library is missing.

    >>> from extensor.distributed import connect
    >>> connect().size
    1
    """
    rank = launched_rank()
    if rank is None:
        return LocalCommunicator()
    if importlib.util.find_spec("mpi4py") is None:
        raise ImportError(
            f"rank {rank} of several needs mpi4py, which is not installed; the way out: pip "
            "install 'extensor[mpi]'"
        )
    _share_cpus()
    from extensor.distributed.mpi import MPICommunicator

    ranks = MPICommunicator()
    if ranks.size > 1:
        _abort_on_errors(ranks)
    return ranks


def on_device(ranks: Communicator, device: str) -> Communicator:
    """The communicator for a model on a device: NCCL's where each of several ranks has a GPU.

    Call it before anything is made on the GPU, with the same device on all ranks: each rank takes
    the GPU that it then uses.

    Args:
        ranks: of `connect`.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        The ranks themselves for the CPU and for one rank.

    Raises:
        RuntimeError: without cupy, a GPU or NCCL, and if two ranks have one GPU.
        RanksDiffer: if ranks ask for different devices.

    >>> from extensor.distributed import connect, on_device
    >>> on_device(connect(), "cpu").size
    1
    """
    if ranks.size == 1:
        return ranks
    check_same(ranks, "start", {"--device": device})
    if device == "cpu":
        return ranks
    from extensor.distributed.nccl import NCCLCommunicator

    return NCCLCommunicator(ranks)


def _abort_on_errors(ranks: Any) -> None:
    """Let an error that nobody catches end all ranks, which would wait for this one for ever."""

    def hook(kind: Any, error: Any, trace: Any) -> None:
        traceback.print_exception(kind, error, trace)
        print(f"{ranks.where()} failed: {kind.__name__}: {error}", file=sys.stderr, flush=True)
        ranks.abort(1)

    sys.excepthook = hook


def _share_cpus() -> None:
    """Give each rank of a machine its share of the CPUs, unless the user or the launcher did."""
    if "EXTENSOR_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    local = next((int(os.environ[n]) for n in LOCAL_SIZES if os.environ.get(n, "").isdigit()), 1)
    mine = len(os.sched_getaffinity(0))
    core = getattr(get_backend("cpu"), "core", None)
    if mine == os.cpu_count() and core is not None:  # no launcher bound this rank to some of them
        core.set_threads(max(1, mine // local))
