"""The form that a layout stores a weight in, and the weight as it is read back from there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.backends.registry import get as get_backend
from extensor.io.gguf.types import gguf_type_of
from extensor.io.safetensors_format import DTYPES
from extensor.io.stored.requantize import requantize, smallest_float
from extensor.io.stored.rows import WeightLayout, read_weight, reciprocal_of, write_weight
from extensor.io.stored.targets import Target, takes_blocks
from extensor.quant.array import QuantArray
from extensor.quant.views import transpose

__all__ = ["new_form", "stored_form"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def new_form(target: Target, name: str, value: Stored) -> Stored:
    """A weight in the form that a layout stores it in."""
    if target.as_stored:
        return value
    if target.dtype is not None:
        return _cast(value, target.dtype)
    blocks = takes_blocks(target, name, tuple(value.shape))
    if target.container == "gguf":
        return _gguf_form(target, value, blocks)
    layout = target.layout
    assert layout is not None
    if not blocks or (not isinstance(value, QuantArray) and value.dtype.kind in "iub"):
        return smallest_float(value) if target.dense is None else _cast(value, target.dense)
    if isinstance(value, QuantArray) and _fits(layout, value):
        made = value
    else:
        spec = layout.spec.replace(axis=-2) if layout.packing == "blocks" else layout.spec
        made = requantize(value, spec)
    if layout.reciprocal and made.tensor_scale is not None:
        divisor, exact = reciprocal_of(np.float32(made.tensor_scale))
        if not exact:
            nearest = np.asarray(np.float32(1) / divisor, np.float32)
            made = dataclasses.replace(made, tensor_scale=nearest)
    return made


def _fits(layout: WeightLayout, q: QuantArray) -> bool:
    return layout.stores(_along_rows(layout, q).spec, len(q.shape))


def _along_rows(layout: WeightLayout, q: QuantArray) -> QuantArray:
    """The weight as the layout stores it: gpt-oss's is transposed."""
    ndim = len(q.shape)
    if layout.packing == "blocks" and ndim > 1 and q.spec.axis == ndim - 2:
        return transpose(q, (*range(ndim - 2), ndim - 1, ndim - 2))
    return q


def _cast(value: Stored, dtype: np.dtype[Any]) -> Array:
    values: Array = (
        value if not isinstance(value, QuantArray) else get_backend("cpu").dequantize(value)
    )
    if values.dtype.kind in "iub":
        return values
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def stored_form(
    target: Target, name: str, value: Stored
) -> tuple[dict[str, tuple[str, tuple[int, ...], Array]], Stored]:
    """What goes into the file, by full names, and the weight read back from it."""
    if not isinstance(value, QuantArray):
        array = np.ascontiguousarray(value) if value.ndim else value
        return {name: (_NAMES[array.dtype], array.shape, array)}, value
    if target.as_stored:
        parts = {f"{name}.{part}": np.asarray(array) for part, array in value.parts.items()}
        return {n: (_NAMES[a.dtype], a.shape, a) for n, a in parts.items()}, value
    assert target.layout is not None
    layout = target.layout
    written = write_weight(layout, value)
    arrays = {suffix: array for suffix, (_, _, array) in written.items()}
    shape = tuple(_along_rows(layout, value).shape)
    back = read_weight(layout, arrays, shape)
    stem = name.removesuffix(layout.target) if layout.target else name
    return {stem + suffix: entry for suffix, entry in written.items()}, back


def _gguf_form(target: Target, value: Stored, blocks: bool) -> Stored:
    if isinstance(value, QuantArray):
        if target.gguf is None:
            return value if gguf_type_of(value) is not None else smallest_float(value)
        if target.gguf.spec is None and len(value.shape) > 1:
            assert target.gguf.dtype is not None
            return _cast(value, target.gguf.dtype)
        if not blocks:
            return smallest_float(value)
        if target.gguf.stores(value.spec, len(value.shape)):
            return value
    elif value.ndim < 2:
        return _cast(value, np.dtype(np.float32))  # ggml adds and multiplies vectors in float32
    if target.gguf is None:
        return value
    if blocks:
        assert target.gguf.spec is not None
        return requantize(value, target.gguf.spec)
    if target.gguf.dtype is not None:
        return _cast(value, target.gguf.dtype)
    return value
