"""MobileNetV1 (Howard et al., arXiv 1704.04861): depthwise separable convolutions.

Changed for 32x32: the first convolution has stride 1 instead of 2, so that the last layers see
2x2 places instead of 7x7. 3,217,226 weights.

Initial weights: the paper gives none; the authors' release (TF-Slim) draws them from a truncated
normal with standard deviation 0.09.
"""

from __future__ import annotations

import numpy as np

from extensor import ExTensor, nn
from extensor.nn import init

from ..vision import ConvUnits, started
from .configs import MobileNetConfig

__all__ = ["MobileNet", "build"]


def _draw(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return init.trunc_normal(shape, rng, std=0.09)


def separable(inputs: int, outputs: int, stride: int, conv: ConvUnits) -> nn.Sequential:
    """A 3x3 convolution of each channel by itself, then a 1x1 over channels; both with norm, ReLU.

    (N, inputs, H, W) to (N, outputs, H / stride, W / stride).
    """
    return nn.Sequential(
        depthwise=conv(inputs, inputs, 3, stride=stride, groups=inputs),
        pointwise=conv(inputs, outputs, 1),
    )


class MobileNet(nn.Module):
    """A convolution, separable layers, the mean over all places, a linear layer.

    Args:
        config: the shapes.
        rng: draws the weights.

    >>> import models
    >>> import numpy as np
    >>> config = models.config("mobilenet", width=0.05)
    >>> models.build("mobilenet", config, np.random.default_rng(0))(et.zeros((2, 3, 32, 32))).shape
    (2, 10)
    """

    def __init__(self, config: MobileNetConfig, rng: np.random.Generator) -> None:
        super().__init__()
        width = config.wide(config.stem)
        conv = ConvUnits(_draw, rng)
        self.stem = conv(config.in_channels, width, 3)
        layers: list[nn.Module] = []
        for channels, stride in config.layers:
            layers.append(separable(width, config.wide(channels), stride, conv))
            width = config.wide(channels)
        self.layers = nn.Sequential(*layers)
        self.pool = nn.GlobalAvgPool2d()
        self.fc = started(nn.Linear(width, config.classes, rng=rng), _draw, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """Images (N, C, H, W) float32 to logits (N, classes)."""
        return self.fc(self.pool(self.layers(self.stem(x))))


def build(config: MobileNetConfig, rng: np.random.Generator) -> MobileNet:
    """MobileNetV1 with fresh weights drawn from ``rng``."""
    return MobileNet(config, rng)
