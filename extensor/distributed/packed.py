"""Weights that travel as their layers quantize them: 4 or 8 bits a value instead of 32.

A weight that fills a bucket by itself is divided into whole rows, a multiple of 32 for each rank.
So no block of its layer's operands lies on two ranks. Each rank packs its rows for both of the
layer's products. What is decoded must be what the layer would make of the weight, and the layer
quantizes it once more. So each rank checks that its decoded rows do not change when they are
quantized again; where one's do, the weight travels in float32.

All weights are packed when the first one is asked for after a step, and the ranks agree on all of
them at once. NVFP4 has a scale of the whole weight, from its largest value: also these are found at
once. Then nothing of a gather waits for this process.
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

__all__ = ["PackedWeight", "PackedWeights"]

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

    def parts(self, mine: QuantArray) -> list[Array]:
        """What travels of this rank's packed rows: flat arrays."""
        xp = self.bucket.backend.xp
        return [xp.ascontiguousarray(mine.parts[name]).reshape(-1) for name in _PARTS]

    def unpack(self, mine: QuantArray, wholes: Sequence[Array]) -> Array:
        """All ranks' rows, decoded and flat.

        Args:
            mine: this rank's, packed.
            wholes: its `parts`, each gathered.
        """
        found = {}
        for name, whole in zip(_PARTS, wholes, strict=True):
            first, *others = mine.parts[name].shape
            found[name] = whole.reshape(self._size * first, *others)
        shape = self._size * self.shape[0], self.shape[1]
        decoded = self.bucket.backend.dequantize(replace(mine, **found, shape=shape))
        return decoded.reshape(-1)


class PackedWeights:
    """The weights that may travel packed, and what all ranks agreed on since the last step.

    Args:
        ranks: who share the weights.

    Attributes:
        weights: by the ``id`` of their buckets.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.ranks, self.weights = ranks, dict[int, PackedWeight]()
        self._recipes: dict[int, Any] = {}
        self._packed: dict[int, dict[str, QuantArray | None]] = {}

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
        if isinstance(layer, Linear) and not rest and rows % ROWS == 0:
            self.weights[id(bucket)] = PackedWeight(layer, bucket, piece, self.ranks.size)

    def of(self, bucket: Bucket) -> dict[str, QuantArray | None]:
        """This rank's rows for each product that takes blocks; None where one rank's do not fit.

        All ranks call this together, for one of `weights`.
        """
        key = id(bucket)
        if not self._packed or self._recipes[key] is not self.weights[key].recipe:
            self._recipes = {key: weight.recipe for key, weight in self.weights.items()}
            self._packed = self._agreed()
        return self._packed[key]

    def forget(self) -> None:
        """Drop what was packed, of weights that have changed."""
        self._packed = {}

    def _agreed(self) -> dict[int, dict[str, QuantArray | None]]:
        specs = {key: weight.specs() for key, weight in self.weights.items()}
        largest = self._largest(specs)
        tried = [
            (key, slot, self._pack(self.weights[key], spec, largest.get(key)))
            for key, each in specs.items()
            for slot, spec in each.items()
        ]
        made = [packed for *_, packed in tried if packed is not None]
        steady = {}
        if made:  # all are read at once
            found = made[0].backend.xp.stack([packed.is_steady for packed in made]).tolist()
            steady = dict(zip(map(id, made), found, strict=True))
        good = [
            each is not None and (steady[id(each)] or each.is_same_again()) for *_, each in tried
        ]
        same = np.array(good, np.uint8)
        self.ranks.all_reduce(same, "min").wait()
        agreed: dict[int, dict[str, QuantArray | None]] = {key: {} for key in specs}
        for (key, slot, packed), fits in zip(tried, same.tolist(), strict=True):
            agreed[key][slot] = packed.to_send if packed is not None and fits else None
        return agreed

    def _largest(
        self, specs: dict[int, dict[str, QuantSpec]]
    ) -> dict[int, tuple[Array, np.float32]]:
        """The largest magnitudes of weights that have a scale of their own, there and here."""
        scaled = [k for k, each in specs.items() if any(s.row.tensor_scale for s in each.values())]
        if not scaled:
            return {}
        rows = [self.weights[key].rows for key in scaled]
        bits = self.weights[scaled[0]].bucket.backend.largest_multi_tensor(rows)
        self.ranks.all_reduce(bits, "max").wait()  # bits of magnitudes are in their order
        there = bits.view(np.float32)
        here = map(np.float32, there.tolist())
        return dict(zip(scaled, zip(there, here, strict=True), strict=True))

    @staticmethod
    def _pack(
        weight: PackedWeight, spec: QuantSpec, largest: tuple[Array, np.float32] | None
    ) -> _Packed | None:
        """A rank's rows; None where no tensor scale leads back to the weight's."""
        backend, amax, sent = weight.bucket.backend, None, None
        if spec.row.tensor_scale:
            assert largest is not None
            amax, sent = largest[0], _sent_scale(largest[1], spec)
            if sent is None:
                return None
        q = backend.pack(weight.rows, spec, None, amax)
        return _Packed(q, sent, backend) if set(q.parts) - {"tensor_scale"} == set(_PARTS) else None


class _Sent(NamedTuple):
    """The tensor scale to decode with, and what the largest magnitude decodes to."""

    scale: np.float32
    largest: np.float32


class _Packed(NamedTuple):
    """A rank's rows, and the tensor scale that is sent along, if there is one."""

    q: QuantArray
    sent: _Sent | None
    backend: Any

    @property
    def to_send(self) -> QuantArray:
        """With the tensor scale that is sent."""
        if self.sent is None:
            return self.q
        return replace(self.q, tensor_scale=self.backend.xp.asarray(self.sent.scale))

    @property
    def is_steady(self) -> Any:
        """Whether the scales alone say that what is decoded would be quantized to itself.

        A bool, or an array of shape () that holds it.
        """
        spec = self.q.spec
        known = spec.rule in _STEADY_RULES and spec.row.scale.name in _STEADY
        if not known or spec.dialect != "ocp" or spec.element_scale != 1.0:
            return self.backend.xp.zeros((), np.bool_)
        least, most = _STEADY[spec.row.scale.name]
        return ((self.q.scales - np.uint8(least)) <= np.uint8(most - least)).all()

    def is_same_again(self) -> bool:
        """Whether what is decoded, under the tensor scale that is sent, is quantized to itself."""
        backend, amax = self.backend, None
        if self.sent is not None:
            amax = backend.xp.asarray(self.sent.largest)
        decoded = backend.dequantize(self.to_send)
        again = backend.dequantize(backend.pack(decoded, self.q.spec, None, amax))
        expected = backend.dequantize(self.q)
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
