"""`--memory-limit`: what a run's parts keep for backward, chosen so that its steps fit."""

from __future__ import annotations

import dataclasses
import re

from rich.console import Console

from extensor.inspect import MemoryLimitError, MemoryPlan
from extensor.inspect import plan_memory as plan_parts

from .callbacks.memory import explain
from .loop import Trainer
from .memory import repeated
from .records import Position
from .rundir import UsageError

__all__ = ["fit_memory", "parse_bytes"]

UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_bytes(text: str) -> int:
    """The bytes of "8GB", "7.5GiB" and their like.

    Raises:
        ValueError: for anything else.

    >>> parse_bytes("1.5GB")
    1500000000
    """
    found = re.fullmatch(rf"(\d+\.?\d*) ?({'|'.join(UNITS)})", text.strip())
    nbytes = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if nbytes < 1:
        raise ValueError(f"expected a size such as 8GB ({', '.join(UNITS)}), got {text!r}")
    return nbytes


def fit_memory(trainer: Trainer, limit: int, console: Console) -> MemoryPlan:
    """Choose what each numbered part of a run's model keeps, from steps of a model thrown away.

    Steps are whole: forward, backward and update of the run's first batch, without a CUDA graph.
    While they are measured they may take more than the limit.

    Args:
        trainer: the run before its first step, of its own, since its weights change.
        limit: bytes that arrays may take at a step's peak.
        console: where the choice is said.

    Raises:
        UsageError: if no choice fits, the model has no numbered parts, the recipe changes in the
            run, or --recompute chooses.
    """
    config = trainer.config
    if config.recompute:
        raise UsageError(
            "--memory-limit: it chooses what runs again, as --recompute does; the way out: leave "
            "one of the two out"
        )
    if len(config.recipe_schedule.phases) > 1:
        raise UsageError(
            "--memory-limit: it measures the first step, expected one recipe, got "
            f"{config.recipe}, whose later steps take other memory; the way out: one recipe, or "
            "--recompute in place of --memory-limit"
        )
    batch = next(iter(trainer.task.training(1, 0)))
    parts = repeated(trainer.model)
    if parts is None:
        raise UsageError(
            "--memory-limit: it chooses for numbered parts, such as blocks.0, and "
            f"{config.model} has none; the way out: leave it out"
        )

    def step() -> None:
        trainer.position = Position()  # each is the run's first
        trainer.step(batch)

    model, optimizer = trainer.model, trainer.optimizer
    try:
        plan = plan_parts(model, step, limit, parts, config.device, optimizer=optimizer)
    except MemoryLimitError as error:
        peak = _mb(error.report.peak)
        if error.out_of_memory:
            found = "every step runs out of memory, at"
            problem = (
                f"expected memory for {_mb(limit)}, it ran out at {peak} whatever parts keep; the "
                "way out: the settings above"
            )
        else:
            found = "the least that a step was found to take is"
            problem = (
                f"expected {peak} or more, which a step takes at least, got {_mb(limit)}; the way "
                "out: the settings above, or a larger limit"
            )
        chosen = dataclasses.replace(config, recompute=parts)  # which is no way out any more
        what = f"{found} {peak}; the largest holders:"
        explain(console, chosen, model, optimizer, error.report, what)
        raise UsageError(f"--memory-limit: {problem}") from None
    console.print(
        f"memory limit {_mb(limit)}: the first step's peak is {_mb(plan.peak)}; against keeping "
        f"the most, a step's time changes by {1e3 * plan.seconds:+.1f} ms"
    )
    for choice in dict.fromkeys(plan.choices.values()):
        paths = [path for path, keeps in plan.choices.items() if keeps == choice]
        console.print(f"  {choice}: {', '.join(paths)}")
    return plan


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
