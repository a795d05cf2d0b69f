"""Conversion of `QuantArray`s to and from other programs' layouts of MXFP4 and NVFP4.

Values stay the same; only the order of nibbles, scales and bytes changes. A value that a layout
cannot store, such as a NaN block in gguf, is an error.

`LAYOUTS` lists the layouts. gguf's records run along rows. The Mojo original's run over the
flattened tensor, so that a block may cross rows, and its NVFP4 has no tensor scale. Both interleave
scales and codes in one array.

Sources: ggml's block_mxfp4 and block_nvfp4; MXFP4Block and NVFP4Block of the Mojo original; for
swizzled scales the layout that cuBLAS documents for block-scaled matrices (128x4 tiles).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.quant.array import QuantArray, block_grid, packed_length
from extensor.quant.rounding import pack, unpack
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import QuantSpec

__all__ = [
    "LAYOUTS",
    "Layout",
    "from_gguf_mxfp4",
    "from_gguf_nvfp4",
    "from_mojo_mxfp4",
    "from_mojo_nvfp4",
    "from_swizzled_scales",
    "to_gguf_mxfp4",
    "to_gguf_nvfp4",
    "to_mojo_mxfp4",
    "to_mojo_nvfp4",
    "to_swizzled_scales",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """A layout of a format's codes and scales.

    Attributes:
        name: the program that uses it.
        format: the format's name.
        record: the order of scales and codes.
        first_bytes: for the first two bytes of codes, the elements in (low nibble, high nibble).
        tensor_scale: where the tensor's float32 scale is stored.
        nan: whether a NaN block can be stored.

    >>> from extensor.io.layouts import LAYOUTS
    >>> [(layout.name, layout.format) for layout in LAYOUTS if not layout.nan]
    [('gguf', 'mxfp4'), ('gguf', 'nvfp4'), ('Mojo original', 'nvfp4')]
    """

    name: str
    format: str
    record: str
    first_bytes: tuple[tuple[int, int], tuple[int, int]]
    tensor_scale: str
    nan: bool


_APART = "codes and scales in arrays of their own"
LAYOUTS = (
    Layout("this project", "mxfp4", _APART, ((0, 1), (2, 3)), "-", True),
    Layout("this project", "nvfp4", _APART, ((0, 1), (2, 3)), "an array", True),
    Layout("gguf", "mxfp4", "scale, 16 bytes; per row", ((0, 16), (1, 17)), "-", False),
    Layout("gguf", "nvfp4", "4 scales, 4 x 8 bytes; per row", ((0, 8), (1, 9)), "a tensor", False),
    Layout("Mojo original", "mxfp4", "16 bytes, scale; flattened", ((1, 0), (3, 2)), "-", True),
    Layout("Mojo original", "nvfp4", "8 bytes, scale; flattened", ((1, 0), (3, 2)), "none", False),
)
"""The layouts of this module, for tables."""

_MX, _NV = QuantSpec("mxfp4"), QuantSpec("nvfp4")
_NV_NAN = 0x7F
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def to_gguf_mxfp4(q: QuantArray) -> Array:
    """MXFP4 -> gguf's records, 17 bytes for each block of 32: the scale, then the codes.

    Args:
        q: MXFP4 of shape (..., K) in blocks of 32 along the last axis.

    Returns:
        uint8 of shape (..., K / 32 * 17).

    Raises:
        ValueError: if q is not such an array, if K is not a multiple of 32, or if a block is NaN,
            which gguf cannot store.

    >>> from extensor.io.layouts import to_gguf_mxfp4
    >>> to_gguf_mxfp4(et.ones((4, 64)).to_mxfp4().data).shape
    (4, 34)
    """
    codes = _blocks(q, _MX, "gguf MXFP4")
    _refuse_nan(q.scales, E8M0_NAN, "gguf MXFP4")
    halves = codes[..., :16] | codes[..., 16:] << 4
    return _joined(np.concatenate([q.scales[..., None], halves], axis=-1))


def from_gguf_mxfp4(records: Array) -> QuantArray:
    """Records of gguf -> MXFP4.

    Args:
        records: uint8 of shape (..., n * 17).

    Returns:
        MXFP4 of shape (..., n * 32).

    Raises:
        TypeError: if records are not uint8.
        ValueError: if they are not whole, or a scale is 0xFF, which gguf decodes as a number.

    >>> import numpy as np
    >>> from extensor.io.layouts import from_gguf_mxfp4
    >>> from_gguf_mxfp4(np.zeros((4, 34), np.uint8)).shape
    (4, 64)
    """
    whole = _records(records, 17, "gguf MXFP4")
    scales, halves = whole[..., 0], whole[..., 1:]
    _refuse_nan(scales, E8M0_NAN, "gguf MXFP4")
    return _stored(_MX, np.concatenate([halves & 15, halves >> 4], axis=-1), scales)


def to_gguf_nvfp4(q: QuantArray) -> tuple[Array, np.float32]:
    """NVFP4 -> gguf's records, 36 bytes for each 64 values, and the tensor scale.

    gguf keeps the tensor scale in a tensor of its own, beside the records.

    Args:
        q: NVFP4 of shape (..., K) in blocks of 16 along the last axis.

    Returns:
        uint8 of shape (..., K / 64 * 36), and the tensor scale.

    Raises:
        ValueError: if q is not such an array, if K is not a multiple of 64, or if a block is NaN,
            which gguf cannot store.

    >>> from extensor.io.layouts import to_gguf_nvfp4
    >>> records, tensor_scale = to_gguf_nvfp4(et.ones((4, 64)).to_nvfp4().data)
    >>> records.shape
    (4, 36)
    """
    codes = _blocks(q, _NV, "gguf NVFP4", along=64)
    _refuse_nan(q.scales, _NV_NAN, "gguf NVFP4")
    four = (*q.shape[:-1], q.shape[-1] // 64, 4)
    halves = (codes[..., :8] | codes[..., 8:] << 4).reshape(*four[:-1], 32)
    assert q.tensor_scale is not None
    records = np.concatenate([q.scales.reshape(four), halves], axis=-1)
    return _joined(records), np.float32(q.tensor_scale)


def from_gguf_nvfp4(records: Array, tensor_scale: float = 1.0) -> QuantArray:
    """Records of gguf and the tensor scale -> NVFP4.

    Args:
        records: uint8 of shape (..., n * 36).
        tensor_scale: above 0.

    Returns:
        NVFP4 of shape (..., n * 64).

    Raises:
        TypeError: if records are not uint8.
        ValueError: if they are not whole, a scale is NaN or has a sign, or the tensor scale is not
            a positive number.

    >>> import numpy as np
    >>> from extensor.io.layouts import from_gguf_nvfp4
    >>> from_gguf_nvfp4(np.zeros((4, 36), np.uint8), tensor_scale=0.5).shape
    (4, 64)
    """
    whole = _records(records, 36, "gguf NVFP4")
    scales = _joined(whole[..., :4])
    halves = whole[..., 4:].reshape(*scales.shape, 8)
    _refuse_nan(scales, _NV_NAN, "gguf NVFP4")
    _refuse_sign(scales, "gguf NVFP4")
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1)
    return _stored(_NV, codes, scales, tensor_scale)


def to_mojo_mxfp4(q: QuantArray) -> Array:
    """MXFP4 -> the Mojo original's records over the flattened tensor.

    Args:
        q: MXFP4 in blocks of 32 along the last axis.

    Returns:
        uint8 of shape (blocks * 17,).

    Raises:
        ValueError: if q is not such an array, or the rows are not whole blocks.

    >>> from extensor.io.layouts import to_mojo_mxfp4
    >>> to_mojo_mxfp4(et.ones((4, 64)).to_mxfp4().data).shape
    (136,)
    """
    codes = _blocks(q, _MX, "Mojo MXFP4").reshape(-1, 32)
    return np.concatenate([_high_first(codes), q.scales.reshape(-1, 1)], axis=-1).reshape(-1)


def from_mojo_mxfp4(records: Array, shape: tuple[int, ...]) -> QuantArray:
    """The Mojo original's records -> MXFP4.

    Where blocks cross rows (the last length is no multiple of 32) pass the flat length, ``(n,)``:
    the result can be dequantized and then reshaped. Bytes mean what the standard says: scale 0xFF
    is NaN (the original: Inf) and code 1 is 0.5 (the original never wrote it).

    Args:
        records: uint8 of shape (blocks * 17,).
        shape: of the tensor.

    Returns:
        MXFP4 of ``shape``.

    Raises:
        TypeError: if records are not uint8.
        ValueError: if their number does not fit the shape, or blocks would cross rows.

    >>> import numpy as np
    >>> from extensor.io.layouts import from_mojo_mxfp4
    >>> from_mojo_mxfp4(np.zeros(34, np.uint8), (2, 32)).shape
    (2, 32)
    """
    codes, scales = _from_mojo(records, shape, 32, "Mojo MXFP4")
    return _stored(_MX, codes, scales, shape=shape)


def to_mojo_nvfp4(q: QuantArray) -> Array:
    """NVFP4 -> the Mojo original's records over the flattened tensor.

    Args:
        q: NVFP4 with tensor scale 1, in blocks of 16 along the last axis.

    Returns:
        uint8 of shape (blocks * 9,).

    Raises:
        ValueError: if q is not such an array, if the rows are not whole blocks, or if a block is
            NaN, which the original decodes as 480.

    >>> import numpy as np
    >>> from extensor.io.layouts import from_mojo_nvfp4, to_mojo_nvfp4
    >>> to_mojo_nvfp4(from_mojo_nvfp4(np.zeros(18, np.uint8), (2, 16))).shape
    (18,)
    """
    codes = _blocks(q, _NV, "Mojo NVFP4").reshape(-1, 16)
    _refuse_nan(q.scales, _NV_NAN, "Mojo NVFP4")
    assert q.tensor_scale is not None
    if q.tensor_scale != 1:
        raise ValueError(
            f"Mojo NVFP4 has no tensor scale: expected 1, got {float(q.tensor_scale)}; "
            "call .dequantize() and store float32, or use another layout"
        )
    return np.concatenate([_high_first(codes), q.scales.reshape(-1, 1)], axis=-1).reshape(-1)


def from_mojo_nvfp4(records: Array, shape: tuple[int, ...]) -> QuantArray:
    """The Mojo original's records -> NVFP4 with tensor scale 1.

    Where blocks cross rows (the last length is no multiple of 16) pass the flat length, ``(n,)``.

    Args:
        records: uint8 of shape (blocks * 9,).
        shape: of the tensor.

    Returns:
        NVFP4 of ``shape``.

    Raises:
        TypeError: if records are not uint8.
        ValueError: if their number does not fit the shape, blocks would cross rows, or a scale is
            0x7F: 480 to the original, NaN in the standard.

    >>> import numpy as np
    >>> from extensor.io.layouts import from_mojo_nvfp4
    >>> from_mojo_nvfp4(np.zeros(18, np.uint8), (2, 16)).shape
    (2, 16)
    """
    codes, scales = _from_mojo(records, shape, 16, "Mojo NVFP4")
    _refuse_nan(scales, _NV_NAN, "Mojo NVFP4")
    _refuse_sign(scales, "Mojo NVFP4")
    return _stored(_NV, codes, scales, 1.0, shape=shape)


def to_swizzled_scales(scales: Array) -> Array:
    """Scales of blocks -> the order in which tensor cores read them.

    R is padded with zeros to a multiple of 128 and C to one of 4. Tiles of 128x4 follow each other
    row by row; inside a tile, (r, c) is at 16 * (r % 32) + 4 * (r // 32) + c.

    Args:
        scales: (R, C), one byte each.

    Returns:
        uint8, flat.

    Raises:
        ValueError: if scales are not a matrix of bytes.

    >>> import numpy as np
    >>> from extensor.io.layouts import to_swizzled_scales
    >>> to_swizzled_scales(np.zeros((130, 4), np.uint8)).shape
    (1024,)
    """
    if scales.ndim != 2 or scales.dtype.itemsize != 1:
        raise ValueError(
            f"swizzled scales: expected a matrix of bytes, got {scales.dtype} of shape "
            f"{scales.shape}"
        )
    rows, columns = _tiles(scales.shape)
    short = [
        (0, rows * _TILE_ROWS - scales.shape[0]),
        (0, columns * _TILE_COLUMNS - scales.shape[1]),
    ]
    padded = np.pad(scales.view(np.uint8), short)
    tiles = padded.reshape(rows, 4, 32, columns, _TILE_COLUMNS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def from_swizzled_scales(swizzled: Array, shape: tuple[int, int]) -> Array:
    """The inverse of `to_swizzled_scales`.

    Args:
        swizzled: one byte each, in any shape.
        shape: (R, C) without padding.

    Returns:
        uint8 of ``shape``.

    Raises:
        ValueError: if the number of bytes does not fit the shape.

    >>> import numpy as np
    >>> from extensor.io.layouts import from_swizzled_scales, to_swizzled_scales
    >>> scales = np.arange(32, dtype=np.uint8).reshape(8, 4)
    >>> bool((from_swizzled_scales(to_swizzled_scales(scales), (8, 4)) == scales).all())
    True
    """
    rows, columns = _tiles(shape)
    expected = rows * columns * _TILE_ROWS * _TILE_COLUMNS
    if swizzled.dtype.itemsize != 1 or swizzled.size != expected:
        raise ValueError(
            f"swizzled scales of {shape}: expected {expected} bytes (padded to 128x4), got "
            f"{swizzled.size} of {swizzled.dtype}"
        )
    tiles = swizzled.view(np.uint8).reshape(rows, columns, 32, 4, _TILE_COLUMNS)
    padded = tiles.transpose(0, 3, 2, 1, 4).reshape(rows * _TILE_ROWS, columns * _TILE_COLUMNS)
    return np.ascontiguousarray(padded[: shape[0], : shape[1]])


def _joined(x: Array) -> Array:
    """(..., a, b) -> (..., a * b)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[0] // _TILE_ROWS), -(-shape[1] // _TILE_COLUMNS)


def _blocks(q: QuantArray, expected: QuantSpec, layout: str, along: int = 0) -> Array:
    """Check an array for a layout; its unpacked codes, uint8 (..., blocks, block size)."""
    spec, row = q.spec, expected.row
    tile = row.tile
    same = (spec.row.element, spec.row.scale, spec.tile) == (row.element, row.scale, tile)
    if not same or spec.transform:
        raise ValueError(
            f"{layout}: expected {row.name} in blocks of {tile} without a transform, got "
            f"{spec.format}, tile {spec.tile}, transform {spec.transform}; quantize it so first"
        )
    if spec.axis != len(q.shape) - 1:
        raise ValueError(
            f"{layout}: expected blocks along the last axis, got axis {spec.axis} of shape "
            f"{q.shape}; transpose it first"
        )
    assert isinstance(tile, tuple)
    length, unit = q.shape[-1], along or tile[1]
    if length % unit:
        raise ValueError(
            f"{layout}: expected rows of a multiple of {unit}, got {length}; pad the array first"
        )
    codes = unpack(np.asarray(q.codes), row.element.bits, length)
    return codes.reshape(*q.shape[:-1], length // tile[1], tile[1])


def _stored(
    spec: QuantSpec,
    codes: Array,
    scales: Array,
    tensor_scale: float | None = None,
    shape: tuple[int, ...] | None = None,
) -> QuantArray:
    """Pack codes (..., blocks, block size) and their scales as a QuantArray of ``shape``."""
    shape = (*codes.shape[:-2], codes.shape[-2] * codes.shape[-1]) if shape is None else shape
    spec = spec.resolve(len(shape))
    scale = None
    if tensor_scale is not None:
        scale = np.asarray(tensor_scale, np.float32)
        if scale.shape or not (np.isfinite(scale) and scale > 0):
            raise ValueError(f"tensor scale: expected a positive number, got {tensor_scale!r}")
    packed = pack(_joined(codes), spec.row.element.bits)
    return QuantArray(
        codes=np.array(packed).reshape(*shape[:-1], packed_length(spec, shape)),
        scales=np.array(scales).reshape(block_grid(spec, shape)),
        spec=spec,
        shape=shape,
        tensor_scale=scale,
    )


def _records(records: Array, size: int, layout: str) -> Array:
    """Bytes (..., n * size) -> (..., n, size)."""
    if records.dtype != np.uint8:
        raise TypeError(f"{layout}: expected records of uint8, got {records.dtype}")
    if records.ndim == 0 or records.shape[-1] % size:
        raise ValueError(
            f"{layout}: expected rows of whole records of {size} bytes, got shape {records.shape}"
        )
    return records.reshape(*records.shape[:-1], records.shape[-1] // size, size)


def _from_mojo(
    records: Array, shape: tuple[int, ...], block: int, layout: str
) -> tuple[Array, Array]:
    """Codes (blocks, block size) and scales (blocks,) of flat records."""
    whole = _records(records.reshape(-1), block // 2 + 1, layout)
    count = math.prod(shape)
    if len(shape) > 1 and shape[-1] % block:
        raise ValueError(
            f"{layout}: blocks of {block} cross the rows of {shape}; pass ({count},), and reshape "
            "what .dequantize() gives"
        )
    if not shape or len(whole) != -(-count // block):
        raise ValueError(
            f"{layout}: shape {shape} takes {-(-count // block)} records, got {len(whole)}"
        )
    halves = whole[:, :-1]
    codes = np.stack([halves >> 4, halves & 15], axis=-1).reshape(len(whole), block)
    if np.any(codes.reshape(-1)[count:]):
        raise ValueError(f"{layout}: expected zeros after the {count} values of shape {shape}")
    return codes, whole[:, -1]


def _high_first(codes: Array) -> Array:
    return codes[..., 0::2] << 4 | codes[..., 1::2]


def _refuse_nan(scales: Array, byte: int, layout: str) -> None:
    if np.any(scales == byte):
        at = [int(i) for i in np.argwhere(scales == byte)[0]]
        raise ValueError(
            f"{layout} has no NaN: block {at} has scale 0x{byte:02X}; find where it comes from, "
            "or use a layout that keeps it (safetensors)"
        )


def _refuse_sign(scales: Array, layout: str) -> None:
    if np.any(scales > 0x7F):
        at = [int(i) for i in np.argwhere(scales > 0x7F)[0]]
        raise ValueError(f"{layout}: expected scales without a sign, got one in block {at}")
