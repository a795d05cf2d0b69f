"""The encoder's shapes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "EncoderConfig"]


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder-only transformer.

    Attributes:
        vocab: how many tokens there are; one more stands for a hidden one.
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
        if min(self.vocab, self.context, self.layers, self.heads, self.width) < 1:
            raise ValueError(f"Encoder: expected sizes of 1 or more, got {self}")
        if self.width % self.heads:
            raise ValueError(f"Encoder: expected a multiple of the heads as width, got {self}")

    @property
    def mask(self) -> int:
        """The token that hides another."""
        return self.vocab


CONFIGS = {
    "nano": EncoderConfig(),
    "small": EncoderConfig(context=256, layers=6, heads=6, width=384),
}
"""The variants; the first is the default: as large as GPT's of the same name."""
