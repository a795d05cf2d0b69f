"""A multilayer perceptron with ReLU: the smallest model that a recipe can be tried on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from extensor import ExTensor, nn, relu

from .configs import MLPConfig

__all__ = ["MLP", "build"]


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        config: the shapes.
        rng: draws the weights.

    >>> import models
    >>> import numpy as np
    >>> config = models.config("mlp", hidden=(32,))
    >>> models.build("mlp", config, np.random.default_rng(0))(et.zeros((2, 1, 28, 28))).shape
    (2, 10)
    """

    def __init__(self, config: MLPConfig, rng: np.random.Generator) -> None:
        super().__init__()
        widths = (config.in_channels * config.image_size**2, *config.hidden, config.classes)
        self.layers = nn.ModuleList([nn.Linear(a, b, rng=rng) for a, b in pairwise(widths)])

    def forward(self, x: ExTensor) -> ExTensor:
        """Images (N, C, H, W) float32 to logits (N, classes)."""
        x = x.flatten(1)
        *hidden, last = self.layers
        for layer in hidden:
            x = relu(layer(x))
        return last(x)


def build(config: MLPConfig, rng: np.random.Generator) -> MLP:
    """A perceptron with fresh weights drawn from ``rng``."""
    return MLP(config, rng)
