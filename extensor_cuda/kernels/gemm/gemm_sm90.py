"""Placing the Hopper GEMM: operands and what is done to their sums -> tensor maps and launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from extensor_cuda.kernels.gemm.config import (
    BOX,
    LINES,
    ROW_BYTES,
    STAGE_OF_BF16,
    THREADS,
    TILE_M,
    Config,
    Split,
    configure,
    configure_parts,
    gemm_source,
    quantizes,
)
from extensor_cuda.kernels.gemm.requantize import Requantized, type_of
from extensor_cuda.runtime import driver

__all__ = [
    "LINES",
    "MOST_TERMS",
    "STAGE_OF_BF16",
    "TILE_M",
    "Config",
    "Flags",
    "Packed",
    "Split",
    "Zeros",
    "configure",
    "configure_parts",
    "empty_rows",
    "gemm",
    "gemm_source",
    "rows_of_parts",
]

MOST_TERMS = (1 << 17) - 1
"""K of a product of 8-bit integers: 128 * 128 * K stays below 2**31."""


class _Epilogue(ctypes.Structure):
    """As in gemm_sm90.cu."""

    _fields_ = (
        ("row_exponent", ctypes.c_void_p),
        ("column_exponent", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_pitch", ctypes.c_longlong),
        ("row_flag", ctypes.c_void_p),
        ("column_flag", ctypes.c_void_p),
        ("amax", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("row_step", ctypes.c_int),
        ("column_step", ctypes.c_int),
        ("flag_wanted", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("stages_of_k", ctypes.c_int),
        ("row_zero", ctypes.c_void_p),
        ("row_rest", ctypes.c_void_p),
        ("column_zero", ctypes.c_void_p),
        ("column_sum", ctypes.c_void_p),
        ("row_blocks", ctypes.c_void_p),
        ("column_blocks", ctypes.c_void_p),
        ("row_block_pitch", ctypes.c_longlong),
        ("column_block_pitch", ctypes.c_longlong),
        ("offsets", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_pitch", ctypes.c_longlong),
        ("groups", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("stages_of_part", ctypes.c_int),
        ("scales", ctypes.c_void_p),
        ("tensor", ctypes.c_void_p),
        ("ready", ctypes.c_int),
        ("codes", ctypes.c_void_p),
        ("code_scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("octets", ctypes.c_longlong),
        ("scale_pitch", ctypes.c_longlong),
        ("expanded", ctypes.c_void_p),
        ("chunks", ctypes.c_longlong),
        ("counts", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Flags:
    """Whether the kernel runs at all, read on the device.

    Attributes:
        row, column: uint32 of shape (), set where an operand is out of window; or None.
        wanted: 0: run if no flag is set; 1: run if one is.
    """

    row: Any = None
    column: Any = None
    wanted: int = 0


@dataclass(frozen=True)
class Zeros:
    """Zero points of 8-bit integers: a value is (code - zero point) times its factor.

    Attributes:
        row: int32 (M,), zero points of a's rows.
        row_rest: int32 (M,), the sums of a's codes less K times their zero points.
        column: int32 (N,), zero points of b's rows.
        column_sum: int32 (N,), the sums of b's codes.
    """

    row: Any
    row_rest: Any
    column: Any
    column_sum: Any


@dataclass(frozen=True)
class Packed:
    """What the rows of a are expanded from, as they are multiplied.

    Attributes:
        codes: uint8 (N, bytes).
        scales: uint8 (tiles of rows, blocks), or None.
        zeros: int8 likewise, zero points, or None.
        ready: rows that are expanded already, a multiple of a tile's.
        counts: uint32 (1 + tiles of rows,), at first 0.
    """

    codes: Any
    scales: Any = None
    zeros: Any = None
    ready: int = 0
    counts: Any = None


def _tensor_map(
    array: Any, each: int, box: int, kind: str = "UINT8", width: int = ROW_BYTES
) -> bytes:
    """The descriptor of a matrix, moved in boxes of so many rows of ``width`` bytes.

    ``each``: items of the kind in one of the array.
    """
    rows, columns = array.shape
    sizes, boxes = (columns * each, rows), (width // driver.ELEMENT_BYTES[kind], box)
    return driver.tensor_map(int(array.data.ptr), sizes, (array.strides[0],), boxes, kind)


def empty_rows(xp: Any, rows: int, columns: int, dtype: Any) -> Any:
    """A matrix whose rows lie a multiple of 16 bytes apart, as TMA wants them."""
    item = np.dtype(dtype).itemsize
    pitch = -(-columns * item // 16) * 16 // item
    array = xp.empty((rows, pitch), dtype=dtype)
    return array if pitch == columns else array[:, :columns]


def _pointer(array: Any) -> int | None:
    return None if array is None else int(array.data.ptr)


def rows_of_parts(m: int, config: Config) -> int:
    """How many rows of memory a part of K takes of a result of m that is split."""
    tall = config.tile_n if config.c_down else TILE_M * config.cluster
    return -(-m // tall) * tall


def _checked(
    a: Any, b: Any, out: Any, offsets: Any, config: Config, split: Split | None
) -> tuple[int, int, int]:
    """M, N and K.

    Raises:
        ValueError: if shapes, pitches or alignments do not fit.
    """
    for name, operand in (("a", a), ("b", b), ("out", out)):
        if isinstance(operand, Requantized):
            continue
        item = operand.dtype.itemsize
        if operand.strides[1] != item or operand.strides[0] % 16 or operand.data.ptr % 16:
            raise ValueError(
                f"gemm: wanted {name} with contiguous rows a multiple of 16 bytes apart, got "
                f"strides {operand.strides} at address {operand.data.ptr:#x}; copy it into rows "
                "of a padded pitch"
            )
    (m, k), right = a.shape[:: -1 if config.down[0] else 1], b.shape[:: -1 if config.down[1] else 1]
    if config.decodes:
        k = k * STAGE_OF_BF16 // config.row_bytes
    groups = 1 if offsets is None else len(offsets) - 1
    n = right[0] // max(groups, 1)
    shape = (n, m) if config.c_down else (m, n)
    if split is not None:
        shape = split.parts * rows_of_parts(shape[0], config), shape[1]
    if type_of(out) != config.out or (
        isinstance(out, Requantized) and not quantizes(config.tile_n, out.q.spec)
    ):
        raise ValueError(
            f"gemm: wanted an out of the config's type, in tiles of whole blocks, got {config} and "
            f"{type_of(out)}"
        )
    if groups < 1 or right != (groups * n, k) or out.shape != shape:
        raise ValueError(
            f"gemm: wanted a (M, K), b (groups N, K) and out (M, N), got {a.shape}, {b.shape} and "
            f"{out.shape} in {groups} groups, lying the other way: {config.down}, "
            f"{config.c_down}, {split}"
        )
    if any(config.down) and (
        config.a != "bf16" or offsets is not None or config.tile_n // config.cluster % BOX
    ):
        raise ValueError(
            f"gemm: operands (K, M) and (K, N) are bf16, in one group, in tiles of whole boxes of "
            f"{BOX} columns; got {config.a} in {groups} groups, {config.tile_n} columns by a "
            f"cluster of {config.cluster}"
        )
    if config.a == "s8" and k > MOST_TERMS:
        raise ValueError(
            f"gemm: int32 sums of 8-bit products take K up to {MOST_TERMS}, got {k}; split K"
        )
    return m, n, k


def gemm(
    a: Any,
    b: Any,
    out: Any,
    config: Config,
    row_exponent: Any = None,
    column_exponent: Any = None,
    bias: Any = None,
    residual: Any = None,
    flags: Flags | None = None,
    amax: Any = None,
    runs: Any = None,
    blocks: int | None = None,
    *,
    factors: tuple[Any, Any] | None = None,
    zeros: Zeros | None = None,
    scales: tuple[Any, Any | None] | None = None,
    offsets: Any = None,
    split: Split | None = None,
    packed: Packed | None = None,
    beside: Any = None,
) -> None:
    """Launch out = activation(a b^T 2^(row + column exponent) + bias) + residual; does not wait.

    Args:
        a: (M, K) codes, one byte an element (bf16: two), rows a multiple of 16 bytes apart; (K, M)
            if ``config.down`` says so; (M, bytes), K a multiple of 128, if the config decodes.
        b: (N, K) codes, or (K, N), likewise.
        out: (M, N) float32 or bfloat16, rows a multiple of 16 bytes apart, or (N, M) if
            ``config.c_down`` says so; or a `Requantized`.
        config: the program; its types say what the codes mean.
        row_exponent: int32, (M,) or (1,): added to the exponent of a row of the product.
        column_exponent: int32, (N,) or (1,), likewise for columns.
        bias: float32 (N,).
        residual: as out; bfloat16 if that is quantized.
        flags: on the device, whether to run; None: always.
        amax: uint32 of shape (): raised to the bits of the largest magnitude, before it is rounded.
        runs: uint32 of shape (): counts the launches that no flag ended.
        blocks: of the grid; None: one per multiprocessor.
        factors: instead of exponents: float32 (M,) or (1,), and (N,) or (1,); the sum is multiplied
            by the row's, then by the column's.
        zeros: zero points, with 8-bit integers and factors.
        scales: from `extensor_cuda.kernels.gemm.block_scales`, of a and of b: float32 for each 128
            elements along K, with FP8; of as many rows each as the config says, readable a tile
            beyond the last.
            With bf16 and a config that says for how many, a's alone: float32 (whole stages of
            groups, pitch), readable a tile beyond the last.
        offsets: int32 (groups + 1,) on the device, from 0 to M and never falling: the rows from one
            to the next are multiplied by a b of their own; b is (groups N, K), what belongs to
            columns (groups N,).
        split: parts of K, with a config that splits, flags and one exponent for all of an operand,
            but nothing else if it is not written as (N, M). Out is then float32 (parts R, N), or
            (parts R, M), R from `rows_of_parts`, what lies in a part beyond being zeros.
        beside: with a config that decodes, what lies beside a's codes: 8-bit (M, n), n a multiple
            of 4 or 1, contiguous and aligned to 4 bytes: scales, or zero points; None: nothing.
        packed: with a config that expands: a is written too, from the ready rows on.

    Raises:
        ValueError: if shapes, pitch or alignment of an operand do not fit, or options exclude each
            other.
        RuntimeError: on a GPU that is not Hopper, or if the driver refuses.
    """
    import cupy

    m, n, k = _checked(a, b, out, offsets, config, split)
    size = b.dtype.itemsize
    extras = config.activation != "none" or any(x is not None for x in (bias, residual, amax))
    exponents = row_exponent, column_exponent
    more = extras or factors or zeros or scales or offsets is not None
    more = more or any(x is not None and x.size > 1 for x in exponents)
    more = more and not config.c_down
    if config.split != (split is not None) or (split and (more or config.out != "float32")):
        raise ValueError(
            f"gemm: parts of K go with a config that splits, float32 and at most one exponent for "
            f"all of an operand, or a result (N, M), got {config} and {split}"
        )
    if beside is not None and (
        not config.decodes
        or len(beside) != m
        or beside.strides != (beside.shape[1], 1)
        or (beside.shape[1] > 1 and (beside.shape[1] % 4 or beside.data.ptr % 4))
    ):
        raise ValueError(
            f"gemm: wanted beside the codes of a config that decodes one byte a row, or rows of "
            f"whole words, {m} of them, contiguous and aligned to 4 bytes, got {beside.shape} in "
            f"strides {beside.strides}; copy it, or expand the weights"
        )
    config = _with(config, a, exponents, factors, zeros, scales, offsets, extras)
    row, column = factors or (row_exponent, column_exponent)
    device = cupy.cuda.runtime.getDevice()
    function, _ = driver.load(gemm_source(config), "gemm", config.shared, device)
    boxes = (TILE_M, config.tile_n // config.cluster)
    maps = [
        _tensor_map(x, x.dtype.itemsize, BOX if down else box, width=width)
        for x, box, down, width in zip(
            (a, b), boxes, config.down, (config.row_bytes, ROW_BYTES), strict=True
        )
    ]
    if isinstance(out, Requantized):
        to, pitch = out.q.codes, 0
        maps.append(maps[0])  # which is not looked at
    else:
        to, pitch = out, out.strides[0] // out.dtype.itemsize
        kind = str(config.out).upper()
        maps.append(_tensor_map(out, 1, 16, kind))
    flags = flags or Flags(wanted=-1)
    epilogue = _Epilogue(
        row_exponent=_pointer(row),
        column_exponent=_pointer(column),
        bias=_pointer(bias),
        residual=_pointer(residual),
        residual_pitch=0 if residual is None else residual.strides[0] // residual.dtype.itemsize,
        row_flag=_pointer(flags.row),
        column_flag=_pointer(flags.column),
        amax=_pointer(amax),
        runs=_pointer(runs),
        row_step=int(row is not None and row.size > 1),
        column_step=int(column is not None and column.size > 1),
        flag_wanted=flags.wanted,
        rows=m,
        columns=n,
        stages_of_k=-(-k * size // ROW_BYTES),
        offsets=_pointer(offsets),
        out=_pointer(to),
        out_pitch=pitch,
        groups=0 if offsets is None else len(offsets) - 1,
    )
    if isinstance(out, Requantized):
        epilogue.scales, epilogue.tensor = _pointer(out.q.scales), _pointer(out.tensor)
    if zeros is not None:
        epilogue.row_zero, epilogue.row_rest = _pointer(zeros.row), _pointer(zeros.row_rest)
        epilogue.column_zero = _pointer(zeros.column)
        epilogue.column_sum = _pointer(zeros.column_sum)
    if scales is not None:
        epilogue.row_blocks, epilogue.column_blocks = map(_pointer, scales)
        epilogue.row_block_pitch, epilogue.column_block_pitch = (
            0 if x is None else x.shape[1] for x in scales
        )
    if packed is not None:
        blocks_of = packed.zeros if packed.scales is None else packed.scales
        epilogue.ready, epilogue.counts = packed.ready, _pointer(packed.counts)
        epilogue.codes, epilogue.code_scales = _pointer(packed.codes), _pointer(packed.scales)
        epilogue.zeros, epilogue.expanded = _pointer(packed.zeros), _pointer(a)
        epilogue.octets = packed.codes.shape[1]
        epilogue.scale_pitch = 0 if blocks_of is None else blocks_of.shape[1]
        epilogue.chunks = a.strides[0] // (16 * size)
    if config.decodes:
        epilogue.scale_pitch = 0 if beside is None else beside.shape[1]
        epilogue.code_scales = epilogue.zeros = _pointer(beside)
    tall = -(-m // (TILE_M * config.cluster)) + max(epilogue.groups - 1, 0)  # at most
    tiles = tall * -(-n // config.tile_n)
    if split is not None:
        epilogue.parts, epilogue.stages_of_part = split.parts, split.stages
        tiles *= split.parts
    grid = min((blocks or driver.multiprocessors(device)) // config.cluster, tiles) * config.cluster
    pdl = bool(config.blocks)  # behind the launch that lays the scales out
    driver.launch(function, grid, THREADS, config.shared, maps, epilogue, pdl=pdl)


def _with(
    config: Config,
    a: Any,
    exponents: tuple[Any, Any],
    factors: tuple[Any, Any] | None,
    zeros: Zeros | None,
    scales: tuple[Any, Any | None] | None,
    offsets: Any,
    extras: bool,
) -> Config:
    """The program with what these arguments ask of it.

    Raises:
        ValueError: if they exclude each other.
    """
    given = [x for x in exponents if x is not None]
    if factors is not None and given:
        raise ValueError("gemm: factors stand instead of exponents; give one of the two")
    if zeros is not None and (factors is None or config.a != "s8"):
        raise ValueError(f"gemm: zero points go with factors and codes s8, got {config.a}")
    if config.every:
        k = a.shape[1] * STAGE_OF_BF16 // config.row_bytes if config.decodes else a.shape[1]
        stages, at_once = -(-k // STAGE_OF_BF16), max(STAGE_OF_BF16 // config.every, 1)
        groups = stages * at_once if at_once > 1 else -(-k // config.every)
        others: Any = factors or zeros or offsets is not None or extras or given
        others = others or not isinstance(config.out, str)
        held = [] if scales is None else scales[0]
        if config.a != "bf16" or others or len(held) != groups:
            raise ValueError(
                f"gemm: scales of {config.every} along K are a's, {groups} of them here, with bf16 "
                f"and nothing else, got {config.a} and scales of {len(held)}"
            )
    elif scales is not None:
        if config.a in ("s8", "bf16") or offsets is not None or zeros is not None:
            raise ValueError(
                f"gemm: scales of 128 along K go with FP8 codes in one group, got {config.a}"
            )
        if any(x is None or len(x) != -(-a.shape[1] // ROW_BYTES) for x in scales):
            raise ValueError(
                f"gemm: K = {a.shape[1]} has {-(-a.shape[1] // ROW_BYTES)} blocks of 128, got "
                f"scales of {[x if x is None else len(x) for x in scales]}"
            )
    others = zeros or offsets is not None or extras
    if config.c_down and (others or not isinstance(config.out, str)):
        raise ValueError(f"gemm: what is written as (N, M) is the scaled sum alone, got {config}")
    vectors = any(x.size > 1 for x in given)
    out = config.out
    if extras and config.promote and (offsets is not None or not isinstance(out, str)):
        fits = not (isinstance(out, str) or vectors or offsets is not None) and quantizes(160, out)
        config = replace(
            config, tile_n=min(config.tile_n, 160 if fits else 128)
        )  # wider ones spill
    elif vectors and offsets is not None and config.promote:
        config = replace(config, tile_n=min(config.tile_n, 176))  # 192 spill
    by_blocks = scales is not None and not config.every
    if by_blocks != bool(config.blocks):
        raise ValueError(f"gemm: scales of 128 along K go with a config of such, got {config}")
    return replace(
        config,
        extras=extras,
        vectors=vectors,
        factors=factors is not None,
        zeros=zeros is not None,
        grouped=offsets is not None,
        # A ring that holds scales of every row leaves less.
        patches=min(config.patches, 2) if config.every or 1 in config.blocks else config.patches,
    )
