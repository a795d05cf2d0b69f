"""Operands of GEMMs that are not quantized."""

from __future__ import annotations

from extensor.backends.protocol import Array, Backend

__all__ = ["dense"]


def dense(backend: Backend, x: Array, dtype: str) -> Array:
    """The values that a slot of ``dtype`` multiplies: x itself, or rounded to bfloat16.

    Args:
        backend: the device's.
        x: float32.
        dtype: "float32" or "bfloat16".
    """
    return x if dtype == "float32" else backend.bfloat16_values(x)
