"""Micro-batches: the parts of a batch, which are the unit of work whatever the number of ranks.

A batch has a fixed number of micro-batches. Each is computed by one rank, as on every other number
of ranks: with random bits of its number in the batch (stochastic rounding, dropout), and with batch
norms that see this part alone. What a step leaves besides gradients is put together here: losses,
counts of quantizing, and the batch norms' running means, which move once a step, by the mean of the
micro-batches' own. Sums are taken in the order of micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.distributed import TensorParallel
from extensor.nn import BatchNorm2d, Dropout
from extensor.quant.recipe import SLOTS
from extensor.quant.recipe_state import COUNTS, RecipeState

from .batch import Batch, Whole
from .parallel import RankGrid

__all__ = ["MicroBatch", "MicroBatches", "Outcome", "shares"]

Slot = tuple[str, str]
"""A layer's path, and an operand of it."""

CALLS_APART = 1 << 32
"""Dropout counts its calls; a micro-batch begins this much above the one before it."""


def shares(count: int, parts: int) -> list[slice]:
    """Divide rows among parts as evenly as can be, the first ones larger; some may be empty."""
    ends = [-(-count * (i + 1) // parts) for i in range(parts)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        index: its number in the batch.
        batch: its inputs and labels.
        weight: its share of the batch's labels, which its mean loss counts with.
    """

    index: int
    batch: Batch
    weight: float


@dataclass(frozen=True)
class Outcome:
    """What a step did, over all ranks.

    Attributes:
        loss: mean over the batch's labels.
        hits: labels that got the largest score.
        count: labels.
        stop: whether a rank was asked to stop.
    """

    loss: float
    hits: int
    count: int
    stop: bool


class MicroBatches:
    """Divides batches, runs this rank's parts, and puts together what all ranks found.

    Args:
        model: in training.
        quant: its recipe's state.
        parts: micro-batches in a batch.
        grid: its data parallel ranks share them: rank r takes neighbouring ones.
        parallel: the blocks that tensor parallel ranks share, or None.
    """

    def __init__(
        self,
        model: Any,
        quant: RecipeState,
        parts: int,
        grid: RankGrid,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.quant, self.parts, self.ranks = quant, parts, grid.all
        self._parallel = parallel if grid.tensor.rank else None
        self.mine = range(parts)[shares(parts, grid.data.size)[grid.data.rank]]
        ranks = grid.all
        modules = list(model.modules())
        norms = [m for m in modules if isinstance(m, BatchNorm2d)]
        self.running = [b for m in norms for b in (m.running_mean, m.running_var)]
        self.draws = [m.draws for m in modules if isinstance(m, Dropout)]
        self.alone = parts == 1 and ranks.size == 1
        self._start: list[Any] | None = None
        self._keys = [(path, slot) for path in quant.layers for slot in SLOTS]
        self._weights = np.array([slot.endswith(".w") for _, slot in self._keys], np.bool_)
        self._before = self._counts()

    def divide(self, batch: Batch) -> list[MicroBatch]:
        """All micro-batches of a batch that have labels, and of which it has the rows."""
        found = []
        whole = batch.whole or Whole(0, len(batch.inputs), batch.count)
        for index, rows in enumerate(shares(whole.rows, self.parts)):
            if whole.first <= rows.start and rows.stop <= whole.first + len(batch.inputs):
                rows = slice(rows.start - whole.first, rows.stop - whole.first)
                part = Batch(batch.index, batch.inputs[rows], batch.labels[rows])
                if part.count:
                    found.append(MicroBatch(index, part, part.count / whole.count))
        return found

    def rows(self, count: int) -> slice:
        """Of so many rows of a batch, those of this rank's micro-batches: neighbours."""
        parts = shares(count, self.parts)
        return slice(parts[self.mine[0]].start, parts[self.mine[-1]].stop)

    def even(self, mine: list[MicroBatch]) -> bool:
        """Whether all ranks have as many micro-batches of a batch as this one; all of them ask."""
        return len(set(self.ranks.all_gather_object(len(mine)))) == 1

    def run(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """Give each micro-batch with the model's buffers and random bits as they are for it."""
        before = self._buffers() if self._start is None else self._start
        for part in micro_batches:
            if not self.alone:
                self.quant.micro_batch = part.index
                self._set_buffers(part.index, before)
            yield part
        if not self.alone:
            self.quant.micro_batch = 0

    # --- a step ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Remember what micro-batches change, before a step."""
        self._rows = np.zeros((self.parts, 3 + len(self.draws) + self._width), np.float64)
        if self.alone:
            return
        self._start = self._buffers()
        self._before = self._counts()
        self.quant.reset_telemetry()
        self._of_weights: np.ndarray | None = None

    def record(
        self, part: MicroBatch, loss: float, hits: int, divided: Container[Slot] = ()
    ) -> None:
        """Note what a micro-batch found, after its backward pass.

        Of ``divided`` weights each rank quantizes its own rows.
        """
        count, first = part.batch.count, 3 + len(self.draws)
        row = self._rows[part.index]
        row[:3] = loss * count, hits, count
        if self.alone:
            return
        assert self._start is not None
        offset = part.index * CALLS_APART
        start = self._start[len(self.running) :]
        for i, (buffer, before) in enumerate(zip(self.draws, start, strict=True)):
            row[3 + i] = int(buffer.data[1]) - int(before[1]) - offset
        if self.running:
            row[first:] = np.concatenate([buffer.numpy().ravel() for buffer in self.running])
        if self._of_weights is None:  # a weight is quantized once a step: more are repetitions
            self._of_weights = self._counts()[self._weights]
            if part.index:
                keys = itertools.compress(self._keys, self._weights)
                self._of_weights[[key not in divided for key in keys]] = 0

    def send(self, stop: bool) -> None:
        """Begin to put together what all ranks found, after this rank's micro-batches."""
        self._stop = stop
        if self.alone:
            return
        counts = self._counts()
        counts[self._weights] = 0 if self._of_weights is None else self._of_weights
        if self._parallel is not None:  # what its tensor parallel ranks have alike counts once
            self._rows[...] = 0
            counts[[not self._parallel.divides(*key) for key in self._keys]] = 0
        self._table = np.concatenate([self._rows.reshape(-1), counts.reshape(-1), [float(stop)]])
        self._sent = self.ranks.all_reduce(self._table)

    def end(self) -> Outcome:
        """What all ranks found, after `send`; every rank has the same then."""
        if self.alone:
            total, hits, labels = self._rows[0, :3].tolist()
            return Outcome(total / labels, int(hits), int(labels), self._stop)
        self._sent.wait()
        table = self._table
        rows = table[: self._rows.size].reshape(self._rows.shape)
        gained = table[self._rows.size : -1].reshape(self._before.shape)
        self._move_buffers(rows[rows[:, 2] > 0])
        totals = (self._before + gained).astype(np.int64).tolist()
        self.quant.load_counts(self._keys, totals)
        total, hits, labels = (sum(column.tolist()) for column in rows[:, :3].T)
        return Outcome(total / labels, int(hits), int(labels), bool(table[-1]))

    def _counts(self) -> np.ndarray:
        """A row for each operand of the model."""
        rows = np.array(self.quant.counts(self._keys), np.float64)
        return rows.reshape(len(self._keys), len(COUNTS))

    def rewind(self) -> None:
        """Undo what the micro-batches of a step that cannot be finished have changed."""
        if self._start is None:
            return
        self.quant.micro_batch = 0
        self.quant.load_counts(self._keys, self._before.astype(np.int64).tolist())
        for buffer, before in zip((*self.running, *self.draws), self._start, strict=True):
            buffer.data = before
        self._start = None

    # --- buffers --------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return sum(buffer.size for buffer in self.running)

    def _buffers(self) -> list[Any]:
        return [buffer.data.copy() for buffer in (*self.running, *self.draws)]

    def _set_buffers(self, index: int, start: list[Any]) -> None:
        for i, (buffer, before) in enumerate(zip((*self.running, *self.draws), start, strict=True)):
            data = before.copy()
            if i >= len(self.running):
                data[1] += index * CALLS_APART
            buffer.data = data

    def _move_buffers(self, rows: np.ndarray) -> None:
        """Set the buffers after a step: the mean of running means, the calls of any micro-batch."""
        first = 3 + len(self.draws)
        mean = rows[0, first:].copy()
        for row in rows[1:]:
            mean += row[first:]
        mean = (mean / len(rows)).astype(np.float32)
        at = 0
        for buffer in self.running:
            values = mean[at : at + buffer.size].reshape(buffer.shape)
            buffer.data = buffer.backend.xp.asarray(values)
            at += buffer.size
        assert self._start is not None
        start = self._start[len(self.running) :]
        for i, (buffer, before) in enumerate(zip(self.draws, start, strict=True)):
            data = before.copy()
            data[1] += int(rows[0, 3 + i])
            buffer.data = data
        self._start = None
