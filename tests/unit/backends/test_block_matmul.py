"""Products of blocked matrices against the exact product of their values.

Values are decoded here from the tables, in float64: codes times scales, unrounded. The bounds are
the ones stated in extensor/backends/products.py. Every variant of the kernels this machine has is
forced in turn; integer products must agree between all of them bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import extensor as et
from extensor.backends import cpu, products
from extensor.backends.generic import GenericBackend
from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.rounding import unpack
from extensor.quant.spec import Hadamard, QuantSpec

BACKEND = cpu.make_backend()
CORE = BACKEND.core
GENERIC = GenericBackend("generic", np)
VARIANTS = CORE.gemm_levels() if CORE else ["numpy only"]


def short(value: object) -> str:
    """A spec's name in test ids: what differs from the defaults."""
    if not isinstance(value, QuantSpec):
        return str(value)
    tile = "" if value.tile is None else f"-{value.tile}".replace(", ", "x")
    return f"{value.format}{tile}{'' if value.symmetric else '-zero'}"


UNIT = 2.0**-24

MXFP4, NVFP4 = QuantSpec("mxfp4"), QuantSpec("nvfp4")
ZEROS = QuantSpec("int8", symmetric=False)
INTEGER = [
    (MXFP4, MXFP4),
    *((QuantSpec("mxfp4", tile=(1, n)),) * 2 for n in (4, 16, 64, 128, 512)),
    (QuantSpec("mxfp4", tile=(1, 24)), QuantSpec("mxfp4", tile=(1, 36))),
    (QuantSpec("mxfp4", tile=(16, 32)), QuantSpec("mxfp4", tile="channel")),
    (NVFP4, NVFP4),
    (NVFP4, MXFP4),
    (QuantSpec("mxint8"), QuantSpec("mxint8")),
    (QuantSpec("mxfp6_e2m3"), QuantSpec("mxint8")),
    (QuantSpec("int8"), QuantSpec("int8", tile="tensor")),
    (ZEROS, ZEROS),
    (ZEROS, QuantSpec("int4", symmetric=False, scale_dtype="float16")),
    (QuantSpec("int8"), QuantSpec("int4")),
    (MXFP4, QuantSpec("int4", symmetric=False)),
]
FLOAT = [
    (QuantSpec("mxfp8_e4m3"), QuantSpec("mxfp8_e5m2")),
    (QuantSpec("mxfp6_e3m2"), MXFP4),
    (QuantSpec("fp8_e4m3", tile=(1, 128)), QuantSpec("fp8_e4m3", tile=(128, 128))),
    (QuantSpec("fp8_e5m2"), NVFP4),
    (QuantSpec("mxfp4", tile=(1, 10)), QuantSpec("mxfp4", tile=(1, 7))),
]
TILES = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4")
WEIGHTS = [
    MXFP4,
    *(QuantSpec("mxfp4", tile=(1, n)) for n in (16, 64, 128, 256, 384)),
    QuantSpec("mxfp4", tile=(16, 32)),
    NVFP4,
    QuantSpec("int4"),
    QuantSpec("int4", symmetric=False),
    QuantSpec("int4", tile="channel", scale_dtype="float16"),
    QuantSpec("mxfp8_e4m3"),
    QuantSpec("mxfp8_e5m2"),
    QuantSpec("fp8_e4m3"),
    QuantSpec("fp8_e4m3", tile=(1, 10)),
    QuantSpec("mxint8"),
    QuantSpec("int8"),
    ZEROS,
]
SHAPES = ((1, 1, 1), (5, 7, 33), (14, 70, 300), (37, 33, 1100), (200, 3, 64), (2, 150, 2100))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    if CORE is None:
        yield request.param
        return
    before = CORE.gemm_level()
    CORE.set_gemm_level(request.param)
    yield request.param
    CORE.set_gemm_level(before)


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


def check(got: np.ndarray, a: np.ndarray, b: np.ndarray, terms: int, what: object) -> None:
    assert got.dtype == np.float32, what
    assert got.shape == (a.shape[0], b.shape[0]), what
    bound = gamma(terms + 4) * (np.abs(a) @ np.abs(b).T) * (1 + 1e-9) + a.shape[1] * 2.0**-126
    assert (np.abs(got - a @ b.T) <= bound).all(), what


@cache
def case(a: QuantSpec, b: QuantSpec, shape: tuple[int, int, int]) -> tuple[Any, ...]:
    m, n, k = shape
    qa, qb = quantized((m, k), a, 1), quantized((n, k), b, 2)
    return qa, qb, exact(qa), exact(qb)


def test_decoding_here_is_what_dequantize_rounds() -> None:
    for spec in {spec for pair in INTEGER + FLOAT for spec in pair}:
        q = quantized((33, 300), spec, 3)
        np.testing.assert_allclose(GENERIC.dequantize(q), exact(q), rtol=4 * UNIT)


@pytest.mark.parametrize(("a", "b"), INTEGER + FLOAT, ids=short)
def test_within_the_bound(variant: str, a: QuantSpec, b: QuantSpec) -> None:
    for shape in SHAPES:
        qa, qb, xa, xb = case(a, b, shape)
        path = BACKEND.path("block_matmul", qa, qb)
        terms = shape[2]
        if CORE is not None:
            step = products.block_step(qa, qb)
            assert isinstance(step, int)
            kind = "integer" if step else "float"
            if variant == "amx" and {a.row.name, b.row.name} <= set(TILES):
                kind = "bf16"
            elif variant == "amx":
                kind += ": "  # and the reason
            level = variant if kind == "bf16" or variant != "amx" else "avx512_vnni"
            assert path.startswith(f"core ({level}, {kind}")
            assert path.endswith(f"{kind})") == (not kind.endswith(" "))
            if shape[2] > 10:  # a short row is one block, however blocks of 7 and 10 would meet
                assert bool(step) == ((a, b) in INTEGER)
            terms = math.ceil(shape[2] / step) if step else shape[2]
            if kind == "bf16":
                terms = math.ceil(shape[2] / 32) + 14
        check(BACKEND.block_matmul(qa, qb), xa, xb, terms, (shape, path))


@pytest.mark.parametrize(("a", "b"), INTEGER, ids=short)
def test_integer_products_have_the_same_bits_everywhere(a: QuantSpec, b: QuantSpec) -> None:
    if CORE is None:
        return
    before = CORE.gemm_level()
    for shape in SHAPES:
        qa, qb, *_ = case(a, b, shape)
        results = set()
        for name in VARIANTS:
            CORE.set_gemm_level(name)
            if "integer" not in BACKEND.path("block_matmul", qa, qb):
                assert name == "amx"  # sums in another order
                continue
            results.add(BACKEND.block_matmul(qa, qb).tobytes())
        assert len(results) == 1, shape
    CORE.set_gemm_level(before)


def test_the_sum_of_one_block_is_exact(variant: str) -> None:
    """Every pair of codes, and the largest sums: nothing is lost before the scales come in."""
    every = np.arange(256, dtype=np.uint8)
    for spec in (MXFP4, QuantSpec("mxint8"), QuantSpec("mxfp6_e2m3")):
        bits = spec.row.element.bits
        q = quantized((256, 32), spec, 0)
        codes = np.zeros(q.codes.shape, np.uint8)
        codes[:, 0] = every & ((1 << min(bits, 8)) - 1)
        for pattern in (codes, every[:, None].repeat(q.codes.shape[1], axis=1)):
            q = QuantArray(pattern, np.full((256, 1), 127, np.uint8), q.spec, q.shape)
            wanted = exact(q) @ exact(q).T
            assert np.array_equal(BACKEND.block_matmul(q, q), wanted), spec
    q = quantized((256, 256), ZEROS, 0)
    for code, zero in ((-128, 127), (127, -128)):
        q = QuantArray(
            np.full((256, 256), code, np.int8).view(np.uint8),
            np.ones((256, 1), np.float32),
            q.spec,
            q.shape,
            zero_points=np.full((256, 1), zero, np.int8),
        )
        assert (BACKEND.block_matmul(q, q) == 255.0 * 255 * 256).all()


@pytest.mark.parametrize(("a", "b"), [(MXFP4, MXFP4), (ZEROS, ZEROS), FLOAT[0]], ids=short)
def test_threads_do_not_change_a_bit(variant: str, a: QuantSpec, b: QuantSpec) -> None:
    qa, qb = quantized((300, 200), a, 1), quantized((170, 200), b, 2)
    x = np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 8, 2):
        if CORE is not None:
            CORE.set_threads(threads)
        both = BACKEND.block_matmul(qa, qb), BACKEND.weight_matmul(x, qb)
        results.append(b"".join(y.tobytes() for y in both))
    if CORE is not None:
        CORE.set_threads(et.config.num_threads())
    assert len(set(results)) == 1


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 200)),
    lengths=st.tuples(*[st.sampled_from([4, 8, 16, 20, 32, 64, 128])] * 2),
    name=st.sampled_from(["mxfp4", "mxint8", "mxfp8_e4m3"]),
    level=st.sampled_from(VARIANTS),
)
def test_any_shape(
    shape: tuple[int, int, int], lengths: tuple[int, int], name: str, level: str
) -> None:
    m, n, k = shape
    a = quantized((m, k), QuantSpec(name, tile=(1, lengths[0])), k)
    b = quantized((n, k), QuantSpec(name, tile=(1, lengths[1])), m)
    if CORE is not None:
        CORE.set_gemm_level(level)
    check(BACKEND.block_matmul(a, b), exact(a), exact(b), k, shape)
    x = np.random.default_rng(n).standard_normal((min(m, 33), k)).astype(np.float32)
    check(BACKEND.weight_matmul(x, b), x.astype(np.float64), exact(b), k, shape)
    if CORE is not None:
        CORE.set_gemm_level(VARIANTS[-1])


# --- special blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxint8", "mxfp8_e4m3", "int8"])
def test_nan_stays_in_its_row_and_column(variant: str, name: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((n, 96)).astype(np.float32) for n in (40, 50))
    x[7, 40] = np.nan
    y[13, 0] = np.inf
    x[:, :32] = 0.0  # zero blocks: no number comes of NaN times zero either
    spec = QuantSpec(name, tile=(1, 16 if name == "nvfp4" else 32)).resolve(2)
    a, b = BACKEND.quantize(x, spec)[0], BACKEND.quantize(y, spec)[0]
    got = BACKEND.block_matmul(a, b)
    wanted = np.zeros((40, 50), bool)
    wanted[7], wanted[:, 13] = True, True
    assert np.array_equal(np.isnan(got), wanted)
    got = BACKEND.weight_matmul(np.ones((1, 96), np.float32), b)
    assert np.array_equal(np.isnan(got[0]), wanted[0])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_nan_codes(variant: str, name: str) -> None:
    q = quantized((20, 100), QuantSpec(name), 0)
    q.codes[4, 99], q.codes[5, 3] = 0x7F, 0xFF
    x = np.zeros((2, 100), np.float32)
    for got in (
        BACKEND.weight_matmul(x, q)[0],
        BACKEND.block_matmul(quantized((3, 100), MXFP4, 1), q)[0],
    ):
        assert np.flatnonzero(np.isnan(got)).tolist() == [4, 5]


@pytest.mark.parametrize("spec", [MXFP4, QuantSpec("int4", symmetric=False)], ids=["mxfp4", "int4"])
def test_what_an_earlier_call_left_does_not_show(variant: str, spec: QuantSpec) -> None:
    """Memory that is used again is full of NaN; lanes beyond the end must not meet it."""
    wide, small = quantized((8, 4096), spec, 0), quantized((8, 33), spec, 1)
    wide.scales[:] = 255 if wide.scales.dtype == np.uint8 else np.nan
    x = np.random.default_rng(2).standard_normal((8, 4096)).astype(np.float32)
    for rows in (1, 2, 4, 8):
        assert np.isnan(BACKEND.weight_matmul(x[:rows], wide)).all()
        assert np.isfinite(BACKEND.weight_matmul(x[:rows, :33].copy(), small)).all()


def test_zeros_give_zero(variant: str) -> None:
    a = BACKEND.quantize(np.zeros((9, 70), np.float32), MXFP4.resolve(2))[0]
    b = quantized((8, 70), MXFP4, 1)
    assert not BACKEND.block_matmul(a, b).any()
    assert not BACKEND.block_matmul(b, a).any()
    assert not BACKEND.weight_matmul(np.zeros((2, 70), np.float32), b).any()


def test_scales_at_the_ends_of_their_range(variant: str) -> None:
    """Products beyond float32 take the float path, where one side's zeros meet no infinity."""
    a, b = quantized((6, 64), MXFP4, 1), quantized((7, 64), MXFP4, 2)
    for low, high, kind in ((0, 250, "float"), (0, 170, "integer"), (100, 100, "integer")):
        a.scales[:], b.scales[:] = low, high
        a.scales[0] = high
        a.codes[0] = 0
        if CORE is not None:
            if variant == "amx" and low == high:
                kind = "bf16"
            assert f", {kind}" in BACKEND.path("block_matmul", a, b)
        got = BACKEND.block_matmul(a, b)
        assert not got[0].any()
        check(got[1:], exact(a)[1:], exact(b), 64, (low, high))


# --- tiles of bfloat16 --------------------------------------------------------------------------


def on_tiles(a: QuantArray, b: QuantArray) -> np.ndarray | None:
    """Their product on tiles of bfloat16, where there are any."""
    if "amx" not in VARIANTS:
        assert CORE is None or not CORE.gemm_has_bf16()
        return None
    CORE.set_gemm_level("amx")
    try:
        assert BACKEND.path("block_matmul", a, b) == "core (amx, bf16)"
        return BACKEND.block_matmul(a, b)
    finally:
        CORE.set_gemm_level(VARIANTS[-1])


@pytest.mark.parametrize("first", TILES)
def test_every_pair_on_tiles(first: str) -> None:
    """Ragged, single and whole extents; K at and around the 32 of a tile and the 512 of a visit."""
    shapes = ((1, 1, 1), (32, 32, 32), (33, 31, 65), (16, 17, 511), (3, 200, 1025), (300, 140, 64))
    for second in TILES:
        for shape in shapes:
            qa, qb, xa, xb = case(QuantSpec(first), QuantSpec(second), shape)
            got = on_tiles(qa, qb)
            if got is not None:
                terms = math.ceil(shape[2] / 32) + 14
                check(got, xa, xb, terms, (first, second, shape))


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
        got = on_tiles(a, b)
        if got is None:
            return
        with np.errstate(invalid="ignore"):
            wanted = (exact(a)[:, :1] * exact(b)[:, :1].T).astype(np.float32)
        finite = np.isfinite(wanted)
        assert np.array_equal(got[finite], wanted[finite]), name
        assert not np.isfinite(got[~finite]).any(), name


def test_where_tiles_would_flush_or_overflow_another_kernel_runs() -> None:
    """At the edge on both sides: the last scale that tiles take is right, the next is refused."""
    k = 40
    mx8 = QuantSpec("mxfp8_e4m3")  # values are multiples of 2**-9, at most 448 < 2**9
    assert products.bf16_reason(quantized((2, k), mx8, 1), quantized((2, k), mx8, 2)) is None
    for low, other, fits in ((26, 120, True), (26, 119, False), (9, 140, False), (10, 140, True)):
        a, b = quantized((5, k), mx8, 1), quantized((6, k), mx8, 2)
        a.scales[:], b.scales[:] = low, other
        reason = products.bf16_reason(a, b)
        assert (reason is None) == fits, (low, other, reason)
        if fits:
            got = on_tiles(a, b)
            if got is not None:
                bound = gamma(20) * (np.abs(exact(a)) @ np.abs(exact(b)).T)
                assert (np.abs(got - exact(a) @ exact(b).T) <= bound).all()
        else:
            assert "down to" in str(reason)
            check(BACKEND.block_matmul(a, b), exact(a), exact(b), k, (low, other))
    a.scales[:], b.scales[:] = 240, 140  # 2**9 2**113 2**9 2**13 40 > 2**128
    assert "up to" in str(products.bf16_reason(a, b))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "mxfp8_e5m2", "mxint8"])
def test_zero_blocks_of_any_scale_stay_on_tiles(name: str) -> None:
    """Their scale is often the least there is; it must meet neither the range nor a NaN."""
    x = np.random.default_rng(0).standard_normal((9, 100)).astype(np.float32)
    x[2:5, 32:64], x[:, 96:] = -0.0, 0.0
    q = BACKEND.quantize(x, QuantSpec(name).resolve(2))[0]
    q.scales[2:5, 1], q.scales[:, 3] = 0, 3
    b = quantized((4, 100), QuantSpec(name), 1)
    assert products.bf16_reason(q, b) is None
    got = on_tiles(q, b)
    if got is not None:
        check(got, exact(q), exact(b), 18, name)
    q.codes[3, q.codes.shape[1] // 4] = 1  # no longer zero, in the second block
    assert "down to 2**-1" in str(products.bf16_reason(q, b))
    check(BACKEND.block_matmul(q, b), exact(q), exact(b), 100, name)


def test_what_tiles_cannot_hold() -> None:
    good = quantized((4, 64), MXFP4, 0)
    for spec, reason in (
        (QuantSpec("int8"), "float32 scales"),
        (ZEROS, "zero points"),
        (QuantSpec("fp8_e4m3"), "float32 scales"),
    ):
        q = quantized((4, 64), spec, 0)
        assert reason in str(products.bf16_reason(good, q))
        if CORE is not None and CORE.gemm_has_bf16():
            with pytest.raises(ValueError, match="scales as bytes, and no zero points"):
                CORE.bf16_matmul(products.matrix(CORE, good), products.matrix(CORE, q))
    if CORE is None:
        return
    CORE.set_gemm_level("scalar")
    with pytest.raises(ValueError, match="no tiles of bfloat16"):
        CORE.bf16_matmul(*[products.matrix(CORE, good)] * 2)
    CORE.set_gemm_level(VARIANTS[-1])


# --- operands: float32 arrays of values that bfloat16 holds --------------------------------------


def operand(shape: tuple[int, int], spec: QuantSpec | None, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return x if spec is None else BACKEND.operand(x, spec.resolve(2))[0]


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
        for left, right, spoken in ((a, b, 32), (operand((m, k), MXFP4, 3), b, 23)):
            terms = k
            if "amx" in VARIANTS:
                assert BACKEND.path("operand_matmul", left, right.T) == "core (amx, bf16)"
                terms = math.ceil(k / 32) + spoken
            got = BACKEND.operand_matmul(left, right.T)
            check(got, left.astype(np.float64), right.astype(np.float64), terms, (spec, m))


@pytest.mark.parametrize("down_a", [False, True])
@pytest.mark.parametrize("down_b", [False, True])
def test_products_of_operands(down_a: bool, down_b: bool) -> None:
    """The three GEMMs' layouts, ragged, for every format that fits and with a transform."""
    specs = [QuantSpec(name) for name in TILES if name != "nvfp4"]
    specs.append(QuantSpec("mxfp4", transform=Hadamard(32)))
    for spec in specs:
        for m, n, k in ((64, 96, 128), (33, 150, 160), (257, 35, 1056)):
            a, b = operand((m, k), spec, 1), operand((n, k), spec, 2)
            left = np.ascontiguousarray(a.T).T if down_a else a
            right = np.ascontiguousarray(b.T) if down_b else b.T
            if "amx" in VARIANTS:
                assert BACKEND.path("operand_matmul", left, right) == "core (amx, bf16)"
                terms = math.ceil(k / 32) + 14
            else:
                terms = k
            got = BACKEND.operand_matmul(left, right)
            check(got, a.astype(np.float64), b.astype(np.float64), terms, (spec, m))


def test_operands_that_stay_with_blas() -> None:
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
        path = BACKEND.path("operand_matmul", a, b)
        assert path.startswith("generic: ")
        if "amx" in VARIANTS and reason != "small":
            assert reason in path
        if reason != "not (M, K)":
            with np.errstate(over="ignore", invalid="ignore"):
                wanted = a @ b
                assert np.array_equal(BACKEND.operand_matmul(a, b), wanted, equal_nan=True)
    got = BACKEND.operand_matmul(broken, good.T)
    assert np.isnan(got[3]).all()
    assert np.isnan(got).sum() == 64
    results = set()
    for threads in (1, 8):
        if CORE is not None:
            CORE.set_threads(threads)
        results.add(BACKEND.operand_matmul(good, good.T).tobytes())
    if CORE is not None:
        CORE.set_threads(et.config.num_threads())
    assert len(results) == 1


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", WEIGHTS, ids=short)
def test_weight_only(variant: str, spec: QuantSpec) -> None:
    rng = np.random.default_rng(0)
    shapes = ((1, 1, 1), (1, 7, 33), (2, 70, 300), (3, 33, 1100), (5, 66, 128), (8, 9, 257))
    # Slices of x end at 8192, 4096 and 2048; 65 rows leave a task of one.
    for m, n, k in (*shapes, (1, 5, 8200), (2, 65, 4100), (17, 3, 2500), (32, 6, 256)):
        w = quantized((n, k), spec, k)
        x = (rng.standard_normal((m, k)) * np.exp2(rng.integers(-6, 7, (m, k)))).astype(np.float32)
        path = BACKEND.path("weight_matmul", x, w)
        kernels = variant if variant != "amx" else "avx512_vnni"  # tiles take no float32 rows
        assert path.startswith(f"core ({kernels})" if CORE else "generic: ")
        check(BACKEND.weight_matmul(x, w), x.astype(np.float64), exact(w), k, (m, n, k))
        wide = np.repeat(x, 2, axis=1)[:, ::2]
        assert np.array_equal(BACKEND.weight_matmul(wide, w), BACKEND.weight_matmul(x, w))


def test_weights_ignore_what_is_left_in_memory(variant: str) -> None:
    """Lanes beyond the end of a row meet no scale of an earlier product."""
    for spec in (MXFP4, NVFP4, QuantSpec("int4", symmetric=False), QuantSpec("mxfp8_e4m3")):
        before, w = quantized((9, 2000), spec, 0), quantized((9, 33), spec, 1)
        for scales in (before.scales, w.scales[4:5]):
            scales[:] = np.nan if scales.dtype.kind == "f" else 255 if spec.is_mx else 0x7F
        assert np.isnan(BACKEND.weight_matmul(np.ones((1, 2000), np.float32), before)).all()
        got = BACKEND.weight_matmul(np.ones((5, 33), np.float32), w)
        assert np.isnan(got[:, 4]).all(), spec
        assert not np.isnan(np.delete(got, 4, axis=1)).any(), spec


def test_weights_at_the_ends_of_the_scales(variant: str) -> None:
    """A block's largest and smallest scales, subnormal ones too, are those of the format."""
    k = 32 * 19  # some scales in vectors, some alone
    for name in ("mxfp4", "mxint8", "mxfp8_e4m3", "mxfp8_e5m2"):
        w = quantized((6, k), QuantSpec(name), 0)
        for low, high, x in ((0, 5, 2.0**58), (230, 240, 2.0**-60)):
            w.scales[:] = np.random.default_rng(1).integers(low, high, w.scales.shape)
            a = np.full((2, k), x, np.float32)
            check(BACKEND.weight_matmul(a, w), a.astype(np.float64), exact(w), k, (name, low))
    w = quantized((6, k), NVFP4, 0)
    a = np.ones((3, k), np.float32)
    w.scales[:] = np.arange(w.scales.size).reshape(w.scales.shape) % 0x7F
    check(BACKEND.weight_matmul(a, w), a.astype(np.float64), exact(w), k, "ue4m3")
    for spec, nan in ((NVFP4, 0x7F), (MXFP4, 255)):
        w = quantized((6, k), spec, 0)
        w.codes[:] = 0x22  # ones: infinite scales would show
        w.scales[4, 5], w.scales[5, -1] = nan, nan
        got = BACKEND.weight_matmul(a, w)
        assert np.array_equal(np.isnan(got), np.arange(6) >= np.full((3, 1), 4)), spec


# --- paths, and what the core refuses -----------------------------------------------------------


def test_path_names_the_reason() -> None:
    good = quantized((4, 64), MXFP4, 0)
    x = np.ones((1, 64), np.float32)
    down = GENERIC.quantize(np.ones((64, 4), np.float32), QuantSpec("mxfp4", axis=0))[0]
    turned = GENERIC.quantize(x, QuantSpec("mxfp4", transform=Hadamard(16)))[0]
    rows = GENERIC.quantize(x, QuantSpec("outlier"))[0]
    uneven = quantized((4, 64), QuantSpec("mxfp4", tile=(1, 6)), 0)
    zeros = quantized((4, 64), ZEROS, 0)
    deep = GENERIC.quantize(np.ones((2, 2, 64), np.float32), MXFP4)[0]
    six = quantized((4, 64), QuantSpec("mxfp6_e2m3"), 0)
    for reason, method, *args in (
        ("along axis 0", "block_matmul", down, good),
        ("Hadamard", "block_matmul", good, turned),
        ("outlier", "block_matmul", rows, rows),
        ("zero points with blocks that meet in steps of 6", "block_matmul", zeros, uneven),
        ("3 axes", "block_matmul", deep, good),
        ("float64", "weight_matmul", x.astype(np.float64), good),
        ("33 rows", "weight_matmul", np.ones((33, 64), np.float32), good),
        ("6 bits", "weight_matmul", x, six),
        ("blocks of 6", "weight_matmul", x, uneven),
        ("not finite", "weight_matmul", x * np.float32(np.nan), good),
        ("beyond 1.15e+18", "weight_matmul", x * np.float32(2.0**61), good),
    ):
        path = BACKEND.path(method, *args)
        assert path.startswith("generic: "), (reason, path)
        assert (reason if CORE else BACKEND.core_missing or reason) in path


def test_the_core_checks_what_it_is_given() -> None:
    if CORE is None:
        return
    a, b = (products.matrix(CORE, quantized((4, k), MXFP4, 0)) for k in (64, 32))
    with pytest.raises(ValueError, match="differ in k"):
        CORE.block_matmul(a, b, 32)
    for step in (-4, 3, 24, 512):
        with pytest.raises(ValueError, match="step"):
            CORE.block_matmul(a, a, step)
    fp8 = products.matrix(CORE, quantized((4, 64), QuantSpec("mxfp8_e4m3"), 0))
    with pytest.raises(ValueError, match="small integers"):
        CORE.block_matmul(a, fp8, 32)
    with pytest.raises(ValueError, match="1 to 32"):
        CORE.weight_matmul(np.ones((33, 64), np.float32), a)
    with pytest.raises(ValueError, match="wanted one of scalar"):
        CORE.set_gemm_level("neon")
    whole = quantized((4, 64), MXFP4, 0)
    for part in ("codes", "scales"):
        cut = QuantArray(**{**vars(whole), part: getattr(whole, part)[:, :-1]})
        with pytest.raises(ValueError, match=f"the {part} do not fit"):
            products.matrix(CORE, cut)


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.host
def test_matmul_of_tensors_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = (et.from_numpy(rng.standard_normal((n, 96)).astype(np.float32)) for n in (5, 7))
    qa, qb = a.to_mxfp4(), b.to_nvfp4()
    used = []
    backend = type(a.backend)
    for name in ("block_matmul", "weight_matmul"):
        method = getattr(backend, name)

        def spy(self: Any, *args: Any, method: Any = method, name: str = name) -> Any:
            used.append(name)
            return method(self, *args)

        monkeypatch.setattr(backend, name, spy)
    assert np.array_equal((qa @ qb.T).numpy(), BACKEND.block_matmul(qa.data, qb.data))
    assert np.array_equal((a @ qb.T).numpy(), BACKEND.weight_matmul(a.data, qb.data))
    assert used == ["block_matmul"] * 2 + ["weight_matmul"] * 2  # tensors first, then by hand
    assert (a.to("float64") @ qb.T).dtype is et.float64
    before = len(used)
    assert (a.reshape((1, 5, 96)) @ qb.T).shape == (1, 5, 7)
    assert len(used) == before  # three axes: dequantized


def test_gradients_are_those_of_the_dequantized_product() -> None:
    rng = np.random.default_rng(0)
    x, y = (et.from_numpy(rng.standard_normal((n, 96)).astype(np.float32)) for n in (5, 7))
    w = y.to_mxfp4()
    x.requires_grad = True
    (x @ w.T).sum().backward()
    wanted = np.ones((5, 7), np.float32) @ w.dequantize().numpy()
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-5)
    x.grad = None
    (x.to_mxfp4() @ w.T).sum().backward()  # straight through the quantizer
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-5)
