"""The model of the GEMM's FP8 sums: against exact ones, and the GEMM against it, bit for bit.

The emulator's tensor cores add exactly. Without a GPU it shows, on sums that Hopper's hold too, how
they are scaled and added in float32; what Hopper's cut off only a GPU does.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor_cuda.kernels.gemm.config import ROWS_PER_SCALE, Config, Split
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, empty_rows, gemm
from extensor_cuda.kernels.prepare import cast_bf16
from extensor_cuda.kernels.prepare.cast_bf16 import add_partial_sums, empty_partial_sums
from extensor_cuda.matmul import product as products
from extensor_cuda.matmul.accumulator import accumulate, promoted
from extensor_cuda.matmul.operand import GemmOperand, Scale
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.product import product
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.places import PLACES, place

DTYPES = {"e5m2": ml_dtypes.float8_e5m2, "e4m3": ml_dtypes.float8_e4m3fn}
LEAST = {"e4m3": -6, "e5m2": -14}
PAIRS = (("e5m2", "e5m2"), ("e4m3", "e4m3"), ("e4m3", "e5m2"))
DATA = ("normal", "one sign", "wide", "outlier", "small")
TILES = {0: (128, 192, 256), 128: (128, 176, 192), 512: (128, 176, 192)}
NEVER = 1 << 20  # elements: more than any K here

pairs = pytest.mark.parametrize(("kind_a", "kind_b"), PAIRS)


@pytest.fixture
def gpu(hopper_gpu: Any) -> Any:
    return hopper_gpu.xp


@pytest.fixture(params=PLACES)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The array module of a Hopper GPU, or of the kernels' sources on the CPU."""
    return place(request, monkeypatch, [cast_bf16])


def drawn(rng: np.random.Generator, rows: int, k: int, kind: str, data: str) -> np.ndarray:
    """FP8 values as float64."""
    x = rng.standard_normal((rows, k))
    if data == "one sign":
        x = np.abs(x)
    elif data == "wide":
        x *= np.exp2(rng.integers(-5, 5, x.shape))
    elif data == "outlier":
        x[:, ::64] *= 64
    elif data == "small":  # subnormals, some of them among larger values
        x *= np.exp2(rng.integers(LEAST[kind] - 3, LEAST[kind] + 9, x.shape))
    return x.astype(DTYPES[kind]).astype(np.float64)


def held(rng: np.random.Generator, rows: int, k: int, kind: str, every: int) -> np.ndarray:
    """FP8 values whose products' sums of so many elements take 13 bits, from then on of others."""
    x = rng.integers(-3, 4, (rows, k)).astype(np.float64)
    exponents = rng.integers(LEAST[kind], 7, (rows, -(-k // every)))
    return x * np.exp2(exponents.repeat(every, axis=1)[:, :k])


def sent(values: np.ndarray, kind: str, xp: Any) -> Any:
    """Codes on the device, with NaN behind the end of each row."""
    rows, k = values.shape
    codes = np.full((rows, -(-k // 128) * 128), 0x7F, dtype=np.uint8)
    codes[:, :k] = values.astype(DTYPES[kind]).view(np.uint8)
    return xp.asarray(codes)[:, :k]


def configs(kind_a: str, kind_b: str, every: int) -> list[Config]:
    """The tiles that are offered, and what may change when a sum is taken but not the sum."""
    found = [Config.of(kind_a, kind_b, tile_n=tile, promote=every // 128) for tile in TILES[every]]
    found.append(found[-1].replace(cluster=2, epilogue_tiles=2))
    if every:
        found.append(found[1].replace(cluster=2, epilogue_tiles=2, ping_pong=True))
        found.append(found[-3].replace(ping_pong=True))
    return found


def multiplied(xp: Any, a: Any, b: Any, config: Config, split: Split | None = None) -> np.ndarray:
    """The GEMM's product of codes."""
    out = empty_rows(xp, len(a), len(b), np.float32)
    out[...] = np.nan
    if split is None:
        gemm(a, b, out, config)
    else:
        parts = empty_partial_sums(*out.shape, split, config, xp)
        gemm(a, b, parts, config.replace(split_k=True), Epilogue(split=split))
        add_partial_sums(parts, split, out, None)
    return np.asarray(out.get())


@pytest.mark.parametrize("signs", [False, True])
def test_the_model_keeps_13_bits_of_the_largest_term(signs: bool) -> None:
    one, sign = np.ones((1, 32)), -1.0 if signs else 1.0
    assert accumulate(one, sign * one, -14, -14)[0, 0] == 32 * sign
    big = np.array([[128.0, *[2.0**-6] * 2, *[0.0] * 29]])
    assert accumulate(big, sign * one, -14, -14)[0, 0] == sign * (128 + 2.0**-5)
    big[0, 1:3] = 2.0**-7  # half of the last bit kept: gone, although the two would add up to it
    assert accumulate(big, sign * one, -14, -14)[0, 0] == sign * 128


@pairs
@pytest.mark.parametrize("data", DATA)
def test_an_interval_of_k_or_more_is_no_promotion(kind_a: str, kind_b: str, data: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (drawn(rng, 9, 330, kind, data) for kind in (kind_a, kind_b))
    least = LEAST[kind_a], LEAST[kind_b]
    expected = accumulate(a, b, *least)
    for every in (352, 512, NEVER):
        np.testing.assert_array_equal(promoted(a, b, *least, every), expected)
    assert (promoted(a, b, *least, 128) != expected).any()
    with pytest.raises(ValueError, match="multiple of 32"):
        promoted(a, b, *least, 144)


@pairs
@pytest.mark.parametrize("every", [128, 512, NEVER])
@pytest.mark.parametrize("data", DATA)
def test_the_model_is_within_the_stated_bound(
    kind_a: str, kind_b: str, every: int, data: str
) -> None:
    rng = np.random.default_rng(every)
    k = 1300
    a, b = (drawn(rng, 13, k, kind, data) for kind in (kind_a, kind_b))
    error = np.abs(promoted(a, b, LEAST[kind_a], LEAST[kind_b], every) - a @ b.T)
    relative = min(k, every) * 34 / 32 * 2.0**-13 + (k / every + 1) * 2.0**-24
    assert (error <= relative * np.abs(a) @ np.abs(b).T).all()


def test_a_subnormal_factor_counts_as_the_smallest_normal() -> None:
    """So that up to 8 (E4M3) and 4 times (E5M2) the other bound is lost where it is the largest."""
    for kind, largest, times in (("e4m3", 8, 8), ("e5m2", 14, 4)):
        least = LEAST[kind]
        a = np.array([[2.0**least / times, *[1.75 * 2.0**least] * 31]])
        b = np.array([[2.0**largest, *[2.0 ** (largest - 14)] * 31]])  # products below the last bit
        got, expected = accumulate(a, b, least, least)[0, 0], (a @ b.T)[0, 0]
        assert got == 2.0 ** (least + largest) / times
        bound = 34 * 2.0**-13 * expected  # all are positive
        assert bound < expected - got < times * bound


def test_promotion_loses_less_on_one_sign() -> None:
    rng = np.random.default_rng(7)
    a, b = (drawn(rng, 11, 4096, "e4m3", "one sign") for _ in range(2))
    lost = [(a @ b.T - promoted(a, b, -6, -6, every)).mean() for every in (128, 512, NEVER)]
    assert 0 < 2 * lost[0] < lost[1] < lost[2] / 2


def nearest(exact: Fraction) -> np.float32:
    """The float32 next to it, the even one of two."""
    guess = np.float32(float(exact))
    options = (guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(9)))
    return min(options, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) % 2))


def test_sums_are_added_in_order_and_rounded_once() -> None:
    """Every float32 addition against one of fractions, with scales and without."""
    rng = np.random.default_rng(4)
    k, every = 500, 128
    a, b = (held(rng, 12, k, "e5m2", every) for _ in range(2))
    scales = [rng.uniform(0.1, 3, (12, 4)).astype(np.float32) for _ in range(2)]
    starts = range(0, k, every)
    sums = np.stack([a[:, i : i + every] @ b[:, i : i + every].T for i in starts])
    plain, under = np.zeros((2, 12, 12), np.float32)
    for i, part in enumerate(sums):
        both = scales[0][:, i, None] * scales[1][None, :, i]
        for at in np.ndindex(12, 12):
            exact = Fraction(float(part[at]))
            plain[at] = nearest(Fraction(float(plain[at])) + exact)
            under[at] = nearest(Fraction(float(under[at])) + exact * Fraction(float(both[at])))
    np.testing.assert_array_equal(promoted(a, b, -14, -14, every), plain)
    np.testing.assert_array_equal(promoted(a, b, -14, -14, every, (scales[0], scales[1])), under)


def test_a_scaled_sum_is_not_rounded_to_float64_before() -> None:
    """1 + 2**-24 + 2**-60, which float64 puts halfway between two float32."""
    a, b = np.zeros((2, 1, 160))
    a[0, 0], b[0, 0] = 1, 1
    a[0, 128:130], b[0, 128:130] = (128, 2), (64, 1)  # 8194, which 16773121 makes 2**37 + 2
    for sign in (1, -1):
        rows = np.array([[sign, 16773121 * sign * 2.0**-61]], dtype=np.float32)
        got = promoted(a, b, -6, -6, 128, (rows, np.ones((1, 2), dtype=np.float32)))
        assert got[0, 0] == sign * (1 + 2.0**-23)


def test_the_tiles_that_are_compared_are_those_that_are_offered() -> None:
    sizes = [64 * i for i in range(1, 80)]
    for every, tiles in TILES.items():
        offered = {
            configure("e5m2", m, n, "float32", every // 128).pipeline.tile_n
            for m in sizes
            for n in sizes
        }
        assert offered <= set(tiles)
        assert every == 0 or offered == set(tiles)


@pytest.mark.parametrize("every", [128, 512])
def test_the_kernel_adds_its_sums_as_the_model_does(hopper: Any, every: int) -> None:
    rng = np.random.default_rng(every)
    m, n, k = 70, 200, 1300
    a, b = held(rng, m, k, "e4m3", every), held(rng, n, k, "e5m2", every)
    expected = promoted(a, b, -6, -14, every)
    assert (expected != (a @ b.T).astype(np.float32)).any()
    codes = sent(a, "e4m3", hopper), sent(b, "e5m2", hopper)
    for config in configs("e4m3", "e5m2", every):
        if config.pipeline.cluster == 1 or not isinstance(hopper, Cupy):
            got = multiplied(hopper, *codes, config)
            np.testing.assert_array_equal(got, expected, err_msg=str(config))


@pytest.mark.parametrize("data", ["held", "normal"])
def test_parts_of_k_are_added_in_order(hopper: Any, data: str) -> None:
    """Each from 0 on, so that the sums are in other brackets than without parts."""
    if data == "normal" and isinstance(hopper, Cupy):
        pytest.skip("an emulator's tensor cores cut nothing off")
    rng = np.random.default_rng(6)
    m, n, k = 70, 200, 2500
    if data == "held":
        a, b = (held(rng, rows, k, "e5m2", 512) for rows in (m, n))
    else:
        a, b = (drawn(rng, rows, k, "e5m2", "normal") for rows in (m, n))
    expected = np.zeros((m, n), dtype=np.float32)
    for start in range(0, k, 1024):
        expected += promoted(a[:, start : start + 1024], b[:, start : start + 1024], -14, -14, 512)
    if data == "held":  # others may be exact either way
        assert (expected != promoted(a, b, -14, -14, 512)).any()
    codes = sent(a, "e5m2", hopper), sent(b, "e5m2", hopper)
    for tile in TILES[512]:
        got = multiplied(hopper, *codes, Config.of(tile_n=tile), Split(3, 8))
        np.testing.assert_array_equal(got, expected)


def scaled_product(
    xp: Any,
    monkeypatch: pytest.MonkeyPatch,
    values: tuple[np.ndarray, np.ndarray],
    kinds: tuple[str, str],
    scales: list[np.ndarray],
    each: tuple[int, int],
    tile: int,
) -> np.ndarray:
    """The product in tiles of so many columns, by what serves such scales."""

    def fixed(*args: Any, **options: Any) -> Config:
        return configure(*args, **options).replace(tile_n=tile)

    codes = [sent(v, kind, xp) for v, kind in zip(values, kinds, strict=True)]
    monkeypatch.setattr(products, "configure", fixed)
    sides = [
        GemmOperand(c, kind, Scale(grid=xp.asarray(s).T, group_k=128, rows=rows))
        for kind, c, s, rows in zip(kinds, codes, scales, each, strict=True)
    ]
    out = np.asarray(product(sides[0], sides[1], "float32", xp).get())
    if each == (128, 128) and scales[0].shape[1] > 1:  # as rebased MXFP8
        squares = []
        for kind, c, s in zip(kinds, codes, scales, strict=True):
            lines = s.T.repeat(128 // ROWS_PER_SCALE, axis=1)
            grid = np.pad(lines, ((0, 0), (0, 64)), constant_values=np.nan)
            scale = Scale(blocks=xp.asarray(np.ascontiguousarray(grid)), group_k=128)
            squares.append(GemmOperand(c, kind, scale))
        again = np.asarray(product(squares[0], squares[1], "float32", xp).get())
        np.testing.assert_array_equal(again, out)
    return out


def scales_of(
    rng: np.random.Generator, sizes: tuple[int, int], blocks: int, each: tuple[int, int]
) -> tuple[list[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Float32 scales of groups of rows, and of each row."""
    scales = [
        rng.uniform(0.01, 1, (-(-size // rows), blocks)).astype(np.float32)
        for size, rows in zip(sizes, each, strict=True)
    ]
    left, right = (
        s.repeat(rows, axis=0)[:size] for s, rows, size in zip(scales, each, sizes, strict=True)
    )
    return scales, (left, right)


@pytest.mark.parametrize("tile", TILES[128])
@pytest.mark.parametrize("each", [(1, 1), (1, 128), (128, 1), (128, 128)], ids=str)
def test_the_kernel_scales_its_sums_as_the_model_does(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, each: tuple[int, int], tile: int
) -> None:
    rng = np.random.default_rng(tile)
    m, n, k = 130, 300, 588
    a, b = held(rng, m, k, "e4m3", 128), held(rng, n, k, "e5m2", 128)
    scales, rows = scales_of(rng, (m, n), 5, each)
    expected = promoted(a, b, -6, -14, 128, rows)
    got = scaled_product(hopper, monkeypatch, (a, b), ("e4m3", "e5m2"), scales, each, tile)
    np.testing.assert_array_equal(got, expected)


def some(rng: np.random.Generator, sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns that the model takes the time for, the first and the last among them."""
    left, right = (
        np.unique(np.r_[0, rng.integers(0, size, most), size - 1])
        for size, most in zip(sizes, (24, 60), strict=True)
    )
    return left, right


@pairs
@pytest.mark.parametrize("every", [0, 128, 512])
@pytest.mark.parametrize("k", [512, 1300, 4096])
@pytest.mark.parametrize("data", DATA)
def test_products_on_a_gpu_are_the_model_bit_for_bit(
    gpu: Any, kind_a: str, kind_b: str, every: int, k: int, data: str
) -> None:
    rng = np.random.default_rng(k + every)
    m, n = 200, 520
    a, b = drawn(rng, m, k, kind_a, data), drawn(rng, n, k, kind_b, data)
    rows, columns = some(rng, (m, n))
    expected = promoted(a[rows], b[columns], LEAST[kind_a], LEAST[kind_b], every or NEVER)
    codes = sent(a, kind_a, gpu), sent(b, kind_b, gpu)
    first = None
    for config in configs(kind_a, kind_b, every):
        got = multiplied(gpu, *codes, config)
        np.testing.assert_array_equal(got[np.ix_(rows, columns)], expected, err_msg=str(config))
        first = got if first is None else first
        np.testing.assert_array_equal(got, first, err_msg=str(config))


@pytest.mark.parametrize("k", [1300, 4096])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("each", [(1, 1), (1, 128), (128, 1), (128, 128), "rows"], ids=str)
def test_scaled_products_on_a_gpu_are_the_model_bit_for_bit(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, each: Any, data: str, k: int
) -> None:
    """By rows: the sum that is promoted every 512, times the row's scale, times the column's."""
    rng = np.random.default_rng(k)
    (m, n), by_row = (200, 520), each == "rows"
    each = (1, 1) if by_row else each
    for kinds in PAIRS[1:]:
        a, b = (drawn(rng, size, k, kind, data) for size, kind in zip((m, n), kinds, strict=True))
        scales, (left, right) = scales_of(rng, (m, n), 1 if by_row else -(-k // 128), each)
        rows, columns = some(rng, (m, n))
        given = a[rows], b[columns], *(LEAST[kind] for kind in kinds)
        if by_row:
            expected = promoted(*given, 512) * left[rows] * right[columns].T
        else:
            expected = promoted(*given, 128, (left[rows], right[columns]))
        for tile in TILES[128]:
            got = scaled_product(gpu, monkeypatch, (a, b), kinds, scales, each, tile)
            np.testing.assert_array_equal(got[np.ix_(rows, columns)], expected)
