"""Evaluation on test and validation data, with the recipe's forward pass."""

from __future__ import annotations

from typing import Literal

from extensor import no_grad

from .callbacks import RunView
from .metrics import Scores

__all__ = ["evaluate"]


def evaluate(run: RunView, part: Literal["test", "validation"] = "test") -> Scores:
    """Metrics of a part of the data, as the recipe's forward pass sees them.

    Saturated and flushed values are not counted here: counts are of training.
    """
    scores, drawn = run.task.scores(), getattr(run.task, part)(run.task.eval_batch)
    mine: list[Scores] = []
    workers = run.grid.data
    counts = dict(run.quant.telemetry)
    run.quant.step = run.position.step  # the same random bits at any time, resumed or not
    run.model.eval()
    try:
        with no_grad(), run.whole():
            for index, batch in enumerate(drawn):
                if index % workers.size == workers.rank:
                    run.quant.micro_batch = index
                    mine.append(run.task.scores())
                    rows, labels, loss = run.forward(batch)
                    mine[-1].add(rows, labels, float(loss.item()))
        everyone = workers.all_gather_object(mine)
    finally:
        run.quant.micro_batch = 0
        run.model.train()
        run.quant.load_telemetry(counts)
    for number in range(sum(map(len, everyone))):  # in the order of batches
        scores.merge(everyone[number % workers.size][number // workers.size])
    return scores
