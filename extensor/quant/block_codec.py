"""The block quantizer that all formats share: split into blocks, encode, pack; and back.

`BlockLayout` moves the block axis last, pads with zeros and gives a matrix with one block per row,
positions running in C order of the moved axes. A block's random bits are numbered by its position
in the scales array, so that the result does not depend on the order of the rows here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.quant.affine import decode_affine, encode_affine, join_super, split_super
from extensor.quant.array import QuantArray, QuantStats, coded_length, super_grid, tile_extent
from extensor.quant.codec_types import EncodedBlocks
from extensor.quant.hadamard import hadamard
from extensor.quant.rounding import pack, unpack
from extensor.quant.scale_encoders import decode_blocks, encode_blocks
from extensor.quant.spec import QuantSpec
from extensor.random import Stream, random_words

__all__ = ["BlockLayout", "clip_mask", "decode_array", "fake_quantize_blocks", "quantize_blocks"]

Array = Any


class BlockLayout:
    """How an array of one shape is cut into blocks under a resolved spec, and joined again.

    Attributes:
        coded: the array's shape with the block axis padded to the Hadamard size.
        grid: the shape of the scales.
    """

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...], xp: Any = np) -> None:
        self.xp = xp
        coded = list(shape)
        coded[spec.axis] = coded_length(spec, shape)
        self.coded = tuple(coded)
        extent = tile_extent(spec, self.coded)
        self.grid = tuple(-(-n // e) for n, e in zip(self.coded, extent, strict=True))
        # The order of axes while blocked: the others as they are, then the block axis.
        self._order = (*(a for a in range(len(shape)) if a != spec.axis), spec.axis)
        self._extent = tuple(extent[a] for a in self._order)
        self._grid = tuple(self.grid[a] for a in self._order)
        self._padded = tuple(g * e for g, e in zip(self._grid, self._extent, strict=True))
        self.blocks = math.prod(self.grid)
        self.block_size = math.prod(extent)
        self.along = self.grid[spec.axis]  # blocks of a row, which follow each other in `split`
        self._block_axis_last = spec.axis == len(shape) - 1

    def split(self, x: Array) -> Array:
        """(coded shape) -> (blocks, block_size), padding filled with zeros (False).

        Memory keeps x's order as far as it goes: blocks along another axis than the last come as
        a transposed view, position by position, since a transposing copy costs more than all else.
        """
        xp = self.xp
        moved = xp.transpose(x, self._order)
        pads = [(0, p - n) for p, n in zip(self._padded, moved.shape, strict=True)]
        moved = xp.pad(moved, pads) if any(after for _, after in pads) else moved
        fine = [n for pair in zip(self._grid, self._extent, strict=True) for n in pair]
        ndim = len(self._order)
        grid, extent = [2 * i for i in range(ndim)], [2 * i + 1 for i in range(ndim)]
        fine_blocks = moved.reshape(fine)
        if self._block_axis_last:
            return xp.transpose(fine_blocks, grid + extent).reshape(self.blocks, self.block_size)
        return xp.transpose(fine_blocks, extent + grid).reshape(self.block_size, self.blocks).T

    def join(self, blocks: Array) -> Array:
        """(blocks, block_size) -> the coded shape with the block axis last, padding kept on it.

        A view of C order in x's own order of axes.
        """
        xp = self.xp
        ndim = len(self._order)
        fine = blocks.reshape(self._grid + self._extent)
        at = [self._order.index(a) for a in range(ndim)]
        whole = xp.transpose(fine, [i for a in at for i in (a, ndim + a)])
        whole = whole.reshape([self._padded[a] for a in at])
        keep = tuple(slice(self.coded[a]) for a in self._order[:-1])
        return xp.transpose(whole, self._order)[keep]

    def join_scales(self, per_block: Array) -> Array:
        """(blocks,) -> the scales' shape."""
        inverse = np.argsort(self._order)
        return self.xp.transpose(per_block.reshape(self._grid), tuple(int(i) for i in inverse))

    def split_scales(self, scales: Array) -> Array:
        """The scales' shape -> (blocks,)."""
        return self.xp.transpose(scales, self._order).reshape(self.blocks)

    def real(self) -> Array:
        """Bool (blocks, block_size): False on the padding."""
        return self.split(self.xp.ones(self.coded, dtype=bool))

    @property
    def index(self) -> Array:
        """Each block's C-order position in the scales array, in the order of `split`'s rows."""
        numbers = self.xp.arange(self.blocks, dtype=self.xp.uint64).reshape(self.grid)
        return self.split_scales(numbers)


def _encode(
    x: Array, spec: QuantSpec, stream: Stream | None, previous_amax: Array | None, xp: Any
) -> tuple[BlockLayout, EncodedBlocks, Array, QuantStats]:
    """Encode float32 x: the layout, what is stored, its values (blocks, block_size), and counts."""
    layout = BlockLayout(spec, tuple(x.shape), xp)
    if spec.transform:
        rotated = hadamard(xp.moveaxis(x, spec.axis, -1), spec.transform, xp)
        x = xp.moveaxis(rotated, -1, spec.axis)
    blocks = layout.split(x)
    words = None
    if spec.rounding == "stochastic":
        assert stream is not None
        words = random_words(stream, layout.index, layout.block_size, spec.rbits, xp)
    before = None if previous_amax is None else layout.split_scales(previous_amax)
    if spec.is_affine:
        encoded = encode_affine(blocks, layout.real, spec, layout.along, words, xp)
        values = decode_affine(encoded.codes, encoded, spec, layout.along, xp)
    else:
        encoded = encode_blocks(blocks, layout.real, spec, words, before, xp)
        values = decode_blocks(
            encoded.codes, encoded.scales, spec, encoded.tensor_scale, encoded.zero_points, xp
        )
    # Padding counts nowhere: it is zero, and no zero saturates.
    saturated = int(xp.count_nonzero(encoded.saturated))
    flushed = int(xp.count_nonzero((blocks != 0) & (values == 0)))
    return layout, encoded, values, QuantStats(math.prod(layout.coded), saturated, flushed)


def quantize_blocks(
    x: Array, spec: QuantSpec, stream: Stream | None, previous_amax: Array | None, xp: Any
) -> tuple[QuantArray, QuantStats]:
    """Quantize float32 x under a resolved spec. The caller has checked the arguments."""
    layout, encoded, _, stats = _encode(x, spec, stream, previous_amax, xp)
    codes = pack(layout.join(encoded.codes), spec.row.element.bits, xp)
    whole = {
        name: xp.ascontiguousarray(layout.join_scales(part))
        for name in ("zero_points", "minimums")
        if (part := getattr(encoded, name)) is not None
    }
    for name in ("super_scales", "super_minimums"):
        if (part := getattr(encoded, name)) is not None:
            whole[name] = join_super(part, spec, super_grid(spec, tuple(x.shape)), xp)
    q = QuantArray(
        codes=xp.ascontiguousarray(xp.moveaxis(codes, -1, spec.axis)),
        scales=xp.ascontiguousarray(layout.join_scales(encoded.scales)),
        spec=spec,
        shape=tuple(x.shape),
        tensor_scale=encoded.tensor_scale,
        **whole,
    )
    return q, stats


def fake_quantize_blocks(
    x: Array, spec: QuantSpec, stream: Stream | None, xp: Any
) -> tuple[Array, QuantStats]:
    """What `decode_array` gives of `quantize_blocks`, without packing codes in between."""
    layout, _, values, stats = _encode(x, spec, stream, None, xp)
    return layout.join(values)[..., : layout.coded[spec.axis]], stats


def clip_mask(x: Array, q: QuantArray, xp: Any) -> Array:
    """Where |x| is within its block's largest value, one bit a value: what clipping left alone.

    Args:
        x: the float32 array that q was made from.
        q: symmetric blocks.
        xp: the array module.

    Returns:
        uint8 of q's coded shape with eight values a byte along the axis, the first in the lowest
        bit. Blocks with NaN have no such value.
    """
    spec = q.spec
    layout = BlockLayout(spec, q.shape, xp)
    if spec.transform:
        x = xp.moveaxis(hadamard(xp.moveaxis(x, spec.axis, -1), spec.transform, xp), -1, spec.axis)
    top = xp.full((layout.blocks, 1), spec.row.element.max_magnitude_code, dtype=xp.uint8)
    limit = decode_blocks(top, layout.split_scales(q.scales), spec, q.tensor_scale, None, xp)
    inside = layout.join(xp.abs(layout.split(x)) <= limit)[..., : layout.coded[spec.axis]]
    inside = xp.pad(inside, [(0, 0)] * (inside.ndim - 1) + [(0, -inside.shape[-1] % 8)])
    bits = xp.packbits(inside.reshape(-1), bitorder="little")
    bits = bits.reshape(*inside.shape[:-1], inside.shape[-1] // 8)
    return xp.ascontiguousarray(xp.moveaxis(bits, -1, spec.axis))


def decode_array(q: QuantArray, xp: Any) -> Array:
    """Decode a stored array to float32, with the block axis last.

    A Hadamard transform is not undone, and its padding stays.
    """
    spec = q.spec
    layout = BlockLayout(spec, q.shape, xp)
    length = layout.coded[spec.axis]
    codes = unpack(xp.moveaxis(q.codes, spec.axis, -1), spec.row.element.bits, length, xp)
    blocks = layout.split(xp.moveaxis(codes, -1, spec.axis))
    if spec.is_affine:
        values = decode_affine(blocks, _stored_blocks(q, layout, xp), spec, layout.along, xp)
    else:
        zero_points = None if q.zero_points is None else layout.split_scales(q.zero_points)
        values = decode_blocks(
            blocks, layout.split_scales(q.scales), spec, q.tensor_scale, zero_points, xp
        )
    return layout.join(values)[..., :length]


def _stored_blocks(q: QuantArray, layout: BlockLayout, xp: Any) -> EncodedBlocks:
    """Scales, minimums and those of super-blocks, one after the other."""
    found = EncodedBlocks(None, layout.split_scales(q.scales), None)
    if q.minimums is not None:
        found.minimums = layout.split_scales(q.minimums)
    if q.super_scales is not None:
        found.super_scales = split_super(q.super_scales, q.spec, xp)
    if q.super_minimums is not None:
        found.super_minimums = split_super(q.super_minimums, q.spec, xp)
    return found
