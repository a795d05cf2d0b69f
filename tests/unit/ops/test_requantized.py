"""Quartet's layers against their definition, operand by operand from the scalar oracle."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.backends.generic import conv_pool
from extensor.backends.protocol import Window
from extensor.backends.registry import get as get_backend
from extensor.ops.quantized import layer_context, quantized_conv2d, quantized_matmul
from extensor.quant import reference
from extensor.quant.recipe import Gemm, LayerRecipe
from extensor.quant.recipe_state import LayerContext
from extensor.quant.recipes import RECIPES
from extensor.quant.scale_rules import QUEST_CLIP
from extensor.quant.spec import Hadamard, QuantSpec
from tests.oracle import hadamard as slow_hadamard
from tests.oracle import quantize as oracle
from tests.oracle.grid import decode

RNG = np.random.default_rng(11)
NAMES = ("quartet", "quartet2", "quartet2_4over6")
M, N, K = 40, 24, 70


def _spec(context: LayerContext, slot: str, axis: int) -> QuantSpec:
    """The slot's, its signs those of seed, step, layer and GEMM."""
    spec = context.layer.slot(slot).replace(axis=axis)
    if spec.transform is None or spec.transform.signs != "per_step":
        return spec
    number = {"fprop": 7, "dgrad": 8, "wgrad": 9}[slot.partition(".")[0]]
    stream = context.index << 8 | number << 1
    seed, step = context.state.seed, context.state.step
    return spec.replace(transform=replace(spec.transform, seed=seed, step=step, stream=stream))


def _oracle(x: np.ndarray, context: LayerContext, slot: str, axis: int) -> Any:
    spec = _spec(context, slot, axis)
    stream = context.stream(slot, axis == 0) if spec.rounding == "stochastic" else None
    return oracle.quantize(np.ascontiguousarray(x), spec, stream)


def _rotated(x: np.ndarray, transform: Hadamard | None) -> np.ndarray:
    return x if transform is None else slow_hadamard.hadamard(x, 1, transform)


def _inside(x: np.ndarray, stored: Any, block: int) -> np.ndarray:
    """Where |x| is at most six times its block's scale, a power of two."""
    scales = np.exp2(stored.scales.astype(np.float64) - 127).repeat(block, axis=1)
    return np.abs(x.astype(np.float64)) <= 6 * scales[:, : x.shape[1]]


def _expected(
    x: np.ndarray, w: np.ndarray, g: np.ndarray, context: LayerContext
) -> list[np.ndarray]:
    layer, transform = context.layer, context.layer.fprop.a.transform
    sides = [_oracle(x, context, "fprop.x", 1), _oracle(w, context, "fprop.w", 1)]
    out = [sides[0].operand.astype(np.float64) @ sides[1].operand.T.astype(np.float64)]
    for name, side, (source, stored), other in (
        ("dgrad", "w", (w, sides[1]), (x, sides[0])),
        ("wgrad", "x", (x, sides[0]), (w, sides[1])),
    ):
        gemm = getattr(layer, name)
        values = stored.operand if layer.requantize else _rotated(source, transform)
        right = _oracle(values, context, f"{name}.{side}", 0).operand.astype(np.float64)
        left = _oracle(g, context, f"{name}.g", 1 if name == "dgrad" else 0).operand
        left = left.astype(np.float64) if name == "dgrad" else left.T.astype(np.float64)
        gradient = gemm.output_scale * (left @ right)
        if layer.clip_gradient:
            gradient = gradient * _inside(_rotated(other[0], transform), other[1], 32)
        if transform is not None:
            gradient = slow_hadamard.hadamard(
                gradient.astype(np.float32), 1, transform, inverse=True
            )[:, :K]
        out.append(gradient)
    return out


def _check(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Sums of float32; FP8 tensor cores cut each of four groups of 32 products at 2**-13."""
    share = 2.0**-11 if et.ones(1).device == "cuda" else 2.0**-17
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=np.abs(theirs).max() * share)


def _run(name: str) -> tuple[list[np.ndarray], list[np.ndarray], LayerContext]:
    rng = np.random.default_rng(3)
    context = layer_context(RECIPES[name].layers, seed=5)
    context.state.step = 3
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((M, K), (N, K)))
    x *= np.exp2(rng.integers(-2, 3, x.shape)).astype(np.float32)
    g = rng.standard_normal((M, N)).astype(np.float32)
    tensors = [et.from_numpy(a.copy()) for a in (x, w)]
    for tensor in tensors:
        tensor.requires_grad = True
    y = quantized_matmul(*tensors, context)
    y.backward(et.from_numpy(g))
    actual = [y.numpy(), *(tensor.grad.numpy() for tensor in tensors)]
    return actual, _expected(x, w, g, context), context


@pytest.mark.parametrize("name", NAMES)
def test_matmul_is_the_recipe_by_the_oracle(name: str) -> None:
    actual, expected, context = _run(name)
    _check(actual, expected)
    assert {slot for _, slot in context.state.telemetry} == {
        "fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x"
    }  # fmt: skip


def test_planted_mistakes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that lets everything through, and one applied outside the transform's domain."""
    backend = get_backend(et.ones(1).device)
    honest = backend.straight_through

    def no_mask(gradient: Any, mask: Any, *rest: Any) -> Any:
        return honest(gradient, None, *rest)

    def outside(gradient: Any, mask: Any, transform: Any, length: int) -> Any:
        back = honest(gradient, None, transform, gradient.shape[1])
        return reference.masked(back, mask, 1, backend.xp)[:, :length]

    for planted in (no_mask, outside):
        monkeypatch.setattr(backend, "straight_through", planted)
        actual, expected, _ = _run("quartet")
        with pytest.raises(AssertionError):
            _check(actual, expected)


def _values(matrix: np.ndarray, context: LayerContext, slot: str, axis: int) -> np.ndarray:
    spec = _spec(context, slot, axis).resolve(2)
    stream = context.stream(slot, axis == 0) if spec.rounding == "stochastic" else None
    return reference.fake_quantize(np.ascontiguousarray(matrix, np.float32), spec, stream)[0]


@pytest.mark.parametrize("name", NAMES)
def test_conv2d_is_the_products_of_its_patches(name: str) -> None:
    """Matrices (K, M) of patches, (O, K) of weights and (O, M) of g, against float64."""
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in ((2, 8, 7, 6), (16, 8, 3, 3)))
    window = Window((3, 3), (2, 1), (1, 1))
    tensors = [et.from_numpy(a.copy()) for a in (x, w)]
    tensors[0].requires_grad = tensors[1].requires_grad = True
    y = quantized_conv2d(*tensors, layer_context(RECIPES[name].layers), (2, 1), 1)
    g = RNG.standard_normal(y.shape).astype(np.float32)
    y.backward(et.from_numpy(g))
    context = layer_context(RECIPES[name].layers)
    layer, transform = context.layer, context.layer.fprop.a.transform
    patches = conv_pool.patch_matrix(x, window, 1, np)[0]
    rows, kernels = g.swapaxes(0, 1).reshape(16, -1), w.reshape(16, -1)
    a, b = _values(patches, context, "fprop.x", 0), _values(kernels, context, "fprop.w", 1)
    left = _values(b, context, "dgrad.w", 0).astype(np.float64)
    dx = left.T @ _values(rows, context, "dgrad.g", 0) * layer.dgrad.output_scale
    right = _values(a, context, "wgrad.x", 1).astype(np.float64)
    dw = _values(rows, context, "wgrad.g", 1) @ right.T * layer.wgrad.output_scale
    found = []
    for gradient, source, slot in ((dx.T, patches.T, "fprop.x"), (dw, kernels, "fprop.w")):
        if layer.clip_gradient:
            stored = _oracle(source, context, slot, 1)
            gradient = gradient * _inside(_rotated(source, transform), stored, 32)
        if transform is not None:
            gradient = slow_hadamard.hadamard(
                gradient.astype(np.float32), 1, transform, inverse=True
            )[:, :72]
        found.append(gradient)
    n, _, ho, wo = y.shape
    images = found[0].T.reshape(8, 3, 3, n, ho, wo).transpose(3, 0, 1, 2, 4, 5)
    expected = [
        (b.astype(np.float64) @ a).reshape(16, n, ho, wo).swapaxes(0, 1),
        conv_pool.fold(images, x.shape, window, np),
        found[1].reshape(w.shape),
    ]
    _check([y.numpy(), tensors[0].grad.numpy(), tensors[1].grad.numpy()], expected)
    with pytest.raises(ValueError, match="groups=1"):
        quantized_conv2d(tensors[0], et.ones((16, 4, 3, 3)), context, groups=2)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_conv2d_without_requantizing(clips: bool, dense: bool) -> None:
    """A dense and a quantized backward pass: within rounding of the straight-through gradient."""
    rng = np.random.default_rng(4)
    x = QuantSpec("mxfp8_e4m3", scale_rule="rceil", transform=Hadamard(32, "none"))
    gemm = Gemm("bfloat16", "bfloat16") if dense else Gemm(x, x)
    layer = LayerRecipe(Gemm(x, x), gemm, gemm, clip_gradient=clips, requantize=not clips)
    tensors = [
        et.from_numpy(rng.standard_normal(s).astype(np.float32))
        for s in ((2, 4, 6, 5), (6, 4, 3, 3))
    ]
    gradients = []
    for quantized in (True, False):
        for tensor in tensors:
            tensor.grad, tensor.requires_grad = None, True
        y = (
            quantized_conv2d(*tensors, layer_context(layer), padding=1)
            if quantized
            else (et.conv2d(*tensors, padding=1))
        )
        y.backward(et.from_numpy(np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)))
        gradients.append([tensor.grad.numpy() for tensor in tensors])
    for mine, theirs in zip(*gradients, strict=True):
        assert np.linalg.norm(mine - theirs) < 0.1 * np.linalg.norm(theirs)


def test_what_goes_with_forward_operands() -> None:
    dense, spec = Gemm("bfloat16", "bfloat16"), QuantSpec("mxfp4")
    for a in ("bfloat16", QuantSpec("int8", symmetric=False), QuantSpec("fp8_e4m3")):
        for flag in ("clip_gradient", "requantize"):
            with pytest.raises(ValueError, match="expected MX or NVFP4 operands in fprop"):
                LayerRecipe(Gemm(a, spec), dense, dense, **{flag: True})
    with pytest.raises(ValueError, match="eden: expected nvfp4"):
        QuantSpec("nvfp4", eden=True)
    with pytest.raises(ValueError, match="scale_window: expected a rule"):
        QuantSpec("mxfp4", scale_rule="mse", scale_window=3)


def _error(block: np.ndarray, exponent: int) -> Fraction:
    """The exact squared error of E2M1 codes under a scale of two to an exponent."""
    grid = sorted({Fraction(float(decode(code, "e2m1"))) for code in range(16)})
    total, scale = Fraction(0), Fraction(2) ** exponent
    for value in block:
        x = Fraction(float(value))
        total += min(abs(x - q * scale) for q in grid) ** 2
    return total


def test_mse_has_the_least_error_of_all_powers_of_two() -> None:
    """Exact, over every exponent that could compete; ties and float32 sums: one part in 1e5."""
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((60, 32)) * np.exp2(rng.integers(-3, 4, (60, 32)))
    blocks[40:] = rng.integers(-20, 21, (20, 32)) / 4  # many at the top of their block
    blocks = blocks.astype(np.float32)
    q, _ = reference.quantize(blocks, QuantSpec("mxfp4", scale_rule="mse"))
    clipped = 0
    for block, byte in zip(blocks, q.scales[:, 0], strict=True):
        exponent = int(byte) - 127
        mine = _error(block, exponent)
        assert all(
            mine <= _error(block, exponent + d) * Fraction(100001, 100000)
            for d in (-3, -2, -1, 1, 2)
        )
        clipped += bool(np.abs(block).max() > 6 * 2.0**exponent)
    assert 5 < clipped < 55  # the search decides


def test_the_clip_of_quest_is_the_best_for_normal_values() -> None:
    """The squared error of E2M1 on 2**20 normal values, over clips about `QUEST_CLIP`."""
    x = np.abs(np.random.default_rng(1).standard_normal(1 << 20))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def error(clip: float) -> float:
        scaled = x * (6 / clip)
        nearest = grid[np.abs(scaled[:, None] - grid).argmin(axis=1)] * (clip / 6)
        return float(np.square(nearest - x).mean())

    clips = np.arange(2.5, 3.45, 0.1)
    assert abs(clips[np.argmin([error(c) for c in clips])] - QUEST_CLIP) < 0.1


def test_eden_is_unbiased_over_its_signs_with_half_the_error() -> None:
    """The mean projection on x is 1 within four standard errors; stochastic codes err more."""
    x = np.random.default_rng(2).standard_normal((1, 128)).astype(np.float32)
    base = QuantSpec("nvfp4", rounding="stochastic")
    square = float((x * x).sum())
    projections, errors = [], {True: 0.0, False: 0.0}
    for seed in range(300):
        for eden in (True, False):
            spec = base.replace(transform=Hadamard(128, "random", seed), eden=eden)
            values = reference.dequantize(reference.quantize(x, spec, et.random.Stream(seed))[0])
            errors[eden] += float(np.square(values - x).sum())
            if eden:
                projections.append(float((values * x).sum()) / square)
    standard_error = np.std(projections) / np.sqrt(len(projections))
    assert standard_error < 0.001 and abs(np.mean(projections) - 1) < 4 * standard_error
    assert 1.7 * errors[True] < errors[False]
