"""The training loop: epochs of steps, evaluation, exactly resumed checkpoints.

The task (`training.tasks`) says what is learnt from which data; `training.step` is one step.
Everything that a step depends on is a pure function of (config, step), such as the order of the
data, the learning rate and the random bits of stochastic rounding, or it is in the checkpoint:
weights, optimizer and scaler state, position, history. So on the CPU a resumed run repeats an
uninterrupted one bit for bit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from extensor.distributed import Communicator, RanksDiffer
from extensor.inspect import SlotHealth
from extensor.optim import ReduceLROnPlateau, Warmup

from .batch import Batch
from .callbacks import Callback
from .checkpoints import load_run, save_run
from .config import RunConfig
from .data import prefetch
from .evaluation import evaluate
from .metrics import Scores
from .ranks import check_weights
from .records import EpochReport, StepReport, finite, share
from .result import build_result, slot_healths
from .rundir import (
    CONFIG,
    RESULT,
    UsageError,
    checkpoint_in,
    find_checkpoint,
    read_config,
    write_json,
)
from .runs import RUNS
from .signals import on_signals
from .step import MadeStep, TrainStep
from .tasks import TASKS, Task

__all__ = ["Interrupted", "Trainer", "open_run"]

PREFETCH = 2
"""Batches that a thread makes ahead, while the step before computes."""
READ_EVERY = 64
"""Captured steps whose results are read at once: reading waits for the GPU."""
MAX_SKIPPED_IN_A_ROW = 50
"""More than the scaler needs to halve 65536 down to 1: what fails then fails for good."""
GRACE_SECONDS = 0.2
"""How long a rank that was told to end waits for the others; a launcher kills it after a second."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; its checkpoint is written. No handler of errors catches it."""


class Trainer(TrainStep):
    """Trains one run, evaluates it, and saves and loads its checkpoints.

    Args:
        config: what to run.
        out: its folder; nothing is written before `fit`.
        data: the data; None loads what the config names.
        callbacks: who watches.
        graph: whether steps are captured in a CUDA graph and replayed; see `extensor.capture`.
        ranks: who trains together; None is this process alone.
        task: made of the data already, by a run of the same data; None makes it.

    Raises:
        ValueError: if there are more ranks than micro-batches, the settings do not fit the data, or
            a rule of the recipe matches no layer.
        DataError: if the data set is missing or damaged.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        data: Any = None,
        callbacks: Sequence[Callback] = (),
        graph: bool = False,
        ranks: Communicator | None = None,
        task: Task | None = None,
    ) -> None:
        task = TASKS[RUNS[config.model].task](config, data) if task is None else task
        super().__init__(config, task, graph, ranks)
        self.out, self.callbacks = out, list(callbacks)
        self.history: list[EpochReport] = []
        self.scores: Scores | None = None
        self.stop_reason: str | None = None
        self.diverged: str | None = None
        self._unread: list[MadeStep] = []
        self._interrupted = False
        self._patience: float | None = None  # what `interrupt` shortened

    @property
    def last(self) -> Path:
        """The last checkpoint: a file, or a folder where each rank writes its part."""
        return checkpoint_in(self.out, self.config)

    @property
    def health(self) -> tuple[SlotHealth, ...]:
        """What quantizing did to each operand of each layer in the epoch so far."""
        return slot_healths(self)

    def stop(self, reason: str) -> None:
        """End the run after this epoch; the reason goes into the result."""
        self.stop_reason = reason

    def interrupt(self) -> None:
        """End the run after the step under way, on all ranks: save it and raise `Interrupted`."""
        self.told_to_stop = True
        if self.ranks.size > 1 and self._patience is None:
            self._patience = self.ranks.timeout
            # The launcher may have said so since a rank is dead.
            self.grid.set_timeout(GRACE_SECONDS)

    def fit(self) -> dict[str, Any]:
        """Train to the end from where the run is; returns the result, also in result.json.

        Raises:
            Interrupted: after SIGINT or SIGTERM, once the step under way is done and saved.
            CollectiveTimeout: if a rank is dead or stuck. The last finished step is saved.
            DataError: if a batch holds values that are not finite.
        """
        result = None
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            with on_signals(lambda number, frame: self.interrupt(), once=True):
                while self.position.epoch <= self.config.epochs and not self.stop_reason:
                    self._train_epoch()
                    self._end_epoch()
            result = build_result(self)
            if self.ranks.rank == 0:
                write_json(self.out / RESULT, result)
        except Exception as error:
            if self.ranks.size > 1 and not isinstance(error, RanksDiffer):
                self._save_alone()
            raise
        finally:
            for callback in self.callbacks:
                callback.on_end(self, result)
            self.close()
        return result

    def advance(self, batches: Iterable[Batch]) -> list[StepReport]:
        """Make a step of each batch outside of `fit`, and wait for them; callbacks hear nothing."""
        for batch in batches:
            self._unread.append(self.step(batch))
        return self._read()

    def sees_gradients(self, step: int) -> bool:
        """Whether a callback looks into this step's gradients."""
        return any(callback.sees_gradients(step) for callback in self.callbacks)

    def see_gradients(self, batch: Batch) -> None:
        """Show the callbacks the unscaled gradients of an eager step."""
        for callback in self.callbacks:
            callback.on_gradients(self, batch)

    # --- one epoch ------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        position = self.position
        if not position.batch:  # else the epoch is resumed
            self.quant.reset_telemetry()
        whole = self.ranks.size == 1 or any(c.whole_batches for c in self.callbacks)
        mine = None if whole else self.micro_batches.rows
        ahead = prefetch(self.task.training(position.epoch, position.batch, mine), PREFETCH)
        clock = time.perf_counter()
        with closing(ahead) as batches:  # however the epoch ends, the thread ends with it
            for batch in batches:
                position.epoch_waited += time.perf_counter() - clock
                self._unread.append(self.step(batch))
                reports = self._read() if self._reads_now() else []
                now = time.perf_counter()
                position.epoch_seconds += now - clock
                position.seconds += now - clock
                clock = now
                for report in reports:
                    for callback in self.callbacks:
                        callback.on_step(self, report)
                if self.diverged:
                    self.stop(self.diverged)
                    break
                self._stop_if_interrupted()

    def _reads_now(self) -> bool:
        """Whether the results of the last steps are read before the next step; else later."""
        position = self.position
        return (
            not self.graph
            or self.ranks.size > 1  # all of them hear of an interrupt after the same step
            or len(self._unread) == READ_EVERY
            or position.batch == self.batches
            or self.told_to_stop
            or any(callback.sees_step(position.step) for callback in self.callbacks)
        )

    def _read(self) -> list[StepReport]:
        """Count what the last steps did; waits for them."""
        position, found = self.position, []
        for made in self._unread:
            outcome, good = made.read()
            position.count += outcome.count
            position.loss_sum += outcome.loss * outcome.count
            position.hits += outcome.hits
            position.skipped += not good
            position.skipped_in_a_row = 0 if good else position.skipped_in_a_row + 1
            if position.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                self.diverged = f"no finite gradients in {MAX_SKIPPED_IN_A_ROW} steps in a row"
            self._interrupted |= outcome.stop
            found.append((made, outcome.loss, good, dataclasses.replace(position)))
        self._unread.clear()
        scale, shares = self.scaler.current_scale, self._shares()
        return [
            StepReport(
                step=made.step,
                epoch=then.epoch,
                batch=made.batch,
                batches=self.batches,
                loss=finite(loss),
                epoch_loss=finite(then.loss_sum / then.count),
                epoch_accuracy=then.hits / then.count,
                per_second=then.per_second,
                lr=made.lr,
                loss_scale=scale,
                skipped=not good,
                skipped_steps=then.skipped,
                **shares,
            )
            for made, loss, good, then in found
        ]

    def _end_epoch(self) -> None:
        position = self.position
        self.scores = scores = evaluate(self)
        held = evaluate(self, "validation") if self.task.validates else None
        report = EpochReport(
            epoch=position.epoch,
            step=position.step,
            train_loss=finite(position.loss_sum / position.count),
            train_accuracy=position.hits / position.count,
            val_loss=None if held is None else finite(held.loss),
            val_accuracy=None if held is None else held.accuracy,
            val_perplexity=None if held is None else held.perplexity,
            test_loss=finite(scores.loss),
            test_accuracy=scores.accuracy,
            test_top3=scores.accuracy_k,
            test_perplexity=scores.perplexity,
            lr=float(self.optimizer.groups[0].options["lr"]),
            loss_scale=self.scaler.current_scale,
            seconds=position.epoch_seconds,
            per_second=position.per_second,
            waited=position.epoch_waited / max(position.epoch_seconds, 1e-9),
            skipped_steps=position.skipped,
            **self._shares(),
        )
        check_weights(self)
        self.history.append(report)
        self._observe(report)
        position.next_epoch()
        for callback in self.callbacks:
            callback.on_epoch(self, report)
        if position.epoch <= self.config.epochs and not self.stop_reason:
            self._agree_to_stop()
            self._stop_if_interrupted()

    def _observe(self, report: EpochReport) -> None:
        """Pass an epoch's loss to a schedule that reads one; never the loss of the test data."""
        schedule = self.schedule.then if isinstance(self.schedule, Warmup) else self.schedule
        loss = report.val_loss if self.task.validates else report.train_loss
        if isinstance(schedule, ReduceLROnPlateau) and loss is not None:
            schedule.observe(loss)

    def _shares(self) -> dict[str, float | None]:
        """Shares of the values quantized since the epoch began, over all layers and slots."""
        stats = self.quant.total
        return {
            "saturated": share(stats.saturated, stats.count),
            "flushed": share(stats.flushed, stats.count),
        }

    # --- checkpoints ----------------------------------------------------------------------------

    @property
    def _parts_are_saved(self) -> bool:
        """Whether a checkpoint needs what other ranks hold."""
        return self.config.sharded_checkpoint or self.parallel is not None

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically: all ranks their parts, or rank 0 what all ranks have."""
        if self.ranks.rank == 0 or self._parts_are_saved:
            with self.whole():
                save_run(self, path)

    def _save_alone(self) -> None:
        """Save the last finished step, whichever ranks are left; not where a part is lost."""
        self.micro_batches.rewind()
        if self.consistent and not self._parts_are_saved:
            with suppress(OSError):  # what ended the run is said, and may be a full disk
                save_run(self, self.last)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint that `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: if the file is damaged.
            ValueError: if it belongs to another run.
        """
        with self.whole():
            load_run(self, path)
        self.follow_recipes(max(self.position.step - 1, 0))  # as evaluation finds it
        for report in self.history:
            self._observe(report)

    def _stop_if_interrupted(self) -> None:
        if self._interrupted or (self.told_to_stop and self.ranks.size == 1):
            if self._patience is not None:  # a step later all ranks have heard: none is dead
                self.grid.set_timeout(self._patience)
            self.save(self.last)
            self.ranks.barrier()
            raise Interrupted

    def _agree_to_stop(self) -> None:
        """Tell all ranks if one was told to stop between steps."""
        told = np.array([self.told_to_stop], np.int8)
        self.ranks.all_reduce(told, "max").wait()
        self._interrupted |= bool(told[0])


def open_run(folder: Path) -> Trainer:
    """The run in a folder as its last checkpoint left it, in this process alone.

    Raises:
        UsageError: if there is no run, or no checkpoint yet.
        CheckpointError: if the checkpoint is damaged.
        DataError: if the data set is missing or damaged.
    """
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder}: expected the folder of a run, but {CONFIG} is not there; the way out: the "
            "--out of a run of `extensor train MODEL`"
        )
    # A checkpoint is the whole model's, also of ranks that shared its blocks.
    config = dataclasses.replace(read_config(folder), tensor_parallel=1)
    last = find_checkpoint(folder)
    if last is None:
        raise UsageError(
            f"{folder}: expected a run with a checkpoint, but none is there: its first epoch is "
            f"not done; the way out: extensor train {config.model} --out {folder} --resume"
        )
    try:
        trainer = Trainer(config, folder)
        trainer.load(last)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{folder}: {error}") from error
    return trainer
