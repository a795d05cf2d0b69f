"""Shapes of decoders, and how many weights and operations they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["SHAPES", "Shape"]


@dataclass(frozen=True)
class Shape:
    """A decoder of equal blocks.

    Attributes:
        layers: blocks.
        width: length of a token's vector.
        heads: of queries, ``width`` together.
        kv_heads: of keys and values.
        hidden: width between the feed-forward layers.
        vocab: tokens.
        gated: whether the feed-forward layers are three (SwiGLU), not two.
        tied: whether the head is the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @property
    def block(self) -> int:
        """Weights of a block."""
        kv = self.width * self.kv_heads // self.heads
        return self.width * (2 * self.width + 2 * kv + (3 if self.gated else 2) * self.hidden)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.vocab * self.width

    @property
    def weights(self) -> int:
        """All weights, but for norms and positions."""
        return self.layers * self.block + self.head * (1 if self.tied else 2)

    def block_operations(self, context: int) -> float:
        """Operations of a block for one token, forward and backward.

        Each weight has 2 forward and 4 backward. Causal attention over ``context`` tokens has
        2 context width forward, and twice that backward.
        """
        return 6.0 * self.block + 6.0 * context * self.width

    def saved(self, per_input: float) -> float:
        """Bytes that a block keeps of one token for backward.

        Norms' and attention's tensors are bfloat16; products' inputs take ``per_input`` bytes.
        """
        kv = self.width * self.kv_heads // self.heads
        between = self.hidden * (2 if self.gated else 1)  # what the activation reads
        dense = 2 * self.width + (2 * self.width + 2 * kv) + between
        return 2.0 * dense + per_input * (3 * self.width + self.hidden)


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-8b": Shape(32, 4096, 32, 8, 14336, 128256),
        "llama-70b": Shape(80, 8192, 64, 8, 28672, 128256),
        "llama-405b": Shape(126, 16384, 128, 8, 53248, 128256),
        "gpt-wide": Shape(2, 4096, 32, 32, 16384, 32768, gated=False, tied=True),
    }
)
"""By name: arXiv 2407.21783, table 3; and ci/bench/cuda_step.py's GPT, which checks the model."""
