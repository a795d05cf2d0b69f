"""GoogLeNet, or Inception v1 (Szegedy et al., arXiv 1409.4842).

Changed for 32x32: the first convolution is 3x3 with stride 1 instead of 7x7 with stride 2, and no
pool follows it, so that the modules see 16x16, 8x8 and 4x4 places instead of 28, 14 and 7. The
auxiliary classifiers, there for the gradient's sake, are left out; in their place a batch norm
follows each convolution (arXiv 1502.03167; variant ``googlenet`` is without). 6.0 million weights.

Initial weights: the paper gives none; Glorot and Bengio's, as in Caffe's reference model, with its
bias of 0.2 where there is no batch norm.
"""

from __future__ import annotations

import numpy as np

from extensor import ExTensor, concatenate, nn
from extensor.nn import init

from ..vision import ConvUnits, started
from .configs import STAGES, GoogLeNetConfig, Inception

__all__ = ["GoogLeNet", "InceptionModule", "build"]


class InceptionModule(nn.Module):
    """Four branches side by side: 1x1; 1x1, 3x3; 1x1, 5x5; pool, 1x1.

    Args:
        inputs: channels that come in.
        widths: channels of each branch; ``one + three + five + pool`` go out.
        conv: makes the convolutions.
    """

    def __init__(self, inputs: int, widths: Inception, conv: ConvUnits) -> None:
        super().__init__()
        w = widths
        self.one = conv(inputs, w.one, 1)
        self.three = nn.Sequential(conv(inputs, w.three_in, 1), conv(w.three_in, w.three, 3))
        self.five = nn.Sequential(conv(inputs, w.five_in, 1), conv(w.five_in, w.five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, w.pool, 1))

    def forward(self, x: ExTensor) -> ExTensor:
        """(N, inputs, H, W) to (N, one + three + five + pool, H, W)."""
        return concatenate([self.one(x), self.three(x), self.five(x), self.pool(x)], axis=1)


class GoogLeNet(nn.Module):
    """Three convolutions, nine inception modules, the mean over all places, a linear layer.

    Args:
        config: the shapes.
        rng: draws the weights and the masks of dropout.

    >>> import models
    >>> import numpy as np
    >>> config = models.config("googlenet", width=0.05)
    >>> models.build("googlenet", config, np.random.default_rng(0))(et.zeros((2, 3, 32, 32))).shape
    (2, 10)
    """

    def __init__(self, config: GoogLeNetConfig, rng: np.random.Generator) -> None:
        super().__init__()
        conv = ConvUnits(init.xavier_uniform, rng, norm=config.batch_norm, bias=0.2)
        narrow, width = config.wide(64), config.wide(192)
        self.stem = nn.Sequential(
            conv(config.in_channels, narrow, 3), conv(narrow, narrow, 1), conv(narrow, width, 3)
        )
        layers: dict[str, nn.Module] = {}
        for number, stage in enumerate(STAGES, start=2):
            layers[f"pool{number}"] = nn.MaxPool2d(3, 2, 1)
            for name, paper in stage.items():
                widths = Inception(*map(config.wide, paper))
                layers[name] = InceptionModule(width, widths, conv)
                width = widths.one + widths.three + widths.five + widths.pool
        self.layers = nn.Sequential(**layers)
        self.pool = nn.GlobalAvgPool2d()
        self.dropout = nn.Dropout(config.dropout, rng)
        self.fc = started(nn.Linear(width, config.classes, rng=rng), conv.weights, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """Images (N, C, H, W) float32 to logits (N, classes)."""
        return self.fc(self.dropout(self.pool(self.layers(self.stem(x)))))


def build(config: GoogLeNetConfig, rng: np.random.Generator) -> GoogLeNet:
    """GoogLeNet with fresh weights drawn from ``rng``."""
    return GoogLeNet(config, rng)
