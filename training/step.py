"""One training step: forward, scaled backward, the ranks' sums, the update; eager or captured.

What a step does depends on the configuration, its number and its batch, and on what is saved in a
checkpoint: weights, states of the optimizer, the loss scale. The loop around it is
`training.loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor import ExTensor, capture, cross_entropy, models, take
from extensor.autograd.tensor import wrap
from extensor.distributed import (
    Communicator,
    GatheredBuckets,
    GradientBuckets,
    LocalCommunicator,
    ShardedBuckets,
    ShardedOptimizer,
    rescale_residuals,
)
from extensor.distributed import clip_grad_norm as clip_in_any_order
from extensor.nn import apply_recipe, cast_weights, recompute, switch_recipe
from extensor.nn.recipe import assign_recipe
from extensor.nn.recompute import parse_recompute
from extensor.optim import MXGradScaler, clip_grad_norm

from .batch import Batch
from .config import RunConfig
from .metrics import label_ranks
from .micro_batches import MicroBatch, MicroBatches, Outcome
from .optimizers import make_optimizer, make_schedule
from .parallel import check_optimizer, grid_of, split_blocks
from .ranks import check_captured, check_parts
from .records import Position
from .rundir import UsageError
from .settings import ACTIVATIONS
from .tasks import Task

__all__ = ["MadeStep", "TrainStep"]


@dataclass(frozen=True)
class MadeStep:
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


class TrainStep:
    """A model in training, and what one step does to it.

    Args:
        config: of the run.
        task: what is learnt, from which data.
        graph: whether steps are captured in a CUDA graph and replayed; see `extensor.capture`.
        ranks: who trains together; None is this process alone.

    Raises:
        ValueError: if there are more ranks than micro-batches, the settings do not fit each other,
            or a rule of the recipe matches no layer.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        graph: bool = False,
        ranks: Communicator | None = None,
    ) -> None:
        self.config, self.graph = config, graph
        self.ranks = LocalCommunicator() if ranks is None else ranks
        self.task: Any = task
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
        check_parts(config, parts, workers)
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
        if graph:
            check_captured(self)
        self._captured = capture(self._whole_step) if graph else None
        self.position = Position()
        self.told_to_stop = False
        self.consistent = True  # all of the state is of one step

    def fresh_model(self) -> Any:
        """The model as it is before the first step."""
        rng = np.random.default_rng(self.config.seed)
        model = models.build(self.config.model, self.model_config, rng)
        cast_weights(model, self.config.weights)
        for match, how in reversed(parse_recompute(self.config.recompute)):  # the first wins
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

    def step(self, batch: Batch) -> MadeStep:
        """Make one optimizer step, or give it to the GPU; what it did is read later."""
        position = self.position
        self.quant.step = position.step
        self.schedule.apply(self.optimizer, position.step)
        self.follow_recipes(position.step)
        lr = float(self.optimizer.groups[0].options["lr"])
        replays = self.graph and not self.sees_gradients(position.step + 1)
        read = self._replay(batch) if replays else self._eager(batch)
        position.step += 1
        position.batch += 1
        self.consistent = True
        return MadeStep(position.step, position.batch, lr, read)

    def sees_gradients(self, step: int) -> bool:
        """Whether a step is made in Python, though others are replayed: here never."""
        return False

    def see_gradients(self, batch: Batch) -> None:
        """What the loop does with the unscaled gradients of an eager step: here nothing."""

    def close(self) -> None:
        """Let go of the captured step; NCCL ends after the graphs that hold its calls."""
        if self._captured is not None:
            self._captured.close()

    def follow_recipes(self, step: int) -> None:
        """Train with the recipe of a step; a captured step is captured anew where it changes."""
        steps = self.config.epochs * self.batches
        recipe = self.config.recipe_at(step, steps)
        if switch_recipe(self.model, self.quant, recipe) and self.graph:
            self._captured = capture(self._whole_step)

    def _eager(self, batch: Batch) -> Callable[[], tuple[Outcome, bool]]:
        skipped = self.scaler.skipped
        done = self._accumulate(batch), self.scaler.skipped == skipped
        return lambda: done

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
            self.buckets.start(step)
        micro.send(self.told_to_stop)  # beside the sum of the gradients
        if self.buckets is not None:
            self.buckets.finish(step)
            self.grid.data.synchronize()  # what reads the GPU next has no time limit
        if self.parallel is not None:
            self.parallel.finish()
        outcome = micro.end()
        if self.config.update == "after_backward":
            self._update(batch)
        return outcome

    def _updates_in_backward(self) -> AbstractContextManager[None]:
        """What a backward pass runs in: there parameters move, if the run says so."""
        inside = self.config.update == "in_backward"
        return self.optimizer.step_in_backward() if inside else nullcontext()

    def _backward(self, part: MicroBatch) -> None:
        """Add a micro-batch's share to the gradients."""
        rows, labels, loss = self.forward(part.batch, self.config.label_smoothing)
        weight = None if part.weight == 1.0 else self._tensor(np.full((), part.weight, np.float32))
        with self._updates_in_backward():
            self.scaler.scale(loss).backward(weight)
        hits = int((label_ranks(rows, labels) == 0).sum())
        self.micro_batches.record(part, float(loss.item()), hits, self._divided)

    @property
    def _divided(self) -> Container[tuple[str, str]]:
        """Weights' slots of which each rank quantizes its own rows."""
        buckets = self.buckets
        return buckets.packed_slots if isinstance(buckets, GatheredBuckets) else ()

    def _update(self, batch: Batch | None = None) -> bool | ExTensor:
        """Unscale and clip the gradients, and make the optimizer's step if they are finite.

        Returns:
            Whether they were not.
        """
        self.consistent = False
        self.scaler.unscale_(self.optimizer)
        if batch is not None:
            self.see_gradients(batch)
        sharded = self.config.shard != "none"
        if self.config.clip_norm and self.parallel is not None:
            split = self.parallel.split
            params = dict(self.model.named_parameters())
            whole = [param for name, param in params.items() if name not in split]
            parts = [params[name] for name in sorted(split)]
            clip_in_any_order(parts, self.config.clip_norm, self.grid.tensor, whole)
        elif self.config.clip_norm and (self.buckets is None or (self.graph and not sharded)):
            clip_grad_norm(self.optimizer.params, self.config.clip_norm, nonfinite="return")
        elif self.config.clip_norm:
            holders = self.ranks if sharded else None
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
        self.consistent = self.ranks.size == 1  # a broken replay updates in part
        micro.begin()
        for part in micro.run(mine):
            inputs, labels, _ = self._arguments(part.batch)
            weight = np.full((), part.weight, np.float32)
            loss, hits, bad = self._captured(*map(self._tensor, (inputs, labels, weight)))
        if self.ranks.size == 1:
            count = part.batch.count

            def read() -> tuple[Outcome, bool]:
                values = float(loss.item()), int(hits.item())
                return Outcome(*values, count, self.told_to_stop), not bad.item()

            return read
        self.ranks.synchronize()
        micro.record(part, float(loss.item()), int(hits.item()), self._divided)
        micro.send(self.told_to_stop)
        done = micro.end(), not bad.item()
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

    def _make_buckets(self) -> GradientBuckets | None:
        """What sums gradients over micro-batches and ranks; None where one rank adds floats."""
        config, ranks = self.config, self.grid.data
        if ranks.size == 1 and config.grad_comm == "float32" and config.shard == "none":
            return None
        how: dict[str, Any] = {"clock": self.quant}
        if "mxint" in config.grad_comm:
            how["error_feedback"] = config.error_feedback
        args = (list(self.model.parameters()), ranks, config.grad_comm)
        if config.shard == "none" or ranks.size == 1:  # one rank has all
            return GradientBuckets(*args, seed=config.seed, **how)
        how["seed"] = config.seed
        if config.shard == "parameters":
            sharded: ShardedBuckets = GatheredBuckets(self.model, *args[1:], **how)
        else:
            sharded = ShardedBuckets(*args, keep_gradients=config.shard == "states", **how)
        self.optimizer = ShardedOptimizer(self.optimizer, sharded)
        return sharded

    def _tensor(self, array: np.ndarray) -> ExTensor:
        return ExTensor.from_numpy(array).to(self.config.device)
