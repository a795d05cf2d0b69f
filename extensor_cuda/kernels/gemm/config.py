"""The Hopper GEMM's programs: a `Config` of named groups -> macros of gemm_sm90.cu."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.common.wgmma import wgmma
from extensor_cuda.kernels.quantize import quantize
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.driver import SHARED_BYTES

__all__ = [
    "ACTIVATIONS",
    "BOX",
    "EPILOGUE_COLUMNS",
    "K_OF_BF16_STAGE",
    "ROWS_PER_SCALE",
    "ROW_BYTES",
    "THREADS",
    "TILE_M",
    "Config",
    "Layout",
    "Pipeline",
    "Scaling",
    "Split",
    "Storage",
    "gemm_source",
    "quantizes",
]

TILE_M, ROW_BYTES, THREADS = 128, 128, 384
K_OF_BF16_STAGE = ROW_BYTES // 2
"""Elements of K in a stage of bfloat16."""
EPILOGUE_COLUMNS = 64
"""Columns of an epilogue tile of bfloat16."""
BOX = 64
"""Columns, and elements of K, of a TMA box of a transposed operand."""
ROWS_PER_SCALE = 4
"""Rows to a float scale that 128 rows share: TMA copies 16 bytes at a time."""
ACTIVATIONS = ("none", "relu", "silu", "gelu_tanh", "gelu")
_WARPS, _EPILOGUE_BYTES, _SLACK = 8, 16 * 128, 1024
_FOLDER = Path(__file__).parent

Macros = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Layout:
    """How the matrices lie in memory.

    Attributes:
        transposed: whether a and b lie as (K, M) and (K, N), with bf16.
        out_transposed: whether the result is written as (N, M).
        grouped: rows of a in groups, each with a b of its own.
        split_k: K is split, and the splits' sums are written one below the other.
    """

    transposed: tuple[bool, bool] = (False, False)
    out_transposed: bool = False
    grouped: bool = False
    split_k: bool = False


@dataclass(frozen=True)
class Storage:
    """How a is stored, where that is not what the tensor cores read.

    Attributes:
        expands: a is made from packed storage while others multiply: macros of expand.cuh.
        decodes: a is packed storage, decoded in registers: macros of decode_a.cuh.
    """

    expands: Macros = ()
    decodes: Macros = ()


@dataclass(frozen=True)
class Pipeline:
    """How a block works.

    Attributes:
        tile_n: columns of a block's tile: 64 to 256, a multiple of 16.
        promote: stages of 128 bytes along K between additions in float32; 0: never.
        cluster: blocks that share a tile of b, 1 or 2.
        stages: of the ring in shared memory; None: as many as fit.
        epilogue_tiles: of 16 rows of 128 bytes, in which a warp's results leave while it goes on.
        swizzle: rows of tiles that are walked together, for the second-level cache.
        ping_pong: a warpgroup issues a stage when the other one has, and promotes while that one
            is multiplied; with promote.
        guard: a barrier that is never reached ends the kernel with an error.
    """

    tile_n: int = 192
    promote: int = 4
    cluster: int = 1
    stages: int | None = None
    epilogue_tiles: int = 1
    swizzle: int = 8
    ping_pong: bool = False
    guard: bool = False


@dataclass(frozen=True)
class Scaling:
    """What kind of scales multiplies the sums. All false: one power of two for each operand.

    Attributes:
        vectors: a power of two for each row or column.
        factors: float32 factors instead of powers of two.
        zeros: zero points, with s8 and factors.
        blocks: float32 scales of 128 elements along K on both sides (1D and 2D block scaling), with
            FP8 and promote=1: one for so many rows of a, and of b: 1, or `ROWS_PER_SCALE` where
            128 rows have the same. (): none.
        scale_group_k: elements of K for which a's rows have float32 scales, with bf16: 32 or a
            multiple of 64; promote is then what it takes. 0: none.
    """

    vectors: bool = False
    factors: bool = False
    zeros: bool = False
    blocks: tuple[int, int] | tuple[()] = ()
    scale_group_k: int = 0

    def __post_init__(self) -> None:
        if self.blocks not in ((), *product((1, ROWS_PER_SCALE), repeat=2)):
            raise ValueError(
                f"gemm: expected scales of 1 or {ROWS_PER_SCALE} rows of both, or (), got "
                f"{self.blocks}"
            )


@dataclass(frozen=True)
class Config:
    """One specialisation of gemm_sm90.cu.

    Attributes:
        a, b: element types: e4m3 and e5m2 in any mix, bf16 or s8 with themselves.
        out: "float32", "bfloat16", or how rows are quantized (`gemm.requantize`).
        activation: applied to the sum with its bias.
        extras: bias, residual, amax or an activation.
        layout, storage, pipeline, scaling: see there.
    """

    a: str = "e5m2"
    b: str = "e5m2"
    out: str | QuantSpec = "float32"
    activation: str = "none"
    extras: bool = False
    layout: Layout = field(default_factory=Layout)
    storage: Storage = field(default_factory=Storage)
    pipeline: Pipeline = field(default_factory=Pipeline)
    scaling: Scaling = field(default_factory=Scaling)

    @classmethod
    def of(cls, a: str = "e5m2", b: str | None = None, **options: Any) -> Config:
        """A config of element types and of fields of any group, by their names."""
        return cls(a, b or a).replace(**options)

    def replace(self, **changes: Any) -> Config:
        """The config with other values of its fields, or of its groups' fields."""
        own = {name: value for name, value in changes.items() if name not in _GROUP_OF}
        for group in {_GROUP_OF[name] for name in changes if name in _GROUP_OF}:
            inner = {name: v for name, v in changes.items() if _GROUP_OF.get(name) == group}
            own[group] = dataclasses.replace(getattr(self, group), **inner)
        return dataclasses.replace(self, **own)

    @property
    def requantizes(self) -> bool:
        """Whether the result is written as codes and scales."""
        return isinstance(self.out, QuantSpec)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a in a stage."""
        decodes = dict(self.storage.decodes)
        return K_OF_BF16_STAGE * int(decodes["CODEC_BITS"]) // 8 if decodes else ROW_BYTES

    @property
    def depth(self) -> int:
        """Stages of the ring."""
        stages = self.pipeline.stages
        return min((SHARED_BYTES - self._fixed) // self._stage, 8) if stages is None else stages

    @property
    def _stage(self) -> int:
        """Bytes of a stage: two tiles, their scales, two barriers."""
        scaling, tile_n = self.scaling, self.pipeline.tile_n
        group_k, blocks = scaling.scale_group_k, scaling.blocks
        scales = max(K_OF_BF16_STAGE // group_k, 1) * TILE_M if group_k else 0
        if blocks:
            scales = TILE_M // blocks[0] + tile_n // blocks[1]
        return TILE_M * self.row_bytes + tile_n * ROW_BYTES + 4 * scales + 16

    @property
    def _fixed(self) -> int:
        """Bytes of shared memory outside the ring."""
        scaling = self.scaling
        tables = 4 * 4 * (64 + self.pipeline.tile_n) * (3 if scaling.zeros else 1)
        tables = tables if scaling.vectors or scaling.factors else 0
        barriers = 16 if self.requantizes else 0  # two of an epilogue tile
        tiles = self.pipeline.epilogue_tiles
        return _WARPS * tiles * (_EPILOGUE_BYTES + barriers) + tables + _SLACK

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.depth * self._stage + self._fixed


_GROUP_OF = {
    inner.name: kind.__name__.lower()
    for kind in (Layout, Storage, Pipeline, Scaling)
    for inner in dataclasses.fields(kind)
}


@dataclass(frozen=True)
class Split:
    """Split-K: splits of K, each multiplied by itself, then added in order.

    Attributes:
        count: how many.
        stages: of 128 bytes along K, of each but perhaps the last.
    """

    count: int
    stages: int


def quantizes(tile_n: int, spec: QuantSpec) -> bool:
    """Whether a tile of so many columns leaves quantized: its epilogue tiles begin where blocks do.

    Rules that try several scales on a block's values need registers that wider tiles do not leave.
    """
    assert isinstance(spec.tile, tuple)
    whole = tile_n % spec.tile[1] == 0 and EPILOGUE_COLUMNS % spec.tile[1] == 0
    return whole and (tile_n <= 128 or spec.rule not in quantize.SEARCHES)


@lru_cache(maxsize=256)
def gemm_source(config: Config) -> Source:
    """The GEMM's program."""
    coding: dict[str, str] = {}
    if isinstance(config.out, QuantSpec):
        plan = quantize.plan_of(config.out, (1, EPILOGUE_COLUMNS))
        assert isinstance(plan, quantize.Plan), plan
        coding = dict(quantize.quantize_source(plan, "bfloat16", "codes", True, False).macros)
    layout, pipeline = config.layout, config.pipeline
    scaling, storage, cluster = config.scaling, config.storage, pipeline.cluster
    a_rows, b_rows = scaling.blocks or (1, 1)
    macros = coding | {
        "GEMM_TILE_N": pipeline.tile_n,
        "GEMM_STAGES": config.depth,
        "GEMM_CLUSTER": cluster,
        "GEMM_CLUSTER_DIMS": f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else "",
        "GEMM_PROMOTE": pipeline.promote,
        "GEMM_KIND": {"s8": 2, "bf16": 1}.get(config.a, 0),
        "GEMM_OUT_BF16": int(config.out != "float32"),
        "GEMM_REQUANTIZED": int(bool(coding)),
        "GEMM_ACTIVATION": ACTIVATIONS.index(config.activation),
        "GEMM_EPILOGUE_TILES": pipeline.epilogue_tiles,
        "GEMM_RASTER_GROUP": pipeline.swizzle,
        "GEMM_PING_PONG": int(pipeline.ping_pong),
        "GEMM_VECTORS": 2 if scaling.factors else int(scaling.vectors),
        "GEMM_ZERO_POINTS": int(scaling.zeros),
        "GEMM_SCALES_1D2D": int(bool(scaling.blocks)),
        "GEMM_A_SCALE_ROWS": a_rows,
        "GEMM_B_SCALE_ROWS": b_rows,
        "GEMM_SCALE_GROUP_K": scaling.scale_group_k,
        "GEMM_GROUPED": int(layout.grouped),
        "GEMM_A_MN_MAJOR": int(layout.transposed[0]),
        "GEMM_B_MN_MAJOR": int(layout.transposed[1]),
        "GEMM_C_TRANSPOSED": int(layout.out_transposed),
        "GEMM_SPLIT_K": int(layout.split_k),
        "GEMM_EXTRAS": int(config.extras),
        "GEMM_EXPAND_A": int(bool(storage.expands)),
        "GEMM_DECODE_A": int(dict(storage.decodes).get("CODEC_BITS", 0)),
        "COMMON_GUARD": int(pipeline.guard),
        **dict(storage.expands),
        **dict(storage.decodes),
    }
    plain = Source.read(_FOLDER / "gemm_sm90.cu", macros)
    functions = wgmma(
        config.a,
        config.b,
        pipeline.tile_n,
        registers=bool(storage.decodes),
        transposed=layout.transposed,
    )
    return dataclasses.replace(plain, text=plain.text.replace("//WGMMA//", functions))
