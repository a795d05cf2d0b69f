"""Products of blocked matrices against the exact product of their values.

Every variant of the kernels this machine has is forced in turn; integer products must agree between
all of them bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import extensor as et
from extensor.backends.cpu import product_paths
from extensor.backends.generic import GenericBackend
from extensor.quant.array import QuantArray
from extensor.quant.spec import Hadamard, QuantSpec
from tests.kernels.matmul_cases import (
    BACKEND,
    CORE,
    MXFP4,
    NVFP4,
    TILED,
    TILES,
    UNIT,
    VARIANTS,
    ZEROS,
    bf16_terms,
    case,
    check,
    check_weight_only,
    exact,
    quantized,
    short,
)

GENERIC = GenericBackend("generic", np)
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
    (QuantSpec("mxint8"), MXFP4),
    (MXFP4, QuantSpec("int4", symmetric=False)),
]
FLOAT = [
    (QuantSpec("mxfp8_e4m3"), QuantSpec("mxfp8_e5m2")),
    (QuantSpec("mxfp6_e3m2"), MXFP4),
    (QuantSpec("fp8_e4m3", tile=(1, 128)), QuantSpec("fp8_e4m3", tile=(128, 128))),
    (QuantSpec("fp8_e5m2"), NVFP4),
    (QuantSpec("mxfp4", tile=(1, 10)), QuantSpec("mxfp4", tile=(1, 7))),
]
SHAPES = ((1, 1, 1), (1, 150, 1100), (5, 7, 33), (14, 70, 300), (37, 33, 1100), (200, 3, 64),
          (2, 150, 2100), (33, 34, 8193))  # fmt: skip


def test_decoding_here_is_what_dequantize_rounds() -> None:
    for spec in {spec for pair in INTEGER + FLOAT for spec in pair}:
        q = quantized((33, 300), spec, 3)
        np.testing.assert_allclose(GENERIC.dequantize(q), exact(q), rtol=4 * UNIT)


@pytest.mark.parametrize(("a", "b"), INTEGER + FLOAT, ids=short)
def test_within_the_bound(variant: str, a: QuantSpec, b: QuantSpec) -> None:
    for shape in SHAPES:
        qa, qb, xa, xb = case(a, b, shape)
        path = BACKEND.path("block_scaled_matmul", qa, qb)
        terms = shape[2]
        if CORE is not None:
            step = product_paths._block_step(qa, qb)
            assert isinstance(step, int)
            kind = "integer" if step else "float"
            if variant in TILED and {a.row.name, b.row.name} <= set(TILES):
                kind = kind if step and variant != "amx" else "bf16"
            elif variant == "amx" and step and product_paths._on_int8_tiles(qa, qb):
                kind = "int8"
            elif variant == "amx" or (variant in TILED and not step):
                kind += ": "  # and the reason
            tiles = kind in ("bf16", "int8")
            level = variant if tiles or variant not in TILED else "avx512_vnni"
            assert path.startswith(f"core ({level}, {kind}")
            assert path.endswith(f"{kind})") == (not kind.endswith(" "))
            if shape[2] > 10:  # a short row is one block, however blocks of 7 and 10 would meet
                assert bool(step) == ((a, b) in INTEGER)
            terms = math.ceil(shape[2] / step) if step else shape[2]
            if kind == "bf16":
                terms = bf16_terms(variant, shape[2])
        check(BACKEND.block_scaled_matmul(qa, qb), xa, xb, terms, (shape, path))


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
            if "bf16" in BACKEND.path("block_scaled_matmul", qa, qb).partition(":")[0]:
                assert name == "amx"  # sums in another order
                continue
            results.add(BACKEND.block_scaled_matmul(qa, qb).tobytes())
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
            expected = exact(q) @ exact(q).T
            assert np.array_equal(BACKEND.block_scaled_matmul(q, q), expected), spec
    q = quantized((256, 256), ZEROS, 0)
    for code, zero in ((-128, 127), (127, -128)):
        q = QuantArray(
            np.full((256, 256), code, np.int8).view(np.uint8),
            np.ones((256, 1), np.float32),
            q.spec,
            q.shape,
            zero_points=np.full((256, 1), zero, np.int8),
        )
        assert (BACKEND.block_scaled_matmul(q, q) == 255.0 * 255 * 256).all()


def test_a_row_under_one_scale_is_summed_exactly(variant: str) -> None:
    """To the definition: int32 sums of 8192 products, each rounded to float32 and scaled."""
    rng = np.random.default_rng(0)
    for k in (8, 8192, 16390):
        codes = rng.choice(np.array([-128, 127, 3, -77], np.int8), (40, k))
        codes[:8] = -128
        scales = rng.uniform(0.5, 2, (40, 1)).astype(np.float32)
        for zeros in (None, rng.choice(np.array([-128, 127, 5], np.int8), (40, 1))):
            spec = (QuantSpec("int8") if zeros is None else ZEROS).resolve(2)
            q = QuantArray(codes.view(np.uint8), scales, spec, codes.shape, zero_points=zeros)
            exactly = codes.astype(np.float64) - (0 if zeros is None else zeros)
            expected = np.zeros((40, 40), np.float32)
            for at in range(0, k, 8192):
                part = exactly[:, at : at + 8192]
                expected += (part @ part.T).astype(np.float32) * (scales * scales.T)
            assert np.array_equal(BACKEND.block_scaled_matmul(q, q), expected) or CORE is None, k


@pytest.mark.parametrize(("a", "b"), [(MXFP4, MXFP4), (ZEROS, ZEROS), FLOAT[0]], ids=short)
def test_threads_do_not_change_a_bit(variant: str, a: QuantSpec, b: QuantSpec) -> None:
    qa, qb = quantized((300, 200), a, 1), quantized((170, 200), b, 2)
    x = np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 8, 2):
        if CORE is not None:
            CORE.set_threads(threads)
        both = BACKEND.block_scaled_matmul(qa, qb), BACKEND.weight_only_matmul(x, qb)
        results.append(b"".join(y.tobytes() for y in both))
    if CORE is not None:
        CORE.set_threads(et.config.num_threads())
    assert len(set(results)) == 1


@settings(max_examples=40)
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
    check(BACKEND.block_scaled_matmul(a, b), exact(a), exact(b), k, shape)
    x = np.random.default_rng(n).standard_normal((min(m, 33), k)).astype(np.float32)
    check_weight_only(BACKEND.weight_only_matmul(x, b), x, exact(b), 8 if name == "mxfp4" else 4)
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
    got = BACKEND.block_scaled_matmul(a, b)
    expected = np.zeros((40, 50), bool)
    expected[7], expected[:, 13] = True, True
    assert np.array_equal(np.isnan(got), expected)
    got = BACKEND.weight_only_matmul(np.ones((1, 96), np.float32), b)
    assert np.array_equal(np.isnan(got[0]), expected[0])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_nan_codes(variant: str, name: str) -> None:
    q = quantized((20, 100), QuantSpec(name), 0)
    q.codes[4, 99], q.codes[5, 3] = 0x7F, 0xFF
    x = np.zeros((2, 100), np.float32)
    for got in (
        BACKEND.weight_only_matmul(x, q)[0],
        BACKEND.block_scaled_matmul(quantized((3, 100), MXFP4, 1), q)[0],
    ):
        assert np.flatnonzero(np.isnan(got)).tolist() == [4, 5]


def test_zeros_give_zero(variant: str) -> None:
    a = BACKEND.quantize(np.zeros((9, 70), np.float32), MXFP4.resolve(2))[0]
    b = quantized((8, 70), MXFP4, 1)
    assert not BACKEND.block_scaled_matmul(a, b).any()
    assert not BACKEND.block_scaled_matmul(b, a).any()
    assert not BACKEND.weight_only_matmul(np.zeros((2, 70), np.float32), b).any()


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
            assert f", {kind}" in BACKEND.path("block_scaled_matmul", a, b)
        got = BACKEND.block_scaled_matmul(a, b)
        assert not got[0].any()
        check(got[1:], exact(a)[1:], exact(b), 64, (low, high))
        back = BACKEND.block_scaled_matmul(b, a)  # the other side is packed in another way
        assert not back[:, 0].any()
        check(back[:, 1:], exact(b), exact(a)[1:], 64, (low, high))


# --- paths, and what the core refuses -----------------------------------------------------------


def test_path_names_the_reason() -> None:
    good = quantized((4, 64), MXFP4, 0)
    x = np.ones((1, 64), np.float32)
    columnwise = GENERIC.quantize(np.ones((64, 4), np.float32), QuantSpec("mxfp4", axis=0))[0]
    transformed = GENERIC.quantize(x, QuantSpec("mxfp4", transform=Hadamard(16)))[0]
    rows = GENERIC.quantize(x, QuantSpec("outlier"))[0]
    uneven = quantized((4, 64), QuantSpec("mxfp4", tile=(1, 6)), 0)
    zeros = quantized((4, 64), ZEROS, 0)
    deep = GENERIC.quantize(np.ones((2, 2, 64), np.float32), MXFP4)[0]
    for reason, method, *args in (
        ("along axis 0", "block_scaled_matmul", columnwise, good),
        ("Hadamard", "block_scaled_matmul", good, transformed),
        ("outlier", "block_scaled_matmul", rows, rows),
        ("zero points with blocks that meet in steps of 6", "block_scaled_matmul", zeros, uneven),
        ("3 axes", "block_scaled_matmul", deep, good),
        ("float64", "weight_only_matmul", x.astype(np.float64), good),
    ):
        path = BACKEND.path(method, *args)
        assert path.startswith("generic: "), (reason, path)
        assert (reason if CORE else BACKEND.core_missing or reason) in path


def test_the_core_checks_what_it_is_given() -> None:
    if CORE is None:
        return
    a, b = (product_paths.matrix(CORE, quantized((4, k), MXFP4, 0)) for k in (64, 32))
    with pytest.raises(ValueError, match="differ in k"):
        CORE.block_scaled_matmul(a, b, 32)
    for step in (-4, 3, 24, 512, 8196):
        with pytest.raises(ValueError, match="step"):
            CORE.block_scaled_matmul(a, a, step)
    if CORE.gemm_has_amx():
        with pytest.raises(ValueError, match="one float32 scale a row"):
            CORE.int8_matmul(a, a)
    fp8 = product_paths.matrix(CORE, quantized((4, 64), QuantSpec("mxfp8_e4m3"), 0))
    with pytest.raises(ValueError, match="small integers"):
        CORE.block_scaled_matmul(a, fp8, 32)
    with pytest.raises(ValueError, match="expected x of"):
        CORE.weight_only_matmul(np.ones((3, 65), np.float32), a)
    with pytest.raises(ValueError, match="expected one of scalar"):
        CORE.set_gemm_level("neon")
    whole = quantized((4, 64), MXFP4, 0)
    for part in ("codes", "scales"):
        cut = QuantArray(**{**vars(whole), part: getattr(whole, part)[:, :-1]})
        with pytest.raises(ValueError, match=f"the {part} do not fit"):
            product_paths.matrix(CORE, cut)
