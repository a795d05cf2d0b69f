"""Which ranks a launcher such as mpirun started, by its environment variables; without MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["launched_rank", "launched_size", "refuse_ranks"]

LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""What Open MPI's mpirun, MPICH's or ``srun --mpi=pmi2``, and ``srun --mpi=pmix`` set."""
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


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

    >>> from extensor.launcher import refuse_ranks
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
