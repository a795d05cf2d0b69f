"""Weights that travel as their layers quantize them: 4 or 8 bits a value instead of 32.

A weight that fills a bucket by itself is divided into whole rows, a multiple of 32 for each rank.
So no block of its layer's operands lies on two ranks: each rank packs its rows for both of the
layer's products, and the gathered rows are what the layer would make of the whole weight. It
multiplies them as they are, and nobody decodes them to float32. NVFP4 has a scale of the whole
weight, from its largest value: these values of all weights are found at once.

All weights are packed when the first one is asked for after a step. Neighbours are gathered
together, up to `GROUP_BYTES`. Nothing of this waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.distributed.communicator import Array, Communicator
from extensor.distributed.gradients import Bucket
from extensor.nn.linear import Linear
from extensor.ops.recipe_operands import slot_spec
from extensor.quant.array import QuantArray, stored_nbytes
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec

__all__ = ["PackedWeight", "PackedWeights"]

AXES = {"fprop.w": -1, "dgrad.w": -2}
"""The layer's products that read the weight, and the axis that each sums over."""
ROWS = 32
GROUP_BYTES = 128 << 20
"""Of codes that are gathered together, at most, unless one weight has more: the block of a
transformer of width 4096 in FP4."""
_RULES = ("amax", "four_over_six")
"""Of NVFP4's, under which the scale of the whole follows from its largest value alone."""

Key = tuple[int, str]
"""The ``id`` of a bucket, and a product."""
Packed = tuple[QuantArray, Counts]
"""Codes and scales, and what quantizing this rank's rows counted."""


class PackedWeight:
    """How the weight of one layer is packed.

    Args:
        layer: whose weight is alone in ``bucket``.
        bucket: of float32.
        piece: this rank's rows, flat.
        size: how many ranks share it.
    """

    def __init__(self, layer: Linear, bucket: Bucket, piece: ExTensor, size: int) -> None:
        self.layer, self.bucket, self._piece, self._size = layer, bucket, piece, size
        self.shape = bucket.size // size // layer.in_features, layer.in_features

    @property
    def recipe(self) -> Any:
        """The layer's, which says how; another object where it has changed."""
        return None if self.layer.quant is None else self.layer.quant.layer

    @property
    def rows(self) -> Array:
        """This rank's."""
        return self._piece.data.reshape(self.shape)

    def specs(self) -> dict[str, QuantSpec]:
        """How the layer quantizes the weight, for each product that takes blocks of its own."""
        found = {slot: self._spec(slot) for slot in AXES}
        return {slot: spec for slot, spec in found.items() if spec is not None}

    def _spec(self, slot: str) -> QuantSpec | None:
        context = self.layer.quant
        if context is None or context.layer.uses_forward_operands:
            return None
        requested = context.operand(slot)
        if isinstance(requested, str):
            return None
        spec = slot_spec(context, slot, requested, AXES[slot], 2)[0].resolve(2)
        tile, two_levels = spec.tile, spec.row.tensor_scale
        alone = (
            spec.rounding == "nearest_even"
            and spec.transform is None
            and spec.scale_window is None
            and spec.statistic == "amax"
            and not spec.rebased
            and (spec.is_mx or (two_levels and spec.rule in _RULES and not spec.eden))
        )
        fits = isinstance(tile, tuple) and all(ROWS % side == 0 for side in tile)
        return spec if alone and fits else None

    def whole(self, mine: QuantArray, codes: Array, scales: Array) -> QuantArray:
        """All ranks' rows.

        Args:
            mine: this rank's.
            codes: all ranks', flat.
            scales: likewise.
        """
        (rows, *of_codes), (blocks, *of_scales) = mine.codes.shape, mine.scales.shape
        return replace(
            mine,
            codes=codes.reshape(self._size * rows, *of_codes),
            scales=scales.reshape(self._size * blocks, *of_scales),
            shape=(self._size * self.shape[0], self.shape[1]),
        )

    def give(self, slot: str, packed: Packed) -> None:
        """Let the layer multiply these codes, until its operands are dropped."""
        context = self.layer.quant
        assert context is not None  # `specs` says so
        context.state.weight_cache.packed[context.path, slot] = packed

    def is_given(self, slot: str) -> bool:
        """Whether the layer has codes for a product."""
        context = self.layer.quant
        return context is not None and (context.path, slot) in context.state.weight_cache.packed


class PackedWeights:
    """The weights that may travel packed, and their rows since the last step.

    Args:
        ranks: who share the weights.
        gather: gives arrays of all ranks, one after the other, for each flat array of this rank.

    Attributes:
        weights: by the ``id`` of their buckets.
        received: bytes of other ranks' rows.
        nbytes: of gathered rows that are there.
    """

    def __init__(
        self, ranks: Communicator, gather: Callable[[Sequence[Array]], list[Array]]
    ) -> None:
        self.ranks, self.weights, self.received = ranks, dict[int, PackedWeight](), 0
        self.nbytes = 0
        self._gather = gather
        self._recipes: dict[int, Any] = {}
        self._specs: dict[Key, QuantSpec] = {}
        self._groups: dict[Key, list[Key]] = {}
        self._mine: dict[Key, Packed] = {}
        self._there: dict[Key, Packed] = {}

    def add(self, bucket: Bucket, layers: Sequence[Any], owners: int, piece: ExTensor) -> None:
        """Take the weight that a bucket holds, if it may travel packed.

        Args:
            bucket: which.
            layers: that multiply by its first parameter.
            owners: how many modules have the parameter.
            piece: this rank's values of it.
        """
        param: ExTensor = bucket.params[0]
        if len(bucket.params) > 1 or owners != 1 or len(layers) != 1 or param.size != bucket.size:
            return
        (layer,) = layers
        rows, rest = divmod(param.shape[0], self.ranks.size)
        if type(layer) is not Linear:  # another class may read the weight itself
            return
        if not rest and rows % ROWS == 0 and self.ranks.size > 1:
            self.weights[id(bucket)] = PackedWeight(layer, bucket, piece, self.ranks.size)

    @property
    def slots(self) -> set[tuple[str, str]]:
        """What travels packed, once something was asked for: paths of layers, and products."""
        contexts = ((self.weights[key].layer.quant, slot) for key, slot in self._specs)
        return {(context.path, slot) for context, slot in contexts if context is not None}

    def of(self, bucket: Bucket, slot: str) -> Packed | None:
        """All ranks' rows for a product; None where it takes no blocks. All ranks call this.

        They are let go when those of another group are asked for: where blocks run again in the
        backward pass (`--recompute`), each of them gathers its group for both products anew.
        """
        weight, key = self.weights.get(id(bucket)), (id(bucket), slot)
        if weight is None:
            return None
        if id(bucket) not in self._recipes or self._recipes[id(bucket)] is not weight.recipe:
            self._plan()
        if key in self._specs and key not in self._there:
            if not self._mine:
                self._mine = self._packed()
            self._gather_group(self._groups[key])
        return self._there.get(key)

    def forget(self) -> None:
        """Drop what was packed, of weights that have changed."""
        self._mine, self._there, self.nbytes = {}, {}, 0

    def _plan(self) -> None:
        """What is packed, and gathered together: neighbours, each product by itself."""
        self.forget()
        self._recipes = {key: weight.recipe for key, weight in self.weights.items()}
        specs = {key: weight.specs() for key, weight in self.weights.items()}
        self._specs, self._groups = {}, {}
        for slot in AXES:
            group, size = list[Key](), 0
            for key, weight in self.weights.items():
                if (spec := specs[key].get(slot)) is None:
                    continue
                nbytes = self.ranks.size * stored_nbytes(spec, weight.shape)
                if size + nbytes > GROUP_BYTES:
                    group, size = [], 0
                group.append((key, slot))
                size += nbytes
                self._groups[key, slot], self._specs[key, slot] = group, spec

    def _packed(self) -> dict[Key, Packed]:
        """All of this rank's rows."""
        largest, found = self._largest(), {}
        for (key, slot), spec in self._specs.items():
            weight, amax = self.weights[key], largest[key] if spec.row.tensor_scale else None
            found[key, slot] = weight.bucket.backend.quantize(weight.rows, spec, None, None, amax)
        return found

    def _largest(self) -> dict[int, Array]:
        """The largest magnitudes of whole weights that have a scale of their own."""
        found = (key for (key, _), spec in self._specs.items() if spec.row.tensor_scale)
        scaled = list(dict.fromkeys(found))
        if not scaled:
            return {}
        backend = self.weights[scaled[0]].bucket.backend
        with self.ranks.beside():
            bits = backend.largest_multi_tensor([self.weights[key].rows for key in scaled])
            self.ranks.all_reduce(bits, "max").wait()  # bits of magnitudes are in their order
        self.ranks.join()
        floats = bits.view(np.float32)
        return {key: floats[i : i + 1].reshape(()) for i, key in enumerate(scaled)}

    def _gather_group(self, group: Sequence[Key]) -> None:
        self._there = {}  # before, so that the next ones may lie in the same memory
        mine = [self._mine[key] for key in group]
        xp = self.weights[group[0][0]].bucket.backend.xp
        arrays = [part for q, _ in mine for part in (q.codes, q.scales)]
        parts = [xp.ascontiguousarray(part).reshape(-1) for part in arrays]
        wholes = self._gather(parts)
        own = sum(part.nbytes for part in parts)
        self.received += (self.ranks.size - 1) * own
        self.nbytes = self.ranks.size * own
        for i, (key, (q, counts)) in enumerate(zip(group, mine, strict=True)):
            whole = self.weights[key[0]].whole(q, *wholes[2 * i : 2 * i + 2])
            self._there[key] = whole, counts
