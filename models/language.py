"""What GPT and the encoder share: their sizes, the pass from tokens to scores, first weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extensor import ExTensor, nn

__all__ = ["STD", "LanguageConfig", "LanguageModel", "draw_normal"]

STD = 0.02
"""Standard deviation of the first weights."""


@dataclass(frozen=True)
class LanguageConfig:
    """A transformer of tokens.

    Attributes:
        vocab: how many tokens there are.
        context: the longest sequence; one learned vector for each position.
        layers: blocks.
        heads: attention heads, a divisor of ``width``.
        width: length of each token's vector.
    """

    vocab: int = 65
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128

    def __post_init__(self) -> None:
        name = type(self).__name__.removesuffix("Config")
        if min(self.vocab, self.context, self.layers, self.heads, self.width) < 1:
            raise ValueError(f"{name}: expected sizes of 1 or more, got {self}")
        if self.width % self.heads:
            raise ValueError(f"{name}: expected a multiple of the heads as width, got {self}")


class LanguageModel(nn.Module):
    """Token and position vectors, blocks, a norm, a head that scores the tokens at each place."""

    config: LanguageConfig
    tokens: nn.Embedding
    positions: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.LayerNorm
    head: nn.Linear
    reads_weights = ("positions",)

    def forward(self, tokens: ExTensor) -> ExTensor:
        """Tokens to scores of every token at each place.

        Args:
            tokens: whole numbers (B, T), T of 1 to the context's length.

        Returns:
            Scores (B, T, vocab).

        Raises:
            ValueError: for other shapes, more tokens than the context holds, or unknown ones.
        """
        name, context = type(self).__name__, self.config.context
        if tokens.ndim != 2 or not tokens.shape[1]:
            raise ValueError(
                f"{name}: expected tokens (B, T) with T of 1 or more, got {tokens.shape}"
            )
        length = tokens.shape[1]
        if length > context:
            raise ValueError(
                f"{name}: expected at most the {context} tokens of the context, got {length}; the "
                f"way out: the last {context}, or a larger context"
            )
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        scores: ExTensor = self.head(self.norm(x))
        return scores


def draw_normal(layer: nn.Module, std: float, rng: np.random.Generator) -> None:
    """Give a linear layer normal weights and, where it has a bias, zeros there.

    Args:
        layer: an `nn.Linear`.
        std: standard deviation of the weights.
        rng: draws them.
    """
    assert isinstance(layer, nn.Linear)
    shape = layer.weight.shape
    layer.weight = nn.init.parameter(
        shape, lambda rng: (std * rng.standard_normal(shape)).astype(np.float32), rng
    )
    if layer.bias is not None:
        layer.bias = nn.Parameter(np.zeros(layer.bias.shape, np.float32))
