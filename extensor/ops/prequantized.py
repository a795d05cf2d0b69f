"""Products with weights that were quantized beforehand: the layers of a quantized model.

The weight is codes and scales (N, K), blocked along K. The layer's context says what becomes of the
activations: multiplied as they are (weight-only), quantized by their own blocks (dynamic), or under
the scale that calibration found (static).

`prequantized_matmul` differs from the product of `extensor.ops.block_scaled` in its left operand:
here it is a float tensor, which the layer's context quantizes and counts.

A convolution multiplies x's patches by the flattened kernels (O, C kh kw), as in
`extensor.ops.quantized`. Under a static scale x is quantized once and patches are taken of the
codes, where a padded zero is the code of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.mode import MODE
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.generic import conv_pool
from extensor.backends.generic.core import BFLOAT16
from extensor.backends.generic.quantize import dense_values, weight_activations
from extensor.backends.protocol import Array, Backend, Window
from extensor.ops.arguments import tensors_only
from extensor.ops.block_scaled import matrix_product
from extensor.ops.conv_pool import Pair, int_pair
from extensor.ops.quantized import layer_context
from extensor.ops.recipe_operands import counted_again, spec_along
from extensor.quant import views
from extensor.quant.array import QuantArray
from extensor.quant.recipe import Gemm, LayerRecipe
from extensor.quant.recipe_state import LayerContext
from extensor.quant.spec import QuantSpec
from extensor.quant.static_scale import quantize_static
from extensor.quant.weight_cache import WeightVersion

__all__ = ["prequantized_conv2d", "prequantized_matmul"]

_FLOAT32 = np.dtype(np.float32)
_ONCE = (
    "a stored product is piecewise constant in its input, so its straight-through gradient has no "
    "derivative of its own; differentiate the float model instead"
)


def _quantized(
    backend: Backend,
    x: Array,
    context: LayerContext,
    operand: QuantSpec,
    axis: int,
    version: WeightVersion | None = None,
    shape: tuple[int, ...] | None = None,
) -> QuantArray:
    """The activations in blocks, counted.

    ``version``: of the values of x, where other layers that read them may use the same blocks.
    ``shape``: that x is quantized in, if not its own.
    """
    values = x if shape is None else x.reshape(shape)
    spec = spec_along(operand, axis - values.ndim, values.ndim)
    counts: Any
    if context.static_scale is not None:
        values = backend.cast(values, _FLOAT32)
        q, counts = quantize_static(values, spec, context.static_scale, backend.xp)
    elif version is None:
        q, counts = backend.quantize(values, spec)
    else:
        cache, key = context.state.input_cache, (spec, id(backend.capturing))
        q, counts = cache.share(x, version, key, lambda: backend.quantize(values, spec))
        counts = counted_again(counts)
    context.record("fprop.x", counts)
    return q


# --- matrix product -----------------------------------------------------------------------------


def _matmul_forward(
    backend: Backend,
    x: Array,
    w: QuantArray,
    context: LayerContext,
    version: WeightVersion | None = None,
) -> Array:
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    operand = context.operand("fprop.x")
    dtype = "bfloat16" if x.dtype == BFLOAT16 else "float32"
    if isinstance(operand, str):
        values = weight_activations(backend, x.reshape(shape), operand)
        out = matrix_product(backend, values, w, dtype)
    elif operand.rebased and context.static_scale is None:
        spec = spec_along(operand, -1, 2)
        out, counts = backend.rebased_matmul(x.reshape(shape), spec, w, dtype)
        context.record("fprop.x", counts)
    else:
        q = _quantized(backend, x, context, operand, 1, version, shape)
        out = matrix_product(backend, q, w, dtype)
    return backend.cast(out.reshape(*x.shape[:-1], w.shape[0]), x.dtype)


def _matmul_replay(
    backend: Backend, arrays: tuple[Array, QuantArray], params: dict[str, Any]
) -> Any:
    """The product of float32 activations, without asking the context again."""
    x, w = arrays
    if params["context"].operand("fprop.x") != "float32" or x.dtype != _FLOAT32:
        return None
    rows, shape = (math.prod(x.shape[:-1]), x.shape[-1]), (*x.shape[:-1], w.shape[0])
    multiply = backend.bound_weight_only(x.reshape(rows), w)
    return lambda x, _: multiply(x.reshape(rows)).reshape(shape)


def _matmul_vjp(
    backend: Backend,
    g: Array,
    out: Array,
    inputs: tuple[Array, QuantArray],
    needs: tuple[bool, bool],
    context: LayerContext,
    version: WeightVersion | None = None,
) -> tuple[Array | None, None]:
    x, w = inputs
    if not needs[0]:
        return None, None
    rows = backend.cast(g.reshape(math.prod(x.shape[:-1]), w.shape[0]), _FLOAT32)
    return backend.xp.matmul(rows, backend.dequantize(w)).reshape(x.shape), None


def _stored_layer(activations: QuantSpec | None) -> LayerContext:
    """A context for samples."""
    weights = QuantSpec("int8")
    gemm = Gemm(activations or "float32", weights)
    full = Gemm("float32", "float32")
    return layer_context(LayerRecipe(gemm, full, full))


def _matmul_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = rng.standard_normal((5, 40)).astype(np.float32)
    w = ExTensor(rng.standard_normal((3, 40)).astype(np.float32)).to_int8()
    yield Sample((x, w, _stored_layer(None)))
    yield Sample((x, w, _stored_layer(QuantSpec("mxint8"))))


@primitive(
    forward=_matmul_forward,
    fused_vjp=_matmul_vjp,
    replay=_matmul_replay,
    once=_ONCE,
    reads="inputs",
    mixed=True,
    takes_blocked=True,
    samples=_matmul_samples,
    errors=(
        BadInput(
            (np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), _stored_layer(None)),
            TypeError,
            "expected a weight in blocks",
        ),
    ),
)
def prequantized_matmul(x: ExTensor, w: ExTensor, context: LayerContext) -> ExTensor:
    """The product ``x w^T`` with a weight stored in blocks; the gradient in x is straight-through.

    Args:
        x: (..., K), float32 or a 16-bit float.
        w: (N, K), blocked along K.
        context: says how x is quantized, and counts.

    Returns:
        (..., N), summed in float32 and rounded once, to x's dtype.

    Raises:
        ValueError: if the shapes do not fit, or w is blocked along the other axis.
        TypeError: for another context, dense weights, or other dtypes.

    Example:
        >>> context = et.layer_context(et.RECIPES["mxfp4"].layers)
        >>> et.prequantized_matmul(et.ones((2, 32)), et.ones((3, 32)).to_mxfp4(), context).tolist()
        [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """
    _check("prequantized_matmul", x, w, context)
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"prequantized_matmul: expected x (..., K) and w (N, K), got {x.shape} and {w.shape}"
        )
    whole = len(x._version) == 1 and MODE.recording is None  # a replay has other values
    version = WeightVersion(x._version, x._version[0]) if whole else None
    return apply("prequantized_matmul", x, w, context=context, version=version)


def _check(name: str, x: ExTensor, w: ExTensor, context: object) -> None:
    tensors_only(name, x, w)
    if not isinstance(context, LayerContext):
        raise TypeError(
            f"{name}: expected a LayerContext, got {type(context).__name__}; "
            "quantize_model(model, scheme) makes them"
        )
    if not w.is_blocked:
        raise TypeError(
            f"{name}: expected a weight in blocks, got {w.dtype.name}; quantize it along axis 1, "
            "or use quantized_matmul"
        )
    if w.ndim != 2 or w.axis != 1:
        raise ValueError(
            f"{name}: expected a weight (N, K) blocked along axis 1, got {w.shape} along {w.axis}"
        )
    if x.dtype.name not in ("float32", "float16", "bfloat16"):
        raise TypeError(
            f"{name}: x is {x.dtype.name}; expected float32 or a 16-bit float: convert with "
            "x.to('float32')"
        )


# --- convolution --------------------------------------------------------------------------------


def _rows(x: Array, window: Window, xp: Any) -> Array:
    """The patches of x as rows, (N * Ho * Wo, C * kh * kw)."""
    return xp.ascontiguousarray(conv_pool.patch_matrix(x, window, 1, xp)[0].T)


def _patches(
    backend: Backend,
    x: Array,
    context: LayerContext,
    operand: QuantSpec,
    window: Window,
    groups: int,
) -> Iterator[QuantArray]:
    """Each group's patches (N * Ho * Wo, C / groups * kh * kw), in blocks along the last axis."""
    step = x.shape[1] // groups
    if context.static_scale is None:
        for i in range(groups):
            part = _rows(x[:, i * step : (i + 1) * step], window, backend.xp)
            yield _quantized(backend, part, context, operand, 1)
        return
    q = _quantized(backend, x, context, operand, 1)
    zero = backend.xp.uint8((context.static_scale.zero_point or 0) & 0xFF)
    spec = q.spec.replace(axis=1)
    one: dict[str, Any] = {"scales": q.scales.reshape(1, 1)}
    if q.zero_points is not None:
        one["zero_points"] = q.zero_points.reshape(1, 1)
    for i in range(groups):
        codes = q.codes[:, i * step : (i + 1) * step] ^ zero  # padding is 0
        rows = _rows(codes, window, backend.xp) ^ zero
        yield QuantArray(codes=rows, spec=spec, shape=tuple(rows.shape), **one)


def _conv_forward(
    backend: Backend,
    x: Array,
    w: QuantArray,
    context: LayerContext,
    window: Window,
    groups: int,
) -> Array:
    xp, outputs = backend.xp, w.shape[0]
    operand = context.operand("fprop.x")
    if isinstance(operand, str):
        kernel = backend.dequantize(w).reshape(outputs, x.shape[1] // groups, *window.kernel)
        return backend.conv2d(dense_values(backend, x, operand), kernel, window, groups)
    size = outputs // groups
    rows = []
    for i, patches in enumerate(_patches(backend, x, context, operand, window, groups)):
        kernels = w if groups == 1 else views.slice_blocks(w, (_part(i, size), slice(None)))
        rows.append(matrix_product(backend, patches, kernels))
    joined = rows[0] if groups == 1 else xp.concatenate(rows, axis=1)
    out = joined.reshape(x.shape[0], *window.output_size(x.shape[2:]), outputs)
    return xp.ascontiguousarray(xp.transpose(out, (0, 3, 1, 2)))


def _part(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)


def _conv_vjp(
    backend: Backend,
    g: Array,
    out: Array,
    inputs: tuple[Array, QuantArray],
    needs: tuple[bool, bool],
    context: LayerContext,
    window: Window,
    groups: int,
) -> tuple[Array | None, None]:
    x, w = inputs
    if not needs[0]:
        return None, None
    kernel = backend.dequantize(w).reshape(w.shape[0], x.shape[1] // groups, *window.kernel)
    return backend.conv2d_grad_x(g, kernel, x.shape, window, groups), None


def _conv_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = rng.standard_normal((2, 4, 7, 7)).astype(np.float32)
    w = ExTensor(rng.standard_normal((6, 18)).astype(np.float32)).to_int8()
    for activations in (None, QuantSpec("mxint8")):
        context = _stored_layer(activations)
        yield Sample((x, w, context, 3), {"stride": 2, "padding": 1, "groups": 2})


@primitive(
    forward=_conv_forward,
    fused_vjp=_conv_vjp,
    once=_ONCE,
    reads="inputs",
    takes_blocked=True,
    samples=_conv_samples,
    errors=(
        BadInput(
            (
                np.ones((2, 3, 8, 8), np.float32),
                np.ones((4, 27), np.float32),
                _stored_layer(None),
                3,
            ),
            TypeError,
            "expected a weight in blocks",
        ),
    ),
)
def prequantized_conv2d(
    x: ExTensor,
    w: ExTensor,
    context: LayerContext,
    kernel_size: Pair,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> ExTensor:
    """2-D convolution (cross-correlation) with kernels stored in blocks; gradient straight-through.

    Args:
        x: (N, C, H, W), float32 or a 16-bit float.
        w: (O, C / groups kh kw), the flattened kernels, blocked along axis 1.
        context: says how x is quantized, and counts.
        kernel_size: (kh, kw) or one number.
        stride: window step, one number or (height, width).
        padding: zeros around x, likewise.
        dilation: spacing of the kernel's elements, likewise.
        groups: channel groups convolved separately.

    Returns:
        (N, O, Ho, Wo), summed in float32.

    Raises:
        ValueError: if shapes, kernel, stride, padding, dilation or groups do not fit.
        TypeError: as `prequantized_matmul`.

    Example:
        >>> context = et.layer_context(et.RECIPES["mxfp4"].layers)
        >>> kernels = et.ones((1, 4)).to_mxfp4()
        >>> et.prequantized_conv2d(et.ones((1, 1, 2, 2)), kernels, context, kernel_size=2).tolist()
        [[[[4.0]]]]
    """
    _check("prequantized_conv2d", x, w, context)
    kernel = int_pair("prequantized_conv2d", "kernel_size", kernel_size, 1)
    window = Window(
        kernel,
        int_pair("prequantized_conv2d", "stride", stride, 1),
        int_pair("prequantized_conv2d", "padding", padding, 0),
        int_pair("prequantized_conv2d", "dilation", dilation, 1),
    )
    inner = kernel[0] * kernel[1]
    if x.ndim != 4 or groups < 1 or x.shape[1] * inner != groups * w.shape[1]:
        raise ValueError(
            f"prequantized_conv2d: expected x (N, C, H, W) and w (O, C / {groups} * {inner}), got "
            f"{x.shape} and {w.shape}"
        )
    if w.shape[0] % groups or min(window.output_size((x.shape[2], x.shape[3]))) < 1:
        raise ValueError(
            f"prequantized_conv2d: expected output channels in {groups} groups and an image the "
            f"kernel fits into, got {w.shape[0]} channels, an image {x.shape[2:]} and {window}"
        )
    return apply("prequantized_conv2d", x, w, context=context, window=window, groups=groups)
