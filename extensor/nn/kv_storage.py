"""How a cache stores keys and values: as they are, in 16-bit floats, or in blocks.

Blocks run along a head's vector, so that each token is stored on its own. What is stored of a token
depends neither on its batch nor on how many tokens came with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from extensor.backends.protocol import Backend
from extensor.dtypes import DENSE
from extensor.errors import unknown_name
from extensor.formats import FORMATS
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec

__all__ = ["BlockStorage", "DenseStorage", "Storage", "make_storage"]

Array = Any

LARGEST = 672.0
"""The largest magnitude under a tensor scale of 1/4, with block scales up to 448 and codes to 6."""


class Storage(Protocol):
    """Turns vectors (B, H, T, d) into arrays whose third axis is tokens, and back."""

    def keeps(self, x: Array) -> bool:
        """Whether such vectors are stored as they are, and read so."""
        ...

    def encode(self, x: Array, backend: Backend) -> tuple[Array, ...]:
        """The arrays that are stored."""
        ...

    def decode(self, parts: tuple[Array, ...], size: int, backend: Backend) -> Array:
        """The vectors, ``size`` long."""
        ...


@dataclass(frozen=True)
class DenseStorage:
    """Vectors in a float dtype.

    Attributes:
        dtype: its name; None, as they come in.
    """

    dtype: str | None = None

    def keeps(self, x: Array) -> bool:
        """See `Storage.keeps`."""
        return self.dtype is None or (self.dtype == "float32" and x.dtype == np.float32)

    def encode(self, x: Array, backend: Backend) -> tuple[Array, ...]:
        """See `Storage.encode`."""
        return (x if self.dtype is None else backend.cast(x, np.dtype(DENSE[self.dtype].numpy)),)

    def decode(self, parts: tuple[Array, ...], size: int, backend: Backend) -> Array:
        """See `Storage.decode`: 16-bit floats as float32."""
        return parts[0] if self.dtype is None else backend.cast(parts[0], np.dtype(np.float32))


@dataclass(frozen=True)
class BlockStorage:
    """Codes and block scales along each vector.

    A format with a scale for the whole tensor gets a constant one, since the tensor grows. Its
    block scales then hold magnitudes up to `LARGEST`.

    Attributes:
        spec: with the last axis as block axis, resolved for four axes.
    """

    spec: QuantSpec

    def keeps(self, x: Array) -> bool:
        """See `Storage.keeps`."""
        return False

    def encode(self, x: Array, backend: Backend) -> tuple[Array, ...]:
        """See `Storage.encode`.

        Raises:
            ValueError: for magnitudes above `LARGEST` under a constant tensor scale.
        """
        batch, heads, length, size = x.shape
        rows = backend.cast(x, np.dtype(np.float32)).reshape(-1, size)
        constant = self.spec.row.tensor_scale
        if constant:  # one more row, whose largest value fixes the tensor's scale
            top = backend.xp.full((1, size), LARGEST, rows.dtype)
            rows = backend.xp.concatenate([rows, top])
        q, _ = backend.quantize(rows, self.spec.replace(axis=1))
        if constant and float(q.parts["tensor_scale"]) != 0.25:
            raise ValueError(
                f"a cache in {self.spec.format} holds finite magnitudes up to {LARGEST:g}, got "
                f"{float(backend.xp.abs(x).max()):g}; use a format whose blocks have E8M0 scales"
            )
        parts = (q.codes, q.scales, *(() if q.zero_points is None else (q.zero_points,)))
        return tuple(
            part[: batch * heads * length].reshape(batch, heads, length, part.shape[1])
            for part in parts
        )

    def decode(self, parts: tuple[Array, ...], size: int, backend: Backend) -> Array:
        """See `Storage.decode`."""
        xp = backend.xp
        codes, scales, *zero_points = (xp.ascontiguousarray(part) for part in parts)
        scale = xp.asarray(0.25, xp.float32) if self.spec.row.tensor_scale else None
        q = QuantArray(
            codes,
            scales,
            self.spec,
            (*codes.shape[:3], size),
            scale,
            zero_points[0] if zero_points else None,
        )
        return backend.dequantize(q)


def make_storage(kind: str | QuantSpec | None) -> Storage:
    """The storage that a name or a spec stands for.

    Args:
        kind: "float32", "bfloat16", "float16", a format's name, a `QuantSpec`, or None.

    Raises:
        ValueError: for an unknown name, or a spec whose codes of a token depend on other tokens, on
            random bits or on earlier calls.

    >>> from extensor.nn.kv_storage import make_storage
    >>> make_storage("mxfp8_e4m3").spec.rule
    'rceil'
    """
    floats = [name for name, dtype in DENSE.items() if dtype.is_float and dtype.itemsize <= 4]
    if kind is None or (isinstance(kind, str) and kind in floats):
        return DenseStorage(kind)
    if isinstance(kind, str):
        if kind not in FORMATS:
            raise ValueError(unknown_name("cache format", kind, [*floats, *FORMATS]))
        rules = FORMATS[kind].scale_rules
        kind = QuantSpec(kind, scale_rule="rceil" if "rceil" in rules else None)
    return BlockStorage(_per_token(kind))


@functools.cache
def _per_token(spec: QuantSpec) -> QuantSpec:
    """A spec for vectors, each quantized by itself."""
    resolved = spec.replace(axis=-1).resolve(4)
    if spec.tile is None and resolved.tile == "tensor":
        resolved = resolved.replace(tile="channel")
    alone = resolved.tile == "channel" or (
        isinstance(resolved.tile, tuple) and resolved.tile[0] == 1
    )
    steady = spec.rounding == "nearest_even" and spec.statistic != "running"
    plain = spec.transform is None and not spec.row.outliers and not spec.rebased
    if not (alone and steady and plain and spec.element_scale == 1.0):
        raise ValueError(
            "a cache quantizes each token by itself: expected tiles (1, n) or 'channel', rounding "
            "to nearest, no running statistic, transform, outliers, rebasing or element_scale, got "
            f"{spec}"
        )
    return resolved
