"""Encoder: BERT's shape (Devlin et al., arXiv 1810.04805) with the norm before each part.

Every token sees every other; the scores at a place say which token it should hold. The pre-norm
block (arXiv 2002.04745) needs no warm-up as long as BERT's; weights are normal with BERT's 0.02,
and the head is a layer of its own, as hidden tokens are inputs but never answers.
"""

from __future__ import annotations

import numpy as np

from extensor import ExTensor, nn
from models.encoder.configs import EncoderConfig

__all__ = ["Encoder", "build"]

STD = 0.02


class Encoder(nn.Module):
    """Tokens, some of them hidden, to scores of the token at each place.

    Args:
        config: the shapes.
        rng: draws the weights: normal with standard deviation 0.02; biases start from zeros.
    """

    def __init__(self, config: EncoderConfig, rng: np.random.Generator) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab + 1, config.width, STD, rng)
        self.positions = nn.Embedding(config.context, config.width, STD, rng)
        self.blocks = nn.ModuleList(
            [nn.TransformerBlock(config.width, config.heads, rng=rng) for _ in range(config.layers)]
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, rng=rng)
        self.head.role = "head"
        for _, layer in nn.gemm_layers(self):
            assert isinstance(layer, nn.Linear) and layer.bias is not None
            values = STD * rng.standard_normal(layer.weight.shape)
            layer.weight = nn.Parameter(values.astype(np.float32))
            layer.bias = nn.Parameter(np.zeros(layer.bias.shape, np.float32))

    def forward(self, tokens: ExTensor) -> ExTensor:
        """Tokens (B, T) of whole numbers, ``config.mask`` for hidden ones, to (B, T, vocab).

        Raises:
            ValueError: for other shapes, more tokens than the context holds, or unknown ones.
        """
        if tokens.ndim != 2 or not tokens.shape[1]:
            raise ValueError(
                f"Encoder: expected tokens (B, T) with T of 1 or more, got {tokens.shape}"
            )
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"Encoder: expected at most the {self.config.context} tokens of the context, got "
                f"{length}; the way out: pieces of {self.config.context}, or a larger context"
            )
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        scores: ExTensor = self.head(self.norm(x))
        return scores


def build(config: EncoderConfig, rng: np.random.Generator) -> Encoder:
    """Encoder with fresh weights drawn from ``rng``."""
    return Encoder(config, rng)
