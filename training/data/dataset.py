"""What a data set is: two splits of labelled images, kept small, and how they become batches.

Images stay in the type they come in (uint8 for the IDX sets); a batch is normalised when it is
drawn. Everything about an epoch is a pure function of (seed, epoch), so a resumed run sees the same
batches without any state to restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..batch import Batch, Rows, Whole
from .draws import Draws
from .transforms import Normalize, Transform

__all__ = ["Dataset", "Split", "batches", "evenly_spaced", "held_out", "pixel_statistics"]


TOGETHER = 1 << 18
"""Values of the batches that are made at once: of small images, numpy's calls take most time."""


@dataclass(frozen=True)
class Split:
    """Labelled images.

    Attributes:
        images: (N, C, H, W), uint8 in 0..255 or float32 in 0..1.
        labels: (N,), int64.
    """

    images: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype not in (np.uint8, np.float32):
            raise ValueError(
                "images: expected (N, C, H, W) of uint8 or float32, got "
                f"{self.images.shape} of {self.images.dtype}"
            )
        if self.images.size == 0 < len(self.images):
            raise ValueError(f"images: expected pixels, got shape {self.images.shape}")
        if self.labels.shape != (len(self.images),) or self.labels.dtype != np.int64:
            raise ValueError(
                f"labels: expected ({len(self.images)},) of int64, got {self.labels.shape} of "
                f"{self.labels.dtype}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def where(self, chosen: np.ndarray) -> Split:
        """The images that a mask or indices choose (copies)."""
        return Split(self.images[chosen], self.labels[chosen])

    def first(self, count: int | None) -> Split:
        """The first ``count`` images (views); all of them where ``count`` is None."""
        return self if count is None else Split(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class Dataset:
    """A data set of labelled images.

    Attributes:
        name: its name in `DATASETS`.
        train, test: the splits.
        classes: names of the labels.
        mean, std: of the training pixels in 0..1, one number or one per channel; batches are
            (x - mean) / std.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def __post_init__(self) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            if not len(split):
                raise ValueError(f"data set {self.name!r}: expected {part} images, got none")
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= len(self.classes):
                raise ValueError(
                    f"data set {self.name!r}: expected {part} labels in "
                    f"0..{len(self.classes) - 1}, one of {len(self.classes)} classes, got "
                    f"{low if low < 0 else high}"
                )
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise ValueError(
                f"data set {self.name!r}: expected training and test images of one shape, got "
                f"{self.train.images.shape[1:]} and {self.test.images.shape[1:]}"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        c, h, w = self.train.images.shape[1:]
        return c, h, w

    def limited(self, train: int | None, test: int | None) -> Dataset:
        """The same with only the first images of each split."""
        return replace(self, train=self.train.first(train), test=self.test.first(test))


def batches(
    dataset: Dataset,
    split: Split,
    batch_size: int,
    *,
    order: np.ndarray | None = None,
    start: int = 0,
    augment: tuple[Transform, int, int] | None = None,
    mine: Rows | None = None,
) -> Iterator[Batch]:
    """Normalised batches; the last one may be smaller.

    Args:
        dataset: gives mean and std.
        split: the images.
        batch_size: images per batch.
        order: indices of the images; None takes each once, in order.
        start: the first batch to give (to resume inside an epoch).
        augment: a transform of the images, and the seed and the epoch that its random numbers are
            a function of; None transforms nothing.
        mine: the rows of each batch to draw; None draws all.

    Raises:
        ValueError: for a batch size below 1, or indices of no images.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected 1 or more, got {batch_size}")
    order = np.arange(len(split)) if order is None else order
    if order.size and not 0 <= int(order.min()) <= int(order.max()) < len(split):
        raise ValueError(
            f"order: expected indices in 0..{len(split) - 1}, got {order.min()}..{order.max()}"
        )
    normalize = Normalize(dataset.mean, dataset.std)
    numbers = range(start, -(-len(order) // batch_size))
    together = max(1, TOGETHER // (batch_size * math.prod(split.images.shape[1:])))
    for first in range(0, len(numbers), together):
        parts = []
        for index in numbers[first : first + together]:
            chosen, whole = order[index * batch_size : (index + 1) * batch_size], None
            if mine is not None:
                rows = mine(len(chosen))
                chosen, whole = chosen[rows], Whole(rows.start, len(chosen), len(chosen))
            parts.append((index, chosen, whole))
        every = np.concatenate([chosen for _, chosen, _ in parts])
        images, draws = split.images[every], Draws(0, 0, every)
        if augment is not None and len(every):
            transform, seed, epoch = augment
            draws = Draws(seed, epoch, every)
            images = transform(images, draws)
        images, end = normalize(images, draws), 0
        for index, chosen, whole in parts:
            begin, end = end, end + len(chosen)
            yield Batch(index, images[begin:end], split.labels[chosen], whole)


def evenly_spaced(members: np.ndarray, count: int) -> np.ndarray:
    """Pick ``count`` members, evenly spaced in their order."""
    places = (np.arange(count) + 0.5) * len(members) / count
    return members[places.astype(int)]


def held_out(labels: np.ndarray, share: float) -> np.ndarray:
    """True for a share of the items of each class, evenly spaced in order, at least one of each.

    Raises:
        ValueError: if that leaves a class nothing to train on, or the share is not in (0, 1).
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"--val-share: expected a number in (0, 1), got {share!r}")
    out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(1, round(share * len(members)))
        if count >= len(members):
            raise ValueError(
                f"--val-share: expected at least one training image beside {count} held out, got "
                f"{len(members)} of class {label}; the way out: a smaller share, or more images"
            )
        out[evenly_spaced(members, count)] = True
    return out


def pixel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel's pixels in 0..1: exact, from their counts.

    Args:
        images: (N, C, H, W), uint8.
    """
    values = np.arange(256) / 255.0
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 1000):  # bincount takes eight bytes a pixel
            part = images[start : start + 1000, channel]
            counts += np.bincount(part.reshape(-1), minlength=256)
        mean = float(counts @ values / counts.sum())
        means.append(mean)
        stds.append(float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())))
    return tuple(means), tuple(stds)
