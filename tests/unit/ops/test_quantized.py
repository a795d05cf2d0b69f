"""The low-precision primitives against their definition.

Oracle: the float op's VJP at the dequantized operands, each quantized by hand along its own
contraction axis with the public `quantize`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.backends.generic import GenericBackend, conv_pool
from extensor.backends.generic.matmul import FloatPreparation
from extensor.backends.protocol import Window
from extensor.ops import recipe_operands
from extensor.ops.quantized import layer_context, quantized_conv2d, quantized_matmul
from extensor.quant.recipe import SLOTS, Gemm, LayerRecipe
from extensor.quant.recipe_state import LayerContext
from extensor.quant.recipes import RECIPES
from extensor.quant.reference import fake_quantize
from extensor.quant.spec import QuantSpec

RNG = np.random.default_rng(7)
GENERIC = GenericBackend("cpu", np)


def _values(x: np.ndarray, context: LayerContext, slot: str, axis: int) -> np.ndarray:
    """What the slot's operand should be, through the reference and no code of the primitive."""
    expected = context.layer.slot(slot)
    if isinstance(expected, str):
        return np.asarray(et.from_numpy(x).to(expected).to("float32").numpy())
    spec = expected.replace(axis=axis)
    if spec.has_per_step_signs:  # test_requantized.py judges which
        assert spec.transform is not None
        spec = spec.replace(transform=context.signs(spec.transform, slot))
    stream = context.stream(slot, axis in (0, -2)) if spec.is_random else None
    return fake_quantize(np.ascontiguousarray(x), spec, stream)[0]


def _close(actual: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> None:
    """Actual equals scale * a @ b up to float32 summation: |error| <= K eps (|a| @ |b|) * 2."""
    expected = scale * (a.astype(np.float64) @ b.astype(np.float64))
    bound = 2 * (a.shape[-1] + 2) * 2.0**-24 * scale * (np.abs(a) @ np.abs(b)).astype(np.float64)
    assert actual.shape == expected.shape
    assert np.all(np.abs(actual - expected) <= bound + 1e-30)


def _tensor(*shape: int, scale: float = 1.0) -> et.ExTensor:
    x = et.from_numpy((RNG.standard_normal(shape) * scale).astype(np.float32))
    x.requires_grad = True
    return x


@pytest.mark.parametrize(("m", "n", "k"), [(42, 20, 70), (150, 66, 90)])
@pytest.mark.parametrize(  # the others: test_requantized.py
    "name", [n for n, r in RECIPES.items() if not r.layers.uses_forward_operands]
)
def test_matmul_is_three_gemms_of_dequantized_operands(name: str, m: int, n: int, k: int) -> None:
    """Small, for BLAS alone, and of a size that other kernels may take."""
    context = layer_context(RECIPES[name].layers, seed=3)
    x, w = _tensor(6, m // 6, k), _tensor(n, k, scale=0.1)
    y = quantized_matmul(x, w, context)
    g = RNG.standard_normal(y.shape).astype(np.float32)
    y.backward(et.from_numpy(g))
    rows, grows = x.numpy().reshape(m, k), g.reshape(m, n)
    layer = context.layer
    _close(
        y.numpy().reshape(m, n),
        _values(rows, context, "fprop.x", 1),
        _values(w.numpy(), context, "fprop.w", 1).T,
        layer.fprop.output_scale,
    )
    _close(
        x.grad.numpy().reshape(m, k),
        _values(grows, context, "dgrad.g", 1),
        _values(w.numpy(), context, "dgrad.w", 0),
        layer.dgrad.output_scale,
    )
    _close(
        w.grad.numpy(),
        _values(grows, context, "wgrad.g", 0).T,
        _values(rows, context, "wgrad.x", 0),
        layer.wgrad.output_scale,
    )


@pytest.mark.host
@pytest.mark.parametrize("conv", [False, True])
def test_large_products_take_the_tiles(monkeypatch: pytest.MonkeyPatch, conv: bool) -> None:
    """All three GEMMs of matrix products and convolutions, where operands are scaled bfloat16."""
    from extensor.backends.cpu import CpuBackend

    paths = []

    def spy(self: CpuBackend, a: np.ndarray, b: np.ndarray, *more: object) -> np.ndarray:
        paths.append(self.path("product", a, b))
        return np.matmul(a, b.T)

    monkeypatch.setattr(CpuBackend, "product", spy)
    for name in ("mxfp4", "mxfp8_nvidia", "nvfp4_nvidia", "bf16", "fp32"):
        context = layer_context(RECIPES[name].layers, seed=3)
        paths.clear()
        if conv:
            x, w = _tensor(2, 33, 12, 12), _tensor(40, 33, 3, 3)
            y = quantized_conv2d(x, w, context)
        else:
            x, w = _tensor(150, 90), _tensor(66, 90)
            y = quantized_matmul(x, w, context)
        y.backward(et.from_numpy(RNG.standard_normal(y.shape).astype(np.float32)))
        if name == "fp32" or (conv and name == "bf16"):
            assert not paths  # float32 operands are multiplied as they are; convolution kernels
            continue
        assert len(paths) == 3 or conv  # some are quantized and multiplied patch by patch
        core = x.backend.core
        if core is None or not core.gemm_has_bf16():
            assert all(path.startswith("generic: ") for path in paths)
        else:
            level = core.gemm_level()
            assert all(path == f"core ({level}, bf16)" for path in paths), (name, paths)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "name", ["bf16", "mxfp4", "mxfp4_tseng", "nvfp4_nvidia", "mxfp8_nvidia", "mxfp8_rebased"]
)
def test_conv2d_is_three_gemms_of_patches(name: str, groups: int) -> None:
    context = layer_context(RECIPES[name].layers, seed=5)
    x, w = _tensor(3, 4, 9, 8), _tensor(6, 4 // groups, 3, 3, scale=0.2)
    y = quantized_conv2d(x, w, context, stride=2, padding=1, groups=groups)
    g = RNG.standard_normal(y.shape).astype(np.float32)
    y.backward(et.from_numpy(g))
    window, layer = Window((3, 3), (2, 2), (1, 1)), context.layer
    # A matrix of each group: patches (K, M), weights (O, K), gradients (O, M).
    stack = (6,) if groups == 1 else (groups, 6 // groups)
    patches = conv_pool.patch_matrix(x.numpy(), window, groups, np)
    patches = patches[0] if groups == 1 else patches
    kernel, pixels = w.numpy().reshape(*stack, -1), g.swapaxes(0, 1).reshape(*stack, -1)
    _close(
        y.numpy().swapaxes(0, 1).reshape(*stack, -1),
        _values(kernel, context, "fprop.w", -1),
        _values(patches, context, "fprop.x", -2),
        layer.fprop.output_scale,
    )
    _close(
        w.grad.numpy().reshape(kernel.shape),
        _values(pixels, context, "wgrad.g", -1),
        _values(patches, context, "wgrad.x", -1).swapaxes(-1, -2),
        layer.wgrad.output_scale,
    )
    a = _values(pixels, context, "dgrad.g", -2)
    b = _values(kernel, context, "dgrad.w", -2)
    images = a.reshape(-1, 3, *y.shape[2:]).swapaxes(0, 1)
    tail = (x.shape, window, groups)
    kernels = b.reshape(-1, *w.shape[1:]).astype(np.float64)
    expected = layer.dgrad.output_scale * GENERIC.conv2d_grad_x(images, kernels, *tail)
    bound = GENERIC.conv2d_grad_x(np.abs(images).astype(np.float64), np.abs(kernels), *tail)
    k = 9 * a.shape[-2] + 2
    error = np.abs(x.grad.numpy() - expected)
    assert np.all(error <= 2 * layer.dgrad.output_scale * k * 2.0**-24 * bound + 1e-30)


@pytest.mark.parametrize("name", ["fp32", "mxfp4", "mxfp4_tseng"])
def test_conv2d_bias_is_added(name: str) -> None:
    x, w, b = _tensor(3, 4, 6, 6), _tensor(5, 4, 3, 3), _tensor(5)
    layer = RECIPES[name].layers
    y = quantized_conv2d(x, w, layer_context(layer), bias=b)
    apart = quantized_conv2d(x, w, layer_context(layer)).numpy() + b.numpy()[:, None, None]
    assert np.allclose(y.numpy(), apart, rtol=0, atol=40 * 2.0**-24 * np.abs(apart).max() * 8)
    y.sum().backward()
    assert b.grad.numpy().tolist() == [3 * 4 * 4] * 5


@pytest.mark.parametrize("name", ["mxfp4_all", "mxfp8_nvidia", "quartet", "bf16"])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_each_product_has_the_output_scale_of_its_own_gemm(name: str, groups: int) -> None:
    """Powers of two, one for each GEMM, against the same recipe without; 0 groups: a matmul."""
    layers = RECIPES[name].layers
    if groups == 2 and layers.uses_forward_operands:
        return  # refused
    scales = {"fprop": 2.0, "dgrad": 8.0, "wgrad": 0.25}
    scaled = layers
    for gemm, scale in scales.items():
        plain = getattr(layers, gemm)
        other = replace(plain, output_scale=scale * plain.output_scale)
        scaled = replace(scaled, **{gemm: other})
    found = []
    for recipe in (layers, scaled):
        rng = np.random.default_rng(3)
        shapes = ((4, 64), (8, 64)) if not groups else ((2, 4, 6, 6), (4, 4 // groups, 3, 3))
        x, w = (et.ExTensor(rng.normal(size=s).astype(np.float32)) for s in shapes)
        x.requires_grad = w.requires_grad = True
        context = layer_context(recipe, 1)
        y = (
            quantized_conv2d(x, w, context, groups=groups)
            if groups
            else quantized_matmul(x, w, context)
        )
        y.backward(et.ExTensor(rng.normal(size=y.shape).astype(np.float32)))
        found.append([y.numpy(), x.grad.numpy(), w.grad.numpy()])
    for plain, other, scale in zip(*found, scales.values(), strict=True):
        np.testing.assert_array_equal(other, plain * np.float32(scale))


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_two_operands_of_the_same_values_are_rounded_apart(gemm: str) -> None:
    """Bits that both operands of a GEMM shared would not average out in their product."""
    context = layer_context(LayerRecipe.uniform(QuantSpec("mxfp4", rounding="stochastic")))
    x = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    slots = [slot for slot in SLOTS if slot.startswith(gemm)]
    a, b = (recipe_operands.slot_values(GENERIC, x, context, slot, -1) for slot in slots)
    assert (a != b).mean() > 0.1


def test_stochastic_bits_follow_step_and_repeat() -> None:
    context = layer_context(RECIPES["mxfp4"].layers, seed=1)
    x, w = _tensor(32, 64), _tensor(16, 64)

    def gradient(step: int) -> np.ndarray:
        context.state.step = step
        x.grad = w.grad = None
        (quantized_matmul(x, w, context) * 0.01).sum().backward()
        quantized_matmul(x, w, context).backward(et.from_numpy(g))
        return np.asarray(w.grad.numpy())

    g = RNG.standard_normal((32, 16)).astype(np.float32)
    first, again, other = gradient(1), gradient(1), gradient(2)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_telemetry_counts_every_slot() -> None:
    context = layer_context(RECIPES["mxfp4_floor"].layers)
    x, w = _tensor(32, 64), _tensor(16, 64)
    quantized_matmul(x, w, context).sum().backward()
    telemetry = context.state.telemetry
    assert {slot for _, slot in telemetry} == set(SLOTS)
    assert telemetry["layer", "fprop.x"].count == 32 * 64
    assert telemetry["layer", "fprop.x"].saturated > 0
    assert telemetry["layer", "dgrad.g"].count == 32 * 16
    context.state.reset_telemetry()
    assert not context.state.telemetry


def test_only_what_is_needed_is_computed() -> None:
    context = layer_context(RECIPES["mxfp4"].layers)
    x, w = _tensor(8, 32), _tensor(4, 32)
    x.requires_grad = False
    quantized_matmul(x, w, context).sum().backward()
    assert not any(slot.startswith("dgrad") for _, slot in context.state.telemetry)


def test_second_derivative_is_refused() -> None:
    context = layer_context(RECIPES["mxfp4"].layers)
    x, w = _tensor(8, 32), _tensor(4, 32)
    loss = (quantized_matmul(x, w, context) ** 2).sum()
    loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="leave the recipe off"):
        (x.grad * x.grad).sum().backward()


@pytest.mark.parametrize("recipe", ["fp32", "mxfp4"])
def test_the_gradient_of_a_bias_has_a_derivative(recipe: str) -> None:
    """That of sum(y^2) in a bias is 2 sum(y), whose derivative in the bias is twice the rows."""
    context = layer_context(RECIPES[recipe].layers)
    x, w, image, kernel = _tensor(6, 32), _tensor(8, 32), _tensor(2, 3, 5, 5), _tensor(8, 3, 3, 3)
    for rows, product in (
        (6, lambda b: quantized_matmul(x, w, context, b)),
        (2 * 3 * 3, lambda b: quantized_conv2d(image, kernel, context, bias=b)),
    ):
        bias, v = _tensor(8), _tensor(8).detach()
        y = product(bias)
        (first,) = et.grad((y**2).sum(), [bias], create_graph=True)
        channels = tuple(i for i in range(y.ndim) if i != (1 if y.ndim > 2 else y.ndim - 1))
        exact = 2 * y.numpy().astype(np.float64).sum(axis=channels)
        # of at most 18 rounded terms, each below 64
        np.testing.assert_allclose(first.numpy(), exact, rtol=0, atol=18 * 18 * 64 * 2.0**-24)
        second, in_x = et.grad((first * v).sum(), [bias, x if y.ndim == 2 else image])
        np.testing.assert_allclose(second.numpy(), 2 * rows * v.numpy(), rtol=rows * 2.0**-24)
        assert np.abs(in_x.numpy()).max() > 0


def test_nan_reaches_the_gradients() -> None:
    """NaN in an operand comes out as NaN, in whole blocks, never as a silent zero."""
    context = layer_context(RECIPES["mxfp4"].layers)
    x, w = _tensor(8, 32), _tensor(4, 32)
    x.data[3, 5] = np.nan
    y = quantized_matmul(x, w, context)
    assert np.isnan(y.numpy()[3]).all()
    assert np.isfinite(np.delete(y.numpy(), 3, axis=0)).all()
    y.sum().backward()
    assert np.isnan(w.grad.numpy()[:, 5]).all()


@pytest.mark.parametrize("shape", [(5, 6), (5, 4, 1)])
def test_shapes_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected x"):
        quantized_matmul(et.ones((3, 4)), et.ones(shape), layer_context(RECIPES["mxfp4"].layers))


@pytest.mark.parametrize(
    ("given", "named"), [("mxfp4", "'mxfp4'"), (RECIPES["mxfp4"], "Recipe"), (None, "NoneType")]
)
def test_a_context_is_of_a_layer_recipe(given: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"expected a LayerRecipe, got {named}; et.RECIPES\["):
        layer_context(given)


def test_integers_and_float64_are_refused() -> None:
    context = layer_context(RECIPES["mxfp4"].layers)
    for dtype in ("int32", "float64"):
        with pytest.raises(TypeError, match="float32"):
            quantized_matmul(et.ones((3, 4), dtype=dtype), et.ones((5, 4)), context)


def test_transforms_must_match() -> None:
    from extensor.quant.spec import Hadamard

    rotated = QuantSpec("mxfp4", transform=Hadamard(16))
    with pytest.raises(ValueError, match="both operands"):
        Gemm(rotated, QuantSpec("mxfp4"))
    with pytest.raises(ValueError, match="QuantSpec"):
        Gemm("float8", "bfloat16")


def test_planted_wrong_axis_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing wgrad's operands along rows, a classic mistake, fails the oracle above."""
    honest = recipe_operands._shared

    def planted(backend: Any, x: Any, context: Any, slots: Any, *more: Any, **kind: Any) -> Any:
        if slots == (("wgrad.x", -2),):
            return [honest(backend, x, context, (("wgrad.x", -1),), *more)[0].T]
        return honest(backend, x, context, slots, *more, **kind)

    monkeypatch.setattr(recipe_operands, "_shared", planted)
    with pytest.raises(AssertionError):
        test_matmul_is_three_gemms_of_dequantized_operands("mxfp4", 42, 20, 70)


def test_layer_recipe_slots() -> None:
    layer = LayerRecipe.uniform("bfloat16")
    spec = QuantSpec("mxfp4")
    changed = layer.with_slot("wgrad.x", spec)
    assert changed.wgrad == Gemm("bfloat16", spec)
    assert changed.fprop == layer.fprop
    with pytest.raises(ValueError, match="no slot named"):
        layer.with_slot("wgrad.w", spec)


def test_bfloat16_slots_round_a_gradient_once_for_both_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    whole = FloatPreparation.run

    def counted(self: Any) -> list[Any]:
        seen.append((self.x.shape, tuple(sorted(spec.axis for spec in self.specs))))
        return whole(self)

    monkeypatch.setattr(FloatPreparation, "run", counted)
    x, w = et.ones((6, 4), requires_grad=True), et.ones((5, 4), requires_grad=True)
    quantized_matmul(x, w, layer_context(RECIPES["bf16"].layers)).sum().backward()
    assert seen.count(((6, 5), (0, 1))) == 1  # g, rowwise and columnwise
    assert len(seen) == 4  # w twice, x once: its bfloat16 values are kept for the backward pass


def test_rebased_operands_are_both_or_none() -> None:
    plain = QuantSpec("mxfp8_e4m3", scale_rule="rceil")
    rebased = plain.replace(rebased=True)
    for pair in ((rebased, plain), ("bfloat16", rebased)):
        with pytest.raises(ValueError, match="both operands of a GEMM are rebased or none"):
            Gemm(*pair)
    assert LayerRecipe.uniform(plain).rebased() == LayerRecipe.uniform(rebased)
    assert LayerRecipe.uniform("bfloat16").rebased() == LayerRecipe.uniform("bfloat16")
    with pytest.raises(ValueError, match="expected MXFP8"):
        LayerRecipe.uniform(QuantSpec("mxfp4")).rebased()


@pytest.mark.parametrize("exponent", [-40, -3, 0, 5, 40])
def test_an_fp4_backward_pass_carries_the_gradients_own_scale(exponent: int) -> None:
    """Gradients carry g's own scale: with g scaled by 2**e they scale by exactly 2**e.

    All values lie on the FP4 grid of their blocks, so the FP4 gradients are those of float32.
    """
    context, rng = layer_context(LayerRecipe.uniform(QuantSpec("mxfp4"))), np.random.default_rng(1)
    grid = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    g, x, w = (rng.choice(grid, shape) for shape in ((32, 32), (32, 64), (32, 64)))
    # Blocks with different scales along every contraction axis, and 6 in each of them.
    x, w = x * np.float32(4), w * np.float32(0.25)
    for array, top in ((g, 6), (x, 24), (w, 1.5)):
        array[np.arange(32), np.arange(32)] = top
        array[np.arange(32), (np.arange(array.shape[1] - 32, array.shape[1]))] = top
    gradients = []
    for scale in (np.float32(1), np.float32(2.0**exponent)):
        a, b = et.ExTensor(x, requires_grad=True), et.ExTensor(w, requires_grad=True)
        quantized_matmul(a, b, context).backward(et.ExTensor(g * scale))
        gradients.append((a.grad.numpy(), b.grad.numpy()))
    np.testing.assert_array_equal(gradients[0][0], g @ w)
    np.testing.assert_array_equal(gradients[0][1], g.T @ x)
    for once, scaled in zip(*gradients, strict=True):
        np.testing.assert_array_equal(scaled, once * np.float32(2.0**exponent))


def test_a_layers_product_wants_an_axis_to_sum_over() -> None:
    context = et.layer_context(et.RECIPES["mxfp4"].layers)
    for shape in ((), (2, 16)):
        with pytest.raises(ValueError, match=r"expected x \(..., K\) and w \(N, K\)"):
            et.quantized_matmul(et.ones(shape), et.ones((3, 32)), context)
