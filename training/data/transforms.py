"""Transforms of images: what happens between the file and the model.

A transform takes images (N, C, H, W) and the random numbers of their items (`Draws`), and gives
new images; it never writes to what it is given. Random ones have a slot of random numbers each, so
what one does to an image depends on no other, nor on the batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from .draws import ERASE_SLOT, FLIP_SLOT, ROTATE_SLOT, SHIFT_SLOT, Draws

__all__ = [
    "AUGMENTATIONS", "CenterCrop", "Compose", "Normalize", "RandomCrop", "RandomErase",
    "RandomFlip", "RandomRotate", "Resize", "Transform", "resize_matrix",
]  # fmt: skip


class Transform(ABC):
    """Images (N, C, H, W) to images; random ones draw from the ``slot`` of random numbers."""

    slot: ClassVar[int | None] = None

    def __call__(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        """Check the arguments, then `apply`.

        Raises:
            ValueError: for other shapes, or draws for another number of images.
        """
        self._require(images.ndim == 4, f"images (N, C, H, W), got shape {images.shape}")
        count, drawn = len(images), len(draws.indices)
        self._require(drawn == count, f"draws for {count} images, got draws for {drawn}")
        return self.apply(images, draws) if len(images) else images

    @abstractmethod
    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        """Transform one image or more."""

    def _require(self, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f"{type(self).__name__}: expected {expected}")

    def _require_size(self, name: str, value: object) -> None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        self._require(good, f"a whole number, 1 or more, as {name}, got {value!r}")


@dataclass(frozen=True)
class Normalize(Transform):
    """(x - mean) / std, float32; of uint8 images, x is the value over 255.

    Attributes:
        mean, std: one number, or one for each channel; std above 0.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def __post_init__(self) -> None:
        good = bool(np.isfinite(self.mean).all() and np.all(np.asarray(self.std) > 0))
        self._require(good, f"a finite mean and a std above 0, got {self.mean}, {self.std}")

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        mean, std = (
            np.broadcast_to(np.asarray(v, np.float64), images.shape[1])
            for v in (self.mean, self.std)
        )
        if images.dtype == np.uint8:
            # 256 values: normalising them once makes every batch a table look-up
            table = ((np.arange(256) / 255.0 - mean[:, None]) / std[:, None]).astype(np.float32)
            return table[np.arange(len(mean))[:, None, None], images]
        shift, scale = (v.astype(np.float32)[:, None, None] for v in (mean, std))
        return (images - shift) / scale


def resize_matrix(before: int, after: int) -> np.ndarray:
    """(after, before) weights of a bilinear resize between pixel centres, clamped at the edge.

    Output pixel i looks at input coordinate (i + 1/2) before / after - 1/2.
    """
    source = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)
    low = np.minimum(source.astype(int), max(before - 2, 0))
    weights = np.zeros((after, before))
    weights[np.arange(after), low] = 1 - (source - low)
    if before > 1:
        weights[np.arange(after), low + 1] += source - low
    return weights


@dataclass(frozen=True)
class Resize(Transform):
    """Bilinear, to ``side`` x ``side``; see `resize_matrix`. uint8 is rounded to uint8 again."""

    side: int

    def __post_init__(self) -> None:
        self._require_size("side", self.side)

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        rows, columns = (resize_matrix(n, self.side) for n in images.shape[2:])
        return _like(rows @ images.astype(np.float64) @ columns.T, images.dtype)


@dataclass(frozen=True)
class CenterCrop(Transform):
    """The middle ``side`` x ``side`` pixels."""

    side: int

    def __post_init__(self) -> None:
        self._require_size("side", self.side)

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        height, width = images.shape[2:]
        self._require(
            self.side <= min(height, width),
            f"images of {self.side} pixels a side or more, got {height} x {width}; Resize first",
        )
        top, left = (height - self.side) // 2, (width - self.side) // 2
        return images[:, :, top : top + self.side, left : left + self.side].copy()


@dataclass(frozen=True)
class RandomCrop(Transform):
    """Random crop of the zero-padded image: a shift by up to ``padding`` pixels."""

    padding: int = 4
    slot: ClassVar[int | None] = SHIFT_SLOT

    def __post_init__(self) -> None:
        self._require_size("padding", self.padding)

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        words, side, room = draws.words(SHIFT_SLOT), 2 * self.padding + 1, self.padding
        down, right = words % side, words // side % side
        padded = np.pad(images, ((0, 0), (0, 0), (room, room), (room, room)))
        height, width = images.shape[2:]
        out = np.empty_like(images)
        for i, (y, x) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
            out[i] = padded[i, :, y : y + height, x : x + width]
        return out


@dataclass(frozen=True)
class RandomFlip(Transform):
    """Left becomes right, with probability ``p``."""

    p: float = 0.5
    slot: ClassVar[int | None] = FLIP_SLOT

    def __post_init__(self) -> None:
        self._require(0.0 <= self.p <= 1.0, f"p in [0, 1], got {self.p!r}")

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        hit = draws.uniform(FLIP_SLOT) < self.p
        return np.where(hit[:, None, None, None], images[..., ::-1], images)


@dataclass(frozen=True)
class RandomRotate(Transform):
    """Rotation about the middle by up to ``degrees`` each way, bilinear, with zeros outside."""

    degrees: float = 15.0
    slot: ClassVar[int | None] = ROTATE_SLOT

    def __post_init__(self) -> None:
        self._require(0.0 < self.degrees <= 180.0, f"degrees in (0, 180], got {self.degrees}")

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        angles = np.radians(self.degrees) * (2.0 * draws.uniform(ROTATE_SLOT) - 1.0)
        height, width = images.shape[2:]
        y, x = np.mgrid[:height, :width].astype(np.float64)
        y, x = y - (height - 1) / 2, x - (width - 1) / 2
        cos, sin = (f(angles)[:, None, None] for f in (np.cos, np.sin))
        rows = cos * y + sin * x + (height - 1) / 2
        columns = cos * x - sin * y + (width - 1) / 2
        top, left = np.floor(rows), np.floor(columns)
        down, right = rows - top, columns - left
        # a border of zeros, so that what lies outside is read as zero
        padded = np.pad(images.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
        each = np.arange(len(images))[:, None, None]
        out = np.zeros(images.shape)
        for dy, dx, weight in (
            (0, 0, (1 - down) * (1 - right)),
            (0, 1, (1 - down) * right),
            (1, 0, down * (1 - right)),
            (1, 1, down * right),
        ):
            r = np.clip(top + dy, -1, height).astype(int) + 1
            c = np.clip(left + dx, -1, width).astype(int) + 1
            out += np.moveaxis(padded[each, :, r, c], -1, 1) * weight[:, None]
        return _like(out, images.dtype)


@dataclass(frozen=True)
class RandomErase(Transform):
    """With probability ``p`` a rectangle becomes zero (random erasing, arXiv 1708.04896).

    Its area is a share of the image's, uniform in ``area``, its height over its width
    log-uniform in ``1 / aspect`` to ``aspect``; what would stand out of the image is cut off.
    """

    p: float = 0.5
    area: tuple[float, float] = (0.02, 0.25)
    aspect: float = 3.0
    slot: ClassVar[int | None] = ERASE_SLOT

    def __post_init__(self) -> None:
        self._require(0.0 <= self.p <= 1.0, f"p in [0, 1], got {self.p!r}")
        self._require(
            0.0 < self.area[0] <= self.area[1] <= 1.0 and 1.0 <= self.aspect < math.inf,
            "two rising shares in (0, 1] and an aspect of 1 or more, got "
            f"{self.area} and {self.aspect}",
        )

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        hit, size, shape, y, x = (draws.uniform(ERASE_SLOT, part) for part in range(5))
        height, width = images.shape[2:]
        low, high = self.area
        area = (low + (high - low) * size) * height * width
        ratio = np.exp(math.log(self.aspect) * (2.0 * shape - 1.0))
        tall = np.clip(np.round(np.sqrt(area * ratio)), 1, height).astype(int)
        wide = np.clip(np.round(np.sqrt(area / ratio)), 1, width).astype(int)
        top, left = (y * (height - tall + 1)).astype(int), (x * (width - wide + 1)).astype(int)
        out = images.copy()
        for i in np.flatnonzero(hit < self.p):
            out[i, :, top[i] : top[i] + tall[i], left[i] : left[i] + wide[i]] = 0
        return out


class Compose(Transform):
    """Several transforms, one after the other.

    Raises:
        TypeError: for something that is no transform.
        ValueError: for two that would share their random numbers.
    """

    def __init__(self, transforms: Sequence[Transform] = ()) -> None:
        if not isinstance(transforms, Sequence):
            raise TypeError(f"Compose: expected a list of transforms, got {transforms!r:.80}")
        for transform in transforms:
            if not isinstance(transform, Transform):
                raise TypeError(f"Compose: expected transforms, got {transform!r:.80}")
        slots = [t.slot for t in transforms if t.slot is not None]
        if len(set(slots)) < len(slots):
            raise ValueError(
                "Compose: expected each kind of random transform once, got one twice: they would "
                "share their random numbers"
            )
        self.transforms = tuple(transforms)

    def apply(self, images: np.ndarray, draws: Draws) -> np.ndarray:
        for transform in self.transforms:
            images = transform(images, draws)
        return images


def _like(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert values to an image's dtype; to uint8 by rounding."""
    return np.rint(values).astype(dtype) if dtype == np.uint8 else values.astype(dtype)


AUGMENTATIONS: Mapping[str, Compose] = MappingProxyType(
    {
        "none": Compose(),
        "shift": Compose([RandomCrop(2)]),
        "flip": Compose([RandomCrop(4), RandomFlip()]),
        "strong": Compose([RandomCrop(4), RandomFlip(), RandomRotate(), RandomErase()]),
    }
)
"""By the name that ``--augment`` takes for images: shifts for digits, flips for photographs."""
