"""What the GEMMs of a quantized layer multiply: operands as the layer's recipe wants them.

A matrix is contracted along its rows (axis -1) or its columns (axis -2); a stack of matrices, one
for each group of a convolution, likewise. Every function counts what it quantized in the context.

A weight's operands are made once and kept until the weight is written, so that micro-batches and
evaluation do not quantize it again. What is kept is counted with every use, as if made anew. While
a step is recorded, only what that recording made is used: each repetition makes it from the weight
that it finds.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from extensor.autograd.mode import MODE
from extensor.autograd.tensor import ExTensor
from extensor.backends.layers import dense_values
from extensor.backends.protocol import Array, Backend
from extensor.quant.recipe import SLOTS, Gemm, LayerRecipe
from extensor.quant.recipe_state import Counts, LayerContext
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["Slots", "Version", "of_forward", "of_products", "placed", "values"]


@lru_cache(maxsize=1024)
def _along(spec: QuantSpec, axis: int, ndim: int) -> QuantSpec:
    """The spec along one axis, counted from the last, of ``ndim``."""
    return spec.replace(axis=axis + ndim).resolve(ndim)


def placed(
    context: LayerContext, slot: str, spec: QuantSpec, axis: int, ndim: int
) -> tuple[QuantSpec, Stream | None]:
    """The slot's spec along ``axis`` (-1: rows, -2: columns); its stream if it is stochastic."""
    along = _along(spec, axis, ndim)
    stream = context.stream(slot, axis == -2) if along.rounding == "stochastic" else None
    return along, stream


def values(backend: Backend, x: Array, context: LayerContext, slot: str, axis: int) -> Array:
    """The values of a matrix, or of each group's, that GEMM ``slot`` contracts along ``axis``."""
    wanted = context.operand(slot)
    if isinstance(wanted, str):
        return dense_values(backend, x, wanted)
    made, stats = backend.operand(x, *placed(context, slot, wanted, axis, x.ndim))
    context.record(slot, stats)
    return made


Slots = Sequence[tuple[str, int]]
"""Slots of a recipe, each with the axis along which its GEMM contracts the matrix."""


@dataclass(frozen=True, eq=False)
class Version:
    """Which values a tensor's memory has: how often it was written when an operation takes it."""

    cell: list[int]
    writes: int

    @classmethod
    def of(cls, tensor: ExTensor) -> Version | None:
        """A leaf's; None for a result, which nobody asks for twice, and where others may write."""
        cell = tensor._version
        return None if tensor.node or len(cell) > 1 else cls(cell, cell[0])


Made = tuple[Any, Counts | None]
"""An operand and what making it counted; None where nothing is counted."""


def _specs(
    context: LayerContext, slots: Slots
) -> tuple[list[QuantSpec], list[Stream | None]] | None:
    """Slots' specs and streams; None if one is dense."""
    specs, streams = [], []
    for slot, axis in slots:
        wanted = context.operand(slot)
        if isinstance(wanted, str):
            return None
        spec, stream = placed(context, slot, wanted, axis, 2)
        specs.append(spec)
        streams.append(stream)
    return specs, streams


def of_products(
    backend: Backend,
    x: Array,
    context: LayerContext,
    slots: Slots,
    sizes: tuple[int, int, int],
    version: Version | None = None,
) -> list[Any]:
    """What GEMMs of M, N and K multiply of matrix x, one per slot, for `Backend.operand_product`.

    A backend may read x once for rows and columns. With a weight's ``version`` they may be those
    that were made before.
    """
    if version is None or any(context.operand(slot) == "float32" for slot, _ in slots):
        made = _made(backend, x, context, slots, sizes)
    else:
        made = _of_weight(backend, slots, _Weight(context, x, sizes, version))
    for (slot, _), (_, counts) in zip(slots, made, strict=True):
        if counts is not None:
            context.record(slot, counts)
    return [operand for operand, _ in made]


def _made(
    backend: Backend, x: Array, context: LayerContext, slots: Slots, sizes: tuple[int, int, int]
) -> list[Made]:
    """The operands and their counts."""
    if not slots:
        return []
    specs = _specs(context, slots)
    if specs is None:
        dense = _dense(context, slots, sizes)
        if dense is None:
            return [_made(backend, x, context, [slot], sizes)[0] for slot in slots]
        axes = [axis % 2 for _, axis in slots]
        return [(operand, None) for operand in backend.dense_operands(x, axes, *dense)]
    memory = context.amax_state(slots[0][0])
    return list(backend.product_operands(x, *specs, _work(context, slots, sizes), memory))


def _work(context: LayerContext, slots: Slots, sizes: tuple[int, int, int]) -> int:
    gemms = [_gemm(context, slot) for slot, _ in slots]
    mixed = any(isinstance(operand, str) for gemm in gemms for operand in (gemm.a, gemm.b))
    return 0 if mixed else math.prod(sizes)


def of_forward(
    backend: Backend,
    x: Array,
    context: LayerContext,
    slots: Slots,
    sizes: tuple[int, int, int],
    version: Version | None = None,
) -> tuple[Any, Any]:
    """A forward operand and the backward one of the same matrix, or None to make that later.

    They are made together where a backend reads x once for both and what it keeps is small.
    ``version``: as for `of_products`.
    """
    if MODE.enabled and all(isinstance(context.operand(slot), QuantSpec) for slot in SLOTS):
        specs = _specs(context, slots)
        keeps = specs is not None and backend.keeps_operands(x, *specs, math.prod(sizes))
    else:
        dense = _dense(context, slots, sizes) if MODE.enabled else None
        keeps = dense is not None and backend.keeps_dense(*dense)
    if keeps:
        first, second = of_products(backend, x, context, slots, sizes, version)
        return first, second
    return of_products(backend, x, context, slots[:1], sizes, version)[0], None


def _dense(
    context: LayerContext, slots: Slots, sizes: tuple[int, int, int]
) -> tuple[str, int] | None:
    """The one dtype of slots that are all dense, and the work of their products; None else.

    The work is 0 where a product's operands differ.
    """
    found = set()
    for slot, _ in slots:
        gemm, wanted = _gemm(context, slot), context.operand(slot)
        if not isinstance(wanted, str):
            return None
        found.add((wanted, math.prod(sizes) if gemm.a == gemm.b else 0))
    return found.pop() if len(found) == 1 else None


def _gemm(context: LayerContext, slot: str) -> Gemm:
    gemm: Gemm = getattr(context.layer, slot.partition(".")[0])
    return gemm


# --- what is kept of weights ---


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight in a layer, and the sizes of the products that it takes part in."""

    context: LayerContext
    x: Array
    sizes: tuple[int, int, int]
    version: Version


@dataclass(frozen=True, eq=False)
class _Kept:
    """An operand of a weight, what it was made of, and what was counted."""

    operand: Any
    counts: Counts | None
    x: weakref.ref[Any]
    version: Version
    capture: weakref.ref[Any] | None
    layer: LayerRecipe
    stream: Stream | None
    sizes: tuple[int, int, int]


def _of_weight(backend: Backend, slots: Slots, weight: _Weight) -> list[Made]:
    """Operands that were made before, or are made now, with those of other weights that changed."""
    kept, capture = weight.context.state._operands, backend.capturing
    found = _found(weight, slots, capture)
    if found is None:
        found, weights = [], [weight, *_changed(backend, slots, weight)]
        for one in weights:  # first, so that the new ones may lie where these were
            for slot, _ in slots:
                kept.pop((one.context.path, slot), None)
        place = _place(capture)
        for one, made in zip(weights, _made_each(backend, slots, weights), strict=True):
            for (slot, axis), (operand, counts) in zip(slots, made, strict=True):
                stream = _drawn(one.context, slot, axis)
                source = weakref.ref(one.x), one.version, place
                layer = one.context.layer
                mine = _Kept(operand, counts, *source, layer, stream, one.sizes)
                kept[one.context.path, slot] = mine
                if one is weight:
                    found.append(mine)
    return [(one.operand, _again(one.counts)) for one in found]


def _again(counts: Counts | None) -> Counts | None:
    """What was counted, for one more use; repetitions of a recorded step count by themselves."""
    again = getattr(counts, "again", None)
    return counts if again is None else again()


def _place(capture: Any) -> weakref.ref[Any] | None:
    """Where operands are made; that of a recording which is gone equals no other."""
    return None if capture is None else weakref.ref(capture)


def _found(weight: _Weight, slots: Slots, capture: Any) -> list[_Kept] | None:
    """What is kept, if it would be made the same again."""
    found, context = [], weight.context
    for slot, axis in slots:
        one = context.state._operands.get((context.path, slot))
        if one is None or one.version.cell is not weight.version.cell or one.x() is not weight.x:
            return None
        if one.version.writes != weight.version.writes or one.capture != _place(capture):
            return None
        made_by = (one.layer, one.stream, one.sizes)
        if made_by != (context.layer, _drawn(context, slot, axis), weight.sizes):
            return None
        found.append(one)
    return found


def _changed(backend: Backend, slots: Slots, weight: _Weight) -> list[_Weight]:
    """Other weights with kept operands of other values, which a backend makes at once with these.

    They will be asked for, as they were before.
    """
    context, changed = weight.context, []
    specs = _specs(context, slots)
    if specs is None or not backend.joins_operands(specs[0]):
        return []

    def keeps(one: _Weight) -> bool:
        work = _work(one.context, slots, one.sizes)
        return backend.keeps_operands(one.x, *specs, work)

    if not keeps(weight):
        return []
    for path, other in context.state.layers.items():
        one = context.state._operands.get((path, slots[0][0]))
        if one is None or path == context.path or other.layer != context.layer:
            continue
        x, cell = one.x(), one.version.cell
        if x is None or x.dtype != weight.x.dtype:
            continue
        found = _Weight(other, x, one.sizes, Version(cell, cell[0]))
        if keeps(found) and _found(found, slots, backend.capturing) is None:
            changed.append(found)
    return changed


def _made_each(backend: Backend, slots: Slots, weights: list[_Weight]) -> Sequence[Sequence[Made]]:
    """Operands of each of several weights under one recipe."""
    if len(weights) > 1:
        specs = _specs(weights[0].context, slots)
        assert specs is not None
        memories = [one.context.amax_state(slots[0][0]) for one in weights]
        return backend.product_operands_each([one.x for one in weights], specs[0], memories)
    (one,) = weights
    return [_made(backend, one.x, one.context, slots, one.sizes)]


def _drawn(context: LayerContext, slot: str, axis: int) -> Stream | None:
    wanted = context.operand(slot)
    return None if isinstance(wanted, str) else placed(context, slot, wanted, axis, 2)[1]
