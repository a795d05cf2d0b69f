"""The training loop: forward, loss, scaled backward, step; evaluation; exactly resumed checkpoints.

The task (`training.tasks`) says what is learnt from which data. Everything that a step depends on
is a pure function of (config, step), such as the order of the data, the learning rate and the
random bits of stochastic rounding, or it is in the checkpoint: weights, optimizer and scaler state,
position, history. So on the CPU a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from extensor import ExTensor, capture, cross_entropy, models, no_grad, take
from extensor.autograd.apply import wrap
from extensor.distributed import (
    Communicator,
    GatheredBuckets,
    GradientBuckets,
    LocalCommunicator,
    RanksDiffer,
    ShardedBuckets,
    ShardedOptimizer,
    rescale_residuals,
)
from extensor.distributed import clip_grad_norm as clip_in_any_order
from extensor.inspect import SlotHealth
from extensor.nn import apply_recipe, cast_weights, recompute, switch_recipe
from extensor.nn.recipe import assign_recipe
from extensor.nn.recompute import parse_recompute
from extensor.optim import MXGradScaler, ReduceLROnPlateau, Warmup, clip_grad_norm
from extensor.quant import QuantStats

from .batch import Batch
from .callbacks import Callback
from .checkpoints import load_run, save_run
from .config import ACTIVATIONS, RunConfig
from .data import prefetch
from .metrics import Scores, label_ranks
from .micro_batches import MicroBatch, MicroBatches, Outcome
from .optimizers import make_optimizer, make_schedule
from .parallel import check_optimizer, grid_of, split_blocks
from .ranks import check_captured, check_weights
from .records import EpochReport, Position, StepReport, finite, share
from .result import build_result, slot_healths
from .rundir import RESULT, UsageError, checkpoint_in, write_json
from .runs import RUNS
from .signals import on_signals
from .tasks import TASKS, Task

__all__ = ["Interrupted", "Trainer"]

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


@dataclass(frozen=True)
class _Made:
    """A step that was made, or was given to the GPU.

    Attributes:
        step, batch: as of `StepReport`.
        lr: the learning rate it used.
        read: waits for it, and gives what it did and whether its gradients were finite.
    """

    step: int
    batch: int
    lr: float
    read: Callable[[], tuple[Outcome, bool]]


class Trainer:
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
        self.config, self.out, self.callbacks = config, out, list(callbacks)
        self.ranks = LocalCommunicator() if ranks is None else ranks
        self.task: Any = TASKS[RUNS[config.model].task](config, data) if task is None else task
        self.batches = self.task.batches
        self.model_config = models.config(config.model, config.variant, **self.task.shapes())
        self.grid = grid_of(self.ranks, config.tensor_parallel)
        self.model = self.fresh_model()
        self.parameter_count = sum(param.size for param in self.model.parameters())
        self.quant = apply_recipe(
            self.model, config.resolved_recipe, config.seed, ACTIVATIONS[config.activations]
        )
        for phase in config.recipe_schedule.phases:  # a rule that matches nothing fails now
            assign_recipe(self.model, phase.recipe)
        self.parallel = split_blocks(self.model, self.grid, config)
        workers = self.grid.data.size
        parts = config.micro_batches or workers
        if parts > 1 and config.update == "in_backward":
            raise ValueError(
                f"--update in_backward: expected one micro-batch on one rank, got {parts}; leave "
                "--update out"
            )
        if config.update == "in_backward" and config.resolved_recipe.adaptive_scale_rule:
            raise ValueError(
                f"--update in_backward: {config.recipe} changes its layers' scale rules where "
                "steps are counted; take another recipe, or leave --update out"
            )
        if parts < workers:
            raise ValueError(
                f"--micro-batches: expected at least one for each of the {workers} ranks, "
                f"got {parts}; the way out: fewer ranks, or a new run of more micro-batches"
            )
        grid, parallel = self.grid, self.parallel
        self.micro_batches = MicroBatches(self.model, self.quant, parts, grid, parallel)
        self.optimizer = make_optimizer(self.model, config)
        if parallel is not None:
            check_optimizer(self.optimizer)
        self.buckets = self._make_buckets()
        self.schedule = make_schedule(config, self.batches)
        dynamic = config.loss_scale == "dynamic"
        self.scaler = MXGradScaler(
            self.quant,
            init_scale=65536.0 if dynamic else 1.0,
            growth_factor=2.0 if dynamic else 1.0,
        )
        self.graph = graph
        if graph:
            check_captured(self)
        self._captured = capture(self._whole_step) if graph else None
        self._unread: list[_Made] = []
        self.position = Position()
        self.history: list[EpochReport] = []
        self.scores: Scores | None = None
        self.stop_reason: str | None = None
        self.diverged: str | None = None
        self._told_to_stop = self._interrupted = False
        self._consistent = True  # all of the state is of one step
        self._patience: float | None = None  # what `interrupt` shortened

    @property
    def last(self) -> Path:
        """The last checkpoint: a file, or a folder where each rank writes its part."""
        return checkpoint_in(self.out, self.config)

    @property
    def health(self) -> tuple[SlotHealth, ...]:
        """What quantizing did to each operand of each layer in the epoch so far."""
        return slot_healths(self)

    def fresh_model(self) -> Any:
        """The model as it is before the first step."""
        rng = np.random.default_rng(self.config.seed)
        model = models.build(self.config.model, self.model_config, rng)
        cast_weights(model, self.config.weights)
        for match, how in parse_recompute(self.config.recompute):
            try:
                recompute(model, match, how)
            except ValueError as error:
                raise ValueError(f"--recompute: {error}") from error
        return model.to(self.config.device)

    def whole(self) -> AbstractContextManager[None]:
        """Keep the weights whole inside, where each rank has a part; all ranks call it."""
        if isinstance(self.buckets, GatheredBuckets):
            return self.buckets.hold()
        return nullcontext()

    def stop(self, reason: str) -> None:
        """End the run after this epoch; the reason goes into the result."""
        self.stop_reason = reason

    def interrupt(self) -> None:
        """End the run after the step under way, on all ranks: save it and raise `Interrupted`."""
        self._told_to_stop = True
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
            if self._captured is not None:  # NCCL ends after the graphs that hold its calls
                self._captured.close()
        return result

    def advance(self, batches: Iterable[Batch]) -> list[StepReport]:
        """Make a step of each batch outside of `fit`, and wait for them; callbacks hear nothing."""
        for batch in batches:
            self._step(batch)
        return self._read()

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
                self._step(batch)
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
            or self._told_to_stop
            or any(callback.sees_step(position.step) for callback in self.callbacks)
        )

    def _step(self, batch: Batch) -> None:
        """One optimizer step; what it did is read later."""
        position = self.position
        self.quant.step = position.step
        self.schedule.apply(self.optimizer, position.step)
        self._follow_recipes(position.step)
        lr = float(self.optimizer.groups[0].options["lr"])
        read = self._replay(batch) if self.graph else self._eager(batch)
        position.step += 1
        position.batch += 1
        self._unread.append(_Made(position.step, position.batch, lr, read))
        self._consistent = True

    def _eager(self, batch: Batch) -> Callable[[], tuple[Outcome, bool]]:
        skipped = self.scaler.skipped
        done = self._accumulate(batch), self.scaler.skipped == skipped
        return lambda: done

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
            found.append((made, outcome.loss, good, replace(position)))
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

    def _follow_recipes(self, step: int) -> None:
        """Train with the recipe of a step; a captured step is captured anew where it changes."""
        steps = self.config.epochs * self.batches
        recipe = self.config.recipe_at(step, steps)
        if switch_recipe(self.model, self.quant, recipe) and self.graph:
            self._captured = capture(self._whole_step)

    def _accumulate(self, batch: Batch) -> Outcome:
        """Run this rank's micro-batches, add up the gradients of all, and update the weights."""
        micro = self.micro_batches
        mine = [part for part in micro.divide(batch) if part.index in micro.mine]
        micro.begin()
        self.optimizer.zero_grad()
        step, buckets = self.position.step, self.buckets
        gathers = isinstance(buckets, GatheredBuckets)
        with self.whole() if gathers and not micro.even(mine) else nullcontext():
            for part in micro.run(mine):
                last = part is mine[-1]
                with buckets.micro_batch(last=last, step=step) if buckets else nullcontext():
                    self._backward(part)
        if self.buckets is not None:
            self.buckets.finish(step)
        if self.parallel is not None:
            self.parallel.finish()
        outcome = micro.end(self._told_to_stop)
        if self.config.update == "after_backward":
            self._update(batch)
        return outcome

    def _make_buckets(self) -> GradientBuckets | None:
        """What sums gradients over micro-batches and ranks; None where one rank adds floats."""
        config, ranks = self.config, self.grid.data
        if ranks.size == 1 and config.grad_comm == "float32" and config.shard == "none":
            return None
        how: dict[str, Any] = {"clock": self.quant}
        if "mxint" in config.grad_comm:
            how["error_feedback"] = config.error_feedback
        args = (list(self.model.parameters()), ranks, config.grad_comm)
        if config.shard == "none":
            return GradientBuckets(*args, seed=config.seed, **how)
        how["seed"] = config.seed
        if config.shard == "parameters":
            sharded: ShardedBuckets = GatheredBuckets(self.model, *args[1:], **how)
        else:
            sharded = ShardedBuckets(*args, keep_gradients=config.shard == "states", **how)
        self.optimizer = ShardedOptimizer(self.optimizer, sharded)
        return sharded

    def _updates_in_backward(self) -> AbstractContextManager[None]:
        """What a backward pass runs in: there parameters move, if the run says so."""
        inside = self.config.update == "in_backward"
        return self.optimizer.step_in_backward() if inside else nullcontext()

    def _backward(self, part: MicroBatch) -> None:
        """Add a micro-batch's share to the gradients."""
        rows, labels, loss = self.forward(part.batch, self.config.label_smoothing)
        weighted = loss if part.weight == 1.0 else loss * part.weight
        with self._updates_in_backward():
            self.scaler.scale(weighted).backward()
        hits = int((label_ranks(rows, labels) == 0).sum())
        self.micro_batches.record(part, float(loss.item()), hits)

    def _update(self, batch: Batch | None = None) -> bool | ExTensor:
        """Unscale and clip the gradients, and make the optimizer's step if they are finite.

        Returns:
            Whether they were not.
        """
        self._consistent = False
        self.scaler.unscale_(self.optimizer)
        if batch is not None:
            for callback in self.callbacks:
                callback.on_gradients(self, batch)
        if self.config.clip_norm and self.parallel is not None:
            split = self.parallel.split
            params = dict(self.model.named_parameters())
            whole = [param for name, param in params.items() if name not in split]
            parts = [params[name] for name in sorted(split)]
            clip_in_any_order(parts, self.config.clip_norm, self.grid.tensor, whole)
        elif self.config.clip_norm and (self.buckets is None or self.graph):
            clip_grad_norm(self.optimizer.params, self.config.clip_norm, nonfinite="return")
        elif self.config.clip_norm:
            holders = None if self.config.shard == "none" else self.ranks
            clip_in_any_order(self.optimizer.params, self.config.clip_norm, holders)
        self.scaler.step(self.optimizer)
        bad = self.scaler.found_nonfinite(self.optimizer)
        if not self.config.error_feedback:
            self.scaler.update()
            return bad
        before = self.scaler.current_scale
        self.scaler.update()
        assert self.buckets is not None
        if (factor := self.scaler.current_scale / before) != 1.0:
            rescale_residuals(self.buckets, factor)
        return bad

    def _replay(self, batch: Batch) -> Callable[[], tuple[Outcome, bool]]:
        """The step as a CUDA graph; on one rank without waiting for it."""
        micro = self.micro_batches
        mine = [part for part in micro.divide(batch) if part.index in micro.mine]
        if not mine:
            raise UsageError(
                f"--graph: expected rows for each of {self.ranks.size} ranks in each batch, got "
                f"none in step {self.position.step + 1}; the way out: another --batch-size"
            )
        assert self._captured is not None
        self._consistent = self.ranks.size == 1  # a broken replay updates in part
        micro.begin()
        for part in micro.run(mine):
            inputs, labels, _ = self._arguments(part.batch)
            weight = np.full((), part.weight, np.float32)
            loss, hits, bad = self._captured(*map(self._tensor, (inputs, labels, weight)))
        if self.ranks.size == 1:
            count = part.batch.count

            def read() -> tuple[Outcome, bool]:
                values = float(loss.item()), int(hits.item())
                return Outcome(*values, count, self._told_to_stop), not bad.item()

            return read
        self.ranks.synchronize()
        micro.record(part, float(loss.item()), int(hits.item()))
        done = micro.end(self._told_to_stop), not bad.item()
        return lambda: done

    def _whole_step(
        self, inputs: ExTensor, labels: ExTensor, weight: ExTensor
    ) -> tuple[ExTensor, ExTensor, ExTensor]:
        """Forward, backward, the ranks' sums and update in one captured piece.

        Returns:
            The loss, labels that got the largest score, whether the gradients were not finite.
        """
        self.optimizer.zero_grad()
        rows, loss = self._forward(inputs, labels, smoothing=self.config.label_smoothing)
        backend = rows.backend
        hits = (backend.label_ranks(rows.data, labels.data) == 0).sum()
        if self.buckets is None:
            with self._updates_in_backward():
                self.scaler.scale(loss).backward()
        else:
            with self.buckets.micro_batch(last=True, step=self.quant.step):
                self.scaler.scale(loss * weight).backward()
            self.quant.micro_batch = 0  # the update's random bits are the whole batch's
            self.buckets.finish(self.quant.step)
            self.ranks.synchronize()
        if self.config.update == "in_backward":
            return loss, wrap(hits, backend), wrap(backend.xp.zeros((), np.bool_), backend)
        bad = self._update()
        if isinstance(bad, bool):
            bad = self._tensor(np.array(bad))
        return loss, wrap(hits, backend), bad

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
        check_weights(self)
        self.history.append(report)
        self._observe(report)
        position.next_epoch()
        for callback in self.callbacks:
            callback.on_epoch(self, report)
        if position.epoch <= self.config.epochs and not self.stop_reason:
            self._agree_to_stop()
            self._stop_if_interrupted()

    def evaluate(self, part: Literal["test", "validation"] = "test") -> Scores:
        """Metrics of a part of the data, as the recipe's forward pass sees them.

        What it quantizes is not counted: counts are of training.
        """
        scores, drawn = self.task.scores(), getattr(self.task, part)(self.task.eval_batch)
        mine: list[Scores] = []
        workers = self.grid.data
        counts = dict(self.quant.telemetry)
        self.quant.step = self.position.step  # the same random bits at any time, resumed or not
        self.model.eval()
        try:
            with no_grad(), self.whole():
                for index, batch in enumerate(drawn):
                    if index % workers.size == workers.rank:
                        self.quant.micro_batch = index
                        mine.append(self.task.scores())
                        rows, labels, loss = self.forward(batch)
                        mine[-1].add(rows, labels, float(loss.item()))
            everyone = workers.all_gather_object(mine)
        finally:
            self.quant.micro_batch = 0
            self.model.train()
            self.quant.load_telemetry(counts)
        for number in range(sum(map(len, everyone))):  # in the order of batches
            scores.merge(everyone[number % workers.size][number // workers.size])
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

    def _tensor(self, array: np.ndarray) -> ExTensor:
        return ExTensor.from_numpy(array).to(self.config.device)

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically: all ranks their parts, or rank 0 what all ranks have."""
        parts = self.config.sharded_checkpoint or self.parallel is not None
        if self.ranks.rank == 0 or parts:
            with self.whole():
                save_run(self, path)

    def _save_alone(self) -> None:
        """Save the last finished step, whichever ranks are left; not where a part is lost."""
        self.micro_batches.rewind()
        parts = self.config.sharded_checkpoint or self.parallel is not None
        if self._consistent and not parts:
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
        self._follow_recipes(max(self.position.step - 1, 0))  # as evaluation finds it
        for report in self.history:
            self._observe(report)

    def _stop_if_interrupted(self) -> None:
        if self._interrupted or (self._told_to_stop and self.ranks.size == 1):
            if self._patience is not None:  # a step later all ranks have heard: none is dead
                self.grid.set_timeout(self._patience)
            self.save(self.last)
            self.ranks.barrier()
            raise Interrupted

    def _agree_to_stop(self) -> None:
        """Tell all ranks if one was told to stop between steps."""
        told = np.array([self._told_to_stop], np.int8)
        self.ranks.all_reduce(told, "max").wait()
        self._interrupted |= bool(told[0])
