"""BERT: an encoder with the norm after each part (Devlin et al., arXiv 1810.04805).

Modules are named as in Hugging Face's files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from extensor import (
    ExTensor,
    gelu,
    merge_heads,
    nn,
    scaled_dot_product_attention,
    split_heads,
    tanh,
    zeros_like,
)

from ..decoding import Batch, batch_of
from ..language import STD, draw_normal
from ..saving import Pretrained
from .configs import BertConfig

__all__ = ["Bert", "Encoded", "build"]


class Encoded(NamedTuple):
    """What an encoder gives.

    Attributes:
        hidden: a vector for each token, (B, T, width).
        pooled: one for each sequence, (B, width), from the first token's; None in a model without
            that layer.
    """

    hidden: ExTensor
    pooled: ExTensor | None


class Embeddings(nn.Module):
    """The sum of the vectors of token, position and segment, normed."""

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.word_embeddings = nn.Embedding(config.vocab, config.width, STD, rng)
        self.position_embeddings = nn.Embedding(config.context, config.width, STD, rng)
        self.token_type_embeddings = nn.Embedding(config.types, config.width, STD, rng)
        self.LayerNorm = nn.LayerNorm(config.width, config.eps)

    def forward(self, batch: Batch, types: ExTensor) -> ExTensor:
        """Tokens (B, T) -> vectors (B, T, width)."""
        where, table = batch.positions, self.position_embeddings
        positions = table.weight[where] if isinstance(where, slice) else table(where)
        return self.LayerNorm(
            self.word_embeddings(batch.tokens) + self.token_type_embeddings(types) + positions
        )


class SelfAttention(nn.Module):
    """Queries, keys and values, and the heads that they give."""

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, rng=rng)
        self.key = nn.Linear(config.width, config.width, rng=rng)
        self.value = nn.Linear(config.width, config.width, rng=rng)

    def forward(self, x: ExTensor, padding: Any) -> ExTensor:
        """(B, T, width) -> the same."""
        q, k, v = (
            split_heads(layer(x), self.heads) for layer in (self.query, self.key, self.value)
        )
        mask = None if padding is None else padding[:, None, None]
        return merge_heads(scaled_dot_product_attention(q, k, v, mask=mask))


class Output(nn.Module):
    """norm(dense(x) + residual)."""

    def __init__(self, inputs: int, config: BertConfig, rng: np.random.Generator) -> None:
        self.dense = nn.Linear(inputs, config.width, rng=rng)
        self.LayerNorm = nn.LayerNorm(config.width, config.eps)

    def forward(self, x: ExTensor, residual: ExTensor) -> ExTensor:
        """(..., inputs) and (..., width) -> (..., width)."""
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    """Self-attention and what follows it."""

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.self = SelfAttention(config, rng)
        self.output = Output(config.width, config, rng)

    def forward(self, x: ExTensor, padding: Any) -> ExTensor:
        """(B, T, width) -> the same."""
        return self.output(self.self(x, padding), x)


class Intermediate(nn.Module):
    """The wide layer."""

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dense = nn.Linear(config.width, config.hidden, rng=rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """(..., width) -> (..., hidden)."""
        return gelu(self.dense(x), self.approximate)


class Layer(nn.Module):
    """Attention, then two linear layers around gelu; a norm after each."""

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.attention = Attention(config, rng)
        self.intermediate = Intermediate(config, rng)
        self.output = Output(config.hidden, config, rng)

    def forward(self, x: ExTensor, padding: Any) -> ExTensor:
        """(B, T, width) -> the same."""
        x = self.attention(x, padding)
        return self.output(self.intermediate(x), x)


class Encoder(nn.Module):
    """All layers."""

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.layer = nn.ModuleList([Layer(config, rng) for _ in range(config.layers)])

    def forward(self, x: ExTensor, padding: Any) -> ExTensor:
        """(B, T, width) -> the same."""
        for layer in self.layer:
            x = layer(x, padding)
        return x


class Pooler(nn.Module):
    """tanh(dense(x)) of the first token."""

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.dense = nn.Linear(config.width, config.width, rng=rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """(B, T, width) -> (B, width)."""
        return tanh(self.dense(x[:, 0]))


class Bert(Pretrained):
    """Tokens to a vector for each, and one for the sequence.

    Args:
        config: the shapes.
        rng: draws the weights, normal with standard deviation 0.02; biases start from zeros.

    >>> import models
    >>> import numpy as np
    >>> bert = models.build("bert", models.config("bert", "nano"), np.random.default_rng(0))
    >>> hidden, pooled = bert(et.zeros((2, 16), dtype="int64"))
    >>> hidden.shape, pooled.shape
    ((2, 16, 64), (2, 64))
    """

    def __init__(self, config: BertConfig, rng: np.random.Generator) -> None:
        self.config = config
        self.embeddings = Embeddings(config, rng)
        self.encoder = Encoder(config, rng)
        self.pooler = Pooler(config, rng) if config.pooled else None
        if not isinstance(rng, nn.init.Skeleton):
            for _, layer in nn.gemm_layers(self):
                draw_normal(layer, STD, rng)

    def forward(
        self,
        tokens: ExTensor,
        *,
        attention_mask: Any = None,
        positions: Any = None,
        token_types: ExTensor | None = None,
    ) -> Encoded:
        """Tokens to vectors.

        Args:
            tokens: integers (B, T), T of 1 or more.
            attention_mask: (B, T), 1 for real tokens, 0 for padding; None if all are real. Vectors
                of padding mean nothing.
            positions: integers (T,) or (B, T); None for 0 to T - 1, wherever the padding is.
            token_types: the segment of each token, (B, T); None for the first.

        Returns:
            The vectors of all tokens, and the pooled one.

        Raises:
            TypeError, ValueError: for what does not fit, unknown tokens, or positions beyond the
                context.
        """
        if positions is None:
            positions = np.arange(tokens.shape[-1])
        batch = batch_of(type(self).__name__, tokens, attention_mask, positions)
        if batch.last >= self.config.context:
            raise ValueError(
                f"Bert: expected positions below the context of {self.config.context}, got "
                f"{batch.last}; the way out: fewer tokens"
            )
        types = zeros_like(tokens) if token_types is None else token_types
        hidden = self.encoder(self.embeddings(batch, types), batch.padding)
        return Encoded(hidden, None if self.pooler is None else self.pooler(hidden))


def build(config: BertConfig, rng: np.random.Generator | None) -> Bert:
    """A model with fresh weights drawn from ``rng``; without memory for them if that is None."""
    return Bert(config, nn.init.Skeleton() if rng is None else rng)
