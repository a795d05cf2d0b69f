"""Layers whose backward pass reads what the forward pass multiplied (Quartet, Quartet II).

The forward operands are stored: packed codes and scales, and a bit a value where the layer masks
clipped ones. Under a Hadamard transform T, which both operands carry and the product cancels,

    fprop   y  = Q(x T) Q(w T)^T
    dgrad   dx = ((g w') * m_x) T^T     w' = Q(w T) where the layer requantizes, else w T
    wgrad   dw = ((g^T x') * m_w) T^T   x' = Q(x T), else x T

with m the clip masks. w' and x' are quantized once more, along the contraction of their GEMM.
A convolution's forward product is that of every recipe; its backward ones are here.

Source: arXiv 2505.14669, algorithm 1; 2601.22813, section 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from extensor.backends.generic.conv_pool import first_values, patch_matrix
from extensor.backends.generic.matmul import coded_values
from extensor.backends.generic.quantize import dense_values
from extensor.backends.protocol import Array, Backend, FirstSpec, Window
from extensor.ops import recipe_operands as operands
from extensor.quant.array import QuantArray
from extensor.quant.hadamard import hadamard
from extensor.quant.recipe_state import LayerContext
from extensor.quant.spec import Hadamard, QuantSpec

__all__ = ["Kept", "check_groups", "conv_gradients", "forward", "gradients"]


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


def conv_gradients(
    backend: Backend,
    g: Array,
    inputs: tuple[Array, Array],
    needs: tuple[bool, ...],
    context: LayerContext,
    window: Window,
) -> tuple[Array | None, Array | None]:
    """The float32 gradients of a convolution without groups; its operands are made once more.

    g is (N, O, Ho, Wo). Matrices are those of every convolution: (K, M) of patches, (O, K) of
    weights and (O, M) of g, with M = N * Ho * Wo.
    """
    (x, w), xp, layer = inputs, backend.xp, context.layer
    x = backend.cast(x, np.dtype(np.float32))
    matrix = xp.ascontiguousarray(xp.swapaxes(g, 0, 1)).reshape(w.shape[0], -1)
    kernels = w.reshape(w.shape[0], -1)
    stored, mask = _operand(backend, kernels, context, "fprop.w", counts=False)
    requested = context.operand("fprop.x")
    assert isinstance(requested, QuantSpec)
    patches, _ = operands.slot_spec(context, "fprop.x", requested, -2, 2)
    dx = dw = None
    if needs[0]:
        values = _values(backend, kernels, stored if layer.requantize else None, layer.fprop.a)
        b = operands.slot_values(backend, values, context, "dgrad.w", -2)
        a = operands.slot_values(backend, matrix, context, "dgrad.g", -2)
        if layer.clip_gradient or patches.transform:
            dx = backend.clipped_conv2d_grad_x(a, b, x, patches, window, layer.clip_gradient)
        else:
            images = xp.swapaxes(a.reshape(len(a), g.shape[0], *g.shape[2:]), 0, 1)
            dx = backend.conv2d_grad_x(images, b.reshape(-1, *w.shape[1:]), x.shape, window, 1)
        dx = operands.scaled(dx, layer.dgrad, xp)
    if needs[1]:
        a = operands.slot_values(backend, matrix, context, "wgrad.g", -1)
        first = patches if layer.requantize else patches.transform
        dw = operands.scaled(
            _weight_gradient(backend, a, x, context, w.shape, window, first), layer.wgrad, xp
        )
        dw = dw.reshape(len(w), -1)
        dw = backend.straight_through(dw, mask, _transform(layer.fprop.a), kernels.shape[1])
        dw = dw.reshape(w.shape)
    return dx, dw


def check_groups(groups: int) -> None:
    """Refuse grouped convolutions, whose gradients are not written."""
    if groups > 1:
        raise ValueError(
            "quantized_conv2d: expected groups=1 under a recipe that masks clipped values or "
            f"requantizes (Quartet), got {groups} groups; give grouped convolutions another recipe "
            "by a rule on their paths"
        )


def _weight_gradient(
    backend: Backend,
    g: Array,
    x: Array,
    context: LayerContext,
    shape: tuple[int, ...],
    window: Window,
    first: FirstSpec | None,
) -> Array:
    requested = context.operand("wgrad.x")
    if isinstance(requested, str):
        patches = first_values(backend, patch_matrix(x, window, 1, backend.xp)[0], first)
        return backend.matmul(g, dense_values(backend, patches, requested).T)
    spec, stream = operands.slot_spec(context, "wgrad.x", requested, -1, 2)
    out, stats = backend.quantized_conv2d_grad_w(g, x, spec, stream, shape, window, first)
    context.record("wgrad.x", stats)
    return out


def _product(backend: Backend, stored: list[QuantArray], context: LayerContext) -> Array:
    out = backend.stored_product(stored[0], stored[1])
    return operands.scaled(out, context.layer.fprop, backend.xp)


def _kept(stored: list[QuantArray], masks: list[Array | None], context: LayerContext) -> Kept:
    return Kept(*(stored if context.layer.requantize else (None, None)), *masks)


def _operands(
    backend: Backend, x: Array, w: Array, context: LayerContext, counts: bool
) -> tuple[list[QuantArray], list[Array | None]]:
    """The stored operands of the forward product, still transformed, and their clip masks."""
    made = [
        _operand(backend, matrix, context, slot, counts)
        for slot, matrix in (("fprop.x", x), ("fprop.w", w))
    ]
    return [q for q, _ in made], [mask for _, mask in made]


def _operand(
    backend: Backend, matrix: Array, context: LayerContext, slot: str, counts: bool
) -> tuple[QuantArray, Array | None]:
    requested = context.operand(slot)
    assert isinstance(requested, QuantSpec)
    spec, stream = operands.slot_spec(context, slot, requested, -1, 2)
    mask = None
    if context.layer.clip_gradient:
        q, stats, mask = backend.quantize_clipped(matrix, spec, stream)
    else:
        q, stats = backend.quantize(matrix, spec, stream)
    if counts:
        context.record(slot, stats)
    return coded_values(q), mask


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
    slots = tuple([slot for slot, need in zip(_G, needs, strict=False) if need])
    made = operands.make_operands(backend, g, context, slots, sizes)
    found: list[Array | None] = [None, None]
    for i, (source, stored, mask, slot, name) in enumerate(
        (
            (w, kept.w, kept.x_mask, ("dgrad.w", -2), "dgrad"),
            (x, kept.x, kept.w_mask, ("wgrad.x", -2), "wgrad"),
        )
    ):
        if not needs[i]:
            continue
        values = _values(backend, source, stored, layer.fprop.a)
        (other,) = operands.make_operands(backend, values, context, (slot,), sizes)
        mine, gemm = made[0 if i == 0 else -1], getattr(layer, name)
        if "float32" in (gemm.a, gemm.b):
            product = backend.matmul(mine, other.T)
        else:
            product = backend.product(mine, other, fallbacks=context.fallbacks(name))
        product = operands.scaled(product, gemm, backend.xp)
        found[i] = backend.straight_through(product, mask, _transform(layer.fprop.a), k)
    return found[0], found[1]


_G: operands.Slots = (("dgrad.g", -1), ("wgrad.g", -2))


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
