"""Operands of GEMMs that are not quantized."""

from __future__ import annotations

from extensor.backends.protocol import Array, Backend

__all__ = ["dense"]


def dense(backend: Backend, x: Array, dtype: str) -> Array:
    """What a slot of ``dtype`` multiplies, float32: the values of x, or these rounded to bfloat16.

    Args:
        backend: the device's.
        x: float32 or a 16-bit float.
        dtype: "float32" or "bfloat16".
    """
    x = x.astype(backend.xp.float32, copy=False)
    return x if dtype == "float32" else backend.bfloat16_values(x)
