"""Products with stored weights against the float products of the decoded operands."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.ops.prequantized import prequantized_conv2d, prequantized_matmul
from extensor.ops.quantized import layer_context
from extensor.quant.input_cache import InputCache
from extensor.quant.recipe import Gemm, LayerRecipe
from extensor.quant.recipe_state import LayerContext
from extensor.quant.reference import dequantize
from extensor.quant.schemes import SCHEMES, Scheme
from extensor.quant.spec import QuantSpec
from extensor.quant.static_scale import StaticScale, choose_static_scale, quantize_static
from extensor.quant.weight_cache import WeightVersion

DENSE = Gemm("float32", "float32")
ASYMMETRIC = QuantSpec("int8", tile="tensor", symmetric=False)


def context_of(scheme: Scheme, x: np.ndarray) -> LayerContext:
    """The scheme's context, with the range of x where it wants one."""
    context = layer_context(scheme.recipe().layers)
    if scheme.range is not None:
        assert isinstance(scheme.activations, QuantSpec)
        context.static_scale = choose_static_scale(
            float(x.min()), float(x.max()) * 0.8, scheme.activations
        )
    return context


def decoded(x: np.ndarray, context: LayerContext) -> np.ndarray:
    """What the product should see of x (rows), through public quantizing alone."""
    operand = context.layer.fprop.a
    if operand == "float32":
        return x
    assert isinstance(operand, QuantSpec)
    if context.static_scale is not None:
        return np.asarray(dequantize(quantize_static(x, operand, context.static_scale)[0]))
    return et.from_numpy(x).quantize(operand.replace(axis=1)).dequantize().numpy()


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def within_bound(actual: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """|error| <= 2 gamma_(K + 4) S, S = |a| |b|: the decoded values are rounded once as well."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound = 2 * (a.shape[1] + 6) * 2.0**-24 * (np.abs(a) @ np.abs(b))
    assert np.all(np.abs(actual - a @ b) <= bound + 1e-30)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_matrix_product_is_that_of_the_decoded_operands(name: str) -> None:
    x, w = arrays((2, 21, 75), (12, 75))
    context = context_of(SCHEMES[name], x)
    stored = et.from_numpy(w).quantize(SCHEMES[name].weights.replace(axis=1))
    y = prequantized_matmul(et.from_numpy(x), stored, context)
    assert y.shape == (2, 21, 12) and y.dtype is et.float32
    rows = decoded(x.reshape(42, 75), context)
    within_bound(y.numpy().reshape(42, 12), rows, stored.dequantize().numpy().T)
    counted = context.state.telemetry.get(("layer", "fprop.x"))
    assert (counted is None) == (SCHEMES[name].activations == "float32")
    assert counted is None or counted.count == x.size


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "fp8_tensor", "int4_g32", "mxfp4"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_that_of_the_decoded_operands(name: str, groups: int) -> None:
    x, w = arrays((3, 4, 9, 8), (6, 4 // groups, 3, 5))
    x += 1  # so that the padding's zero is not the middle of the range
    context = context_of(SCHEMES[name], x)
    stored = et.from_numpy(w.reshape(6, -1)).quantize(SCHEMES[name].weights.replace(axis=1))
    y = prequantized_conv2d(et.from_numpy(x), stored, context, (3, 5), (2, 1), (1, 2), 1, groups)
    kernels = stored.dequantize().numpy().reshape(groups, 6 // groups, -1)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (2, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 5), (2, 3))[:, :, ::2]
    for group in range(groups):
        part = windows[:, group * (4 // groups) : (group + 1) * (4 // groups)]
        rows = np.ascontiguousarray(part.transpose(0, 2, 3, 1, 4, 5).reshape(3 * 5 * 8, -1))
        out = y.numpy()[:, group * (6 // groups) : (group + 1) * (6 // groups)]
        within_bound(
            out.transpose(0, 2, 3, 1).reshape(len(rows), -1),
            decoded(rows, context),
            kernels[group].T,
        )


@pytest.mark.host
@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [3, 40])
def test_bfloat16_activations_reach_the_product_as_that(
    operand: str, dtype: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the bits are those of their float32 values, which the CPU multiplies."""
    x, w, g = arrays((2, rows, 75), (12, 75), (2, rows, 12))
    x[0, :3, 0] = 1e30, 1e-40, -0.0
    if dtype == "float16":
        x[0, 0, 0] = 6e3
    given, stored = et.from_numpy(x).to(dtype), et.from_numpy(w).to_mxfp4()
    given.requires_grad = True
    context = layer_context(LayerRecipe(Gemm(operand, QuantSpec("mxfp4")), DENSE, DENSE))
    backend, seen = given.backend, []
    multiply = type(backend).weight_only_matmul

    def spy(self, a, b, *dtype):
        seen.append(a.dtype.name)
        return multiply(self, a, b, *dtype)

    monkeypatch.setattr(type(backend), "weight_only_matmul", spy)
    y = prequantized_matmul(given, stored, context)
    assert seen == ["bfloat16" if "bfloat16" in (operand, dtype) else "float32"]
    wide = given.numpy().astype(np.float32).reshape(-1, 75)
    wide = backend.bfloat16_values(wide) if operand == "bfloat16" else wide
    with np.errstate(over="ignore"):
        expected = multiply(backend, wide, stored.data).astype(given.numpy().dtype)
    assert y.dtype is given.dtype and y.numpy().tobytes() == expected.tobytes()
    (y.to("float32") * et.from_numpy(g)).sum().backward()
    rounded = et.from_numpy(g).to(dtype).to("float32").numpy().reshape(-1, 12)
    expected = rounded @ stored.dequantize().numpy()
    assert given.grad is not None and given.grad.dtype is given.dtype
    got = given.grad.numpy().reshape(-1, 75)
    assert got.tobytes() == expected.astype(got.dtype).tobytes()


def test_integers_are_multiplied_exactly() -> None:
    """Codes whose product is known: (x - z) w as integers times both scales."""
    rng = np.random.default_rng(2)
    codes, weights = rng.integers(-128, 128, (5, 64)), rng.integers(-127, 128, (3, 64))
    weights[:, 0] = 127  # so that each row's scale is 1
    context = layer_context(LayerRecipe(Gemm(ASYMMETRIC, QuantSpec("int8")), DENSE, DENSE))
    context.static_scale = StaticScale(0.5, 7)
    x = et.from_numpy(((codes - 7) * 0.5).astype(np.float32))
    w = et.from_numpy(weights.astype(np.float32)).to_int8()
    assert (w.scales == 1).all()
    y = prequantized_matmul(x, w, context)
    assert np.array_equal(y.numpy(), 0.5 * ((codes - 7) @ weights.T).astype(np.float32))


def test_the_gradient_is_that_of_the_decoded_weights() -> None:
    x, w, v = arrays((4, 40), (6, 40), (2, 2, 7, 7))
    context = context_of(SCHEMES["int8"], x)
    a = et.from_numpy(x)
    a.requires_grad = True
    stored = et.from_numpy(w).to_int8()
    prequantized_matmul(a, stored, context).sum().backward()
    assert a.grad is not None
    expected = stored.dequantize().numpy().sum(axis=0)
    np.testing.assert_allclose(a.grad.numpy(), np.tile(expected, (4, 1)), rtol=1e-5, atol=1e-5)
    image, dense = et.from_numpy(v), et.from_numpy(v)
    image.requires_grad = dense.requires_grad = True
    kernels = et.from_numpy(arrays((3, 18))[0]).to_int8()
    context = context_of(SCHEMES["int8_weights"], v)
    (prequantized_conv2d(image, kernels, context, 3, 2, 1) ** 2).sum().backward()
    (et.conv2d(dense, kernels.dequantize().reshape((3, 2, 3, 3)), None, 2, 1) ** 2).sum().backward()
    assert image.grad is not None and dense.grad is not None
    np.testing.assert_allclose(image.grad.numpy(), dense.grad.numpy(), rtol=1e-5, atol=1e-5)


CONTEXT = context_of(SCHEMES["int8_weights"], np.ones(1))


def weight(*shape: int, axis: int = 1) -> et.ExTensor:
    return et.ones(shape).to_int8(axis=axis)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: prequantized_matmul(et.ones((2, 3)), weight(4, 3), "int8"),
            TypeError,
            "LayerContext",
        ),
        (
            lambda: prequantized_matmul(et.ones((2, 3)), weight(4, 5), CONTEXT),
            ValueError,
            "(2, 3) and",
        ),
        (
            lambda: prequantized_matmul(et.ones((2, 3)), et.ones((4, 3)), CONTEXT),
            TypeError,
            "in blocks",
        ),
        (
            lambda: prequantized_matmul(et.ones((2, 4)), weight(4, 4, axis=0), CONTEXT),
            ValueError,
            "blocked along axis 1, got (4, 4) along 0",
        ),
        (
            lambda: prequantized_matmul(et.ones((2, 3), "float64"), weight(4, 3), CONTEXT),
            TypeError,
            "x is float64",
        ),
        (
            lambda: prequantized_conv2d(et.ones((1, 2, 5, 5)), weight(4, 18), CONTEXT, 2),
            ValueError,
            "expected x (N, C, H, W) and w (O, C / 1 * 4)",
        ),
        (
            lambda: prequantized_conv2d(et.ones((1, 2, 2, 2)), weight(4, 18), CONTEXT, 3),
            ValueError,
            "an image the kernel fits into",
        ),
        (
            lambda: prequantized_conv2d(et.ones((1, 2, 5, 5)), weight(3, 9), CONTEXT, 3, groups=2),
            ValueError,
            "output channels in 2 groups",
        ),
    ],
)
def test_what_does_not_fit(call, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_layers_that_read_the_same_input_quantize_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """q, k and v; gate and up: until the input is written."""
    model = et.nn.Sequential(*(et.nn.Linear(64, 32, bias=False, rng=i) for i in range(3)))
    model = et.quantize_model(model, "mxfp4_mxint8")
    x = et.ones((2, 5, 64)) * et.from_numpy(arrays((2, 5, 64))[0])
    made: list[object] = []
    quantize = x.backend.quantize

    def counted(*args: object) -> Any:
        made.append(args)
        return quantize(*args)

    monkeypatch.setattr(x.backend, "quantize", counted)
    first = [layer(x).numpy() for layer in model]
    assert len(made) == 1
    counts = model[0].quant.state.telemetry
    assert [counts[f"{i}", "fprop.x"].count for i in range(3)] == [x.size] * 3
    x[0, 0, 0] = 100.0
    again = model[1](x).numpy()
    assert len(made) == 2 and not np.array_equal(again, first[1])
    fresh = model[1](et.from_numpy(x.numpy().copy()))
    assert len(made) == 3 and np.array_equal(again, fresh.numpy())


def test_threads_do_not_take_each_others_input() -> None:
    """One model, called from two threads: while one makes its blocks, the other begins."""
    cache, inputs = InputCache(), arrays((4,), (4,))
    versions = [WeightVersion([0], 0) for _ in inputs]

    def other() -> str:
        return cache.share(inputs[1], versions[1], "blocks", lambda: "second")

    def make() -> str:
        assert other() == "second"
        return "first"

    assert cache.share(inputs[0], versions[0], "blocks", make) == "first"
    assert other() == "second"
