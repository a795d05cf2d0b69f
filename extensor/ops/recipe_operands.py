"""What the GEMMs of a quantized layer multiply: operands as the layer's recipe asks for them.

A matrix is contracted along its rows (axis -1) or its columns (axis -2); a stack of matrices, one
for each group of a convolution, likewise. Every function counts what it quantized in the context.

A weight's operands are kept in the recipe state's `WeightCache`, an input's for as long as the
input lives in its `InputCache`. Each use of a kept operand is counted as if it were made anew.

What is kept of an input for backward is its wgrad operand, packed: a format's bits and its scales'
(`extensor.quant.array.stored_nbytes`), or an FP8 operand, or bfloat16 where the recipe rounds to
that. The input itself is let go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from extensor.autograd.mode import MODE
from extensor.autograd.tensor import ExTensor
from extensor.backends.generic.core import BFLOAT16
from extensor.backends.generic.quantize import dense_values
from extensor.backends.protocol import (
    Array,
    Backend,
    CastSpec,
    OperandSpec,
    Preparation,
    Prepared,
)
from extensor.quant.kept import image_bits
from extensor.quant.recipe import Gemm, LayerRecipe
from extensor.quant.recipe_state import Counts, LayerContext
from extensor.quant.round_to_odd import OddFloats, OddPlanes
from extensor.quant.spec import QuantSpec
from extensor.quant.weight_cache import CachedOperand, WeightSource, WeightVersion
from extensor.random import Stream

__all__ = [
    "PACKED",
    "WHOLE",
    "Input",
    "SavedOperands",
    "Slots",
    "counted_again",
    "forward_operands",
    "image_of",
    "input_of",
    "input_operands",
    "kept_image",
    "kept_operand",
    "make_operands",
    "prepared_at_once",
    "prepared_for_backward",
    "scaled",
    "slot_spec",
    "slot_values",
    "spec_along",
    "version_of",
]

Slots = tuple[tuple[str, int], ...]
"""Slots of a recipe, each with the axis along which its GEMM contracts the matrix."""

Sizes = tuple[int, int, int]
"""M, N and K of a layer's products."""


@lru_cache(maxsize=1024)
def spec_along(spec: QuantSpec, axis: int, ndim: int) -> QuantSpec:
    """The spec along one axis, counted from the last, of ``ndim``."""
    return spec.replace(axis=axis + ndim).resolve(ndim)


def slot_spec(
    context: LayerContext, slot: str, spec: QuantSpec, axis: int, ndim: int
) -> tuple[QuantSpec, Stream | None]:
    """The slot's spec along ``axis`` (-1: rows, -2: columns); its stream if it draws bits."""
    return _drawn(context, slot, axis, spec_along(spec, axis, ndim))


def _drawn(
    context: LayerContext, slot: str, axis: int, along: QuantSpec
) -> tuple[QuantSpec, Stream | None]:
    """The spec with the signs of this step, and the stream."""
    if along.has_per_step_signs:
        assert along.transform is not None
        along = along.with_signs(context.signs(along.transform, slot))
    return along, context.stream(slot, axis == -2) if along.is_random else None


def slot_values(backend: Backend, x: Array, context: LayerContext, slot: str, axis: int) -> Array:
    """The float32 values of a matrix, or of each group's, that GEMM ``slot`` contracts."""
    requested = context.operand(slot)
    if isinstance(requested, str):
        return dense_values(backend, x, requested)
    values, counts = backend.fake_quantize(x, *slot_spec(context, slot, requested, axis, x.ndim))
    context.record(slot, counts)
    return values


def scaled(product: Array, gemm: Gemm, xp: Any) -> Array:
    """A GEMM's product times its output scale."""
    return product if gemm.output_scale == 1.0 else product * xp.float32(gemm.output_scale)


def version_of(tensor: ExTensor) -> WeightVersion | None:
    """A leaf's version; None for memory that others may write, and for what is used once.

    That is a result, and what a parameter in blocks is decoded to, anew for each operation.
    """
    cell = tensor._version
    once = tensor.node is not None or tensor.is_blocked_parameter
    return None if once or len(cell) > 1 else WeightVersion(cell, cell[0])


def make_operands(
    backend: Backend,
    x: Array,
    context: LayerContext,
    slots: Slots,
    sizes: Sizes,
    version: WeightVersion | None = None,
    preparation: Preparation | None = None,
) -> list[Any]:
    """Operands of `Backend.product` made from matrix x, one per slot.

    Args:
        backend: the device's.
        x: the matrix.
        context: the layer's.
        slots: which GEMMs the operands are for; a backend may read x once for rows and columns.
        sizes: M, N and K of the layer's products.
        version: of a weight, whose operands may be those that were made before; None: no weight.
        preparation: what `Backend.prepare` decided about these slots, where the caller has it.
    """
    packed = context.state.weight_cache.packed
    if packed and (context.path, slots[0][0]) in packed:
        made = _gathered(backend, context, slots, sizes)
    elif version is None or "float32" in [context.operand(slot) for slot, _ in slots]:
        made = _made(backend, x, context, slots, sizes, preparation)
    else:
        made = _of_weight(_Weight(backend, x, context, sizes, version), slots, preparation)
    for (slot, _), (_, counts) in zip(slots, made, strict=True):
        if counts is not None:
            context.record(slot, counts)
    return [operand for operand, _ in made]


def forward_operands(
    backend: Backend,
    x: Array,
    context: LayerContext,
    slots: Slots,
    sizes: Sizes,
    version: WeightVersion | None = None,
) -> tuple[Any, Any]:
    """The operand of a forward GEMM and that of a backward GEMM, or None to make that later.

    Both are made now where `prepared_for_backward` says how. ``version``: as for `make_operands`.
    """
    packed = (context.path, slots[0][0]) in context.state.weight_cache.packed
    make_both = MODE.enabled and not packed
    both = prepared_for_backward(backend, x, context, slots, sizes) if make_both else None
    if both is not None:
        first, second = make_operands(backend, x, context, slots, sizes, version, both)
        return first, second
    return make_operands(backend, x, context, slots[:1], sizes, version)[0], None


def prepared_for_backward(
    backend: Backend, x: Array, context: LayerContext, slots: Slots, sizes: Sizes
) -> Preparation | None:
    """How a forward pass makes the operand of a backward GEMM, too; None: that is made later.

    It is `prepared_at_once`, but not where the recipe asks for little memory, unless x is small.
    """
    both = prepared_at_once(backend, x, context, slots, sizes)
    if both is None or both.batch_key or context.keeps_input():
        return both
    return None


def prepared_at_once(
    backend: Backend, x: Array, context: LayerContext, slots: Slots, sizes: Sizes
) -> Preparation | None:
    """How all operands are made by one reading of x that leaves something compact; else None.

    It depends on the recipe, and on x's sizes, dtype, strides and alignment, not on its values.
    """
    both = _prepare(backend, x, context, slots, sizes)
    return both if both is not None and both.compact else None


# --- inputs --------------------------------------------------------------------------------------


class Input(NamedTuple):
    """What is known of a layer's input before its operands are made.

    Attributes:
        keep: what backward needs of it: "packed", its wgrad operand; "input", which something else
            keeps in any case; "nothing", where the weight gets no gradient.
        version: of its values; None where its operands are not shared.
    """

    keep: Literal["packed", "input", "nothing"] = "packed"
    version: WeightVersion | None = None


PACKED = Input()
WHOLE = Input("input")


class SavedOperands(NamedTuple):
    """What a layer's forward product keeps for its backward products.

    Attributes:
        x: the wgrad operand, or a `Preparation.pack` of it; None: made from the input.
        w: the dgrad operand; None: made from the weight.
        released: numbers of the inputs that the gradient does not read: the input, or none.
    """

    x: Any
    w: Any
    released: tuple[int, ...] = ()


def input_of(x: ExTensor, w: ExTensor, context: LayerContext) -> Input:
    """How a layer keeps its input: packed, unless the operation that made it keeps it anyway."""
    if context.layer.uses_forward_operands:
        return _input_of(x, w, context, context.layer.requantize)
    requested = context.operand("wgrad.x")
    packs = not isinstance(requested, str) or image_bits(requested, x.data.dtype) is not None
    return _input_of(x, w, context, packs)


def image_of(x: ExTensor, w: ExTensor, context: LayerContext) -> Input:
    """The same of a convolution, whose packed patches would take more than its input."""
    bits = image_bits(context.operand("wgrad.x"), x.data.dtype, x.backend.odd_subnormals)
    stored = MODE.storage is not None and MODE.storage.of("layer") is not None
    packs = bits is not None and not stored and not context.layer.uses_forward_operands
    return _input_of(x, w, context, packs)


def _input_of(x: ExTensor, w: ExTensor, context: LayerContext, packs: bool) -> Input:
    cell, node = x._version, x.node
    version = None if len(cell) > 1 else WeightVersion(cell, cell[0])
    if not (w._requires_grad and MODE.enabled):
        return Input("nothing", version)
    whole = context.keeps_input() or not packs
    if node is not None and not whole and node.out is x.data:  # the operation before keeps x
        if node.primitive.smaller_output is None:
            return Input("input", version)
        node.out = node.primitive.smaller_output(x.backend, x.data)
        if MODE.observer is not None:
            MODE.observer.replaced(x.data, node.out)
    return Input("input" if whole else "packed", version)


def input_operands(
    backend: Backend, x: Array, context: LayerContext, slots: Slots, sizes: Sizes, given: Input
) -> tuple[Any, Any, bool]:
    """The operand of the forward GEMM, what is kept of the wgrad operand, whether x is let go.

    Args:
        backend: the device's.
        x: the input, (..., K).
        context: the layer's.
        slots: of the forward and of the wgrad GEMM.
        sizes: M, N and K of the layer's products.
        given: what is known of the input.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not MODE.enabled or given.keep == "nothing":
        return _shared(backend, x, context, slots[:1], sizes, given)[0], None, True
    if given.keep == "input":
        return *forward_operands(backend, rows, context, slots, sizes), False
    both = prepared_at_once(backend, rows, context, slots, sizes)
    if both is not None and (both.packs_second or both.keeps_second):
        pack = both.packs_second
        first, second = _shared(backend, x, context, slots, sizes, given, both, pack)
        return first, second, True
    (first,) = _shared(backend, x, context, slots[:1], sizes, given)
    (second,) = _shared(backend, x, context, slots[1:], sizes, given, pack=True)
    return first, second, second is not None


def kept_image(backend: Backend, x: Array, context: LayerContext, given: Input) -> SavedOperands:
    """What a convolution keeps of its input: its patches would take more.

    Args:
        backend: the device's.
        x: the input, (N, C, H, W).
        context: the layer's.
        given: what is known of the input.
    """
    requested = context.operand("wgrad.x")
    if not MODE.enabled or given.keep == "input" or context.layer.uses_forward_operands:
        return SavedOperands(None, None)
    if given.keep == "nothing":
        return SavedOperands(None, None, (0,))
    bits = image_bits(requested, x.dtype, backend.odd_subnormals)
    assert bits is not None  # `image_of` says so

    def make() -> OddFloats | OddPlanes | Array | None:
        if not isinstance(requested, str):
            return backend.round_to_odd(x, bits)
        with np.errstate(all="ignore"):
            return backend.cast(x, BFLOAT16)

    key = (isinstance(requested, str), bits, id(backend.capturing))
    cache = context.state.input_cache
    kept = make() if given.version is None else cache.share(x, given.version, key, make)
    return SavedOperands(kept, None, () if kept is None else (0,))


def kept_operand(kept: Any) -> Any:
    """The operand that `input_operands` kept."""
    return kept.operand() if hasattr(kept, "operand") else kept


def _shared(
    backend: Backend,
    x: Array,
    context: LayerContext,
    slots: Slots,
    sizes: Sizes,
    given: Input,
    preparation: Preparation | None = None,
    pack: bool = False,
) -> list[Any]:
    """An input's operands, one for each slot, made anew unless another layer has made the same.

    The input is (..., K).
    ``pack``: the last one packed instead; None where that saves no bytes.
    """
    rows = x.reshape(-1, x.shape[-1])
    preparation = preparation or _prepare(backend, rows, context, slots, sizes)

    def make() -> Prepared:
        if not pack:
            return _made(backend, rows, context, slots, sizes, preparation)
        assert preparation is not None
        return preparation.run_packing() if len(slots) > 1 else [preparation.pack() or (None, None)]

    if preparation is None or given.version is None or _plan(context.layer, slots).is_random:
        made = make()
    else:
        specs = [(context.operand(slot), axis) for slot, axis in slots]
        key = (*specs, preparation.path, pack, id(backend.capturing))
        cache = context.state.input_cache
        found = cache.share(x, given.version, key, lambda: _reading(None, make()))
        again = [(operand, counted_again(counts)) for operand, counts in found]
        made = _reading(preparation.x, again)
    for (slot, _), (_, counts) in zip(slots, made, strict=True):
        if counts is not None:
            context.record(slot, counts)
    return [operand for operand, _ in made]


def _reading(x: Array | None, made: Prepared) -> Prepared:
    """The operands, with ``x`` for those that read their matrix again; None: without a matrix.

    Else a cache of an input's operands would hold the input, whose end is what clears the cache.
    """
    return [(one.of(x) if hasattr(one, "of") else one, counts) for one, counts in made]


class _SlotsPlan(NamedTuple):
    """What a recipe says of slots that are made of one matrix.

    Attributes:
        differ: whether they differ in kind, so that each is made alone.
        specs: along the slots' axes; the signs of a transform may still be drawn.
        is_random: whether random bits or signs are drawn.
        is_pure: whether each slot's product has operands of one kind.
        named: the slot whose past maxima the backend keeps; None: nothing is quantized.
    """

    differ: bool
    specs: Sequence[OperandSpec]
    is_random: bool
    is_pure: bool
    named: str | None


def _plan(layer: LayerRecipe, slots: Slots) -> _SlotsPlan:
    """The plan of these slots, made once for a recipe."""
    found: _SlotsPlan | None = layer.plans.get(slots)
    if found is None:
        found = layer.plans[slots] = _make_plan(layer, slots)
    return found


def _make_plan(layer: LayerRecipe, slots: Slots) -> _SlotsPlan:
    specs: list[OperandSpec] = []
    kinds: set[str] = set()
    pure: set[bool] = set()
    for slot, axis in slots:
        gemm: Gemm = getattr(layer, slot.partition(".")[0])
        requested = layer.slot(slot)
        if isinstance(requested, str):
            specs.append(CastSpec(requested, axis % 2))
            kinds.add(requested)
            pure.add(gemm.a == gemm.b)
        else:
            specs.append(spec_along(requested, axis, 2))
            kinds.add("quantized")
            pure.add(not isinstance(gemm.a, str) and not isinstance(gemm.b, str))
    named = next((slot for slot, axis in slots if axis == -1), slots[0][0])
    return _SlotsPlan(
        differ=len(kinds) > 1 or (len(pure) > 1 and "quantized" not in kinds),
        specs=specs,
        is_random=any(isinstance(spec, QuantSpec) and spec.is_random for spec in specs),
        is_pure=all(pure),
        named=named if "quantized" in kinds else None,
    )


def _prepare(
    backend: Backend, x: Array, context: LayerContext, slots: Slots, sizes: Sizes
) -> Preparation | None:
    """How the backend makes all operands at once; None where slots differ in kind."""
    plan = _plan(context.layer, slots)
    if plan.differ:
        return None
    specs: Sequence[OperandSpec] = plan.specs
    streams: Sequence[Stream | None] = (None,) * len(slots)
    if plan.is_random:
        drawn = [
            _drawn(context, *slot, spec)
            for slot, spec in zip(slots, plan.specs, strict=True)
            if isinstance(spec, QuantSpec)  # all are: slots that differ in kind ended above
        ]
        specs, streams = [spec for spec, _ in drawn], [stream for _, stream in drawn]
    work = sizes[0] * sizes[1] * sizes[2] if plan.is_pure else 0
    amax_state = None if plan.named is None else context.amax_state(plan.named)
    return backend.prepare(x, specs, streams, work, amax_state)


def _made(
    backend: Backend,
    x: Array,
    context: LayerContext,
    slots: Slots,
    sizes: Sizes,
    preparation: Preparation | None,
) -> Prepared:
    """The operands and their counts; one after the other where the slots differ in kind."""
    if not slots:
        return []
    preparation = preparation or _prepare(backend, x, context, slots, sizes)
    if preparation is None:
        return [_made(backend, x, context, (slot,), sizes, None)[0] for slot in slots]
    return preparation.run()


# --- weights -------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Weight:
    """A weight in a layer, and the sizes of the products that it takes part in."""

    backend: Backend
    x: Array
    context: LayerContext
    sizes: Sizes
    version: WeightVersion

    @property
    def source(self) -> WeightSource:
        """What its operands are made from."""
        return WeightSource(self.x, self.version, self.sizes, self.backend.capturing)

    def recipes(self, slots: Slots) -> dict[str, Any]:
        """What decides the operands beside the values: the layer's recipe and random streams."""
        return {slot: (self.context.layer, self._stream(slot, axis)) for slot, axis in slots}

    def _stream(self, slot: str, axis: int) -> Stream | None:
        if not _plan(self.context.layer, ((slot, axis),)).is_random:
            return None
        return self.context.stream(slot, axis == -2)

    def find(self, slots: Slots) -> list[CachedOperand] | None:
        """The kept operands, if all are right."""
        context = self.context
        return context.state.weight_cache.find(context.path, self.source, self.recipes(slots))

    def prepare(self, slots: Slots) -> Preparation | None:
        """See `_prepare`."""
        return _prepare(self.backend, self.x, self.context, slots, self.sizes)


def _of_weight(weight: _Weight, slots: Slots, preparation: Preparation | None) -> Prepared:
    """Operands that were made before, or are made now, with those of other outdated weights."""
    found = weight.find(slots)
    if found is None:
        found = _remade(weight, slots, preparation)
    return [(one.operand, counted_again(one.counts)) for one in found]


def _gathered(backend: Backend, context: LayerContext, slots: Slots, sizes: Sizes) -> Prepared:
    """Operands of a weight that is there in packed form alone."""
    packed = context.state.weight_cache.packed
    work = math.prod(sizes) if _plan(context.layer, slots).is_pure else 0
    found = [packed[context.path, slot] for slot, _ in slots]
    return [(backend.packed_operand(q, work), counted_again(counts)) for q, counts in found]


def counted_again(counts: Counts | None) -> Counts | None:
    """Counts for one more use of an operand; replays of a captured step count by themselves."""
    again = getattr(counts, "again", None)
    return counts if again is None else again()


def _remade(weight: _Weight, slots: Slots, preparation: Preparation | None) -> list[CachedOperand]:
    """A weight's operands made anew and kept, with those of other weights where one launch can."""
    cache = weight.context.state.weight_cache
    preparation = preparation or weight.prepare(slots)
    weights, preparations = [weight], [preparation]
    for other, its in _outdated(weight, slots, preparation):
        weights.append(other)
        preparations.append(its)
    for one in weights:  # before the new ones are made, so that they may lie in the same memory
        cache.drop(one.context.path, (slot for slot, _ in slots))
    if preparation is not None and len(weights) > 1:
        made = weight.backend.run_batch([its for its in preparations if its is not None])
    else:
        made = [_made(weight.backend, weight.x, weight.context, slots, weight.sizes, preparation)]
    batched = preparation is not None and preparation.batch_key is not None
    kept = [
        cache.store(one.context.path, one.source, one.recipes(slots), operands, batched)
        for one, operands in zip(weights, made, strict=True)
    ]
    return kept[0]


def _outdated(
    weight: _Weight, slots: Slots, preparation: Preparation | None
) -> Iterator[tuple[_Weight, Preparation]]:
    """Other layers' weights that were written since, if one launch makes their operands too.

    Their layers will ask for the operands, as they did before.
    """
    if preparation is None or preparation.batch_key is None:
        return
    state, path = weight.context.state, weight.context.path
    for name, context in state.layers.items():
        kept = state.weight_cache.get(name, slots[0][0])
        if kept is None or name == path or context.layer != weight.context.layer:
            continue
        x, cell = kept.x(), kept.version.cell
        if x is None:
            continue
        other = _Weight(weight.backend, x, context, kept.sizes, WeightVersion(cell, cell[0]))
        if other.find(slots) is None:
            its = other.prepare(slots)
            if its is not None and its.batch_key == preparation.batch_key:
                yield other, its
