"""Several ranks: processes that train one model together, over MPI, with GPUs over NCCL.

A rank is one process with its number. A communicator carries arrays between ranks. `connect` gives
the one that the program was started with: of ``mpirun -n 4``, of Slurm's ``srun --mpi=pmix``, or of
one rank.
"""

from __future__ import annotations

from extensor.distributed.agree import RanksDiffer, check_same
from extensor.distributed.checkpoint import load_sharded, save_sharded, share_of
from extensor.distributed.clip import clip_grad_norm, square_sum
from extensor.distributed.communicator import (
    CollectiveMismatch,
    CollectiveTimeout,
    Communicator,
    Work,
)
from extensor.distributed.gradients import GradientBuckets
from extensor.distributed.launch import connect, on_device
from extensor.distributed.local import LocalCommunicator, run_ranks
from extensor.distributed.nccl import NCCLCommunicator
from extensor.distributed.parameters import GatheredBuckets
from extensor.distributed.reduction import (
    GRAD_COMM,
    Bfloat16,
    Exact,
    Float32,
    GradientReduction,
    Mxint,
    make_reduction,
    padded_size,
)
from extensor.distributed.residuals import load_residuals, rescale_residuals, residuals
from extensor.distributed.tensor_parallel import TensorParallel
from extensor.distributed.zero import SHARDS, ShardedBuckets, ShardedOptimizer
from extensor.launcher import launched_rank, launched_size

__all__ = [
    "GRAD_COMM",
    "SHARDS",
    "Bfloat16",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Exact",
    "Float32",
    "GatheredBuckets",
    "GradientBuckets",
    "GradientReduction",
    "LocalCommunicator",
    "Mxint",
    "NCCLCommunicator",
    "RanksDiffer",
    "ShardedBuckets",
    "ShardedOptimizer",
    "TensorParallel",
    "Work",
    "check_same",
    "clip_grad_norm",
    "connect",
    "launched_rank",
    "launched_size",
    "load_residuals",
    "load_sharded",
    "make_reduction",
    "on_device",
    "padded_size",
    "rescale_residuals",
    "residuals",
    "run_ranks",
    "save_sharded",
    "share_of",
    "square_sum",
]
