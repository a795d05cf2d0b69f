"""What a training step repeats, on any array module: the definitions.

`GenericBackend` forwards to these functions; each takes the array module ``xp`` last. Kernels are
compared with them. All arrays are of one float dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from extensor.backends.erf import erf_array
from extensor.backends.protocol import Array

__all__ = [
    "adam",
    "add_rows",
    "cross_entropy",
    "cross_entropy_grad",
    "dropout_factor",
    "dropout_least",
    "dropout_mask",
    "gelu",
    "gelu_grad",
    "layer_norm",
    "layer_norm_grad",
    "log_softmax",
    "log_softmax_grad",
    "rescale",
    "rms_norm",
    "rms_norm_grad",
    "softmax",
    "softmax_grad",
    "square_sum",
]


def dropout_least(p: float) -> int:
    """The least of 2^32 equally likely words that keeps a value which goes with probability p."""
    return int(p * 2.0**32)


def dropout_factor(p: float) -> np.float32:
    """What is kept is multiplied by this."""
    return np.float32(1) / np.float32(1.0 - p)


def dropout_mask(draws: Sequence[int], shape: tuple[int, ...], p: float) -> Array:
    """See `extensor.backends.protocol.Backend.dropout_mask`."""
    size, (seed, calls) = math.prod(shape), draws
    drawn = np.random.Philox(key=seed, counter=[0, calls, 0, 0]).random_raw(-(-size // 2))
    words = np.asarray(drawn, dtype="<u8").view("<u4")[:size].reshape(shape)
    return (words >= dropout_least(p)).astype(np.float32) * dropout_factor(p)


def gelu(x: Array, xp: Any) -> tuple[Array, Array]:
    """X Phi(x) and Phi(x), the normal distribution function."""
    with np.errstate(all="ignore"):
        phi = erf_array(xp, x * math.sqrt(0.5))
        phi += 1
        phi *= 0.5
        return x * phi, phi


def gelu_grad(g: Array, x: Array, phi: Array, xp: Any) -> Array:
    """G times the slope of x Phi(x): Phi(x) plus x times the normal density."""
    slope = xp.exp(x * x * -0.5)  # the density, up to its factor
    slope *= x
    slope *= 1 / math.sqrt(2 * math.pi)
    slope += phi
    slope *= g
    return slope


def softmax(x: Array, axis: int, xp: Any) -> Array:
    """exp(x) over its sum along ``axis``, without overflow."""
    with np.errstate(all="ignore"):
        out = x - x.max(axis=axis, keepdims=True)
        xp.exp(out, out=out)
        out /= out.sum(axis=axis, keepdims=True)
        return out


def softmax_grad(g: Array, out: Array, axis: int, xp: Any) -> Array:
    """Gradient of softmax, whose output is ``out``: out (g - sum(g out))."""
    return out * (g - (g * out).sum(axis=axis, keepdims=True))


def log_softmax(x: Array, axis: int, xp: Any) -> Array:
    """The logarithm of softmax, without overflow or underflow."""
    with np.errstate(all="ignore"):
        out = x - x.max(axis=axis, keepdims=True)
        out -= xp.log(xp.exp(out).sum(axis=axis, keepdims=True))
        return out


def log_softmax_grad(g: Array, out: Array, axis: int, xp: Any) -> Array:
    """Gradient of log_softmax, whose output is ``out``: g - exp(out) sum(g)."""
    return g - xp.exp(out) * g.sum(axis=axis, keepdims=True)


def cross_entropy(x: Array, labels: Array, smoothing: float, xp: Any) -> tuple[Array, Array]:
    """-log softmax(x)[label] of rows (N, C), without overflow, and the softmax.

    The target is 1 - smoothing at the label plus smoothing / C everywhere.
    """
    with np.errstate(all="ignore"):
        shifted = x - x.max(axis=1, keepdims=True)
        p = xp.exp(shifted)
        total = p.sum(axis=1, keepdims=True)
        log_total = xp.log(total)
        p /= total
        losses = log_total[:, 0] - shifted[xp.arange(len(labels)), labels]
        if smoothing:
            uniform = log_total[:, 0] - shifted.mean(axis=1)
            losses = losses * (1 - smoothing) + uniform * smoothing
        return losses, p


def cross_entropy_grad(
    weight: Array, x: Array, labels: Array, p: Array, smoothing: float, xp: Any
) -> Array:
    """(softmax - target) weight, of which there is one, (), or one a row, (N, 1)."""
    d = p.copy()
    d[xp.arange(len(labels)), labels] -= d.dtype.type(1 - smoothing)
    if smoothing:
        d -= d.dtype.type(smoothing / d.shape[1])
    d *= weight
    return d


def layer_norm(
    x: Array, weight: Array, bias: Array, eps: float, xp: Any
) -> tuple[Array, Array, Array]:
    """(x - mean) rstd weight + bias over the last axes, those of the weight; mean and rstd.

    rstd = 1 / sqrt(var + eps), and both have ones for these axes. Source: arXiv 1607.06450.
    """
    axes = _axes(weight)
    with np.errstate(all="ignore"):
        mean = x.mean(axis=axes, keepdims=True)
        centred = x - mean
        rstd = _rstd(centred, axes, eps, xp)
        return centred * rstd * weight + bias, mean, rstd


def layer_norm_grad(
    g: Array, x: Array, weight: Array, mean: Array, rstd: Array, xp: Any
) -> tuple[Array, Array, Array]:
    """Gradients of layer_norm in x, weight and bias."""
    axes, lead = _axes(weight), tuple(range(x.ndim - weight.ndim))
    h, e = (x - mean) * rstd, g * weight
    gx = rstd * (e - e.mean(axis=axes, keepdims=True) - h * (e * h).mean(axis=axes, keepdims=True))
    return gx, (g * h).sum(axis=lead), g.sum(axis=lead)


def rms_norm(x: Array, weight: Array, eps: float, xp: Any) -> tuple[Array, Array]:
    """X rstd weight over the last axes, those of the weight, and rstd = 1 / sqrt(mean(x^2) + eps).

    Source: arXiv 1910.07467.
    """
    with np.errstate(all="ignore"):
        rstd = _rstd(x, _axes(weight), eps, xp)
        return x * rstd * weight, rstd


def rms_norm_grad(g: Array, x: Array, weight: Array, rstd: Array, xp: Any) -> tuple[Array, Array]:
    """Gradients of rms_norm in x and weight."""
    axes, lead = _axes(weight), tuple(range(x.ndim - weight.ndim))
    h, e = x * rstd, g * weight
    gx = rstd * (e - h * (e * h).mean(axis=axes, keepdims=True))
    return gx, (g * h).sum(axis=lead)


def adam(
    weight: Array, grad: Array, mean: Array, square: Array, factors: Mapping[str, float], xp: Any
) -> None:
    """One step of Adam (arXiv 1412.6980) in place, on vectors; see `extensor.optim.Adam`.

    mean += (grad - mean) take1;  square = square keep2 + grad^2 take2;
    weight = weight keep - mean / (sqrt(square) widen + eps) rate.
    """
    one = grad - mean
    one *= factors["take1"]
    mean += one
    xp.multiply(grad, grad, out=one)
    one *= factors["take2"]
    square *= factors["keep2"]
    square += one
    xp.sqrt(square, out=one)
    one *= factors["widen"]
    one += factors["eps"]
    xp.divide(mean, one, out=one)
    one *= factors["rate"]
    weight *= factors["keep"]
    weight -= one


def rescale(state: Array, bad: bool, rule: Sequence[float]) -> None:
    """One step of a loss scale, in place, on float64 (scale, good steps in a row, made, skipped).

    ``rule``: growth and back-off factor, good steps before a growth, least scale.
    """
    growth, backoff, interval, least = rule
    if bad:
        state[:] = max(state[0] * backoff, least), 0, state[2], state[3] + 1
        return
    good, scale = state[1] + 1, state[0]
    if good == interval:
        good, scale = 0, scale * growth
    state[:] = scale, good, state[2] + 1, state[3]


def square_sum(x: Array, xp: Any) -> float:
    """Sum of squares in float64: neither overflow nor a thread-dependent order."""
    flat, total = x.reshape(-1), 0.0
    stretch = 1 << 16 if xp is np else max(flat.size, 1)
    for begin in range(0, flat.size, stretch):
        wide = flat[begin : begin + stretch].astype(xp.float64)
        wide *= wide
        total += float(wide.sum())
    return total


def add_rows(out: Array, index: Array, rows: Array, xp: Any) -> None:
    """out[index] += rows, with positions that repeat added up in order.

    Sorted first, rows of one position are summed in one sweep: many times faster than add.at.
    """
    count = index.size
    if count == 0:
        return
    position = index.reshape(-1) % out.shape[0]
    order = xp.argsort(position, kind="stable")
    position = position[order]
    starts = xp.concatenate(
        [xp.zeros(1, dtype=position.dtype), xp.nonzero(position[1:] != position[:-1])[0] + 1]
    )
    flat = rows.reshape(count, math.prod(out.shape[1:]))[order]
    sums = xp.add.reduceat(flat, starts, axis=0)
    out[position[starts]] += sums.reshape(len(starts), *out.shape[1:])


def _axes(weight: Array) -> tuple[int, ...]:
    return tuple(range(-weight.ndim, 0))


def _rstd(x: Array, axes: tuple[int, ...], eps: float, xp: Any) -> Array:
    squares = (x * x).mean(axis=axes, keepdims=True)
    squares += x.dtype.type(eps)
    return 1 / xp.sqrt(squares)
