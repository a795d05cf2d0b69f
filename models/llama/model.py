"""Llama and its relatives: pre-norm decoders with rotary positions.

Sources: Llama (Touvron et al., arXiv 2302.13971, section 2.2); grouped queries, arXiv 2305.13245;
sliding windows, Mistral (arXiv 2310.06825, section 2); norms of queries and keys, Qwen3
(arXiv 2505.09388, section 2); sinks and clipped gates, gpt-oss (arXiv 2508.10925). Modules are
named as in Hugging Face's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor import (
    ExTensor,
    gated_silu,
    merge_heads,
    nn,
    rotary_embedding,
    split_heads,
)
from extensor.autograd.mode import is_grad_enabled
from extensor.autograd.recording import replayed
from extensor.autograd.tensor import wrap
from extensor.backends.protocol import GatedExperts
from extensor.dtypes import bfloat16
from extensor.errors import CaptureError
from extensor.nn.kv_cache import Cache, KVCache
from extensor.nn.linear import apply_all, can_group, gated_linear, grouped_linear
from extensor.nn.mixture import TopKRouter
from extensor.nn.norm import add_and_norm

from ..decoder import Decoder
from ..decoding import Batch, attend
from ..language import STD
from .configs import ExpertsConfig, LlamaConfig

__all__ = ["Llama", "build"]


@dataclass(frozen=True, eq=False)
class Step:
    """What all layers of a forward pass share."""

    batch: Batch
    cos: ExTensor
    sin: ExTensor
    cache: Cache | None


class Attention(nn.Module):
    """Causal self-attention of grouped, turned heads."""

    def __init__(self, config: LlamaConfig, layer: int, rng: np.random.Generator) -> None:
        self.layer, self.config = layer, config
        width, size, bias = config.width, config.head_size, config.qkv_bias
        self.window = config.windows[layer] if config.windows else None
        self.q_proj = nn.Linear(width, config.heads * size, bias, rng)
        self.k_proj = nn.Linear(width, config.kv_heads * size, bias, rng)
        self.v_proj = nn.Linear(width, config.kv_heads * size, bias, rng)
        self.o_proj = nn.Linear(config.heads * size, width, config.out_bias, rng)
        self.q_norm = nn.RMSNorm(size, config.eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(size, config.eps) if config.qk_norm else None
        self.sinks = nn.Parameter(np.zeros(config.heads, np.float32)) if config.sinks else None

    def forward(self, x: ExTensor, step: Step) -> ExTensor:
        """(B, T, width) -> the same."""
        config = self.config
        projected = apply_all((self.q_proj, self.k_proj, self.v_proj), x)
        q, k, v = map(split_heads, projected, (config.heads, config.kv_heads, config.kv_heads))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if (one := self._turned_in_place(q, k, v, step)) is not None:
            return self.o_proj(merge_heads(one))
        interleaved = config.rope.interleaved
        q = rotary_embedding(q, step.cos, step.sin, interleaved=interleaved)
        k = rotary_embedding(k, step.cos, step.sin, interleaved=interleaved)
        mixed = attend(q, k, v, step.batch, step.cache, self.layer, self.window, self.sinks)
        return self.o_proj(merge_heads(mixed))

    def _turned_in_place(
        self, q: ExTensor, k: ExTensor, v: ExTensor, step: Step
    ) -> ExTensor | None:
        """Attention of a GPU's next token, by a kernel that applies rotary angles; else None."""
        cache, rope, batch = step.cache, self.config.rope, step.batch
        plain = self.window is None and self.sinks is None and batch.padding is None
        whole = step.cos.ndim == 2 and 2 * step.cos.shape[-1] == q.shape[-1]
        if not (plain and whole and isinstance(cache, KVCache)) or rope.interleaved:
            return None
        if q.backend.captured_heads is None or q.shape[2] != 1:  # a CPU
            return None
        return cache.attend(self.layer, q, k, v, (step.cos, step.sin))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) up(x)), on each token by itself (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, bias: bool, rng: np.random.Generator) -> None:
        self.gate_proj = nn.Linear(width, hidden, bias, rng)
        self.up_proj = nn.Linear(width, hidden, bias, rng)
        self.down_proj = nn.Linear(hidden, width, bias, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """(..., width) -> the same."""
        return self.down_proj(gated_linear(self.gate_proj, self.up_proj, x))


class Expert(nn.Module):
    """A gated feed-forward network whose parts are named as a family's files name them."""

    def __init__(self, width: int, config: ExpertsConfig, rng: np.random.Generator) -> None:
        self.config = config
        gate, up, down = config.parts
        setattr(self, gate, nn.Linear(width, config.hidden, config.bias, rng))
        setattr(self, up, nn.Linear(width, config.hidden, config.bias, rng))
        setattr(self, down, nn.Linear(config.hidden, width, config.bias, rng))

    def forward(self, x: ExTensor) -> ExTensor:
        """(N, width) -> the same."""
        config = self.config
        gate, up, down = (getattr(self, part) for part in config.parts)
        hidden = gated_silu(gate(x), up(x), alpha=config.alpha, limit=config.limit)
        out: ExTensor = down(hidden)
        return out

    def run_choices(
        self, experts: Sequence[Expert], x: ExTensor, weights: ExTensor, chosen: ExTensor
    ) -> ExTensor | None:
        """The weighted sum of what chosen experts make of bfloat16 tokens; None elsewhere."""
        config, backend = self.config, x.backend
        layers = [[getattr(e, part) for e in experts] for part in config.parts]
        if x.dtype is not bfloat16 or not can_group([one for each in layers for one in each], x):
            return None
        if layers[0][0].quant is None:  # results are float32
            return None
        biases: Any = None
        if config.bias:
            biases = tuple([one.bias.data for one in each] for each in layers)
            if any(b.dtype != x.data.dtype for each in biases for b in each):
                return None
        matrices = [[one.weight.data for one in each] for each in layers]
        gates, ups, downs = matrices
        given = GatedExperts(gates, ups, downs, biases, config.alpha, config.limit)
        return wrap(backend.gated_experts(x.data, weights.data, chosen.data, given), backend)

    def run_groups(
        self, experts: Sequence[Expert], x: ExTensor, ends: Sequence[int]
    ) -> ExTensor | None:
        """What experts make of the rows of each, in three products; None if they run alone."""
        config = self.config
        gates, ups, downs = ([getattr(e, part) for e in experts] for part in config.parts)
        if not can_group([*gates, *ups, *downs], x, gradients=True):
            return None
        gate, up = grouped_linear(gates, x, ends), grouped_linear(ups, x, ends)
        hidden = gated_silu(gate, up, alpha=config.alpha, limit=config.limit)
        return grouped_linear(downs, hidden, ends)


def mixture(width: int, config: ExpertsConfig, rng: np.random.Generator) -> nn.MixtureOfExperts:
    """The experts of a layer and their router."""
    router = TopKRouter(width, config.count, config.active, config.normalize, config.bias, rng)
    experts = nn.ModuleList([Expert(width, config, rng) for _ in range(config.count)])
    return nn.MixtureOfExperts(router, experts, config.router)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    feeds_layers = ("input_layernorm", "post_attention_layernorm")

    def __init__(self, config: LlamaConfig, layer: int, rng: np.random.Generator) -> None:
        self.input_layernorm = nn.RMSNorm(config.width, config.eps)
        self.self_attn = Attention(config, layer, rng)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.eps)
        if config.experts is None or layer in config.dense:
            self.part = "mlp"
            self.mlp = GatedMLP(config.width, config.hidden, config.mlp_bias, rng)
        else:
            self.part = config.experts.block
            setattr(self, self.part, mixture(config.width, config.experts, rng))

    def forward(self, x: ExTensor, step: Step) -> ExTensor:
        """(B, T, width) -> the same."""
        x, rest = self.parts(x, None, step)
        return x + rest

    def parts(self, x: ExTensor, rest: ExTensor | None, step: Step) -> tuple[ExTensor, ExTensor]:
        """Two parts of the layer's result, of two of its input: the next norm adds them."""
        if rest is None:
            y = self.input_layernorm(x)
        else:
            x, y = add_and_norm(self.input_layernorm, x, rest)
        x, y = add_and_norm(self.post_attention_layernorm, x, self.self_attn(y, step))
        return x, getattr(self, self.part)(y)


class Body(nn.Module):
    """The decoder without its head."""

    feeds_layers = ("norm",)

    def __init__(self, config: LlamaConfig, rng: np.random.Generator) -> None:
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.width, STD, rng)
        self.layers = nn.ModuleList([Layer(config, i, rng) for i in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, config.eps)
        self.rotary = nn.RotaryTable(config.rope)

    def _angles(self, last: int, positions: slice | ExTensor, like: ExTensor) -> tuple[Any, Any]:
        """Cosines and sines at some positions up to ``last``, as arrays."""
        scaling = self.config.rope.scaling
        if last >= self.config.context and (scaling is None or scaling.kind != "dynamic"):
            raise ValueError(
                f"Llama: expected positions below the context of {self.config.context}, got "
                f"{last}; the way out: fewer tokens, or a configuration with rope scaling"
            )
        cos, sin = self.rotary.rows(positions, last + 1, like)
        return cos.data, sin.data

    def _replayed_angles(self, cache: KVCache, like: ExTensor) -> tuple[Any, Any]:
        """The next token's angles, which each replay of a GPU's captured step looks up."""
        scaling, capture = self.config.rope.scaling, like.backend.capturing
        dynamic = scaling is not None and scaling.kind == "dynamic"
        most = scaling.context if scaling is not None and dynamic else self.config.context
        rows = min(cache.capacity, most)
        cos, sin = self.rotary.rows(slice(0, rows), rows, like)
        assert capture is not None
        if cache.length >= rows:
            raise CaptureError(
                f"capture: position {cache.length} is beyond the {rows} positions whose angles a "
                "replay can look up; call the model without capture"
            )
        capture.keep(cos.data, sin.data)  # a longer text would let the table go
        capture.frozen("whether a position is beyond the table", lambda: cache.length >= rows)
        place = cache.tokens_on_device(like.backend).reshape(1) % rows
        return cos.data[place], sin.data[place]

    def forward(self, batch: Batch, cache: Cache | None = None) -> ExTensor:
        """Tokens (B, T) -> vectors (B, T, width)."""
        x = self.embed_tokens(batch.tokens)

        def angles() -> tuple[Any, Any]:
            replays = x.backend.capturing is not None and isinstance(batch.positions, slice)
            if replays and isinstance(cache, KVCache):
                return self._replayed_angles(cache, x)
            last, positions = batch.last, batch.positions
            if cache is not None and isinstance(positions, slice):  # after replays, further on
                positions = slice(cache.length, cache.length + batch.tokens.shape[1])
                last = positions.stop - 1
            return self._angles(last, positions, x)

        cos, sin = (wrap(array, x.backend) for array in replayed("rotary positions", angles))
        if cos.ndim == 3:  # (B, T, n): the same for all heads
            cos, sin = cos.expand_dims(1), sin.expand_dims(1)
        step = Step(batch, cos, sin, cache)
        rest, own = None, [layer for layer in self.layers if type(layer) is Layer]
        hooked = any(layer._hooks or layer._pre_hooks for layer in own)
        # A checkpointed, hooked or replaced layer needs its whole input; others leave a sum to the
        # next norm, which reads it anyway.
        if is_grad_enabled() or hooked or len(own) < len(self.layers):
            for layer in self.layers:
                x = layer(x, step)
        else:
            for layer in own:
                x, rest = layer.parts(x, rest, step)
        if cache is not None:
            cache.advance(batch.tokens.shape[1])
        return self.norm(x) if rest is None else add_and_norm(self.norm, x, rest)[1]


class Llama(Decoder):
    """Tokens to scores of the token that follows each.

    Args:
        config: the shapes.
        rng: draws the weights, normal with standard deviation 0.02.

    >>> import models
    >>> import numpy as np
    >>> llama = models.build("llama", models.config("llama", "nano"), np.random.default_rng(0))
    >>> llama(et.zeros((2, 16), dtype="int64")).shape
    (2, 16, 65)
    """

    body = "model"

    def __init__(self, config: LlamaConfig, rng: np.random.Generator) -> None:
        body = Body(config, rng)
        super().__init__(config, body, body.embed_tokens, rng)

    @property
    def recordable(self) -> bool:
        """Whether `extensor.capture` can repeat a pass with a cache: no window, no experts."""
        return not self.config.windows and self.config.experts is None


def build(config: LlamaConfig, rng: np.random.Generator | None) -> Llama:
    """A model with fresh weights drawn from ``rng``; without memory for them if that is None."""
    return Llama(config, nn.init.Skeleton() if rng is None else rng)
