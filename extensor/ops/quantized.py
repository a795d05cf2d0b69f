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

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.generic.quantize import dense_values
from extensor.backends.protocol import Array, Backend, Window
from extensor.dtypes import bfloat16, dtype_of, float16, float32, promote
from extensor.ops import recipe_operands as operands
from extensor.ops import requantized
from extensor.ops.arguments import tensors_only
from extensor.ops.conv_pool import conv_window
from extensor.quant.recipe import Gemm, LayerRecipe, Recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.recipes import get_recipe
from extensor.quant.round_to_odd import OddFloats, OddPlanes
from extensor.quant.weight_cache import WeightVersion

__all__ = ["layer_context", "quantized_conv2d", "quantized_matmul"]

_ONCE = (
    "a quantized product is piecewise constant in its operands, so its straight-through gradient "
    "has no derivative of its own; leave the recipe off (layer.quant = None; of a torch "
    "layer, a rule of None in quantize_) for second derivatives"
)


def layer_context(layer: LayerRecipe, seed: int = 0) -> LayerContext:
    """A context for a layer recipe used by hand, outside a model.

    Args:
        layer: the recipe of the layer's three GEMMs.
        seed: names the random bits of stochastic rounding.

    Returns:
        What `quantized_matmul` and `quantized_conv2d` take.

    Raises:
        TypeError: for anything else, a recipe's name for one.

    Example:
        >>> context = et.layer_context(et.RECIPES["mxfp4"].layers, seed=1)
        >>> context.path
        'layer'
    """
    if not isinstance(layer, LayerRecipe):
        raise TypeError(
            "layer_context: expected a LayerRecipe, got "
            f"{repr(layer) if isinstance(layer, str) else type(layer).__name__}; "
            "et.RECIPES['mxfp4'].layers is one, and extensor.quant.recipe makes others: "
            "LayerRecipe.uniform(et.QuantSpec('mxfp4'))"
        )
    state = RecipeState(Recipe("by hand", "one layer recipe used by hand", layer), seed)
    context = LayerContext("layer", 0, layer, state)
    state.layers["layer"] = context
    return context


def _samples_context() -> LayerContext:
    return layer_context(get_recipe("mxfp4").layers)


_MXFP4 = _samples_context()


def _ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def _bias_vjp(
    index: int, g: ExTensor, out: None, x: ExTensor, w: ExTensor, *bias: ExTensor, **params: Any
) -> ExTensor | None:
    """The gradient of what is added per output channel, axis 1 of a convolution, else the last."""
    if index < 2:
        return None
    channels = 1 if w.ndim > 2 else g.ndim - 1
    axes = tuple(axis for axis in range(g.ndim) if axis != channels)
    return g.astype(bias[0].dtype).sum(axis=axes)  # a sum of 16-bit floats would be rounded


_NAMES = {d.numpy: d.name for d in (float32, float16, bfloat16)}
"""Of results; numpy makes a dtype's name anew each time it is asked for."""


def _product(
    backend: Backend,
    a: Any,
    b: Any,
    context: LayerContext,
    which: str,
    dtype: np.dtype[Any],
    bias: Array | None = None,
) -> Array:
    """A b^T of what `make_operands` gave, scaled, plus a bias, rounded to ``dtype`` once."""
    gemm: Gemm = getattr(context.layer, which)
    # The backend checks whether rounded operands fit bfloat16 tiles; float32 ones do not.
    if "float32" in (gemm.a, gemm.b):
        out = backend.matmul(a, b.T)
    elif gemm.output_scale == 1.0:
        start = None if bias is None else backend.cast(bias, np.dtype(np.float32))
        counted = context.fallbacks(which)
        return backend.cast(backend.product(a, b, _NAMES[dtype], start, counted), dtype)
    else:
        out = backend.product(a, b, fallbacks=context.fallbacks(which))
    out = operands.scaled(out, gemm, backend.xp)
    return backend.cast(out if bias is None else backend.add(out, bias), dtype)


def _result(context: LayerContext, *inputs: Array) -> np.dtype[Any]:
    """The dtype of a layer's result: the recipe's activations, or what the inputs promote to."""
    if context.activations == "bfloat16":
        common = bfloat16
    else:
        common = reduce(promote, map(dtype_of, inputs))
    assert common.numpy is not None
    return common.numpy


def _check(name: str, x: ExTensor, w: ExTensor, context: object) -> None:
    if not isinstance(context, LayerContext):
        raise TypeError(
            f"{name}: expected a LayerContext, got {type(context).__name__}; "
            "nn.apply_recipe(model, recipe) makes them, or layer_context(layer_recipe)"
        )
    for tensor, title in ((x, "x"), (w, "w")):
        if tensor.is_blocked_parameter:
            continue
        if tensor.dtype.name not in ("float32", "float16", "bfloat16"):
            raise TypeError(
                f"{name}: {title} is {tensor.dtype.name}; quantized products take float32 or "
                f"16-bit floats and sum in float32: convert with {title}.to('float32')"
            )


# --- matrix product -----------------------------------------------------------------------------


_X: operands.Slots = (("fprop.x", -1), ("wgrad.x", -2))
_W: operands.Slots = (("fprop.w", -1), ("dgrad.w", -2))
_G: operands.Slots = (("wgrad.g", -2), ("dgrad.g", -1))
"""In the order of their use: the last operand holds what both share."""


def _matmul_forward(
    backend: Backend,
    x: Array,
    w: Array,
    *bias: Array,
    context: LayerContext,
    version: WeightVersion | None = None,
    given: operands.Input = operands.PACKED,
) -> tuple[Array, operands.SavedOperands]:
    sizes = (math.prod(x.shape[:-1]), *w.shape)
    if context.layer.uses_forward_operands:
        out, kept = requantized.forward(backend, x.reshape(-1, x.shape[-1]), w, context)
        out = out if not bias else backend.add(out, bias[0])
        out = backend.cast(out, _result(context, x, w, *bias))
        saved = operands.SavedOperands(kept, None, (0,) if context.layer.requantize else ())
        return out.reshape(*x.shape[:-1], w.shape[0]), saved
    a, kept, released = operands.input_operands(backend, x, context, _X, sizes, given)
    b, w_columnwise = operands.forward_operands(backend, w, context, _W, sizes, version)
    out = _product(backend, a, b, context, "fprop", _result(context, x, w, *bias), *bias)
    saved = operands.SavedOperands(kept, w_columnwise, (0,) if released else ())
    return out.reshape(*x.shape[:-1], w.shape[0]), saved


def _matmul_vjp(
    backend: Backend,
    g: Array,
    out: Array,
    inputs: tuple[Array, ...],
    needs: tuple[bool, ...],
    context: LayerContext,
    saved: operands.SavedOperands,
    version: WeightVersion | None = None,
    given: operands.Input = operands.PACKED,
) -> list[Array | None]:
    x, w = inputs[:2]
    if context.layer.uses_forward_operands:
        rows = backend.xp.ascontiguousarray(g.reshape(-1, w.shape[0]))
        both = requantized.gradients(backend, rows, x, w, needs, context, saved.x)
        found = [
            None if d is None else backend.cast(d, y.dtype).reshape(y.shape)
            for d, y in zip(both, (x, w), strict=True)
        ]
        return [
            *found,
            *(backend.leading_sum(g, g.ndim - 1) if need else None for need in needs[2:]),
        ]
    w_columnwise = saved.w
    rows = backend.xp.ascontiguousarray(g.reshape(-1, w.shape[0]))
    sizes = (len(rows), *w.shape)
    needed = tuple([slot for slot, need in zip(_G, (needs[1], needs[0]), strict=True) if need])
    gradients = operands.make_operands(backend, rows, context, needed, sizes)  # read once for both
    dx = dw = None
    if needs[1]:  # first, because its operand of x is let go before dx is made
        x_columnwise = operands.kept_operand(saved.x)
        if x_columnwise is None:
            matrix = x.reshape(-1, x.shape[-1])
            (x_columnwise,) = operands.make_operands(backend, matrix, context, _X[1:], sizes)
        dw = _product(backend, gradients.pop(0), x_columnwise, context, "wgrad", w.dtype)
        del x_columnwise
    if needs[0]:
        if w_columnwise is None:
            (w_columnwise,) = operands.make_operands(backend, w, context, _W[1:], sizes, version)
        dx = _product(backend, gradients[0], w_columnwise, context, "dgrad", x.dtype)
        dx = dx if dx.shape == x.shape else dx.reshape(x.shape)  # a leaf's gradient is no view
    return [dx, dw, *(backend.leading_sum(g, g.ndim - 1) if need else None for need in needs[2:])]


def _matmul_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((5, 40), (3, 40)))
    yield Sample((x, w, layer_context(get_recipe("fp32").layers)), expected=x @ w.T)
    yield Sample((x, w, layer_context(get_recipe("mxfp4").layers)))
    bias = np.array([0.5, -1.0, 0.25], np.float32)
    yield Sample((x, w, layer_context(get_recipe("fp32").layers), bias), expected=x @ w.T + bias)


@primitive(
    forward=_matmul_forward,
    vjp_at=_bias_vjp,
    fused_vjp=_matmul_vjp,
    once=_ONCE,
    reads="inputs",
    slots=("layer",),
    mixed=True,
    saves=True,
    released=lambda saved: saved.released,
    own_input=True,
    new_gradients=True,
    samples=_matmul_samples,
    errors=(
        BadInput(
            (_ones(2, 3), _ones(4, 5), _MXFP4),
            ValueError,
            "quantized_matmul: expected x (..., K) and w (N, K)",
        ),
        BadInput((_ones(2, 3), _ones(4, 3), "mxfp4"), TypeError, "expected a LayerContext"),
        BadInput(
            (_ones(2, 3), _ones(4, 3), _MXFP4, _ones(3)),
            ValueError,
            "bias: expected shape (4,), got (3,)",
        ),
    ),
)
def quantized_matmul(
    x: ExTensor, w: ExTensor, context: LayerContext, bias: ExTensor | None = None
) -> ExTensor:
    """The product ``x w^T + bias``, operands quantized by a layer's recipe in all three GEMMs.

    Args:
        x: (..., K), float32 or a 16-bit float.
        w: (N, K), likewise.
        context: the layer's recipe, random streams and counts.
        bias: (N,), likewise.

    Returns:
        (..., N), summed in float32 and rounded once, to bfloat16 where the recipe's activations are
        that, else to what the inputs promote to. A gradient has its input's dtype.

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: for other dtypes.

    Example:
        >>> context = et.layer_context(et.RECIPES["mxfp4"].layers)
        >>> et.quantized_matmul(et.ones((2, 32)), et.ones((3, 32)), context).tolist()
        [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """
    _check("quantized_matmul", x, w, context)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"quantized_matmul: expected x (..., K) and w (N, K), got {x.shape} and {w.shape}"
        )
    inputs = (x, w) if bias is None else (x, w, bias)
    if bias is not None:
        _check_bias("quantized_matmul", bias, w)
    version, given = operands.version_of(w), operands.input_of(x, w, context)
    return apply("quantized_matmul", *inputs, context=context, version=version, given=given)


def _check_bias(name: str, bias: ExTensor, w: ExTensor) -> None:
    tensors_only(name, bias)
    if bias.shape != w.shape[:1]:
        raise ValueError(f"{name}: bias: expected shape {w.shape[:1]}, got {bias.shape}")


# --- convolution --------------------------------------------------------------------------------


# Matrices of one group, or a stack of each group's: (K, M) of patches, (O, K) of weights and (O, M)
# of g, with M = N * Ho * Wo.


def _stacked(x: Array, groups: int) -> Array:
    """(O, ...) as (O, rest), or (groups, O / groups, rest)."""
    shape = (x.shape[0], -1) if groups == 1 else (groups, x.shape[0] // groups, -1)
    return x.reshape(shape)


def _conv_forward(
    backend: Backend,
    x: Array,
    w: Array,
    *bias: Array,
    context: LayerContext,
    window: Window,
    groups: int,
    given: operands.Input = operands.WHOLE,
) -> tuple[Array, operands.SavedOperands]:
    gemm, start = context.layer.fprop, bias[0] if bias else None
    saved = operands.kept_image(backend, x, context, given)
    if context.layer.uses_forward_operands:
        requantized.check_groups(groups)
    early = start if gemm.output_scale == 1.0 else None  # added where the sums begin
    kernels = operands.slot_values(backend, _stacked(w, groups), context, "fprop.w", -1)
    requested = context.operand("fprop.x")
    if isinstance(requested, str):
        a = dense_values(backend, x, requested)
        out = backend.conv2d(a, kernels.reshape(w.shape), window, groups, early)
    else:
        spec, stream = operands.slot_spec(
            context, "fprop.x", requested, -2, 2 if groups == 1 else 3
        )
        out, stats = backend.quantized_conv2d(x, kernels, spec, stream, w.shape, window, early)
        context.record("fprop.x", stats)
    out = operands.scaled(out, gemm, backend.xp)
    if start is not None and early is None:
        out = out + start[:, None, None]
    return backend.cast(out, _result(context, x, w, *bias)), saved


def _conv_vjp(
    backend: Backend,
    g: Array,
    out: Array,
    inputs: tuple[Array, ...],
    needs: tuple[bool, ...],
    context: LayerContext,
    window: Window,
    groups: int,
    saved: operands.SavedOperands,
    given: operands.Input = operands.WHOLE,
) -> list[Array | None]:
    x, w = inputs[:2]
    g = backend.cast(g, np.dtype(np.float32))
    last = [backend.channel_sum(g) if need else None for need in needs[2:]]
    if context.layer.uses_forward_operands:
        both = requantized.conv_gradients(backend, g, (x, w), needs, context, window)
        return [*both, *last]
    slots = [slot for slot, need in zip(("dgrad.g", "wgrad.g"), needs, strict=False) if need]
    quantizes = any(not isinstance(context.operand(slot), str) for slot in slots)
    rows = _pixels_last(g, groups, backend.xp) if quantizes else g  # one copy for both
    dx = dw = None
    if needs[0]:
        dx = _conv_dgrad(backend, g, rows, w, x.shape, context, window, groups)
    if needs[1]:
        odd = isinstance(saved.x, (OddFloats, OddPlanes))
        image = backend.odd_values(saved.x) if odd else saved.x
        image = x if image is None else image
        dw = _conv_wgrad(backend, g, rows, image, w.shape, context, window, groups)
    return [dx, dw, *last]


def _conv_dgrad(
    backend: Backend,
    g: Array,
    pixels_last: Array,
    w: Array,
    shape: tuple[int, ...],
    context: LayerContext,
    window: Window,
    groups: int,
) -> Array:
    gemm, (n, _, ho, wo) = context.layer.dgrad, g.shape
    kernels = operands.slot_values(backend, _stacked(w, groups), context, "dgrad.w", -2)
    rows = kernels.shape[-2] * groups  # a transform may have padded the output channels
    requested = context.operand("dgrad.g")
    if isinstance(requested, str):
        values = dense_values(backend, g, requested)
    else:
        matrix = operands.slot_values(backend, pixels_last, context, "dgrad.g", -2)
        values = backend.xp.swapaxes(matrix.reshape(rows, n, ho, wo), 0, 1)
    kernels = kernels.reshape(rows, *w.shape[1:])
    out = backend.conv2d_grad_x(values, kernels, shape, window, groups)
    return operands.scaled(out, gemm, backend.xp)


def _conv_wgrad(
    backend: Backend,
    g: Array,
    pixels_last: Array,
    x: Array,
    shape: tuple[int, ...],
    context: LayerContext,
    window: Window,
    groups: int,
) -> Array:
    gemm, (n, _, ho, wo), xp = context.layer.wgrad, g.shape, backend.xp
    g_spec, x_spec = context.operand("wgrad.g"), context.operand("wgrad.x")
    if isinstance(g_spec, str):
        values = dense_values(backend, g, g_spec)
        matrix = None if isinstance(x_spec, str) else _pixels_last(values, groups, xp)
    else:
        matrix = operands.slot_values(backend, pixels_last, context, "wgrad.g", -1)
        values = g
    if isinstance(x_spec, str):
        a = dense_values(backend, x, x_spec)
        if matrix is not None:
            values = xp.swapaxes(matrix.reshape(shape[0], n, ho, wo), 0, 1)
        return operands.scaled(backend.conv2d_grad_w(values, a, shape, window, groups), gemm, xp)
    spec, stream = operands.slot_spec(context, "wgrad.x", x_spec, -1, 2 if groups == 1 else 3)
    assert matrix is not None
    out, stats = backend.quantized_conv2d_grad_w(matrix, x, spec, stream, shape, window)
    context.record("wgrad.x", stats)
    return operands.scaled(out, gemm, xp)


def _pixels_last(g: Array, groups: int, xp: Any) -> Array:
    """(N, O, Ho, Wo) -> (O, N * Ho * Wo), or that of each group."""
    return _stacked(xp.ascontiguousarray(xp.swapaxes(g, 0, 1)), groups)


def _conv_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 4, 7, 7), (6, 2, 3, 3)))
    for name in ("fp32", "mxfp4"):
        context = layer_context(get_recipe(name).layers)
        yield Sample((x, w, context), {"stride": 2, "padding": 1, "groups": 2})


@primitive(
    forward=_conv_forward,
    vjp_at=_bias_vjp,
    fused_vjp=_conv_vjp,
    once=_ONCE,
    reads="inputs",
    slots=("layer",),
    saves=True,
    released=lambda saved: saved.released,
    samples=_conv_samples,
    errors=(
        BadInput((_ones(2, 3, 8, 8), _ones(4, 5, 3, 3), _MXFP4), ValueError, "channels"),
        BadInput(
            (_ones(2, 3, 8, 8), _ones(4, 3, 3, 3), _MXFP4, 1, 0, 1, 1, _ones(3)),
            ValueError,
            "bias: expected shape",
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
    bias: ExTensor | None = None,
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
        bias: added per output channel, (O,), likewise.

    Returns:
        (N, O, Ho, Wo), summed in float32 and rounded once, as `quantized_matmul` says.

    Raises:
        ValueError: if shapes, stride, padding, dilation or groups do not fit.
        TypeError: for other dtypes.

    Example:
        >>> context = et.layer_context(et.RECIPES["mxfp4"].layers)
        >>> et.quantized_conv2d(et.ones((1, 1, 2, 2)), et.ones((1, 1, 2, 2)), context).tolist()
        [[[[4.0]]]]
    """
    _check("quantized_conv2d", x, w, context)
    window = conv_window("quantized_conv2d", x, w, stride, padding, dilation, groups)
    inputs = (x, w) if bias is None else (x, w, bias)
    if bias is not None:
        _check_bias("quantized_conv2d", bias, w)
    given = operands.image_of(x, w, context)
    options = {"context": context, "window": window, "groups": groups, "given": given}
    return apply("quantized_conv2d", *inputs, **options)
