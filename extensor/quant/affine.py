"""Blocks with a float minimum, and super-blocks: the stored forms of GGUF's Q4_1 and k-quants.

A block's value is ``scale * (code - least code) + minimum`` with a minimum, and ``scale * code``
without. Under a super-block, a block's scale is an integer times the super-block's float16, and its
minimum is minus an integer times another float16:

    Q4_1          scale and minimum float16
    Q4_K, Q5_K    scale = d * 6 bits, minimum = -(dmin * 6 bits), 8 blocks of 32
    Q6_K          scale = d * int8, 16 blocks of 16

Every product is one float32 operation, in the order of ggml's ``dequantize_row_*``, so that
decoding gives the same bits (Source: ggml-quants.c). Encoding takes the range of a block:

    minimum       m = min(x), under a super-block min(x, 0)
    scale         s = (max(x) - m as stored) / (2**bits - 1), or max |x| / largest code
    super-block   float16(largest s / 63) without a sign, / 127 with one; s = rne(s / that) times it
    code          rne((x - m) / s), saturated; 0 under a scale of zero

A block with NaN or Inf decodes to NaN, under a super-block with all others of the super-block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.formats import ElementFormat
from extensor.quant.codec_types import EncodedBlocks, block_amax, kept_blocks, round_values
from extensor.quant.rounding import decode, round_magnitude, signed
from extensor.quant.scale_encoders import float_scale, half_scale
from extensor.quant.spec import QuantSpec

__all__ = ["decode_affine", "encode_affine", "join_super", "split_super"]

Array = Any


def least_code(element: ElementFormat) -> int:
    """The least code of an integer grid, which stands for the minimum of a block."""
    return -(1 << (element.bits - 1))


def split_super(part: Array, spec: QuantSpec, xp: Any = np) -> Array:
    """A stored array with one entry for each super-block -> (super-blocks,), in a row's order."""
    return xp.moveaxis(part, spec.axis, -1).reshape(-1)


def join_super(flat: Array, spec: QuantSpec, grid: tuple[int, ...], xp: Any = np) -> Array:
    """The inverse of `split_super`, for the stored array's shape ``grid``."""
    moved = (*grid[: spec.axis], *grid[spec.axis + 1 :], grid[spec.axis])
    return xp.ascontiguousarray(xp.moveaxis(flat.reshape(moved), -1, spec.axis))


def decode_affine(
    codes: Array, stored: EncodedBlocks, spec: QuantSpec, along: int, xp: Any = np
) -> Array:
    """Decode unpacked codes (blocks, block_size) to float32.

    Args:
        codes: uint8.
        stored: scales and minimums (blocks,), those of super-blocks (super-blocks,).
        spec: with a minimum or super-blocks.
        along: blocks of one row; a row's blocks follow each other.
        xp: the array module.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scale = stored.scales.astype(xp.float32)
        if stored.super_scales is not None:
            scale = _spread(stored.super_scales, spec, along, xp) * scale
        grid = decode(codes, spec.row.element, xp)
        if stored.minimums is None:
            return grid * scale[:, None]
        minimum = stored.minimums.astype(xp.float32)
        if stored.super_minimums is not None:
            minimum = -(_spread(stored.super_minimums, spec, along, xp) * minimum)
        values = (grid - xp.float32(least_code(spec.row.element))) * scale[:, None]
        return values + minimum[:, None]


def encode_affine(
    x: Array,
    real: Callable[[], Array],
    spec: QuantSpec,
    along: int,
    words: Array | None,
    xp: Any = np,
) -> EncodedBlocks:
    """Encode float32 blocks (blocks, block_size); ``real()`` is False on the padding."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        finite = xp.isfinite(block_amax(x, xp))
        safe = kept_blocks(x, finite, xp)
        if spec.super_block is not None:
            # One block that is not finite makes its whole super-block NaN: integers have no NaN.
            finite = _least_of_super(finite, spec, along, xp)
            safe = kept_blocks(safe, finite, xp)
        encoded = (_with_minimum if spec.minimum else _symmetric)(
            safe, real, spec, along, words, xp
        )
        encoded.saturated = encoded.saturated & finite[:, None]
        encoded.codes = xp.where(finite[:, None], encoded.codes, 0).astype(xp.uint8)
        if encoded.super_scales is None:
            nan = encoded.scales.dtype.type(np.nan)
            encoded.scales = xp.where(finite, encoded.scales, nan)
        else:
            kept = _one_of_super(finite, spec, along, xp)
            encoded.super_scales = xp.where(kept, encoded.super_scales, xp.float16(np.nan))
        return encoded


def _symmetric(
    x: Array, _: Any, spec: QuantSpec, along: int, words: Array | None, xp: Any
) -> EncodedBlocks:
    ratio = block_amax(x, xp) / xp.float32(spec.row.element.max)
    integers, halves, scale = _super_values(ratio, 127, spec, along, xp)
    scaled = xp.where(scale == 0, xp.float32(0), xp.float32(1))[:, None] * x
    codes, saturated = round_values(
        scaled / xp.where(scale == 0, 1, scale)[:, None], spec, words, xp
    )
    return EncodedBlocks(codes, integers.astype(xp.int8), saturated, super_scales=halves)


def _with_minimum(
    x: Array, real: Callable[[], Array], spec: QuantSpec, along: int, words: Array | None, xp: Any
) -> EncodedBlocks:
    element, inside = spec.row.element, real()
    low = xp.where(inside, x, xp.float32(np.inf)).min(axis=1, initial=np.float32(np.inf))
    high = xp.where(inside, x, xp.float32(-np.inf)).max(axis=1, initial=np.float32(-np.inf))
    low, high = (xp.where(xp.isfinite(end), end, xp.float32(0)) for end in (low, high))
    levels = xp.float32((1 << element.bits) - 1)
    found = EncodedBlocks(None, None, None)
    if spec.super_block is None:
        found.minimums = _as_stored(low, spec, xp)
        minimum = found.minimums.astype(xp.float32)
        found.scales, scale = float_scale(_span(high, minimum, xp) / levels, spec, xp)
    else:
        depth = xp.maximum(-low, xp.float32(0))
        found.minimums, found.super_minimums, size = _super_values(depth, 63, spec, along, xp)
        minimum = -size
        ratio = _span(high, minimum, xp) / levels
        found.scales, found.super_scales, scale = _super_values(ratio, 63, spec, along, xp)
    scaled = (x - minimum[:, None]) / xp.where(scale == 0, 1, scale)[:, None]
    if spec.element_scale != 1.0:
        scaled = scaled * xp.float32(spec.element_scale)
    # Rounded around the grid's middle, whose magnitudes the rounding covers twice over.
    steps = signed(round_magnitude(scaled, element, words, spec.ties, xp), xp.signbit(scaled), xp)
    steps = xp.where((scale == 0)[:, None], 0, steps)
    found.saturated = inside & ((steps < 0) | (steps > int(levels)))
    codes = (xp.clip(steps, 0, int(levels)) + least_code(element)) & ((1 << element.bits) - 1)
    found.codes = xp.where(inside, codes, 0).astype(xp.uint8)
    return found


def _span(high: Array, minimum: Array, xp: Any) -> Array:
    return xp.maximum(high - minimum, xp.float32(0))


def _as_stored(values: Array, spec: QuantSpec, xp: Any) -> Array:
    """Float32 minimums in the dtype of the scales; what float16 cannot hold takes its largest."""
    if spec.scale_name == "float32":
        return values
    largest = xp.float32(np.finfo(np.float16).max)
    return xp.clip(values, -largest, largest).astype(xp.float16)


def _super_values(
    ratio: Array, most: int, spec: QuantSpec, along: int, xp: Any
) -> tuple[Array, Array, Array]:
    """Integers (blocks,) up to ``most``, float16 (super-blocks,), and their float32 products."""
    per = _blocks_per_super(spec)
    rows = _padded(ratio, per, along, xp)
    halves = half_scale(rows.max(axis=-1, initial=0).reshape(-1) / xp.float32(most), xp)
    unit = _spread(halves, spec, along, xp)
    integers = xp.clip(xp.rint(ratio / xp.where(unit == 0, 1, unit)), 0, most).astype(xp.uint8)
    return integers, halves, unit * integers.astype(xp.float32)


def _blocks_per_super(spec: QuantSpec) -> int:
    assert spec.super_block is not None and isinstance(spec.tile, tuple)
    return spec.super_block // spec.tile[1]


def _padded(values: Array, per: int, along: int, xp: Any) -> Array:
    """(blocks,) -> (rows, super-blocks of a row, blocks of a super-block), padded with zeros."""
    rows = values.reshape(-1, along) if along else values.reshape(0, 0)
    rows = xp.pad(rows, [(0, 0), (0, -along % per)])
    return rows.reshape(rows.shape[0], rows.shape[1] // per, per)


def _spread(halves: Array, spec: QuantSpec, along: int, xp: Any) -> Array:
    """(super-blocks,) -> the float32 of each block."""
    per = _blocks_per_super(spec)
    count = -(-along // per)
    rows = halves.astype(xp.float32).reshape(-1, count) if count else halves.reshape(0, 0)
    return xp.repeat(rows, per, axis=1)[:, :along].reshape(-1)


def _one_of_super(flags: Array, spec: QuantSpec, along: int, xp: Any) -> Array:
    """Bool (blocks,) -> whether all of a super-block are True, (super-blocks,)."""
    missing = _padded(~flags, _blocks_per_super(spec), along, xp)
    return ~missing.any(axis=-1).reshape(-1)


def _least_of_super(flags: Array, spec: QuantSpec, along: int, xp: Any) -> Array:
    """The same for each block."""
    if not len(flags):
        return flags
    return _spread(_one_of_super(flags, spec, along, xp), spec, along, xp) != 0
