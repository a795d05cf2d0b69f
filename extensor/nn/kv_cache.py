"""Key-value caches: the keys and values of the tokens that a decoder has seen.

A decoder that generates runs each new token through its layers once. Attention reads the keys and
values of all tokens before it from the cache.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from extensor.autograd.recording import replayed
from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends.capture import StepCapture
from extensor.backends.protocol import Backend
from extensor.errors import CaptureError
from extensor.nn.checks import check_size
from extensor.nn.kv_storage import make_storage
from extensor.nn.module import Module
from extensor.quant.spec import QuantSpec

__all__ = ["Cache", "KVCache", "new_cache"]

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
    """Keys and values of every token, or of those that a sliding window still sees.

    Memory doubles as it fills; ``capacity`` tokens fit without a copy. A layer with a window keeps
    at most two windows, or a window and the tokens of one pass.

    Args:
        layers: how many layers write to it.
        capacity: tokens that memory is allocated for at first.
        storage: "float32", "bfloat16", "float16", or a format's name or `QuantSpec` whose blocks
            run along a head's vector; None keeps what comes in. Attention reads float32 values.
        windows: for each layer, how many tokens a query sees, itself included; None, all of them.

    Raises:
        TypeError, ValueError: for sizes that are no int of 1 or more, an unknown storage, or
            windows for another number of layers.

    >>> cache = et.nn.KVCache(layers=1, storage="mxfp8_e4m3")
    >>> k = v = et.ones((1, 2, 3, 64))
    >>> keys, values, slots = cache.update(0, k, v)
    >>> cache.advance(3)
    >>> keys.shape, slots.tolist(), cache.length
    ((1, 2, 3, 64), [0, 1, 2], 3)
    """

    def __init__(
        self,
        layers: int,
        capacity: int = 256,
        storage: str | QuantSpec | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self.layers = check_size("layers", layers)
        self._storage = make_storage(storage)
        if windows is not None and len(windows) != self.layers:
            raise ValueError(
                f"windows: expected one for each of {layers} layers, got {len(windows)}"
            )
        self._count = np.zeros(1, np.int64)
        self._captures: Callable[[], Backend | None] = lambda: None
        self._frozen: Callable[[], StepCapture | None] = lambda: None
        self._advanced: Callable[[], StepCapture | None] = lambda: None
        self._kept = [
            _Layer(
                check_size("capacity", capacity),
                None if w is None else check_size("windows", w),
                self._count,
            )
            for w in windows or [None] * self.layers
        ]

    @property
    def length(self) -> int:
        """Tokens stored by finished forward passes.

        >>> et.nn.KVCache(layers=1).length
        0
        """
        return int(self._count[0])

    @property
    def capacity(self) -> int:
        """Tokens that fit before a layer's memory moves, which ends a GPU's captured step.

        >>> et.nn.KVCache(layers=1, capacity=16).capacity
        16
        """
        return min(kept.capacity for kept in self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is allocated.

        >>> et.nn.KVCache(layers=1).nbytes
        0
        """
        return sum(a.nbytes for layer in self._kept for parts in layer.parts for a in parts)

    def can_replay(self, backend: Backend) -> bool:
        """Whether `attend` takes a next token on a backend, so that a captured step repeats it.

        Args:
            backend: of the keys and values that each layer has been given.

        Returns:
            False for a cache that has been given nothing yet.

        >>> et.nn.KVCache(layers=1).can_replay(et.ones(1).backend)
        False
        """
        sizes = backend.captured_heads
        return all(
            kept.window is None
            and bool(kept.parts)
            and self._storage.keeps(kept.keys)
            and (sizes is None or kept.keys.shape[3] in sizes)
            for kept in self._kept
        )

    def tokens_on_device(self, backend: Backend) -> Any:
        """While a GPU's step is captured: `length`, int64 of shape (), as each replay finds it.

        Args:
            backend: the GPU's.

        Returns:
            The device's number; None outside a capture.

        >>> et.nn.KVCache(layers=1).tokens_on_device(et.ones(1).backend) is None
        True
        """
        capture = backend.capturing
        return None if capture is None else self._kept[0].length_in(capture)

    def update(self, layer: int, k: ExTensor, v: ExTensor) -> tuple[ExTensor, ExTensor, Slots]:
        """Append a layer's new keys and values.

        Args:
            layer: the layer's number, from 0.
            k: keys (B, heads, T, d), already rotated.
            v: values (B, heads, T, dv).

        Returns:
            The keys and values that are kept, and the index of each among all tokens. Without
            ``storage`` they are views of the cache.

        Raises:
            RuntimeError: if a gradient may be asked for, which would end at the cache.
            ValueError: for another batch or head size than before, or values that the storage
                cannot hold.

        >>> cache = et.nn.KVCache(layers=2)
        >>> cache.update(1, et.ones((1, 2, 3, 8)), et.ones((1, 2, 3, 4)))[1].shape
        (1, 2, 3, 4)
        """
        kept = self._checked(layer, k, v)
        backend = k.backend
        if backend.capturing is not None:
            raise CaptureError(
                "capture: a GPU's replay would write to the same place of the cache each time; "
                "capture one token, of a cache without windows that keeps keys as they come, or "
                "call the model without capture"
            )
        append = functools.partial(self._update, kept, backend)
        keys, values = replayed("KVCache.update", append, k.data, v.data, grows=True)
        end = self.length + k.shape[2]
        return wrap(keys, backend), wrap(values, backend), np.arange(kept.start, end)

    def attend(
        self,
        layer: int,
        q: ExTensor,
        k: ExTensor,
        v: ExTensor,
        turn: tuple[ExTensor, ExTensor] | None = None,
    ) -> ExTensor | None:
        """Append one new token's key and value, and attend from it to all tokens.

        On a CPU it gives the bits of `update` and `extensor.scaled_dot_product_attention`; a
        captured step repeats it without Python.

        Args:
            layer: see `update`.
            q: queries (B, H, 1, d).
            k: see `update`.
            v: see `update`.
            turn: cosines and sines (1, d / 2) of the token's place, by which a GPU turns q and k
                first, as `rotary_embedding` does; None, they are turned.

        On a GPU a replay counts the cache's tokens by itself, until its memory is full: `capacity`.

        Returns:
            (B, H, 1, dv); or None, and nothing is appended, for several tokens, a layer with a
            window, queries with a gradient, and keys that are stored otherwise than they are read.

        Raises:
            RuntimeError, ValueError: as `update`.

        >>> cache = et.nn.KVCache(layers=1)
        >>> k = v = et.ones((1, 2, 1, 8))
        >>> cache.attend(0, et.ones((1, 4, 1, 8)), k, v).shape
        (1, 4, 1, 8)
        """
        kept, backend = self._kept[layer], k.backend
        if k.shape[2] != 1 or kept.window is not None or q.requires_grad:
            return None
        if not self._storage.keeps(k.data):
            return None
        self._checked(layer, k, v)
        kept.make_room([(k.data,), (v.data,)])
        self._captures = weakref.ref(backend)
        if backend.capturing is not None:
            self._freeze(backend.capturing)
        scale = 1.0 / math.sqrt(q.shape[3])

        def run(q: Any, k: Any, v: Any, *_: Any) -> Any:
            more = () if turn is None else (tuple(table.data for table in turn),)
            return backend.cached_attention(q, k, v, kept, scale, *more)

        given = q.data, k.data, v.data, kept.length, kept.place
        return wrap(replayed("KVCache.attend", run, *given, python=False), backend)

    def _freeze(self, capture: StepCapture) -> None:
        """Have replays refused that would write to memory that is full or has gone."""
        if self._frozen() is capture:
            return
        first, self._frozen = self._kept[0], weakref.ref(capture)
        capture.frozen(
            "whether a cache's memory was full, and how often it moved",
            lambda: (self.length >= first.capacity, first.moves),
        )

    def _checked(self, layer: int, k: ExTensor, v: ExTensor) -> _Layer:
        """The layer that keys and values are for; see `update`."""
        if k.requires_grad or v.requires_grad:
            raise RuntimeError(
                "KVCache: gradients do not flow through a cache; run the model in et.no_grad(), or "
                "without a cache"
            )
        kept, shapes = self._kept[layer], (_other_axes(k), _other_axes(v))
        if kept.shapes not in (None, shapes):
            raise ValueError(
                f"KVCache: expected keys and values of batch, heads and size {kept.shapes} as "
                f"before, got {shapes}; make a cache for each batch"
            )
        kept.shapes = shapes
        return kept

    def _update(self, kept: _Layer, backend: Backend, k: Any, v: Any) -> tuple[Any, Any]:
        """Append arrays of keys and values; gives all that are kept."""
        new = [self._storage.encode(x, backend) for x in (k, v)]
        kept.append(new)
        end = self.length + k.shape[2]
        views = [tuple(part[:, :, : end - kept.start] for part in parts) for parts in kept.parts]
        keys, values = (
            self._storage.decode(view, x.shape[3], backend)
            for view, x in zip(views, (k, v), strict=True)
        )
        return keys, values

    def advance(self, tokens: int) -> None:
        """End a forward pass.

        Args:
            tokens: how many each layer was given.

        Raises:
            RuntimeError: for a second forward pass in one captured step of a GPU.

        >>> cache = et.nn.KVCache(layers=1)
        >>> cache.advance(4)
        >>> cache.length
        4
        """
        backend = self._captures()
        if backend is not None and backend.capturing is not None:
            if self._advanced() is backend.capturing:
                raise CaptureError(
                    "capture: a GPU's replay counts a cache's tokens once it has ended, so a step "
                    "can append one token to it, got two; capture one call of the model"
                )
            self._advanced = weakref.ref(backend.capturing)
            backend.capturing.on_replay(lambda: self._advance(tokens))
            return
        replayed("KVCache.advance", lambda: self._advance(tokens))

    def _advance(self, tokens: int) -> None:
        self._count += tokens
        for kept in self._kept:
            kept.keep_room()

    def crop(self, length: int) -> None:
        """Forget all tokens but the first ones, so that another text can go on from them.

        Args:
            length: how many tokens stay.

        Raises:
            ValueError: for more tokens than there are, or if a window no longer has what it would
                see.

        >>> cache = et.nn.KVCache(layers=1)
        >>> cache.advance(4)
        >>> cache.crop(3)
        >>> cache.length
        3
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"crop: expected 0 to {self.length} tokens, got {length}")
        for kept in self._kept:
            if kept.window is not None and kept.start > max(0, length + 1 - kept.window):
                raise ValueError(
                    f"crop: a window of {kept.window} tokens has forgotten what token {length} "
                    "sees; make a new cache"
                )
        self._count[0] = length


@dataclass(eq=False)
class _Layer:
    """What is kept of one layer.

    Attributes:
        capacity: tokens that fit into the memory.
        window: how many tokens a query sees; None, all.
        length: see `extensor.backends.protocol.TokenMemory`; of all layers.
        start: the index of the first token that is kept.
        moves: how often the memory has moved.
        parts: the stored arrays of keys, then those of values, with tokens on the third axis.
        shapes: the other axes of the keys and of the values.
        place: see `extensor.backends.protocol.TokenMemory`; zeros before the first `attend`.
    """

    capacity: int
    window: int | None
    length: Slots
    start: int = 0
    moves: int = 0
    parts: list[list[Any]] = field(default_factory=list)
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    place: Slots = field(default_factory=lambda: np.zeros(3, np.int64))

    @property
    def keys(self) -> Any:
        """Keys that are stored as they are read."""
        return self.parts[0][0]

    @property
    def values(self) -> Any:
        """Values likewise."""
        return self.parts[1][0]

    def length_in(self, capture: StepCapture) -> Any:
        """See `extensor.backends.protocol.TokenMemory`."""
        count = self.length
        return capture.cell(
            ("tokens", id(count)),
            np.int64,
            lambda: int(count[0]),
            lambda ahead: int(count[0]) + ahead,
        )

    def append(self, new: Sequence[tuple[Any, ...]]) -> None:
        """Write the encoded keys and values of the tokens after those in use."""
        count, length = self._fit(new), int(self.length[0])
        place = slice(length - self.start, length - self.start + count)
        for held, fresh in zip(self.parts, new, strict=True):
            for memory, part in zip(held, fresh, strict=True):
                memory[:, :, place] = part

    def make_room(self, new: Sequence[tuple[Any, ...]]) -> None:
        """Memory for new tokens, which a kernel will write."""
        self._fit(new)
        self._find_place()

    def keep_room(self) -> None:
        """Memory for one more token, where kernels write them."""
        if self.place[2] and self.length[0] >= self.capacity:
            self._make_room(int(self.length[0]), 1)
            self._find_place()

    def _find_place(self) -> None:
        self.place[2] = self.capacity
        if isinstance(self.keys, np.ndarray):
            self.place[:2] = [a.__array_interface__["data"][0] for a in (self.keys, self.values)]

    def _fit(self, new: Sequence[tuple[Any, ...]]) -> int:
        """Memory for new tokens; how many there are."""
        count, length = new[0][0].shape[2], int(self.length[0])
        if not self.parts:
            self.parts = [[_room(part, self.capacity) for part in parts] for parts in new]
        if length - self.start + count > self.capacity:
            self._make_room(length, count)
            if self.place[2]:
                self._find_place()
        return count

    def _make_room(self, length: int, count: int) -> None:
        """Drop what no window sees any more, or double the memory; both copy what stays."""
        first = self.start
        if self.window is not None:
            first = max(first, length + 1 - self.window)
        needed = length - first + count
        capacity = self.capacity
        if self.window is not None:
            capacity = max(2 * self.window, needed)
        else:
            while capacity < needed:
                capacity *= 2
        old = slice(first - self.start, length - self.start)
        for held in self.parts:
            for number, memory in enumerate(held):
                stays = memory[:, :, old]
                held[number] = _room(memory, capacity)
                held[number][:, :, : length - first] = stays
        self.start, self.capacity = first, capacity
        self.moves += 1


def _room(part: Any, capacity: int) -> Any:
    """Memory for tokens of the kind of ``part``, on its device."""
    batch, heads, _, size = part.shape
    return type(part)((batch, heads, capacity, size), part.dtype)


def _other_axes(x: ExTensor) -> tuple[int, ...]:
    return (*x.shape[:2], x.shape[3])


def new_cache(model: Module, storage: str | QuantSpec | None = None) -> KVCache:
    """An empty cache for a model.

    Args:
        model: a decoder whose ``config`` says its ``layers`` and, where some see a sliding window,
            the ``windows``.
        storage: see `KVCache`.

    Returns:
        The cache.

    Raises:
        TypeError: for a model that does not say how many layers it has.
        ValueError: for an unknown storage.

    >>> model = et.nn.Linear(4, 4)
    >>> et.nn.new_cache(model)
    Traceback (most recent call last):
    TypeError: expected a decoder with config.layers, got Linear
    """
    layers = getattr(getattr(model, "config", None), "layers", None)
    if not isinstance(layers, int):
        raise TypeError(f"expected a decoder with config.layers, got {type(model).__name__}")
    windows = getattr(model.config, "windows", None) or None  # type: ignore[attr-defined]
    return KVCache(layers, storage=storage, windows=windows)
