"""AlexNet (Krizhevsky, Sutskever, Hinton, NIPS 2012), in one tower (arXiv 1404.5997).

Changed for 32x32: the first convolution is 3x3 with stride 1 instead of 11x11 with stride 4, and
the pools (3x3, stride 2) pad by 1, so 4x4x256 instead of 6x6x256 values reach the linear layers.
As in arXiv 1404.5997 there is no local response normalisation. 36.1 million weights.

Initial weights as in the paper, section 5: normal with standard deviation 0.01; biases 1 in the
second, fourth and fifth convolution and the hidden linear layers, so that ReLUs see positive
inputs at first, and 0 elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor import ExTensor, nn

from ..vision import ConvUnits, halved, started
from .configs import AlexNetConfig

__all__ = ["AlexNet", "build"]


def _normal(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return rng.normal(0.0, 0.01, shape).astype(np.float32)


class AlexNet(nn.Module):
    """Five convolutions, three pools, three linear layers.

    Args:
        config: the shapes.
        rng: draws the weights and the masks of dropout.

    >>> import models
    >>> import numpy as np
    >>> config = models.config("alexnet", width=0.05)
    >>> models.build("alexnet", config, np.random.default_rng(0))(et.zeros((2, 3, 32, 32))).shape
    (2, 10)
    """

    def __init__(self, config: AlexNetConfig, rng: np.random.Generator) -> None:
        super().__init__()
        a, b, c, d = (config.wide(n) for n in (64, 192, 384, 256))
        wide = config.wide(4096)
        features = d * halved(config.image_size, 3) ** 2

        zero, one = (ConvUnits(_normal, rng, norm=False, bias=bias) for bias in (0.0, 1.0))

        self.features = nn.Sequential(
            conv1=zero(config.in_channels, a, 3),
            pool1=nn.MaxPool2d(3, 2, 1),
            conv2=one(a, b, 5),
            pool2=nn.MaxPool2d(3, 2, 1),
            conv3=zero(b, c, 3),
            conv4=one(c, d, 3),
            conv5=one(d, d, 3),
            pool5=nn.MaxPool2d(3, 2, 1),
        )
        self.classifier = nn.Sequential(
            flatten=nn.Flatten(),
            drop6=nn.Dropout(config.dropout, rng),
            fc6=started(nn.Linear(features, wide, rng=rng), _normal, rng, 1.0),
            relu6=nn.ReLU(),
            drop7=nn.Dropout(config.dropout, rng),
            fc7=started(nn.Linear(wide, wide, rng=rng), _normal, rng, 1.0),
            relu7=nn.ReLU(),
            fc8=started(nn.Linear(wide, config.classes, rng=rng), _normal, rng),
        )

    def forward(self, x: ExTensor) -> ExTensor:
        """Images (N, C, H, W) float32 to logits (N, classes)."""
        return self.classifier(self.features(x))


def build(config: AlexNetConfig, rng: np.random.Generator) -> AlexNet:
    """AlexNet with fresh weights drawn from ``rng``."""
    return AlexNet(config, rng)
