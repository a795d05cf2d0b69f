"""Weights that travel as their layers quantize them: 4 or 8 bits a value instead of 32.

A weight that fills a bucket by itself is divided into whole rows, a multiple of 32 for each rank.
So no block of its layer's operands lies on two ranks. Each rank packs its rows for one of the
layer's two products. What is decoded must be what the layer would make of the weight, and the layer
quantizes it once more. So each rank checks that its decoded rows do not change when they are
quantized again, and sends along whether; where one's do, the weight travels in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.distributed.communicator import Array
from extensor.distributed.gradients import Bucket
from extensor.nn.linear import Linear
from extensor.ops.recipe_operands import slot_spec
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec

__all__ = ["PackedWeight", "packed_weight"]

AXES = {"fprop.w": -1, "dgrad.w": -2}
"""The layer's products that read the weight, and the axis that each sums over."""
ROWS = 32
_PARTS = {"codes", "scales"}


class PackedWeight:
    """How the weight of one layer is packed.

    Args:
        layer: whose weight is alone in ``bucket``.
        bucket: of float32.
        ranks: how many share it.
    """

    def __init__(self, layer: Linear, bucket: Bucket, ranks: int) -> None:
        self.layer, self.bucket = layer, bucket
        self.shape = bucket.size // ranks // layer.in_features, layer.in_features
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
        )
        fits = isinstance(tile, tuple) and all(ROWS % side == 0 for side in tile)
        return spec if alone and fits else None

    def pack(self, slot: str, piece: Array) -> list[Array] | None:
        """This rank's rows for a product, flat; None where the layer packs no such blocks.

        Codes, scales, and a last array with one number that says whether they are the layer's.
        """
        spec, backend = self.spec(slot), self.bucket.backend
        if spec is None:
            return None
        if slot not in self._packed or self._packed[slot][0] != spec:
            q = backend.quantize(piece.reshape(self.shape), spec)[0]
            if set(q.parts) != _PARTS:  # a scale of the whole weight
                return None
            values = backend.dequantize(q)
            again = backend.fake_quantize(values, spec)[0]
            same = (values.view(np.uint32) == again.view(np.uint32)).all()
            flag = backend.xp.asarray(same).astype(np.uint8).reshape(1)
            arrays = [backend.xp.ascontiguousarray(part).reshape(-1) for part in q.parts.values()]
            self._packed[slot] = spec, [*arrays, flag], q
        return self._packed[slot][1]

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
        found = {
            name: whole.reshape(ranks * like.shape[0], *like.shape[1:])
            for (name, like), whole in zip(mine.parts.items(), wholes, strict=False)
        }
        shape = ranks * self.shape[0], self.shape[1]
        whole = replace(mine, **found, shape=shape)
        out.reshape(shape)[...] = self.bucket.backend.dequantize(whole)
        return True

    def forget(self) -> None:
        """Drop what was packed, of weights that have changed."""
        self._packed.clear()


def packed_weight(
    bucket: Bucket, layers: Sequence[Any], owners: int, ranks: int
) -> PackedWeight | None:
    """How a bucket is packed; None for one that is gathered in float32.

    Args:
        bucket: which.
        layers: that multiply by its first parameter.
        owners: how many modules have the parameter.
        ranks: how many share it.
    """
    param: ExTensor = bucket.params[0]
    if len(bucket.params) > 1 or owners != 1 or len(layers) != 1 or param.size != bucket.size:
        return None
    (layer,) = layers
    rows, rest = divmod(param.shape[0], ranks)
    good = isinstance(layer, Linear) and not rest and rows % ROWS == 0
    return PackedWeight(layer, bucket, ranks) if good else None
