"""`train`: one run from its configuration to its result, in a folder of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

import extensor as et
from extensor.backends.registry import get as get_backend
from extensor.distributed import Communicator, LocalCommunicator, on_device
from extensor.inspect import MemoryPlan as PartsKept
from extensor.inspect.memory import KINDS, memory_ledger

from .callbacks import (
    Callback,
    EarlyStopping,
    InterruptAfter,
    Interval,
    JsonLines,
    SaveCheckpoint,
    ShowMemory,
    ShowProgress,
    Telemetry,
    TensorBoard,
)
from .callbacks.memory import explain
from .choices import OPTIMIZERS
from .config import RunConfig
from .data import DataError
from .loop import Trainer, open_run
from .memory import MemoryPlan, gradient_bytes
from .memory_limit import fit_memory
from .ranks import agree_on_errors, check_start
from .result import print_summary
from .rundir import UsageError, claim

__all__ = ["plan_memory", "train"]


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: bool,
    console: Console,
    telemetry: Interval = 0,
    memory: bool = False,
    memory_limit: int | None = None,
    graph: bool = False,
    ranks: Communicator | None = None,
    save_steps: int = 0,
    until_epoch: int = 0,
) -> dict[str, Any]:
    """Run a configuration into a folder, and say how it went.

    Args:
        config: what to run.
        out: its folder.
        resume: whether to go on from its last checkpoint.
        console: where it reports.
        telemetry: steps between records of `Telemetry`, or "auto"; 0 records nothing.
        memory: whether a plan and the first step's memory are shown; see `ShowMemory`.
        memory_limit: bytes that a step may take; None sets none. See `fit_memory`.
        graph: whether steps are captured in a CUDA graph and replayed.
        ranks: who trains together; None is this process alone.
        save_steps: steps between checkpoints beside those of epochs; 0 writes none.
        until_epoch: the epoch after which it is interrupted; 0 for none.

    Raises:
        RanksDiffer: if the ranks were started with different settings, versions or data.
        UsageError: if the folder or the configuration do not allow it.
        DataError: if the data set is missing or damaged.
        Interrupted: see `Trainer.fit`.
    """
    try:
        ranks = LocalCommunicator() if ranks is None else on_device(ranks, config.device)
    except RuntimeError as missing:
        raise UsageError(f"--device {config.device}: {missing}") from missing
    if ranks.size > 1 and not config.micro_batches and not resume:
        parts = -(-ranks.size // config.tensor_parallel)
        config = dataclasses.replace(config, micro_batches=parts)
    error: Exception | None = None
    try:
        if graph:
            _check_graph(config, bool(telemetry) and ranks.size > 1, memory)
        if telemetry and config.update == "in_backward":
            raise UsageError(
                "--telemetry: looks at all gradients, and --update in_backward lets each go; the "
                "way out: leave one of the two out"
            )
        if config.tensor_parallel > 1 and (telemetry or memory):
            flag = "--telemetry" if telemetry else "--memory"
            raise UsageError(
                f"{flag}: one rank looks at the whole model, and with --tensor-parallel it has a "
                "part of each block; the way out: leave one of the two out"
            )
        if config.shard == "parameters" and ranks.size > 1 and telemetry:
            raise UsageError(
                "--telemetry: one rank looks at the whole model, and with --shard parameters it "
                "has its parts alone; the way out: leave one of the two out, or --shard gradients"
            )
        kept = None
        if memory_limit is not None:
            kept = _parts_kept(config, out, memory_limit, console, ranks)
        plan = plan_memory(config, out, None, console, kept) if memory and not ranks.rank else None
        watchers = _callbacks(config, console, telemetry, plan, ranks, save_steps)
        if until_epoch:
            watchers.append(InterruptAfter(until_epoch))
        trainer = _prepare(config, out, resume, watchers, graph, ranks)
        if 0 < until_epoch < trainer.position.epoch:
            raise UsageError(
                f"--until-epoch {until_epoch}: nothing to do, the run in {out} has done "
                f"{trainer.position.epoch - 1} epochs; the way out: a later epoch, or leave "
                "--until-epoch out to train to the end"
            )
        if kept is not None:
            kept.apply(trainer.model)
    except (UsageError, DataError, OSError) as found:
        error = found
    if ranks.size > 1:
        agree_on_errors(ranks, error)
    if error is not None:
        raise error
    check_start(trainer)
    if ranks.size > 1:
        shared = trainer.micro_batches.parts
        blocks = config.tensor_parallel
        tensor = f"; {blocks} ranks share each block" if blocks > 1 else ""
        console.print(f"{ranks.size} ranks share {shared} micro-batches{tensor}")
        if trainer.buckets is not None:
            path = trainer.buckets.buckets[0].reduction.path
            console.print(f"gradients: {config.grad_comm} through {path}", markup=False)
    if resume:
        done = trainer.position
        console.print(f"resuming in epoch {done.epoch}, after step {done.step}")
    result = trainer.fit()
    trainer.grid.close()
    if ranks.rank == 0:
        parts = trainer.parallel is not None or config.shard == "parameters"
        whole = open_run(out) if parts else trainer  # the other ranks have ended
        print_summary(whole, result, console)
    return result


def _parts_kept(
    config: RunConfig, out: Path, limit: int, console: Console, ranks: Communicator
) -> PartsKept:
    """What each part keeps, by steps of this process alone.

    Raises:
        UsageError: see `fit_memory`.
    """
    if ranks.size > 1:
        raise UsageError(
            "--memory-limit: measures steps of one process, and each of these ranks would choose "
            "for itself; the way out: --recompute, or leave --memory-limit out"
        )
    return fit_memory(_trainer(config, out), limit, console)


def plan_memory(
    config: RunConfig,
    out: Path,
    data: Any = None,
    console: Console | None = None,
    kept: PartsKept | None = None,
) -> MemoryPlan:
    """Measure the forward pass of a run's first micro-batch, on a model that is thrown away.

    It needs less memory than a step, and is gone before the run begins.

    Args:
        config: of the run.
        out: its folder; nothing is written there.
        data: as `Trainer` takes it.
        console: where it is said what does not fit.
        kept: what each part keeps, in place of what the settings say.

    Raises:
        UsageError: if the settings do not fit the model, the data or the machine.
        MemoryError: if the forward pass alone does not fit.
    """
    trainer = _trainer(config, out, data=data)
    if kept is not None:
        kept.apply(trainer.model)
    batch = next(iter(trainer.task.training(1, 0)))
    part = trainer.micro_batches.divide(batch)[0]
    small = et.ones((32, 32), device=config.device)
    _ = small @ small  # what a device makes once, such as cuBLAS' workspace, is no part of a step
    with memory_ledger(trainer.model, trainer.optimizer, config.device) as ledger:
        try:
            made = trainer.forward(part.batch, config.label_smoothing)
        except MemoryError:
            if console is not None:
                explain(console, config, trainer.model, trainer.optimizer, ledger.report())
            raise
        held = ledger.report().at(-1)
    del made
    kinds = dict.fromkeys(KINDS, 0)
    for one in held:
        kinds[one.kind] += one.nbytes
    kinds["gradients"] = gradient_bytes(config, trainer.model)
    return MemoryPlan(kinds, tuple(one for one in held if one.kind == "saved"))


def _callbacks(
    config: RunConfig,
    console: Console,
    telemetry: Interval,
    plan: MemoryPlan | None,
    ranks: Communicator,
    save_steps: int,
) -> list[Callback]:
    """Who watches the run; the files and the terminal are rank 0's."""
    stopping = [EarlyStopping(config.patience)] if config.patience else []
    if ranks.rank:
        return [*stopping, SaveCheckpoint(save_steps)]
    board = TensorBoard()
    callbacks: list[Callback] = [JsonLines(), board, ShowProgress(console)]
    if telemetry:
        callbacks.append(Telemetry(telemetry, board))
    return [*callbacks, ShowMemory(console, plan), *stopping, SaveCheckpoint(save_steps)]


def _prepare(
    config: RunConfig,
    out: Path,
    resume: bool,
    callbacks: list[Callback],
    graph: bool,
    ranks: Communicator,
) -> Trainer:
    """The run before its next step, its folder claimed."""
    trainer = _trainer(config, out, callbacks=callbacks, graph=graph, ranks=ranks)
    try:
        if ranks.rank == 0:
            claim(out, config, resume=resume)
        if resume:
            trainer.load(trainer.last)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return trainer


def _trainer(config: RunConfig, out: Path, **more: Any) -> Trainer:
    """The run before its first step.

    Raises:
        UsageError: if the settings do not fit the model, the data or the machine.
    """
    try:
        get_backend(config.device)
    except RuntimeError as error:
        raise UsageError(f"--device {config.device}: {error}") from error
    try:
        return Trainer(config, out, **more)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_graph(config: RunConfig, one_rank_looks: bool, memory: bool) -> None:
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
            not one_rank_looks,
            "for --telemetry one rank makes some steps in Python, which others replay",
            "leave --telemetry out, or one rank",
        ),
        (
            not memory,
            "the ledger of memory follows a step of Python",
            "leave --memory out",
        ),
    ):
        if not good:
            raise UsageError(f"--graph: {what}; the way out: {way_out}, or leave --graph out")
