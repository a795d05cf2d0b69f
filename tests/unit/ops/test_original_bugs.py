"""Bugs of the Mojo original that lay in operations and gradients, each as a test of its own.

Those that lay in number formats are in `tests/unit/quant/test_original_bugs.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import extensor as et
from extensor.quant.recipe import Gemm, LayerRecipe

F = np.float32


@pytest.mark.parametrize("op", [et.add, et.multiply, et.subtract, et.divide, et.maximum])
def test_wrong_dtype_inferred_in_mixed_precision_ops(op: Callable[..., et.ExTensor]) -> None:
    """The result's dtype follows the table of promotions, not the first operand."""
    ones = {name: et.ones((2, 32), name) for name in ("float16", "bfloat16", "float32", "float64")}
    for a, b, expected in (
        ("bfloat16", "float32", et.float32),
        ("float16", "bfloat16", et.float32),
        ("float16", "float64", et.float64),
        ("bfloat16", "bfloat16", et.bfloat16),
    ):
        assert op(ones[a], ones[b]).dtype is expected
        assert op(ones[b], ones[a]).dtype is expected
    blocked = {name: ones["float32"].to(name) for name in ("mxfp4", "nvfp4", "mxfp8_e4m3")}
    for name, q in blocked.items():
        for other in (q, blocked["mxfp4"], ones["float32"], ones["bfloat16"], 1.0):
            for result in (op(q, other), op(other, q)):
                assert result.dtype is et.float32, (name, other)
                np.testing.assert_array_equal(result.numpy(), op(ones["float32"], 1.0).numpy())


def test_wrong_dtype_inferred_for_gradients_in_mixed_precision_ops() -> None:
    """A gradient has its tensor's dtype, whatever the other operand was."""
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        x = et.ones((4, 32), dtype, requires_grad=True)
        w = et.randn(8, 32, seed=0, requires_grad=True)
        (x @ w.T * w.to_mxfp4().sum()).sum().backward()
        assert x.grad.dtype is x.dtype
        assert w.grad.dtype is et.float32


def fp4_context(g: str | et.QuantSpec) -> object:
    spec = et.QuantSpec("mxfp4")
    gemm = Gemm(spec, spec)
    return et.layer_context(LayerRecipe(fprop=gemm, dgrad=Gemm(g, spec), wgrad=Gemm(g, spec)))


@pytest.mark.parametrize("exponent", [-40, -3, 0, 5, 40])
def test_wrong_scale_factor_in_the_fp4_backward_pass(exponent: int) -> None:
    """Gradients carry g's own scale: with g scaled by 2**e they scale by exactly 2**e.

    All values lie on the FP4 grid of their blocks, so the FP4 gradients are those of float32.
    """
    rng = np.random.default_rng(1)
    grid = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0.5, 1, 1.5, 2, 3, 4, 6], F)
    g, x, w = (rng.choice(grid, shape) for shape in ((32, 32), (32, 64), (32, 64)))
    # Blocks with different scales along every contraction axis, and 6 in each of them.
    x, w = x * F(4), w * F(0.25)
    for array, top in ((g, 6), (x, 24), (w, 1.5)):
        array[np.arange(32), np.arange(32)] = top
        array[np.arange(32), (np.arange(array.shape[1] - 32, array.shape[1]))] = top
    gradients = []
    for scale in (F(1), F(2.0**exponent)):
        a, b = et.ExTensor(x, requires_grad=True), et.ExTensor(w, requires_grad=True)
        et.quantized_matmul(a, b, fp4_context(et.QuantSpec("mxfp4"))).backward(
            et.ExTensor(g * scale)
        )
        gradients.append((a.grad.numpy(), b.grad.numpy()))
    np.testing.assert_array_equal(gradients[0][0], g @ w)
    np.testing.assert_array_equal(gradients[0][1], g.T @ x)
    for once, scaled in zip(*gradients, strict=True):
        np.testing.assert_array_equal(scaled, once * F(2.0**exponent))
