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
from extensor.quant.context import Counts, LayerContext
from extensor.quant.recipe import SLOTS, Gemm
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
        """A leaf's; None for a result, which nobody asks for twice."""
        return None if tensor.node else cls(tensor._version, tensor._version[0])


@dataclass(frozen=True, eq=False)
class _Kept:
    """An operand, what it was made of, and what was counted."""

    operand: Any
    counts: Counts | None
    version: Version
    data: weakref.ref[Any]
    recording: weakref.ref[Any] | None
    made_by: object  # recipe, random stream and sizes

    def is_of(self, version: Version, x: Array, recording: Any, made_by: object) -> bool:
        """Whether it would be made the same again."""
        mine = self.version
        same = mine.cell is version.cell and mine.writes == version.writes and self.data() is x
        there = None if self.recording is None else self.recording()
        return same and there is recording and self.made_by == made_by


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
        return [operand for operand, _ in _made(backend, x, context, slots, sizes)]
    recording, kept = backend.recording, context.state._operands
    made_by = [(context.layer, _drawn(context, slot, axis), sizes) for slot, axis in slots]
    found = [kept.get((context.path, slot)) for slot, _ in slots]
    same = [
        one
        for one, by in zip(found, made_by, strict=True)
        if one is not None and one.is_of(version, x, recording, by)
    ]
    if len(same) == len(slots):
        for (slot, _), one in zip(slots, same, strict=True):
            if one.counts is not None:
                again = getattr(one.counts, "again", None)
                context.record(slot, again() if again else one.counts)
        return [one.operand for one in same]
    made = _made(backend, x, context, slots, sizes)
    place = None if recording is None else weakref.ref(recording)
    for (slot, _), by, one in zip(slots, made_by, made, strict=True):
        kept[context.path, slot] = _Kept(*one, version, weakref.ref(x), place, by)
    return [operand for operand, _ in made]


def _drawn(context: LayerContext, slot: str, axis: int) -> Stream | None:
    wanted = context.operand(slot)
    return None if isinstance(wanted, str) else placed(context, slot, wanted, axis, 2)[1]


def _made(
    backend: Backend, x: Array, context: LayerContext, slots: Slots, sizes: tuple[int, int, int]
) -> list[tuple[Any, Counts | None]]:
    """The operands and their counts, which are recorded."""
    if not slots:
        return []
    specs = _specs(context, slots)
    if specs is None:
        dense = _dense(context, slots, sizes)
        if dense is None:
            return [_made(backend, x, context, [slot], sizes)[0] for slot in slots]
        axes = [axis % 2 for _, axis in slots]
        return [(operand, None) for operand in backend.dense_operands(x, axes, *dense)]
    gemms = [_gemm(context, slot) for slot, _ in slots]
    mixed = any(isinstance(operand, str) for gemm in gemms for operand in (gemm.a, gemm.b))
    work, memory = 0 if mixed else math.prod(sizes), context.memory(slots[0][0])
    made: list[tuple[Any, Counts | None]] = []
    found = backend.product_operands(x, *specs, work, memory)
    for (slot, _), (operand, counts) in zip(slots, found, strict=True):
        context.record(slot, counts)
        made.append((operand, counts))
    return made


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
