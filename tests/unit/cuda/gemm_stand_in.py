"""The Hopper GEMM's contract in float64 on the CPU, for what stands around it.

Takes the arguments of `extensor_cuda.kernels.gemm.gemm` and checks them as it does; the sum is
rounded once. It shows that operands, scales, exponents, flags and groups are the ones meant; what
the kernel's own accumulator loses shows on a GPU alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np

from extensor_cuda.kernels import gemm as placed

CODES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
    "s8": np.int8,
}


def values(codes: Any, kind: str) -> np.ndarray:
    """What codes mean, float64."""
    return np.ascontiguousarray(np.asarray(codes)).view(CODES[kind]).astype(np.float64)


def runs(flags: Any) -> bool:
    """Whether flags let a kernel run."""
    if flags is None or flags.wanted < 0:
        return True
    held = [int(np.asarray(f)) for f in (flags.row, flags.column) if f is not None]
    return any(held) == bool(flags.wanted)


def gemm(
    a: Any,
    b: Any,
    out: Any,
    config: Any,
    row_exponent: Any = None,
    column_exponent: Any = None,
    bias: Any = None,
    residual: Any = None,
    flags: Any = None,
    amax: Any = None,
    counted: Any = None,
    blocks: int | None = None,
    **options: Any,
) -> None:
    """As `extensor_cuda.kernels.gemm.gemm`, without a bias, an activation or a residual."""
    counted = options.pop("runs", counted)
    factors, zeros, scales, offsets = (
        options.pop(name, None) for name in ("factors", "zeros", "scales", "offsets")
    )
    assert not options and bias is residual is amax is blocks is None
    _, n, k = placed._checked(a, b, out, offsets, config)
    exponents = row_exponent, column_exponent
    placed._with(config, a, exponents, factors, zeros, scales, offsets, False)
    if not runs(flags):
        return
    if counted is not None:
        counted += 1
    x, y = values(a, config.a), values(b, config.b)
    if zeros is not None:  # as the kernel takes them off
        taken = np.outer(zeros.row, zeros.column_sum.astype(np.int64))
        taken += np.outer(zeros.row_rest, zeros.column.astype(np.int64))
        total = x @ y.T - taken
    elif scales is not None:
        x, y = (
            v * np.repeat(np.asarray(s)[:, : len(v)].T.astype(np.float64), 128, axis=1)[:, :k]
            for v, s in zip((x, y), scales, strict=True)
        )
        total = x @ y.T
    elif offsets is not None:  # what belongs to columns belongs to rows of b
        x, y = (
            v if part is None else v * (part[:, None] if factors else np.exp2(part[:, None]))
            for v, part in zip((x, y), factors or exponents, strict=True)
        )
        factors, exponents = None, (None, None)
        total = np.concatenate(
            [
                x[start:stop] @ y[g * n : (g + 1) * n].T
                for g, (start, stop) in enumerate(itertools.pairwise(offsets))
            ]
        )
    else:
        total = x @ y.T
    for part, shape in zip(factors or exponents, ((-1, 1), (1, -1)), strict=True):
        if part is not None:
            held = np.asarray(part, dtype=np.float64).reshape(shape)
            total = total * (held if factors else np.exp2(held))
    with np.errstate(over="ignore"):
        np.asarray(out)[...] = total.astype(out.dtype)
