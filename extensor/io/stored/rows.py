"""How other programs store blocked weights in safetensors files, a row for each layout.

A weight is two to four tensors whose names share a stem: codes, scales, and what else there is. A
row says their names and dtypes, how codes are packed, and whether the scale of the tensor is stored
as its reciprocal. Reading and writing follow the row, so that each direction is the other's inverse
and no number is rounded.

    dtypes                     a weight is known by the dtypes of its parts, not by config.json,
                               so that a file may hold several layouts, and weights left alone
    tensor scale, multiplies   ModelOpt (weight_scale_2)
    tensor scale, divides      compressed-tensors (weight_global_scale)
    int32                      compressed-tensors: codes plus half their range, lowest bits first
    blocks                     gpt-oss: (experts, rows, blocks, 16), of the transposed weight

Sources: the compressors of compressed-tensors 0.20; modelopt.torch.export of Model-Optimizer 0.47;
transformers' integrations of mxfp4 and finegrained_fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from extensor.quant.array import QuantArray
from extensor.quant.rounding import pack, unpack
from extensor.quant.spec import QuantSpec
from extensor.quant.views import transpose

__all__ = [
    "WEIGHT_LAYOUTS", "Part", "WeightLayout", "Written", "read_weight", "reciprocal_of",
    "write_weight",
]  # fmt: skip

Array = npt.NDArray[Any]
Packing = Literal["bytes", "int32", "blocks"]

Written = dict[str, tuple[str, tuple[int, ...], Array]]
"""(dtype, shape, array) of stored tensors, by name or suffix."""

_FLOATS = ("F32", "BF16", "F16")
_GROUPS = (128, 64, 32, 256, 16)


@dataclass(frozen=True)
class Part:
    """One tensor of a stored weight.

    Attributes:
        suffix: what follows the stem in its name.
        dtypes: the container's names of the dtypes that it may have; the first is written.
    """

    suffix: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class WeightLayout:
    """One layout of a blocked weight.

    Attributes:
        name: of the layout, as `convert` takes it.
        program: whose it is, or that reads it: ``quant_method`` in config.json.
        doc: one line for tables.
        spec: how floats are quantized into it; the tile of what is read follows its scales.
        codes, scales: these parts.
        tensor_scale: the float32 scale of the whole weight; None without.
        zero_points: the part, in layouts that may have one.
        shape: the part that holds the weight's shape, where packing hides it.
        packing: of the codes.
        reciprocal: True if the tensor scale divides.
        target: the end of the weight's own name.
        tiles: the tiles that the layout can say: of (rows, columns) 0 stands for any number.

    >>> from extensor.io.stored import WEIGHT_LAYOUTS
    >>> row = WEIGHT_LAYOUTS["compressed-tensors-nvfp4"]
    >>> row.tensor_scale.suffix, row.reciprocal
    ('.weight_global_scale', True)
    """

    name: str
    program: str
    doc: str
    spec: QuantSpec
    codes: Part
    scales: Part
    tensor_scale: Part | None = None
    zero_points: Part | None = None
    shape: Part | None = None
    packing: Packing = "bytes"
    reciprocal: bool = False
    target: str = ".weight"
    tiles: tuple[Any, ...] = ((1, 0),)

    @property
    def required(self) -> tuple[Part, ...]:
        """The parts that every weight has."""
        parts = self.codes, self.scales, self.tensor_scale, self.shape
        return tuple(part for part in parts if part is not None)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        return self.required if self.zero_points is None else (*self.required, self.zero_points)

    def stores(self, spec: QuantSpec, ndim: int) -> bool:
        """Whether a weight of this spec can be written as it is.

        Args:
            spec: resolved.
            ndim: axes of the weight.
        """
        mine = self.spec.resolve(ndim)
        same = (spec.row.element, spec.row.scale, spec.row.tensor_scale, spec.is_affine)
        tile = spec.tile
        fits = any(
            tile == want
            or (
                isinstance(tile, tuple)
                and isinstance(want, tuple)
                and all(w in (0, t) for w, t in zip(want, tile, strict=True))
            )
            for want in self.tiles
        )
        return (
            same == (mine.row.element, mine.row.scale, mine.row.tensor_scale, False)
            and fits
            and spec.axis == mine.axis
            and spec.transform is None
            and not spec.row.outliers
            and (spec.symmetric or self.zero_points is not None)
        )


_E8M0 = ("U8", "F8_E8M0")


def _compressed(
    name: str, doc: str, spec: QuantSpec, codes: Part, scales: Part, **more: Any
) -> Any:
    return WeightLayout(
        f"compressed-tensors-{name}", "compressed-tensors", doc, spec, codes, scales, **more
    )


def _integers(bits: int, **fields: Any) -> QuantSpec:
    return QuantSpec(f"int{bits}", **fields)


_FP8_WEIGHT = Part(".weight", ("F8_E4M3",))
_FLOAT_SCALE = Part(".weight_scale", _FLOATS)
_INT32: dict[str, Any] = {
    "codes": Part(".weight_packed", ("I32",)),
    "scales": _FLOAT_SCALE,
    "zero_points": Part(".weight_zero_point", ("I32",)),
    "shape": Part(".weight_shape", ("I64", "I32")),
    "packing": "int32",
    "tiles": ((1, 0), "channel"),
}
_ROWS: tuple[WeightLayout, ...] = (
    WeightLayout(
        "gpt-oss-mxfp4", "mxfp4", "gpt-oss: experts' blocks and scales, transposed",
        QuantSpec("mxfp4"),
        Part("_blocks", ("U8",)), Part("_scales", ("U8",)),
        packing="blocks", target="", tiles=((1, 32),),
    ),
    _compressed(
        "nvfp4", "nvfp4-pack-quantized; the global scale divides", QuantSpec("nvfp4"),
        Part(".weight_packed", ("U8",)), Part(".weight_scale", ("F8_E4M3",)),
        tensor_scale=Part(".weight_global_scale", ("F32",)), reciprocal=True, tiles=((1, 16),),
    ),
    _compressed(
        "mxfp4", "mxfp4-pack-quantized", QuantSpec("mxfp4"),
        Part(".weight_packed", ("U8",)), Part(".weight_scale", _E8M0), tiles=((1, 32),),
    ),
    _compressed(
        "int4", "pack-quantized, 4 bits in groups of 128", _integers(4, tile=(1, 128)), **_INT32
    ),
    _compressed(
        "int8", "pack-quantized, 8 bits in groups of 128", _integers(8, tile=(1, 128)), **_INT32
    ),
    WeightLayout(
        "modelopt-nvfp4", "modelopt", "Model-Optimizer's NVFP4; weight_scale_2 multiplies",
        QuantSpec("nvfp4"),
        Part(".weight", ("U8",)), Part(".weight_scale", ("F8_E4M3",)),
        tensor_scale=Part(".weight_scale_2", ("F32",)), tiles=((1, 16),),
    ),
    WeightLayout(
        "deepseek-fp8", "fp8", "FP8 in tiles of 128x128; weight_scale_inv multiplies",
        QuantSpec("fp8_e4m3", tile=(128, 128)), _FP8_WEIGHT, Part(".weight_scale_inv", _FLOATS),
        tiles=((128, 128),),
    ),
    WeightLayout(
        "modelopt-fp8", "modelopt", "Model-Optimizer's FP8, one scale for a weight",
        QuantSpec("fp8_e4m3", tile="tensor"), _FP8_WEIGHT, _FLOAT_SCALE, tiles=("tensor",),
    ),
    _compressed(
        "fp8-tensor", "float-quantized, one scale for a weight",
        QuantSpec("fp8_e4m3", tile="tensor"), _FP8_WEIGHT, _FLOAT_SCALE, tiles=("tensor",),
    ),
    _compressed(
        "fp8-channel", "float-quantized, a scale for each row",
        QuantSpec("fp8_e4m3", tile="channel"), _FP8_WEIGHT, _FLOAT_SCALE, tiles=("channel",),
    ),
    _compressed(
        "fp8-block", "float-quantized, tiles of 128x128",
        QuantSpec("fp8_e4m3", tile=(128, 128)), _FP8_WEIGHT, _FLOAT_SCALE, tiles=((128, 128),),
    ),
    *(
        WeightLayout(
            f"safetensors-{name}", "extensor", f"dtype {dtype} with F8_E8M0 scales",
            QuantSpec(name), Part(".weight", (dtype,)), Part(".weight_scale", ("F8_E8M0",)),
            tiles=((1, 32),),
        )
        for name, dtype in (
            ("mxfp4", "F4"), ("mxfp6_e2m3", "F6_E2M3"), ("mxfp6_e3m2", "F6_E3M2"),
            ("mxfp8_e4m3", "F8_E4M3"), ("mxfp8_e5m2", "F8_E5M2"),
        )
    ),
    WeightLayout(
        "safetensors-nvfp4", "extensor", "dtype F4 with F8_E4M3 scales; weight_scale_2 multiplies",
        QuantSpec("nvfp4"), Part(".weight", ("F4",)), Part(".weight_scale", ("F8_E4M3",)),
        tensor_scale=Part(".weight_scale_2", ("F32",)), tiles=((1, 16),),
    ),
)  # fmt: skip

WEIGHT_LAYOUTS: MappingProxyType[str, WeightLayout] = MappingProxyType(
    {row.name: row for row in _ROWS}
)
"""Every layout of blocked weights in safetensors files, by name."""


def read_weight(
    layout: WeightLayout,
    parts: Mapping[str, Array],
    shape: tuple[int, ...] | None = None,
    block: tuple[int, int] = (128, 128),
) -> QuantArray:
    """Assemble a weight from its stored parts.

    Args:
        layout: the row.
        parts: arrays by suffix, as `SafetensorsFile.array` gives them; copied.
        shape: of the weight, where the codes' dtype is a packed one.
        block: tile of scales that are fewer than the rows, as config.json says it.

    Returns:
        The weight, blocked along its last axis; transposed where the layout is.

    Raises:
        ValueError: if the parts do not fit each other.
    """
    codes = np.array(parts[layout.codes.suffix])
    scales = parts[layout.scales.suffix]
    codes, shape, bits = _unpacked(layout, codes, parts, shape)
    spec = layout.spec
    if layout.packing == "int32":
        spec = spec.replace(format=f"int{bits}")
    stored: dict[str, Array] = {"scales": _scales(scales)}
    spec = spec.replace(tile=_tile_of(layout, stored["scales"], shape, block)).resolve(len(shape))
    if spec.tile == "tensor":
        stored["scales"] = stored["scales"].reshape((1,) * len(shape))
    if layout.tensor_scale is not None:
        scale = np.array(parts[layout.tensor_scale.suffix], np.float32).reshape(-1)
        if scale.size != 1 or not (np.isfinite(scale[0]) and scale[0] > 0):
            raise ValueError(
                f"{layout.tensor_scale.suffix}: expected one positive number, got {scale}"
            )
        value = np.float32(1) / scale[0] if layout.reciprocal else scale[0]
        stored["tensor_scale"] = np.asarray(value, np.float32)
    if layout.zero_points is not None and layout.zero_points.suffix in parts:
        spec = spec.replace(symmetric=False)
        points = parts[layout.zero_points.suffix]
        stored["zero_points"] = _zero_points(points, stored["scales"].shape, bits)
    if stored["scales"].dtype == np.float16:
        spec = spec.replace(scale_dtype="float16")
    q = QuantArray(codes=codes, spec=spec, shape=shape, **stored)
    if layout.packing == "blocks":
        return transpose(q, (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))
    return q


def write_weight(
    layout: WeightLayout, q: QuantArray
) -> dict[str, tuple[str, tuple[int, ...], Array]]:
    """The stored parts of a weight: (dtype, shape, array) by suffix.

    Args:
        layout: a row that `stores` the weight's spec.
        q: the weight.

    Returns:
        What goes into the file.

    Raises:
        ValueError: if the layout cannot hold the weight.
    """
    if layout.packing == "blocks":
        ndim = len(q.shape)
        if q.spec.axis == ndim - 2:
            q = transpose(q, (*range(ndim - 2), ndim - 1, ndim - 2))
    if not layout.stores(q.spec, len(q.shape)):
        raise ValueError(f"{layout.name}: expected {layout.spec}, got {q.spec}")
    bits, codes = q.spec.row.element.bits, np.ascontiguousarray(q.codes)
    out: Written = {}

    def put(part: Part, array: Array, dtype: str | None = None, shape: Any = None) -> None:
        out[part.suffix] = (dtype or part.dtypes[0], tuple(shape or array.shape), array)

    if layout.packing == "blocks":
        put(layout.codes, codes.reshape(*codes.shape[:-1], -1, 16))
    elif layout.packing == "int32":
        put(layout.codes, _to_int32(_shifted(codes, bits, q.shape[-1])))
    elif layout.codes.dtypes[0] in ("F4", "F6_E2M3", "F6_E3M2"):
        put(layout.codes, codes[..., : -(-q.shape[-1] * bits // 8)], shape=q.shape)
    else:
        put(layout.codes, codes[..., : -(-q.shape[-1] * bits // 8)])
    scales = np.ascontiguousarray(q.scales)
    if layout.packing == "int32" or layout.scales.dtypes == _FLOATS:
        if q.spec.tile == "tensor":
            scales = scales.reshape(1) if layout.program != "modelopt" else scales.reshape(())
        # Float32 whatever they were: readers multiply in the dtype of the scales.
        put(layout.scales, scales.astype(np.float32), "F32")
    else:
        put(layout.scales, scales)
    if layout.tensor_scale is not None and q.tensor_scale is not None:
        scale = np.float32(q.tensor_scale)
        if layout.reciprocal:
            scale, exact = reciprocal_of(scale)
            if not exact:
                raise ValueError(
                    f"{layout.name}: {float(q.tensor_scale)!r} is no float32's reciprocal; "
                    "quantize the weight anew, or use a layout whose tensor scale multiplies"
                )
        one = () if layout.program == "modelopt" else (1,)
        put(layout.tensor_scale, np.asarray(scale, np.float32).reshape(one))
    if layout.zero_points is not None and q.zero_points is not None:
        points = np.ascontiguousarray(q.zero_points.T).view(np.uint8) & np.uint8((1 << bits) - 1)
        packed = _to_int32(_shifted(pack(points, bits), bits, points.shape[-1]))
        put(layout.zero_points, np.ascontiguousarray(packed.T))
    if layout.shape is not None:
        put(layout.shape, np.array(q.shape, np.int64))
    return out


def reciprocal_of(scale: np.float32) -> tuple[np.float32, bool]:
    """The float32 whose reciprocal is nearest to a scale, and whether it is the scale."""
    with np.errstate(over="ignore", divide="ignore"):
        guess = np.float32(1) / np.float32(scale)
        near = [np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(np.inf))]
        best = min(near, key=lambda d: abs(float(np.float32(1) / d) - float(scale)))
        return best, bool(np.float32(1) / best == scale)


def _unpacked(
    layout: WeightLayout, codes: Array, parts: Mapping[str, Array], shape: tuple[int, ...] | None
) -> tuple[Array, tuple[int, ...], int]:
    """Codes as this project packs them, the weight's shape, and the bits of a code."""
    bits = layout.spec.row.element.bits
    if layout.packing == "blocks":
        flat = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
        return flat, (*flat.shape[:-1], 2 * flat.shape[-1]), bits
    if layout.packing == "int32":
        assert layout.shape is not None
        shape = tuple(int(n) for n in parts[layout.shape.suffix].reshape(-1))
        words = codes.shape[-1]
        found = [b for b in (4, 5, 6, 8) if -(-shape[-1] * b // 32) == words]
        if len(codes.shape) != len(shape) or codes.shape[:-1] != shape[:-1] or not found:
            raise ValueError(
                f"{layout.codes.suffix} of shape {codes.shape} for a weight of {shape}"
            )
        flat = np.ascontiguousarray(codes).view(np.uint8)
        return _shifted(flat, found[0], shape[-1]), shape, found[0]
    if shape is None or layout.codes.dtypes[0] == "U8":
        shape = (*codes.shape[:-1], codes.shape[-1] * 8 // bits)
    return codes.view(np.uint8), shape, bits


def _shifted(packed: Array, bits: int, length: int) -> Array:
    """Packed codes with half the range added or taken away: two's complement and back."""
    if bits in (4, 8):
        flipped = packed ^ np.uint8(0x88 if bits == 4 else 0x80)
        if length * bits % 8:  # the padding's nibble stays 0
            flipped = pack(unpack(flipped, bits, length), bits)
        return flipped[..., : -(-length * bits // 8)]
    return pack(unpack(packed, bits, length) ^ np.uint8(1 << (bits - 1)), bits)


def _to_int32(packed: Array) -> Array:
    """Bytes of rows as int32, padded with zeros."""
    short = -packed.shape[-1] % 4
    padded = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, short)])
    return np.ascontiguousarray(padded).view(np.int32)


def _zero_points(packed: Array, grid: tuple[int, ...], bits: int) -> Array:
    """Zero points packed along the rows -> int8 of the scales' shape."""
    columns = np.ascontiguousarray(np.ascontiguousarray(packed).T).view(np.uint8)
    codes = unpack(_shifted(columns, bits, grid[0]), bits, grid[0]).astype(np.int16)
    codes -= (codes >= 1 << (bits - 1)) * np.int16(1 << bits)
    return np.ascontiguousarray(codes.astype(np.int8).T)


def _scales(scales: Array) -> Array:
    """Stored scales as this project keeps them: bytes, float16 or float32."""
    if scales.dtype.itemsize == 1:
        return np.array(scales).view(np.uint8)
    return np.array(scales, np.float16 if scales.dtype == np.float16 else np.float32)


def _tile_of(
    layout: WeightLayout, scales: Array, shape: tuple[int, ...], block: tuple[int, int]
) -> Any:
    """The tile that the number of scales says."""
    floats = layout.spec.has_float_scales
    if floats and scales.size == 1:
        return "tensor"
    if scales.shape[:-1] == shape[:-1]:
        columns = scales.shape[-1]
        if floats and columns == 1:
            return "channel"
        wanted = next((t[1] for t in layout.tiles if isinstance(t, tuple) and t[0] == 1), 0)
        # Of group sizes that give so many scales the usual one; a last group may be shorter.
        sizes = (wanted,) if wanted else (*_GROUPS, -(-shape[-1] // max(columns, 1)))
        for size in sizes:
            if size and -(-shape[-1] // size) == columns:
                return (1, size)
    grid = tuple(-(-n // b) for n, b in zip(shape[-2:], block, strict=False))
    if floats and scales.shape == (*shape[:-2], *grid):
        return block
    raise ValueError(
        f"{layout.name}: scales of shape {scales.shape} do not fit a weight of shape {shape}"
    )
