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

from extensor.ops.recipe_operands import SavedOperands, prepared_for_backward, slot_spec
from extensor.quant.recipe import Gemm, LayerRecipe
from extensor.quant.recipe_state import LayerContext
from extensor.quant.spec import QuantSpec
from extensor.torch.layer import layer_of

__all__ = [
    "INPUT",
    "UNREAD",
    "WEIGHT",
    "buffers",
    "of_operator",
    "promised",
    "reads_input",
    "replaces_input",
    "restored",
    "savable",
    "sizes",
]

INPUT, WEIGHT, UNREAD = 0b0011, 0b1100, 0b10000
"""Whose columns a pass saves: two bits each of one number, which hold the kind of the operand.

The last bit says that the backward pass does not read the input.

The number is an argument of the operators, so that it fixes the sizes of what they return: torch's
compiler keeps code on disk for programs to come, in which a layer's handle names another recipe.
"""

_SLOTS = {
    INPUT: (("fprop.x", -1), ("wgrad.x", -2)),
    WEIGHT: (("fprop.w", -1), ("dgrad.w", -2)),
}
_SHIFT = {INPUT: 0, WEIGHT: 2}


def _fused() -> Any:
    """What makes and knows FP8 operands; with nothing of cupy."""
    from extensor_cuda.matmul import fused

    return fused


@lru_cache(maxsize=1024)
def _kind(layer: LayerRecipe, bits: int) -> int:
    """The kind of what is saved, if a kernel makes it beside the operand of rows; else 0."""
    found: list[QuantSpec] = []
    for slot, axis in _SLOTS[bits]:
        gemm: Gemm = getattr(layer, slot.partition(".")[0])
        spec = layer.slot(slot)
        if isinstance(spec, str) or isinstance(gemm.a, str) or isinstance(gemm.b, str):
            return 0
        found.append(spec.replace(axis=axis + 2).resolve(2))
    kinds = [_fused().kind_of(spec) for spec in found]
    return kinds[1] if all(kinds) and not layer.uses_forward_operands else 0


@torch.compiler.assume_constant_result
def savable(number: int) -> int:
    """The kinds of what a layer's recipe has as FP8 operands of columns.

    Args:
        number: the layer's handle.
    """
    layer = layer_of(number)
    if layer.savable is None:
        recipe = layer.context.layer
        layer.savable = sum(_kind(recipe, bits) << _SHIFT[bits] for bits in _SLOTS)
    return layer.savable


@torch.compiler.assume_constant_result
def reads_input(number: int) -> bool:
    """Whether a backward pass reads the input although the weight gets no gradient.

    It does where the recipe multiplies forward operands: their clip masks are the input's.

    Args:
        number: the layer's handle.
    """
    return layer_of(number).context.layer.uses_forward_operands


def replaces_input(number: int) -> bool:
    """Whether the operand saved of an input is all that the backward pass reads of it.

    MXFP4's is not: where E5M2 does not hold a value, bfloat16 is made of the input.

    Args:
        number: the layer's handle.
    """
    return savable(number) & INPUT == _fused().REBASED


def sizes(x: Sequence[int], w: Sequence[int], saves: int) -> dict[int, int]:
    """Bytes of what a pass saves, by `INPUT` and `WEIGHT`; shapes may hold symbols.

    Args:
        x: shape of the input, (..., K).
        w: shape of the weight, (N, K) if anything is saved.
        saves: the kinds of the operands.
    """
    found: dict[int, int] = {}
    if not saves & (INPUT | WEIGHT):
        return found
    m, (n, k) = math.prod(x[:-1]), w
    for bits, contracted in ((INPUT, m), (WEIGHT, n)):
        if saves & bits:
            found[bits] = _fused().nbytes((saves & bits) >> _SHIFT[bits], k, contracted)
    return found


def buffers(saved: SavedOperands) -> list[Any]:
    """What a forward product has saved of input and weight, as arrays; None of what it has not."""
    return [getattr(operand, "buffer", None) for operand in (saved.x, saved.w)]


def promised(made: Sequence[Tensor | None], x: Tensor, w: Tensor, saves: int) -> list[Tensor]:
    """One tensor for each of `sizes`, as an operator returns it.

    What a kernel did not make, as of a small matrix, is never read: `restored` decides likewise. It
    is filled with bits that would be NaN scales, or have E5M2 replaced by bfloat16.
    """
    there = dict(zip(_SLOTS, made, strict=True))
    result = []
    for bits, size in sizes(x.shape, w.shape, saves).items():
        tensor = there[bits]
        result.append(x.new_full((size,), 255, dtype=torch.uint8) if tensor is None else tensor)
    return result


def of_operator(tensors: Sequence[Tensor], saves: int) -> list[Tensor | None]:
    """What an operator returned by `promised`: of the input and the weight."""
    held = iter(tensors)
    return [next(held) if saves & bits else None for bits in _SLOTS]


def restored(
    buffers: Sequence[Any],
    context: LayerContext,
    given: tuple[Any, Any],
    backend: Any,
    sure: bool,
) -> SavedOperands:
    """The operands again.

    Args:
        buffers: arrays of what was saved of the input and the weight; None: not saved.
        context: of the pass.
        given: arrays of the input and the weight.
        backend: their device's.
        sure: whether they are known to have been made.
    """
    x, w = given
    x = x.reshape(-1, x.shape[-1])
    products = (len(x), *w.shape)
    found: list[Any] = []
    for matrix, buffer, slots in zip((x, w), buffers, _SLOTS.values(), strict=True):
        made = buffer is not None and (
            sure or prepared_for_backward(backend, matrix, context, slots, products) is not None
        )
        if not made:
            found.append(None)
            continue
        slot, axis = slots[1]
        spec = context.operand(slot)
        assert isinstance(spec, QuantSpec)
        along, stream = slot_spec(context, slot, spec, axis, 2)
        held = matrix if along.rebased else backend.xp.ascontiguousarray(matrix)
        found.append(_fused().restored(buffer, held, along, stream, backend.xp))
    return SavedOperands(*found)
