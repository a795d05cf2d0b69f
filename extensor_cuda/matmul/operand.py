"""`GemmOperand`: a matrix as the tensor cores read it, whatever it was made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from extensor.formats import ELEMENTS
from extensor.quant.rounding import decode
from extensor_cuda.kernels.gemm.config import ROWS_PER_SCALE
from extensor_cuda.kernels.gemm.gemm_sm90 import empty_rows
from extensor_cuda.runtime.counters import OperandCounts

__all__ = [
    "RESULT_DTYPES",
    "GemmOperand",
    "Part",
    "Prepared",
    "Scale",
    "aligned",
    "bf16_rows",
    "bf16_values",
    "pitched",
]

Array = Any
Part = tuple[int, int] | None
"""Rows of an operand, from a multiple of 128 to another, or to the end; None: all."""

RESULT_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
"""What a product is written in, by name."""


@dataclass(frozen=True, eq=False)
class Scale:
    """What the codes of an operand are multiplied by; all None: nothing.

    Attributes:
        exponent: int32, (1,) or one for each row: two to it multiplies.
        factor: float32, (1,) or one for each row. Beside an exponent it is the same number.
        grid: float32 or float16 (groups along K, groups of rows), of any strides, as formats under
            float scales store them; one group along K holds for all of it.
        blocks: float32 (groups along K, pitch), laid out as the GEMM reads them.
        group_k: elements of K that share one of ``grid`` or ``blocks``; 0: all.
        rows: rows that share one of ``grid``.
    """

    exponent: Array | None = None
    factor: Array | None = None
    grid: Array | None = None
    blocks: Array | None = None
    group_k: int = 0
    rows: int = 1

    @property
    def form(self) -> Literal["number", "grid", "blocks"]:
        """A number for the operand or each row (or none), or floats along K as in which field."""
        if self.grid is not None:
            return "grid"
        return "number" if self.blocks is None else "blocks"

    @property
    def is_absent(self) -> bool:
        """Whether the codes are the values."""
        return self.exponent is None and self.factor is None and self.form == "number"

    def row_factor(self, rows: int) -> Array:
        """Of a grid of one group along K: a float32 for each of the rows, or one for all."""
        assert self.grid is not None
        scales = self.grid[0].astype(np.float32, order="C", copy=False)
        if scales.size == 1 or self.rows == 1:
            return scales
        return scales.repeat(self.rows)[:rows]


@dataclass(frozen=True, eq=False)
class GemmOperand:
    """A matrix as the tensor cores read it: (rows, K), whatever the axis that it was blocked along.

    Attributes:
        codes: (rows, K), or (K, rows) if transposed; rows a multiple of 16 bytes apart; 8 bits, or
            uint16 for bfloat16.
        kind: their element type: "bf16", "e4m3", "e5m2" or "s8".
        scale: what multiplies them.
        zeros: zero points, int32 (rows,), or None; with "s8".
        transposed: whether codes are (K, rows); with "bf16".
        flag: uint32 of shape (), set on the device where the codes do not hold every value, so that
            a product reads the operand's bfloat16 form instead; None where they always do.
        reads_source: whether make_bf16 reads the matrix that the operand was made of.
        source: this matrix.
        make_bf16: writes that form of a `Part` of the source anew, to given memory or to new,
            unless two flags are given and neither is set.
        buffer: uint8, the one allocation of codes, scale and flag; None if they have several.
    """

    codes: Array
    kind: str
    scale: Scale = field(default_factory=Scale)
    zeros: Array | None = None
    transposed: bool = False
    flag: Array | None = None
    reads_source: bool = False
    source: Array | None = None
    make_bf16: Callable[[Array, Sequence[Array], Part, Array | None], GemmOperand] | None = None
    buffer: Array | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What it holds, for the ledger; an exponent, a factor or blocks lie behind the codes."""
        return (self.codes,) if self.scale.grid is None else (self.codes, self.scale.grid)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, K)."""
        rows, k = self.codes.shape[:: -1 if self.transposed else 1]
        return rows, k

    @property
    def splits_k(self) -> bool:
        """Whether sums over parts of K add up: one number for all, or none."""
        numbers = self.scale.exponent, self.scale.factor
        return self.scale.form == "number" and all(x is None or x.size == 1 for x in numbers)

    def bf16(
        self, guards: Sequence[Array] = (), part: Part = None, memory: Array | None = None
    ) -> GemmOperand:
        """The operand in bfloat16; not written unless one of two flags is set, if given.

        ``part`` and ``memory``, uint8 and contiguous, are of an operand in FP8.
        """
        if self.kind == "bf16":
            return self
        assert self.make_bf16 is not None
        return self.make_bf16(self.source, guards, part, memory)

    def of(self, source: Array | None) -> GemmOperand:
        """The same operand, whose matrix is this array; None: the operand does not hold it."""
        return replace(self, source=source) if self.reads_source else self

    def values(self, xp: Any) -> Array:
        """What the operand means, float32 (rows, K)."""
        if self.scale.form == "number":
            wide = self.bf16()
            values = bf16_values(wide.codes, xp)
            values = values if wide.scale.factor is None else values * wide.scale.factor
            return values.T if wide.transposed else values
        (rows, k), scale = self.shape, self.scale
        if scale.blocks is not None:
            grid = scale.blocks.T.repeat(ROWS_PER_SCALE, axis=0)[:rows]
        else:
            assert scale.grid is not None
            grid = scale.grid.T.repeat(scale.rows, axis=0)[:rows]
        if grid.shape[1] > 1 or scale.blocks is not None:
            grid = grid.repeat(scale.group_k, axis=1)[:, :k]
        element = ELEMENTS["int8" if self.kind == "s8" else self.kind]
        return decode(self.codes, element, xp) * grid


Prepared = list[tuple[GemmOperand, OperandCounts | None]]
"""Operands, each with what its quantizer counted; None if it is not quantized."""


def bf16_rows(xp: Any, rows: int, k: int, memory: Array | None = None) -> Array:
    """What an operand in bfloat16 is written to: uint16 (rows, K up to a multiple of 16)."""
    pitch = -(-k // 16) * 16
    if memory is None:
        return xp.empty((rows, pitch), dtype=np.uint16)
    return memory[: 2 * rows * pitch].view(np.uint16).reshape(rows, pitch)


def bf16_values(bits: Array, xp: Any) -> Array:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(xp.uint32) << 16).view(xp.float32)


def aligned(array: Array, xp: Any, to: int = 16) -> Array:
    """The array, contiguous, at a multiple of so many bytes."""
    array = xp.ascontiguousarray(array)
    return array if array.data.ptr % to == 0 else array.copy()


def pitched(codes: Array, xp: Any) -> Array:
    """A matrix with rows a multiple of 16 bytes apart, as TMA wants them; a copy if need be."""
    item = codes.dtype.itemsize
    apart, rest = divmod(codes.strides[0], 16)
    whole = codes.strides[1] == item and 16 * apart >= codes.shape[1] * item
    if whole and not (rest or codes.data.ptr % 16):
        return codes
    out = empty_rows(xp, codes.shape[0], codes.shape[1], codes.dtype)
    out[...] = codes
    return out
