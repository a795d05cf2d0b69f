"""GPT: learned positions, pre-norm blocks, the head tied to the embedding.

Sources: GPT-2 (Radford et al. 2019, section 2.3: norm before each part and at the end, residual
weights scaled by 1 / sqrt(their number)); weight tying, arXiv 1608.05859.
"""

from __future__ import annotations

import math

import numpy as np

from extensor import nn

from ..language import STD, LanguageModel, draw_normal
from .configs import GPTConfig

__all__ = ["GPT", "build"]


class GPT(LanguageModel):
    """Tokens to scores of the token that follows each.

    Args:
        config: the shapes.
        rng: draws the weights: normal with standard deviation 0.02, those that end a residual
            branch 0.02 / sqrt(2 layers); biases start from zeros.

    >>> import models
    >>> import numpy as np
    >>> gpt = models.build("gpt", models.config("gpt", layers=1), np.random.default_rng(0))
    >>> gpt(et.zeros((2, 16), dtype="int64")).shape
    (2, 16, 65)
    """

    feeds_layers = ("norm",)

    def __init__(self, config: GPTConfig, rng: np.random.Generator) -> None:
        super().__init__()
        self.config = config
        width, heads, bias = config.width, config.heads, config.bias
        self.tokens = nn.Embedding(config.vocab, width, STD, rng)
        self.positions = nn.Embedding(config.context, width, STD, rng)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerBlock(
                    nn.MultiheadAttention(width, heads, causal=True, bias=bias, rng=rng),
                    nn.FeedForward(width, 4 * width, bias=bias, rng=rng),
                    bias=bias,
                )
                for _ in range(config.layers)
            ]
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        for path, layer in nn.gemm_layers(self):
            residual = path.endswith((".out", ".down"))
            draw_normal(layer, STD / math.sqrt(2 * config.layers) if residual else STD, rng)
        self.head = nn.Linear(width, config.vocab, bias=False, rng=rng)
        self.head.weight = self.tokens.weight
        self.head.role = "head"


def build(config: GPTConfig, rng: np.random.Generator) -> GPT:
    """GPT with fresh weights drawn from ``rng``."""
    return GPT(config, rng)
