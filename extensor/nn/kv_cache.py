"""Keys and values of the tokens that a decoder has seen: what attention layers ask of a cache.

A decoder that generates runs each new token through its layers once. Attention reads the keys and
values of all tokens before it from the cache.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from extensor.autograd.tensor import ExTensor, wrap
from extensor.nn.checks import check_size

__all__ = ["Cache", "KVCache"]

Slots = npt.NDArray[np.int64]


@runtime_checkable
class Cache(Protocol):
    """What a decoder asks of a cache.

    A forward pass calls `update` once for each layer, with the same number of tokens, and `advance`
    at its end.
    """

    @property
    def length(self) -> int:
        """How many tokens were stored by finished forward passes."""
        ...

    def update(self, layer: int, k: ExTensor, v: ExTensor) -> tuple[ExTensor, ExTensor, Slots]:
        """Append a layer's new keys and values.

        Args:
            layer: the layer's number, from 0.
            k: keys (B, heads, T, d), already rotated.
            v: values (B, heads, T, dv).

        Returns:
            All keys (B, heads, S, d) and values (B, heads, S, dv) that are kept, the new ones last,
            and the index of each among all tokens so far: int64 (S,), ascending.
        """
        ...

    def advance(self, tokens: int) -> None:
        """End a forward pass of so many tokens: `length` grows by it."""
        ...


class KVCache:
    """Every key and value, in the dtype that they come in.

    Memory doubles as it fills; ``capacity`` tokens fit without a copy.

    Args:
        layers: how many layers write to it.
        capacity: tokens that memory is allocated for at first.

    Raises:
        TypeError, ValueError: for sizes that are no int of 1 or more.

    >>> cache = et.nn.KVCache(layers=1)
    >>> k = v = et.ones((1, 2, 3, 8))
    >>> keys, values, slots = cache.update(0, k, v)
    >>> cache.advance(3)
    >>> keys.shape, slots.tolist(), cache.length
    ((1, 2, 3, 8), [0, 1, 2], 3)
    """

    def __init__(self, layers: int, capacity: int = 256) -> None:
        self.layers = check_size("layers", layers)
        self._capacity = check_size("capacity", capacity)
        self._length = 0
        self._stored: list[tuple[Any, Any] | None] = [None] * self.layers
        self._slots = np.arange(self._capacity)

    @property
    def length(self) -> int:
        """Tokens stored by finished forward passes.

        >>> et.nn.KVCache(layers=1).length
        0
        """
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is allocated.

        >>> et.nn.KVCache(layers=1).nbytes
        0
        """
        return sum(k.nbytes + v.nbytes for pair in self._stored if pair for k, v in (pair,))

    def update(self, layer: int, k: ExTensor, v: ExTensor) -> tuple[ExTensor, ExTensor, Slots]:
        """Append a layer's new keys and values.

        Args:
            layer: the layer's number, from 0.
            k: keys (B, heads, T, d), already rotated.
            v: values (B, heads, T, dv).

        Returns:
            All keys and values, views of the cache, and their indices 0..S - 1.

        Raises:
            RuntimeError: if a gradient may be asked for, which would end at the cache.
            ValueError: for another batch or head size than before.

        >>> cache = et.nn.KVCache(layers=2)
        >>> cache.update(1, et.ones((1, 2, 3, 8)), et.ones((1, 2, 3, 4)))[1].shape
        (1, 2, 3, 4)
        """
        if k.requires_grad or v.requires_grad:
            raise RuntimeError(
                "KVCache: gradients do not flow through a cache; run the model in et.no_grad(), or "
                "without a cache"
            )
        start, end = self._length, self._length + k.shape[2]
        if end > self._capacity:
            self._grow(end)
        kept = self._stored[layer]
        if kept is None:
            kept = self._stored[layer] = (self._empty(k), self._empty(v))
        for held, new in zip(kept, (k, v), strict=True):
            if held.shape[:2] != new.shape[:2] or held.shape[3] != new.shape[3]:
                raise ValueError(
                    f"KVCache: expected keys or values of batch, heads and size "
                    f"{(*held.shape[:2], held.shape[3])} as before, got "
                    f"{(*new.shape[:2], new.shape[3])}; make a cache for each batch"
                )
            held[:, :, start:end] = new.data
        keys, values = (wrap(held[:, :, :end], k.backend) for held in kept)
        return keys, values, self._slots[:end]

    def advance(self, tokens: int) -> None:
        """End a forward pass.

        Args:
            tokens: how many each layer was given.

        >>> cache = et.nn.KVCache(layers=1)
        >>> cache.advance(4)
        >>> cache.length
        4
        """
        self._length += tokens

    def _empty(self, x: ExTensor) -> Any:
        batch, heads, _, size = x.shape
        return x.backend.xp.empty((batch, heads, self._capacity, size), x.data.dtype)

    def _grow(self, needed: int) -> None:
        """Double the memory until ``needed`` tokens fit."""
        while self._capacity < needed:
            self._capacity *= 2
        self._slots = np.arange(self._capacity)
        for layer, pair in enumerate(self._stored):
            if pair is not None:
                self._stored[layer] = (self._wider(pair[0]), self._wider(pair[1]))

    def _wider(self, held: Any) -> Any:
        batch, heads, length, size = held.shape
        wide = type(held)((batch, heads, self._capacity, size), held.dtype)
        wide[:, :, :length] = held
        return wide
