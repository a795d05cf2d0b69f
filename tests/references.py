"""What each operation should give, in numpy, for the samples whose declaration does not say.

Written from the definitions, with numpy's functions where numpy has them and loops where it has
not; nothing here calls the library. Arguments are those of the operation, arrays for tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def reduced(loss: Array, reduction: str) -> Any:
    return {"none": loss, "sum": loss.sum(), "mean": loss.mean()}[reduction]


# --- windows: every output place in a loop --------------------------------------------------------


def padded(x: Array, padding: Any, value: float) -> Array:
    rows, columns = pair(padding)
    widths = ((0, 0), (0, 0), (rows, rows), (columns, columns))
    return np.pad(x, widths, constant_values=value)


def pool(x: Array, kernel: Any, stride: Any, padding: Any, value: float, reduce: Any) -> Array:
    (kh, kw), (sh, sw) = pair(kernel), pair(kernel if stride is None else stride)
    x = padded(x, padding, value)
    high, wide = (x.shape[2] - kh) // sh + 1, (x.shape[3] - kw) // sw + 1
    out = np.empty((*x.shape[:2], high, wide))
    for i in range(high):
        for j in range(wide):
            out[:, :, i, j] = reduce(x[:, :, i * sh : i * sh + kh, j * sw : j * sw + kw], (2, 3))
    return out


def conv2d(
    x: Array, w: Array, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Array:  # fmt: skip
    (sh, sw), (dh, dw) = pair(stride), pair(dilation)
    x, (kh, kw) = padded(x, padding, 0.0), w.shape[2:]
    high = (x.shape[2] - dh * (kh - 1) - 1) // sh + 1
    wide = (x.shape[3] - dw * (kw - 1) - 1) // sw + 1
    out = np.zeros((len(x), len(w), high, wide))
    inside, outside = x.shape[1] // groups, len(w) // groups
    for o in range(len(w)):
        part = x[:, o // outside * inside :][:, :inside]
        for i in range(high):
            for j in range(wide):
                rows = i * sh + dh * np.arange(kh)
                columns = j * sw + dw * np.arange(kw)
                seen = part[:, :, rows[:, None], columns[None, :]]
                out[:, o, i, j] = (seen * w[o]).sum((1, 2, 3))
    return out if bias is None else out + bias[:, None, None]


def adjoint(function: Callable[[Array], Array], shape: tuple[int, ...], g: Array) -> Array:
    """What a linear function's transpose makes of ``g``: one basis vector at a time."""
    out = np.empty(shape)
    for place in np.ndindex(*shape):
        basis = np.zeros(shape)
        basis[place] = 1.0
        out[place] = (function(basis) * g).sum()
    return out


def convolved(x: Array, w: Array, window: Any, groups: int) -> Array:
    return conv2d(x, w, None, window.stride, window.padding, window.dilation, groups)


def average(x: Array, window: Any) -> Array:
    return pool(x, window.kernel, window.stride, window.padding, 0.0, np.mean)


def max_pool2d_grad(g: Array, index: Array, shape: tuple[int, ...]) -> Array:
    out = np.zeros((shape[0] * shape[1], shape[2] * shape[3]))
    for plane, (values, places) in enumerate(
        zip(g.reshape(len(out), -1), index.reshape(len(out), -1), strict=True)
    ):
        for value, place in zip(values, places, strict=True):
            out[plane, place] += value
    return out.reshape(shape)


# --- losses and activations -----------------------------------------------------------------------


def softmax(x: Array, axis: int = -1) -> Array:
    powers = np.exp(x)
    return powers / powers.sum(axis, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def erf(x: Array) -> Array:
    """The integral of its definition, by Gauss-Legendre with 60 nodes: exact for |x| < 5."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    middle = x[..., None] / 2
    return (2 / np.sqrt(np.pi) * np.exp(-((middle * nodes + middle) ** 2)) * middle * weights).sum(
        -1
    )


def gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def bce(p: Array, t: Array, reduction: str = "mean") -> Any:
    return reduced(-(t * np.log(p) + (1 - t) * np.log(1 - p)), reduction)


def cross_entropy(
    scores: Array, labels: Array, label_smoothing: float = 0.0, ignore_index: int | None = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    logs, classes = np.log(softmax(scores, 1)), scores.shape[1]
    losses = np.zeros(labels.shape)
    for place in np.ndindex(*labels.shape):
        if labels[place] != ignore_index:
            row = logs[(place[0], slice(None), *place[1:])]
            target = np.full(classes, label_smoothing / classes)
            target[labels[place]] += 1 - label_smoothing
            losses[place] = -(target * row).sum()
    if reduction == "mean":
        return losses.sum() / (labels != ignore_index).sum()
    return reduced(losses, reduction)


def focal(
    z: Array, t: Array, gamma: float = 2.0, alpha: float | None = 0.25, reduction: str = "mean"
) -> Any:
    p = sigmoid(z)
    right = t * p + (1 - t) * (1 - p)
    # equation 5 where the targets are 0 and 1; for soft ones the cross entropy stands for -log p_t
    loss = -np.log(right) if t.dtype.kind == "i" else bce(p, t, "none")
    weight = 1.0 if alpha is None else t * alpha + (1 - t) * (1 - alpha)
    return reduced(weight * (1 - right) ** gamma * loss, reduction)


def huber(p: Array, t: Array, delta: float = 1.0, reduction: str = "mean") -> Any:
    d = np.abs(p - t)
    return reduced(np.where(d <= delta, d * d / 2, delta * (d - delta / 2)), reduction)


def smooth_l1(p: Array, t: Array, beta: float = 1.0, reduction: str = "mean") -> Any:
    d = np.abs(p - t)
    return reduced(np.where(d < beta, d * d / (2 * beta), d - beta / 2), reduction)


# --- shapes, indexing, order ----------------------------------------------------------------------


def flatten(x: Array, start: int = 0, end: int = -1) -> Array:
    end %= x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def put(g: Array, key: Any, shape: tuple[int, ...]) -> Array:
    out = np.zeros(shape)
    np.add.at(out, key, g)
    return out


def scatter_add(x: Array, indices: Array, source: Array, axis: int = -1) -> Array:
    out = x.copy()
    for place in np.ndindex(*indices.shape):
        target = list(place)
        target[axis] = indices[place]
        out[tuple(target)] += source[place]
    return out


def take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    shape = list(x.shape)
    shape[axis] = indices.shape[axis]
    return np.take_along_axis(x, np.broadcast_to(indices, shape), axis)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n != x.shape[i]), keepdims=True)


def ordered(function: Any) -> Any:
    """Sorting of values that all differ: descending is the reverse."""

    def run(x: Array, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
        found = function(x, axis)
        return np.flip(found, axis) if descending else found

    return run


def topk(x: Array, k: int, axis: int = -1, largest: bool = True) -> list[Array]:
    order = np.argsort(x if not largest else -x, axis).take(range(k), axis)
    return [np.take_along_axis(x, order, axis), order]


def cumulative(function: Any, first: float) -> Any:
    def run(x: Array, axis: int | None = None, include_initial: bool = False) -> Array:
        axis = 0 if axis is None else axis
        out = function(x, axis=axis)
        if include_initial:
            start = np.full_like(np.take(out, [0], axis), first)
            out = np.concatenate([start, out], axis)
        return out

    return run


def percentile(x: Array, q: float, axis: Any = None, keepdims: bool = False) -> Any:
    return np.percentile(x, q, axis=axis, keepdims=keepdims)


def swiglu(x: Array, axis: int = -1) -> Array:
    gate, value = np.split(x, 2, axis)
    return gate * sigmoid(gate) * value


SELU = 1.0507009873554805, 1.6732632423543772
"""Klambauer et al., arXiv 1706.02515, appendix A2: the fixed point's scale and alpha."""

REFERENCES: dict[str, Callable[..., Any]] = {
    "argmax": np.argmax,
    "argmin": np.argmin,
    "argsort": ordered(np.argsort),
    "astype": lambda x, dtype: x.astype(dtype),
    "avg_pool2d": lambda x, k, s=None, p=0: pool(x, k, s, p, 0.0, np.mean),
    "avg_pool2d_grad": lambda g, shape, window: adjoint(lambda x: average(x, window), shape, g),
    "binary_cross_entropy": bce,
    "binary_cross_entropy_with_logits": lambda z, t, reduction: bce(sigmoid(z), t, reduction),
    "bitwise_and": np.bitwise_and,
    "bitwise_invert": np.invert,
    "bitwise_left_shift": np.left_shift,
    "bitwise_or": np.bitwise_or,
    "bitwise_right_shift": np.right_shift,
    "bitwise_xor": np.bitwise_xor,
    "broadcast_arrays": np.broadcast_arrays,
    "broadcast_to": np.broadcast_to,
    "cholesky": np.linalg.cholesky,
    "concatenate": np.concatenate,
    "conj": np.conj,
    "conjugate": np.conj,
    "conv2d": conv2d,
    "conv2d_grad_w": lambda g, x, shape, window, groups: adjoint(
        lambda w: convolved(x, w, window, groups), shape, g
    ),
    "conv2d_grad_x": lambda g, w, shape, window, groups: adjoint(
        lambda x: convolved(x, w, window, groups), shape, g
    ),
    "cross": np.linalg.cross,
    "cross_entropy": cross_entropy,
    "cumprod": np.cumprod,
    "cumsum": np.cumsum,
    "cumulative_prod": cumulative(np.cumprod, 1.0),
    "cumulative_sum": cumulative(np.cumsum, 0.0),
    "det": np.linalg.det,
    "diagonal": np.linalg.diagonal,
    "diff": np.diff,
    "dot": np.dot,
    "einsum": np.einsum,
    "expand_dims": np.expand_dims,
    "flatten": flatten,
    "flip": np.flip,
    "focal": focal,
    "gather": lambda x, i, axis=-1: np.take_along_axis(x, i, axis),
    "gelu": gelu,
    "getitem": lambda x, key: x[tuple(key) if isinstance(key, list) else key],
    "global_avg_pool2d": lambda x: x.mean((2, 3), keepdims=True),
    "hinge": lambda p, t, reduction="mean": reduced(np.maximum(0.0, 1 - t * p), reduction),
    "huber": huber,
    "imag": np.imag,
    "inner": np.inner,
    "inv": np.linalg.inv,
    "kl_div": lambda p, t, how="mean": (
        (t * (np.log(t) - p)).sum() / len(t) if how == "batchmean" else (t * (np.log(t) - p)).mean()
    ),
    "l1": lambda p, t, reduction: reduced(np.abs(p - t), reduction),
    "log_softmax": lambda x, axis=-1: np.log(softmax(x, axis)),
    "logabsdet": lambda x: np.linalg.slogdet(x)[1],
    "matrix_norm": np.linalg.matrix_norm,
    "matrix_power": np.linalg.matrix_power,
    "matrix_transpose": lambda x: x.swapaxes(-1, -2),
    "max_pool2d": lambda x, k, s=None, p=0: pool(x, k, s, p, -np.inf, np.max),
    "max_pool2d_gather": lambda x, index: np.take_along_axis(
        x.reshape(*x.shape[:2], -1), index.reshape(*index.shape[:2], -1).astype(int), -1
    ).reshape(index.shape),
    "max_pool2d_grad": max_pool2d_grad,
    "maximum": np.maximum,
    "median": lambda x, axis=None, keepdims=False: np.median(x, axis, keepdims=keepdims),
    "minimum": np.minimum,
    "moveaxis": np.moveaxis,
    "mse": lambda p, t, reduction: reduced((p - t) ** 2, reduction),
    "nextafter": np.nextafter,
    "nll": lambda logs, labels, reduction="mean": reduced(
        -logs[np.arange(len(labels)), labels], reduction
    ),
    "outer": np.outer,
    "pad": lambda x, widths, value=0.0: np.pad(x, widths, constant_values=value),
    "percentile": percentile,
    "permute": np.transpose,
    "prelu": lambda x, slope: np.where(x > 0, x, slope * x),
    "put": put,
    "ravel": np.ravel,
    "real": np.real,
    "real_part": np.real,
    "remainder": np.mod,
    "repeat": np.repeat,
    "reshape": np.reshape,
    "roll": np.roll,
    "scatter_add": scatter_add,
    "selu": lambda x: SELU[0] * np.where(x > 0, x, SELU[1] * (np.exp(np.minimum(x, 0)) - 1)),
    "smooth_l1": smooth_l1,
    "softmax": softmax,
    "solve": np.linalg.solve,
    "sort": ordered(np.sort),
    "split": np.split,
    "squeeze": np.squeeze,
    "stack": np.stack,
    "sum_to": sum_to,
    "swapaxes": np.swapaxes,
    "swiglu": swiglu,
    "take": lambda x, indices, axis=0: np.take(x, indices, axis),
    "take_along_axis": take_along_axis,
    "take_rows": lambda x, index: np.take(x, index, 0),
    "tensordot": np.tensordot,
    "tile": np.tile,
    "topk": topk,
    "trace": np.linalg.trace,
    "transpose": lambda x, *axes: x.swapaxes(*axes) if axes else x.T,
    "tril": np.tril,
    "triu": np.triu,
    "unstack": lambda x, axis: list(np.moveaxis(x, axis, 0)),
    "vector_norm": np.linalg.vector_norm,
    "vecdot": lambda a, b, axis=-1: (a * b).sum(axis),
    "where": np.where,
}

ELSEWHERE: dict[str, str] = {
    "block_scaled_matmul": "tests/unit/backends/test_matmul_block_scaled.py: integer products",
    "dequantize": "tests/test_every_format.py: the scalar oracle",
    "grouped_weight_only_matmul": "tests/unit/nn/test_mixture.py: each expert's own product",
    "quantize": "tests/test_every_format.py and test_every_spec.py: the scalar oracle",
    "quantized_conv2d": "tests/unit/ops/test_quantized.py: three GEMMs of dequantized patches",
    "quantized_matmul": "tests/unit/ops/test_quantized.py: three GEMMs of dequantized operands",
    "prequantized_conv2d": "tests/unit/ops/test_prequantized.py: the decoded operands' convolution",
    "prequantized_matmul": "tests/unit/ops/test_prequantized.py: the decoded operands' product",
}
"""Operations on codes: which file compares each with a reference, and with which."""
