"""What the image models share: their sizes, and layers with the initial weights of a paper.

They were published for ImageNet's 224x224 pixels; each `model.py` says what it changes for 32x32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from extensor import nn

__all__ = ["ConvUnits", "VisionConfig", "Weights", "halved", "started"]

Weights = Callable[[tuple[int, ...], np.random.Generator], np.ndarray[Any, Any]]
"""Draws a float32 weight of a shape (`extensor.nn.init`)."""

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)


@dataclass(frozen=True)
class VisionConfig:
    """Sizes common to the image models.

    Attributes:
        in_channels: channels of the images.
        image_size: height and width.
        classes: number of classes.
        width: multiplies every hidden width (MobileNet's alpha, arXiv 1704.04861, section 3.3);
            1 is the paper's.
    """

    in_channels: int = 3
    image_size: int = 32
    classes: int = 10
    width: float = 1.0

    def __post_init__(self) -> None:
        if min(self.in_channels, self.classes) < 1 or not 0.0 < self.width < math.inf:
            raise ValueError(
                f"expected in_channels and classes of 1 or more and a width above 0, got {self}"
            )
        if self.image_size < 16:
            raise ValueError(
                f"image_size: expected 16 or more, got {self.image_size}; resize the images"
            )

    def wide(self, channels: int) -> int:
        """The paper's number of channels times ``width``, at least 1.

        Args:
            channels: the paper's number.

        Returns:
            The model's number.

        >>> from models.vision import VisionConfig
        >>> VisionConfig(width=0.5).wide(64)
        32
        """
        return max(1, round(channels * self.width))


def halved(side: int, times: int = 1) -> int:
    """The side after so many 3x3 windows of stride 2 and padding 1: half, rounded up.

    Args:
        side: of the image.
        times: how many windows.

    Returns:
        The side after the last.

    >>> from models.vision import halved
    >>> halved(32, 3), halved(7)
    (4, 4)
    """
    return -(-side // 2**times)


def started(layer: Layer, weights: Weights, rng: np.random.Generator, bias: float = 0.0) -> Layer:
    """The layer with its weight drawn anew and its bias, if it has one, constant.

    Args:
        layer: is changed.
        weights: draws the weight.
        rng: with this generator.
        bias: the constant.

    Returns:
        The layer itself.

    >>> import numpy as np
    >>> from models.vision import started
    >>> layer = started(et.nn.Linear(4, 2), et.nn.init.kaiming_normal, np.random.default_rng(0))
    >>> layer.bias.tolist()
    [0.0, 0.0]
    """
    layer.weight = nn.Parameter(weights(layer.weight.shape, rng))
    if layer.bias is not None:
        layer.bias = nn.Parameter(np.full(layer.bias.shape, bias, np.float32))
    return layer


@dataclass(frozen=True)
class ConvUnits:
    """Makes the convolutions of a model: each with a batch norm and a ReLU after it.

    Attributes:
        weights: draws the kernels.
        rng: with this generator.
        norm: False leaves the batch norms out; the convolutions have biases then.
        bias: initial value of those biases.
    """

    weights: Weights
    rng: np.random.Generator
    norm: bool = True
    bias: float = 0.0

    def __call__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        relu: bool = True,
    ) -> nn.Sequential:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride); ``kernel`` is odd."""
        conv = nn.Conv2d(
            inputs,
            outputs,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
            bias=not self.norm,
            rng=self.rng,
        )
        parts: dict[str, nn.Module] = {"conv": started(conv, self.weights, self.rng, self.bias)}
        parts |= {"norm": nn.BatchNorm2d(outputs)} if self.norm else {}
        parts |= {"relu": nn.ReLU()} if relu else {}
        return nn.Sequential(**parts)
