"""Networks' ops on the GPU: the kernel that runs each, or why there is none.

A function here takes the array module and then the arguments of the protocol's method of its name.
It gives the kernel's call, ready to run, or `Unsupported`. Arrays that a training step passes from
op to op may be bfloat16 as well as float32. Error bounds are stated beside the kernels, in
`extensor_cuda.kernels.nn` and `extensor_cuda.kernels.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from extensor.backends.protocol import AttentionForward, AttentionOptions
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor_cuda.dispatch import FLOAT32, FLOATS, Call, aligned, contiguous, dtype_gap, unless
from extensor_cuda.kernels.attention import attention as bf16_attention
from extensor_cuda.kernels.nn import cross_entropy as losses
from extensor_cuda.kernels.nn import dropout, elementwise, norm, scatter_add, sums
from extensor_cuda.kernels.nn import gated_silu as gates
from extensor_cuda.kernels.nn import rotary as turns
from extensor_cuda.kernels.nn import softmax as rows_of
from extensor_cuda.kernels.nn import topk as best

__all__ = [
    "add",
    "add_rms_norm",
    "add_rows",
    "attention",
    "attention_grad",
    "bfloat16_values",
    "cast",
    "cross_entropy",
    "cross_entropy_grad",
    "dropout_mask",
    "gated_silu",
    "gated_silu_grad",
    "gelu",
    "gelu_grad",
    "label_ranks",
    "layer_norm",
    "layer_norm_grad",
    "leading_sum",
    "positive_bits",
    "relu",
    "relu_grad",
    "relu_grad_of_bits",
    "rms_norm",
    "rms_norm_grad",
    "rotary",
    "softmax",
    "softmax_grad",
    "sum_rows",
    "topk",
]

Array = Any
_MIN_COLUMNS = 32  # neighbours that a warp sums, each lane one or more


def reads_stored(vjp: str, q: QuantArray, others: Sequence[Array]) -> bool:
    """See the protocol."""
    if vjp not in ("gelu_exact", "layer_norm", "rms_norm") or not elementwise.reads_stored(q):
        return False
    return all(a.dtype == np.float32 and a.size <= norm.MAX_LENGTH for a in others)


# --- values ---


def _unary(xp: Any, x: Array, *, name: str) -> Call:
    return unless(dtype_gap((x,), FLOATS), lambda: elementwise.unary(name, contiguous(xp, x), xp))


def _binary(name: str, xp: Any, g: Array, x: Array) -> Any:
    return elementwise.binary(name, contiguous(xp, g), contiguous(xp, x), xp, g.dtype)


relu = partial(_unary, name="relu")


def relu_grad(xp: Any, g: Array, out: Array) -> Call:
    """See the protocol."""
    return unless(dtype_gap((g, out), FLOATS), lambda: _binary("relu_grad", xp, g, out))


def positive_bits(xp: Any, x: Array) -> Call:
    """See the protocol."""
    return unless(dtype_gap((x,), FLOATS), lambda: elementwise.positive_bits(contiguous(xp, x), xp))


def relu_grad_of_bits(xp: Any, g: Array, bits: Array) -> Call:
    """See the protocol."""
    gap = dtype_gap((g,), FLOATS)

    def call() -> Array:
        return elementwise.relu_grad_of_bits(contiguous(xp, g), contiguous(xp, bits), xp)

    return unless(gap, call)


def gelu(xp: Any, x: Array) -> Call:
    """See the protocol."""
    call = _unary(xp, x, name="gelu")
    return (lambda: (call(), None)) if call else call


def gelu_grad(
    xp: Any, g: Array, x: Array | QuantArray, phi: Array | None, overwrites: bool = False
) -> Call:
    """See the protocol; the gradient at what is stored may be written over g."""
    if isinstance(x, QuantArray):
        stored = x
        return lambda: elementwise.gelu_grad_of_stored(contiguous(xp, g), stored, xp, overwrites)
    if phi is not None:
        return Unsupported("phi was kept")
    return unless(dtype_gap((g, x), FLOATS), lambda: _binary("gelu_grad", xp, g, x))


def _gated_gap(*arrays: Array) -> Unsupported | None:
    """Why no kernel reads arrays of which the last two are a gate and what it multiplies."""
    *_, gate, up = arrays
    if any(a.shape != gate.shape for a in arrays) or gate.dtype != up.dtype:
        return Unsupported("a gate of another shape or dtype than what it multiplies")
    return dtype_gap(arrays, FLOATS)


def gated_silu(xp: Any, gate: Array, up: Array, alpha: float, limit: float | None) -> Call:
    """See the protocol."""

    def call() -> Array:
        return gates.gated_silu(gate, up, alpha, limit, xp)

    return unless(_gated_gap(gate, up), call)


def gated_silu_grad(
    xp: Any, g: Array, gate: Array, up: Array, alpha: float, limit: float | None
) -> Call:
    """See the protocol."""

    def call() -> tuple[Array, Array]:
        gg, x, y = (aligned(xp, a) for a in (g, gate, up))
        return gates.gated_silu_grad(gg, x, y, alpha, limit, xp)

    return unless(_gated_gap(g, gate, up), call)


def topk(xp: Any, x: Array, k: int) -> Call:
    """See the protocol."""
    if (gap := dtype_gap((x,), FLOATS)) is not None:
        return gap
    if x.ndim == 0 or x.shape[-1] > best.MAX_LENGTH or k == 0:
        return Unsupported(f"{k} of {x.shape}; the kernel has rows of up to {best.MAX_LENGTH}")
    return lambda: best.topk(contiguous(xp, x), k, xp)


def rotary(xp: Any, x: Array, cos: Array, sin: Array, interleaved: bool) -> Call:
    """See the protocol."""
    gap = dtype_gap((x,), FLOATS)
    if gap is None:
        gap = turns.gap(x, cos, sin, interleaved)
    return unless(gap, lambda: turns.rotary(x, cos, sin, xp))


def add(xp: Any, a: Array, b: Array) -> Call:
    """See the protocol."""
    if a.shape != b.shape or not (a.flags.c_contiguous and b.flags.c_contiguous):
        return Unsupported("arrays of several shapes, or strided ones")
    if (gap := dtype_gap((a, b), FLOATS)) is not None:
        return gap
    return lambda: elementwise.binary(
        "add", a, b, xp, a.dtype if a.dtype == b.dtype else np.float32
    )


def cast(xp: Any, x: Array, dtype: np.dtype[Any]) -> Call:
    """See the protocol."""
    if dtype == x.dtype:
        return Unsupported("nothing to do")
    if dtype not in FLOATS or not x.flags.c_contiguous:
        return Unsupported(f"{dtype} requested, or a strided array")
    return unless(dtype_gap((x,), FLOATS), lambda: elementwise.unary("cast", x, xp, dtype))


def bfloat16_values(xp: Any, x: Array) -> Call:
    """See the protocol."""
    return unless(
        dtype_gap((x,)), lambda: elementwise.unary("bfloat16_values", contiguous(xp, x), xp)
    )


def dropout_mask(xp: Any, draws: Array, shape: tuple[int, ...], p: float) -> Call:
    """See the protocol. Does not wait for the GPU."""
    return lambda: dropout.dropout_mask(contiguous(xp, draws), shape, p, xp)


# --- sums ---


def leading_sum(xp: Any, x: Array, axes: int) -> Call:
    """See the protocol."""
    if x.dtype.name not in sums.KINDS or not x.flags.c_contiguous:
        return Unsupported(f"{x.dtype} array, or a strided one")
    if not x.size or not axes:
        return Unsupported("an empty array, or no axes")
    shape = x.shape[axes:]
    if (columns := math.prod(shape)) < _MIN_COLUMNS:
        return Unsupported(f"{columns} columns, too few for the kernel")
    return lambda: sums.column_sums(x.reshape(-1, columns), xp).reshape(shape)


def add_rows(xp: Any, out: Array, index: Array, rows: Array) -> Call:
    """See the protocol. One launch, in order."""
    if out.dtype != np.float32 or not out.flags.c_contiguous or rows.dtype != np.float32:
        return Unsupported("no contiguous float32 arrays")
    if not index.size:
        return Unsupported("an empty array")
    return lambda: scatter_add.add_rows(out, index, rows, xp)


def sum_rows(xp: Any, index: Array, rows: Array, length: int) -> Call:
    """See the protocol. Two launches, in order."""
    if rows.dtype != np.float32:
        return Unsupported(f"{rows.dtype} rows")
    if not index.size:
        return Unsupported("an empty array")
    return lambda: scatter_add.sum_rows(index, rows, length, xp)


# --- losses and norms ---


def cross_entropy(xp: Any, x: Array, labels: Array, smoothing: float) -> Call:
    """See the protocol."""

    def call() -> Any:
        classes = contiguous(xp, labels.astype(np.int64, copy=False))
        return losses.losses(contiguous(xp, x), classes, smoothing, xp)

    return unless(dtype_gap((x,), FLOATS), call)


def cross_entropy_grad(
    xp: Any, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
) -> Call:
    """See the protocol."""

    def call() -> Any:
        factors = weight.astype(np.float32, copy=False)
        classes = labels.astype(np.int64, copy=False)
        w, xx, at, k = (contiguous(xp, a) for a in (factors, x, classes, kept))
        return losses.grad(w, xx, at, k, smoothing, xp)

    return unless(dtype_gap((x,), FLOATS), call)


def label_ranks(xp: Any, x: Array, labels: Array) -> Call:
    """See the protocol."""

    def call() -> Any:
        return losses.ranks(
            contiguous(xp, x), contiguous(xp, labels.astype(np.int64, copy=False)), xp
        )

    if x.shape[1] > losses.MAX_CLASSES:
        return Unsupported(f"{x.shape[1]} classes; the kernel counts {losses.MAX_CLASSES}")
    return unless(dtype_gap((x,), FLOATS), call)


def _norm_gap(
    x: Array, weight: Array, *others: Array, dtypes: Sequence[Any] = FLOAT32
) -> Unsupported | None:
    if (gap := dtype_gap((x, weight, *others), dtypes)) is not None:
        return gap
    if weight.size > norm.MAX_LENGTH:
        return Unsupported(
            f"rows of {weight.size} values; the kernel keeps up to {norm.MAX_LENGTH}"
        )
    return None


def layer_norm(
    xp: Any, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
) -> Call:
    """See the protocol."""

    def call() -> Any:
        xx, w, b = (contiguous(xp, a) for a in (x, weight, bias))
        return norm.norm(xx, w, b, eps, True, xp, narrow)

    return unless(_norm_gap(x, weight, bias), call)


def layer_norm_grad(
    xp: Any,
    g: Array,
    x: Array | QuantArray,
    weight: Array,
    mean: Array | None,
    rstd: Array,
    addend: Array | None = None,
) -> Call:
    """See the protocol."""

    def call() -> Any:
        m = None if mean is None else contiguous(xp, mean)
        gg, w, r = (contiguous(xp, a) for a in (g, weight, rstd))
        xx = x if isinstance(x, QuantArray) else contiguous(xp, x)
        return norm.grad(gg, xx, w, m, r, xp, addend)

    gap = dtype_gap((g,), FLOATS)
    given = weight if isinstance(x, QuantArray) else x
    return unless(_norm_gap(given, weight) if gap is None else gap, call)


def rms_norm(xp: Any, x: Array, weight: Array, eps: float, narrow: bool = False) -> Call:
    """See the protocol. Where both are bfloat16 the result is, rounded once."""
    narrow = narrow or (x.dtype == weight.dtype == FLOATS[1])

    def call() -> Any:
        whole, factors = (contiguous(xp, a) for a in (x, weight))
        out, _, rstd = norm.norm(whole, factors, None, eps, False, xp, narrow)
        return out, rstd

    return unless(_norm_gap(x, weight, dtypes=FLOATS), call)


def add_rms_norm(xp: Any, a: Array, b: Array, weight: Array, eps: float) -> Call:
    """See the protocol."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return Unsupported("arrays of several shapes or dtypes")

    def call() -> Any:
        x, y, factors = (contiguous(xp, part) for part in (a, b, weight))
        return norm.add_norm(x, y, factors, eps, xp)

    return unless(_norm_gap(a, weight, dtypes=FLOATS), call)


def rms_norm_grad(
    xp: Any,
    g: Array,
    x: Array | QuantArray,
    weight: Array,
    rstd: Array,
    addend: Array | None = None,
) -> Call:
    """See the protocol."""
    x, weight = (a if isinstance(a, QuantArray) else _wide(xp, a) for a in (x, weight))
    call = layer_norm_grad(xp, g, x, weight, None, rstd, addend)
    return (lambda: call()[:2]) if call else call


def _wide(xp: Any, x: Array) -> Array:
    """Bfloat16 as float32; everything else as it is."""
    if x.dtype != FLOATS[1]:
        return x
    return elementwise.unary("cast", contiguous(xp, x), xp, FLOATS[0])


# --- softmax and attention ---


def _softmax_gap(axis: int, *arrays: Array) -> Unsupported | None:
    x = arrays[-1]
    if (gap := dtype_gap(arrays, FLOATS)) is not None:
        return gap
    if any(a.dtype != x.dtype for a in arrays):
        return Unsupported("arrays of several dtypes")
    if axis != x.ndim - 1 or x.shape[-1] > rows_of.MAX_LENGTH:
        return Unsupported(f"rows of {x.shape[axis]} values along axis {axis} of {x.ndim}")
    return None


def softmax(xp: Any, x: Array, axis: int) -> Call:
    """See the protocol."""
    return unless(_softmax_gap(axis, x), lambda: rows_of.softmax(contiguous(xp, x), xp))


def softmax_grad(xp: Any, g: Array, out: Array, axis: int) -> Call:
    """See the protocol."""
    return unless(
        _softmax_gap(axis, g, out),
        lambda: rows_of.softmax_grad(contiguous(xp, g), contiguous(xp, out), xp),
    )


_OPTIONS = Unsupported("a window, mask or sinks: scores of all keys are kept in memory")


def _attention_gap(q: Array, k: Array, v: Array, *g: Array) -> Unsupported | None:
    """Why float32 attention is not two products around the kernel of its rows."""
    if (gap := dtype_gap((q, k, v, *g))) is not None:
        return gap
    if (keys := k.shape[-2]) > rows_of.MAX_LENGTH:
        return Unsupported(f"{keys} keys; a row has up to {rows_of.MAX_LENGTH}")
    return None


def attention(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    scale: float,
    options: AttentionOptions | None = None,
) -> Call:
    """See the protocol: one launch in bfloat16; in float32 two products and a launch between."""
    if options is not None:
        return _OPTIONS
    if q.dtype.name == "bfloat16":
        gap = bf16_attention.unsupported(q, k, v, scale, xp.cuda.runtime.getDevice())
        if gap is not None:
            return gap
        return lambda: bf16_attention.attention(q, k, v, causal, scale, xp)

    def call() -> Any:
        split = q.reshape(*k.shape[:2], q.shape[1] // k.shape[1], *q.shape[-2:])
        scores = xp.matmul(split, k[:, :, None].swapaxes(-1, -2))
        stats = rows_of.attend(scores, scale, causal, xp)
        out = xp.matmul(scores, v[:, :, None])
        return out.reshape(*q.shape[:-1], v.shape[-1]), stats.reshape(*q.shape[:-1], 2)

    return unless(_attention_gap(q, k, v), call)


def attention_grad(
    xp: Any, g: Array, forward: AttentionForward, into: tuple[Array, Array, Array]
) -> Call:
    """See the protocol: two launches in bfloat16; in float32 five products around a launch."""
    if forward.options is not None:
        return _OPTIONS
    q, k, v = forward.q, forward.k, forward.v
    if q.dtype.name == "bfloat16":
        gap = bf16_attention.unsupported(q, k, v, forward.scale, xp.cuda.runtime.getDevice())
        if gap is not None:
            return gap
        return lambda: bf16_attention.attention_grad(g, forward, into, xp)

    def call() -> None:
        shape = (*k.shape[:2], q.shape[1] // k.shape[1], q.shape[2])
        gg, qq = (a.reshape(*shape, a.shape[-1]) for a in (g, q))
        product, keys = xp.matmul, k[:, :, None]
        scores = product(qq, keys.swapaxes(-1, -2))
        d = product(gg, v[:, :, None].swapaxes(-1, -2))
        # The sums of g out over a row may be strided where g or out is.
        row_sums = contiguous(xp, (g * forward.out).sum(axis=-1))
        stats = contiguous(xp, forward.stats)
        rows_of.attend_grad(scores, d, stats, row_sums, forward.scale, forward.causal)
        into[0][...] = product(d, keys).reshape(q.shape)
        into[1][...] = product(d.swapaxes(-1, -2), qq).sum(axis=2)
        into[2][...] = product(scores.swapaxes(-1, -2), gg).sum(axis=2)

    return unless(_attention_gap(q, k, v, g), call)
