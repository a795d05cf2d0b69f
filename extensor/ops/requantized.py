"""Layers whose backward pass reads what the forward pass multiplied (Quartet, Quartet II).

The forward operands are stored: packed codes and scales, and a bit a value where the layer masks
clipped ones. Under a Hadamard transform T, which both operands carry and the product cancels,

    fprop   y  = Q(x T) Q(w T)^T
    dgrad   dx = ((g w') * m_x) T^T     w' = Q(w T) where the layer requantizes, else w T
    wgrad   dw = ((g^T x') * m_w) T^T   x' = Q(x T), else x T

with m the clip masks. w' and x' are quantized once more, along the contraction of their GEMM.

Source: arXiv 2505.14669, algorithm 1; 2601.22813, section 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from extensor.backends.generic.conv_pool import fold, patch_matrix
from extensor.backends.generic.matmul import coded_values
from extensor.backends.protocol import Array, Backend, Window
from extensor.ops import recipe_operands as operands
from extensor.quant import reference
from extensor.quant.array import QuantArray
from extensor.quant.hadamard import hadamard, inverse_hadamard
from extensor.quant.recipe_state import LayerContext
from extensor.quant.spec import Hadamard, QuantSpec

__all__ = ["Kept", "conv_forward", "conv_gradients", "forward", "gradients"]


class Kept(NamedTuple):
    """What a layer keeps of its forward operands; None where backward does not read it."""

    x: QuantArray | None
    w: QuantArray | None
    x_mask: Array | None
    w_mask: Array | None


def forward(backend: Backend, x: Array, w: Array, context: LayerContext) -> tuple[Array, Kept]:
    """The float32 product of (M, K) and (N, K), and what backward reads of the operands."""
    stored, masks = _operands(backend, x, w, context, counts=True)
    return _product(backend, stored, context), _kept(stored, masks, context)


def conv_forward(
    backend: Backend, x: Array, w: Array, context: LayerContext, window: Window, groups: int
) -> Array:
    """The float32 convolution as a product of patches: (N, O, Ho, Wo)."""
    rows, kernels = _patch_rows(backend, x, w, window, groups)
    stored, _ = _operands(backend, rows, kernels, context, counts=True)
    out = _product(backend, stored, context)
    n, (ho, wo) = x.shape[0], window.output_size(x.shape[2:])
    xp = backend.xp
    return xp.ascontiguousarray(xp.moveaxis(out.reshape(n, ho, wo, w.shape[0]), 3, 1))


def conv_gradients(
    backend: Backend,
    g: Array,
    inputs: tuple[Array, Array],
    needs: tuple[bool, ...],
    context: LayerContext,
    window: Window,
    groups: int,
) -> tuple[Array | None, Array | None]:
    """The float32 gradients of a convolution; its forward operands are made once more."""
    (x, w), xp = inputs, backend.xp
    rows, kernels = _patch_rows(backend, x, w, window, groups)
    kept = _kept(*_operands(backend, rows, kernels, context, counts=False), context)
    matrix = xp.ascontiguousarray(xp.moveaxis(g, 1, 3).reshape(-1, w.shape[0]))
    dx, dw = gradients(backend, matrix, rows, kernels, needs, context, kept)
    if dx is not None:
        (n, c), (kh, kw), (ho, wo) = x.shape[:2], window.kernel, g.shape[2:]
        patches = xp.transpose(dx.reshape(n, ho, wo, c, kh, kw), (0, 3, 4, 5, 1, 2))
        dx = fold(patches, x.shape, window, xp)
    return dx, None if dw is None else dw.reshape(w.shape)


def _patch_rows(
    backend: Backend, x: Array, w: Array, window: Window, groups: int
) -> tuple[Array, Array]:
    """(M, K) of patches and (O, K) of weights."""
    if groups > 1:
        raise ValueError(
            "quantized_conv2d: expected groups=1 under a recipe that masks clipped values or "
            f"requantizes (Quartet), got {groups} groups; give grouped convolutions another recipe "
            "by a rule on their paths"
        )
    xp = backend.xp
    patches = patch_matrix(backend.cast(x, np.dtype(np.float32)), window, 1, xp)[0]
    return xp.ascontiguousarray(patches.T), w.reshape(w.shape[0], -1)


def _product(backend: Backend, stored: list[QuantArray], context: LayerContext) -> Array:
    out = backend.block_scaled_matmul(stored[0], stored[1])
    scale = context.layer.fprop.output_scale
    return out if scale == 1.0 else out * backend.xp.float32(scale)


def _kept(stored: list[QuantArray], masks: list[Array | None], context: LayerContext) -> Kept:
    return Kept(*(stored if context.layer.requantize else (None, None)), *masks)


def _operands(
    backend: Backend, x: Array, w: Array, context: LayerContext, counts: bool
) -> tuple[list[QuantArray], list[Array | None]]:
    """The stored operands of the forward product, still transformed, and their clip masks."""
    layer = context.layer
    stored: list[QuantArray] = []
    masks: list[Array | None] = []
    for slot, matrix in (("fprop.x", x), ("fprop.w", w)):
        requested = context.operand(slot)
        assert isinstance(requested, QuantSpec)
        spec, stream = operands.slot_spec(context, slot, requested, -1, 2)
        mask = None
        if layer.clip_gradient:
            q, stats, mask = backend.quantize_clipped(matrix, spec, stream)
        else:
            q, stats = backend.quantize(matrix, spec, stream)
        if counts:
            context.record(slot, stats)
        stored.append(coded_values(q))
        masks.append(mask)
    return stored, masks


def gradients(
    backend: Backend,
    g: Array,
    x: Array,
    w: Array,
    needs: tuple[bool, ...],
    context: LayerContext,
    kept: Kept | None,
) -> tuple[Array | None, Array | None]:
    """The float32 gradients of x (M, K) and w (N, K), of g (M, N).

    Without what the forward product kept, its operands are made once more.
    """
    layer, k = context.layer, w.shape[1]
    if kept is None:
        x = x.reshape(-1, k)
        kept = _kept(*_operands(backend, x, w, context, counts=False), context)
    sizes = (len(g), *w.shape)
    slots = [slot for slot, need in zip(_G, needs, strict=False) if need]
    made = operands.make_operands(backend, g, context, slots, sizes)
    found: list[Array | None] = [None, None]
    for i, (source, stored, mask, slot, gemm) in enumerate(
        (
            (w, kept.w, kept.x_mask, ("dgrad.w", -2), layer.dgrad),
            (x, kept.x, kept.w_mask, ("wgrad.x", -2), layer.wgrad),
        )
    ):
        if not needs[i]:
            continue
        values = _values(backend, source, stored, layer.fprop.a)
        (other,) = operands.make_operands(backend, values, context, [slot], sizes)
        mine = made[0 if i == 0 else -1]
        if "float32" in (gemm.a, gemm.b):
            product = backend.matmul(mine, other.T)
        else:
            product = backend.product(mine, other)
        if gemm.output_scale != 1.0:
            product = product * backend.xp.float32(gemm.output_scale)
        found[i] = _straight_through(product, mask, layer.fprop.a, k, backend.xp)
    return found[0], found[1]


_G: operands.Slots = [("dgrad.g", -1), ("wgrad.g", -2)]


def _transform(operand: Any) -> Hadamard | None:
    assert isinstance(operand, QuantSpec)
    return operand.transform


def _values(backend: Backend, source: Array, stored: QuantArray | None, operand: Any) -> Array:
    """Transformed x or w: the stored operand decoded, else the matrix in high precision."""
    if stored is not None:
        return backend.dequantize(stored)
    source = backend.cast(source.reshape(-1, source.shape[-1]), np.dtype(np.float32))
    transform = _transform(operand)
    return source if transform is None else hadamard(source, transform, backend.xp)


def _straight_through(
    gradient: Array, mask: Array | None, operand: Any, length: int, xp: Any
) -> Array:
    """The gradient that clipping lets through, out of the transform's domain."""
    if mask is not None:
        gradient = reference.masked(gradient, mask, 1, xp)
    transform = _transform(operand)
    if transform is None:
        return gradient
    return inverse_hadamard(gradient, transform, length, xp)
