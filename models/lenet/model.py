"""LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998).

The common modern reading: ReLU, max pooling, no sub-sampling weights; 61,706 weights for
28x28 images of ten classes.
"""

from __future__ import annotations

import numpy as np

from extensor import ExTensor, nn, relu

from .configs import LeNetConfig

__all__ = ["LeNet", "build"]


class LeNet(nn.Module):
    """conv 5x5 (padding 2), pool, conv 5x5, pool, three linear layers.

    Args:
        config: the shapes.
        rng: draws the weights.

    >>> import models
    >>> import numpy as np
    >>> model = models.build("lenet", models.config("lenet"), np.random.default_rng(0))
    >>> sum(p.size for p in model.parameters())
    61706
    """

    def __init__(self, config: LeNetConfig, rng: np.random.Generator) -> None:
        super().__init__()
        one, two = config.channels
        wide, narrow = config.hidden
        self.conv1 = nn.Conv2d(config.in_channels, one, 5, padding=2, rng=rng)
        self.conv2 = nn.Conv2d(one, two, 5, rng=rng)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(config.features, wide, rng=rng)
        self.fc2 = nn.Linear(wide, narrow, rng=rng)
        self.fc3 = nn.Linear(narrow, config.classes, rng=rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """Images (N, C, H, W) float32 to logits (N, classes)."""
        x = self.pool(relu(self.conv1(x)))
        x = self.pool(relu(self.conv2(x)))
        x = x.flatten(1)
        x = relu(self.fc1(x))
        x = relu(self.fc2(x))
        return self.fc3(x)


def build(config: LeNetConfig, rng: np.random.Generator) -> LeNet:
    """LeNet-5 with fresh weights drawn from ``rng``."""
    return LeNet(config, rng)
