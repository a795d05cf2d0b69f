"""What the loop asks of a task: batches, scores, and the number that runs are compared by.

A task knows its data and what a model must look like for it; the loop knows steps, scaling,
checkpoints and time. All tasks learn a label for each row of scores by cross entropy: images have
one row each, texts one for each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..batch import Batch, Rows
from ..metrics import Scores
from ..records import EpochReport

__all__ = ["Metric", "Task"]


@dataclass(frozen=True)
class Metric:
    """The number that runs of a task are compared by.

    Attributes:
        key: its name in result.json; in metrics.jsonl it is ``test_<key>``.
        title: for tables and plots.
        scale: what it is multiplied by where people read it.
        digits: after the point, likewise.
        higher_is_better: or lower.
        gap: what the gap to the baseline is: "points" (a difference) or "%" (of the baseline).
        far: rows further than this (scaled) from the best are drawn at the plot's edge.
        baselines: recipes that the gap may be measured against; the first that was run is.
    """

    key: str
    title: str
    scale: float
    digits: int
    higher_is_better: bool
    gap: str
    far: float
    baselines: tuple[str, ...]

    @property
    def chosen_by(self) -> str:
        """What of an epoch chooses the best one."""
        return f"val_{self.key}"

    def best(self, history: list[EpochReport]) -> EpochReport:
        """The epoch that is best on the validation data, the earliest of equals.

        One whose number is not finite is the worst.
        """
        sign = 1.0 if self.higher_is_better else -1.0

        def rank(report: EpochReport) -> tuple[float, int]:
            value = getattr(report, self.chosen_by)
            return (-np.inf if value is None else sign * value, -report.epoch)

        return max(history, key=rank)

    def difference(self, value: float, baseline: float) -> float:
        """The gap of a (scaled) value to that of the baseline."""
        gap = value - baseline
        return 100.0 * gap / baseline if self.gap == "%" else gap

    def show(self, value: float | None) -> str:
        """The number with its name and unit."""
        if value is None:
            return f"{self.key} is not finite"
        unit = "%" if self.scale == 100.0 else ""
        return f"{self.key} {self.scale * value:.{self.digits}f}{unit}"

    def outcome(self, result: Mapping[str, Any]) -> str:
        """The number of a result.json, with its name and unit."""
        return self.show(result[self.key])


class Task(ABC):
    """One task on one data set, for one run.

    Attributes:
        metric: what runs are compared by.
        unit: what is counted: "images" or "tokens".
        inputs: what a batch is made of: "images" or "windows".
        eval_batch: inputs per batch of an evaluation.
        batches: optimizer steps in an epoch.
        validates: whether training data is held out for validation.
    """

    metric: ClassVar[Metric]
    unit: ClassVar[str]
    inputs: ClassVar[str]
    eval_batch: ClassVar[int]
    batches: int
    validates: bool = False

    @abstractmethod
    def arrays(self) -> Iterator[np.ndarray]:
        """All of the data, which ranks compare by checksum."""

    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """Settings of the model's configuration that follow from the data."""

    @abstractmethod
    def training(self, epoch: int, start: int, mine: Rows | None = None) -> Iterator[Batch]:
        """The batches of an epoch (from 1), from one on: a function of the seed and these alone.

        Args:
            epoch: which.
            start: the first batch to give.
            mine: the rows to draw; None draws all.
        """

    @abstractmethod
    def test(self, batch_size: int) -> Iterator[Batch]:
        """The test batches, always the same."""

    @abstractmethod
    def validation(self, batch_size: int) -> Iterator[Batch]:
        """The batches of what was held out, always the same; none where nothing was."""

    @abstractmethod
    def scores(self) -> Scores:
        """New `Scores`, with nothing counted yet."""

    @abstractmethod
    def stuck(self, scores: Scores) -> str | None:
        """Why these scores show that nothing was learnt, or None."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry to use the model without the data: plain JSON."""
        return {}
