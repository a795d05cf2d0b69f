"""Activations, normalizations, attention, losses and sums on any array module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from extensor.backends.generic.core import BFLOAT16, FLOAT32, GenericCore, widened
from extensor.backends.generic.erf import erf_array
from extensor.backends.protocol import Array, AttentionForward, AttentionOptions, TokenMemory
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec

__all__ = ["GenericNn", "dropout_factor", "dropout_threshold"]


class GenericNn(GenericCore):
    """What layers compute besides products and convolutions; arrays are of one float dtype."""

    def add(self, a: Array, b: Array) -> Array:
        """See the protocol."""
        # By identity: cheap, and true of what numpy makes in float32.
        if a.dtype is b.dtype is FLOAT32 or BFLOAT16 not in (a.dtype, b.dtype):
            return a + b
        out = self.add(self.cast(a, FLOAT32), self.cast(b, FLOAT32))
        return self.cast(out, BFLOAT16) if a.dtype == b.dtype else out

    def add_rows(self, out: Array, index: Array, rows: Array) -> None:
        """See the protocol."""
        if index.size:
            position, sums = self._position_sums(index, rows, len(out))
            out[position] += sums.reshape(len(position), *out.shape[1:])

    def sum_rows(self, index: Array, rows: Array, length: int) -> tuple[Array, Array]:
        """See the protocol."""
        xp = self.xp
        slots = xp.full(length, -1, dtype=np.int32)
        if not index.size:
            return slots, rows
        position, sums = self._position_sums(index, rows, length)
        slots[position] = xp.arange(len(position), dtype=np.int32)
        sums += 0.0  # -0 is 0, as in a sum that begins with 0
        return slots, sums

    def _position_sums(self, index: Array, rows: Array, length: int) -> tuple[Array, Array]:
        """Each position of an index once, in order, and the sum of its rows, flat.

        Positions are sorted, so that rows of one position are summed in one sweep: many times
        faster than ``add.at``.
        """
        xp = self.xp
        count = index.size
        position = index.reshape(-1) % length
        order = xp.argsort(position, kind="stable")
        position = position[order]
        starts = xp.concatenate(
            [xp.zeros(1, dtype=position.dtype), xp.nonzero(position[1:] != position[:-1])[0] + 1]
        )
        flat = rows.reshape(count, rows.size // count)[order]
        return position[starts], xp.add.reduceat(flat, starts, axis=0)

    def leading_sum(self, x: Array, axes: int) -> Array:
        """See the protocol."""
        half = x.dtype == BFLOAT16 or x.dtype == np.float16
        return x.sum(axis=tuple(range(axes)), dtype=np.float32 if half else None)

    def channel_sum(self, x: Array) -> Array:
        """See the protocol."""
        # Along the contiguous axes first: numpy sums them several times as fast.
        return x.reshape(*x.shape[:2], math.prod(x.shape[2:])).sum(axis=2).sum(axis=0)

    @widened
    def relu(self, x: Array) -> Array:
        """See the protocol."""
        return self.xp.maximum(x, 0)

    @widened
    def relu_grad(self, g: Array, out: Array) -> Array:
        """See the protocol: a selection on the bits, fast, and without 0 * inf = NaN."""
        words = {2: np.int16, 4: np.int32, 8: np.int64}[g.dtype.itemsize]
        bits = (out > 0).astype(words)
        bits *= -1
        bits &= g.view(words)
        return bits.view(g.dtype)

    def positive_bits(self, x: Array) -> Array:
        """See the protocol."""
        # As integers, whose order is that of the floats: cupy takes subnormal floats for zero.
        words = x.view(f"int{8 * x.dtype.itemsize}")
        infinity = int(np.array(np.inf, x.dtype).view(words.dtype))
        return self.xp.packbits((words > 0) & (words <= infinity))

    def relu_grad_of_bits(self, g: Array, bits: Array) -> Array:
        """See the protocol."""
        ones = self.xp.unpackbits(bits)[: g.size].astype(g.dtype)
        return self.relu_grad(g, ones.reshape(g.shape))

    @widened
    def gelu(self, x: Array) -> tuple[Array, Array | None]:
        """See the protocol."""
        with np.errstate(all="ignore"):
            phi = erf_array(self.xp, x * math.sqrt(0.5))
            phi += 1
            phi *= 0.5
            return x * phi, phi

    def gelu_and_pack(self, x: Array, spec: QuantSpec) -> tuple[QuantArray, Array] | None:
        """See the protocol."""
        return None

    @widened
    def gelu_grad(self, g: Array, x: Array, phi: Array | None) -> Array:
        """See the protocol: g times Phi(x) plus x times the normal density."""
        if phi is None:
            _, phi = self.gelu(x)
        slope = self.xp.exp(x * x * -0.5)  # the density, up to its factor
        slope *= x
        slope *= 1 / math.sqrt(2 * math.pi)
        slope += phi
        slope *= g
        return slope

    @widened
    def gated_silu(self, gate: Array, up: Array, alpha: float, limit: float | None) -> Array:
        """See the protocol."""
        gate, up = _limited(gate, up, limit, self.xp)
        return gate * _sigmoid(gate, alpha, self.xp) * up

    def add_rms_norm(self, a: Array, b: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """See the protocol."""
        total = self.add(a, b)
        x, factors = (v.astype(FLOAT32) if v.dtype == BFLOAT16 else v for v in (total, weight))
        y, _ = self.rms_norm(x, factors, eps)
        return total, self.cast(y, BFLOAT16) if total.dtype == weight.dtype == BFLOAT16 else y

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """See the protocol."""
        keys = x.astype(FLOAT32) if x.dtype == BFLOAT16 else x  # which knows NaN's place
        backwards = self.xp.argsort(self.xp.flip(keys, -1), axis=-1, kind="stable")
        order = x.shape[-1] - 1 - self.xp.flip(backwards, -1)[..., :k]
        return self.xp.take_along_axis(x, order, axis=-1), order

    @widened
    def gated_silu_grad(
        self, g: Array, gate: Array, up: Array, alpha: float, limit: float | None
    ) -> tuple[Array, Array]:
        """See the protocol: with s = sigmoid(alpha a), (a s)' = s + alpha a s (1 - s)."""
        a, u = _limited(gate, up, limit, self.xp)
        s = _sigmoid(a, alpha, self.xp)
        silu = a * s
        ggate, gup = g * u * (s + alpha * silu * (1 - s)), g * silu
        if limit is not None:
            ggate = self.xp.where(gate > limit, ggate.dtype.type(0), ggate)
            gup = self.xp.where(abs(up) > limit, gup.dtype.type(0), gup)
        return ggate, gup

    @widened
    def rotary(self, x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        """See the protocol."""
        half, out = cos.shape[-1], self.xp.empty(x.shape, x.dtype)
        first, second = slice(half), slice(half, 2 * half)
        if interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        a, b = x[..., first], x[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        if 2 * half < x.shape[-1]:
            out[..., 2 * half :] = x[..., 2 * half :]
        return out

    def softmax(self, x: Array, axis: int) -> Array:
        """See the protocol."""
        with np.errstate(all="ignore"):
            out = x - x.max(axis=axis, keepdims=True)
            self.xp.exp(out, out=out)
            out /= out.sum(axis=axis, keepdims=True)
            return out

    @widened
    def softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """See the protocol: out (g - sum(g out))."""
        return out * (g - (g * out).sum(axis=axis, keepdims=True))

    def log_softmax(self, x: Array, axis: int) -> Array:
        """See the protocol."""
        xp = self.xp
        with np.errstate(all="ignore"):
            out = x - x.max(axis=axis, keepdims=True)
            out -= xp.log(xp.exp(out).sum(axis=axis, keepdims=True))
            return out

    def log_softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """See the protocol: g - exp(out) sum(g)."""
        return g - self.xp.exp(out) * g.sum(axis=axis, keepdims=True)

    @widened
    def cross_entropy(self, x: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
        """See the protocol. Kept is the softmax."""
        xp = self.xp
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

    @widened
    def cross_entropy_grad(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """See the protocol: (softmax - target) weight."""
        d = kept.copy()
        d[self.xp.arange(len(labels)), labels] -= d.dtype.type(1 - smoothing)
        if smoothing:
            d -= d.dtype.type(smoothing / d.shape[1])
        d *= weight
        return d

    @widened
    def label_ranks(self, x: Array, labels: Array) -> Array:
        """See the protocol."""
        xp = self.xp
        own = x[xp.arange(len(labels)), labels][:, None]
        lower = xp.arange(x.shape[1]) < labels[:, None]
        before = ~(x <= own) | ((x == own) & lower)
        return xp.count_nonzero(before, axis=1).astype(np.int32)

    @widened
    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        causal: bool,
        scale: float,
        options: AttentionOptions | None = None,
    ) -> tuple[Array, Array]:
        """See the protocol."""
        xp = self.xp
        with np.errstate(all="ignore"):
            p = _scores(q, k, causal, scale, options, xp)
            largest = p.max(axis=-1, keepdims=True)
            sinks = None if options is None else options.sinks
            if sinks is not None:
                sinks = sinks.reshape(*p.shape[1:3], 1, 1).astype(p.dtype, copy=False)
                largest = xp.maximum(largest, sinks)
            if options is not None:  # a query that sees nothing
                largest = xp.where(largest == -np.inf, p.dtype.type(0), largest)
            p -= largest
            xp.exp(p, out=p)
            total = p.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total += xp.exp(sinks - largest)
            inverse = 1 / total
            if options is not None:
                inverse = xp.where(total == 0, total, inverse)
            out = xp.matmul(p, v[:, :, None]) * inverse
            stats = xp.empty((*largest.shape[:-1], 2), dtype=largest.dtype)
            stats[..., :1], stats[..., 1:] = largest, inverse
        return out.reshape(*q.shape[:-1], v.shape[-1]), stats.reshape(*q.shape[:-1], 2)

    def cached_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        memory: TokenMemory,
        scale: float,
        turn: tuple[Array, Array] | None = None,
    ) -> Array:
        """See the protocol."""
        if turn is not None:
            q, k = (self.rotary(x, *turn, False) for x in (q, k))
        end = int(memory.length[0]) + 1
        keys, values = (part[:, :, :end] for part in (memory.keys, memory.values))
        keys[:, :, -1:], values[:, :, -1:] = k, v
        return self.attention(q, keys, values, False, scale)[0]

    def attention_grad(
        self, g: Array, forward: AttentionForward, into: tuple[Array, Array, Array]
    ) -> None:
        """See the protocol.

        With p the probabilities, d = g v^T and t = sum over a row of g out: gv = p^T g,
        ds = scale p (d - t), gq = ds k, gk = ds^T q.
        """
        f, xp = forward, self.xp
        arrays = g, f.q, f.k, f.v, f.out, f.stats
        if any(a.dtype == BFLOAT16 for a in arrays):
            g, q, k, v, out, stats = (self._wide(a) for a in arrays)
            self.attention_grad(g, replace(f, q=q, k=k, v=v, out=out, stats=stats), into)
            return
        q, k, v, causal, scale = f.q, f.k, f.v, f.causal, f.scale
        batch, groups = k.shape[:2]
        shape = (batch, groups, q.shape[1] // groups, q.shape[2])
        grouped = [a.reshape(*shape, a.shape[-1]) for a in (g, q, f.out, f.stats)]
        gg, qq, oo, ss = grouped
        p = xp.exp(_scores(q, k, causal, scale, f.options, xp) - ss[..., :1]) * ss[..., 1:]
        d = xp.matmul(gg, v[:, :, None].swapaxes(-1, -2))
        d -= (gg * oo).sum(axis=-1, keepdims=True)
        d *= p
        d *= scale
        into[0][...] = xp.matmul(d, k[:, :, None]).reshape(q.shape)
        into[1][...] = xp.matmul(d.swapaxes(-1, -2), qq).sum(axis=2)
        into[2][...] = xp.matmul(p.swapaxes(-1, -2), gg).sum(axis=2)

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array, Array]:
        """See the protocol. Source: arXiv 1607.06450."""
        axes = _axes(weight)
        with np.errstate(all="ignore"):
            mean = x.mean(axis=axes, keepdims=True)
            centred = x - mean
            rstd = _rstd(centred, axes, eps, self.xp)
            y = centred * rstd * weight + bias
        return self.cast(y, BFLOAT16) if narrow else y, mean, rstd

    @widened
    def layer_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        axes, lead = _axes(weight), tuple(range(x.ndim - weight.ndim))
        h, e = (x - mean) * rstd, g * weight
        gx = rstd * (
            e - e.mean(axis=axes, keepdims=True) - h * (e * h).mean(axis=axes, keepdims=True)
        )
        return gx, (g * h).sum(axis=lead), g.sum(axis=lead)

    def rms_norm(
        self, x: Array, weight: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array]:
        """See the protocol. Source: arXiv 1910.07467."""
        with np.errstate(all="ignore"):
            rstd = _rstd(x, _axes(weight), eps, self.xp)
            y = x * rstd * weight
        return self.cast(y, BFLOAT16) if narrow else y, rstd

    @widened
    def rms_norm_grad(self, g: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
        """See the protocol."""
        axes, lead = _axes(weight), tuple(range(x.ndim - weight.ndim))
        h, e = x * rstd, g * weight
        gx = rstd * (e - h * (e * h).mean(axis=axes, keepdims=True))
        return gx, (g * h).sum(axis=lead)

    def batch_norm(
        self, x: Array, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol. Source: Ioffe, Szegedy, arXiv 1502.03167, algorithm 1."""
        axes, across = _across(x)
        with np.errstate(all="ignore"):
            mean = x.mean(axis=axes)
            centred = x - mean[across]
            var = (centred * centred).mean(axis=axes)
            scale = weight / self.xp.sqrt(var + x.dtype.type(eps))
            return centred * scale[across] + bias[across], mean, var

    def batch_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        axes, across = _across(x)
        count = x.dtype.type(x.size // x.shape[1])
        rstd = 1 / self.xp.sqrt(var + x.dtype.type(eps))
        h = (x - mean[across]) * rstd[across]
        gw, gb = (g * h).sum(axis=axes), g.sum(axis=axes)
        gx = (g - (gb / count)[across] - h * (gw / count)[across]) * (weight * rstd)[across]
        return gx, gw, gb

    def dropout_mask(self, draws: Array, shape: tuple[int, ...], p: float) -> Array:
        """See the protocol."""
        size, (seed, calls) = math.prod(shape), draws.tolist()
        drawn = np.random.Philox(key=seed, counter=[0, calls, 0, 0]).random_raw(-(-size // 2))
        words = np.asarray(drawn, dtype="<u8").view("<u4")[:size].reshape(shape)
        mask = (words >= dropout_threshold(p)).astype(np.float32) * dropout_factor(p)
        return self.xp.asarray(mask)


def dropout_threshold(p: float) -> int:
    """The least of 2^32 equally likely words that keeps a value which goes with probability p."""
    return int(p * 2.0**32)


def dropout_factor(p: float) -> np.float32:
    """What is kept is multiplied by this."""
    return np.float32(1) / np.float32(1.0 - p)


def _sigmoid(x: Array, alpha: float, xp: Any) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + xp.exp(x * -alpha))


def _limited(gate: Array, up: Array, limit: float | None, xp: Any) -> tuple[Array, Array]:
    """What gated_silu multiplies."""
    if limit is None:
        return gate, up
    return xp.minimum(gate, limit), xp.clip(up, -limit, limit) + 1


def _scores(
    q: Array, k: Array, causal: bool, scale: float, options: AttentionOptions | None, xp: Any
) -> Array:
    """(B, Hkv, H / Hkv, T, S); -inf where a query does not see a key."""
    split = q.reshape(*k.shape[:2], q.shape[1] // k.shape[1], *q.shape[-2:])
    scores = xp.matmul(split, k[:, :, None].swapaxes(-1, -2))
    scores *= scale
    for seen in _seen(scores.shape, causal, options, xp):
        scores = xp.where(seen, scores, -np.inf).astype(scores.dtype, copy=False)
    return scores


def _seen(
    shape: tuple[int, ...], causal: bool, options: AttentionOptions | None, xp: Any
) -> Iterator[Array]:
    """Which keys a query sees, of scores (B, Hkv, H / Hkv, T, S): all of these must be True."""
    batch, groups, each, queries, keys = shape
    if causal:
        yield xp.tri(queries, keys, keys - queries, dtype=bool)
    if options is not None and options.window is not None:
        yield ~xp.tri(queries, keys, keys - queries - options.window, dtype=bool)
    if options is not None and options.mask is not None:
        mask = xp.broadcast_to(options.mask, (batch, groups * each, queries, keys))
        yield mask.reshape(shape)


def _axes(weight: Array) -> tuple[int, ...]:
    return tuple(range(-weight.ndim, 0))


def _rstd(x: Array, axes: tuple[int, ...], eps: float, xp: Any) -> Array:
    squares = (x * x).mean(axis=axes, keepdims=True)
    squares += x.dtype.type(eps)
    return 1 / xp.sqrt(squares)


def _across(x: Array) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """All axes but the second, and how a value per channel is indexed to broadcast to x."""
    return (0, *range(2, x.ndim)), (slice(None), *(None,) * (x.ndim - 2))
