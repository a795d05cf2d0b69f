"""A decoder small enough to check by hand: learned positions, one attention layer, no norm."""

from __future__ import annotations

from typing import Any

import numpy as np

import extensor as et
from extensor import ExTensor, nn

VOCAB, WIDTH, HEADS = 31, 64, 2


class Decoder(nn.Module):
    """Reads the cache, the mask and the positions, as every decoder of `generate` does."""

    def __init__(self, layers: int = 2, window: int | None = None, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = nn.Embedding(VOCAB, WIDTH, 1.0, rng)
        self.places = nn.Embedding(128, WIDTH, 1.0, rng)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH, rng=rng) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCAB, rng=rng)
        self.window = window
        self.passes: list[int] = []

    def forward(
        self,
        tokens: ExTensor,
        *,
        attention_mask: ExTensor | None = None,
        positions: ExTensor | None = None,
        cache: Any = None,
    ) -> ExTensor:
        batch, length = tokens.shape
        self.passes.append(length)
        before = cache.length if cache is not None else 0
        places = np.arange(before, before + length)
        if positions is None:
            positions = ExTensor.from_numpy(np.tile(places, (batch, 1)))
        x = self.tokens(tokens) + self.places(positions)
        for number, layer in enumerate(self.layers):
            split = layer(x).reshape((batch, length, 3, HEADS, WIDTH // HEADS))
            q, k, v = (split[:, :, i].swapaxes(1, 2) for i in range(3))
            slots = places
            if cache is not None:
                k, v, slots = cache.update(number, k, v)
            seen = slots[None, :] <= places[:, None]
            if self.window is not None:
                seen &= slots[None, :] > places[:, None] - self.window
            seen = np.broadcast_to(seen, (batch, 1, *seen.shape))
            if attention_mask is not None:
                seen = seen & attention_mask.numpy()[:, None, None, slots]
            scores = (q @ k.swapaxes(-1, -2)) * (WIDTH // HEADS) ** -0.5
            scores = et.where(ExTensor.from_numpy(seen.copy()), scores, -1e30)
            mixed = (et.softmax(scores) @ v).swapaxes(1, 2).reshape((batch, length, WIDTH))
            x = x + mixed
        if cache is not None:
            cache.advance(length)
        return self.head(x)
