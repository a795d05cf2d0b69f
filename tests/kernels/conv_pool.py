"""Convolutions within the bound of any order of sums; pooling by its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from extensor.backends import cpu
from extensor.backends.generic.conv_pool import fold
from extensor.backends.protocol import Window
from extensor.quant.array import QuantStats
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.kernels.inputs import CORE, GENERIC, UNIT, VIEWS, Case, Check, assert_bytes, plain

# (N, C, H, W), O, groups, window: LeNet's first, then what a direct kernel may get wrong.
WINDOWS = (
    ((64, 1, 28, 28), 6, 1, Window((5, 5), padding=(2, 2))),
    ((64, 6, 14, 14), 16, 1, Window((5, 5))),
    ((3, 4, 11, 9), 8, 2, Window((3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
    ((2, 6, 13, 17), 6, 6, Window((3, 3), padding=(1, 1))),
    ((2, 3, 12, 40), 7, 1, Window((3, 3), stride=(1, 2), padding=(2, 3), dilation=(2, 2))),
    ((1, 4, 5, 70), 13, 1, Window((1, 1), stride=(3, 2))),
    ((1, 1, 1, 1), 1, 1, Window((1, 1))),
    ((5, 2, 6, 6), 3, 1, Window((6, 6))),
    ((9, 1, 8, 100), 2, 1, Window((2, 9), padding=(1, 4))),
    ((2, 2, 4, 4), 2, 1, Window((1, 2), padding=(2, 2))),
    ((7, 40, 4, 4), 13, 1, Window((3, 3), padding=(1, 1))),
    ((34, 5, 2, 2), 5, 5, Window((3, 3), stride=(2, 2), padding=(1, 1))),
    ((3, 2, 9, 10), 4, 2, Window((3, 3), stride=(3, 2), padding=(5, 1), dilation=(2, 3))),
    ((2, 2, 9, 9), 3, 1, Window((2, 2), stride=(4, 4), dilation=(2, 6), padding=(0, 3))),
    ((2, 30, 33, 31), 9, 1, Window((3, 3), padding=(1, 1))),
    ((0, 2, 6, 6), 3, 1, Window((3, 3))),
    # Long sums, few windows: the gradient of the images is that of the patches.
    ((5, 6, 11, 13), 64, 2, Window((4, 5))),
    ((2, 4, 30, 20), 40, 1, Window((5, 3), stride=(1, 2), dilation=(3, 2))),
)


@cache
def window_arrays(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and the output's gradient."""
    shape, outputs, groups, window = WINDOWS[number]
    rng = np.random.default_rng(number)
    ho, wo = window.output_size(shape[2:])
    shapes = (shape, (outputs, shape[1] // groups, *window.kernel), (shape[0], outputs, ho, wo))
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    return arrays[0], arrays[1], arrays[2]


@cache
def convolution(name: str, number: int) -> tuple[Case, np.ndarray, np.ndarray]:
    """The call's arguments, its value in float64 and the bound on a float32 result's error."""
    _, _, groups, window = WINDOWS[number]
    x, w, g = window_arrays(number)
    options = {
        "conv2d": ((x, w), (), w[0].size),
        "conv2d_grad_x": ((g, w), (x.shape,), w[:, 0].size // groups),
        "conv2d_grad_w": ((g, x), (w.shape,), g[:, 0].size),
    }
    (a, b), extra, terms = options[name]
    tail: tuple[Any, ...] = (*extra, window, groups)
    if name == "conv2d" and number % 2:
        tail = (*tail, plain((len(w),), number))  # a bias
    exact = getattr(GENERIC, name)(a.astype(np.float64), b.astype(np.float64), *tail)
    sizes = [np.abs(t) if isinstance(t, np.ndarray) else t for t in tail]
    total = getattr(GENERIC, name)(
        np.abs(a).astype(np.float64), np.abs(b).astype(np.float64), *sizes
    )
    gamma = (terms + 1) * UNIT / (1 - (terms + 1) * UNIT)
    return (a, b, *tail), exact, gamma * total * (1 + 1e-9)


def check_convolution(name: str) -> Check:
    def check(backend: cpu.CpuBackend) -> None:
        for number in range(len(WINDOWS)):
            case, exact, bound = convolution(name, number)
            got = getattr(backend, name)(*case)
            what = (WINDOWS[number], backend.path(name, *case))
            assert got.dtype == np.float32, what
            assert got.shape == exact.shape, what
            assert (np.abs(got - exact) <= bound).all(), what
            views = [view(case[0]) for view in VIEWS.values() if view is not VIEWS["reversed"]]
            for view in views:
                assert_bytes(getattr(backend, name)(view, *case[1:]), got, what)

    return check


def patch_specs(rowwise: bool) -> Iterator[QuantSpec]:
    """Scales of a block, of a row and of all patches; rowwise also transforms and random bits."""
    for name in ("mxfp4", "mxfp8_e4m3", "mxint8", "int8", "nvfp4"):
        yield QuantSpec(name)
    yield QuantSpec("mxfp4", scale_rule="floor", tile=(1, 16))
    yield QuantSpec("mxfp4", tile="channel")
    yield QuantSpec("fp8_e4m3")  # one scale for all patches
    yield QuantSpec("nvfp4", scale_rule="four_over_six")
    yield QuantSpec("mxfp8_e4m3", rebased=True)
    yield QuantSpec("mxfp4", scale_rule="mse", tile="channel")  # not in the core, rowwise
    if not rowwise:
        yield QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32, "none"))
        yield QuantSpec("mxfp8_e4m3", transform=Hadamard(64, "random", 5), tile=(1, 16))
        return
    yield EDEN
    yield QuantSpec("nvfp4", transform=Hadamard(16, "fixed"))
    yield QuantSpec("nvfp4_fp8exact", scale_rule="least_error", transform=Hadamard(16, "fixed"))
    yield QuantSpec("mxfp4", rounding="stochastic", transform=Hadamard(64, "random"))
    yield QuantSpec("int8", rounding="stochastic", rbits=8, tile=(1, 48))


EDEN = QuantSpec("nvfp4", rounding="stochastic", transform=Hadamard(128, "random"), eden=True)
_QUEST = QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32, "none"))
FIRST = (
    (_QUEST, QuantSpec("mxfp4", rounding="stochastic", transform=Hadamard(32, "random"))),
    (QuantSpec("nvfp4", scale_rule="four_over_six"), EDEN),
    (QuantSpec("mxfp4", scale_rule="floor"), QuantSpec("int8")),
)
"""Quartet's, Quartet II's, and one with a scale for each row."""


@cache
def quantized_convolutions(name: str) -> list[tuple[Case, np.ndarray, QuantStats, np.ndarray]]:
    """Arguments, the generic method's sums and counts, and the bound on another order's sums."""
    made = []
    for number, (_, _, groups, window) in enumerate(WINDOWS):
        x, w, g = (a[:7] for a in window_arrays(number))  # the generic quantizer is slow
        w = window_arrays(number)[1]
        stack = (-1,) if groups == 1 else (groups, w.shape[0] // groups)
        rowwise = name == "quantized_conv2d_grad_w"
        for spec in patch_specs(rowwise) if x.size else ():
            axis = -1 if rowwise else -2
            spec = spec.replace(axis=axis + len(stack) + 1).resolve(len(stack) + 1)
            case: Case
            if name == "quantized_conv2d":
                left, terms = w.reshape(*stack, w[0].size), w[0].size + 1
                size = spec.transform.size if spec.transform else 1
                pad = plain((*left.shape[:-1], -left.shape[-1] % size), number)
                left, terms = np.concatenate([left, pad], axis=-1), terms + pad.shape[-1]
                bias = (plain((len(w),), number),) if number % 2 else ()
                case = (x, left, spec, None, w.shape, window, *bias)
            else:
                terms = g[:, 0].size
                left = np.ascontiguousarray(g.swapaxes(0, 1)).reshape(*stack, terms)
                size = spec.transform.size if spec.transform else 1
                left = np.pad(left, [(0, 0)] * (left.ndim - 1) + [(0, -terms % size)])
                stream = Stream(3, 1) if spec.rounding == "stochastic" else None
                case = (left, x, spec, stream, w.shape, window)
            expected, counted = getattr(GENERIC, name)(*case)
            if rowwise and (spec.transform or spec.rounding == "stochastic"):  # signs decide
                values, _ = GENERIC._patches_operand(x, *case[2:])
                total = (np.abs(left) @ np.abs(values.swapaxes(-1, -2))).reshape(w.shape)
            elif spec.transform:
                values, _ = GENERIC._patches_operand(x, *case[2:6])
                total = np.abs(left) @ np.abs(values)
                total = total.reshape(len(w), len(x), *expected.shape[2:]).swapaxes(0, 1)
                total = total + np.abs(case[6])[:, None, None] if len(case) > 6 else total
            else:
                sizes = [np.abs(a) if isinstance(a, np.ndarray) else a for a in case]
                total, _ = getattr(GENERIC, name)(*sizes)
            made.append((case, expected, counted, 2 * (terms + 4) * UNIT * total + 1e-30))
        if rowwise and groups == 1 and x.size:
            made.extend(_requantized(x, w, g, window))
    return made


def _requantized(x: np.ndarray, w: np.ndarray, g: np.ndarray, window: Window) -> Iterator[Any]:
    """Weight gradients from patches that were quantized along their taps first."""
    terms = g[:, 0].size
    rows = np.ascontiguousarray(g.swapaxes(0, 1)).reshape(len(w), terms)
    for before, spec in FIRST:
        before, spec = before.replace(axis=0).resolve(2), spec.replace(axis=1).resolve(2)
        size = spec.transform.size if spec.transform else 1
        left = np.pad(rows, [(0, 0), (0, -terms % size)])
        stream = Stream(3, 1) if spec.rounding == "stochastic" else None
        case = (left, x, spec, stream, w.shape, window, before)
        expected, counted = GENERIC.quantized_conv2d_grad_w(*case)
        values, _ = GENERIC._patches_operand(x, *case[2:])
        yield case, expected, counted, 2 * (terms + 4) * UNIT * (np.abs(left) @ np.abs(values.T))


CLIPPED = (
    _QUEST,
    QuantSpec("mxfp4", scale_rule="mse", tile=(1, 16)),
    QuantSpec("mxfp4", scale_rule="floor", tile="channel"),
    QuantSpec("mxfp8_e5m2", scale_rule="floor", transform=Hadamard(64, "random", 5)),
    QuantSpec("nvfp4"),
)


@cache
def clipped_gradients() -> list[tuple[Case, np.ndarray, np.ndarray]]:
    """Arguments, the generic method's sums, and the bound on another order's."""
    made = []
    for x, w, g, window in (
        (*window_arrays(number), window)
        for number, (shape, _, groups, window) in enumerate(WINDOWS)
        if groups == 1 and shape[0]
    ):
        x, rows = x[:7], np.ascontiguousarray(g[:7].swapaxes(0, 1)).reshape(len(w), -1)
        for spec in CLIPPED:
            spec = spec.replace(axis=0).resolve(2)
            size = spec.transform.size if spec.transform else 1
            taps, patches = w[0].size, rows.shape[1]
            padded = taps + -taps % size
            kernels = plain((len(w), padded), taps)
            case: Case = (rows, kernels, x, spec, window)
            expected = GENERIC.clipped_conv2d_grad_x(*case)
            # A sum enters all of its transform's values, times 1 / sqrt(size).
            total = (np.abs(kernels).T @ np.abs(rows)).reshape(-1, size, patches)
            spread = total.sum(axis=1, keepdims=True) / np.sqrt(size)
            total = np.broadcast_to(spread, total.shape).reshape(padded, patches)[:taps]
            ho, wo = window.output_size(x.shape[2:])
            shape = (x.shape[1], *window.kernel, len(x), ho, wo)
            folded = fold(np.moveaxis(total.reshape(shape), 3, 0), x.shape, window, np)
            made.append((case, expected, 2 * (len(w) + taps + 20) * UNIT * folded + 1e-30))
    return made


def check_clipped_gradient(backend: cpu.CpuBackend) -> None:
    for case, expected, bound in clipped_gradients():
        got = backend.clipped_conv2d_grad_x(*case)
        what = (*case[3:], case[2].shape, backend.path("clipped_conv2d_grad_x", *case))
        assert got.shape == expected.shape, what
        assert (np.abs(got - expected) <= bound).all(), what
        assert not CORE or what[-1].startswith("core ("), what


def check_quantized_convolution(name: str) -> Check:
    def check(backend: cpu.CpuBackend) -> None:
        for case, expected, counted, bound in quantized_convolutions(name):
            got, stats = getattr(backend, name)(*case)
            what = (case[2], case[4:6], backend.path(name, *case))
            assert stats == counted, what
            assert got.shape == expected.shape, what
            assert (np.abs(got - expected) <= bound).all(), what
            if (
                CORE
                and case[2].rule != "mse"
                and (case[2].tile != "tensor" or len(case[4]) == 2 or name.endswith("w"))
            ):
                assert what[-1].startswith("core ("), what

    return check


POOLS = (
    Window((2, 2), stride=(2, 2)),
    Window((3, 3), stride=(2, 2), padding=(1, 1)),
    Window((2, 3), stride=(1, 2), dilation=(2, 1)),
    Window((3, 1), padding=(1, 0)),
)
POOL_SHAPES = ((33, 6, 28, 28), (40, 16, 10, 10), (2, 3, 7, 9), (1, 2, 5, 130))


def pool_input(shape: tuple[int, ...]) -> np.ndarray:
    """Few distinct values, so that the first of equal maxima matters; NaN and -Inf among them."""
    rng = np.random.default_rng(7)
    x = rng.integers(-3, 4, shape).astype(np.float32)
    x[rng.random(shape) < 0.05] = np.nan
    x[rng.random(shape) < 0.3] = -np.inf
    x[rng.random(shape) < 0.05] = -0.0
    return x


def check_max_pool2d(backend: cpu.CpuBackend) -> None:
    for shape in POOL_SHAPES:
        x = pool_input(shape)
        for window in POOLS:
            expected = GENERIC.max_pool2d(x, window)
            for view in (x, *(VIEWS[name](x) for name in ("strided", "misaligned", "transposed"))):
                got = backend.max_pool2d(view, window)
                assert_bytes(got[1], expected[1], (shape, window))
                assert_bytes(got[0], expected[0], (shape, window))


def check_max_pool2d_grad(backend: cpu.CpuBackend) -> None:
    for shape in POOL_SHAPES:
        for window in POOLS:
            _, index = GENERIC.max_pool2d(pool_input(shape), window)
            g = plain(index.shape)
            expected = GENERIC.max_pool2d_grad(g, index, shape)
            assert_bytes(backend.max_pool2d_grad(g, index, shape), expected, (shape, window))
