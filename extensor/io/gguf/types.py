"""The tensor types of GGUF, a row for each: how a record lies in bytes, and what it is here.

A GGUF tensor is rows of records, each with the scale and the codes of 32 to 256 values. Reading a
type takes its records apart: codes, scales and minimums become the parts of a `QuantArray`, in this
project's order. Nothing is rounded, and writing gives the same bytes back.

Four-bit types pack the value i of a run in the low nibble of byte i, and the value i + n in the
high one, n being half the run: 16 of 32 values (Q4_0, Q4_1, MXFP4), 8 of 16 (NVFP4), 32 of 64
(Q4_K, Q5_K). Codes without a sign (0 to 15) are stored minus 8 here, as two's complement.

Source: ggml-common.h (the structs) and ggml-quants.c (their meaning).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from extensor.quant.array import QuantArray, block_grid, super_grid
from extensor.quant.rounding import pack, unpack
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import QuantSpec

__all__ = ["GGUF_TYPES", "UNREADABLE_GGUF_TYPES", "GgufType", "gguf_type_of"]

Array = npt.NDArray[Any]
Parts = dict[str, Array]


@dataclass(frozen=True)
class GgufType:
    """One tensor type of GGUF.

    Attributes:
        name: ggml's name, such as Q4_1.
        number: ggml's number, as it stands in files.
        values: of one record.
        size: bytes of one record.
        spec: what a tensor of the type is here; None for a dense one.
        dtype: numpy's dtype of a dense type; None for a blocked one.
        unpack: records (rows, records, size) -> parts, each (rows, ...).
        pack: parts -> records.

    >>> from extensor.io.gguf import GGUF_TYPES
    >>> row = GGUF_TYPES["Q4_1"]
    >>> row.values, row.size, row.spec.minimum
    (32, 20, True)
    """

    name: str
    number: int
    values: int
    size: int
    spec: QuantSpec | None = None
    dtype: np.dtype[Any] | None = None
    unpack: Callable[[Array], Parts] | None = None
    pack: Callable[[Mapping[str, Array]], Array] | None = None

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor.

        Args:
            shape: its shape, rows along the last axis.

        Raises:
            ValueError: if rows are not whole records.

        >>> from extensor.io.gguf import GGUF_TYPES
        >>> GGUF_TYPES["Q4_1"].nbytes((4, 64))
        160
        """
        length = shape[-1] if shape else 1
        if length % self.values:
            raise ValueError(
                f"{self.name}: expected rows of a multiple of {self.values} values, got {length}"
            )
        count = 1
        for n in shape:
            count *= n
        return count // self.values * self.size

    def read(self, content: Array, shape: tuple[int, ...]) -> Array | QuantArray:
        """A tensor from its bytes.

        Args:
            content: uint8, `nbytes` of them; copied, never kept.
            shape: of the tensor.

        Returns:
            A numpy array, or a QuantArray with the codes and scales of the file.

        Raises:
            ValueError: if the bytes do not fit the shape, or hold what cannot be stored.

        >>> import numpy as np
        >>> from extensor.io.gguf import GGUF_TYPES
        >>> GGUF_TYPES["Q8_0"].read(np.zeros(68, np.uint8), (2, 32)).spec.scale_dtype
        'float16'
        """
        if content.size != self.nbytes(shape):
            raise ValueError(
                f"{self.name} of shape {shape}: expected {self.nbytes(shape)} bytes, "
                f"got {content.size}"
            )
        if self.dtype is not None:
            return content.view(self.dtype).reshape(shape).copy()
        assert self.unpack is not None and self.spec is not None
        spec = self.spec.resolve(len(shape))
        rows = content.reshape(-1, shape[-1] // self.values, self.size)
        parts = {name: _laid(name, p, spec, shape) for name, p in self.unpack(rows).items()}
        if spec.row.tensor_scale:
            parts["tensor_scale"] = np.asarray(1.0, np.float32)
        return QuantArray(spec=spec, shape=shape, **parts)

    def write(self, value: Array | QuantArray) -> Array:
        """The bytes of a tensor: the inverse of `read`; an NVFP4 tensor scale goes elsewhere.

        Args:
            value: a numpy array of the type's dtype, or a QuantArray of its spec.

        Returns:
            uint8, flat.

        Raises:
            ValueError: if the value is not of this type.

        >>> from extensor.io.gguf import GGUF_TYPES
        >>> GGUF_TYPES["MXFP4"].write(et.ones((2, 32)).to_mxfp4().data).size
        34
        """
        if isinstance(value, QuantArray):
            self.nbytes(value.shape)
            if self.pack is None or not self.stores(value.spec, len(value.shape)):
                raise ValueError(self._refusal(value.spec))
            rows = -1, value.shape[-1] // self.values
            parts = {n: np.asarray(p) for n, p in value.parts.items() if n != "tensor_scale"}
            flat = {n: p.reshape(-1, p.shape[-1]) for n, p in parts.items()}
            return self.pack(flat).reshape(*rows, self.size).reshape(-1)
        if self.dtype is None or value.dtype != self.dtype:
            raise ValueError(self._refusal(value.dtype))
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def _refusal(self, got: object) -> str:
        return f"GGUF {self.name}: expected {self.spec or self.dtype}, got {got}"

    def stores(self, spec: QuantSpec, ndim: int) -> bool:
        """Whether a blocked tensor of this spec can be stored as it is.

        Args:
            spec: resolved.
            ndim: axes of the tensor.

        >>> from extensor.io.gguf import GGUF_TYPES
        >>> GGUF_TYPES["MXFP4"].stores(et.QuantSpec("mxfp4").resolve(2), 2)
        True
        """
        if self.spec is None:
            return False
        mine = self.spec.resolve(ndim)
        return _storage(spec) == _storage(mine)


def _storage(spec: QuantSpec) -> tuple[Any, ...]:
    """The fields of a spec that say what is stored, not how it was chosen."""
    row = spec.row
    form = row.element, spec.scale_name, row.tensor_scale, row.outliers
    return (
        *form,
        spec.axis,
        spec.tile,
        spec.symmetric,
        spec.minimum,
        spec.super_block,
        spec.transform,
    )


def _laid(name: str, part: Array, spec: QuantSpec, shape: tuple[int, ...]) -> Array:
    if name == "codes":
        return np.ascontiguousarray(part).reshape(*shape[:-1], -1)
    grid = super_grid(spec, shape) if name.startswith("super_") else block_grid(spec, shape)
    return np.ascontiguousarray(part).reshape(grid)


# --- nibbles ---


def _from_halves(halves: Array) -> Array:
    """Bytes (..., n), values 0 to n - 1 in the low nibbles, n to 2n - 1 in the high -> in pairs."""
    even, odd = halves[..., 0::2], halves[..., 1::2]
    return np.concatenate([(even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=-1)


def _to_halves(pairs: Array) -> Array:
    """The inverse of `_from_halves`."""
    half = pairs.shape[-1] // 2
    low, high = pairs[..., :half], pairs[..., half:]
    out = np.empty(pairs.shape, np.uint8)
    out[..., 0::2] = (low & 15) | (high << 4)
    out[..., 1::2] = (low >> 4) | (high & 0xF0)
    return out


_SIGNED = np.uint8(0x88)  # flips the top bit of both nibbles: 0..15 to -8..7 and back


def _half_floats(content: Array) -> Array:
    """Bytes (..., 2) -> float16 (...)."""
    return np.ascontiguousarray(content).view(np.float16)[..., 0]


def _half_bytes(values: Array) -> Array:
    """The inverse of `_half_floats`."""
    return np.ascontiguousarray(values, np.float16)[..., None].view(np.uint8)


def _blocks(codes: Array, size: int) -> Array:
    """Packed codes of rows -> (rows, records, size)."""
    return codes.reshape(len(codes), -1, size)


# --- one scale for 32 values ---


def _unpack_q4_0(records: Array) -> Parts:
    return {
        "codes": _from_halves(records[..., 2:]) ^ _SIGNED,
        "scales": _half_floats(records[..., :2]),
    }


def _pack_q4_0(parts: Mapping[str, Array]) -> Array:
    codes = _to_halves(_blocks(parts["codes"], 16) ^ _SIGNED)
    return np.concatenate([_half_bytes(parts["scales"]), codes], axis=-1)


def _unpack_q4_1(records: Array) -> Parts:
    return {
        "codes": _from_halves(records[..., 4:]) ^ _SIGNED,
        "scales": _half_floats(records[..., :2]),
        "minimums": _half_floats(records[..., 2:4]),
    }


def _pack_q4_1(parts: Mapping[str, Array]) -> Array:
    codes = _to_halves(_blocks(parts["codes"], 16) ^ _SIGNED)
    heads = _half_bytes(parts["scales"]), _half_bytes(parts["minimums"])
    return np.concatenate([*heads, codes], axis=-1)


def _unpack_q8_0(records: Array) -> Parts:
    return {"codes": records[..., 2:], "scales": _half_floats(records[..., :2])}


def _pack_q8_0(parts: Mapping[str, Array]) -> Array:
    return np.concatenate([_half_bytes(parts["scales"]), _blocks(parts["codes"], 32)], axis=-1)


# --- OCP and NVIDIA formats ---


def _unpack_mxfp4(records: Array) -> Parts:
    scales = records[..., 0]
    _refuse_nan(scales, E8M0_NAN, "MXFP4")
    return {"codes": _from_halves(records[..., 1:]), "scales": scales}


def _pack_mxfp4(parts: Mapping[str, Array]) -> Array:
    _refuse_nan(parts["scales"], E8M0_NAN, "MXFP4")
    codes = _to_halves(_blocks(parts["codes"], 16))
    return np.concatenate([parts["scales"][..., None], codes], axis=-1)


def _unpack_nvfp4(records: Array) -> Parts:
    scales = records[..., :4]
    _refuse_nan(scales, 0x7F, "NVFP4")
    if (scales & 0x80).any():
        raise ValueError("GGUF NVFP4: expected block scales without a sign")
    halves = records[..., 4:].reshape(*records.shape[:-1], 4, 8)
    return {"codes": _from_halves(halves), "scales": scales.reshape(len(records), -1)}


def _pack_nvfp4(parts: Mapping[str, Array]) -> Array:
    _refuse_nan(parts["scales"], 0x7F, "NVFP4")
    codes = parts["codes"].reshape(len(parts["codes"]), -1, 4, 8)
    scales = parts["scales"].reshape(*codes.shape[:2], 4)
    return np.concatenate([scales, _to_halves(codes).reshape(*codes.shape[:2], 32)], axis=-1)


def _refuse_nan(scales: Array, byte: int, name: str) -> None:
    bad = np.argwhere(scales == byte)
    if len(bad):
        raise ValueError(
            f"GGUF {name} has no NaN: scale {bad[0].tolist()} is {byte:#04x}, which ggml decodes "
            "as a number"
        )


# --- super-blocks ---


def _unpack_six_bits(packed: Array) -> tuple[Array, Array]:
    """12 bytes (..., 12) -> eight scales and eight minimums of six bits."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return scales, minimums


def _pack_six_bits(scales: Array, minimums: Array) -> Array:
    """The inverse of `_unpack_six_bits`."""
    first = scales[..., :4] | (scales[..., 4:] >> 4 << 6)
    second = minimums[..., :4] | (minimums[..., 4:] >> 4 << 6)
    third = (scales[..., 4:] & 15) | (minimums[..., 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=-1)


def _super_heads(records: Array) -> Parts:
    scales, minimums = _unpack_six_bits(records[..., 4:16])
    return {
        "scales": scales,
        "minimums": minimums,
        "super_scales": _half_floats(records[..., :2]),
        "super_minimums": _half_floats(records[..., 2:4]),
    }


def _super_head_bytes(parts: Mapping[str, Array]) -> Array:
    scales, minimums = (_blocks(parts[name], 8) for name in ("scales", "minimums"))
    halves = (_half_bytes(parts[name]) for name in ("super_scales", "super_minimums"))
    return np.concatenate([*halves, _pack_six_bits(scales, minimums)], axis=-1)


def _unpack_q4_k(records: Array) -> Parts:
    halves = records[..., 16:].reshape(*records.shape[:-1], 4, 32)
    return {"codes": _from_halves(halves) ^ _SIGNED, **_super_heads(records)}


def _pack_q4_k(parts: Mapping[str, Array]) -> Array:
    pairs = parts["codes"].reshape(len(parts["codes"]), -1, 4, 32)
    codes = _to_halves(pairs ^ _SIGNED).reshape(*pairs.shape[:2], 128)
    return np.concatenate([_super_head_bytes(parts), codes], axis=-1)


def _unpack_q5_k(records: Array) -> Parts:
    shape = records.shape[:-1]
    low = unpack(_from_halves(records[..., 48:].reshape(*shape, 4, 32)), 4, 64).reshape(
        *shape, 8, 32
    )
    high = (records[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = (low | high << 4).reshape(*shape, 256) ^ 16
    return {"codes": pack(codes, 5), **_super_heads(records)}


def _pack_q5_k(parts: Mapping[str, Array]) -> Array:
    codes = unpack(_blocks(parts["codes"], 160), 5, 256) ^ 16
    shape = codes.shape[:-1]
    fine = codes.reshape(*shape, 8, 32)
    high = (fine >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=-2, dtype=np.uint8)
    low = _to_halves(pack((fine & 15).reshape(*shape, 4, 64), 4)).reshape(*shape, 128)
    return np.concatenate([_super_head_bytes(parts), high, low], axis=-1)


def _unpack_q6_k(records: Array) -> Parts:
    """Of 128 values: low nibbles of 64 bytes, their high ones, and two more bits of each value."""
    shape = (*records.shape[:-1], 2)
    low = records[..., :128].reshape(*shape, 64)
    high = records[..., 128:192].reshape(*shape, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-1).reshape(*shape, 4, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = (low | high << 4).reshape(*records.shape[:-1], 256) ^ 32
    return {
        "codes": pack(codes, 6),
        "scales": np.ascontiguousarray(records[..., 192:208]).view(np.int8),
        "super_scales": _half_floats(records[..., 208:]),
    }


def _pack_q6_k(parts: Mapping[str, Array]) -> Array:
    codes = unpack(_blocks(parts["codes"], 192), 6, 256) ^ 32
    shape = codes.shape[:-1]
    fine = codes.reshape(*shape, 2, 4, 32)
    high = ((fine >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=-2, dtype=np.uint8)
    low = (fine & 15).reshape(*shape, 2, 2, 64)
    low = low[..., 0, :] | low[..., 1, :] << 4
    scales = _blocks(parts["scales"], 16).view(np.uint8)
    halves = _half_bytes(parts["super_scales"])
    flat = low.reshape(*shape, 128), high.reshape(*shape, 64)
    return np.concatenate([*flat, scales, halves], axis=-1)


def _dense(name: str, number: int, dtype: Any) -> GgufType:
    row = np.dtype(dtype)
    return GgufType(name, number, 1, row.itemsize, dtype=row)


def _integers(element: str, block: int, **fields: Any) -> QuantSpec:
    return QuantSpec(element, tile=(1, block), **fields)


_Q4_0 = _integers("int4", 32, scale_dtype="float16")
_Q8_0 = _integers("int8", 32, scale_dtype="float16")
_Q4_K = _integers("int4", 32, minimum=True, super_block=256)
_Q5_K = _integers("int5", 32, minimum=True, super_block=256)
_Q6_K = _integers("int6", 16, super_block=256)
_ROWS = (
    _dense("F32", 0, np.float32),
    _dense("F16", 1, np.float16),
    GgufType("Q4_0", 2, 32, 18, _Q4_0, unpack=_unpack_q4_0, pack=_pack_q4_0),
    GgufType("Q4_1", 3, 32, 20, _Q4_0.replace(minimum=True), unpack=_unpack_q4_1, pack=_pack_q4_1),
    GgufType("Q8_0", 8, 32, 34, _Q8_0, unpack=_unpack_q8_0, pack=_pack_q8_0),
    GgufType("Q4_K", 12, 256, 144, _Q4_K, unpack=_unpack_q4_k, pack=_pack_q4_k),
    GgufType("Q5_K", 13, 256, 176, _Q5_K, unpack=_unpack_q5_k, pack=_pack_q5_k),
    GgufType("Q6_K", 14, 256, 210, _Q6_K, unpack=_unpack_q6_k, pack=_pack_q6_k),
    _dense("I8", 24, np.int8),
    _dense("I16", 25, np.int16),
    _dense("I32", 26, np.int32),
    _dense("I64", 27, np.int64),
    _dense("F64", 28, np.float64),
    _dense("BF16", 30, ml_dtypes.bfloat16),
    GgufType("MXFP4", 39, 32, 17, QuantSpec("mxfp4"), unpack=_unpack_mxfp4, pack=_pack_mxfp4),
    GgufType("NVFP4", 40, 64, 36, QuantSpec("nvfp4"), unpack=_unpack_nvfp4, pack=_pack_nvfp4),
)

GGUF_TYPES: MappingProxyType[str, GgufType] = MappingProxyType({row.name: row for row in _ROWS})
"""Every GGUF tensor type that is read and written, by name."""

UNREADABLE_GGUF_TYPES: MappingProxyType[int, str] = MappingProxyType(
    {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS"}
    | {17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
    | {23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 41: "Q1_0"}
)
"""Names of the types that no row describes, for the error."""


def gguf_type_of(value: Array | QuantArray) -> GgufType | None:
    """The type that stores a tensor as it is; None if no type does.

    Args:
        value: a numpy array or a QuantArray.

    Returns:
        A row of `GGUF_TYPES`, or None.

    >>> from extensor.io.gguf import gguf_type_of
    >>> gguf_type_of(et.ones((2, 64)).to_mxfp4().data).name
    'MXFP4'
    """
    for row in GGUF_TYPES.values():
        if isinstance(value, QuantArray):
            if row.stores(value.spec, len(value.shape)) and value.shape[-1] % row.values == 0:
                return row
        elif row.dtype is not None and row.dtype == value.dtype:  # None equals float64
            return row
    return None
