"""Launches `quantize_operand.cu`: floats -> GEMM operands of rows, columns or both, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.spec import REBASE_TILE, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.prepare.rebase import E5M2_LIFT, E5M2_SPAN
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = [
    "AMAX_MARGIN",
    "MATRIX",
    "Side",
    "find_amax",
    "fused_source",
    "launch_batch",
    "launch_fused",
    "tiles_of",
]

Array = Any

_SOURCE = Path(__file__).parent / "quantize_operand.cu"
AMAX_MARGIN = 4
"""Binades that a tensor may grow between two steps, under delayed scaling."""
_COLUMNS, _GUARDED_BLOCKS, _AMAX_BLOCKS = 128, 264, 1056
MATRIX = np.dtype(
    [(name, np.uint64) for name in ("x", "amax_state", "rowwise", "columnwise", "exponent")]
    + [(f"{side}_flag", np.uint64) for side in ("rowwise", "columnwise")]
    + [(f"{side}_counts", np.uint64) for side in ("rowwise", "columnwise")]
    + [(name, np.int64) for name in ("rows", "columns", "start")]
    + [(f"{side}_scales", np.uint64) for side in ("rowwise", "columnwise")]
)
"""`Matrix` of quantize_operand.cu."""


@dataclass(frozen=True, eq=False)
class Side:
    """One operand that a launch makes: of rows (axis 1) or of columns (axis 0).

    Attributes:
        spec: resolved; two sides of a launch differ in their axis alone.
        stream: given exactly under stochastic rounding.
        out: what codes, uint8, or bfloat16 bits, uint16, are written to.
        flag, counts, scales: see quantize_operand.cu; or None.
        packed: whether ``out`` and ``scales`` are packed storage, of columns beside rows.
    """

    spec: QuantSpec
    stream: Stream | None
    out: Array
    flag: Array | None = None
    counts: Array | None = None
    scales: Array | None = None
    packed: bool = False


@lru_cache(maxsize=256)
def fused_source(
    spec: QuantSpec,
    dtype: str,
    rows: bool,
    columns: bool,
    wide: bool,
    stats: bool = True,
    many: bool = False,
    packed: bool = False,
) -> Source:
    """The program that makes operands of rows, of columns or both, of an input dtype.

    The spec is resolved for a matrix; its axis does not matter. ``wide`` makes bfloat16 values
    instead of FP8 codes, ``stats`` counts saturated and flushed values, ``many`` takes several
    matrices in one launch, ``packed`` packs columns. Bfloat16 without stats is that of parts of a
    matrix.
    """
    plan = kernels.plan_of(spec.replace(axis=1, rebased=False), (256, 256))
    assert isinstance(plan, kernels.Plan), plan
    common = kernels.quantize_source(plan, dtype, "values" if wide else "codes", True, stats)
    macros = dict(common.macros) | {
        "PREPARE_ROWWISE": int(rows),
        "PREPARE_COLUMNWISE": int(columns),
        "PREPARE_BF16": int(wide),
        "PREPARE_REBASED": int(spec.rebased),
        "PREPARE_MULTI_TENSOR": int(many),
        "PREPARE_WINDOW": int(wide and not stats),
        "PREPARE_PACKED": int(packed),
        "CODEC_LIFT": E5M2_LIFT,  # TOP is the element's largest value here
        "PREPARE_SPAN": E5M2_SPAN,
        "PREPARE_MARGIN": AMAX_MARGIN,
        "PREPARE_MIN_CTAS": _resident(spec, dtype, wide),
    }
    return Source.read(_SOURCE, macros)


def _resident(spec: QuantSpec, dtype: str, wide: bool) -> int:
    """Blocks of threads of a multiprocessor: as many as leave them registers without spilling."""
    if spec.rebased and dtype != "float32":
        return 3 if spec.rounding == "stochastic" else 4
    return 4 if wide else 5 if dtype == "float32" else 3


def _tile_rows(x: Array, wide: bool) -> int:
    """Rows of a tile, as in quantize_operand.cu: half as many as a block has threads."""
    return 128 if x.itemsize == 2 and not wide else 64


def tiles_of(x: Array, wide: bool) -> int:
    """Blocks of threads of a matrix."""
    rows, columns = x.shape
    return -(-rows // _tile_rows(x, wide)) * -(-columns // _COLUMNS)


def launch_fused(
    x: Array,
    sides: Sequence[Side],
    exponent: Array | None = None,
    amax_state: Array | None = None,
    guards: Sequence[Array] = (),
    part: tuple[int, int] | None = None,
) -> None:
    """Make one operand or two, of rows and of columns, of x; does not wait.

    x is a contiguous matrix, rows a multiple of 16 bytes. The power of two of codes is written to
    ``exponent``, int32 (1,); the amax state is then read and written. With two flags as guards,
    nothing is written unless one is set, and of one operand ``part`` says which rows are made: from
    a multiple of 128 to another, or to the end.
    """
    of = {side.spec.axis: side for side in sides}
    both = [of.get(axis) for axis in (1, 0)]
    packed = any(side.packed for side in sides)
    wide, rebased = sides[0].out.itemsize == 2, not packed and sides[0].scales is not None
    stats = not (wide and guards)
    source = fused_source(sides[0].spec, x.dtype.name, 1 in of, 0 in of, wide, stats, packed=packed)

    def pointers(name: str) -> list[Any]:
        return [None if side is None else getattr(side, name) for side in both]

    rows, columns = x.shape
    ends = [[0, 0], [rows, columns]]
    if part is not None:
        for end, bound in zip(ends, part, strict=True):
            end[1 - sides[0].spec.axis] = bound
    window = [*ends[0], *ends[1]] if wide and guards else []
    tiles = -(-rows // REBASE_TILE) * -(-columns // _COLUMNS) if rebased else tiles_of(x, wide)
    blocks, threads = min(tiles, _GUARDED_BLOCKS) if guards else tiles, 2 * _tile_rows(x, wide)
    arrays = x, amax_state, *pointers("out"), exponent, *pointers("flag"), *pointers("scales")
    counts = *pointers("counts"), *(guards or (None, None)), *random_arguments(*pointers("stream"))
    numbers = map(np.int64, (rows, columns, *window))
    launch(source, "operands", blocks, threads, *arrays, *counts, *numbers)


def launch_batch(source: Source, table: Array, count: int, tiles: int, item: int) -> None:
    """Make operands of ``count`` matrices, from a table of `MATRIX`; does not wait.

    ``tiles`` are those of all matrices, whose elements have ``item`` bytes.
    """
    launch(source, "operands", tiles, 256 if item == 2 else 128, table, np.int32(count))


def find_amax(x: Array, spec: QuantSpec, amax_state: Array) -> None:
    """Put the largest magnitude of x in its amax state, uint32 (5,); does not wait."""
    source = fused_source(spec, x.dtype.name, True, False, False)
    vectors = x.nbytes // 16
    launch(
        source,
        "largest",
        min(_AMAX_BLOCKS, -(-vectors // 256)),
        256,
        x,
        amax_state,
        np.int64(vectors),
    )
