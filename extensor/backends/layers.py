"""What a convolution network's training step repeats, on any array module: the definitions.

`GenericBackend` forwards to these functions; each takes the array module ``xp`` last. Kernels are
compared with them. Images are (N, C, ...).
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.protocol import Array, Backend

__all__ = [
    "all_finite",
    "batch_norm",
    "batch_norm_grad",
    "bfloat16_values",
    "channel_sum",
    "dense_values",
    "leading_sum",
    "relu",
    "relu_grad",
    "sgd",
    "weight_activations",
]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def relu(x: Array, xp: Any) -> Array:
    """max(x, 0), NaN for NaN."""
    return xp.maximum(x, 0)


def relu_grad(g: Array, out: Array, xp: Any) -> Array:
    """G where the output is positive and 0 elsewhere, even where g is infinite or NaN.

    A selection on the bits: as fast as a product, without its 0 * inf = NaN.
    """
    words = {2: np.int16, 4: np.int32, 8: np.int64}[g.dtype.itemsize]
    bits = (out > 0).astype(words)
    bits *= -1
    bits &= g.view(words)
    return bits.view(g.dtype)


def bfloat16_values(x: Array, xp: Any) -> Array:
    """Float32 values rounded to the nearest bfloat16, ties to even, NaN the quiet one."""
    with np.errstate(all="ignore"):
        return x.astype(_BFLOAT16).astype(np.float32)


def dense_values(backend: Backend, x: Array, dtype: str) -> Array:
    """What a product of ``dtype`` multiplies, float32: the values of x, or these in bfloat16.

    Args:
        backend: the device's.
        x: float32 or a 16-bit float.
        dtype: "float32" or "bfloat16".
    """
    x = x.astype(backend.xp.float32, copy=False)
    return x if dtype == "float32" else backend.bfloat16_values(x)


def weight_activations(backend: Backend, x: Array, dtype: str = "float32") -> Array:
    """The same for a product with packed weights: bfloat16 where x is that, or is rounded to it.

    Args:
        backend: the device's.
        x: of any dtype that float32 stands for.
        dtype: "float32" or "bfloat16".
    """
    if x.dtype == _BFLOAT16:
        return x
    x = backend.cast(x, np.dtype(np.float32))
    if dtype == "float32":
        return x
    with np.errstate(all="ignore"):
        return backend.cast(x, _BFLOAT16)


def all_finite(x: Array, xp: Any) -> bool:
    """Whether no value is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum shows any NaN or infinity in one pass; only when it overflows is a look needed.
        return bool(xp.isfinite(x.sum())) or bool(xp.isfinite(x).all())


def leading_sum(x: Array, axes: int) -> Array:
    """Sums over the first axes; of 16-bit floats in float32."""
    half = x.dtype == _BFLOAT16 or x.dtype == np.float16
    return x.sum(axis=tuple(range(axes)), dtype=np.float32 if half else None)


def channel_sum(x: Array, xp: Any) -> Array:
    """Sums over all but the second axis, (N, C, ...) -> (C,)."""
    # Along the contiguous axes first: numpy sums them several times as fast.
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:])).sum(axis=2).sum(axis=0)


def batch_norm(
    x: Array, weight: Array, bias: Array, eps: float, xp: Any
) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(var + eps) weight + bias per channel; mean and var over count, (C,) each.

    Source: Ioffe, Szegedy, arXiv 1502.03167, algorithm 1.
    """
    axes, across = _across(x)
    with np.errstate(all="ignore"):
        mean = x.mean(axis=axes)
        centred = x - mean[across]
        var = (centred * centred).mean(axis=axes)
        scale = weight / xp.sqrt(var + x.dtype.type(eps))
        return centred * scale[across] + bias[across], mean, var


def batch_norm_grad(
    g: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float, xp: Any
) -> tuple[Array, Array, Array]:
    """Gradients of batch_norm in x, weight and bias."""
    axes, across = _across(x)
    count = x.dtype.type(x.size // x.shape[1])
    rstd = 1 / xp.sqrt(var + x.dtype.type(eps))
    h = (x - mean[across]) * rstd[across]
    gw, gb = (g * h).sum(axis=axes), g.sum(axis=axes)
    gx = (g - (gb / count)[across] - h * (gw / count)[across]) * (weight * rstd)[across]
    return gx, gw, gb


def _across(x: Array) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """All axes but the second, and how a value per channel is indexed to broadcast to x."""
    return (0, *range(2, x.ndim)), (slice(None), *(None,) * (x.ndim - 2))


def sgd(
    weight: Array,
    grad: Array,
    buffer: Array | None,
    lr: float,
    momentum: float,
    decay: float,
    nesterov: bool,
    xp: Any,
) -> None:
    """One step of gradient descent in place, on vectors; see `extensor.optim.SGD`.

    d = weight decay + grad (with decay);  buffer = buffer momentum + d (with a buffer);
    d = buffer momentum + d under ``nesterov``, else buffer;  weight = weight - d lr.
    """
    d = grad
    if decay:
        d = weight * decay
        d += grad
    if buffer is not None:
        buffer *= momentum
        buffer += d
        if nesterov:
            ahead = buffer * momentum
            ahead += d
            d = ahead
        else:
            d = buffer
    weight -= d * lr
