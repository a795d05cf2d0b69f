"""Cost models that choose a product's tiles, splits of K and divisions.

`MODEL_MULTIPROCESSORS` stands where a choice decides the order of a sum, so that a shape's bits are
the same on every GPU. Launches themselves ask the device how many multiprocessors it has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.gemm.config import (
    BOX,
    K_OF_BF16_STAGE,
    ROW_BYTES,
    TILE_M,
    Config,
    Split,
    quantizes,
)
from extensor_cuda.kernels.weight_only import w4a16_sm90_resident as resident
from extensor_cuda.kernels.weight_only import w4w8a16_sm90_wgmma as wgmma
from extensor_cuda.runtime.driver import SHARED_BYTES

__all__ = [
    "MODEL_MULTIPROCESSORS",
    "configure",
    "configure_split_k",
    "decoding_schedule",
    "decoding_tiles",
    "ready_rows",
    "resident_schedule",
    "resident_schedules",
    "split_k_sizes",
    "wgmma_schedule",
    "wgmma_schedules",
]

MODEL_MULTIPROCESSORS = 132
"""Of the GPU that splits of K and tiles are chosen for (H100, H200), whatever GPU they run on."""

Schedule = TypeVar("Schedule")

# --- the GEMM ---

PROMOTE = 4
"""Stages of FP8 between additions in float32: 512 elements."""
# (columns of a tile, epilogue tiles, what a column costs) as measured on an H100; under scales of
# groups along K; and with no promotion.
_TILES = ((128, 2, 1.08), (176, 3, 1.05), (192, 3, 1.0))
_SCALED_TILES = ((128, 2, 1.1), (176, 2, 1.02), (192, 2, 1.0))
_WIDE_TILES = ((192, 3, 1.05), (256, 1, 1.0))


@lru_cache(maxsize=1024)
def configure(
    kind: str,
    m: int,
    n: int,
    out: str | QuantSpec,
    promote: int | None = None,
    b: str | None = None,
    scale_group_k: int = 0,
    blocks: tuple[int, int] | tuple[()] = (),
) -> Config:
    """The program for a product's size: the tile that fills the last round of blocks best.

    ``kind`` is the element type of both operands, or of a where b's is another, ``out`` the
    result's as in `Config`. None promotes every 512 elements for FP8, never for the others. Scales
    of groups along K have the result written as (N, M); under scales of blocks promote is 1.
    """
    if blocks:
        promote = 1
    if scale_group_k:
        promote = max(scale_group_k // K_OF_BF16_STAGE, 1)
    if promote is None:
        promote = PROMOTE if kind in ("e4m3", "e5m2") else 0

    def cost(tile: tuple[int, int, float]) -> float:
        tiles = -(-m // TILE_M) * -(-n // tile[0])
        return -(-tiles // MODEL_MULTIPROCESSORS) * tile[0] * tile[2]

    tiles: tuple[tuple[int, int, float], ...] = _TILES if promote else _WIDE_TILES
    tiles = _SCALED_TILES if scale_group_k else tiles
    quantized = out if isinstance(out, QuantSpec) else None
    if quantized is not None:
        widest = 128 if blocks else 256  # of sums under scales, for which registers are left
        fitting = (tile for tile in _TILES if quantizes(tile[0], quantized))
        tiles = tuple(tile for tile in fitting if tile[0] <= widest)
    tile_n, epilogue_tiles, _ = min(tiles, key=cost)
    # Ping-pong pays where each stage is promoted, or is long: 2% of 192 columns, of fewer it costs
    # 1%.
    ping_pong = tile_n == 192 and promote > 0 and not scale_group_k and quantized is None
    ping_pong = ping_pong or bool(blocks) or scale_group_k == K_OF_BF16_STAGE
    config = Config.of(kind, b, out=out, tile_n=tile_n, promote=promote, ping_pong=ping_pong)
    transposed = scale_group_k > 0
    config = config.replace(epilogue_tiles=epilogue_tiles, out_transposed=transposed)
    return config.replace(blocks=blocks, scale_group_k=scale_group_k)


# On an H100: (columns of a tile, epilogue tiles, cycles of a stage of K, and of what else a tile
# takes). The tensor cores take 4 cycles a column; narrower tiles read more of the cache for it, and
# FP8's sums are promoted.
_BF16_TILES = ((128, 2, 600, 1250), (160, 2, 720, 1560), (192, 3, 800, 1880), (256, 2, 1024, 2500))
_PROMOTED_TILES = ((128, 2, 640, 2500), (176, 3, 850, 2500), (192, 3, 880, 2500))
_LAUNCH_CYCLES, _BYTES_PER_CYCLE, _MAX_SPLITS = 4400, 2300, 16


@lru_cache(maxsize=4096)
def configure_split_k(
    kind: str,
    m: int,
    n: int,
    k: int,
    out: str,
    transposed: tuple[bool, bool] = (False, False),
    b: str | None = None,
) -> tuple[Config, Split | None]:
    """The program and the splits of K of a product of bfloat16 or of FP8, from its shape.

    ``b``: the element type of the right side, where that is another. The fewest cycles of a simple
    model: rounds of tiles plus, for splits, what writing, reading and adding them takes. FP8 sums
    are promoted where K is whole.
    """
    promote = 0 if kind == "bf16" else PROMOTE
    stages = -(-k * (2 if kind == "bf16" else 1) // ROW_BYTES)
    best: tuple[float, int, int, Split | None] | None = None
    for tile_n, epilogue_tiles, cycles, more in _PROMOTED_TILES if promote else _BF16_TILES:
        if any(transposed) and tile_n % BOX:
            continue
        tiles = -(-m // TILE_M) * -(-n // tile_n)
        for requested in range(1, min(_MAX_SPLITS, stages) + 1):
            whole = max(promote, 1)
            per_split = -(-stages // (requested * whole)) * whole
            splits = -(-stages // per_split)
            rounds = -(-tiles * splits // MODEL_MULTIPROCESSORS)
            cost = float(rounds * (per_split * cycles + more))
            if splits > 1:
                cost += _LAUNCH_CYCLES + 8 * m * n * splits / _BYTES_PER_CYCLE
            if best is None or cost < best[0]:
                split = Split(splits, per_split) if splits > 1 else None
                best = cost, tile_n, epilogue_tiles, split
    assert best is not None
    _, tile_n, epilogue_tiles, split = best
    if promote and split is None:
        return configure(kind, m, n, out, b=b), None
    config = Config.of(kind, b, out="float32" if split else out, tile_n=tile_n, promote=promote)
    config = config.replace(epilogue_tiles=epilogue_tiles, transposed=transposed)
    return config.replace(split_k=split is not None), split


# --- many tokens and packed weights ---

_DECODING_TILES = (64, 96, 128, 160, 192, 224, 256)
"""Columns of a tile."""
_STAGE_COLUMNS, _US_PER_COLUMN = 200, 0.0015
"""What a stage of a tile takes on an H200: a fixed time, as that of so many columns (E2M1 200 to
260, INT4 120), and us for each column."""
_MAX_DECODING_SPLITS, _BYTES_PER_US = 8, 3.5e6
"""Splits of K, at most; bytes of them that are moved in a us."""


def decoding_tiles(bits: int, group: int) -> tuple[int, ...]:
    """Columns of tiles, fewer where the sums of groups, or wider codes, need registers, too."""
    widest = (160 if bits == 4 else 128) if group else 256
    return tuple(tile for tile in _DECODING_TILES if tile <= widest)


@lru_cache(maxsize=1024)
def decoding_schedule(n: int, k: int, m: int, group: int, bits: int) -> tuple[int, Split | None]:
    """Columns of a tile, and splits of K, of a GEMM whose warps decode packed weights.

    ``group`` elements along K are under a float scale, or 0.
    """
    stages, minimum = k // K_OF_BF16_STAGE, max(2, 2 * group // K_OF_BF16_STAGE)
    found = []
    for tile in decoding_tiles(bits, group):
        tiles = -(-n // TILE_M) * -(-m // tile)
        for requested in range(1, _MAX_DECODING_SPLITS + 1):
            per_split = -(-stages // (requested * minimum)) * minimum
            splits = -(-stages // per_split)
            rounds = -(-tiles * splits // MODEL_MULTIPROCESSORS)
            time = rounds * (per_split * (tile + _STAGE_COLUMNS) * _US_PER_COLUMN + 2)
            if splits > 1:  # written and read again
                time += 4 + 8 * splits * m * n / _BYTES_PER_US
            found.append((time, tile, Split(splits, per_split) if splits > 1 else None))
    return min(found, key=lambda one: one[0])[1:]


def ready_rows(m: int, config: Config, multiprocessors: int) -> int:
    """Rows of weights with which blocks begin, where a GEMM expands the others beside products."""
    group = config.pipeline.swizzle
    whole_groups, rest = divmod(multiprocessors, group * -(-m // config.pipeline.tile_n))
    return (group * whole_groups + min(group, rest)) * TILE_M


# --- few tokens and packed weights ---

_SPLIT_K_BLOCKS = 1056  # that fill a large GPU


def split_k_sizes(n: int, k: int, segment: int) -> tuple[int, int]:
    """How many splits K has in `w4w8a16_sm80.cu`, and the elements of one.

    A split is a multiple of a segment.
    """
    segments = -(-k // segment)
    requested = max(_SPLIT_K_BLOCKS // -(-n // 64), 1)
    per_split = -(-segments // min(requested, segments))
    return -(-segments // per_split), per_split * segment


def _fastest(
    schedules: Callable[..., list[tuple[float, Schedule]]],
) -> Callable[..., Schedule | None]:
    """Of ways to divide a product the one that takes the least time; None where there is none."""

    @lru_cache(maxsize=1024)
    def fastest(*product: Any) -> Schedule | None:
        found = schedules(*product)
        return min(found, key=lambda one: one[0])[1] if found else None

    return fastest


def resident_schedules(
    n: int, k: int, tokens: int, block: int, together: int = 1
) -> list[tuple[float, resident.Schedule]]:
    """Ways to divide N and K that fit, and what the busiest warp has to do.

    In copies of a chunk, each about 1.5 us where memory is the bound. So many tiles of 16 rows stay
    together. A block takes so much shared memory that a multiprocessor has one.
    """
    chunk, warps = resident.CHUNK, resident.WARPS
    chunks, tiles = -(-k // chunk), -(-n // (16 * together))
    held = warps * resident.AHEAD * 16 * (chunk // 2 + chunk // block)
    found = []
    for slices in range(1, min(chunks, MODEL_MULTIPROCESSORS) + 1):
        per_slice = -(-chunks // slices)
        groups = min(MODEL_MULTIPROCESSORS // slices, tiles)
        most = -(-tiles // groups) * together  # of a block
        for split in (1, 2, 4, 8) if slices == 1 else (1,):
            sums = 64 * most * tokens * split if slices == 1 else 0
            shared = held + tokens * (2 * per_slice * chunk + 64) + sums
            if (slices - 1) * per_slice >= chunks or shared > SHARED_BYTES - 64:
                continue
            cost = -(-most // (warps // split)) * -(-per_slice // split) + tokens * per_slice / 30
            if slices > 1:  # the last block adds what others left
                cost += 1.3 + tokens * most * slices / 900
            shared = max(shared, SHARED_BYTES // 2)
            schedule = resident.Schedule(slices, per_slice * chunk, split, groups, shared)
            found.append((cost, schedule))
    return found


resident_schedule = _fastest(resident_schedules)


def wgmma_schedules(
    n: int, k: int, tokens: int, dtype: str, bits: int
) -> list[tuple[float, wgmma.Schedule]]:
    """Ways to divide N and K, each with its time in us by the model.

    The dtype is x's; tokens are its rows, three for each of float32.
    """
    found = []
    for split in (1, 2, 4):
        fitted = wgmma.fit(split, -(-tokens // 8), dtype, bits)
        if fitted is None:
            continue
        groups = -(-n // (wgmma.TILE_ROWS * 4 // split))
        segments = -(-(k // wgmma.SEGMENT) // split)
        for slices in range(1, min(segments, MODEL_MULTIPROCESSORS) + 1):
            # A segment as it was measured on an H100, for 1 to 64 tokens within a tenth; of
            # integers within a fifth, INT4 quicker, INT8 slower.
            segment_us = 0.82 + 0.0045 * tokens * (1 + split)
            rounds = -(-groups * slices // MODEL_MULTIPROCESSORS)
            cost = rounds * (-(-segments // slices) * segment_us + 1)
            if slices > 1:  # written and read again
                cost += 2 + slices * tokens * n / 5e5
            found.append((cost, wgmma.Schedule(split, slices, *fitted)))
    return found


wgmma_schedule = _fastest(wgmma_schedules)
