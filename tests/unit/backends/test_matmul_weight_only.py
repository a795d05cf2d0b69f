"""float32 rows times weights in blocks, against the exact product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.cpu import product_paths
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from tests.kernels.matmul_cases import (
    BACKEND,
    CORE,
    MXFP4,
    NVFP4,
    TILED,
    ZEROS,
    check,
    check_weight_only,
    exact,
    gamma,
    quantized,
    short,
)

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
    QuantSpec("fp8_e4m3", tile=(1, 16)),
    QuantSpec("fp8_e4m3", tile=(128, 128)),
    QuantSpec("int5"),
    QuantSpec("int6"),
    QuantSpec("mxfp6_e2m3"),
    QuantSpec("mxfp6_e3m2"),
    QuantSpec("mxfp6_e3m2", tile=(1, 12)),
    QuantSpec("mxint8"),
    QuantSpec("int8"),
    QuantSpec("int8", tile="tensor"),
    ZEROS,
]


@pytest.mark.parametrize("spec", WEIGHTS, ids=short)
def test_weight_only(variant: str, spec: QuantSpec) -> None:
    rng = np.random.default_rng(0)
    shapes = ((1, 1, 1), (1, 7, 33), (2, 70, 300), (3, 33, 1100), (5, 66, 128), (8, 9, 257))
    # Slices of x end at 8192, 4096 and 2048; 65 rows leave a task of one.
    for m, n, k in (*shapes, (1, 5, 8200), (2, 65, 4100), (17, 3, 2500), (32, 6, 256)):
        w = quantized((n, k), spec, k)
        x = (rng.standard_normal((m, k)) * np.exp2(rng.integers(-6, 7, (m, k)))).astype(np.float32)
        path = BACKEND.path("weight_only_matmul", x, w)
        kernels = variant if variant not in TILED else "avx512_vnni"  # tiles take no float32 rows
        assert path.startswith(f"core ({kernels})" if CORE else "generic: ")
        check(BACKEND.weight_only_matmul(x, w), x.astype(np.float64), exact(w), k, (m, n, k))
        wide = np.repeat(x, 2, axis=1)[:, ::2]
        assert np.array_equal(BACKEND.weight_only_matmul(wide, w), BACKEND.weight_only_matmul(x, w))
        half = x.astype(ml_dtypes.bfloat16)
        assert BACKEND.path("weight_only_matmul", half, w) == path
        same = BACKEND.weight_only_matmul(half.astype(np.float32), w)
        assert BACKEND.weight_only_matmul(half, w).tobytes() == same.tobytes()


@pytest.fixture(params=CORE.levels() if CORE else ["numpy only"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    if CORE is None:
        pytest.skip("no C++ core")
    before, products, threads = CORE.level(), CORE.gemm_level(), CORE.threads()
    CORE.set_level(request.param)
    yield request.param
    CORE.set_level(before)
    CORE.set_gemm_level(products)
    CORE.set_threads(threads)


@pytest.mark.parametrize("spec", WEIGHTS, ids=short)
def test_more_rows_give_the_bits_of_the_decoded_product(level: str, spec: QuantSpec) -> None:
    """Weights decoded tile by tile: one chain of float32 sums, whatever the threads."""
    rng = np.random.default_rng(0)
    # Rows pass over in chunks of 96, k in slices of 384; x of 1024 n columns is packed.
    for m, n, k in ((17, 1, 1), (33, 70, 300), (100, 33, 1100), (20, 9, 257), (200, 64, 1024)):
        w = quantized((n, k), spec, k)
        x = rng.standard_normal((m, k)).astype(np.float32)
        decoded = CORE.matmul(x, BACKEND.dequantize(w).T)
        check(decoded, x.astype(np.float64), exact(w), k, (m, n, k))
        for count in (1, 3):
            CORE.set_threads(count)
            got = BACKEND.weight_only_matmul(x, w)
            assert got.tobytes() == decoded.tobytes(), (m, n, k, count)


@pytest.mark.parametrize("spec", WEIGHTS, ids=short)
def test_one_row_of_which_few_elements_are_large(variant: str, spec: QuantSpec) -> None:
    """A group's largest element says how exact the others are: |error| <= gamma S + 2 u T."""
    rng, n, k = np.random.default_rng(0), 9, 300
    w = quantized((n, k), spec, k)
    wide = exact(w)
    group = 8 if spec.row.element.bits == 4 else 4
    x = rng.standard_normal((1, k)).astype(np.float32)
    x[0, ::8] *= 1e6
    x[0, 40:80] = 0
    x[0, 80:96] *= np.float32(1e-40)  # subnormal
    check_weight_only(BACKEND.weight_only_matmul(x, w), x, wide, group)


AFFINE = [
    QuantSpec("int4", minimum=True, scale_dtype="float16"),  # GGUF's Q4_1
    QuantSpec("int4", minimum=True, tile=(1, 6)),
    QuantSpec("int4", minimum=True, super_block=256),  # Q4_K
    QuantSpec("int4", super_block=64, tile=(1, 16)),
    QuantSpec("int8", minimum=True, tile=(1, 32)),
    QuantSpec("int8", super_block=96, tile=(1, 32)),
    QuantSpec("int5", minimum=True, super_block=256),  # Q5_K
    QuantSpec("int6", super_block=256, tile=(1, 16)),  # Q6_K
]


ON_BYTES = [
    MXFP4, NVFP4, QuantSpec("int4", symmetric=False), QuantSpec("mxfp6_e2m3"),
    QuantSpec("mxfp6_e3m2"), QuantSpec("mxint8"), ZEROS, QuantSpec("int5"), QuantSpec("int6"),
    QuantSpec("mxfp8_e4m3"), QuantSpec("mxfp8_e5m2"), QuantSpec("fp8_e4m3", tile="tensor"),
    QuantSpec("fp8_e5m2", tile="channel"),
    AFFINE[0], *AFFINE[-2:],
]  # fmt: skip


@pytest.mark.parametrize("spec", ON_BYTES, ids=short)
def test_few_rows_have_the_bits_of_each_alone(variant: str, spec: QuantSpec) -> None:
    """Codes are decoded once for up to four rows."""
    if variant not in ("avx512_vnni", *TILED):
        pytest.skip("no dot products of bytes")
    rng = np.random.default_rng(0)
    for n, k in ((7, 300), (66, 128), (9, 1100)):
        w = quantized((n, k), spec, k)
        most = 16 if spec.row.element.bits == 6 and k >= 256 else 8
        x = rng.standard_normal((most + 1, k)).astype(np.float32)
        alone = [BACKEND.weight_only_matmul(x[i : i + 1], w) for i in range(most)]
        for m in range(2, most + 1):
            got = BACKEND.weight_only_matmul(x[:m], w)
            assert got.tobytes() == np.concatenate(alone[:m]).tobytes(), (m, n, k)
        decoded = CORE.matmul(x, BACKEND.dequantize(w).T)
        assert BACKEND.weight_only_matmul(x, w).tobytes() == decoded.tobytes()


@pytest.mark.parametrize("spec", [s for s in ON_BYTES if not s.is_affine], ids=short)
def test_rows_that_end_anywhere_in_a_vector_of_codes(variant: str, spec: QuantSpec) -> None:
    """With 127 codes of four bits the last vector is whole, though its last code is none's.

    A tile as long as a row may end within what one lane multiplies.
    """
    rng = np.random.default_rng(0)
    for k in (23, 42, 63, *range(120, 130), 255):
        w = quantized((5, k), spec, k)
        for m in (1, 2, 5):
            x = rng.standard_normal((m, k)).astype(np.float32)
            check(BACKEND.weight_only_matmul(x, w), x.astype(np.float64), exact(w), k, (m, k))


@pytest.mark.parametrize("spec", AFFINE, ids=short)
def test_minimums_and_super_blocks(level: str, spec: QuantSpec) -> None:
    rng = np.random.default_rng(0)
    for n, k in ((5, 40), (70, 300), (33, 1100), (9, 8200)):
        x = (rng.standard_normal((n, k)) + 0.3) * np.exp2(rng.integers(-3, 4, (n, k)))
        w = BACKEND.quantize(x.astype(np.float32), spec.resolve(2))[0]
        values = BACKEND.dequantize(w)
        # A block's terms are its scale times the codes from the least on, and its minimum.
        spread = np.abs(values).astype(np.float64) + 2 * np.abs(values).max()
        for m in (1, 2, 4, 7, 9, 40):
            x = rng.standard_normal((m, k)).astype(np.float32)
            assert BACKEND.path("weight_only_matmul", x, w).startswith("core ")
            got = BACKEND.weight_only_matmul(x, w)
            wide = x.astype(np.float64)
            bound = gamma(k + 6) * (np.abs(wide) @ spread.T)
            assert (np.abs(got - wide @ values.astype(np.float64).T) <= bound).all(), (m, n, k)
            if m > (16 if spec.row.element.bits == 6 else 8):
                assert got.tobytes() == CORE.matmul(x, values.T).tobytes(), (m, n, k)


def test_the_core_checks_minimums_and_super_blocks() -> None:
    if CORE is None:
        return
    w = BACKEND.quantize(np.ones((4, 512), np.float32), AFFINE[2].resolve(2))[0]
    for part in ("minimums", "super_scales", "super_minimums"):
        cut = QuantArray(**{**vars(w), part: getattr(w, part)[:, :-1]})
        with pytest.raises(ValueError, match="do not fit the tiles"):
            BACKEND.weight_only_matmul(np.ones((1, 512), np.float32), cut)
    packed = product_paths.matrix(CORE, w)
    with pytest.raises(ValueError, match="only weight-only products"):
        CORE.block_scaled_matmul(packed, packed, 32)


def test_activations_that_are_large_or_not_finite(variant: str) -> None:
    """Sums of x times unscaled codes would overflow: such x meets decoded weights."""
    for spec in (MXFP4, NVFP4, *map(QuantSpec, ("int8", "mxfp6_e3m2", "int6", "mxfp8_e4m3"))):
        w = quantized((9, 300), spec, 0)
        w.scales[:] = 1e-30 if w.scales.dtype.kind == "f" else 1
        x = np.full((3, 300), 2.0**126, np.float32)
        got = BACKEND.weight_only_matmul(x, w)
        check(got, x.astype(np.float64), exact(w), 300, spec)
        x[0, 7], x[1, 8] = np.inf, np.nan
        with np.errstate(invalid="ignore"):
            dense = x @ BACKEND.dequantize(w).T
        assert (np.isfinite(BACKEND.weight_only_matmul(x, w)) == np.isfinite(dense)).all()


def test_weights_ignore_what_is_left_in_memory(variant: str) -> None:
    """Lanes beyond the end of a row meet no scale of an earlier product, or of another row."""
    rest = map(QuantSpec, ("mxfp8_e4m3", "mxfp6_e3m2", "int5", "int6"))
    specs = (MXFP4, NVFP4, QuantSpec("int4", symmetric=False), *rest)
    for spec, k in itertools.product(specs, (33, 65)):
        before, w = quantized((9, 2000), spec, 0), quantized((9, k), spec, 1)
        for scales in (before.scales, w.scales[4:5]):
            scales[:] = np.nan if scales.dtype.kind == "f" else 255 if spec.is_mx else 0x7F
        for rows in (1, 2, 4, 5, 8):
            ones = np.ones((rows, 2000), np.float32)
            assert np.isnan(BACKEND.weight_only_matmul(ones, before)).all()
            got = BACKEND.weight_only_matmul(ones[:, :k].copy(), w)
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
            check(BACKEND.weight_only_matmul(a, w), a.astype(np.float64), exact(w), k, (name, low))
    w = quantized((6, k), NVFP4, 0)
    a = np.ones((3, k), np.float32)
    w.scales[:] = np.arange(w.scales.size).reshape(w.scales.shape) % 0x7F
    check(BACKEND.weight_only_matmul(a, w), a.astype(np.float64), exact(w), k, "ue4m3")
    for spec, nan in ((NVFP4, 0x7F), (MXFP4, 255)):
        w = quantized((6, k), spec, 0)
        w.codes[:] = 0x22  # ones: infinite scales would show
        w.scales[4, 5], w.scales[5, -1] = nan, nan
        got = BACKEND.weight_only_matmul(a, w)
        assert np.array_equal(np.isnan(got), np.arange(6) >= np.full((3, 1), 4)), spec
