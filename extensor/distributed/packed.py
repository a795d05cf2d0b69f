"""Weights that travel as their layers quantize them: 4 or 8 bits a value instead of 32.

A weight that fills a bucket by itself is divided into whole rows, a multiple of 32 for each rank.
So no block of its layer's operands lies on two ranks. Each rank packs its rows for one of the
layer's two products. What is decoded must be what the layer would make of the weight, and the layer
quantizes it once more. So each rank checks that its decoded rows do not change when they are
quantized again, and sends along whether; where one's do, the weight travels in float32.

NVFP4 has a scale of the whole weight, from its largest value: the ranks agree on that first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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

__all__ = ["PackedWeight", "packed_weight"]

AXES = {"fprop.w": -1, "dgrad.w": -2}
"""The layer's products that read the weight, and the axis that each sums over."""
ROWS = 32
_PARTS = ("codes", "scales")
_RULES = ("amax", "four_over_six")
"""Of NVFP4's, under which the largest value decodes to one value, whatever its block holds."""
_NEIGHBOURS = (0, 1, -1)


class PackedWeight:
    """How the weight of one layer is packed.

    Args:
        layer: whose weight is alone in ``bucket``.
        bucket: of float32.
        ranks: who share it.
    """

    def __init__(self, layer: Linear, bucket: Bucket, ranks: Communicator) -> None:
        self.layer, self.bucket, self.ranks = layer, bucket, ranks
        self.shape = bucket.size // ranks.size // layer.in_features, layer.in_features
        self._packed: dict[str, tuple[QuantSpec, list[Array], QuantArray]] = {}

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

    def pack(self, slot: str, piece: Array) -> list[Array] | None:
        """This rank's rows for a product, flat; None where the layer packs no such blocks.

        Codes, scales, and a last array with one number that says whether they are the layer's. All
        ranks call this together.
        """
        spec, backend = self.spec(slot), self.bucket.backend
        if spec is None:
            return None
        if slot not in self._packed or self._packed[slot][0] != spec:
            rows, amax, sent = piece.reshape(self.shape), None, None
            if spec.row.tensor_scale:
                amax = self._largest(rows)
                sent = _sent_scale(np.float32(amax.item()), spec)  # of all ranks
                if sent is None:
                    return None
            q = backend.pack(rows, spec, None, amax)
            if set(q.parts) - {"tensor_scale"} != set(_PARTS):
                return None
            expected = backend.dequantize(q)
            if sent is not None:
                q = replace(q, tensor_scale=backend.xp.asarray(sent.scale))
                amax = backend.xp.asarray(sent.largest)
            again = backend.dequantize(backend.pack(backend.dequantize(q), spec, None, amax))
            same = (expected.view(np.uint32) == again.view(np.uint32)).all()
            flag = backend.xp.asarray(same).astype(np.uint8).reshape(1)
            arrays = [backend.xp.ascontiguousarray(q.parts[name]).reshape(-1) for name in _PARTS]
            self._packed[slot] = spec, [*arrays, flag], q
        return self._packed[slot][1]

    def _largest(self, rows: Array) -> Array:
        """The largest magnitude of all ranks' rows; NaN or infinity if there is one."""
        bits = self.bucket.backend.block_max(rows.reshape(-1)).max().reshape(1)
        self.ranks.all_reduce(bits, "max").wait()  # bits of magnitudes are in their order
        return bits.view(np.float32).reshape(())

    def unpack(self, slot: str, wholes: Sequence[Array], out: Array) -> bool:
        """Decode all ranks' rows into ``out``; False if one says that they are not the layer's.

        Args:
            slot: the product.
            wholes: what `pack` gave on all ranks, each array gathered.
            out: float32 of the bucket.
        """
        if not bool(wholes[-1].all()):
            return False
        mine = self._packed[slot][2]
        ranks = wholes[-1].size
        found = {}
        for name, whole in zip(_PARTS, wholes[:-1], strict=True):
            first, *others = mine.parts[name].shape
            found[name] = whole.reshape(ranks * first, *others)
        shape = ranks * self.shape[0], self.shape[1]
        whole = replace(mine, **found, shape=shape)
        out.reshape(shape)[...] = self.bucket.backend.dequantize(whole)
        return True

    def forget(self) -> None:
        """Drop what was packed, of weights that have changed."""
        self._packed.clear()


class _Sent(NamedTuple):
    """The tensor scale to decode with, and what the largest magnitude decodes to."""

    scale: np.float32
    largest: np.float32


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
    bucket: Bucket, layers: Sequence[Any], owners: int, ranks: Communicator
) -> PackedWeight | None:
    """How a bucket is packed; None for one that is gathered in float32.

    Args:
        bucket: which.
        layers: that multiply by its first parameter.
        owners: how many modules have the parameter.
        ranks: who share it.
    """
    param: ExTensor = bucket.params[0]
    if len(bucket.params) > 1 or owners != 1 or len(layers) != 1 or param.size != bucket.size:
        return None
    (layer,) = layers
    rows, rest = divmod(param.shape[0], ranks.size)
    good = isinstance(layer, Linear) and not rest and rows % ROWS == 0
    return PackedWeight(layer, bucket, ranks) if good else None
