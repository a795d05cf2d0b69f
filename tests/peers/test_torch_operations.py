"""Values and gradients of operations against torch, at random shapes, arguments and edge values.

In float64, so that a difference is a mistake and no rounding: values within 1e-12 of torch's,
gradients within 1e-9, also where terms cancel. Edge values are zeros of both signs, infinities,
NaN, and numbers far from 1.
"""

# ruff: noqa: B023 (functions are called in the round that makes them)

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
f = torch.nn.functional

Array = np.ndarray[Any, Any]
ROUNDS = 12
EDGES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-300, -1e-300, 1e300, -1e300, 709.0, -745.0,
                  0.5, -0.5, 1.0, -1.0, 1.5, 2.5, 3.0, -3.0, 6.0])  # fmt: skip

UNARY: dict[str, Any] = {
    **{
        name: getattr(torch, name)
        for name in ("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos",
                     "cosh", "erf", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "log",
                     "log10", "log1p", "log2", "negative", "reciprocal", "relu", "round", "rsqrt",
                     "sigmoid",
                     "sign", "signbit", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc")
    },
    **{name: getattr(f, name) for name in ("elu", "gelu", "leaky_relu", "mish", "relu6", "selu",
                                           "silu")},
    "hard_sigmoid": f.hardsigmoid,
    "hard_swish": f.hardswish,
    "hard_tanh": f.hardtanh,
}  # fmt: skip
STEPS = {"ceil", "floor", "isfinite", "isinf", "isnan", "round", "sign", "signbit", "trunc"}
"""Without a gradient, or with one of 0."""
BINARY = {
    name: getattr(torch, name)
    for name in ("add", "atan2", "copysign", "divide", "equal", "greater", "hypot", "less",
                 "logaddexp", "maximum", "minimum", "multiply", "not_equal", "subtract")
} | {"equal": torch.eq}  # fmt: skip
COMPARE = {"equal", "greater", "less", "not_equal"}
REDUCE: dict[str, Any] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "logsumexp": torch.logsumexp,
    "max": torch.amax,
    "min": torch.amin,
    "var": lambda x, axis, keepdim: torch.var(x, axis, correction=0, keepdim=keepdim),
    "std": lambda x, axis, keepdim: torch.std(x, axis, correction=0, keepdim=keepdim),
}


def same(mine: Any, theirs: Any, bound: float, atol: float, what: str) -> None:
    a, b = mine.numpy(), theirs.detach().numpy()
    assert a.shape == b.shape, what
    if a.dtype == bool:
        np.testing.assert_array_equal(a, b, what)
        return
    np.testing.assert_allclose(a, b, rtol=bound, atol=atol, err_msg=what)


def compare(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    *arrays: Array,
    gradient: bool = True,
    bound: float = 1e-9,
) -> None:
    """Values, and the gradients of a random sum of the results, within ``bound``."""
    atol = 1e-12 if gradient else 1e-307  # below it are subnormals, which torch may flush
    what = f"{[a.shape for a in arrays]}"
    mine = [et.ExTensor(a, requires_grad=gradient and a.dtype.kind == "f") for a in arrays]
    other = [torch.tensor(a, requires_grad=gradient and a.dtype.kind == "f") for a in arrays]
    with np.errstate(all="ignore"):
        out, expected = ours(*mine), theirs(*other)
    same(out, expected, 1e-12, atol, what)
    if gradient:
        seed = np.random.default_rng(1).standard_normal(out.shape)
        out.backward(et.ExTensor(seed))
        expected.backward(torch.tensor(seed))
        for a, b in zip(mine, other, strict=True):
            if b.grad is not None:
                same(a.grad, b.grad, bound, bound, what)


def draws(name: str) -> list[np.random.Generator]:
    return [np.random.default_rng([zlib.crc32(name.encode()), n]) for n in range(ROUNDS)]


def shape_of(rng: np.random.Generator, axes: int | None = None) -> tuple[int, ...]:
    count = int(rng.integers(1, 5)) if axes is None else axes
    return tuple(int(n) for n in rng.integers(1, 6, count))


@pytest.mark.parametrize("name", UNARY)
def test_one_argument(name: str) -> None:
    ours = getattr(et, name)
    # torch's sign of NaN is 0, the array standard's NaN
    compare(ours, UNARY[name], EDGES[EDGES == EDGES] if name == "sign" else EDGES, gradient=False)
    bound = 1e-7 if name == "hard_sigmoid" else 1e-9  # torch's slope is a float32 sixth
    for rng in draws(name):
        x = rng.standard_normal(shape_of(rng)) * 2
        if name in ("log", "log10", "log2", "rsqrt", "sqrt", "reciprocal"):
            x = np.abs(x) + 0.1
        elif name == "acosh":
            x = np.abs(x) + 1.1
        elif name in ("acos", "asin", "atanh"):
            x = np.tanh(x) * 0.9
        elif name == "log1p":
            x = np.abs(x) - 0.5
        compare(ours, UNARY[name], x, gradient=name not in STEPS, bound=bound)


@pytest.mark.parametrize("name", BINARY)
def test_two_arguments_that_broadcast(name: str) -> None:
    ours = getattr(et, name)
    if name not in ("hypot", "logaddexp"):
        compare(ours, BINARY[name], EDGES[:, None], EDGES[None], gradient=False)
    for rng in draws(name):
        shape = shape_of(rng)
        other = tuple(n if rng.random() < 0.6 else 1 for n in shape)[
            int(rng.integers(len(shape))) :
        ]
        x, y = rng.standard_normal(shape), rng.standard_normal(other)
        first, second = (x, y) if rng.random() < 0.5 else (y, x)
        compare(ours, BINARY[name], first, second, gradient=name not in COMPARE)


@pytest.mark.parametrize("name", REDUCE)
def test_sums_and_their_like(name: str) -> None:
    for rng in draws(name):
        shape = shape_of(rng)
        axes = tuple(i for i in range(len(shape)) if rng.random() < 0.5) or (0,)
        axes = tuple(a - len(shape) if rng.random() < 0.5 else a for a in axes)
        keep = bool(rng.random() < 0.5)
        x = rng.standard_normal(shape)
        several = all(shape[a] > 1 for a in axes)  # else the slope of std is not defined
        compare(
            lambda t, axes=axes, keep=keep: getattr(et, name)(t, axis=axes, keepdims=keep),
            lambda t, axes=axes, keep=keep: REDUCE[name](t, axes, keepdim=keep),
            x,
            gradient=name != "std" or several,
        )


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cumsum"])
def test_along_an_axis(name: str) -> None:
    for rng in draws(name):
        shape = shape_of(rng)
        axis = int(rng.integers(-len(shape), len(shape)))
        compare(
            lambda t, axis=axis: getattr(et, name)(t, axis=axis),
            lambda t, axis=axis: getattr(torch, name)(t, dim=axis),
            rng.standard_normal(shape),
        )


def test_products() -> None:
    for rng in draws("matmul"):
        m, k, n = shape_of(rng, 3)
        batch = shape_of(rng, int(rng.integers(0, 3)))
        other = tuple(b if rng.random() < 0.7 else 1 for b in batch)
        compare(et.matmul, torch.matmul, rng.standard_normal((*batch, m, k)),
                rng.standard_normal((*other, k, n)))  # fmt: skip
        compare(
            lambda a, b: et.tensordot(a, b, 2),
            lambda a, b: torch.tensordot(a, b, 2),
            rng.standard_normal((m, k, n)),
            rng.standard_normal((k, n, 3)),
        )


def test_convolutions_and_pools() -> None:
    for rng in draws("conv"):
        groups, kernel = int(rng.integers(1, 3)), tuple(int(n) for n in rng.integers(1, 4, 2))
        inputs, outputs = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
        stride, padding, dilation = (
            tuple(int(n) for n in rng.integers(low, high, 2))
            for low, high in ((1, 3), (0, 3), (1, 3))
        )
        x = rng.standard_normal((2, inputs, 7, 9))
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        compare(
            lambda x, w, b, o=options: et.conv2d(x, w, b, **o),
            lambda x, w, b, o=options: f.conv2d(x, w, b, **o),
            x,
            rng.standard_normal((outputs, inputs // groups, *kernel)),
            rng.standard_normal(outputs),
        )
        window = (
            kernel,
            stride,
            tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True)),
        )
        for name in ("max_pool2d", "avg_pool2d"):
            compare(
                lambda x, w=window, name=name: getattr(et, name)(x, *w),
                lambda x, w=window, name=name: getattr(f, name)(x, *w),
                x,
            )


def test_losses() -> None:
    pairs = {"mse": f.mse_loss, "l1": f.l1_loss, "huber": f.huber_loss,
             "smooth_l1": f.smooth_l1_loss,
             "binary_cross_entropy_with_logits": f.binary_cross_entropy_with_logits}  # fmt: skip
    for rng in draws("losses"):
        for reduction in ("mean", "sum", "none"):
            shape = shape_of(rng)
            for name, theirs in pairs.items():
                target = rng.random(shape)
                compare(
                    lambda x, t, r=reduction, name=name: getattr(et, name)(x, t, reduction=r),
                    lambda x, t, r=reduction, theirs=theirs: theirs(x, t, reduction=r),
                    rng.standard_normal(shape),
                    target,
                    gradient=True,
                )
            scores, labels = rng.standard_normal((5, 4)), rng.integers(0, 4, 5)
            smoothing = float(rng.choice([0.0, 0.1]))
            compare(
                lambda x, t, r=reduction, s=smoothing: et.cross_entropy(x, t, s, reduction=r),
                lambda x, t, r=reduction, s=smoothing: f.cross_entropy(
                    x, t, label_smoothing=s, reduction=r
                ),
                scores,
                labels,
            )


def test_moves_of_axes_and_parts() -> None:
    for rng in draws("moves"):
        shape = shape_of(rng, 3)
        order = tuple(int(n) for n in rng.permutation(3))
        shifts, axes = tuple(int(n) for n in rng.integers(-3, 4, 2)), (0, 2)
        index = rng.integers(0, shape[1], shape)
        low, high = (int(n) for n in rng.integers(0, 3, 2))
        x = rng.standard_normal(shape)
        for ours, theirs in (
            (lambda t: et.permute(t, order), lambda t: t.permute(order)),
            (lambda t: et.flip(t, (0, 2)), lambda t: t.flip((0, 2))),
            (lambda t: et.roll(t, shifts, axes), lambda t: t.roll(shifts, axes)),
            (lambda t: et.tile(t, (2, 1, 3)), lambda t: t.tile((2, 1, 3))),
            (lambda t: et.tril(t, low), lambda t: t.tril(low)),
            (lambda t: et.triu(t, -high), lambda t: t.triu(-high)),
            (lambda t: et.pad(t, ((0, 0), (low, 0), (0, high))),
             lambda t: f.pad(t, (0, high, low, 0))),
            (lambda t: et.gather(t, et.ExTensor(index), 1),
             lambda t: t.gather(1, torch.tensor(index))),
            (lambda t: et.sort(t, axis=1), lambda t: t.sort(1).values),
            (lambda t: t[::2, -1], lambda t: t[::2, -1]),
            (lambda t: t[:, None, ..., :1], lambda t: t[:, None, ..., :1]),
        ):  # fmt: skip
            compare(ours, theirs, x)


def test_attention_and_norms() -> None:
    for rng in draws("attention"):
        b, h, n, d = shape_of(rng, 4)
        q, k, v = (rng.standard_normal((b, h, n, d)) for _ in range(3))
        for causal in (False, True):
            compare(
                lambda q, k, v, c=causal: et.scaled_dot_product_attention(q, k, v, causal=c),
                lambda q, k, v, c=causal: f.scaled_dot_product_attention(q, k, v, is_causal=c),
                q, k, v,
            )  # fmt: skip
        x, w, bias = rng.standard_normal((b, n, d + 1)), rng.random(d + 1), rng.random(d + 1)
        compare(et.layer_norm, lambda x, w, b: f.layer_norm(x, (d + 1,), w, b), x, w, bias)
        compare(et.rms_norm, lambda x, w: f.rms_norm(x, (d + 1,), w, 1e-6), x, w)
