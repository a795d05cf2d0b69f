"""Which ranks a program was started with."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from extensor.backends.registry import get as get_backend
from extensor.distributed.agree import check_same
from extensor.distributed.communicator import Communicator
from extensor.distributed.local import LocalCommunicator

__all__ = ["connect", "launched_rank", "launched_size", "on_device", "refuse_ranks"]

LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""What Open MPI's mpirun, MPICH's or ``srun --mpi=pmi2``, and ``srun --mpi=pmix`` set."""
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """The rank that the launcher gave this process, without starting MPI.

    Args:
        environment: of the process.

    Returns:
        The number; None if no launcher of ranks started it.

    >>> from extensor.distributed import launched_rank
    >>> launched_rank({"PMI_RANK": "3"}), launched_rank({})
    (3, None)
    """
    return next((int(environment[name]) for name in LAUNCHERS if name in environment), None)


def launched_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the launcher started, without starting MPI.

    Args:
        environment: of the process.

    Returns:
        The number; 1 if no launcher of ranks started this process, None if it does not say.

    >>> from extensor.distributed import launched_size
    >>> launched_size({"PMI_RANK": "3", "PMI_SIZE": "4"}), launched_size({})
    (4, 1)
    """
    if launched_rank(environment) is None:
        return 1
    return next((int(environment[name]) for name in SIZES if name in environment), None)


def refuse_ranks(command: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why a command that works in one process cannot go on, if several ranks were started.

    Args:
        command: its name.
        environment: of the process.

    Returns:
        The message; None on one rank.

    >>> from extensor.distributed.launch import refuse_ranks
    >>> refuse_ranks("compare", {"PMI_RANK": "0", "PMI_SIZE": "2"})
    'compare: expected one process, got 2 ranks, which would do the same work at once; the way \
out: start it without mpirun or srun. Of all commands, train runs on several ranks'
    """
    size = launched_size(environment)
    if size == 1:
        return None
    return (
        f"{command}: expected one process, got {'several' if size is None else size} ranks, which "
        "would do the same work at once; the way out: start it without mpirun or srun. Of all "
        "commands, train runs on several ranks"
    )


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
