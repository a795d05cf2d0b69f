"""The CPU backend's activations, normalizations, attention, losses and sums in float32.

relu and its gradient and add give the bytes that numpy gives. Against exact arithmetic, with
u = 2**-24, n the length of a row, P the pixels of an image, gamma_n = n u / (1 - n u) and no
overflow:

    gelu          |error| <= (x^2 / 2 + 16) u |gelu(x)| + 2**-144
    gelu_grad     |error| <= (x^2 / 2 + 16) u |g| (Phi(x) + |x| density(x)) + 2**-144 (1 + |g|),
                  Phi being the one given
    gated_silu    |error| <= (|z| + 16) u |a s| w + 2**-126; a, the gate, and up are clipped, z =
                  alpha a, s = sigmoid(z), w = |up|, with a limit |up + 1| + limit
    gated_silu_grad  |error| <= (|z| + 24) u |g| w s (1 + |z|) + 2**-126 (1 + |g| w) in the gate,
                  (|z| + 16) u |g a s| + 2**-126 (1 + |g|) in up
    rotary        the bytes that numpy gives
    softmax       |error| <= (d + sum p d + n + 16) u p + 2**-126, with d = max(x) - x
    softmax_grad  |error| <= (n + 4) u p (|g| + sum |g p|) + 2**-126
    log_softmax   |error| <= (sum p d + n + 8) u + 4 u (log sum + d), with log sum = log sum e^-d
    log_softmax_grad  |error| <= (n + 16) u p sum |g| + 2 u |g| + 2**-126 (1 + sum |g|),
                  p = e^out of the output given
    cross_entropy |error| <= that of log_softmax at the label, and with smoothing s also
                  4 u s (log sum + mean d) + s (n + 3) u mean d
    cross_entropy_grad  |error| <= ((d + sum p d + n + 16) u p + 4 u (p + target) + 2**-126)
                  |weight| + 2**-149
    attention     p = softmax(s), s = scale q k^T: of a score |error| <= e = gamma_(d + 1) scale
                  |q| |k|^T; of the result |error| <= (2 max e + gamma_(2 S + 16)) p |v|
                  where max e and the distance to the largest score are small
    channel_sum   |error| <= (P + 12) u sum |x|, in float32 over runs of pixels, then in float64

The gradients of attention are sums of these; tests compare them with float64. LayerNorm and RMSNorm
are sums of at most n terms of a row, or of one term a row, and BatchNorm's mean and variance are
sums as `channel_sum` takes them: their tests say the bounds. Every sum is one chain in the order of
its terms, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.cpu.core import CpuCore, first_arrays, ready, runs_in_core
from extensor.backends.protocol import Array, AttentionForward, AttentionOptions, TokenMemory
from extensor.backends.unsupported import Unsupported

__all__ = ["CpuNn"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WORTH = 1 << 14  # elements of a sum; below, numpy's own call is as fast
_SMALL = Unsupported("small, or of two shapes")
_LAYOUT = Unsupported("not contiguous, or misaligned")


class CpuNn(CpuCore):
    """What layers compute besides products and convolutions."""

    def _choose_add(self, a: Array, b: Array) -> Any:
        if (a.size < _WORTH and not self.noting) or a.shape != b.shape:
            return _SMALL
        one, two = a.flags, b.flags
        if not (one.c_contiguous and two.c_contiguous and one.aligned and two.aligned):
            return _LAYOUT
        return self.float32_core(a, b)

    @runs_in_core(_choose_add)
    def add(self, core: Any, a: Array, b: Array) -> Array:
        """See the protocol."""
        return core.add(a, b)

    @runs_in_core(CpuCore.float32_core)
    def channel_sum(self, core: Any, x: Array) -> Array:
        """See the protocol."""
        return core.channel_sum(ready(x))

    @runs_in_core(CpuCore.float32_core)
    def relu(self, core: Any, x: Array) -> Array:
        """See the protocol."""
        return core.relu(ready(x))

    @runs_in_core(CpuCore.float32_core)
    def relu_grad(self, core: Any, g: Array, out: Array) -> Array:
        """See the protocol."""
        return core.relu_grad(ready(g), ready(out))

    @runs_in_core(CpuCore.float32_core)
    def gelu(self, core: Any, x: Array) -> tuple[Array, Array | None]:
        """See the protocol."""
        y, phi = core.gelu(ready(x))
        return y, phi

    def _choose_gelu_grad(self, g: Array, x: Array, phi: Array | None) -> Any:
        return Unsupported("no Phi(x)") if phi is None else self.float32_core(g, x, phi)

    @runs_in_core(_choose_gelu_grad)
    def gelu_grad(self, core: Any, g: Array, x: Array, phi: Array) -> Array:
        """See the protocol."""
        return core.gelu_grad(ready(g), ready(x), ready(phi))

    @runs_in_core(first_arrays(2))
    def gated_silu(
        self, core: Any, gate: Array, up: Array, alpha: float, limit: float | None
    ) -> Array:
        """See the protocol."""
        return core.gated_silu(ready(gate), ready(up), alpha, *_clipped(limit))

    @runs_in_core(first_arrays(3))
    def gated_silu_grad(
        self, core: Any, g: Array, gate: Array, up: Array, alpha: float, limit: float | None
    ) -> tuple[Array, Array]:
        """See the protocol."""
        arrays = (ready(a) for a in (g, gate, up))
        ggate, gup = core.gated_silu_grad(*arrays, alpha, *_clipped(limit))
        return ggate, gup

    def _choose_rotary(self, x: Array, cos: Array, sin: Array, interleaved: bool) -> Any:
        if x.ndim > 4:
            return Unsupported(f"{x.ndim} axes; the core takes four")
        return self.float32_core(x, cos, sin)

    @runs_in_core(_choose_rotary)
    def rotary(self, core: Any, x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        """See the protocol."""
        cos, sin = _rows(cos), _rows(sin)
        if cos.strides != sin.strides:
            cos, sin = ready(cos), ready(sin)
        return core.rotary(_rows(x), cos, sin, interleaved)

    def _choose_softmax(self, x: Array, axis: int) -> Any:
        return (core := self.float32_core(x)) and _last_axis(core, x, axis)

    def _choose_softmax_grad(self, g: Array, out: Array, axis: int) -> Any:
        return (core := self.float32_core(g, out)) and _last_axis(core, out, axis)

    @runs_in_core(_choose_softmax)
    def softmax(self, core: Any, x: Array, axis: int) -> Array:
        """See the protocol."""
        return core.softmax(ready(x), x.shape[axis])

    @runs_in_core(_choose_softmax_grad)
    def softmax_grad(self, core: Any, g: Array, out: Array, axis: int) -> Array:
        """See the protocol."""
        return core.softmax_grad(ready(g), ready(out), out.shape[axis])

    @runs_in_core(_choose_softmax)
    def log_softmax(self, core: Any, x: Array, axis: int) -> Array:
        """See the protocol."""
        return core.log_softmax(ready(x), x.shape[axis])

    @runs_in_core(_choose_softmax_grad)
    def log_softmax_grad(self, core: Any, g: Array, out: Array, axis: int) -> Array:
        """See the protocol."""
        return core.log_softmax_grad(ready(g), ready(out), out.shape[axis])

    @runs_in_core(first_arrays(1))
    def cross_entropy(
        self, core: Any, x: Array, labels: Array, smoothing: float
    ) -> tuple[Array, Array]:
        """See the protocol. Kept are each row's largest score and its sum of exponentials."""
        losses, kept = core.cross_entropy(ready(x), _class_numbers(labels), smoothing)
        return losses, kept

    def _choose_cross_entropy_grad(self, weight: Array, x: Array, *_: Any) -> Any:
        return self.float32_core(x)

    @runs_in_core(_choose_cross_entropy_grad)
    def cross_entropy_grad(
        self, core: Any, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """See the protocol."""
        weight = ready(weight.astype(np.float32, copy=False))
        return core.cross_entropy_grad(
            weight, ready(x), _class_numbers(labels), ready(kept), smoothing
        )

    @runs_in_core(first_arrays(3))
    def attention(
        self,
        core: Any,
        q: Array,
        k: Array,
        v: Array,
        causal: bool,
        scale: float,
        options: AttentionOptions | None = None,
    ) -> tuple[Array, Array]:
        """See the protocol."""
        limits = _limits(options, q, k)
        out, stats = core.attention(_rows(q), _rows(k), _rows(v), causal, scale, *limits)
        return out, stats

    def _choose_cached_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        memory: TokenMemory,
        scale: float,
        turn: tuple[Array, Array] | None = None,
    ) -> Any:
        if turn is not None:
            return Unsupported("angles to turn by")
        return self.float32_core(q, k, v, memory.keys, memory.values)

    @runs_in_core(_choose_cached_attention)
    def cached_attention(
        self,
        core: Any,
        q: Array,
        k: Array,
        v: Array,
        memory: TokenMemory,
        scale: float,
        turn: tuple[Array, Array] | None = None,
    ) -> Array:
        """See the protocol."""
        rows = _rows(q), _rows(k), _rows(v)
        return core.cached_attention(*rows, memory.place, memory.length, scale)

    def _choose_attention_grad(
        self, g: Array, forward: AttentionForward, into: tuple[Array, Array, Array]
    ) -> Any:
        f = forward
        core = self.float32_core(g, f.q, f.k, f.v, f.out, f.stats, *into)
        if core and any(_rows(a) is not a for a in into):
            return Unsupported(
                "gradients to write that are strided along the last axis, or misaligned"
            )
        return core

    @runs_in_core(_choose_attention_grad)
    def attention_grad(
        self, core: Any, g: Array, forward: AttentionForward, into: tuple[Array, Array, Array]
    ) -> None:
        """See the protocol."""
        f = forward
        arrays = (_rows(a) for a in (g, f.q, f.k, f.v, f.out))
        window, mask, _ = _limits(f.options, f.q, f.k)
        core.attention_grad(tuple(arrays), ready(f.stats), f.causal, f.scale, into, window, mask)

    @runs_in_core(first_arrays(3))
    def layer_norm(
        self, core: Any, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        y, mean, rstd = core.layer_norm(ready(x), ready(weight), ready(bias), eps)
        kept = _kept_shape(x, weight)
        y = self.cast(y, _BFLOAT16) if narrow else y
        return y, mean.reshape(kept), rstd.reshape(kept)

    @runs_in_core(CpuCore.float32_core)
    def layer_norm_grad(
        self, core: Any, g: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        gx, gw, gb = core.norm_grad(ready(g), ready(x), ready(weight), ready(mean), ready(rstd))
        return gx, gw, gb

    @runs_in_core(first_arrays(2))
    def rms_norm(
        self, core: Any, x: Array, weight: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array]:
        """See the protocol."""
        y, rstd = core.rms_norm(ready(x), ready(weight), eps)
        y = self.cast(y, _BFLOAT16) if narrow else y
        return y, rstd.reshape(_kept_shape(x, weight))

    @runs_in_core(CpuCore.float32_core)
    def rms_norm_grad(
        self, core: Any, g: Array, x: Array, weight: Array, rstd: Array
    ) -> tuple[Array, Array]:
        """See the protocol."""
        gx, gw, _ = core.norm_grad(ready(g), ready(x), ready(weight), None, ready(rstd))
        return gx, gw

    @runs_in_core(first_arrays(3))
    def batch_norm(
        self, core: Any, x: Array, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        y, mean, var = core.batch_norm(ready(x), ready(weight), ready(bias), eps)
        return y, mean, var

    @runs_in_core(first_arrays(5))
    def batch_norm_grad(
        self, core: Any, g: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        arrays = (ready(a) for a in (g, x, weight, mean, var))
        gx, gw, gb = core.batch_norm_grad(*arrays, eps)
        return gx, gw, gb


def _clipped(limit: float | None) -> tuple[float, float]:
    """The core's limit and what it adds to the second factor."""
    return (np.inf, 0.0) if limit is None else (limit, 1.0)


def _limits(options: AttentionOptions | None, q: Array, k: Array) -> tuple[Any, ...]:
    """The core's window, 0 for none, its mask (B, H, T, S) of bytes, and the sinks."""
    if options is None:
        return 0, None, None
    mask, sinks = options.mask, options.sinks
    if mask is not None:
        if mask.shape[-1] != 1 and mask.strides[-1] != 1:
            mask = ready(mask)
        mask = np.broadcast_to(mask, (*q.shape[:3], k.shape[2])).view(np.uint8)
        if mask.strides[-1] != 1 and mask.shape[-1] != 1:
            mask = ready(mask)  # one byte for all keys of a query
    return options.window or 0, mask, None if sinks is None else ready(sinks)


def _last_axis(core: Any, x: Array, axis: int) -> Any:
    """The core if the axis is the last, else `Unsupported`."""
    if axis in (x.ndim - 1, -1):
        return core
    return Unsupported(f"axis {axis} of {x.ndim}; the core takes the last")


def _class_numbers(labels: Array) -> Array:
    return ready(labels.astype(np.int64, copy=False))


def _kept_shape(x: Array, weight: Array) -> tuple[int, ...]:
    """The shape of what is kept for each row."""
    if weight.ndim == 1:
        return (*x.shape[:-1], 1)
    return (*x.shape[: x.ndim - weight.ndim], *(1,) * weight.ndim)


def _rows(x: Array) -> Array:
    """The array, or a copy where the last axis is strided or steps are no whole floats."""
    if (flags := x.flags).c_contiguous and flags.aligned:
        return x
    good = flags.aligned and (x.shape[-1] == 1 or x.strides[-1] == x.itemsize)
    if good and not any(step % x.itemsize for step in x.strides):
        return x
    return ready(x)
