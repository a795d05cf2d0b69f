"""Exactness rules: which type of the tensor cores holds which format's values, and how far.

A tensor's or a row's scales lie relative to its largest one, which is lifted so that the largest
element is in range. FP8 then holds every value of

    format                   as     while the scales span
    mxfp4                    E5M2   28 binades
    mxfp6_e2m3               E4M3   11 binades
    mxfp6_e3m2               E5M2   23 binades
    nvfp4 by least_error     E4M3   12 binades below the top scale: scales are 1, 1.25, 1.5 2**e
    mxfp4, a row as INT8     S8     3 binades

and bfloat16 of everything, but what lies more than 110 binades below the tensor's largest scale.
MXFP8 uses all of FP8's exponents: rebased, elements under smaller scales move down in their own
format and are rounded to nearest even where they become subnormal (`extensor.quant.rebase`), off by
up to 2**-10 (E4M3) or 2**-17 (E5M2) times the largest scale, and the changed values are counted.
"""

from __future__ import annotations

from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.prepare.rebase import E5M2_LIFT, E5M2_SPAN, INT8_SPAN

__all__ = ["E5M2_SPAN", "INT8_SPAN", "held_by", "is_mxfp4"]

# 6 * 2**13 and 28 * 2**11 in E5M2, 7.5 * 2**5 in E4M3; NVFP4's largest scale is 1.5 * 2**8, and
# 6 * 1.5 * 2**5 is 288.
_FP8 = {"e2m1": ("e5m2", E5M2_LIFT), "e3m2": ("e5m2", 11), "e2m3": ("e4m3", 5)}
_NVFP4_LIFT = -3


def held_by(spec: QuantSpec) -> tuple[str, int]:
    """The element type that holds a format's values, and how far its scales are lifted."""
    if spec.is_mx:
        return _FP8.get(spec.row.element.name, ("bf16", 0))
    return ("e4m3", _NVFP4_LIFT) if spec.rule == "least_error" else ("bf16", 0)


def is_mxfp4(spec: QuantSpec) -> bool:
    """E2M1 under powers of two."""
    return spec.is_mx and spec.row.element.bits == 4 and spec.row.element.is_float
