"""Weights that travel as their layers quantize them: 4 or 8 bits a value instead of 32.

A weight that fills a bucket by itself is divided into whole rows, a multiple of 32 for each rank.
So no block of its layer's operands lies on two ranks. Each rank packs its rows for one of the
layer's two products. What is decoded must be what the layer would make of the weight, and the layer
quantizes it once more. So each rank checks that its decoded rows do not change when they are
quantized again, and sends along whether; where one's do, the weight travels in float32.

NVFP4 has a scale of the whole weight, from its largest value. The ranks agree on those of all
weights at once, when the first one is packed after a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.backends.registry import get as get_backend
from extensor.distributed.communicator import Array, Communicator
from extensor.distributed.gradients import Bucket
from extensor.nn.linear import Linear
from extensor.ops.recipe_operands import slot_spec
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec

__all__ = ["Magnitudes", "PackedWeight", "packed_weight"]

AXES = {"fprop.w": -1, "dgrad.w": -2}
"""The layer's products that read the weight, and the axis that each sums over."""
ROWS = 32
_PARTS = ("codes", "scales")
_RULES = ("amax", "four_over_six")
"""Of NVFP4's, under which the largest value decodes to one value, whatever its block holds."""
_NEIGHBOURS = (0, 1, -1)
_STEADY = {"e8m0": (32, 222), "ue4m3": (8, 126)}
"""Scales of blocks whose decoded values are quantized to themselves, by a rule that looks at the
largest alone: powers of two far from the ends of float32; E4M3 numbers that are not subnormal,
under which a block's largest code is 6."""
_STEADY_RULES = frozenset(("floor", "rceil", "ceil", "even", "one", "amax"))


class Magnitudes:
    """The largest magnitudes of weights that are quantized by them, over all ranks' rows.

    Args:
        ranks: who share the weights.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.ranks, self.weights = ranks, list[PackedWeight]()
        self._found: dict[int, tuple[Array, np.float32]] = {}

    def of(self, weight: PackedWeight) -> tuple[Array, np.float32]:
        """A weight's, on its device and here; NaN or infinity if there is one.

        The first call finds those of all weights, in one launch, one collective and one wait.
        """
        if id(weight) not in self._found:
            asking = [each for each in self.weights if each.has_tensor_scale]
            rows = [each.rows for each in asking]
            bits = weight.bucket.backend.largest_multi_tensor(rows)
            self.ranks.all_reduce(bits, "max").wait()  # bits of magnitudes are in their order
            there = bits.view(np.float32)
            here = map(np.float32, there.tolist())
            self._found = dict(zip(map(id, asking), zip(there, here, strict=True), strict=True))
        return self._found[id(weight)]

    def forget(self) -> None:
        """Drop what was found, of weights that have changed."""
        self._found = {}


class PackedWeight:
    """How the weight of one layer is packed.

    Args:
        layer: whose weight is alone in ``bucket``.
        bucket: of float32.
        piece: this rank's rows, flat.
        magnitudes: of this weight and others.
    """

    def __init__(
        self, layer: Linear, bucket: Bucket, piece: ExTensor, magnitudes: Magnitudes
    ) -> None:
        self.layer, self.bucket, self._piece = layer, bucket, piece
        self._magnitudes = magnitudes
        size = magnitudes.ranks.size
        self.shape = bucket.size // size // layer.in_features, layer.in_features
        self._packed: dict[str, tuple[QuantSpec, list[Array], QuantArray]] = {}
        magnitudes.weights.append(self)

    @property
    def rows(self) -> Array:
        """This rank's."""
        return self._piece.data.reshape(self.shape)

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a product quantizes the weight by its largest magnitude."""
        specs = map(self.spec, AXES)
        return any(spec is not None and spec.row.tensor_scale for spec in specs)

    def spec(self, slot: str) -> QuantSpec | None:
        """How the layer quantizes the weight for a product; None if not in blocks of its own."""
        context = self.layer.quant
        if context is None or context.layer.uses_forward_operands:
            return None
        requested = context.operand(slot)
        if isinstance(requested, str):
            return None
        spec = slot_spec(context, slot, requested, AXES[slot], 2)[0].resolve(2)
        tile = spec.tile
        alone = (
            spec.rounding == "nearest_even"
            and spec.transform is None
            and spec.scale_window is None
            and spec.statistic == "amax"
            and not spec.rebased
            and (not spec.row.tensor_scale or (spec.rule in _RULES and not spec.eden))
        )
        fits = isinstance(tile, tuple) and all(ROWS % side == 0 for side in tile)
        return spec if alone and fits else None

    def pack(self, slot: str) -> list[Array] | None:
        """This rank's rows for a product, flat; None where the layer packs no such blocks.

        Codes, scales, and a last array with one number that says whether they are the layer's. All
        ranks call this together.
        """
        spec, backend = self.spec(slot), self.bucket.backend
        if spec is None:
            return None
        if slot not in self._packed or self._packed[slot][0] != spec:
            amax, sent = None, None
            if spec.row.tensor_scale:
                amax, largest = self._magnitudes.of(self)
                sent = _sent_scale(largest, spec)
                if sent is None:
                    return None
            q = backend.pack(self.rows, spec, None, amax)
            if set(q.parts) - {"tensor_scale"} != set(_PARTS):
                return None
            same = _steady(q) or _same_again(q, sent, backend)
            if sent is not None:
                q = replace(q, tensor_scale=backend.xp.asarray(sent.scale))
            flag = backend.xp.full(1, same, np.uint8)
            arrays = [backend.xp.ascontiguousarray(q.parts[name]).reshape(-1) for name in _PARTS]
            self._packed[slot] = spec, [*arrays, flag], q
        return self._packed[slot][1]

    def unpack(self, slot: str, wholes: Sequence[Array]) -> Array | None:
        """All ranks' rows, decoded; None if one says that they are not the layer's.

        Args:
            slot: the product.
            wholes: what `pack` gave on all ranks, each array gathered.
        """
        if not bool(wholes[-1].all()):
            return None
        mine = self._packed[slot][2]
        ranks = wholes[-1].size
        found = {}
        for name, whole in zip(_PARTS, wholes[:-1], strict=True):
            first, *others = mine.parts[name].shape
            found[name] = whole.reshape(ranks * first, *others)
        shape = ranks * self.shape[0], self.shape[1]
        decoded = self.bucket.backend.dequantize(replace(mine, **found, shape=shape))
        return decoded.reshape(-1)

    def forget(self) -> None:
        """Drop what was packed, of weights that have changed."""
        self._packed.clear()


class _Sent(NamedTuple):
    """The tensor scale to decode with, and what the largest magnitude decodes to."""

    scale: np.float32
    largest: np.float32


def _steady(q: QuantArray) -> bool:
    """Whether the scales alone say that what is decoded would be quantized to itself."""
    spec = q.spec
    known = spec.rule in _STEADY_RULES and spec.row.scale.name in _STEADY
    if not known or spec.dialect != "ocp" or spec.element_scale != 1.0:
        return False
    least, most = _STEADY[spec.row.scale.name]
    return bool(((q.scales - np.uint8(least)) <= np.uint8(most - least)).all())


def _same_again(q: QuantArray, sent: _Sent | None, backend: Any) -> bool:
    """Whether what is decoded, under the tensor scale that is sent, is quantized to itself."""
    expected, amax = backend.dequantize(q), None
    if sent is not None:
        q = replace(q, tensor_scale=backend.xp.asarray(sent.scale))
        amax = backend.xp.asarray(sent.largest)
    again = backend.dequantize(backend.pack(backend.dequantize(q), q.spec, None, amax))
    return bool((expected.view(np.uint32) == again.view(np.uint32)).all())


@lru_cache(maxsize=1024)
def _sent_scale(largest: np.float32, spec: QuantSpec) -> _Sent | None:
    """The tensor scale to decode with, so that quantizing again finds the weight's.

    It is the weight's or a neighbour, as rounding has it; None where it is neither, and where the
    largest magnitude is not finite.
    """
    if not np.isfinite(largest):
        return None
    backend, block = get_backend("cpu"), np.zeros((ROWS, ROWS), np.float32)
    block[0, 0] = largest
    q = backend.quantize(block, spec)[0]
    expected = np.asarray(q.tensor_scale)
    for steps in _NEIGHBOURS:
        scale = (expected.view(np.int32) + np.int32(steps)).view(np.float32)
        decoded = backend.dequantize(replace(q, tensor_scale=np.asarray(scale)))
        if backend.quantize(decoded, spec)[0].tensor_scale == expected:
            return _Sent(np.float32(scale), np.float32(decoded[0, 0]))
    return None


def packed_weight(
    bucket: Bucket, layers: Sequence[Any], owners: int, piece: ExTensor, magnitudes: Magnitudes
) -> PackedWeight | None:
    """How a bucket is packed; None for one that is gathered in float32.

    Args:
        bucket: which.
        layers: that multiply by its first parameter.
        owners: how many modules have the parameter.
        piece: this rank's values of it.
        magnitudes: of the weights that the same ranks share.
    """
    param: ExTensor = bucket.params[0]
    if len(bucket.params) > 1 or owners != 1 or len(layers) != 1 or param.size != bucket.size:
        return None
    (layer,) = layers
    rows, rest = divmod(param.shape[0], magnitudes.ranks.size)
    good = isinstance(layer, Linear) and not rest and rows % ROWS == 0
    return PackedWeight(layer, bucket, piece, magnitudes) if good else None
