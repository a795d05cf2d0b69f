"""Padding masks, positions and attention masks of a batch of tokens, for all decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor import ExTensor, scaled_dot_product_attention
from extensor.autograd.recording import refuse_in_capture
from extensor.nn.kv_cache import Cache, KVCache

__all__ = ["Batch", "attend", "batch_of"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of one forward pass.

    Attributes:
        tokens: integers (B, T).
        past: tokens of each sequence that the cache holds.
        padding: bool (B, past + T) on the tokens' device, True for real ones; None if all are.
        positions: a range, or integers (B, T).
        last: the largest position.
    """

    tokens: ExTensor
    past: int
    padding: Any
    positions: slice | ExTensor
    last: int

    def mask(self, slots: Array | None, window: int | None) -> tuple[Any, bool]:
        """The mask of a layer beside causality, and whether that is by the order of its keys.

        Args:
            slots: index of each key among all tokens, ascending; None for 0, 1, 2 ...
            window: how many tokens the layer sees; None for all.

        Returns:
            A mask that broadcasts to (B, heads, T, S) or None; and True where keys are consecutive,
            so that query t sees the keys up to t + S - T, the last ``window`` of them.
        """
        xp, length = self.tokens.backend.xp, self.tokens.shape[1]
        if slots is None or slots[-1] - slots[0] == len(slots) - 1:
            if self.padding is None:
                return None, True
            start = 0 if slots is None else int(slots[0])
            return self.padding[:, None, None, start:], True
        keys = xp.asarray(slots)
        own = self.past + xp.arange(length)[:, None]
        seen = keys <= own
        if window is not None:
            seen &= keys > own - window
        return seen if self.padding is None else seen & self.padding[:, None, None, keys], False


def batch_of(
    name: str,
    tokens: ExTensor,
    attention_mask: Any = None,
    positions: Any = None,
    cache: Cache | None = None,
) -> Batch:
    """Check what a decoder is called with.

    Args:
        name: the model, for errors.
        tokens: integers (B, T), T of 1 or more.
        attention_mask: (B, past + T), 1 or True for real tokens, 0 for padding on either side;
            None if all are real.
        positions: integers (T,) or (B, T); None for how many real tokens stand before each.
        cache: holds the tokens before these.

    Returns:
        The batch.

    Raises:
        TypeError, ValueError: for what does not fit.
    """
    if not isinstance(tokens, ExTensor) or not tokens.dtype.is_integer:
        raise TypeError(
            f"{name}: expected a tensor of integers (B, T), got "
            f"{tokens.dtype.name if isinstance(tokens, ExTensor) else type(tokens).__name__}"
        )
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"{name}: expected tokens (B, T) with T of 1 or more, got {tokens.shape}")
    past, (count, length) = 0 if cache is None else cache.length, tokens.shape
    padding = None
    if attention_mask is not None:
        host = _host(attention_mask).astype(bool)
        if host.shape != (count, past + length):
            raise ValueError(
                f"{name}: expected an attention_mask {(count, past + length)}, the "
                f"{past} tokens of the cache and {length} new ones, got {host.shape}"
            )
        padding = None if host.all() else host
    if positions is not None:
        given = np.broadcast_to(_host(positions), tokens.shape)
    elif padding is None:
        return Batch(tokens, past, None, slice(past, past + length), past + length - 1)
    else:
        given = np.maximum(padding.cumsum(axis=1)[:, past:] - 1, 0)
    if given.min() < 0:
        raise ValueError(f"{name}: expected positions of 0 or more, got {int(given.min())}")
    backend = tokens.backend
    on_device = None if padding is None else backend.xp.asarray(padding)
    where = ExTensor(given.astype(np.int64), device=tokens.device)
    return Batch(tokens, past, on_device, where, int(given.max()))


def attend(
    q: ExTensor,
    k: ExTensor,
    v: ExTensor,
    batch: Batch,
    cache: Cache | None,
    layer: int,
    window: int | None = None,
    sinks: ExTensor | None = None,
) -> ExTensor:
    """Attention of new tokens to those of a cache and to each other.

    Args:
        q: queries (B, H, T, d).
        k: keys (B, Hkv, T, d), which the cache takes.
        v: values (B, Hkv, T, dv), likewise.
        batch: which tokens they are.
        cache: holds the tokens before these.
        layer: the cache's.
        window: how many tokens a query sees; None, all.
        sinks: see `extensor.scaled_dot_product_attention`.

    Returns:
        (B, H, T, dv).
    """
    slots, plain = None, window is None and batch.padding is None and sinks is None
    if cache is not None:
        if plain and isinstance(cache, KVCache):
            one = cache.attend(layer, q, k, v)
            if one is not None:
                return one
        k, v, slots = cache.update(layer, k, v)
        if window is not None:
            refuse_in_capture("what a layer with a sliding window sees changes from call to call")
    window = window if window is not None and window < k.shape[2] else None
    mask, ordered = batch.mask(slots, window)
    causal = ordered and (q.shape[2] > 1 or window is not None)
    return scaled_dot_product_attention(
        q, k, v, sinks, causal=causal, window=window if ordered else None, mask=mask
    )


def _host(values: Any) -> Array:
    return values.numpy() if isinstance(values, ExTensor) else np.asarray(values)
