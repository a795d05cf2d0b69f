"""Ranks in a grid: some share each transformer block, the others have micro-batches of their own.

Neighbouring ranks share blocks (tensor parallel): they mostly have the fastest link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from extensor.distributed import Communicator, LocalCommunicator, TensorParallel
from extensor.nn import BatchNorm2d, Dropout
from extensor.optim import Optimizer

from .config import RunConfig

__all__ = ["RankGrid", "check_optimizer", "grid_of", "parameter_of", "split_blocks"]


@dataclass(frozen=True)
class RankGrid:
    """The communicators of a run.

    Attributes:
        all: every rank.
        data: those with the same part of the blocks, which share the micro-batches.
        tensor: those that share each block, and compute the same micro-batches.
    """

    all: Communicator
    data: Communicator
    tensor: Communicator

    def set_timeout(self, seconds: float) -> None:
        """Set the time limit of all collectives."""
        for ranks in (self.all, self.data, self.tensor):
            ranks.timeout = seconds

    def close(self) -> None:
        """Give back what `grid_of` split; all ranks call this together, after the last step."""
        for ranks in (self.data, self.tensor):
            if ranks is not self.all:
                ranks.close()


def grid_of(ranks: Communicator, tensor: int) -> RankGrid:
    """Divide ranks among data and tensor parallel groups; all ranks call this together.

    Raises:
        ValueError: unless ``tensor`` divides the number of ranks.
    """
    if tensor == 1:
        return RankGrid(ranks, ranks, LocalCommunicator())
    if ranks.size % tensor:
        raise ValueError(
            f"--tensor-parallel: expected a number of ranks that {tensor} divides, got "
            f"{ranks.size}; the way out: mpirun -n {-(-ranks.size // tensor) * tensor}"
        )
    data = ranks.split(ranks.rank % tensor)
    return RankGrid(ranks, data, ranks.split(ranks.rank // tensor))


def split_blocks(model: Any, grid: RankGrid, config: RunConfig) -> TensorParallel | None:
    """Split a model's blocks, if several ranks share them.

    Raises:
        ValueError: for a model or a recipe that cannot be split.
    """
    size = grid.tensor.size
    if size == 1:
        return None
    if config.resolved_recipe.adaptive_scale_rule or len(config.recipe_schedule.phases) > 1:
        raise ValueError(
            f"--tensor-parallel: expected one recipe with fixed scale rules, got {config.recipe}; "
            "the way out: another --recipe, or leave --tensor-parallel out"
        )
    kinds = {type(m).__name__ for m in model.modules() if isinstance(m, BatchNorm2d | Dropout)}
    if kinds:
        raise ValueError(
            f"--tensor-parallel: expected a model without {' and '.join(sorted(kinds))}, whose "
            "statistics and random bits are of whole layers; the way out: gpt or llama"
        )
    if config.context % size:
        raise ValueError(
            f"--tensor-parallel: expected a --context that {size} ranks divide, got "
            f"{config.context}"
        )
    try:
        return TensorParallel(model, grid.tensor)
    except ValueError as error:
        raise ValueError(f"--tensor-parallel: {error}") from error


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that looks at whole tensors, for blocks that are split.

    Raises:
        ValueError: naming it.
    """
    if not isinstance(optimizer, Optimizer) or not optimizer.is_elementwise:
        raise ValueError(
            f"--tensor-parallel: expected an optimizer that updates each value by itself, got "
            f"{type(optimizer).__name__}; the way out: sgd, adam, adamw, lion or rmsprop"
        )


def parameter_of(key: str) -> str:
    """The parameter that an array of an optimizer's state dict is of: ``state.<name>.<slot>``."""
    return key.removeprefix("state.").rpartition(".")[0] if key.startswith("state.") else ""
