"""What the Hopper GEMM does to its sums: the groups of an `Epilogue`."""

from __future__ import annotations

from typing import Any, NamedTuple

from extensor_cuda.kernels.gemm.config import Split

__all__ = ["Epilogue", "Flags", "Packed", "Scales", "Zeros"]

Array = Any


class Flags(NamedTuple):
    """Whether the kernel runs at all, read on the device.

    Attributes:
        row, column: uint32 of shape (), set where an operand does not hold every value; or None.
        expected: 0: run if no flag is set; 1: run if one is; -1: always.
        runs: uint32 of shape (): counts the launches that no flag ended; or None.
    """

    row: Array | None = None
    column: Array | None = None
    expected: int = -1
    runs: Array | None = None


class Zeros(NamedTuple):
    """Zero points of 8-bit integers: a value is (code - zero point) times its factor.

    Attributes:
        row: int32 (M,), zero points of a's rows.
        row_rest: int32 (M,), the sums of a's codes less K times their zero points.
        column: int32 (N,), zero points of b's rows.
        column_sum: int32 (N,), the sums of b's codes.
    """

    row: Array
    row_rest: Array
    column: Array
    column_sum: Array


class Scales(NamedTuple):
    """What multiplies the sums.

    Attributes:
        exponents: int32, (M,) or (1,), and (N,) or (1,): powers of two of rows and columns; or
            None.
        factors: instead of exponents, float32 of the same shapes: the row's multiplies first.
        zeros: zero points, with 8-bit integers and factors.
        blocks: from `extensor_cuda.kernels.gemm.block_scales`, of a and of b: float32 for each 128
            elements along K, with FP8; of as many rows each as the config says, readable a tile
            beyond the last. With bf16 and a config of ``scale_group_k``, a's alone: float32 (whole
            stages of groups, pitch), readable a tile beyond the last.
    """

    exponents: tuple[Array | None, Array | None] = (None, None)
    factors: tuple[Array | None, Array | None] | None = None
    zeros: Zeros | None = None
    blocks: tuple[Array, Array | None] | None = None


class Packed(NamedTuple):
    """Packed storage that a is made from, in a launch that expands or decodes.

    Attributes:
        codes: uint8 (M, bytes); None of a config that decodes, whose a it is.
        scales: uint8 (tiles of rows, blocks), or None. Of a config that decodes, scales or zero
            points: 8-bit (M, n), n a multiple of 4 or 1, contiguous and aligned to 4 bytes.
        zeros: int8 (tiles of rows, blocks), zero points, or None.
        ready: rows that are expanded already, a multiple of a tile's.
        counts: uint32 (1 + tiles of rows,), at first 0.
    """

    codes: Array | None
    scales: Array | None = None
    zeros: Array | None = None
    ready: int = 0
    counts: Array | None = None


class Epilogue(NamedTuple):
    """What is done to the sums, and what decides whether and on which rows.

    Attributes:
        scales: see there.
        bias: float32 (N,).
        residual: as out; bfloat16 if that is quantized. Added last.
        amax: uint32 of shape (): raised to the bits of the largest magnitude, before it is rounded.
        flags: on the device, whether to run.
        offsets: int32 (groups + 1,) on the device, from 0 to M and never falling: the rows from one
            to the next are multiplied by a b of their own; b is (groups N, K), what belongs to
            columns (groups N,).
        split: splits of K, with a config that splits, flags and one exponent or factor for all of
            an operand, but nothing else if it is not written as (N, M). Out is then float32
            (count R, N), or (count R, M), R from `partial_sum_rows`, what lies in a split beyond
            being zeros.
        packed: with a config that expands (a is written too, from the ready rows on) or decodes.
    """

    scales: Scales = Scales()
    bias: Array | None = None
    residual: Array | None = None
    amax: Array | None = None
    flags: Flags = Flags()
    offsets: Array | None = None
    split: Split | None = None
    packed: Packed | None = None
