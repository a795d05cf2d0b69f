"""Decodes what the fused quantizers write: codes and scales -> float32 or bfloat16."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray
from extensor.quant.reference import round_to
from extensor_cuda.kernels.quantize.quantize import THREADS, Plan, element_macros
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["dequantize", "dequantize_source"]

Array = Any


@lru_cache(maxsize=4096)
def dequantize_source(plan: Plan, whole: bool, half: bool = False) -> Source:
    """The decoder's program for one plan; ``half``: to bfloat16."""
    macros = element_macros(plan.spec.row.element) | {
        "QUANT_WHOLE": int(whole),
        "CODEC_BLOCK": plan.block,
        "CODEC_UE4M3": int(not plan.spec.is_mx),
        "QUANT_HALF": int(half),
    }
    return Source.read(Path(__file__).with_suffix(".cu"), macros)


def dequantize(q: QuantArray, plan: Plan, xp: Any, dtype: str = "float32") -> Array:
    """Codes and scales -> values of the plan's shape, without waiting."""
    half = dtype == "bfloat16"
    values = xp.empty(plan.shape, dtype=ml_dtypes.bfloat16 if half else xp.float32)
    codes, scales = xp.ascontiguousarray(q.codes), xp.ascontiguousarray(q.scales)
    aligned = codes.data.ptr % 4 == 0 and scales.data.ptr % 4 == 0
    whole = aligned and plan.length % plan.block == 0
    threads = plan.outer * plan.scales_shape[plan.spec.axis] * (plan.block // 4)
    sizes: tuple[int, ...] = (plan.outer, plan.length)
    if plan.columns:
        whole = whole and plan.inner % 4 == 0
        threads *= -(-plan.inner // 4)
        sizes = (*sizes, plan.inner)
    kernel = "dequantize_columns" if plan.columns else "dequantize_rows"
    arrays = codes, scales, q.tensor_scale, values
    source, blocks = dequantize_source(plan, whole, half), -(-threads // THREADS)
    launch(source, kernel, blocks, THREADS, *arrays, *map(np.int64, sizes))
    return values if half else round_to(values, dtype)
