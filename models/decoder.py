"""The base of decoders: from tokens to vectors by a body, to scores by a head."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from extensor import ExTensor, nn
from extensor.nn.kv_cache import Cache

from .decoding import batch_of
from .language import STD, draw_normal
from .saving import Pretrained

__all__ = ["Decoder"]


class Decoder(Pretrained):
    """Tokens to scores of the token that follows each.

    Args:
        config: the shapes: ``width``, ``vocab``, and whether the head is the embedding, ``tied``.
        body: maps a `extensor.models.decoding.Batch` and a cache to vectors (B, T, width).
        tokens: the body's embedding.
        rng: draws the head's weights, and those of all products, normal with standard deviation
            0.02.

    Attributes:
        body: name of the body in checkpoints.
    """

    body: ClassVar[str]
    config: Any
    lm_head: nn.Linear

    def __init__(
        self, config: Any, body: nn.Module, tokens: nn.Embedding, rng: np.random.Generator
    ) -> None:
        self.config = config
        setattr(self, self.body, body)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False, rng=rng)
        if not isinstance(rng, nn.init.Skeleton):
            for _, layer in nn.gemm_layers(self):
                draw_normal(layer, STD, rng)
        if config.tied:
            self.lm_head.weight = tokens.weight
        self.lm_head.role = "head"

    def forward(
        self,
        tokens: ExTensor,
        *,
        attention_mask: Any = None,
        positions: Any = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> ExTensor:
        """Tokens to scores.

        Args:
            tokens: integers (B, T), T of 1 or more.
            attention_mask: (B, tokens in the cache + T), 1 for real tokens, 0 for padding on either
                side; None if all are real.
            positions: integers (T,) or (B, T); None for how many real tokens stand before each.
            cache: keys and values of the tokens before these; the new ones are appended.
            logits_to_keep: score the last so many tokens only; 0, all. To continue a prompt 1 is
                enough, and saves most of the head's work.

        Returns:
            Scores (B, T or ``logits_to_keep``, vocab) of every token at the next place.

        Raises:
            TypeError, ValueError: for what does not fit, unknown tokens, or positions beyond the
                context.
        """
        name = type(self).__name__
        batch = batch_of(name, tokens, attention_mask, positions, cache)
        if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int):
            raise TypeError(f"{name}: expected an int as logits_to_keep, got {logits_to_keep!r}")
        if not 0 <= logits_to_keep <= tokens.shape[1]:
            raise ValueError(
                f"{name}: expected logits_to_keep of 0 (all) to the {tokens.shape[1]} tokens "
                f"given, got {logits_to_keep}"
            )
        vectors: ExTensor = getattr(self, self.body)(batch, cache)
        if logits_to_keep:
            vectors = vectors[:, -logits_to_keep:]
        return self.lm_head(vectors)
