"""`train`: one run from its configuration to its result, in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from extensor.backends.registry import get as get_backend

from .callbacks import (
    Callback,
    EarlyStopping,
    JsonLines,
    SaveCheckpoint,
    ShowMemory,
    ShowProgress,
    Telemetry,
    TensorBoard,
)
from .choices import OPTIMIZERS
from .config import RunConfig
from .loop import Trainer
from .result import print_summary
from .rundir import LAST, UsageError, claim

__all__ = ["train"]


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: bool,
    console: Console,
    telemetry: int = 0,
    memory: bool = False,
    graph: bool = False,
) -> dict[str, Any]:
    """Run a configuration into a folder, and say how it went.

    Args:
        config: what to run.
        out: its folder.
        resume: whether to go on from its last checkpoint.
        console: where it reports.
        telemetry: steps between records of `Telemetry`; 0 records nothing.
        memory: whether the first step's memory is shown; see `ShowMemory`.
        graph: whether steps are captured in a CUDA graph and replayed.

    Raises:
        UsageError: if the folder or the configuration do not allow it.
        DataError: if the data set is missing or damaged.
        Interrupted: see `Trainer.fit`.
    """
    if graph:
        _check_graph(config, telemetry, memory)
    board = TensorBoard()
    callbacks: list[Callback] = [JsonLines(), board, ShowProgress(console)]
    if telemetry:
        callbacks.append(Telemetry(telemetry, board))
    if memory:
        callbacks.append(ShowMemory(console))
    if config.patience:
        callbacks.append(EarlyStopping(config.patience))
    callbacks.append(SaveCheckpoint())
    try:
        get_backend(config.device)
    except RuntimeError as error:
        raise UsageError(f"--device {config.device}: {error}") from error
    try:
        trainer = Trainer(config, out, callbacks=callbacks, graph=graph)
        claim(out, config, resume=resume)
        if resume:
            trainer.load(out / LAST)
            done = trainer.position
            console.print(f"resuming in epoch {done.epoch}, after step {done.step}")
    except ValueError as error:
        raise UsageError(str(error)) from error
    result = trainer.fit()
    print_summary(trainer, result, console)
    return result


def _check_graph(config: RunConfig, telemetry: int, memory: bool) -> None:
    """Refuse what a CUDA graph cannot replay.

    Raises:
        UsageError: naming it.
    """
    *others, last = [name for name, cls in OPTIMIZERS.items() if cls.multi_tensor]
    for good, what, way_out in (
        (config.device != "cpu", "a GPU replays the steps", "add --device cuda"),
        (
            OPTIMIZERS[config.optimizer].multi_tensor,
            f"{config.optimizer} is not captured",
            f"{', '.join(others)} or {last}",
        ),
        (
            config.schedule != "reduce_lr_on_plateau",
            f"{config.schedule} changes the learning rate between steps",
            "another --schedule",
        ),
        (
            not config.resolved_recipe.adaptive_scale_rule,
            f"{config.recipe} changes its layers' scale rules between steps",
            "a recipe that does not",
        ),
        (
            not telemetry,
            "telemetry looks at gradients in the middle of a step",
            "leave --telemetry out",
        ),
        (
            not memory,
            "the ledger of memory follows a step of Python",
            "leave --memory out",
        ),
    ):
        if not good:
            raise UsageError(f"--graph: {what}; the way out: {way_out}, or leave --graph out")
