"""Products of FP8, INT8 and MXFP4-as-INT8: exact values in, exact integers out, stated bounds.

Without a GPU the kernels run on the emulator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extensor.backends import registry
from extensor.quant import reference
from extensor.quant.array import QuantArray
from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda.kernels.gemm.config import Config, gemm_source
from extensor_cuda.kernels.gemm.gemm_sm90 import MAX_TERMS, Epilogue, Scales, Zeros, gemm
from extensor_cuda.kernels.prepare import rebase
from extensor_cuda.matmul.expand import rebase_mxfp4
from extensor_cuda.matmul.product import Product
from extensor_cuda.matmul.stored import matmul, stored_gap
from tests.kernels.matmul_cases import exact
from tests.unit.cuda.bounds import check_product, sent
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

COMPILED = (
    Config.of("s8", tile_n=256, promote=0, factors=True),
    Config.of("s8", tile_n=192, promote=0, factors=True, zeros=True, epilogue_tiles=3),
    Config.of("e4m3", "e5m2", factors=True, epilogue_tiles=3),
    Config.of("e4m3", tile_n=128, promote=1, blocks=(1, 1), epilogue_tiles=2, out="bfloat16"),
    Config.of("e4m3", tile_n=192, promote=1, blocks=(1, 1), epilogue_tiles=2, ping_pong=True),
    Config.of(
        "e4m3",
        "e5m2",
        tile_n=192,
        promote=1,
        blocks=(1, 4),
        epilogue_tiles=2,
        ping_pong=True,
        out="bfloat16",
    ),
    Config.of("e4m3", tile_n=176, promote=1, blocks=(4, 1), epilogue_tiles=2),
    Config.of("bf16", tile_n=256, promote=0, grouped=True, out="bfloat16"),
    Config.of("e5m2", tile_n=176, grouped=True, epilogue_tiles=3, vectors=True),
    Config.of("e4m3", tile_n=128, grouped=True, factors=True, extras=True, activation="gelu"),
)
SHAPES = ((1, 7, 16), (130, 200, 1000), (70, 33, 2050))
E4M3, E5M2, INT8 = (QuantSpec(name, axis=1) for name in ("fp8_e4m3", "fp8_e5m2", "int8"))
ROWS, SMALL, SQUARE = (E4M3.replace(tile=t) for t in ("channel", (1, 128), (128, 128)))
ZEROS = INT8.replace(symmetric=False)
PAIRS = (
    (E4M3, E4M3),
    (ROWS, ROWS),
    (E4M3, E5M2),
    (ROWS.replace(scale_dtype="float16"), E5M2.replace(tile="channel")),
    (SMALL, SQUARE),
    (SMALL, SMALL),
    (SMALL, ROWS),
    (SMALL.replace(scale_dtype="float16"), SQUARE),
    (E4M3.replace(tile=(64, 4096)), E4M3),
    (INT8, INT8),
    (INT8, INT8.replace(tile="tensor")),
    (ZEROS, ZEROS),
    (ZEROS, INT8),
    (INT8, ZEROS.replace(tile="tensor")),
)


def name(value: object) -> str:
    return (
        "" if not isinstance(value, QuantSpec) else f"{value.format}-{value.tile}-{value.symmetric}"
    )


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "config", COMPILED, ids=lambda c: f"{c.a}-{c.pipeline.tile_n}-{c.pipeline.promote}"
)
def test_no_gemm_spills_or_serialises(config: Config) -> None:
    check_compiles(gemm_source(config), "sm_90a")
    assert config.depth >= 4 and config.shared <= 227 * 1024


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("block", [16, 128])
def test_integers_compile_without_spills(block: int) -> None:
    check_compiles(rebase.mxfp4_source(block, True), "sm_80", "sm_90a")


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, [rebase])


def made(rng: Any, shape: tuple[int, int], spec: QuantSpec, spread: int = 2) -> QuantArray:
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape))
    return reference.quantize((x + 0.5).astype(np.float32), spec.resolve(2))[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("left", "right"), PAIRS, ids=name)
def test_products_are_within_the_bound(
    xp: Any, left: QuantSpec, right: QuantSpec, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(m)
    a, b = made(rng, (m, k), left), made(rng, (n, k), right)
    va, vb = exact(a), exact(b)
    assert stored_gap(a, b, "90") is None
    for dtype in ("float32", "bfloat16"):
        done = matmul(sent(a, xp), sent(b, xp), xp, out_dtype=dtype)
        assert isinstance(done, Product)
        assert done.out.dtype.name == dtype
        blocked = SMALL.tile in (left.tile, right.tile) and k > 128
        extra: Any = 0.0
        if left.format == "int8":
            assert done.path == "int8 tensor cores"
            share, extra = 2.0**-50, 2.0**-22 * np.abs(va @ vb.T)
        elif blocked:
            assert done.path == "FP8 tensor cores, scaled every 128"
            share = 128 * 34 / 32 * 2.0**-13 + (k / 128 + 3) * 2.0**-24
        else:
            assert done.path == "FP8 tensor cores"
            share = min(k, 512) * 34 / 32 * 2.0**-13 + 2.0**-20
        check_product(done.out, va, vb, share, extra + k * 2.0**-126)


@pytest.mark.parametrize("spec", [SMALL, SQUARE], ids=name)
@pytest.mark.parametrize("k", [128, 256])
def test_parts_of_a_matrix_are_products_too(xp: Any, spec: QuantSpec, k: int) -> None:
    """Codes and scales that are views: of one block along K, and of several."""
    a = made(np.random.default_rng(k), (150, 512), spec)

    def part(q: QuantArray) -> QuantArray:
        codes, scales = q.codes[:, 128 : 128 + k], q.scales[:, 1 : 1 + k // 128]
        return replace(q, codes=codes, scales=scales, shape=(150, k))

    done = matmul(part(sent(a, xp)), part(sent(a, xp)), xp)
    assert isinstance(done, Product)
    v = exact(part(a))
    check_product(done.out, v, v, 128 * 34 / 32 * 2.0**-13 + (k / 128 + 3) * 2.0**-24)


def test_nan_rows_stay_nan_and_touch_no_other(xp: Any) -> None:
    x = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    x[3, 7] = np.nan
    for spec in (ROWS, SMALL, INT8, ZEROS):
        a = reference.quantize(x, spec.resolve(2))[0]
        done = matmul(sent(a, xp), sent(a, xp), xp)
        assert isinstance(done, Product)
        nan = np.isnan(done.out.get())
        assert nan[3].all() and nan[:, 3].all() and nan.sum() == 79


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (INT8.replace(tile=(1, 128)), "tiles (1, 128) of int8"),
        (SMALL.replace(tile=(1, 64)), "tiles (1, 64) of e4m3"),
        (QuantSpec("int4", axis=1), "int4 under float scales"),
        (ROWS.replace(transform=Hadamard(16)), "Hadamard"),
        (E4M3.replace(axis=0), "axis 0"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_the_kernel_does_not_cover_is_named(spec: QuantSpec, words: str) -> None:
    q = made(np.random.default_rng(0), (16, 256), spec)
    assert words in str(stored_gap(q, q, "90"))


def test_operands_of_two_kinds_are_refused() -> None:
    rng = np.random.default_rng(0)
    fp8, int8, mx = (made(rng, (16, 256), s) for s in (ROWS, INT8, QuantSpec("mxfp4", axis=1)))
    assert "INT8 operand and an FP8 one" in str(stored_gap(fp8, int8, "90"))
    assert "no plain floats" in str(stored_gap(fp8, mx, "90"))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_mxfp4_as_integers_is_the_cpus_product_bit_for_bit(xp: Any, block: int) -> None:
    rng, spec = np.random.default_rng(block), QuantSpec("mxfp4", axis=1, tile=(1, block))
    a, b = (made(rng, (rows, 1024), spec, 0) for rows in (70, 50))
    for q in (a, b):  # three binades a row, some blocks of zeros under any scale
        q.scales[...] = rng.integers(100, 130, (len(q.scales), 1)) + rng.integers(
            0, 4, q.scales.shape
        )
        q.codes[5, : block // 2], q.scales[5, 0] = 0, 3
    done = matmul(sent(a, xp), sent(b, xp), xp, accumulate="exact")
    assert isinstance(done, Product) and done.path == "int8 tensor cores"
    got = done.out.get()
    np.testing.assert_array_equal(got, registry.get("cpu").block_scaled_matmul(a, b))
    np.testing.assert_array_equal(got, (exact(a) @ exact(b).T).astype(np.float32))


def test_rows_too_wide_for_integers_say_so(xp: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = (made(rng, (20, 256), QuantSpec("mxfp4", axis=1), 0) for _ in range(2))
    for q in (a, b):
        q.scales[...] = 120
    for change in (lambda q: q.scales.__setitem__((7, 2), 116), lambda q: q.scales.fill(255)):
        wide = replace(a, scales=a.scales.copy())
        change(wide)
        flag = xp.zeros((), dtype=np.uint32)
        rebase_mxfp4(sent(wide, xp), flag, xp, integers=True)
        assert int(flag) == 1
    flag = xp.zeros((), dtype=np.uint32)
    whole = rebase_mxfp4(sent(a, xp), flag, xp, integers=True)
    assert int(flag) == 0
    assert whole.scale.exponent is not None
    exponents = whole.scale.exponent
    held = whole.codes.get().view(np.int8).astype(np.float64)
    np.testing.assert_array_equal(np.ldexp(held, exponents.get()[:, None]), exact(a))


def test_options_that_exclude_each_other_are_refused(xp: Any) -> None:
    codes, out = xp.zeros((4, 256), np.uint8), xp.zeros((4, 4), np.float32)
    one, exponent = xp.zeros(1, np.float32), xp.zeros(1, np.int32)
    blocks, zeros = xp.zeros((1, 260), np.float32), Zeros(one, one, one, one)
    fp8, s8 = Config.of("e4m3"), Config.of("s8", promote=0)
    cases: list[tuple[Config, Scales, str]] = [
        (fp8, Scales((exponent, None), (one, one)), "factors stand instead"),
        (fp8, Scales(factors=(one, one), zeros=zeros), "zero points go with"),
        (s8, Scales(zeros=zeros), "zero points go with"),
        (s8, Scales(blocks=(blocks, blocks)), "FP8 codes in one group"),
        (fp8, Scales(blocks=(blocks, blocks)), "K = 256 has 2 blocks"),
    ]
    for config, scales, words in cases:
        with pytest.raises(ValueError, match=words):
            gemm(codes, codes, out, config, Epilogue(scales))
    wide = xp.zeros((4, MAX_TERMS + 17), np.uint8)
    with pytest.raises(ValueError, match="split K"):
        gemm(wide, wide, out, s8)


@pytest.mark.parametrize("blocks", [1, (1,), (0, 1), (2, 4), (1, 128)])
def test_a_scale_is_of_one_row_or_of_four(blocks: Any) -> None:
    with pytest.raises(ValueError, match="expected scales of 1 or 4 rows of both"):
        Config.of("e4m3", promote=1, blocks=blocks)
