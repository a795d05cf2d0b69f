"""VGG (Simonyan and Zisserman, arXiv 1409.1556): configuration D has 16 layers of weights.

Changed for 32x32, as Liu and Deng did (ACPR 2015): the hidden linear layers are 512 wide instead
of 4096, and a batch norm follows each convolution (variant ``vgg16`` is without, as published). A
pool that would leave nothing is left out: 28x28 images have four. 15.3 million weights.

Initial weights: Glorot and Bengio's, which the paper recommends in section 3.1 in the place of
training a shallower net first; biases 0.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from extensor import ExTensor, nn
from extensor.nn import init

from ..vision import ConvUnits, started
from .configs import VGGConfig

__all__ = ["VGG", "build"]


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each ended by a 2x2 pool, then linear layers.

    Args:
        config: the shapes.
        rng: draws the weights and the masks of dropout.

    >>> import models
    >>> import numpy as np
    >>> config = models.config("vgg", "vgg11_bn", width=0.05)
    >>> models.build("vgg", config, np.random.default_rng(0))(et.zeros((2, 3, 32, 32))).shape
    (2, 10)
    """

    def __init__(self, config: VGGConfig, rng: np.random.Generator) -> None:
        super().__init__()
        draw, channels, side = init.xavier_uniform, config.in_channels, config.image_size
        conv = ConvUnits(draw, rng, norm=config.batch_norm)
        layers: list[nn.Module] = []
        for stage in config.stages:
            for paper_width in stage:
                width = config.wide(paper_width)
                layers.append(conv(channels, width, 3))
                channels = width
            if side > 1:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        self.features = nn.Sequential(*layers)
        widths = [channels * side * side, *map(config.wide, config.hidden)]
        head: list[nn.Module] = [nn.Flatten()]
        for a, b in pairwise(widths):
            linear = started(nn.Linear(a, b, rng=rng), draw, rng)
            head += [nn.Dropout(config.dropout, rng), linear, nn.ReLU()]
        head.append(started(nn.Linear(widths[-1], config.classes, rng=rng), draw, rng))
        self.classifier = nn.Sequential(*head)

    def forward(self, x: ExTensor) -> ExTensor:
        """Images (N, C, H, W) float32 to logits (N, classes)."""
        return self.classifier(self.features(x))


def build(config: VGGConfig, rng: np.random.Generator) -> VGG:
    """VGG with fresh weights drawn from ``rng``."""
    return VGG(config, rng)
