"""The low-precision primitives: matrix product and convolution with quantized operands.

Each holds its three GEMMs in plain sight. Every operand is quantized from high
precision along the contraction axis of the GEMM it enters, so a tensor that
enters two GEMMs is quantized twice: one copy cannot be derived from the other
(arXiv 2506.08027, section 3). Products of decoded values are summed in float32.

With x (M, K), w (N, K), g (M, N):

    fprop   y  = x w^T     over K    x in rows,    w in rows
    dgrad   dx = g w       over N    g in rows,    w in columns
    wgrad   dw = g^T x     over M    g in columns, x in columns

A convolution is the same three GEMMs on x's patches, M = batch * height * width
of the output and K = channels * kernel: blocks run along flattened (C, kh, kw),
in wgrad along (N, Ho, Wo). dgrad contracts over the output channels, and the
patches' gradients are summed back to x in float32 (docs/adr/0005).

The gradient is straight-through: the float op's VJP at the dequantized operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.protocol import Array, Backend, Window
from extensor.ops.conv import conv_window
from extensor.quant.context import LayerContext, RecipeState
from extensor.quant.recipe import Gemm, LayerRecipe, Recipe
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["layer_context", "quantized_conv2d", "quantized_matmul"]

_ONCE = (
    "a quantized product is piecewise constant in its operands, so its straight-through gradient "
    "has no derivative of its own; use the fp32 recipe for second derivatives"
)


def layer_context(layer: LayerRecipe, seed: int = 0) -> LayerContext:
    """A context for a layer recipe used by hand, outside a model."""
    state = RecipeState(Recipe("by hand", "one layer recipe used by hand", layer), seed)
    context = LayerContext("layer", 0, layer, state)
    state.layers["layer"] = context
    return context


@lru_cache(maxsize=1024)
def _placed(spec: QuantSpec, axis: int) -> QuantSpec:
    """The spec along one axis of a matrix."""
    return spec.replace(axis=axis).resolve(2)


def _dense(backend: Backend, x: Array, dtype: str) -> Array:
    return x if dtype == "float32" else backend.bfloat16_values(x)


def _stream(context: LayerContext, slot: str, spec: QuantSpec, axis: int) -> Stream | None:
    return context.stream(slot, axis == 0) if spec.rounding == "stochastic" else None


def _operand(backend: Backend, x: Array, context: LayerContext, slot: str, axis: int) -> Array:
    """The values of matrix x that GEMM ``slot`` multiplies, contracted along ``axis``."""
    wanted = context.operand(slot)
    if isinstance(wanted, str):
        return _dense(backend, x, wanted)
    spec = _placed(wanted, axis)
    values, stats = backend.operand(x, spec, _stream(context, slot, spec, axis))
    context.record(slot, stats)
    return values


def _gradient_operands(
    backend: Backend, g: Array, context: LayerContext, needs: tuple[bool, bool]
) -> tuple[Array | None, Array | None]:
    """What dgrad and wgrad make of a gradient (M, N): its rows and its columns, read once."""
    slots = (("dgrad.g", 1), ("wgrad.g", 0))
    wanted = [context.operand(slot) for slot, _ in slots]
    if not all(needs) or any(isinstance(operand, str) for operand in wanted):
        values = (
            _operand(backend, g, context, slot, axis) if need else None
            for (slot, axis), need in zip(slots, needs, strict=True)
        )
        return next(values), next(values)
    first, second = (
        _placed(spec, axis)
        for spec, (_, axis) in zip(wanted, slots, strict=True)
        if isinstance(spec, QuantSpec)
    )
    streams = (
        _stream(context, "dgrad.g", first, 1),
        _stream(context, "wgrad.g", second, 0),
    )
    along, down = backend.operand_pair(g, (first, second), streams)
    context.record("dgrad.g", along[1])
    context.record("wgrad.g", down[1])
    return along[0], down[0]


def _scaled(out: Array, gemm: Gemm, xp: Any) -> Array:
    """A GEMM's product times its output scale."""
    return out if gemm.output_scale == 1.0 else out * xp.float32(gemm.output_scale)


def _product(backend: Backend, a: Array, b: Array, gemm: Gemm) -> Array:
    return _scaled(backend.operand_matmul(a, b), gemm, backend.xp)


def _fprop(backend: Backend, x: Array, w: Array, context: LayerContext) -> Array:
    a = _operand(backend, x, context, "fprop.x", 1)
    b = _operand(backend, w, context, "fprop.w", 1)
    return _product(backend, a, b.T, context.layer.fprop)


def _dgrad(backend: Backend, a: Array, w: Array, context: LayerContext) -> Array:
    b = _operand(backend, w, context, "dgrad.w", 0)
    return _product(backend, a, b, context.layer.dgrad)


def _wgrad(backend: Backend, a: Array, x: Array, context: LayerContext) -> Array:
    b = _operand(backend, x, context, "wgrad.x", 0)
    return _product(backend, a.T, b, context.layer.wgrad)


def _check(name: str, x: ExTensor, w: ExTensor, context: object) -> None:
    if not isinstance(context, LayerContext):
        raise TypeError(
            f"{name}: wanted a LayerContext, got {type(context).__name__}; "
            "nn.apply_recipe(model, recipe) makes them, or layer_context(layer_recipe)"
        )
    for tensor, title in ((x, "x"), (w, "w")):
        if tensor.dtype.name not in ("float32", "float16", "bfloat16"):
            raise TypeError(
                f"{name}: {title} is {tensor.dtype.name}; quantized products take float32 or "
                f"16-bit floats and sum in float32: convert with {title}.to('float32')"
            )


# --- matrix product -----------------------------------------------------------------------------


def _matmul_forward(backend: Backend, x: Array, w: Array, context: LayerContext) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    return _fprop(backend, rows, w, context).reshape(*x.shape[:-1], w.shape[0])


def _matmul_vjp(
    backend: Backend,
    g: Array,
    out: Array,
    inputs: tuple[Array, Array],
    needs: tuple[bool, bool],
    context: LayerContext,
) -> tuple[Array | None, Array | None]:
    x, w = inputs
    rows = backend.xp.ascontiguousarray(g.reshape(-1, w.shape[0]))
    along, down = _gradient_operands(backend, rows, context, needs)
    dx = None if along is None else _dgrad(backend, along, w, context).reshape(x.shape)
    dw = None if down is None else _wgrad(backend, down, x.reshape(-1, x.shape[-1]), context)
    return dx, dw


def _matmul_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((5, 40), (3, 40)))
    yield Sample((x, w, layer_context(get_recipe("fp32").layers)), expected=x @ w.T)
    yield Sample((x, w, layer_context(get_recipe("mxfp4").layers)))


@primitive(
    forward=_matmul_forward,
    fused_vjp=_matmul_vjp,
    once=_ONCE,
    reads="inputs",
    check="forward",
    samples=_matmul_samples,
    errors=(
        BadInput(
            (
                np.ones((2, 3), np.float32),
                np.ones((4, 5), np.float32),
                layer_context(get_recipe("mxfp4").layers),
            ),
            ValueError,
            "quantized_matmul: wanted x (..., K) and w (N, K)",
        ),
        BadInput(
            (np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), "mxfp4"),
            TypeError,
            "wanted a LayerContext",
        ),
    ),
)
def quantized_matmul(x: ExTensor, w: ExTensor, context: LayerContext) -> ExTensor:
    """X w^T with operands quantized by a layer's recipe, in all three GEMMs.

    Args:
        x: (..., K), float32 or a 16-bit float.
        w: (N, K), likewise.
        context: the layer's recipe, random streams and counts.

    Returns:
        (..., N), summed in float32.

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: for other dtypes.
    """
    _check("quantized_matmul", x, w, context)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"quantized_matmul: wanted x (..., K) and w (N, K), got {x.shape} and {w.shape}"
        )
    return apply("quantized_matmul", x, w, context=context)


# --- convolution --------------------------------------------------------------------------------


def _groups(backend: Backend, x: Array, window: Window, groups: int) -> Iterator[Array]:
    """Each group's patches (N * Ho * Wo, C / groups * kh * kw)."""
    step = x.shape[1] // groups
    for i in range(groups):
        yield backend.im2col(x[:, i * step : (i + 1) * step], window)


def _to_rows(g: Array, xp: Any) -> Array:
    """(N, O, Ho, Wo) -> (N * Ho * Wo, O)."""
    return xp.ascontiguousarray(xp.transpose(g, (0, 2, 3, 1))).reshape(-1, g.shape[1])


def _conv_forward(
    backend: Backend, x: Array, w: Array, context: LayerContext, window: Window, groups: int
) -> tuple[Array, list[Array]]:
    layer, xp = context.layer, backend.xp
    if layer.fprop.dense:
        a, b = _dense(backend, x, str(layer.fprop.a)), _dense(backend, w, str(layer.fprop.b))
        out = backend.conv2d(a, b, window, groups)
        return _scaled(out, layer.fprop, xp), []
    patches = list(_groups(backend, x, window, groups))
    kernels = w.reshape(groups, w.shape[0] // groups, -1)
    rows = [_fprop(backend, p, k, context) for p, k in zip(patches, kernels, strict=True)]
    joined = rows[0] if groups == 1 else xp.concatenate(rows, axis=1)
    ho, wo = window.output_size(x.shape[2:])
    out = joined.reshape(x.shape[0], ho, wo, w.shape[0])
    return xp.ascontiguousarray(xp.transpose(out, (0, 3, 1, 2))), patches


def _conv_vjp(
    backend: Backend,
    g: Array,
    out: Array,
    inputs: tuple[Array, Array],
    needs: tuple[bool, bool],
    context: LayerContext,
    window: Window,
    groups: int,
    saved: list[Array],
) -> tuple[Array | None, Array | None]:
    x, w = inputs
    layer = context.layer
    blocked = needs[0] and not layer.dgrad.dense, needs[1] and not layer.wgrad.dense
    rows = _group_rows(g, groups, backend.xp) if any(blocked) else ()
    pairs = [_gradient_operands(backend, part, context, blocked) for part in rows]
    dx = _conv_dgrad(backend, g, w, x.shape, context, window, pairs) if needs[0] else None
    dw = (
        _conv_wgrad(backend, g, x, w.shape, context, window, groups, pairs, saved)
        if needs[1]
        else None
    )
    return dx, dw


def _conv_dgrad(
    backend: Backend,
    g: Array,
    w: Array,
    shape: tuple[int, ...],
    context: LayerContext,
    window: Window,
    pairs: list[tuple[Array | None, Array | None]],
) -> Array:
    gemm, groups = context.layer.dgrad, shape[1] // w.shape[1]
    if gemm.dense:
        a, b = _dense(backend, g, str(gemm.a)), _dense(backend, w, str(gemm.b))
        return _scaled(backend.conv2d_grad_x(a, b, shape, window, groups), gemm, backend.xp)
    kernels = w.reshape(groups, w.shape[0] // groups, -1)
    part = (shape[0], shape[1] // groups, *shape[2:])
    parts = [
        backend.col2im(_dgrad(backend, along, kernel, context), part, window)
        for (along, _), kernel in zip(pairs, kernels, strict=True)
    ]
    return parts[0] if groups == 1 else backend.xp.concatenate(parts, axis=1)


def _conv_wgrad(
    backend: Backend,
    g: Array,
    x: Array,
    shape: tuple[int, ...],
    context: LayerContext,
    window: Window,
    groups: int,
    pairs: list[tuple[Array | None, Array | None]],
    saved: list[Array],
) -> Array:
    gemm, xp = context.layer.wgrad, backend.xp
    if gemm.dense:
        a, b = _dense(backend, g, str(gemm.a)), _dense(backend, x, str(gemm.b))
        return _scaled(backend.conv2d_grad_w(a, b, shape, window, groups), gemm, xp)
    patches = saved or list(_groups(backend, x, window, groups))
    parts = [
        _wgrad(backend, down, patch, context)
        for (_, down), patch in zip(pairs, patches, strict=True)
    ]
    return xp.concatenate(parts, axis=0).reshape(shape)


def _group_rows(g: Array, groups: int, xp: Any) -> Iterator[Array]:
    step = g.shape[1] // groups
    for i in range(groups):
        yield _to_rows(g[:, i * step : (i + 1) * step], xp)


def _conv_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 4, 7, 7), (6, 2, 3, 3)))
    for name in ("fp32", "mxfp4"):
        context = layer_context(get_recipe(name).layers)
        yield Sample((x, w, context), {"stride": 2, "padding": 1, "groups": 2})


@primitive(
    forward=_conv_forward,
    fused_vjp=_conv_vjp,
    once=_ONCE,
    reads="inputs",
    saves=True,
    check="forward",
    samples=_conv_samples,
    errors=(
        BadInput(
            (
                np.ones((2, 3, 8, 8), np.float32),
                np.ones((4, 5, 3, 3), np.float32),
                layer_context(get_recipe("mxfp4").layers),
            ),
            ValueError,
            "channels",
        ),
    ),
)
def quantized_conv2d(
    x: ExTensor,
    w: ExTensor,
    context: LayerContext,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> ExTensor:
    """2-D convolution (cross-correlation) with operands quantized by a layer's recipe.

    Args:
        x: (N, C, H, W), float32 or a 16-bit float.
        w: (O, C / groups, kh, kw), likewise.
        context: the layer's recipe, random streams and counts.
        stride: window step, one number or (height, width).
        padding: zeros around x, likewise.
        dilation: spacing of the kernel's elements, likewise.
        groups: channel groups convolved separately.

    Returns:
        (N, O, Ho, Wo), summed in float32.

    Raises:
        ValueError: if shapes, stride, padding, dilation or groups do not fit.
        TypeError: for other dtypes.
    """
    _check("quantized_conv2d", x, w, context)
    window = conv_window("quantized_conv2d", x, w, stride, padding, dilation, groups)
    return apply("quantized_conv2d", x, w, context=context, window=window, groups=groups)
