"""Into and out of blocked storage, and what data movement means on it.

`quantize` and `dequantize` are primitives like any other; their gradient is
straight-through. A blocked tensor in a computing operation is dequantized by the
engine (the documented promotion: blocked with anything gives float32); the rules
here say what transposing, slicing and reshaping do without decoding.

`matmul` and `linear` multiply what is stored wherever the right operand is blocked: one product of
all rows of x, or a batch of them, by the backend's `block_scaled_matmul` and `weight_only_matmul`
(whose `path` says which code that is, and where it decodes). x is blocked, float32 or bfloat16;
float16 is widened to float32. Only these are products of dequantized values:

- the left operand alone is blocked;
- the other operand is float64 or complex;
- tiles of several rows on the right, (..., K, N) of three axes or more blocked along K: their rows
  run through the axis before K, and so through several matrices. `linear` with each matrix
  multiplies what is stored.

x of more than two axes is read as one matrix times a matrix on the right; only where tiles of
several rows do not divide the rows of each of its matrices is there a product for each. Gradients
are products of dequantized values, straight-through.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from extensor.autograd.apply import apply, wrap
from extensor.autograd.primitive import BadInput, Sample, blocked_rule, primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.generic.quantize import weight_activations
from extensor.backends.protocol import Array, Backend
from extensor.dtypes import float32, promote
from extensor.ops.linalg import as_rows
from extensor.quant import views
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
    q, _ = backend.quantize(x, spec, stream, before)
    return q, _inside(backend, x, q) if clip_gradient else None


def _inside(backend: Backend, x: Array, q: QuantArray) -> Array:
    """Where |x| is within the block's largest representable value."""
    xp, element = backend.xp, q.spec.row.element
    octet = element.max_magnitude_code
    if element.bits == 4:
        octet |= octet << 4
    top = backend.dequantize(
        dataclasses.replace(q, codes=xp.full(q.codes.shape, octet, dtype=xp.uint8))
    )
    return xp.abs(x) <= top


def _quantize_vjp(
    backend: Backend,
    g: Array,
    out: Any,
    inputs: tuple[Array],
    needs: tuple[bool],
    saved: Array | None,
    **params: Any,
) -> tuple[Array]:
    return (g if saved is None else g * saved,)


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
        BadInput((np.ones((2, 3)), "mxfp4"), TypeError, "wanted a QuantSpec"),
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
    """Quantize a float tensor to blocked storage.

    Args:
        x: float tensor of one axis or more; float64 and 16-bit floats are cast to float32 first.
        spec: format, axis, tile, scale rule, rounding and the rest.
        seed: names the random bits of stochastic rounding; given exactly then.
        running: the maxima kept from call to call, with ``statistic="running"``; updated here.
        clip_gradient: let no gradient through where |x| exceeds its block's largest value (needs
            4- or 8-bit symmetric codes and no transform). By default it is straight-through.

    Returns:
        A blocked tensor of x's shape.

    Raises:
        TypeError: if x is not a dense float tensor or spec is not a QuantSpec.
        ValueError: if the spec does not fit x, or seed or running is missing or superfluous.
    """
    if not isinstance(spec, QuantSpec):
        raise TypeError(
            f"quantize: wanted a QuantSpec, got {spec!r}; et.QuantSpec('mxfp4'), or x.to_mxfp4()"
        )
    if x.dtype.is_blocked:
        raise TypeError(f"quantize: the tensor is already {x.dtype.name}; call .dequantize() first")
    if not x.dtype.is_float:
        raise TypeError(
            f"quantize: wanted a float tensor, got {x.dtype.name}; convert with x.to('float32')"
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
    if clip_gradient and (
        spec.transform or not spec.symmetric or spec.row.outliers or spec.row.element.bits == 6
    ):
        raise ValueError(
            "clip_gradient needs 4- or 8-bit symmetric codes, no transform and no outlier codec, "
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


@blocked_rule("permute")
def _permute(x: ExTensor, axes: tuple[int, ...]) -> ExTensor:
    return _moved(x, views.transpose(x.data, axes))


@blocked_rule("reshape")
def _reshape(x: ExTensor, shape: tuple[int, ...]) -> ExTensor:
    return _moved(x, views.reshape(x.data, shape))


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


# --- products of blocked data -------------------------------------------------------------------


def _check_axis(op: str, side: str, tensor: ExTensor, axis: int) -> None:
    if tensor.dtype.is_blocked and tensor.spec.axis != axis:
        raise ValueError(
            f"{op}: {side} is blocked along axis {tensor.spec.axis}, wanted the contraction axis "
            f"{axis}; quantize it with axis={axis}, or call .dequantize()"
        )


def _stays_packed(a: ExTensor, b: ExTensor) -> bool:
    """Whether a and b are multiplied as they are stored; see the module's docstring."""
    if not b.dtype.is_blocked or promote(a.dtype, b.dtype) is not float32:
        return False
    tile = b.spec.tile
    apart = b.ndim == 2 or b.spec.axis == b.ndim - 1  # else a tile's rows lie in several matrices
    return apart or not isinstance(tile, tuple) or tile[0] == 1


@blocked_rule("matmul")
def _matmul(a: ExTensor, b: ExTensor) -> ExTensor:
    _check_axis("matmul", "the left operand", a, a.ndim - 1)
    _check_axis("matmul", "the right operand", b, max(b.ndim - 2, 0))
    if _stays_packed(a, b):
        return _block_matmul(a, b)
    return apply("matmul", dequantize(a), dequantize(b))


@blocked_rule("linear")
def _linear(x: ExTensor, weight: ExTensor, *bias: ExTensor) -> ExTensor:
    _check_axis("linear", "the input", x, x.ndim - 1)
    _check_axis("linear", "the weight", weight, 1)
    if _stays_packed(x, weight):
        y = _block_matmul(x, weight)
    else:
        y = apply("linear", dequantize(x), dequantize(weight))
    return y + bias[0] if bias else y


def _contracted_last(b: QuantArray) -> QuantArray:
    last = len(b.shape) - 1
    return b if b.spec.axis == last else views.transpose(b, (*range(last - 1), last, last - 1))


def _product(backend: Backend, a: Any, b: QuantArray) -> Array:
    b = _contracted_last(b)
    if not isinstance(a, QuantArray):
        a = weight_activations(backend, a)
    rows = _as_matrix(a) if len(b.shape) == 2 else None
    if rows is not None:
        return _matrix_product(backend, rows, b).reshape((*a.shape[:-1], b.shape[0]))
    return _batch_product(backend, a, b)


def _as_matrix(a: Any) -> Any:
    """(..., K) as (rows, K), not decoded; None where tiles of several rows forbid it."""
    if isinstance(a, QuantArray):
        return views.as_matrix(a)
    return a.reshape((math.prod(a.shape[:-1]), a.shape[-1]))


def _matrix_product(backend: Backend, a: Any, b: QuantArray) -> Array:
    return (
        backend.block_scaled_matmul(a, b)
        if isinstance(a, QuantArray)
        else backend.weight_only_matmul(a, b)
    )


def _batch_product(backend: Backend, a: Any, b: QuantArray) -> Array:
    """The products of (..., M, K) and (..., N, K), leading axes broadcasting: (..., M, N)."""
    before, after = a.shape[:-2], b.shape[:-2]
    lead = np.broadcast_shapes(before, after)
    shape = (*lead, a.shape[-2], b.shape[-2])
    if isinstance(a, QuantArray) and before == after:
        return backend.block_scaled_matmul(_as_stack(a), _as_stack(b)).reshape(shape)
    out = backend.xp.empty((math.prod(lead), *shape[-2:]), dtype=np.float32)
    left, right = _matrices(a), views.unstack(b)
    for i, (j, k) in enumerate(zip(_places(before, lead), _places(after, lead), strict=True)):
        out[i] = _matrix_product(backend, left[j], right[k])
    return out.reshape(shape)


def _as_stack(q: QuantArray) -> QuantArray:
    return views.reshape(q, (math.prod(q.shape[:-2]), *q.shape[-2:]))


def _matrices(a: Any) -> Sequence[Any]:
    if isinstance(a, QuantArray):
        return views.unstack(a)
    stack: Sequence[Any] = a.reshape((math.prod(a.shape[:-2]), *a.shape[-2:]))
    return stack


def _places(shape: tuple[int, ...], lead: tuple[int, ...]) -> list[int]:
    """For each place of ``lead``, in order, which entry of ``shape`` broadcasts to it."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    places: list[int] = np.broadcast_to(numbers, lead).ravel().tolist()
    return places


def _left_vjp(g: ExTensor, out: None, a: ExTensor, b: ExTensor) -> ExTensor:
    values = dequantize(b)
    return g @ (values if b.spec.axis == b.ndim - 1 else values.swapaxes(-1, -2))


def _right_vjp(g: ExTensor, out: None, a: ExTensor, b: ExTensor) -> ExTensor:
    a = dequantize(a)
    if b.ndim == 2:
        a, g = as_rows(a), as_rows(g)
    turned = b.spec.axis == b.ndim - 1
    return g.swapaxes(-1, -2) @ a if turned else a.swapaxes(-1, -2) @ g


def _product_samples(rng: np.random.Generator) -> Iterator[Sample]:
    a, b = (ExTensor(rng.standard_normal((n, 40)).astype(np.float32)) for n in (5, 3))
    yield Sample((quantize(a, QuantSpec("mxfp4")), quantize(b, QuantSpec("mxfp4"))))
    yield Sample((a, quantize(b, QuantSpec("nvfp4"))))
    stack = ExTensor(rng.standard_normal((2, 4, 40)).astype(np.float32))
    yield Sample((stack, quantize(b, QuantSpec("mxfp4"))))
    yield Sample((quantize(stack, QuantSpec("mxfp4")), quantize(stack, QuantSpec("mxfp8_e4m3"))))


@primitive(
    forward=_product,
    vjps=(_left_vjp, _right_vjp),
    broadcasts=True,
    reads="inputs",
    mixed=True,
    takes_blocked=True,
    samples=_product_samples,
)
def _block_matmul(a: ExTensor, b: ExTensor) -> ExTensor:
    """A product that decodes nothing beforehand: float32, whatever a's dtype.

    Args:
        a: (..., M, K), or (..., K) where b is a matrix; blocked along K, or dense.
        b: blocked, which is what says how it lies: (..., N, K) along its last axis, (..., K, N)
            along the one before.
    """
    return apply("block_matmul", a, b)
