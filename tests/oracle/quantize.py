"""The slow oracle: block quantization one number at a time, sharing no code with extensor.

It reads a spec as a bag of attributes; grids, formats, dialects, scale rules, random
bits and the order of operations are written out here a second time, from the rules.
"""

from __future__ import annotations

import numpy as np

from tests.oracle.blocks import block_width, pack
from tests.oracle.families import quantize_float, quantize_mx, quantize_nv, quantize_outlier
from tests.oracle.grid import GRIDS
from tests.oracle.hadamard import hadamard
from tests.oracle.work import DEFAULT_RULE, DIALECT_RULE, FORMATS, Result, Work

__all__ = ["FORMATS", "quantize"]


def quantize(
    x: np.ndarray, spec: object, stream: object = None, previous: np.ndarray | None = None
) -> Result:
    """What must be stored for an array under a spec."""
    if spec.format not in FORMATS:
        raise KeyError(f"{spec.format}: write its row in FORMATS of tests/oracle/work.py, too")
    element, kind, tile = FORMATS[spec.format]
    tile = spec.tile or tile
    axis = spec.axis % x.ndim
    rule = spec.scale_rule or DEFAULT_RULE.get(spec.format)
    extra: dict[str, np.ndarray] = {}
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(np.float32)
        coded = x if spec.transform is None else hadamard(x, axis, spec.transform)
        work = Work(coded, axis, tile, spec, stream, previous, element)
        tensor_scale = zeros = None
        if kind == "e8m0":
            rule = rule or DIALECT_RULE.get(spec.dialect, "floor")
            scales = quantize_mx(work, rule)
        elif kind == "nv":
            assert rule is not None
            scales, tensor_scale = quantize_nv(work, rule)
        elif kind == "float":
            scales, zeros = quantize_float(work, rule or "amax")
        else:
            scales = quantize_outlier(work, rule or "amax", extra)
        values = work.values
        if spec.transform is not None:
            values = hadamard(values, axis, spec.transform, inverse=True)
            values = values[(slice(None),) * axis + (slice(x.shape[axis]),)]
    flushed = sum(v != 0 and w == 0 for v, w in zip(coded.flat, work.values.flat, strict=True))
    return Result(
        codes=pack(work.codes, axis, block_width(coded.shape, axis, tile), GRIDS[element].bits),
        scales=scales,
        values=values,
        operand=work.values,
        tensor_scale=tensor_scale,
        zero_points=zeros,
        saturated=work.saturated,
        flushed=int(flushed),
        **extra,
    )
