"""Shapes of BERT and its relatives."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "BertConfig"]


@dataclass(frozen=True)
class BertConfig:
    """An encoder with learned positions and the norm after each part.

    Attributes:
        vocab: how many tokens there are.
        context: the longest sequence; one learned vector for each position.
        types: kinds of segments, such as question and answer.
        layers: blocks.
        width: length of each token's vector.
        heads: attention heads, a divisor of ``width``.
        hidden: width of the feed-forward layers.
        eps: added to the variance in the norms.
        activation: "gelu" or "gelu_tanh".
        pooled: whether there is a layer on the first token's vector.
    """

    vocab: int = 30522
    context: int = 512
    types: int = 2
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    eps: float = 1e-12
    activation: str = "gelu"
    pooled: bool = True

    def __post_init__(self) -> None:
        sizes = (self.vocab, self.context, self.types, self.layers, self.width, self.heads)
        if min(*sizes, self.hidden) < 1 or self.width % self.heads:
            raise ValueError(
                f"Bert: expected sizes of 1 or more, the width a multiple of the heads, got {self}"
            )
        if self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"Bert: activation: expected 'gelu' or 'gelu_tanh', got {self}")


CONFIGS = {
    "minilm-l6": BertConfig(layers=6, width=384, hidden=1536),
    "nano": BertConfig(vocab=65, context=64, layers=2, width=64, heads=4, hidden=128),
    "bert-base": BertConfig(),
    "bert-large": BertConfig(layers=24, width=1024, heads=16, hidden=4096),
}
"""The variants; the first is the default."""
