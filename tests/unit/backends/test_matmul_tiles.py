"""Products on tiles of bfloat16: of blocked matrices, and of operands that bfloat16 holds."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et
from extensor.backends.cpu import product_paths
from extensor.quant.array import QuantArray
from extensor.quant.spec import Hadamard, QuantSpec
from tests.kernels.matmul_cases import (
    BACKEND,
    CORE,
    MXFP4,
    NVFP4,
    TILED,
    TILES,
    VARIANTS,
    ZEROS,
    bf16_terms,
    case,
    check,
    exact,
    gamma,
    quantized,
    short,
)

# --- tiles of bfloat16 --------------------------------------------------------------------------


def on_tiles(a: QuantArray, b: QuantArray) -> list[tuple[str, np.ndarray]]:
    """Their product at every level that has tiles of bfloat16."""
    found = []
    for level in TILED:
        CORE.set_gemm_level(level)
        try:
            if level == "amx":
                assert BACKEND.path("block_scaled_matmul", a, b) == "core (amx, bf16)"
            sides = (product_paths.matrix(CORE, q) for q in (a, b))
            found.append((level, CORE.bf16_matmul(*sides)))
        finally:
            CORE.set_gemm_level(VARIANTS[-1])
    return found


@pytest.mark.parametrize("first", TILES)
def test_every_pair_on_tiles(first: str) -> None:
    """Ragged, single and whole extents; K at and around the 32 of a tile and the 512 of a visit."""
    shapes = ((1, 1, 1), (32, 32, 32), (33, 31, 65), (16, 17, 511), (3, 200, 1025), (300, 140, 64))
    for second in TILES:
        for shape in shapes:
            qa, qb, xa, xb = case(QuantSpec(first), QuantSpec(second), shape)
            for level, got in on_tiles(qa, qb):
                terms = bf16_terms(level, shape[2])
                check(got, xa, xb, terms, (level, first, second, shape))


def test_tiles_are_exact_where_the_sum_is() -> None:
    """Each pair of codes alone, at unequal scales: not one bit of a value is lost in decoding."""
    for name in TILES:
        spec = QuantSpec(name)
        bits = spec.row.element.bits
        k = 4
        q = quantized((1 << bits, k), spec, 0)
        packed = np.arange(1 << bits, dtype=np.uint8)
        codes = np.zeros_like(q.codes)
        codes[:, 0] = packed
        rng = np.random.default_rng(1)
        low, high = (107, 147) if spec.is_mx else (1, 127)
        scales = [rng.integers(low, high, q.scales.shape).astype(np.uint8) for _ in range(2)]
        a, b = (QuantArray(codes, s, q.spec, q.shape, tensor_scale=q.tensor_scale) for s in scales)
        with np.errstate(invalid="ignore"):
            expected = (exact(a)[:, :1] * exact(b)[:, :1].T).astype(np.float32)
        finite = np.isfinite(expected)
        for level, got in on_tiles(a, b):
            assert np.array_equal(got[finite], expected[finite]), (level, name)
            assert not np.isfinite(got[~finite]).any(), (level, name)


def test_where_tiles_would_flush_or_overflow_another_kernel_runs() -> None:
    """At the edge on both sides: the last scale that tiles take is right, the next is refused."""
    k = 40
    mx8 = QuantSpec("mxfp8_e4m3")  # values are multiples of 2**-9, at most 448 < 2**9
    assert product_paths._bf16_gap(quantized((2, k), mx8, 1), quantized((2, k), mx8, 2)) is None
    for low, other, fits in ((26, 120, True), (26, 119, False), (9, 140, False), (10, 140, True)):
        a, b = quantized((5, k), mx8, 1), quantized((6, k), mx8, 2)
        a.scales[:], b.scales[:] = low, other
        reason = product_paths._bf16_gap(a, b)
        assert (reason is None) == fits, (low, other, reason)
        if fits:
            for level, got in on_tiles(a, b):
                bound = gamma(bf16_terms(level, k) + 4) * (np.abs(exact(a)) @ np.abs(exact(b)).T)
                assert (np.abs(got - exact(a) @ exact(b).T) <= bound).all(), level
        else:
            assert "down to" in str(reason)
            check(BACKEND.block_scaled_matmul(a, b), exact(a), exact(b), k, (low, other))
    a.scales[:], b.scales[:] = 240, 140  # 2**9 2**113 2**9 2**13 40 > 2**128
    assert "up to" in str(product_paths._bf16_gap(a, b))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "mxfp8_e5m2", "mxint8"])
def test_zero_blocks_of_any_scale_stay_on_tiles(name: str) -> None:
    """Their scale is often the least there is; it must meet neither the range nor a NaN."""
    x = np.random.default_rng(0).standard_normal((9, 100)).astype(np.float32)
    x[2:5, 32:64], x[:, 96:] = -0.0, 0.0
    q = BACKEND.quantize(x, QuantSpec(name).resolve(2))[0]
    q.scales[2:5, 1], q.scales[:, 3] = 0, 3
    b = quantized((4, 100), QuantSpec(name), 1)
    assert product_paths._bf16_gap(q, b) is None
    for level, got in on_tiles(q, b):
        check(got, exact(q), exact(b), bf16_terms(level, 100), (level, name))
    q.codes[3, q.codes.shape[1] // 4] = 1  # no longer zero, in the second block
    assert "down to 2**-1" in str(product_paths._bf16_gap(q, b))
    check(BACKEND.block_scaled_matmul(q, b), exact(q), exact(b), 100, name)


def test_what_tiles_cannot_hold() -> None:
    good = quantized((4, 64), MXFP4, 0)
    for spec, reason in (
        (QuantSpec("int8"), "float32 scales"),
        (ZEROS, "zero points"),
        (QuantSpec("fp8_e4m3"), "float32 scales"),
    ):
        q = quantized((4, 64), spec, 0)
        assert reason in str(product_paths._bf16_gap(good, q))
        if CORE is not None and CORE.gemm_has_bf16():
            with pytest.raises(ValueError, match="scales as bytes, and no zero points"):
                CORE.bf16_matmul(product_paths.matrix(CORE, good), product_paths.matrix(CORE, q))
    if CORE is None:
        return
    CORE.set_gemm_level("scalar")
    with pytest.raises(ValueError, match="no tiles of bfloat16"):
        CORE.bf16_matmul(*[product_paths.matrix(CORE, good)] * 2)
    CORE.set_gemm_level(VARIANTS[-1])


# --- operands: float32 arrays of values that bfloat16 holds --------------------------------------


def operand(shape: tuple[int, int], spec: QuantSpec | None, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return x if spec is None else BACKEND.fake_quantize(x, spec.resolve(2))[0]


SCALED = [
    NVFP4,
    QuantSpec("nvfp4", transform=Hadamard(16)),
    QuantSpec("nvfp4", scale_rule="four_over_six"),
    QuantSpec("nvfp4", dialect="torchao"),
    QuantSpec("nvfp4_fp8exact"),
    *(QuantSpec(name, tile="tensor") for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4")),
]
"""With one float32 scale a tensor: values are bfloat16 times a factor, as far as rounding lets."""


@pytest.mark.parametrize("spec", SCALED, ids=short)
def test_products_of_scaled_operands(spec: QuantSpec) -> None:
    for m, n, k in ((64, 96, 128), (33, 150, 160), (257, 35, 1056)):
        a, b = operand((m, k), spec, 1), operand((n, k), spec, 2) * np.float32(2.0**40)
        a[3], b[:, 7], b[0, 0] = 0.0, -0.0, 0.0
        for left, right, factors in ((a, b, 18), (operand((m, k), MXFP4, 3), b, 9)):
            terms = k
            if TILED:
                assert BACKEND.path("product", left, right) == f"core ({VARIANTS[-1]}, bf16)"
                terms = bf16_terms(VARIANTS[-1], k) + factors
            got = BACKEND.product(left, right)
            check(got, left.astype(np.float64), right.astype(np.float64), terms, (spec, m))


def test_subnormal_values_are_no_multiples_of_a_factor() -> None:
    """Of these rounding to the nearest subnormal looks exact; a product would show what it lost."""
    x = np.full((33, 150), np.float32(0.77) * np.float32(2.0**-30), np.float32)
    x[7] = 0
    x[7, 9] = 5 * 2.0**-149
    w = np.full((160, 150), 2.0**12, np.float32)
    assert (BACKEND.product(x, w)[7] == 5 * 2.0**-137).all()


@pytest.mark.parametrize("columnwise_a", [False, True])
@pytest.mark.parametrize("columnwise_b", [False, True])
def test_products_of_operands(columnwise_a: bool, columnwise_b: bool) -> None:
    """The three GEMMs' layouts, ragged, for every format that fits and with a transform."""
    specs = [QuantSpec(name) for name in TILES if name != "nvfp4"]
    specs.append(QuantSpec("mxfp4", transform=Hadamard(32)))
    for spec in specs:
        for m, n, k in ((64, 96, 128), (33, 150, 160), (257, 35, 1056)):
            a, b = operand((m, k), spec, 1), operand((n, k), spec, 2)
            left = np.ascontiguousarray(a.T).T if columnwise_a else a
            right = np.ascontiguousarray(b.T).T if columnwise_b else b
            terms = k
            if TILED:
                assert BACKEND.path("product", left, right) == f"core ({VARIANTS[-1]}, bf16)"
                terms = bf16_terms(VARIANTS[-1], k)
            got = BACKEND.product(left, right)
            check(got, a.astype(np.float64), b.astype(np.float64), terms, (spec, m))


def test_operands_that_stay_dense() -> None:
    good = operand((64, 128), MXFP4, 0)
    tiny, huge, broken = good * np.float32(2.0**-110), good * np.float32(2.0**120), good.copy()
    broken[3, 5] = np.nan
    subnormal = good.copy()
    subnormal[0, 0] = 2.0**-130
    nearly = operand((64, 128), NVFP4, 1)
    nearly[63, 127] = 1 + 2.0**-19
    for reason, a, b in (
        ("does not hold", operand((64, 128), None, 1), good.T),
        ("does not hold", good, operand((64, 128), QuantSpec("int8"), 1).T),
        ("does not hold", good, nearly.T),
        ("small", good[:8], good.T),
        ("small", good[:, :32], good.T[:32]),
        ("not contiguous", good[:, ::2], good.T[::2]),
        ("down to", tiny, tiny.T),
        ("down to", subnormal, good.T),
        ("up to", huge, huge.T),
        ("not (M, K)", good, good),
        ("float64", good.astype(np.float64), good.T),
    ):
        path = BACKEND.path("product", a, b.T)
        assert path.startswith("generic: ")
        if TILED and reason != "small":
            assert reason in path
        if reason != "not (M, K)":
            with np.errstate(over="ignore", invalid="ignore"):
                expected = BACKEND.matmul(a, b)  # BLAS, or the core's where that is as quick
                assert np.array_equal(BACKEND.product(a, b.T), expected, equal_nan=True)
    got = BACKEND.product(broken, good)
    assert np.isnan(got[3]).all()
    assert np.isnan(got).sum() == 64
    results = set()
    for threads in (1, 8):
        if CORE is not None:
            CORE.set_threads(threads)
        results.add(BACKEND.product(good, good).tobytes())
    if CORE is not None:
        CORE.set_threads(et.config.num_threads())
    assert len(results) == 1
