"""Images with one label each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..batch import Batch, Rows
from ..config import RunConfig
from ..data import (
    AUGMENTATIONS,
    SAMPLERS,
    DataError,
    Dataset,
    Split,
    batches,
    held_out,
    load_dataset,
)
from ..metrics import ClassScores, Scores
from .base import Metric, Task

__all__ = ["Classification"]

CHANCE_MARGIN = 0.05
"""A model that beats always guessing the commonest class by less than this has learnt nothing."""


class Classification(Task):
    """Label images; an epoch is a pass over the training images.

    Args:
        config: the run.
        dataset: the data; None loads what the config names.

    Raises:
        ValueError: if the batch size exceeds the data.
        DataError: if the data set is missing or damaged.
    """

    metric = Metric(
        key="accuracy",
        title="test accuracy, %",
        scale=100.0,
        digits=2,
        higher_is_better=True,
        gap="points",
        far=15.0,
        baselines=("fp32", "bf16"),
    )
    unit, inputs = "images", "images"
    eval_batch = 500

    def __init__(self, config: RunConfig, dataset: Dataset | None = None) -> None:
        self.config = config
        dataset = load_dataset(config.dataset) if dataset is None else dataset
        dataset = dataset.limited(config.train_limit or None, config.test_limit or None)
        self.held: Split | None = None
        self.validates = config.val_share > 0
        if self.validates:
            held = held_out(dataset.train.labels, config.val_share)
            self.held = dataset.train.where(held)
            dataset = replace(dataset, train=dataset.train.where(~held))
        self.dataset = dataset
        images = len(dataset.train)
        if config.batch_size > images:
            raise ValueError(
                f"--batch-size: expected at most the {images} training images, "
                f"got {config.batch_size}"
            )
        self.batches = -(-images // config.batch_size)

    def arrays(self) -> Iterator[np.ndarray]:
        """Images and labels: for training, for tests, held out."""
        for split in (self.dataset.train, self.dataset.test, self.held):
            if split is not None:
                yield from (split.images, split.labels)

    def shapes(self) -> dict[str, Any]:
        """Channels, side and classes."""
        channels, side, _ = self.dataset.image_shape
        classes = len(self.dataset.classes)
        return {"in_channels": channels, "image_size": side, "classes": classes}

    def training(self, epoch: int, start: int, mine: Rows | None = None) -> Iterator[Batch]:
        """The sampler's images, as the seed and the epoch decide."""
        config, dataset = self.config, self.dataset
        order = SAMPLERS[config.sampler](dataset.train.labels, config.seed, epoch)
        augmented = AUGMENTATIONS[config.augment], config.seed, epoch
        how: dict[str, Any] = {"order": order, "start": start, "augment": augmented, "mine": mine}
        for batch in batches(dataset, dataset.train, config.batch_size, **how):
            finite = np.isfinite(batch.inputs)
            if not finite.all():
                bad = np.flatnonzero(~finite.all(axis=(1, 2, 3)))
                bad += 0 if batch.whole is None else batch.whole.first
                raise DataError(
                    f"data set {dataset.name!r}: NaN or infinite pixels in epoch {epoch}, batch "
                    f"{batch.index} (of {self.batches}, counted from 0), its images "
                    f"{bad[:5].tolist()}; expected finite numbers: clean the data"
                )
            yield batch

    def test(self, batch_size: int) -> Iterator[Batch]:
        """The test images in order."""
        return batches(self.dataset, self.dataset.test, batch_size)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """The images held out, in order."""
        return iter(()) if self.held is None else batches(self.dataset, self.held, batch_size)

    def scores(self) -> Scores:
        """Top-1, top-3 and the confusion matrix."""
        return ClassScores(self.dataset.classes)

    def stuck(self, scores: Scores) -> str | None:
        """An accuracy no better than chance."""
        labels = self.dataset.test.labels
        chance = float(np.bincount(labels).max() / len(labels))
        if scores.accuracy >= chance + CHANCE_MARGIN:
            return None
        return (
            f"stuck at chance: accuracy {100 * scores.accuracy:.2f}%, always guessing one class "
            f"gives {100 * chance:.2f}%"
        )
