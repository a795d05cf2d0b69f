"""Operands of the backward pass that the forward pass makes, as tensors that torch saves.

On a GPU one reading of an input or a weight makes its FP8 operands of rows, for the forward
product, and of columns, for a gradient's. The second one's bytes are a result of the forward
operator. So the backward pass does not read and quantize the input and the weight again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from extensor.ops.recipe_operands import SavedOperands, prepared_at_once, slot_spec
from extensor.quant.recipe import Gemm, LayerRecipe
from extensor.quant.recipe_state import LayerContext
from extensor.quant.spec import QuantSpec
from extensor.torch import arrays
from extensor.torch.layer import LayerHandle

__all__ = [
    "INPUT",
    "WEIGHT",
    "of_operator",
    "promised",
    "restored",
    "savable",
    "sizes",
    "to_tensors",
]

INPUT, WEIGHT = 1, 2
"""Whose columns a pass saves: bits of one number."""

_SLOTS = {
    INPUT: [("fprop.x", -1), ("wgrad.x", -2)],
    WEIGHT: [("fprop.w", -1), ("dgrad.w", -2)],
}


def _fused() -> Any:
    """What makes and knows FP8 operands; with nothing of cupy."""
    from extensor_cuda.matmul import fused

    return fused


@lru_cache(maxsize=1024)
def _columns(layer: LayerRecipe, bit: int) -> QuantSpec | None:
    """The spec of what is saved, if a kernel makes it beside the operand of rows; else None."""
    found: list[QuantSpec] = []
    for slot, axis in _SLOTS[bit]:
        gemm: Gemm = getattr(layer, slot.partition(".")[0])
        spec = layer.slot(slot)
        if isinstance(spec, str) or isinstance(gemm.a, str) or isinstance(gemm.b, str):
            return None
        found.append(spec.replace(axis=axis + 2).resolve(2))
    all_fp8 = all(_fused().nbytes(spec, 32, 32) for spec in found)
    return found[1] if all_fp8 and not layer.uses_forward_operands else None


def savable(layer: LayerHandle) -> int:
    """The bits of what a layer's recipe has as FP8 operands of columns."""
    if layer.savable is None:
        recipe = layer.context.layer
        layer.savable = sum(bit for bit in _SLOTS if _columns(recipe, bit) is not None)
    return layer.savable


def sizes(layer: LayerHandle, x: Sequence[int], w: Sequence[int], saves: int) -> dict[int, int]:
    """Bytes of what a pass saves, by its bit; shapes may hold symbols.

    Args:
        layer: the layer.
        x: shape of the input, (..., K).
        w: shape of the weight, (N, K).
        saves: bits that are requested.
    """
    m, (n, k) = math.prod(x[:-1]), w
    found = {}
    for bit, contracted in ((INPUT, m), (WEIGHT, n)):
        spec = _columns(layer.context.layer, bit) if saves & bit else None
        if spec is not None:
            found[bit] = _fused().nbytes(spec, k, contracted)
    return found


def to_tensors(saved: SavedOperands) -> list[Tensor | None]:
    """What a forward product has saved of input and weight; None of what it has not."""
    buffers = [getattr(operand, "buffer", None) for operand in (saved.x, saved.w)]
    return [None if buffer is None else arrays.to_tensor(buffer) for buffer in buffers]


def promised(
    made: Sequence[Tensor | None], layer: LayerHandle, x: Tensor, w: Tensor, saves: int
) -> list[Tensor]:
    """One tensor for each of `sizes`, as an operator returns it.

    What a kernel did not make, as of a small matrix, is never read: `restored` decides likewise. It
    is filled with bits that would be NaN scales, or have E5M2 replaced by bfloat16.
    """
    there = dict(zip(_SLOTS, made, strict=True))
    result = []
    for bit, size in sizes(layer, x.shape, w.shape, saves).items():
        tensor = there[bit]
        result.append(x.new_full((size,), 255, dtype=torch.uint8) if tensor is None else tensor)
    return result


def of_operator(tensors: Sequence[Tensor], layer: LayerHandle, saves: int) -> list[Tensor | None]:
    """What an operator returned by `promised`: of the input and the weight."""
    held, bits = iter(tensors), saves & savable(layer)
    return [next(held) if bits & bit else None for bit in _SLOTS]


def restored(
    tensors: Sequence[Tensor | None],
    context: LayerContext,
    given: tuple[Any, Any],
    backend: Any,
    sure: bool,
) -> SavedOperands:
    """The operands again.

    Args:
        tensors: of the input and the weight; None: not saved.
        context: of the pass.
        given: arrays of the input and the weight.
        backend: their device's.
        sure: whether they are known to have been made.
    """
    x, w = given
    x = x.reshape(-1, x.shape[-1])
    products = (len(x), *w.shape)
    found: list[Any] = []
    for matrix, tensor, slots in zip((x, w), tensors, _SLOTS.values(), strict=True):
        made = tensor is not None and (
            sure or prepared_at_once(backend, matrix, context, slots, products) is not None
        )
        if not made or tensor is None:
            found.append(None)
            continue
        slot, axis = slots[1]
        spec = context.operand(slot)
        assert isinstance(spec, QuantSpec)
        along, stream = slot_spec(context, slot, spec, axis, 2)
        held = backend.xp.ascontiguousarray(matrix)
        buffer = arrays.to_array(tensor)
        found.append(_fused().restored(buffer, held, along, stream, backend.xp))
    return SavedOperands(*found)
