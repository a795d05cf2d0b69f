"""GPT-2's shapes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "GPT2Config"]


@dataclass(frozen=True)
class GPT2Config:
    """A decoder with learned positions.

    Attributes:
        vocab: how many tokens there are.
        context: the longest sequence; one learned vector for each position.
        layers: blocks.
        width: length of each token's vector.
        heads: attention heads, a divisor of ``width``.
        hidden: width of the feed-forward layers.
        eps: added to the variance in the norms.
        activation: "gelu" or "gelu_tanh".
        tied: whether the head shares the embedding's weights.
    """

    vocab: int = 50257
    context: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = (self.vocab, self.context, self.layers, self.width, self.heads, self.hidden)
        if min(sizes) < 1 or self.width % self.heads:
            raise ValueError(
                f"GPT2: expected sizes of 1 or more, the width a multiple of the heads, got {self}"
            )
        if self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"GPT2: activation: expected 'gelu' or 'gelu_tanh', got {self}")


CONFIGS = {
    "gpt2": GPT2Config(),
    "nano": GPT2Config(vocab=65, context=64, layers=2, width=64, heads=4, hidden=256),
    "gpt2-medium": GPT2Config(layers=24, width=1024, heads=16, hidden=4096),
    "gpt2-large": GPT2Config(layers=36, width=1280, heads=20, hidden=5120),
    "gpt2-xl": GPT2Config(layers=48, width=1600, heads=25, hidden=6400),
}
"""The variants; the first is the default."""
