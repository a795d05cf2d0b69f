"""GPT-2: a pre-norm decoder with learned positions (Radford et al. 2019, section 2.3).

Modules are named as in Hugging Face's files.
"""

from __future__ import annotations

import numpy as np

from extensor import ExTensor, gelu, merge_heads, nn, split_heads
from extensor.nn.kv_cache import Cache

from ..decoder import Decoder
from ..decoding import Batch, attend
from ..language import STD
from .configs import GPT2Config

__all__ = ["GPT2", "build"]


class Attention(nn.Module):
    """Causal self-attention; one projection gives queries, keys and values."""

    def __init__(self, config: GPT2Config, layer: int, rng: np.random.Generator) -> None:
        self.layer, self.config = layer, config
        self.c_attn = nn.Linear(config.width, 3 * config.width, rng=rng)
        self.c_proj = nn.Linear(config.width, config.width, rng=rng)

    def forward(self, x: ExTensor, batch: Batch, cache: Cache | None) -> ExTensor:
        """(B, T, width) -> the same."""
        heads = self.config.heads
        packed = split_heads(self.c_attn(x), 3 * heads)
        q, k, v = packed[:, :heads], packed[:, heads : 2 * heads], packed[:, 2 * heads :]
        mixed = attend(q, k, v, batch, cache, self.layer)
        return self.c_proj(merge_heads(mixed))


class MLP(nn.Module):
    """Two linear layers around gelu."""

    def __init__(self, config: GPT2Config, rng: np.random.Generator) -> None:
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.c_fc = nn.Linear(config.width, config.hidden, rng=rng)
        self.c_proj = nn.Linear(config.hidden, config.width, rng=rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """(..., width) -> the same."""
        return self.c_proj(gelu(self.c_fc(x), self.approximate))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    feeds_layers = ("ln_1", "ln_2")

    def __init__(self, config: GPT2Config, layer: int, rng: np.random.Generator) -> None:
        self.ln_1 = nn.LayerNorm(config.width, config.eps)
        self.attn = Attention(config, layer, rng)
        self.ln_2 = nn.LayerNorm(config.width, config.eps)
        self.mlp = MLP(config, rng)

    def forward(self, x: ExTensor, batch: Batch, cache: Cache | None) -> ExTensor:
        """(B, T, width) -> the same."""
        x = x + self.attn(self.ln_1(x), batch, cache)
        out: ExTensor = x + self.mlp(self.ln_2(x))
        return out


class Body(nn.Module):
    """The decoder without its head."""

    feeds_layers = ("ln_f",)

    reads_weights = ("wpe",)

    def __init__(self, config: GPT2Config, rng: np.random.Generator) -> None:
        self.wte = nn.Embedding(config.vocab, config.width, STD, rng)
        self.wpe = nn.Embedding(config.context, config.width, STD, rng)
        self.h = nn.ModuleList([Block(config, i, rng) for i in range(config.layers)])
        self.ln_f = nn.LayerNorm(config.width, config.eps)

    def forward(self, batch: Batch, cache: Cache | None = None) -> ExTensor:
        """Tokens (B, T) -> vectors (B, T, width)."""
        context, where = self.wpe.count, batch.positions
        if batch.last >= context:
            raise ValueError(
                f"GPT2: expected positions below the context of {context}, got {batch.last}; the "
                "way out: fewer tokens"
            )
        positions = self.wpe.weight[where] if isinstance(where, slice) else self.wpe(where)
        x = self.wte(batch.tokens) + positions
        for block in self.h:
            x = block(x, batch, cache)
        if cache is not None:
            cache.advance(batch.tokens.shape[1])
        return self.ln_f(x)


class GPT2(Decoder):
    """Tokens to scores of the token that follows each.

    Args:
        config: the shapes.
        rng: draws the weights, normal with standard deviation 0.02; biases start from zeros.

    >>> import models
    >>> import numpy as np
    >>> gpt2 = models.build("gpt2", models.config("gpt2", "nano"), np.random.default_rng(0))
    >>> gpt2(et.zeros((2, 16), dtype="int64")).shape
    (2, 16, 65)
    """

    body = "transformer"

    def __init__(self, config: GPT2Config, rng: np.random.Generator) -> None:
        body = Body(config, rng)
        super().__init__(config, body, body.wte, rng)


def build(config: GPT2Config, rng: np.random.Generator | None) -> GPT2:
    """A model with fresh weights drawn from ``rng``; without memory for them if that is None."""
    return GPT2(config, nn.init.Skeleton() if rng is None else rng)
