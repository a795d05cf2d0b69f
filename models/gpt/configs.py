"""GPT's shapes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer.

    Attributes:
        vocab: how many tokens there are.
        context: the longest sequence; one learned vector for each position.
        layers: blocks.
        heads: attention heads, a divisor of ``width``.
        width: length of each token's vector.
        bias: whether linear layers and norms have biases, as GPT-2's do.
    """

    vocab: int = 65
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    bias: bool = False

    def __post_init__(self) -> None:
        if min(self.vocab, self.context, self.layers, self.heads, self.width) < 1:
            raise ValueError(f"GPT: expected sizes of 1 or more, got {self}")
        if self.width % self.heads:
            raise ValueError(f"GPT: expected a multiple of the heads as width, got {self}")


CONFIGS = {
    "nano": GPTConfig(),
    "small": GPTConfig(context=256, layers=6, heads=6, width=384),
}
"""The variants; the first is the default: nanoGPT's for a CPU, then its own for a GPU."""
