"""Training kernels on the GPU: the CPU's bits or its bounds, and whole loss curves."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor.backends.generic import GenericBackend
from extensor.backends.generic.conv_pool import fold
from extensor.backends.protocol import AttentionForward, Window
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build as build_gpt
from extensor.models.lenet.configs import LeNetConfig
from extensor.models.lenet.model import build as build_lenet
from extensor.nn.recipe import apply_recipe
from extensor.optim import SGD, AdamW, Optimizer
from extensor.optim.states import STATES
from extensor_cuda.kernels.nn import (
    conv_pool,
    cross_entropy,
    dropout,
    elementwise,
    norm,
    scatter_add,
    softmax,
    sums,
)
from extensor_cuda.kernels.optim import optimizer
from extensor_cuda.runtime import capture
from tests.kernels import nn as cases
from tests.kernels.nn import norm_cases, norm_grad_cases
from tests.oracle.compare import same_bytes
from tests.unit.cuda.test_compile import check_compiles

CPU = GenericBackend("cpu", np)


@pytest.mark.parametrize("shape", [(0,), (1,), (8,), (7, 9), (3, 5, 320)], ids=str)
def test_dropout_draws_the_cpus_masks(trainer: Any, shape: Any) -> None:
    for seed, calls, p in ((0, 0, 0.5), (2**62 - 1, 3, 0.1), (12345678901234, 2**40, 0.999)):
        draws = np.array([seed, calls])
        there = trainer.xp.asarray(draws)
        assert trainer.path("dropout_mask", there, shape, p) == "fused kernel"
        got = trainer.dropout_mask(there, shape, p).get()
        np.testing.assert_array_equal(got, CPU.dropout_mask(draws, shape, p))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_no_kernel_spills(arch: str) -> None:
    weights = ("float32", "bfloat16", "mxint8")
    sources = [
        optimizer.source(*each) for each in itertools.product(STATES, weights, (False, True))
    ]
    sources += [capture.source(), scatter_add.source(), conv_pool.source()]
    sources += [
        elementwise.source(*kinds) for kinds in ((0, 0, 0), (0, 1, 0), (1, 1, 1), (1, 0, 0))
    ]
    sources += [softmax.softmax_source(n) for n in (10, 1024, 1025)]
    sources += [softmax.softmax_source(softmax.MAX_LENGTH, values) for values in (0, 1)]
    sources.append(dropout.source())
    sources += [cross_entropy.loss_source(*each) for each in ((1, 0), (8, 0), (1, 1), (8, 1))]
    sources += [sums.sums_source("float32", each, rows) for each, rows in ((1, 8), (4, 8), (1, 32))]
    sources += [sums.sums_source("bfloat16", each, 8) for each in (1, 8)]
    sources += [
        norm.norm_source(n, c) for n, c in ((37, True), (1024, True), (norm.MAX_LENGTH, False))
    ]
    sources += [norm.norm_source(512, True, 1), norm.norm_source(norm.MAX_LENGTH, True, 1)]
    sources.append(norm.norm_source(4096, False, 1, 1, weight=1))
    for source in sources:
        check_compiles(source, arch)


@pytest.mark.parametrize("length", [7, 400])  # fewer rows than there are to add, and more
@pytest.mark.parametrize("width", [1, 5, 300, 1030])
def test_rows_are_added_in_order(trainer: Any, width: int, length: int) -> None:
    rng = np.random.default_rng(width)
    for count in {300: (2100,), 1030: (70,)}.get(width, (1, 31, 300)):
        rows = rng.standard_normal((count, width)).astype(np.float32)
        index = rng.integers(-length, length, count) * rng.integers(0, 2, count)
        out = rng.standard_normal((length, width)).astype(np.float32)
        expected, magnitude = out.astype(np.float64), np.abs(out).astype(np.float64)
        np.add.at(expected, index, rows.astype(np.float64))
        np.add.at(magnitude, index, np.abs(rows).astype(np.float64))
        there = [trainer.xp.asarray(a) for a in (out, index, rows)]
        assert trainer.path("add_rows", *there) == "fused kernel"
        trainer.add_rows(*there)
        assert (np.abs(there[0].get() - expected) <= (count + 1) * UNIT * magnitude).all()
        in_order = np.zeros_like(out)
        for at, row in zip(index % length, rows, strict=True):
            in_order[at] += row
        same_bytes("rows", there[0].get(), out + in_order)
        slots, sums = (a.get() for a in trainer.sum_rows(*there[1:], length))
        assert trainer.path("sum_rows", *there[1:], length) == "fused kernel"
        assert (slots[sorted(set(index % length))] >= 0).all()
        assert set(slots) - {-1} <= set(range(count))
        found = np.where(slots[:, None] < 0, np.float32(0), sums[slots])
        same_bytes("sums of rows", found, in_order)


def test_positions_may_be_met_in_any_order(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As threads of a GPU meet them; the emulator's go in order."""
    rng, real = np.random.default_rng(0), scatter_add.launch

    def launch(source: Any, kernel: str, blocks: int, threads: int, *arrays: Any) -> None:
        if kernel == "add_rows":
            found, kept = (a.get() for a in arrays[1:3])
            for row, (positions, _) in enumerate(found):
                most = min(positions, 32)
                kept[row, :most] = rng.permutation(kept[row, :most])
            arrays[2][...] = trainer.xp.asarray(kept)
        real(source, kernel, blocks, threads, *arrays)

    monkeypatch.setattr(scatter_add, "launch", launch)
    index = rng.integers(0, 3, 50)
    rows = rng.standard_normal((50, 40)).astype(np.float32)
    out = np.zeros((3, 40), np.float32)
    there = trainer.xp.asarray(out)
    trainer.add_rows(there, trainer.xp.asarray(index), trainer.xp.asarray(rows))
    for at, row in zip(index, rows, strict=True):
        out[at] += row
    same_bytes("rows", there.get(), out)


WINDOWS = (
    Window((2, 2), (2, 2)),
    Window((3, 3), (2, 2), (1, 1)),
    Window((3, 2), (1, 3), (1, 0), (2, 1)),
    Window((1, 5), (1, 1), (0, 2)),
)


@pytest.mark.parametrize("where", WINDOWS, ids=str)
def test_windows_have_the_cpus_bits(trainer: Any, where: Window) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, (2, 3, 9, 11)).astype(np.float32)  # ties
    x[0, 0, 3, 4], x[1, 1, :, 5], x[1, 2] = np.nan, -np.inf, -np.inf
    best, index = CPU.max_pool2d(x, where)
    got, places = trainer.max_pool2d(trainer.xp.asarray(x), where)
    assert trainer.path("max_pool2d", got, where) == "fused kernel"
    same_bytes("maxima", got.get(), best)
    same_bytes("places", places.get(), index)
    g = rng.standard_normal(best.shape).astype(np.float32)
    back = trainer.max_pool2d_grad(trainer.xp.asarray(g), places, x.shape, where)
    same_bytes("gradient", back.get(), CPU.max_pool2d_grad(g, index, x.shape))
    patches = rng.standard_normal((2, 3, *where.kernel, *best.shape[2:])).astype(np.float32)
    there = trainer.xp.asarray(patches)
    folded = conv_pool.fold(there, x.shape, where, trainer.xp)
    same_bytes("image", folded.get(), fold(patches, x.shape, where, np))
    arrays = g, np.where(g > 0.5, g, -g * 0)
    arrays[0][0, 0, 0, 0] = np.nan
    slope = trainer.relu_grad(*map(trainer.xp.asarray, arrays))
    same_bytes("relu", slope.get(), CPU.relu_grad(*arrays))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1, 8, 4099, 12288])
def test_bits_of_relu_are_those_of_its_output(trainer: Any, size: int, dtype: Any) -> None:
    """Subnormal values count; NaN, of which a gradient stays zero, does not."""
    rng = np.random.default_rng(size)
    out = np.maximum(rng.standard_normal(size + 1), 0)[1:].astype(dtype)
    out[::7], out[3::11], out[5::13] = 1e-40, np.nan, np.inf
    g = rng.standard_normal(size).astype(dtype)
    g[::5] = -np.inf
    there = trainer.xp.asarray(out), trainer.xp.asarray(g)
    assert trainer.path("positive_bits", there[0]) == "fused kernel"
    bits = trainer.positive_bits(there[0])
    same_bytes("bits", bits.get(), np.packbits(out.astype(np.float64) > 0))
    same_bytes("bits", bits.get(), CPU.positive_bits(out))
    got = trainer.relu_grad_of_bits(there[1], bits)
    same_bytes("gradient", got.get(), CPU.relu_grad(g, out).astype(dtype))


def test_rounding_to_bfloat16_has_the_cpus_bits(trainer: Any) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 50_000, dtype=np.uint32)
    bits[:8] = 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x80000001, 0, 0xFF800000
    x = bits.view(np.float32)
    same_bytes(
        "bfloat16", trainer.bfloat16_values(trainer.xp.asarray(x)).get(), CPU.bfloat16_values(x)
    )


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "layer_norm_grad", "rms_norm_grad"])
def test_norms_are_within_their_bounds(trainer: Any, name: str) -> None:
    cases = norm_grad_cases if name.endswith("_grad") else norm_cases
    for case, exact, bounds in cases(name.startswith("layer")):
        if trainer.name == "emulated" and len(case[0]) > 1000:
            continue  # thousands of blocks, one after the other
        there = [trainer.xp.asarray(a) if isinstance(a, np.ndarray) else a for a in case]
        fits = case[1 + name.endswith("_grad")].size <= norm.MAX_LENGTH
        assert trainer.path(name, *there).startswith("fused kernel" if fits else "generic: rows of")
        for got, expected, bound in zip(getattr(trainer, name)(*there), exact, bounds, strict=True):
            assert got.shape == expected.shape
            assert (np.abs(got.get() - expected) <= bound).all(), case[0].shape


ELEMENTS = {
    "gelu": cases.gelu_cases,
    "gelu_grad": cases.gelu_grad_cases,
    "softmax": cases.softmax_cases,
    "softmax_grad": cases.softmax_grad_cases,
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_gelu_and_softmax_are_within_their_bounds(trainer: Any, name: str) -> None:
    for case, exact, bounds in ELEMENTS[name]():
        if trainer.name == "emulated" and case[0].size > 60_000:
            continue  # thousands of blocks, one after the other
        case = (*case[:2], None) if name == "gelu_grad" else case  # Phi is computed again
        there = [trainer.xp.asarray(a) if isinstance(a, np.ndarray) else a for a in case]
        fits = name.startswith("gelu") or case[0].shape[-1] <= softmax.MAX_LENGTH
        path = trainer.path(name, *there)
        assert path.startswith("fused kernel" if fits else "generic: rows of"), path
        made = getattr(trainer, name)(*there)
        got = made[0] if isinstance(made, tuple) else made
        assert (np.abs(got.get() - exact[0]) <= bounds[0]).all(), case[0].shape


def strided(a: Any) -> Any:
    """The same values with the heads innermost but one, as a projection gives them."""
    return a.swapaxes(1, 2).copy().swapaxes(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(3, 3, 1), (5, 9, 2), (4, 1100, 1)], ids=str)
def test_attention_is_that_of_float64(trainer: Any, sizes: Any, causal: bool) -> None:
    queries, keys, shared = sizes
    rng = np.random.default_rng(keys)
    heads, d, dv = 2, 6, 3
    q = rng.standard_normal((2, heads * shared, queries, d)).astype(np.float32)
    k = rng.standard_normal((2, heads, keys, d)).astype(np.float32)
    v = rng.standard_normal((2, heads, keys, dv)).astype(np.float32)
    g = rng.standard_normal((2, heads * shared, queries, dv)).astype(np.float32)
    wide = [a.astype(np.float64) for a in (q, k, v)]
    out, stats = CPU.attention(*wide, causal, 0.7)
    into = tuple(np.empty_like(a) for a in wide)
    CPU.attention_grad(g.astype(np.float64), AttentionForward(*wide, out, stats, causal, 0.7), into)
    there = [strided(trainer.xp.asarray(a)) for a in (q, k, v)]
    assert trainer.path("attention", *there, causal, 0.7) == "fused kernel"
    got, kept = trainer.attention(*there, causal, 0.7)
    assert kept.shape == stats.shape
    # Scores are of order 10; n terms of size 1 each off by some units of 2**-24.
    np.testing.assert_allclose(got.get(), out, atol=(keys + 60) * UNIT * np.abs(v).max())
    np.testing.assert_allclose(kept.get(), stats, rtol=(keys + 60) * UNIT * 4)
    back = tuple(trainer.xp.empty(a.shape, a.dtype) for a in (q, k, v))
    g = strided(trainer.xp.asarray(g))
    forward = AttentionForward(*there, strided(got), kept, causal, 0.7)
    trainer.attention_grad(g, forward, back)
    for ours, exact in zip(back, into, strict=True):
        scale = np.abs(exact).max() + 1
        np.testing.assert_allclose(ours.get(), exact, atol=40 * (keys + 60) * UNIT * scale)


def test_long_and_short_rows_are_normalized(trainer: Any) -> None:
    rng = np.random.default_rng(0)
    for shape, kept in (((3, 5000), 1), ((2, 3, 70), 2), ((4, norm.MAX_LENGTH), 1), ((700, 33), 1)):
        x = rng.standard_normal(shape).astype(np.float32)
        w, b = (rng.standard_normal(shape[-kept:]).astype(np.float32) for _ in range(2))
        expected = CPU.layer_norm(*(a.astype(np.float64) for a in (x, w, b)), 1e-5)
        got = trainer.layer_norm(*map(trainer.xp.asarray, (x, w, b)), 1e-5)
        n = w.size
        for one, two in zip(got, expected, strict=True):
            np.testing.assert_allclose(one.get(), two, rtol=1e-5, atol=4 * n * 2.0**-24)
        g = rng.standard_normal(shape).astype(np.float32)
        wide = [a.astype(np.float64) for a in (g, x, w)]
        back = CPU.layer_norm_grad(*wide, *expected[1:])
        here = trainer.layer_norm_grad(*map(trainer.xp.asarray, (g, x, w)), *got[1:])
        for one, two in zip(here, back, strict=True):
            np.testing.assert_allclose(one.get(), two, rtol=1e-4, atol=16 * n * 2.0**-24)
    long = trainer.xp.zeros((2, norm.MAX_LENGTH + 1), dtype=np.float32)
    assert trainer.path("rms_norm", long, long[0], 1e-6).startswith("generic: rows of")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1, 4096), (2, 70), (5, 600)])
def test_a_sum_and_its_norm_have_the_bits_of_both(trainer: Any, shape: Any, dtype: Any) -> None:
    rng = np.random.default_rng(shape[-1])
    a, b, w = (rng.standard_normal(n).astype(dtype) for n in (shape, shape, shape[-1]))
    there = [trainer.xp.asarray(x) for x in (a, b, w)]
    total = trainer.add(*there[:2])
    assert trainer.path("add_rms_norm", *there, 1e-5) == "fused kernel"
    got = trainer.add_rms_norm(*there, 1e-5)
    for one, two in zip(got, (total, trainer.rms_norm(total, there[2], 1e-5)[0]), strict=True):
        assert one.dtype == dtype
        same_bytes("values", one.get(), two.get())
    plain = CPU.add_rms_norm(a, b, w, 1e-5)
    for one, two in zip(got, plain, strict=True):
        np.testing.assert_allclose(*(x.astype(np.float64) for x in (one.get(), two)), rtol=0.01)


UNIT = 2.0**-24


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(1, 1), (33, 10), (12, 65), (5, 1024), (3, 1025), (9, 5000)])
def test_cross_entropy_is_within_its_bounds(trainer: Any, shape: Any, smoothing: float) -> None:
    rng = np.random.default_rng(shape[1])
    x = (rng.standard_normal(shape) * 5).astype(np.float32)
    labels = rng.integers(0, shape[1], shape[0])
    x[0] += 1e4  # no overflow
    smoothing = float(np.float32(smoothing))
    expected, p = CPU.cross_entropy(x.astype(np.float64), labels, smoothing)
    there = trainer.xp.asarray(x), trainer.xp.asarray(labels)
    assert trainer.path("cross_entropy", *there, smoothing) == "fused kernel"
    losses, kept = trainer.cross_entropy(*there, smoothing)
    n, d = shape[1], x.max(axis=1, keepdims=True) - x.astype(np.float64)
    spread = (p * d).sum(axis=1, keepdims=True)
    at = d[np.arange(len(x)), labels]
    total = np.abs(np.log(np.exp(-d).sum(axis=1)))
    bound = (spread[:, 0] + n + 8) * UNIT + 4 * UNIT * (total + at)
    bound += smoothing * (n + 3) * UNIT * d.mean(axis=1)
    assert (np.abs(losses.get() - expected) <= bound).all()
    for weight in (
        np.float32(0.7).reshape(()),
        rng.standard_normal((len(x), 1)).astype(np.float32),
    ):
        exact = CPU.cross_entropy_grad(
            weight.astype(np.float64), x.astype(np.float64), labels, p, smoothing
        )
        target = np.full(shape, smoothing / n)
        target[np.arange(len(x)), labels] += 1 - smoothing
        off = (d + spread + n + 16) * UNIT * p + 4 * UNIT * (p + target)
        got = trainer.cross_entropy_grad(trainer.xp.asarray(weight), *there, kept, smoothing)
        assert (np.abs(got.get() - exact) <= off * np.abs(weight)).all()


GATED = {"gated_silu": cases.gated_silu_cases, "gated_silu_grad": cases.gated_silu_grad_cases}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", GATED)
def test_gates_are_within_their_bounds(trainer: Any, name: str, dtype: Any) -> None:
    """Of bfloat16 the values are exact, and each result is rounded once more."""
    half = dtype != np.float32
    for case, _, _ in GATED[name]():
        count = 2 + name.endswith("grad")
        narrow = [np.asarray(a, dtype) for a in case[:count]]
        if not narrow[0].size or not all(np.isfinite(a.astype(np.float32)).all() for a in narrow):
            continue
        there = [trainer.xp.asarray(a) for a in narrow]
        assert trainer.path(name, *there, *case[count:]) == "fused kernel"
        got = getattr(trainer, name)(*there, *case[count:])
        wide = [a.astype(np.float64) for a in narrow]
        expected = getattr(CPU, name)(*wide, *case[count:])
        *_, gate, up = wide
        size = np.abs(wide[0] if count == 3 else 1.0) * (np.abs(up) + (case[-1] or 0) + 1)
        z = np.abs(gate * case[-2])
        off = (z + 24) * UNIT * size * (1 + np.abs(gate)) * (1 + z) + 2.0**-126 * (1 + size)
        for mine, true in zip(
            *((got, expected) if count == 3 else ((got,), (expected,))), strict=True
        ):
            assert mine.dtype == dtype
            bound = off + half * np.abs(true) * 2.0**-8
            assert (np.abs(mine.get().astype(np.float64) - true) <= bound).all(), name


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_heads_are_turned_with_the_generic_bits(trainer: Any, dtype: Any) -> None:
    """Contiguous, and cut out of rows; what the kernel leaves to the generic method, too."""
    rng = np.random.default_rng(3)
    for shape, half, path in (
        ((2, 3, 5, 64), 32, "fused kernel"),
        ((1, 2, 37, 16), 8, "fused kernel"),
        ((2, 3, 5, 22), 11, "generic: heads that are not"),
    ):
        x = rng.standard_normal((shape[0], shape[2], shape[1], shape[3])).astype(dtype)
        angle = rng.standard_normal((shape[2], half)).astype(np.float32)
        tables = np.cos(angle), np.sin(angle)
        expected = CPU.rotary(x.swapaxes(1, 2).astype(np.float32), *tables, False).astype(dtype)
        for view in (np.asarray, np.ascontiguousarray):
            there = trainer.xp.asarray(x)
            there = there.swapaxes(1, 2)
            if view is np.ascontiguousarray:
                there = trainer.xp.ascontiguousarray(there)
            given = there, *map(trainer.xp.asarray, tables), False
            assert trainer.path("rotary", *given).startswith(path)
            turned = trainer.rotary(*given)
            if path == "fused kernel":  # heads stay as they lie
                assert turned.strides == there.strides
            got = turned.get().astype(dtype)
            same_bytes("rotary", np.ascontiguousarray(got), np.ascontiguousarray(expected))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(33, 10), (12, 64), (3, 1032), (2, 1027)])
def test_label_ranks_are_those_of_a_stable_sort(trainer: Any, shape: Any, dtype: Any) -> None:
    """Ties, infinities and NaN among them."""
    rng = np.random.default_rng(shape[1])
    x = np.round(rng.standard_normal(shape) * 3).astype(dtype)
    labels = rng.integers(0, shape[1], shape[0])
    x[0, 3], x[0, labels[0]] = -np.inf, np.inf
    x[1, (labels[1] + 1) % shape[1]] = np.nan
    wide = x.astype(np.float32)
    order = np.argsort(np.where(np.isnan(wide), -np.inf, -wide), axis=1, kind="stable")
    expected = np.argmax(order == labels[:, None], axis=1)
    expected[1] = 1 + (wide[1] > wide[1, labels[1]]).sum()
    expected[1] += (wide[1, : labels[1]] == wide[1, labels[1]]).sum()
    there = trainer.xp.asarray(x), trainer.xp.asarray(labels)
    assert trainer.path("label_ranks", *there) == "fused kernel"
    for got in (CPU.label_ranks(x, labels), trainer.label_ranks(*there).get()):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected)
    x[:, labels] = np.nan
    lost = trainer.label_ranks(trainer.xp.asarray(x), there[1]).get()
    assert (lost == shape[1]).all() and (CPU.label_ranks(x, labels) == shape[1]).all()


def test_cross_entropy_of_special_scores(trainer: Any) -> None:
    """NaN and infinity come out where the generic method gives them."""
    x = np.zeros((5, 40), np.float32)
    x[0, 3], x[1, 4], x[2, 5] = np.nan, np.inf, -np.inf
    x[3] = -np.inf
    labels = np.arange(5)
    expected, p = CPU.cross_entropy(x, labels, 0.0)
    got, kept = trainer.cross_entropy(trainer.xp.asarray(x), trainer.xp.asarray(labels), 0.0)
    np.testing.assert_allclose(got.get(), expected, rtol=1e-6)
    one = np.ones((), np.float32)
    arrays = map(trainer.xp.asarray, (one, x, labels))
    back = trainer.cross_entropy_grad(*arrays, kept, 0.0).get()
    np.testing.assert_allclose(
        back, CPU.cross_entropy_grad(one, x, labels, p, 0.0), rtol=1e-6, atol=1e-6
    )


# --- whole runs ---


def lenet_losses(recipe: str, device: str, steps: int, activations: Any = None) -> list[float]:
    """Losses of LeNet-5 with momentum on one batch of 32 random images."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((32, 1, 28, 28)).astype(np.float32)
    labels = rng.integers(0, 10, 32)
    model = build_lenet(LeNetConfig(), np.random.default_rng(1)).to(device)
    return losses(
        model,
        (recipe, activations),
        SGD(model.parameters(), lr=0.02, momentum=0.9),
        images,
        labels,
        steps,
    )


def gpt_losses(recipe: str, device: str, steps: int, activations: Any = None) -> list[float]:
    """Losses of the small GPT with AdamW on one batch of 4 windows of 32 random tokens."""
    config = GPTConfig(context=32, layers=2)
    tokens = np.random.default_rng(0).integers(0, config.vocab, (4, config.context + 1))
    model = build_gpt(config, np.random.default_rng(1)).to(device)
    step = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    labels = np.ascontiguousarray(tokens[:, 1:]).reshape(-1)
    chosen = recipe, activations
    return losses(model, chosen, step, np.ascontiguousarray(tokens[:, :-1]), labels, steps)


def losses(
    model: Any,
    chosen: tuple[str, Any],
    optimizer: Optimizer,
    x: np.ndarray,
    labels: np.ndarray,
    steps: int,
) -> list[float]:
    state = apply_recipe(model, chosen[0], activations=chosen[1])
    device = optimizer.params[0].device
    inputs, expected = (et.from_numpy(a, device=device) for a in (x, labels))
    made = []
    for _ in range(steps):
        state.step += 1
        optimizer.zero_grad()
        scores = model(inputs)
        loss = et.cross_entropy(scores.reshape(-1, scores.shape[-1]), expected)
        loss.backward()
        optimizer.step()
        made.append(float(loss))
    return made


CURVES = {"fp32": 1e-4, "mxfp4": 2e-2, "nvfp4_nvidia": 2e-2}
"""Relative difference of a loss after few steps. Sums in another order differ by about 1e-6 of
themselves; under a quantizing recipe a value next to a tie then takes the other code, a step of up
to an eighth of its block's largest, in one value of tens of thousands."""


@pytest.mark.parametrize("recipe", CURVES)
@pytest.mark.parametrize("run", [lenet_losses, gpt_losses], ids=["lenet", "gpt"])
def test_loss_curves_of_cpu_and_gpu(cuda: Any, run: Any, recipe: str) -> None:
    ours, theirs = run(recipe, "cuda", 12), run(recipe, "cpu", 12)
    assert ours[-1] < 0.99 * ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=CURVES[recipe])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [(1, 32), (7, 33), (1000, 128), (513, 40), (2, 300, 264), (9000, 96)], ids=str
)
def test_leading_sums_are_within_their_bound_and_in_one_order(
    trainer: Any, shape: tuple[int, ...], dtype: str
) -> None:
    rng = np.random.default_rng(6)
    wide = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))
    x = wide.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    axes, there = len(shape) - 1, trainer.xp.asarray(x)
    assert trainer.path("leading_sum", there, axes) == "fused kernel"
    got, again = (trainer.leading_sum(there, axes).get() for _ in range(2))
    rows = x.reshape(-1, shape[-1]).astype(np.float64)
    most = sums.depth(len(rows), shape[-1], x.itemsize, there.data.ptr % 16 == 0)
    error = np.abs(got.astype(np.float64) - rows.sum(axis=0))
    assert got.dtype == np.float32 and got.tobytes() == again.tobytes()
    assert (error <= most * 2.0**-24 / (1 - most * 2.0**-24) * np.abs(rows).sum(axis=0)).all()


def test_few_columns_and_strided_arrays_are_summed_by_cupy(trainer: Any) -> None:
    x = trainer.xp.asarray(np.arange(120, dtype=np.float32).reshape(60, 2))
    assert "too few" in trainer.path("leading_sum", x, 1)
    np.testing.assert_array_equal(trainer.leading_sum(x, 1).get(), x.get().sum(axis=0))
    wide = trainer.xp.asarray(np.ones((64, 80), np.float32))[:, ::2]
    assert "strided" in trainer.path("leading_sum", wide, 1)
    np.testing.assert_array_equal(trainer.leading_sum(wide, 1).get(), np.full(40, 64.0))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
@pytest.mark.parametrize("run", [lenet_losses, gpt_losses], ids=["lenet", "gpt"])
def test_loss_curves_with_activations_in_bfloat16(cuda: Any, run: Any, recipe: str) -> None:
    """Sums in another order put a few values next to a tie on its other side, by 2**-8 of each.

    Of thousands of values in each result few do, so a loss differs by far less than one rounding.
    """
    ours, theirs = (run(recipe, device, 12, "bfloat16") for device in ("cuda", "cpu"))
    assert ours[-1] < 0.99 * ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=2e-2 if recipe == "mxfp4" else 4e-3)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("length", [40, 1500])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_of_norms_are_added_to_what_is_there(
    trainer: Any, name: str, length: int, narrow: bool
) -> None:
    rng, here = np.random.default_rng(length), trainer.xp
    x, g, there = (rng.standard_normal((9, length)).astype(np.float32) for _ in range(3))
    weight = rng.standard_normal(length).astype(np.float32)
    g = g.astype(ml_dtypes.bfloat16) if narrow else g
    x, g, weight, there = map(here.asarray, (x, g, weight, there))
    bias = [weight] if name == "layer_norm" else []
    _, *kept = getattr(trainer, name)(x, weight, *bias, 1e-5)
    apart = getattr(trainer, f"{name}_grad")(g, x, weight, *kept)
    added = getattr(trainer, f"{name}_grad")(g, x, weight, *kept, addend=there)
    same_bytes("gx", added[0].get(), (there + apart[0]).get())
    for one, other in zip(added[1:], apart[1:], strict=True):
        same_bytes("others", one.get(), other.get())


def test_the_tape_has_a_norms_gradient_added_where_it_meets_another(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from extensor.autograd.tensor import wrap

    rng = np.random.default_rng(0)
    given, factor = (rng.standard_normal((6, 48)).astype(np.float32) for _ in range(2))
    added: list[Any] = []
    add = type(trainer).add
    monkeypatch.setattr(
        type(trainer), "add", lambda self, a, b: added.append(a.shape) or add(self, a, b)
    )
    found = []
    for adding in (type(trainer).accumulating_vjps, ()):
        monkeypatch.setattr(type(trainer), "accumulating_vjps", adding)
        x = wrap(trainer.xp.asarray(given), trainer)
        weight, bias = (wrap(trainer.xp.asarray(factor[i]), trainer) for i in range(2))
        x.requires_grad = weight.requires_grad = True
        stream = x * 2.0
        out = stream + et.layer_norm(stream, weight, bias) * wrap(
            trainer.xp.asarray(factor), trainer
        )
        added.clear()
        out.sum().backward()
        assert x.grad is not None and weight.grad is not None
        found.append([x.grad.data.get().copy(), weight.grad.data.get().copy(), len(added)])
    same_bytes("x", found[0][0], found[1][0])
    same_bytes("weight", found[0][1], found[1][1])
    assert (found[0][2], found[1][2]) == (0, 1)
