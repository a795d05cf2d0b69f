"""Launches the Hopper GEMM: operands, and what is done to their sums."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.gemm.config import (
    BOX,
    K_OF_BF16_STAGE,
    ROW_BYTES,
    THREADS,
    TILE_M,
    Config,
    gemm_source,
    quantizes,
)
from extensor_cuda.kernels.gemm.epilogue import Epilogue, Flags, Packed, Scales, Zeros
from extensor_cuda.kernels.gemm.requantize import Requantized, type_of
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.c_struct import structure
from extensor_cuda.runtime.memory import empty
from extensor_cuda.runtime.recording import TensorMap

__all__ = [
    "MAX_TERMS",
    "Epilogue",
    "Flags",
    "Packed",
    "Scales",
    "Zeros",
    "empty_rows",
    "gemm",
    "partial_sum_rows",
]

Array = Any

MAX_TERMS = (1 << 17) - 1
"""K of a product of 8-bit integers: 128 * 128 * K stays below 2**31."""

_PLAIN = Epilogue()


@cache
def epilogue_structure() -> type[ctypes.Structure]:
    """The kernel's parameter struct, as gemm_sm90.cu declares it."""
    return structure(gemm_source(Config()).text, "Epilogue")


def empty_rows(xp: Any, rows: int, columns: int, dtype: Any) -> Array:
    """A matrix whose rows lie a multiple of 16 bytes apart, as TMA wants them."""
    item = np.dtype(dtype).itemsize
    pitch = -(-columns * item // 16) * 16 // item
    array = empty(xp, (rows, pitch), dtype)
    return array if pitch == columns else array[:, :columns]


def partial_sum_rows(m: int, config: Config) -> int:
    """How many rows of memory a split of K takes of a result of m that is split."""
    pipeline = config.pipeline
    tile = pipeline.tile_n if config.layout.out_transposed else TILE_M * pipeline.cluster
    return -(-m // tile) * tile


def gemm(
    a: Array, b: Array, out: Array | Requantized, config: Config, epilogue: Epilogue = _PLAIN
) -> None:
    """Launch out = activation(scales(a b^T) + bias) + residual; does not wait.

    Args:
        a: (M, K) codes, one byte an element (bf16: two), rows a multiple of 16 bytes apart; (K, M)
            if the config's layout says so; (M, bytes), K a multiple of 128, if it decodes.
        b: (N, K) codes, or (K, N), likewise.
        out: (M, N) float32 or bfloat16, rows a multiple of 16 bytes apart, or (N, M) if the layout
            says so; or a `Requantized`.
        config: the program; its types say what the codes mean.
        epilogue: what is done to the sums.

    Raises:
        ValueError: if shapes, pitch or alignment of an operand do not fit, or options exclude each
            other.
        RuntimeError: on a GPU that is not Hopper, or if the driver refuses.
    """
    import cupy

    m, n, k = _sizes(a, b, out, config, epilogue)
    _check_split_and_packed(config, epilogue, m)
    _check_scales(a, config, epilogue)
    scales = epilogue.scales
    config = _completed(
        config,
        vectors=any(x is not None and x.size > 1 for x in scales.exponents),
        factors=scales.factors is not None,
        zeros=scales.zeros is not None,
        grouped=epilogue.offsets is not None,
        extras=_has_extras(config, epilogue),
    )
    device = cupy.cuda.runtime.getDevice()
    function, _ = driver.load(gemm_source(config), "gemm", config.shared, device)
    parameters = _parameters(a, out, epilogue, (m, n, k), b.dtype.itemsize)
    pipeline = config.pipeline
    tiles_m = -(-m // (TILE_M * pipeline.cluster)) + max(parameters.groups - 1, 0)  # at most
    tiles = tiles_m * -(-n // pipeline.tile_n)
    if epilogue.split is not None:
        tiles *= epilogue.split.count
    clusters = min(driver.multiprocessors(device) // pipeline.cluster, tiles)
    maps = _tensor_maps(a, b, out, config)
    pdl = bool(config.scaling.blocks)  # behind the launch that lays the scales out
    blocks = clusters * pipeline.cluster
    driver.launch(function, blocks, THREADS, config.shared, maps, parameters, pdl=pdl)


def _tensor_maps(a: Array, b: Array, out: Array | Requantized, config: Config) -> list[TensorMap]:
    """The TMA descriptors of the operands and of the result."""
    boxes = (TILE_M, config.pipeline.tile_n // config.pipeline.cluster)
    maps = [
        _tensor_map(x, x.dtype.itemsize, BOX if transposed else box, width=width)
        for x, box, transposed, width in zip(
            (a, b), boxes, config.layout.transposed, (config.row_bytes, ROW_BYTES), strict=True
        )
    ]
    if isinstance(out, Requantized):
        return [*maps, maps[0]]  # the last is not looked at
    return [*maps, _tensor_map(out, 1, 16, str(config.out).upper())]


def _tensor_map(
    array: Array, per_item: int, box: int, kind: str = "UINT8", width: int = ROW_BYTES
) -> TensorMap:
    """The descriptor of a matrix, moved in boxes of so many rows of ``width`` bytes.

    ``per_item``: elements of the kind in one of the array's.
    """
    rows, columns = array.shape
    sizes, boxes = (columns * per_item, rows), (width // driver.ELEMENT_BYTES[kind], box)
    return driver.tensor_map(int(array.data.ptr), sizes, (array.strides[0],), boxes, kind)


def _pointer(array: Array | None) -> int | None:
    return None if array is None else int(array.data.ptr)


def _parameters(
    a: Array, out: Array | Requantized, epilogue: Epilogue, sizes: tuple[int, int, int], item: int
) -> Any:
    """The kernel's parameter struct; ``item``: bytes of an element of b."""
    (m, n, k), scales, flags = sizes, epilogue.scales, epilogue.flags
    row, column = scales.factors or scales.exponents
    residual, offsets, packed = epilogue.residual, epilogue.offsets, epilogue.packed
    to = out.q.codes if isinstance(out, Requantized) else out
    pitch = 0 if isinstance(out, Requantized) else out.strides[0] // out.dtype.itemsize
    made: Any = epilogue_structure()(
        row_exponent=_pointer(row),
        column_exponent=_pointer(column),
        bias=_pointer(epilogue.bias),
        residual=_pointer(residual),
        residual_pitch=0 if residual is None else residual.strides[0] // residual.dtype.itemsize,
        row_flag=_pointer(flags.row),
        column_flag=_pointer(flags.column),
        amax=_pointer(epilogue.amax),
        runs=_pointer(flags.runs),
        row_step=int(row is not None and row.size > 1),
        column_step=int(column is not None and column.size > 1),
        flag_expected=flags.expected,
        rows=m,
        columns=n,
        k_stages=-(-k * item // ROW_BYTES),
        offsets=_pointer(offsets),
        out=_pointer(to),
        out_pitch=pitch,
        groups=0 if offsets is None else len(offsets) - 1,
    )
    if isinstance(out, Requantized):
        made.scales, made.tensor = _pointer(out.q.scales), _pointer(out.tensor)
    if scales.zeros is not None:
        made.row_zero, made.row_rest, made.column_zero, made.column_sum = map(
            _pointer, scales.zeros
        )
    if scales.blocks is not None:
        made.row_block_scales, made.column_block_scales = map(_pointer, scales.blocks)
        made.row_scale_pitch, made.column_scale_pitch = (
            0 if x is None else x.shape[1] for x in scales.blocks
        )
    if epilogue.split is not None:
        made.splits, made.stages_per_split = epilogue.split.count, epilogue.split.stages
    if packed is not None:
        row_bytes = packed.zeros if packed.scales is None else packed.scales
        made.code_scales, made.zeros = _pointer(packed.scales), _pointer(packed.zeros)
        made.scale_pitch = 0 if row_bytes is None else row_bytes.shape[1]
        if packed.codes is None:  # decoded: scales and zero points are read from one place
            made.zeros = made.code_scales
        else:
            made.rows_ready, made.counts = packed.ready, _pointer(packed.counts)
            made.codes, made.expanded = _pointer(packed.codes), _pointer(a)
            made.code_pitch, made.chunks_per_row = (
                packed.codes.shape[1],
                a.strides[0] // (16 * item),
            )
    return made


def _has_extras(config: Config, epilogue: Epilogue) -> bool:
    more = (epilogue.bias, epilogue.residual, epilogue.amax)
    return config.activation != "none" or any(x is not None for x in more)


def _sizes(
    a: Array, b: Array, out: Array | Requantized, config: Config, epilogue: Epilogue
) -> tuple[int, int, int]:
    """M, N and K. Raises ValueError if shapes, pitches or alignments do not fit."""
    for name, operand in (("a", a), ("b", b), ("out", out)):
        if isinstance(operand, Requantized):
            continue
        item = operand.dtype.itemsize
        if operand.strides[1] != item or operand.strides[0] % 16 or operand.data.ptr % 16:
            raise ValueError(
                f"gemm: expected {name} with contiguous rows a multiple of 16 bytes apart, got "
                f"strides {operand.strides} at address {operand.data.ptr:#x}; copy it into rows "
                "of a padded pitch"
            )
    layout, pipeline, split = config.layout, config.pipeline, epilogue.split
    transposed = layout.transposed
    (m, k), right = a.shape[:: -1 if transposed[0] else 1], b.shape[:: -1 if transposed[1] else 1]
    if config.storage.decodes:
        k = k * K_OF_BF16_STAGE // config.row_bytes
    groups = 1 if epilogue.offsets is None else len(epilogue.offsets) - 1
    n = right[0] // max(groups, 1)
    shape = (n, m) if layout.out_transposed else (m, n)
    if split is not None:
        shape = split.count * partial_sum_rows(shape[0], config), shape[1]
    if type_of(out) != config.out or (
        isinstance(out, Requantized) and not quantizes(pipeline.tile_n, out.q.spec)
    ):
        raise ValueError(
            f"gemm: expected an out of the config's type, in tiles of whole blocks, got "
            f"{config} and {type_of(out)}"
        )
    if groups < 1 or right != (groups * n, k) or out.shape != shape:
        raise ValueError(
            f"gemm: expected a (M, K), b (groups N, K) and out (M, N), got {a.shape}, "
            f"{b.shape} and {out.shape} in {groups} groups, {layout}, {split}"
        )
    if any(transposed) and (
        config.a != "bf16"
        or epilogue.offsets is not None
        or pipeline.tile_n // pipeline.cluster % BOX
    ):
        raise ValueError(
            f"gemm: operands (K, M) and (K, N) are bf16, in one group, in tiles of whole boxes of "
            f"{BOX} columns; got {config.a} in {groups} groups, {pipeline.tile_n} columns by a "
            f"cluster of {pipeline.cluster}"
        )
    if config.a == "s8" and k > MAX_TERMS:
        raise ValueError(
            f"gemm: int32 sums of 8-bit products take K up to {MAX_TERMS}, got {k}; split K"
        )
    return m, n, k


def _check_split_and_packed(config: Config, epilogue: Epilogue, m: int) -> None:
    """Raises ValueError where splits of K, or what belongs to packed codes, do not fit."""
    scales, split = epilogue.scales, epilogue.split
    others = epilogue.offsets, scales.zeros, scales.blocks
    more = _has_extras(config, epilogue) or any(x is not None for x in others)
    numbers = *scales.exponents, *(scales.factors or ())
    more = more or any(x is not None and x.size > 1 for x in numbers)
    more = more and not config.layout.out_transposed
    if config.layout.split_k != (split is not None) or (
        split and (more or config.out != "float32")
    ):
        raise ValueError(
            f"gemm: splits of K go with a config that splits, float32 and at most one exponent or "
            f"factor for all of an operand, or a result (N, M), got {config} and {split}"
        )
    packed = epilogue.packed
    row_bytes = packed.scales if packed is not None and packed.codes is None else None
    if row_bytes is not None and (
        not config.storage.decodes
        or len(row_bytes) != m
        or row_bytes.strides != (row_bytes.shape[1], 1)
        or (row_bytes.shape[1] > 1 and (row_bytes.shape[1] % 4 or row_bytes.data.ptr % 4))
    ):
        raise ValueError(
            f"gemm: expected a config that decodes, and scales of one byte a row, or of whole "
            f"words a row, for {m} rows, contiguous and aligned to 4 bytes, got "
            f"{row_bytes.shape} in strides {row_bytes.strides}; copy it, or expand the weights"
        )


def _check_scales(a: Array, config: Config, epilogue: Epilogue) -> None:
    """Raises ValueError where scales exclude each other, or do not fit the config or K."""
    scales, extras = epilogue.scales, _has_extras(config, epilogue)
    exponents = any(x is not None for x in scales.exponents)
    if scales.factors is not None and exponents:
        raise ValueError("gemm: factors stand instead of exponents; give one of the two")
    if scales.zeros is not None and (scales.factors is None or config.a != "s8"):
        raise ValueError(f"gemm: zero points go with factors and codes s8, got {config.a}")
    others = scales.zeros is not None or epilogue.offsets is not None or extras
    others = others or config.requantizes
    if config.layout.out_transposed and others:
        raise ValueError(f"gemm: what is written as (N, M) is the scaled sum alone, got {config}")
    k, group = a.shape[1], config.scaling.scale_group_k
    if group:
        k = k * K_OF_BF16_STAGE // config.row_bytes if config.storage.decodes else k
        stages, per_stage = -(-k // K_OF_BF16_STAGE), max(K_OF_BF16_STAGE // group, 1)
        groups = stages * per_stage if per_stage > 1 else -(-k // group)
        held = [] if scales.blocks is None else scales.blocks[0]
        others = others or exponents or scales.factors is not None
        if config.a != "bf16" or others or len(held) != groups:
            raise ValueError(
                f"gemm: scales of {group} along K are a's, {groups} of them here, with bf16 "
                f"and nothing else, got {config.a} and scales of {len(held)}"
            )
    elif scales.blocks is not None:
        if config.a in ("s8", "bf16") or epilogue.offsets is not None or scales.zeros is not None:
            raise ValueError(
                f"gemm: scales of 128 along K go with FP8 codes in one group, got {config.a}"
            )
        if any(x is None or len(x) != -(-k // ROW_BYTES) for x in scales.blocks):
            raise ValueError(
                f"gemm: K = {k} has {-(-k // ROW_BYTES)} blocks of 128, got "
                f"scales of {[x if x is None else len(x) for x in scales.blocks]}"
            )
    by_blocks = scales.blocks is not None and not group
    if by_blocks != bool(config.scaling.blocks):
        raise ValueError(f"gemm: scales of 128 along K go with a config of such, got {config}")


@lru_cache(maxsize=1024)
def _completed(
    config: Config, vectors: bool, factors: bool, zeros: bool, grouped: bool, extras: bool
) -> Config:
    """The program with what an epilogue asks of it, in tiles that leave registers for that."""
    pipeline, scaling, out = config.pipeline, config.scaling, config.out
    tile_n = pipeline.tile_n
    if extras and pipeline.promote and (grouped or config.requantizes):
        fits = isinstance(out, QuantSpec) and not (vectors or grouped) and quantizes(160, out)
        tile_n = min(tile_n, 160 if fits else 128)  # wider ones spill
    elif vectors and grouped and pipeline.promote:
        tile_n = min(tile_n, 176)  # 192 spill
    # A ring that holds scales of every row leaves less.
    few = scaling.scale_group_k or 1 in scaling.blocks
    epilogue_tiles = min(pipeline.epilogue_tiles, 2) if few else pipeline.epilogue_tiles
    done = config.replace(tile_n=tile_n, epilogue_tiles=epilogue_tiles, extras=extras)
    return done.replace(vectors=vectors, factors=factors, zeros=zeros, grouped=grouped)
