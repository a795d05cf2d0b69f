"""Gradients that read what forward stored in MXFP8: the bytes of decoding it first."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda import nn
from tests.unit.cuda.test_prepare_expanded import sent

FLOAT32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def stored(rows: int, columns: int, format: str, dtype: Any, xp: Any) -> tuple[Any, Any]:
    """Flat blocks of values of all sizes, NaN among them; and these decoded."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal(rows * columns) * np.exp2(rng.integers(-6, 4, rows * columns))
    x[7], x[64:96] = np.nan, 0
    q = reference.quantize(x.astype(np.float32), QuantSpec(format).resolve(1))[0]
    values = reference.dequantize(q).astype(dtype).reshape(rows, columns)
    return sent(q, xp), xp.asarray(values)


def same(a: Any, b: Any) -> None:
    a, b = a.get(), b.get()
    live = ~np.isnan(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.isnan(a), ~live)
    np.testing.assert_array_equal(a[live].view(np.uint8), b[live].view(np.uint8))


@pytest.mark.parametrize(("format", "dtype"), [("mxfp8_e4m3", BF16), ("mxint8", FLOAT32)], ids=str)
def test_gelu(trainer: Any, format: str, dtype: Any) -> None:
    xp, (rows, columns) = trainer.xp, (3, 2080)  # the last part of a block of threads is ragged
    q, x = stored(rows, columns, format, dtype, xp)
    g = xp.asarray(np.random.default_rng(1).standard_normal((rows, columns)).astype(dtype))
    assert nn.reads_stored("gelu_exact", q, ())
    expected = nn.gelu_grad(xp, g, x, None)()
    same(nn.gelu_grad(xp, g, q, None)(), expected)
    over = nn.gelu_grad(xp, g, q, None, overwrites=True)()
    assert over is g
    same(over, expected)


@pytest.mark.parametrize(
    ("format", "columns", "dtype", "name"),
    [("mxfp8_e4m3", 96, BF16, "layer_norm"), ("mxfp8_e5m2", 1056, FLOAT32, "rms_norm")],
    ids=str,
)
def test_norms(trainer: Any, format: str, columns: int, dtype: Any, name: str) -> None:
    xp, rows, rng = trainer.xp, 5, np.random.default_rng(2)
    q, x = stored(rows, columns, format, np.float32, xp)
    g = xp.asarray(rng.standard_normal((rows, columns)).astype(dtype))
    weight, mean, rstd, addend = (
        xp.asarray(rng.standard_normal(shape).astype(np.float32))
        for shape in ((columns,), (rows, 1), (rows, 1), (rows, columns))
    )
    assert nn.reads_stored(name, q, (weight, weight))
    grad = getattr(nn, f"{name}_grad")
    factors = (mean, rstd) if name == "layer_norm" else (rstd,)
    read = grad(xp, g, q, weight, *factors, addend)()
    for a, b in zip(read, grad(xp, g, x, weight, *factors, addend)(), strict=True):
        same(a, b)


def test_what_the_kernels_do_not_read(trainer: Any) -> None:
    q, _ = stored(2, 64, "mxfp8_e4m3", np.float32, trainer.xp)
    wide = trainer.xp.zeros(64, dtype=np.float64)
    assert not nn.reads_stored("relu", q, ())
    assert not nn.reads_stored("layer_norm", q, (wide,))
    small = reference.quantize(np.ones(64, np.float32), QuantSpec("mxfp4").resolve(1))[0]
    assert not nn.reads_stored("gelu_exact", small, ())
