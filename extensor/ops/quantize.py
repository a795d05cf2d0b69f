"""Into and out of blocked storage, and data movement without decoding.

`quantize` and `dequantize` are primitives like any other; their gradient is straight-through. The
engine dequantizes a blocked tensor in a computing operation (the documented promotion: blocked with
anything gives float32). The rules here let transposing, slicing and reshaping keep the codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.positions import check_bounds
from extensor.autograd.primitive import BadInput, Sample, blocked_rule, primitive
from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends.protocol import Array, Backend
from extensor.quant import reference, views
from extensor.quant.array import QuantArray
from extensor.quant.reference import RunningAmax
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["dequantize", "quantize"]

_ONCE = (
    "quantizing is piecewise constant: its straight-through gradient has no derivative of its own; "
    "differentiate the float tensor instead"
)


def _quantize_forward(
    backend: Backend,
    x: Array,
    spec: QuantSpec,
    stream: Stream | None,
    running: RunningAmax | None,
    clip_gradient: bool,
) -> tuple[QuantArray, Array | None]:
    before = None
    if running is not None:
        before = running.value
        running.update(x, spec, backend.xp)
    if clip_gradient and before is None:
        q, _, mask = backend.quantize_clipped(x, spec, stream)
        return q, mask
    q, _ = backend.quantize(x, spec, stream, before)
    if not clip_gradient:
        return q, None
    return q, reference.clip_mask(backend.cast(x, np.dtype(np.float32)), q, backend.xp)


def _quantize_vjp(
    backend: Backend,
    g: Array,
    out: Any,
    inputs: tuple[Array],
    needs: tuple[bool],
    saved: Array | None,
    spec: QuantSpec,
    **params: Any,
) -> tuple[Array]:
    """Straight through; clipped values get nothing, in a transform's domain where there is one."""
    if saved is None:
        return (g,)
    wide = backend.cast(g, np.dtype(np.float32))
    return (backend.cast(reference.clipped_gradient(wide, saved, spec, backend.xp), g.dtype),)


def _quantize_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = rng.standard_normal((4, 40)).astype(np.float32)
    yield Sample((x, QuantSpec("mxfp4")))
    yield Sample((x, QuantSpec("nvfp4", axis=0)))


@primitive(
    forward=_quantize_forward,
    fused_vjp=_quantize_vjp,
    once=_ONCE,
    reads="nothing",
    saves=True,
    samples=_quantize_samples,
    errors=(
        BadInput((np.ones((2, 3)), "mxfp4"), TypeError, "expected a QuantSpec"),
        BadInput((np.ones((2, 3)), QuantSpec("mxfp4", axis=2)), ValueError, "axis"),
        BadInput((np.ones((2, 3)), QuantSpec("mxfp4", rounding="stochastic")), ValueError, "seed"),
    ),
)
def quantize(
    x: ExTensor,
    spec: QuantSpec,
    seed: int | None = None,
    running: RunningAmax | None = None,
    clip_gradient: bool = False,
) -> ExTensor:
    """The operation of `ExTensor.quantize`, which says what the arguments are."""
    if not isinstance(spec, QuantSpec):
        raise TypeError(
            f"quantize: expected a QuantSpec, got {spec!r}; et.QuantSpec('mxfp4'), or x.to_mxfp4()"
        )
    if x.dtype.is_blocked:
        raise TypeError(f"quantize: the tensor is already {x.dtype.name}; call .dequantize() first")
    if not x.dtype.is_float:
        raise TypeError(
            f"quantize: expected a float tensor, got {x.dtype.name}; convert with x.to('float32')"
        )
    if (seed is None) == (spec.rounding == "stochastic"):
        raise ValueError(
            f"rounding={spec.rounding!r} {'needs' if seed is None else 'takes no'} seed"
        )
    if (running is None) == (spec.statistic == "running"):
        raise ValueError(
            f"statistic={spec.statistic!r} {'needs' if running is None else 'takes no'} running="
            "RunningAmax()"
        )
    resolved = spec.resolve(x.ndim)
    if clip_gradient and not spec.clips:
        raise ValueError(
            "clip_gradient needs symmetric codes, no minimum, no rebasing and no outlier codec, "
            f"got {spec}"
        )
    stream = None if seed is None else Stream(seed)
    return apply(
        "quantize", x, spec=resolved, stream=stream, running=running, clip_gradient=clip_gradient
    )


@primitive(
    forward=lambda backend, q: backend.dequantize(q) if isinstance(q, QuantArray) else q,
    vjps=(lambda g, out, q: g,),
    reads="inputs",
    takes_blocked=True,
    samples=lambda rng: [Sample((rng.standard_normal((4, 40)).astype(np.float32),))],
)
def dequantize(q: ExTensor) -> ExTensor:
    """A blocked tensor's values, float32 of its shape; a dense tensor is returned as it is."""
    return apply("dequantize", q) if q.dtype.is_blocked else q


# --- moving blocked data ------------------------------------------------------------------------


def _moved(x: ExTensor, q: QuantArray) -> ExTensor:
    if x.requires_grad:
        raise TypeError(
            "moving a blocked tensor that is part of a graph has no gradient; move the float "
            "tensor and quantize it afterwards, or use x.detach()"
        )
    return wrap(q, x.backend)


@blocked_rule("clone")
def _clone(x: ExTensor) -> ExTensor:
    parts = {name: part.copy() for name, part in x.data.parts.items()}
    return _moved(x, dataclasses.replace(x.data, **parts))


@blocked_rule("permute")
def _permute(x: ExTensor, axes: tuple[int, ...]) -> ExTensor:
    return _moved(x, views.transpose(x.data, axes))


@blocked_rule("reshape")
def _reshape(x: ExTensor, shape: tuple[int, ...]) -> ExTensor:
    return _moved(x, views.reshape(x.data, shape))


@blocked_rule("take")
def _take(x: ExTensor, index: ExTensor, axis: int) -> ExTensor:
    check_bounds(x.backend, [(index.data, x.shape[axis], axis)], "take: ")
    return _moved(x, views.take(x.data, index.data, axis))


@blocked_rule("getitem")
def _getitem(x: ExTensor, key: tuple[Any, ...]) -> ExTensor:
    entries = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(e, (int, slice, type(...))) for e in entries):
        raise TypeError(
            "a blocked tensor takes slices and ints only; call .dequantize() for the rest"
        )
    if ... in entries:
        at = entries.index(...)
        fill = (slice(None),) * (x.ndim - len(entries) + 1)
        entries = entries[:at] + fill + entries[at + 1 :]
    if len(entries) > x.ndim:
        raise IndexError(f"{len(entries)} indices for a blocked tensor of {x.ndim} axes")
    entries += (slice(None),) * (x.ndim - len(entries))
    return _moved(x, views.slice_blocks(x.data, entries))
