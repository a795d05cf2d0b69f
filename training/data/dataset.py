"""What a data set is: two splits of labelled images, kept small, and how they become batches.

Images stay in the type they come in (uint8 for the IDX sets); a batch is normalised when it is
drawn. The order of an epoch is a pure function of (seed, epoch), so a resumed run sees the same
batches without any state to restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from extensor.random import Stream, philox4x32

__all__ = [
    "Batch",
    "Dataset",
    "Split",
    "batches",
    "epoch_order",
    "pixel_statistics",
    "shift_images",
]

# Names this file's random bits apart from the layers', whose numbers count up from 0.
DATA_TENSOR = (1 << 24) - 1
ORDER_SLOT, SHIFT_SLOT = 0, 1
MAX_SHIFT = 2


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
                "images: wanted (N, C, H, W) of uint8 or float32, got "
                f"{self.images.shape} of {self.images.dtype}"
            )
        if self.labels.shape != (len(self.images),) or self.labels.dtype != np.int64:
            raise ValueError(
                f"labels: wanted ({len(self.images)},) of int64, got {self.labels.shape} of "
                f"{self.labels.dtype}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def first(self, count: int | None) -> Split:
        """The first ``count`` images (views); all of them where ``count`` is None."""
        return self if count is None else Split(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class Dataset:
    """A data set.

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

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        c, h, w = self.train.images.shape[1:]
        return c, h, w

    def limited(self, train: int | None, test: int | None) -> Dataset:
        """The same with only the first images of each split."""
        return replace(self, train=self.train.first(train), test=self.test.first(test))


@dataclass(frozen=True)
class Batch:
    """One batch: its place in the epoch, images (B, C, H, W) float32 normalised, labels (B,)."""

    index: int
    images: np.ndarray
    labels: np.ndarray


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..count-1 that depends on nothing but the arguments.

    It sorts Philox words, so it is the same on every machine and every numpy.
    """
    return np.argsort(_words(count, seed, epoch, ORDER_SLOT), kind="stable")


def _words(count: int, seed: int, epoch: int, slot: int) -> np.ndarray:
    """Random uint32 words, one for each image of the split."""
    stream = Stream(seed, epoch, DATA_TENSOR, slot)
    calls = np.arange(-(-count // 4), dtype=np.uint64)
    words = philox4x32((calls, np.uint64(0), *stream.counter_high), stream.key)
    return np.stack(words, axis=-1).reshape(-1)[:count]


def shift_images(images: np.ndarray, indices: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Shift each image by up to two pixels each way, zeros coming in at the edge.

    The shift depends on (seed, epoch, the image's index in the split), not on the batch.
    """
    words = _words(int(indices.max()) + 1, seed, epoch, SHIFT_SLOT)[indices]
    side = 2 * MAX_SHIFT + 1
    down, right = words % side, words // side % side
    edge = ((0, 0), (0, 0), (MAX_SHIFT, MAX_SHIFT), (MAX_SHIFT, MAX_SHIFT))
    padded = np.pad(images, edge)
    height, width = images.shape[2:]
    out = np.empty_like(images)
    for i, (y, x) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
        out[i] = padded[i, :, y : y + height, x : x + width]
    return out


def batches(
    dataset: Dataset,
    split: Split,
    batch_size: int,
    *,
    order: np.ndarray | None = None,
    start: int = 0,
    augment: tuple[int, int] | None = None,
) -> Iterator[Batch]:
    """Normalised batches; the last one may be smaller.

    Args:
        dataset: gives mean and std.
        split: the images.
        batch_size: images per batch.
        order: permutation of the images; None keeps their order.
        start: the first batch to give (to resume inside an epoch).
        augment: (seed, epoch) of random shifts; None for no augmentation.
    """
    order = np.arange(len(split)) if order is None else order
    mean, std = (
        np.broadcast_to(np.asarray(v, np.float64), split.images.shape[1])
        for v in (dataset.mean, dataset.std)
    )
    channels = np.arange(len(mean))[:, None, None]
    shift, scale = (v.astype(np.float32)[:, None, None] for v in (mean, std))
    # uint8 has 256 values: normalising them once makes every batch a table look-up
    table = ((np.arange(256) / 255.0 - mean[:, None]) / std[:, None]).astype(np.float32)
    for index in range(start, -(-len(split) // batch_size)):
        chosen = order[index * batch_size : (index + 1) * batch_size]
        images = split.images[chosen]
        if augment is not None:
            images = shift_images(images, chosen, *augment)
        whole = images.dtype == np.uint8
        pixels = table[channels, images] if whole else (images - shift) / scale
        yield Batch(index, pixels, split.labels[chosen])


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
