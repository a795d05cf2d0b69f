"""What the tests of blocked products share: formats, exact values, the bound, each variant.

Values are decoded here from the tables, in float64: codes times scales, unrounded. The bounds are
the ones stated in extensor/backends/cpu/product_paths.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

import extensor as et
from extensor.backends import cpu
from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.rounding import unpack
from extensor.quant.spec import QuantSpec

BACKEND = cpu.make_backend()
CORE = BACKEND.core
VARIANTS = CORE.gemm_levels() if CORE else ["numpy only"]
TILED = [name for name in VARIANTS if name in ("avx512_bf16", "amx")]
"""Those with tiles of bfloat16."""
UNIT = 2.0**-24


def short(value: object) -> str:
    """A spec's name in test ids: what differs from the defaults."""
    if not isinstance(value, QuantSpec):
        return str(value)
    tile = "" if value.tile is None else f"-{value.tile}".replace(", ", "x")
    return f"{value.format}{tile}{'' if value.symmetric else '-zero'}"


MXFP4, NVFP4 = QuantSpec("mxfp4"), QuantSpec("nvfp4")
ZEROS = QuantSpec("int8", symmetric=False)
TILES = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4")


def quantized(shape: tuple[int, int], spec: QuantSpec, seed: int) -> QuantArray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    return BACKEND.quantize(x.astype(np.float32), spec.resolve(2))[0]


def exact(q: QuantArray) -> np.ndarray:
    """Codes times scales in float64; int8 and int4 with their zero points."""
    element, k = q.spec.row.element, q.shape[1]
    values = np.array(element.values)[unpack(q.codes, element.bits, k, np)]
    scales = q.scales.astype(np.float64)
    if q.spec.scale_name == "e8m0":
        scales = np.where(q.scales == 255, np.nan, np.ldexp(1.0, q.scales.astype(int) - 127))
    elif q.spec.scale_name == "ue4m3":
        scales = np.array(et.formats.ELEMENTS["e4m3"].values)[q.scales]
    rows, columns = tile_extent(q.spec, q.shape)

    def spread(part: np.ndarray) -> np.ndarray:
        return part.repeat(rows, axis=0).repeat(columns, axis=1)[: q.shape[0], :k]

    if q.zero_points is not None:
        values = values - spread(q.zero_points.astype(np.float64))
    tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    return values * spread(scales) * tensor_scale


def gamma(n: int) -> float:
    return n * UNIT / (1 - n * UNIT)


def bf16_terms(level: str, k: int) -> int:
    """What `check` takes for a product on tiles of bfloat16."""
    return math.ceil(k / 32) + 14 if level == "amx" else k


def check(got: np.ndarray, a: np.ndarray, b: np.ndarray, terms: int, what: object) -> None:
    assert got.dtype == np.float32, what
    assert got.shape == (a.shape[0], b.shape[0]), what
    bound = gamma(terms + 4) * (np.abs(a) @ np.abs(b).T) * (1 + 1e-9) + a.shape[1] * 2.0**-126
    assert (np.abs(got - a @ b.T) <= bound).all(), what


def check_weight_only(got: np.ndarray, x: np.ndarray, b: np.ndarray, group: int) -> None:
    """|error| <= gamma S + 2 u T, T with the largest |x| of a group: `product_paths` of the CPU."""
    k = x.shape[1]
    size = np.abs(x).astype(np.float64) @ np.abs(b).T
    padded = np.abs(np.pad(x, ((0, 0), (0, -k % group)))).reshape(x.shape[0], -1, group)
    largest = np.repeat(padded.max(axis=2), group, axis=1)[:, :k].astype(np.float64)
    error = np.abs(got - x.astype(np.float64) @ b.T)
    assert (error <= gamma(k + 4) * size + 2 * UNIT * (largest @ np.abs(b).T) + 2.0**-120).all()


@cache
def case(a: QuantSpec, b: QuantSpec, shape: tuple[int, int, int]) -> tuple[Any, ...]:
    m, n, k = shape
    qa, qb = quantized((m, k), a, 1), quantized((n, k), b, 2)
    return qa, qb, exact(qa), exact(qb)
