"""The training loop: forward, loss, scaled backward, step; evaluation; exactly resumed checkpoints.

The task (`training.tasks`) says what is learnt from which data. Everything that a step depends on
is a pure function of (config, step), such as the order of the data, the learning rate and the
random bits of stochastic rounding, or it is in the checkpoint: weights, optimizer and scaler state,
position, history. So on the CPU a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np

from extensor import ExTensor, capture, cross_entropy, models, no_grad, take
from extensor.inspect import SlotHealth
from extensor.io import load_checkpoint, save_checkpoint
from extensor.nn import apply_recipe, switch_recipe
from extensor.nn.recipe import assign_recipe
from extensor.optim import MXGradScaler, ReduceLROnPlateau, Warmup, clip_grad_norm
from extensor.quant import QuantArray, QuantStats

from .batch import Batch
from .callbacks import Callback
from .config import ACTIVATIONS, RunConfig
from .data import prefetch
from .metrics import Scores, top_k_hits
from .optimizers import make_optimizer, make_schedule
from .records import EpochReport, Position, StepReport, finite, share
from .result import build_result, slot_healths
from .rundir import LAST, RESULT, UsageError, write_json
from .runs import RUNS
from .signals import on_signals
from .tasks import TASKS

__all__ = ["Interrupted", "Trainer"]

PREFETCH = 2
"""Batches that a thread makes ahead, while the step before computes."""
MAX_SKIPPED_IN_A_ROW = 50
"""More than the scaler needs to halve 65536 down to 1: what fails then fails for good."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; its checkpoint is written. No handler of errors catches it."""


class Trainer:
    """Trains one run, evaluates it, and saves and loads its checkpoints.

    Args:
        config: what to run.
        out: its folder; nothing is written before `fit`.
        data: the data; None loads what the config names.
        callbacks: who watches.
        graph: whether steps are captured in a CUDA graph and replayed; see `extensor.capture`.

    Raises:
        ValueError: if the settings do not fit the data, or a rule of the recipe matches no layer.
        DataError: if the data set is missing or damaged.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        data: Any = None,
        callbacks: Sequence[Callback] = (),
        graph: bool = False,
    ) -> None:
        self.config, self.out, self.callbacks = config, out, list(callbacks)
        self.task = TASKS[RUNS[config.model].task](config, data)
        self.batches = self.task.batches
        self.model_config = models.config(config.model, config.variant, **self.task.shapes())
        self.model = self.fresh_model()
        self.quant = apply_recipe(
            self.model, config.resolved_recipe, config.seed, ACTIVATIONS[config.activations]
        )
        for phase in config.recipe_schedule.phases:  # a rule that matches nothing fails now
            assign_recipe(self.model, phase.recipe)
        self.optimizer = make_optimizer(self.model, config)
        self.schedule = make_schedule(config, self.batches)
        dynamic = config.loss_scale == "dynamic"
        self.scaler = MXGradScaler(
            self.quant,
            init_scale=65536.0 if dynamic else 1.0,
            growth_factor=2.0 if dynamic else 1.0,
        )
        self.graph = graph
        self._compute = capture(self._device_step) if graph else self._device_step
        self._batch: Batch | None = None
        self.position = Position()
        self.history: list[EpochReport] = []
        self.scores: Scores | None = None
        self.stop_reason: str | None = None
        self.diverged: str | None = None
        self._interrupted = False

    @property
    def health(self) -> tuple[SlotHealth, ...]:
        """What quantizing did to each operand of each layer in the epoch so far."""
        return slot_healths(self)

    def fresh_model(self) -> Any:
        """The model as it is before the first step."""
        rng = np.random.default_rng(self.config.seed)
        return models.build(self.config.model, self.model_config, rng).to(self.config.device)

    def stop(self, reason: str) -> None:
        """End the run after this epoch; the reason goes into the result."""
        self.stop_reason = reason

    def interrupt(self) -> None:
        """End the run after the step under way: save it and raise `Interrupted`."""
        self._interrupted = True

    def fit(self) -> dict[str, Any]:
        """Train to the end from where the run is; returns the result, also in result.json.

        Raises:
            Interrupted: after SIGINT or SIGTERM, once the step under way is done and saved.
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
            write_json(self.out / RESULT, result)
        finally:
            for callback in self.callbacks:
                callback.on_end(self, result)
        return result

    # --- one epoch ------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        position = self.position
        if not position.batch:  # else the epoch is resumed
            self.quant.reset_telemetry()
        ahead = prefetch(self.task.training(position.epoch, position.batch), PREFETCH)
        clock = time.perf_counter()
        with closing(ahead) as batches:  # however the epoch ends, the thread ends with it
            for batch in batches:
                position.epoch_waited += time.perf_counter() - clock
                loss, lr, good = self._step(batch)
                now = time.perf_counter()
                position.epoch_seconds += now - clock
                position.seconds += now - clock
                clock = now
                report = self._step_report(loss, lr, not good)
                for callback in self.callbacks:
                    callback.on_step(self, report)
                if position.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                    self.diverged = f"no finite gradients in {MAX_SKIPPED_IN_A_ROW} steps in a row"
                    self.stop(self.diverged)
                    break
                self._stop_if_interrupted()

    def _step(self, batch: Batch) -> tuple[float, float, bool]:
        """One optimizer step: (loss, learning rate, whether the gradients were finite)."""
        position = self.position
        self.quant.step = position.step
        self.schedule.apply(self.optimizer, position.step)
        self._follow_recipes(position.step)
        lr = float(self.optimizer.groups[0].options["lr"])
        self._batch, skipped = batch, self.scaler.skipped
        inputs, labels, places = self._arguments(batch)
        rows, loss = self._compute(*map(self._tensor, (inputs, labels, *places)))
        good = self.scaler.skipped == skipped
        value, count = float(loss.item()), batch.count
        position.step += 1
        position.batch += 1
        position.count += count
        position.loss_sum += value * count
        position.hits += top_k_hits(rows.numpy(), labels, 1)
        position.skipped += not good
        position.skipped_in_a_row = 0 if good else position.skipped_in_a_row + 1
        return value, lr, good

    def _follow_recipes(self, step: int) -> None:
        """Train with the recipe of a step; a captured step is captured anew where it changes."""
        steps = self.config.epochs * self.batches
        recipe = self.config.recipe_at(step, steps)
        if switch_recipe(self.model, self.quant, recipe) and self.graph:
            self._compute = capture(self._device_step)

    def _device_step(
        self, inputs: ExTensor, labels: ExTensor, *places: ExTensor
    ) -> tuple[ExTensor, ExTensor]:
        """Forward, backward and update; nothing is read back to the host: (scores, loss)."""
        self.optimizer.zero_grad()
        rows, loss = self._forward(inputs, labels, *places, smoothing=self.config.label_smoothing)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if not self.graph:
            assert self._batch is not None
            for callback in self.callbacks:
                callback.on_gradients(self, self._batch)
        if self.config.clip_norm:
            clip_grad_norm(self.optimizer.params, self.config.clip_norm, nonfinite="return")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return rows, loss

    def forward(self, batch: Batch, smoothing: float = 0.0) -> tuple[ExTensor, Any, ExTensor]:
        """A row of scores for each label, the labels in a row, and the mean loss of the batch."""
        inputs, labels, places = self._arguments(batch)
        tensors = map(self._tensor, (inputs, labels, *places))
        rows, loss = self._forward(*tensors, smoothing=smoothing)
        return rows, labels, loss

    def _arguments(self, batch: Batch) -> tuple[Any, Any, list[Any]]:
        """Inputs, the labels in a row, and their places where not every position has a label."""
        labels = batch.labels.reshape(-1)
        places = np.flatnonzero(labels >= 0)
        if len(places) == len(labels):
            return batch.inputs, labels, []
        if self.graph:
            raise UsageError(
                "--graph: this task has labels at other places in each batch, so that no step is a "
                "replay of another; the way out: leave --graph out"
            )
        return batch.inputs, labels[places], [places]

    def _forward(
        self, inputs: ExTensor, labels: ExTensor, *places: ExTensor, smoothing: float
    ) -> tuple[ExTensor, ExTensor]:
        scores = self.model(inputs)
        rows = scores.reshape(-1, scores.shape[-1])
        if places:
            rows = take(rows, places[0], axis=0)
        return rows, cross_entropy(rows, labels, smoothing)

    def _end_epoch(self) -> None:
        position = self.position
        self.scores = scores = self.evaluate()
        held = self.evaluate("validation") if self.task.validates else None
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
        self.history.append(report)
        self._observe(report)
        position.next_epoch()
        for callback in self.callbacks:
            callback.on_epoch(self, report)
        if position.epoch <= self.config.epochs and not self.stop_reason:
            self._stop_if_interrupted()

    def evaluate(self, part: Literal["test", "validation"] = "test") -> Scores:
        """Metrics of a part of the data, as the recipe's forward pass sees them.

        What it quantizes is not counted: counts are of training.
        """
        scores, drawn = self.task.scores(), getattr(self.task, part)(self.task.eval_batch)
        counts = dict(self.quant.telemetry)
        self.quant.step = self.position.step  # the same random bits at any time, resumed or not
        self.model.eval()
        with no_grad():
            for batch in drawn:
                rows, labels, loss = self.forward(batch)
                scores.add(rows.numpy(), labels, float(loss.item()))
        self.model.train()
        self.quant.load_telemetry(counts)
        return scores

    def _observe(self, report: EpochReport) -> None:
        """Pass an epoch's loss to a schedule that reads one; never the loss of the test data."""
        schedule = self.schedule.then if isinstance(self.schedule, Warmup) else self.schedule
        loss = report.val_loss if self.task.validates else report.train_loss
        if isinstance(schedule, ReduceLROnPlateau) and loss is not None:
            schedule.observe(loss)

    def _shares(self) -> dict[str, float | None]:
        """Shares of the values quantized since the epoch began, over all layers and slots."""
        stats = sum(self.quant.telemetry.values(), QuantStats())
        return {
            "saturated": share(stats.saturated, stats.count),
            "flushed": share(stats.flushed, stats.count),
        }

    def _step_report(self, loss: float, lr: float, skipped: bool) -> StepReport:
        position = self.position
        return StepReport(
            step=position.step,
            epoch=position.epoch,
            batch=position.batch,
            batches=self.batches,
            loss=finite(loss),
            epoch_loss=finite(position.loss_sum / position.count),
            epoch_accuracy=position.hits / position.count,
            per_second=position.per_second,
            lr=lr,
            loss_scale=self.scaler.current_scale,
            skipped=skipped,
            skipped_steps=position.skipped,
            **self._shares(),
        )

    def _tensor(self, array: np.ndarray) -> ExTensor:
        return ExTensor.from_numpy(array).to(self.config.device)

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        optimizer = self.optimizer.state_dict()
        arrays = {k: v for k, v in optimizer.items() if isinstance(v, (np.ndarray, QuantArray))}
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in arrays.items()}
        metadata = {
            "config": self.config.as_dict(),
            "position": self.position.as_dict(),
            "history": [report.as_dict() for report in self.history],
            "optimizer": {k: v for k, v in optimizer.items() if k not in arrays},
            "scaler": self.scaler.state_dict(),
            "telemetry": [
                [*key, *dataclasses.astuple(counts)] for key, counts in self.quant.telemetry.items()
            ],
            "stop_reason": self.stop_reason,
            "diverged": self.diverged,
            "model": json.loads(json.dumps(dataclasses.asdict(self.model_config))),
            "task": self.task.state(),
        }
        save_checkpoint(path, tensors, metadata)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint that `save` wrote.

        Raises:
            CheckpointError: if the file is damaged.
            ValueError: if it belongs to another run.
        """
        checkpoint = load_checkpoint(path)
        metadata, tensors = checkpoint.metadata, checkpoint.tensors
        theirs, mine = metadata.get("config"), self.config.as_dict()
        if theirs:  # what a checkpoint does not name came later, and was as it is by default
            fields = dataclasses.fields(self.config)
            given = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
            theirs = given | theirs
        if theirs != mine:
            differ = sorted(k for k in mine if not theirs or theirs.get(k) != mine[k])
            raise ValueError(
                f"{path}: expected a checkpoint of this run, got one that differs in "
                f"{', '.join(differ)}; the way out: the checkpoint that this run wrote"
            )
        if metadata.get("task") != json.loads(json.dumps(self.task.state())):
            raise ValueError(
                f"{path}: expected a checkpoint of this run's data, got one of another tokenizer; "
                f"the way out: {self.config.dataset} as it was when the run began (the same "
                "Python for python_source, the same package tokenizers for bpe)"
            )
        parts: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        for name, value in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict({**metadata["optimizer"], **parts["optimizer"]})
        counts = {(row[0], row[1]): QuantStats(*row[2:]) for row in metadata["telemetry"]}
        self.quant.load_telemetry(counts)
        self.scaler.load_state_dict(metadata["scaler"])
        self.stop_reason, self.diverged = metadata["stop_reason"], metadata["diverged"]
        self.position = Position.from_dict(metadata["position"])
        self._follow_recipes(max(self.position.step - 1, 0))  # as evaluation finds it
        self.history = [EpochReport(**values) for values in metadata["history"]]
        for report in self.history:
            self._observe(report)

    def _stop_if_interrupted(self) -> None:
        if self._interrupted:
            self.save(self.out / LAST)
            raise Interrupted
