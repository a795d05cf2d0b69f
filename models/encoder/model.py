"""Encoder: BERT's shape (Devlin et al., arXiv 1810.04805) with the norm before each part.

Every token sees every other; the scores at a place say which token it should hold. The pre-norm
block (arXiv 2002.04745) needs no warm-up as long as BERT's; weights are normal with BERT's 0.02,
and the head is a layer of its own, as hidden tokens are inputs but never answers.
"""

from __future__ import annotations

import numpy as np

from extensor import nn

from ..language import STD, LanguageModel, draw_normal
from .configs import EncoderConfig

__all__ = ["Encoder", "build"]


class Encoder(LanguageModel):
    """Tokens, those hidden as ``config.mask``, to scores of the token at each place.

    Args:
        config: the shapes.
        rng: draws the weights: normal with standard deviation 0.02; biases start from zeros.

    >>> import models
    >>> import numpy as np
    >>> config = models.config("encoder", layers=1)
    >>> encoder = models.build("encoder", config, np.random.default_rng(0))
    >>> encoder(et.full((2, 16), config.mask, dtype="int64")).shape
    (2, 16, 65)
    """

    def __init__(self, config: EncoderConfig, rng: np.random.Generator) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.tokens = nn.Embedding(config.vocab + 1, width, STD, rng)
        self.positions = nn.Embedding(config.context, width, STD, rng)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerBlock(
                    nn.MultiheadAttention(width, config.heads, rng=rng),
                    nn.FeedForward(width, 4 * width, rng=rng),
                )
                for _ in range(config.layers)
            ]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocab, rng=rng)
        self.head.role = "head"
        for _, layer in nn.gemm_layers(self):
            draw_normal(layer, STD, rng)


def build(config: EncoderConfig, rng: np.random.Generator) -> Encoder:
    """Encoder with fresh weights drawn from ``rng``."""
    return Encoder(config, rng)
