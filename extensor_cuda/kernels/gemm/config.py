"""Macros of gemm_sm90.cu: what element types, tile and epilogue make of the Hopper GEMM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.common.wgmma import wgmma
from extensor_cuda.kernels.quantize import quantize
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.driver import SHARED_BYTES

__all__ = [
    "BOX",
    "LINES",
    "ROW_BYTES",
    "STAGE_OF_BF16",
    "THREADS",
    "TILE_M",
    "Config",
    "Split",
    "configure",
    "configure_parts",
    "gemm_source",
]

TILE_M, ROW_BYTES, THREADS = 128, 128, 384
_PROMOTE = 4  # stages of FP8 between additions in float32: 512 elements
STAGE_OF_BF16 = ROW_BYTES // 2  # elements of K
PATCH_COLUMNS = 64  # of a patch of bfloat16
BOX = 64  # columns, and of K, of a box of an operand that lies the other way
LINES = 4  # rows to a float scale that 128 rows share: TMA copies 16 bytes at a time
ACTIVATIONS = ("none", "relu", "silu", "gelu_tanh", "gelu")
_WARPS, _PATCH, _SLACK = 8, 16 * 128, 1024
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    """One specialisation of gemm_sm90.cu.

    Attributes:
        a, b: element types: e4m3 and e5m2 in any mix, bf16 or s8 with themselves.
        tile_n: columns of a block's tile: 64 to 256, a multiple of 16.
        promote: stages of 128 bytes along K between additions in float32; 0: never.
        cluster: blocks that share a tile of B, 1 or 2.
        stages: of the ring; None: as many as fit.
        out: "float32", "bfloat16", or how rows are quantized (`gemm.requantize`).
        activation: applied to the sum with its bias.
        patches: of 16 rows of 128 bytes, in which a warp's results leave while it goes on.
        group: rows of blocks that are walked together, for the second-level cache.
        turns: a warpgroup issues a stage when the other one has, and promotes while that one is
            multiplied; with promote.
        vectors: exponents of each row or column; else one for all of an operand.
        factors: float32 factors instead of exponents, for both operands.
        zeros: zero points, with s8 and factors.
        blocks: float32 scales of 128 elements along K on both sides, with FP8 and promote=1: one
            for so many rows of a, and of b: 1, or `LINES` where 128 rows have the same. (): none.
        every: elements of K for which A's rows have float32 scales, with bf16: 32 or a multiple
            of 64; promote is then what it takes. 0: none.
        grouped: rows of A in groups, each with a B of its own.
        down: whether a and b lie as (K, M) and (K, N), with bf16.
        c_down: whether C is written as (N, M).
        split: K in parts, whose sums are written one below the other.
        extras: bias, residual, amax or an activation.
        expands: A is made from packed storage as it is multiplied: macros of expand.cuh.
        decodes: A is packed storage, decoded in registers: macros of decode_a.cuh.
        guard: a barrier that is never reached ends the kernel with an error.
    """

    a: str = "e5m2"
    b: str = "e5m2"
    tile_n: int = 192
    promote: int = 4
    cluster: int = 1
    stages: int | None = None
    out: str | QuantSpec = "float32"
    activation: str = "none"
    patches: int = 1
    group: int = 8
    turns: bool = False
    vectors: bool = False
    factors: bool = False
    zeros: bool = False
    blocks: tuple[int, int] | tuple[()] = ()
    every: int = 0
    grouped: bool = False
    down: tuple[bool, bool] = (False, False)
    c_down: bool = False
    split: bool = False
    extras: bool = False
    expands: tuple[tuple[str, str], ...] = ()
    decodes: tuple[tuple[str, str], ...] = ()
    guard: bool = False

    def __post_init__(self) -> None:
        if self.blocks not in ((), *product((1, LINES), repeat=2)):
            raise ValueError(
                f"gemm: wanted scales of 1 or {LINES} rows of both, or (), got {self.blocks}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a in a stage."""
        return (
            STAGE_OF_BF16 * int(dict(self.decodes)["CODEC_BITS"]) // 8
            if self.decodes
            else ROW_BYTES
        )

    @property
    def depth(self) -> int:
        """Stages of the ring."""
        return (
            min((SHARED_BYTES - self._beside) // self._stage, 8)
            if self.stages is None
            else self.stages
        )

    @property
    def _stage(self) -> int:
        """Bytes of a stage: two tiles, their scales, two barriers."""
        lines = max(STAGE_OF_BF16 // self.every, 1) if self.every else 0  # of scales of rows
        scales = lines * TILE_M
        if self.blocks:
            scales = TILE_M // self.blocks[0] + self.tile_n // self.blocks[1]
        return TILE_M * self.row_bytes + self.tile_n * ROW_BYTES + 4 * scales + 16

    @property
    def _beside(self) -> int:
        """Bytes of shared memory beside the ring."""
        tables = 4 * 4 * (64 + self.tile_n) * (3 if self.zeros else 1)
        tables = tables if self.vectors or self.factors else 0
        handed = 0 if isinstance(self.out, str) else 16  # two barriers a patch
        return _WARPS * self.patches * (_PATCH + handed) + tables + _SLACK

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.depth * self._stage + self._beside


# (columns of a tile, patches, what a column costs) as measured on an H100; under scales of groups
# along K; and with no promotion.
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
    blocks: int = 132,
    b: str | None = None,
    every: int = 0,
    scales: tuple[int, int] | tuple[()] = (),
) -> Config:
    """The program for a product's size: the tile that fills the last round of blocks best.

    Args:
        kind: element type of both operands, or of a.
        m: rows of the result.
        n: its columns.
        out: its type, as in `Config`.
        promote: as in `Config`; None: every 512 elements for FP8, never for the others.
        blocks: multiprocessors of the GPU.
        b: element type of b, where it is another.
        every: as in `Config`, with C written as (N, M).
        scales: `Config.blocks`; promote is then 1.
    """
    if scales:
        promote = 1
    if every:
        promote = max(every // STAGE_OF_BF16, 1)
    if promote is None:
        promote = _PROMOTE if kind in ("e4m3", "e5m2") else 0

    def cost(tile: tuple[int, int, float]) -> float:
        tiles = -(-m // TILE_M) * -(-n // tile[0])
        return -(-tiles // blocks) * tile[0] * tile[2]

    tiles: tuple[tuple[int, int, float], ...] = _TILES if promote else _WIDE_TILES
    tiles = _SCALED_TILES if every else tiles
    if isinstance(out, QuantSpec):
        widest = 128 if scales else 256  # of sums under scales, for which registers are left
        tiles = tuple(tile for tile in _TILES if tile[0] <= widest and quantizes(tile[0], out))
    tile_n, patches, _ = min(tiles, key=cost)
    config = Config(kind, b or kind, tile_n, promote, out=out, patches=patches, every=every)
    # Turns pay where each stage is promoted, or is long: 2% of 192 columns, of fewer they cost 1%.
    turns = tile_n == 192 and promote > 0 and not every and isinstance(out, str)
    turns = turns or bool(scales) or every == STAGE_OF_BF16
    return replace(config, blocks=scales, turns=turns, c_down=every > 0)


def quantizes(tile_n: int, spec: QuantSpec) -> bool:
    """Whether a tile of so many columns leaves quantized: in patches that begin where blocks do.

    Rules that try several scales on a block's values need registers that wider tiles do not leave.
    """
    assert isinstance(spec.tile, tuple)
    whole = tile_n % spec.tile[1] == 0 and PATCH_COLUMNS % spec.tile[1] == 0
    return whole and (tile_n <= 128 or spec.rule not in quantize.SEARCHES)


@dataclass(frozen=True)
class Split:
    """K in parts, each multiplied by itself, then added in order.

    Attributes:
        parts: how many.
        stages: of 128 bytes along K, of each but perhaps the last.
    """

    parts: int
    stages: int


# On an H100: (columns of a tile, patches, cycles of a stage of K). The tensor cores take 4 cycles a
# column; narrower tiles read more of the cache for it, and FP8's sums are promoted.
_DENSE_TILES = ((128, 2, 640), (192, 3, 800), (256, 2, 1024))
_PROMOTED_TILES = ((128, 2, 640), (176, 3, 850), (192, 3, 880))
_TILE_CYCLES, _LAUNCH_CYCLES, _BYTES_A_CYCLE = 2500, 4400, 2300
_MULTIPROCESSORS, _MOST_PARTS = 132, 16


@lru_cache(maxsize=4096)
def configure_parts(
    kind: str, m: int, n: int, k: int, out: str, down: tuple[bool, bool] = (False, False)
) -> tuple[Config, Split | None]:
    """The program and the parts of K of a product of bfloat16 arrays or of E5M2, from its shape.

    So that a shape's bits are the same on every GPU, the parts are chosen for one of 132
    multiprocessors: the fewest cycles of a simple model, rounds of tiles plus, for parts, what
    writing, reading and adding them takes. FP8 sums are promoted where they are without parts.

    Args:
        kind: "bf16" or "e5m2", element type of both operands.
        m: rows of the result, 1 or more.
        n: its columns, 1 or more.
        k: terms of a sum.
        out: type of the result.
        down: as in `Config`.
    """
    promote = 0 if kind == "bf16" else _PROMOTE
    stages = -(-k * (2 if kind == "bf16" else 1) // ROW_BYTES)
    best: tuple[float, int, int, Split | None] | None = None
    for tile_n, patches, cycles in _PROMOTED_TILES if promote else _DENSE_TILES:
        tiles = -(-m // TILE_M) * -(-n // tile_n)
        for wanted in range(1, min(_MOST_PARTS, stages) + 1):
            whole = max(promote, 1)
            each = -(-stages // (wanted * whole)) * whole
            parts = -(-stages // each)
            rounds = -(-tiles * parts // _MULTIPROCESSORS)
            cost = float(rounds * (each * cycles + _TILE_CYCLES))
            if parts > 1:
                cost += _LAUNCH_CYCLES + 8 * m * n * parts / _BYTES_A_CYCLE
            if best is None or cost < best[0]:
                best = cost, tile_n, patches, Split(parts, each) if parts > 1 else None
    assert best is not None
    _, tile_n, patches, split = best
    if promote and split is None:
        return configure(kind, m, n, out), None
    config = Config(kind, kind, tile_n, promote, out=out, patches=patches, down=down)
    return replace(config, out="float32", split=True) if split else config, split


@lru_cache(maxsize=256)
def gemm_source(config: Config) -> Source:
    """The GEMM's program."""
    coding: dict[str, str] = {}
    if isinstance(config.out, QuantSpec):
        plan = quantize.plan_of(config.out, (1, PATCH_COLUMNS))
        assert isinstance(plan, quantize.Plan), plan
        coding = dict(quantize.quantize_source(plan, "bfloat16", "codes", True, False).macros)
    macros = coding | {
        "GEMM_TILE_N": config.tile_n,
        "GEMM_STAGES": config.depth,
        "GEMM_CLUSTER": config.cluster,
        "GEMM_CLUSTER_DIMS": f"__cluster_dims__({config.cluster}, 1, 1)"
        if config.cluster > 1
        else "",
        "GEMM_PROMOTE": config.promote,
        "GEMM_KIND": {"s8": 2, "bf16": 1}.get(config.a, 0),
        "GEMM_OUT_BF16": int(config.out != "float32"),
        "GEMM_REQUANTIZED": int(bool(coding)),
        "GEMM_ACTIVATION": ACTIVATIONS.index(config.activation),
        "GEMM_EPILOGUE_TILES": config.patches,
        "GEMM_RASTER_GROUP": config.group,
        "GEMM_PING_PONG": int(config.turns),
        "GEMM_VECTORS": 2 if config.factors else int(config.vectors),
        "GEMM_ZERO_POINTS": int(config.zeros),
        "GEMM_SCALES_1D2D": int(bool(config.blocks)),
        "GEMM_A_SCALE_ROWS": config.blocks[0] if config.blocks else 1,
        "GEMM_B_SCALE_ROWS": config.blocks[1] if config.blocks else 1,
        "GEMM_SCALE_GROUP_K": config.every,
        "GEMM_GROUPED": int(config.grouped),
        "GEMM_A_MN_MAJOR": int(config.down[0]),
        "GEMM_B_MN_MAJOR": int(config.down[1]),
        "GEMM_C_TRANSPOSED": int(config.c_down),
        "GEMM_SPLIT_K": int(config.split),
        "GEMM_EXTRAS": int(config.extras),
        "GEMM_EXPAND_A": int(bool(config.expands)),
        "GEMM_DECODE_A": int(dict(config.decodes).get("CODEC_BITS", 0)),
        "COMMON_GUARD": int(config.guard),
        **dict(config.expands),
        **dict(config.decodes),
    }
    plain = Source.read(_FOLDER / "gemm_sm90.cu", macros)
    functions = wgmma(
        config.a, config.b, config.tile_n, registers=bool(config.decodes), transposed=config.down
    )
    return replace(plain, text=plain.text.replace("//WGMMA//", functions))
