"""Which code multiplies each format: one table over all of them, with tiles and without."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from extensor.backends import cpu
from extensor.formats import FORMATS
from extensor.quant.spec import QuantSpec

BACKEND = cpu.make_backend()
CORE = BACKEND.core
MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")

# Both operands in the format: with AMX, and without, where dot products of bfloat16 stand in for
# float products.
BLOCKED = {
    **dict.fromkeys(MX, ("bf16", "float")),
    **dict.fromkeys(("mxfp6_e2m3", "mxfp4", "mxint8"), ("bf16", "integer")),
    **dict.fromkeys(("nvfp4", "nvfp4_fp8exact"), ("bf16", "integer")),
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), ("float", "float")),
    **dict.fromkeys(("int8", "int8 zero"), ("int8", "integer")),
    **dict.fromkeys(("int4", "int4 zero"), ("integer", "integer")),
    **dict.fromkeys(("int5", "int6", "outlier"), ("generic", "generic")),
}
# float32 rows times weights in the format.
WEIGHTS = {
    **dict.fromkeys(BLOCKED, "core"),
    "outlier": "generic",
}
# Decoded operands of a quantized op: on tiles, or with BLAS.
OPERANDS = {
    **dict.fromkeys(BLOCKED, "generic"),
    **dict.fromkeys((*MX, "nvfp4", "nvfp4_fp8exact", "fp8_e4m3", "fp8_e5m2"), "bf16"),
}


def specs() -> Iterator[tuple[str, QuantSpec]]:
    for name, row in FORMATS.items():
        yield name, QuantSpec(name)
        if row.zero_point:
            yield f"{name} zero", QuantSpec(name, symmetric=False)


def kind(path: str) -> str:
    """What the core says of a product, or "generic"."""
    found = re.match(r"core \(\w+, (\w+)", path)
    return found.group(1) if found else path.split(":", maxsplit=1)[0]


@pytest.mark.parametrize(("name", "spec"), list(specs()), ids=str)
def test_every_format_takes_the_path_that_the_table_says(name: str, spec: QuantSpec) -> None:
    if CORE is None:
        return
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((128, 256)).astype(np.float32) for _ in range(2))
    a, b = (BACKEND.quantize(v, spec.resolve(2))[0] for v in (x, y))
    values = [BACKEND.fake_quantize(v, spec.resolve(2))[0] for v in (x, y)]
    before = CORE.gemm_level()
    try:
        for level in CORE.gemm_levels():
            CORE.set_gemm_level(level)
            tiles = CORE.gemm_has_bf16()
            with_amx, without = BLOCKED[name]
            expected = with_amx if CORE.gemm_has_amx() else without
            if tiles and (with_amx, without) == ("bf16", "float"):
                expected = "bf16"
            assert kind(BACKEND.path("block_scaled_matmul", a, b)) == expected, level
            path = BACKEND.path("weight_only_matmul", x[:4], b)
            assert path.startswith(WEIGHTS[name]), level
            operands = OPERANDS[name] if tiles else "generic"
            assert kind(BACKEND.path("product", *values)) == operands, level
    finally:
        CORE.set_gemm_level(before)


def test_the_tables_list_every_format() -> None:
    assert {name for name, _ in specs()} == set(BLOCKED)


@pytest.mark.parametrize("level", CORE.levels() if CORE else [])
def test_few_rows_have_the_bits_of_many(level: str) -> None:
    """A layer's weight is read where it lies up to eight rows: each sum is the same chain."""
    before = CORE.gemm_level()
    rng = np.random.default_rng(5)
    CORE.set_level(level)
    try:
        for n, k in ((1, 1), (8, 16), (33, 40), (70, 395)):
            x, w, bias = (rng.standard_normal(s).astype(np.float32) for s in ((20, k), (n, k), n))
            x[3, k // 2] = np.inf  # meets no zeros beyond the last element
            whole = CORE.matmul(x, w.T, bias)
            for rows in range(1, 10):
                assert CORE.matmul(x[:rows], w.T, bias).tobytes() == whole[:rows].tobytes()
    finally:
        CORE.set_level(CORE.levels()[-1])
        CORE.set_gemm_level(before)


@pytest.mark.skipif(CORE is None, reason="the core's products")
def test_a_layer_weight_meets_few_rows_in_the_core() -> None:
    small, large = np.ones((64, 64), np.float32), np.ones((1024, 1024), np.float32)
    for x, w, reason in (
        (np.ones((2, 64), np.float32), small.T, None),
        (np.ones((1, 1024), np.float32), large.T, None),
        (np.ones((1, 64), np.float32), small.T, "BLAS"),
        (np.ones((2, 64), np.float32), small, "BLAS"),
    ):
        path = BACKEND.path("matmul", x, w)
        assert (reason in path) if reason else path.startswith("core"), path
