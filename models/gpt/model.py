"""GPT: learned positions, pre-norm blocks, the head tied to the embedding.

Sources: GPT-2 (Radford et al. 2019, section 2.3: norm before each part and at the end, residual
weights scaled by 1 / sqrt(their number)); weight tying, arXiv 1608.05859.
"""

from __future__ import annotations

import math

import numpy as np

from extensor import ExTensor, nn
from models.gpt.configs import GPTConfig

__all__ = ["GPT", "build"]

STD = 0.02


class GPT(nn.Module):
    """Tokens to scores of the token that follows each.

    Args:
        config: the shapes.
        rng: draws the weights: normal with standard deviation 0.02, those that end a residual
            branch 0.02 / sqrt(2 layers); biases start from zeros.
    """

    feeds_layers = ("norm",)

    def __init__(self, config: GPTConfig, rng: np.random.Generator) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width, STD, rng)
        self.positions = nn.Embedding(config.context, config.width, STD, rng)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerBlock(
                    config.width, config.heads, causal=True, bias=config.bias, rng=rng
                )
                for _ in range(config.layers)
            ]
        )
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        for path, layer in nn.gemm_layers(self):
            assert isinstance(layer, nn.Linear)
            residual = path.endswith((".out", ".down"))
            std = STD / math.sqrt(2 * config.layers) if residual else STD
            layer.weight = nn.Parameter(
                (std * rng.standard_normal(layer.weight.shape)).astype(np.float32)
            )
            if layer.bias is not None:
                layer.bias = nn.Parameter(np.zeros(layer.bias.shape, np.float32))
        self.head = nn.Linear(config.width, config.vocab, bias=False, rng=rng)
        self.head.weight = self.tokens.weight
        self.head.role = "head"

    def forward(self, tokens: ExTensor) -> ExTensor:
        """Tokens (B, T) of whole numbers to scores (B, T, vocab).

        Raises:
            ValueError: for other shapes, more tokens than the context holds, or unknown ones.
        """
        if tokens.ndim != 2 or not tokens.shape[1]:
            raise ValueError(f"GPT: expected tokens (B, T) with T of 1 or more, got {tokens.shape}")
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"GPT: expected at most the {self.config.context} tokens of the context, got "
                f"{length}; the way out: the last {self.config.context}, or a larger context"
            )
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        scores: ExTensor = self.head(self.norm(x))
        return scores


def build(config: GPTConfig, rng: np.random.Generator) -> GPT:
    """GPT with fresh weights drawn from ``rng``."""
    return GPT(config, rng)
