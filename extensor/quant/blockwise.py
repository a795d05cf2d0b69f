"""The block quantizer: split, code, pack; unpack, decode, join. All formats use it."""

from __future__ import annotations

from typing import Any

from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.blocks import BlockLayout
from extensor.quant.families import decode_blocks, encode_blocks
from extensor.quant.hadamard import hadamard
from extensor.quant.rounding import pack, unpack
from extensor.quant.spec import QuantSpec
from extensor.random import Stream, random_words

__all__ = ["decode_array", "quantize_blocks"]

Array = Any


def quantize_blocks(
    x: Array, spec: QuantSpec, stream: Stream | None, previous_amax: Array | None, xp: Any
) -> tuple[QuantArray, QuantStats]:
    """Quantize float32 x under a resolved spec; `reference.quantize` has checked all arguments."""
    shape = tuple(x.shape)
    layout = BlockLayout(spec, shape, xp)
    if spec.transform:
        rotated = hadamard(xp.moveaxis(x, spec.axis, -1), spec.transform, xp)
        x = xp.moveaxis(rotated, -1, spec.axis)
    blocks = layout.split(x)
    words = None
    if stream is not None:
        words = random_words(stream, layout.index, layout.block_size, spec.rbits, xp)
    real = layout.split(xp.ones(layout.coded, dtype=bool))
    before = None if previous_amax is None else layout.split_scales(previous_amax)
    coded = encode_blocks(blocks, real, spec, words, before, xp)
    codes = pack(layout.join(coded.codes), spec.row.element.bits, xp)
    q = QuantArray(
        codes=xp.ascontiguousarray(xp.moveaxis(codes, -1, spec.axis)),
        scales=xp.ascontiguousarray(layout.join_scales(coded.scales)),
        spec=spec,
        shape=shape,
        tensor_scale=coded.tensor_scale,
        zero_points=None
        if coded.zero_points is None
        else xp.ascontiguousarray(layout.join_scales(coded.zero_points)),
    )
    values = decode_blocks(
        coded.codes, coded.scales, spec, coded.tensor_scale, coded.zero_points, xp
    )
    flushed = real & (blocks != 0) & (values == 0)
    return q, QuantStats(int(real.sum()), int((coded.saturated & real).sum()), int(flushed.sum()))


def decode_array(q: QuantArray, xp: Any) -> Array:
    """Stored array -> float32, block axis last, still transformed, padded to the Hadamard size."""
    spec = q.spec
    layout = BlockLayout(spec, q.shape, xp)
    length = layout.coded[spec.axis]
    codes = unpack(xp.moveaxis(q.codes, spec.axis, -1), spec.row.element.bits, length, xp)
    blocks = layout.split(xp.moveaxis(codes, -1, spec.axis))
    zero_points = None if q.zero_points is None else layout.split_scales(q.zero_points)
    values = decode_blocks(
        blocks, layout.split_scales(q.scales), spec, q.tensor_scale, zero_points, xp
    )
    return layout.join(values)[..., :length]
