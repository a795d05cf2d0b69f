"""Products of many rows with packed weights: emulated, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.gemm.config import Split, gemm_source
from extensor_cuda.kernels.gemm.gemm_sm90 import gemm
from extensor_cuda.kernels.prepare import cast_bf16
from extensor_cuda.kernels.prepare import expand as expand_kernel
from extensor_cuda.kernels.prepare.cast_bf16 import bf16_triple
from extensor_cuda.kernels.prepare.expand import expand_source
from extensor_cuda.matmul import partition, weight_only
from extensor_cuda.matmul.expand import FITS_BF16, as_bf16, bf16_program, exact_bf16, scale_group_k
from extensor_cuda.matmul.operand import pitched
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.product import Product
from extensor_cuda.matmul.weight_only import (
    DECODED,
    EXPANDED,
    decodes_in_gemm,
    weight_only_gap,
    weight_only_matmul,
)
from tests.kernels.matmul_cases import exact
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda import weight_only_cases
from tests.unit.cuda.bounds import check_product, sent
from tests.unit.cuda.places import PLACES
from tests.unit.cuda.test_compile import check_compiles
from tests.unit.cuda.weight_only_cases import INT4, INT8, activations, emulated, name, weights


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return weight_only_cases.placed(request, monkeypatch)


@pytest.fixture
def many(xp: Any, monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    """The array module, where products of many rows run too."""
    if isinstance(xp, emulation.Cupy):
        for module in (cast_bf16, expand_kernel):
            monkeypatch.setattr(module, "launch", request.getfixturevalue("emulator"))
    elif xp.cuda.Device().compute_capability != "90":
        pytest.skip("the GPU is not a Hopper: no wgmma")
    return xp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "mxfp8_e4m3", "mxfp6_e2m3"])
def test_many_rows_expand_the_weights(many: Any, form: str, dtype: str) -> None:
    x, w = activations((70, 300), dtype), weights(QuantSpec(form), (33, 300))
    x[3, 4] = 0
    assert weight_only_gap(x, w, "90") is None
    for out in ("float32", "bfloat16"):
        done = weight_only_matmul(many.asarray(x), sent(w, many), out, many)
        assert isinstance(done, Product) and done.path == EXPANDED
        check_product(done.out, x.astype(np.float64), exact(w), 300 * 2.0**-22 + 2.0**-20)


def refuse(array: Any) -> Any:
    raise AssertionError("read on the host")


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_whether_weights_fit_is_read_once(
    many: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(many, emulation.Cupy):
        pytest.skip("counts the emulator's reads")
    w = sent(weights(QuantSpec(form), (33, 300)), many)
    x = many.asarray(activations((70, 300), "bfloat16"))
    if form == "mxfp4":
        weight_only_matmul(x, w, "bfloat16", many)
    monkeypatch.setattr(emulation.Device, "get", refuse)
    done = weight_only_matmul(x, w, "bfloat16", many)
    assert isinstance(done, Product) and done.path == EXPANDED
    if form == "mxfp4":
        with pytest.raises(AssertionError, match="read on the host"):
            weight_only_matmul(x, replace(w), "bfloat16", many)


@pytest.mark.parametrize(
    ("low", "high", "fits"), [(1, 1, True), (200, 254, True), (100, 254, False)]
)
def test_weights_beyond_bfloat16_go_by_their_largest_scale(
    many: Any, low: int, high: int, fits: bool
) -> None:
    """Least values below bfloat16's, or a largest one above; or both, and there is no product."""
    w = weights(QuantSpec("mxfp8_e5m2"), (33, 96))
    w.scales[...] = low
    w.scales[0, 0] = high
    w.codes[...] = np.where(w.codes & 0x7F, 1, 0)  # the least magnitude
    w.codes[0, 0] = 0x7B if high > low else 1
    x = many.asarray(activations((70, 96), "bfloat16"))
    stored = sent(w, many)
    for _ in range(2):
        done = weight_only_matmul(x, stored, "float32", many)
        assert isinstance(done, Unsupported) is not fits
        if isinstance(done, Unsupported):
            assert done.reason == "values that bfloat16 does not hold"
        assert FITS_BF16[stored] is False
    twice = sent(w, many)
    assert (exact_bf16([twice, twice], many) is not None) is fits
    assert FITS_BF16[twice] is False


def test_activations_are_multiplied_as_they_lie(many: Any) -> None:
    x = many.asarray(activations((70, 320), "bfloat16"))
    for view, copied in ((x, False), (x[:, :300], False), (x[:, 8:], False), (x[:, 1:], True)):
        parts = pitched(view.view(np.uint16), many)
        assert (parts.data.ptr != view.data.ptr) is copied
        np.testing.assert_array_equal(parts.get(), view.view(np.uint16).get())


def test_the_parts_of_a_float32_add_up_to_it(many: Any) -> None:
    x = activations((9, 40), "float32")
    x[0, :4] = np.inf, -np.inf, np.nan, -0.0
    x[1, 0] = np.uint32(0x7F800001).view(np.float32)  # NaN by its last bit alone
    parts = bf16_triple(many.asarray(x), many).get()
    values = (np.asarray(parts).astype(np.uint32) << 16).view(np.float32).reshape(3, 9, 40)
    with np.errstate(invalid="ignore"):  # of the signaling NaN
        expected = x.astype(np.float64)
    np.testing.assert_array_equal(values.astype(np.float64).sum(axis=0), expected)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (QuantSpec("mxfp4"), "float32"),
        (QuantSpec("mxfp4"), "bfloat16"),
        (QuantSpec("nvfp4"), "bfloat16"),
        (QuantSpec("mxfp6_e2m3"), "bfloat16"),
        (INT4, "bfloat16"),
        (INT4.replace(tile=(1, 128), symmetric=False, scale_dtype="float16"), "bfloat16"),
        (INT8.replace(symmetric=False), "bfloat16"),
        (QuantSpec("fp8_e4m3", tile=(128, 128)), "bfloat16"),
    ],
    ids=name,
)
def test_weights_are_expanded_beside_the_products(
    many: Any, spec: QuantSpec, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of weights expanded before; K that ends in a block, N in a tile."""
    rows, n = (70, 700) if emulated(many) else (1100, 4096 + 40)
    readies = []

    def multiplied(*arguments: Any) -> None:
        if (expanded := arguments[-1].packed) is not None:
            readies.append(expanded.ready)
        gemm(*arguments)

    monkeypatch.setattr(weight_only, "gemm", multiplied)
    for k in (340, 40) if emulated(many) else (1300, 300):
        x = many.asarray(activations((rows, k), dtype))
        w = sent(weights(spec, (n, k)), many)
        results = []
        for overlap in (1 << 20, 0, 0):
            monkeypatch.setattr(weight_only, "_OVERLAP_ROWS", overlap)
            monkeypatch.setattr(weight_only, "_SWIZZLE", 1 if emulated(many) else 8)
            made = weight_only_matmul(x, w, dtype, many)
            assert isinstance(made, Product)
            results.append(made.out.get())
        np.testing.assert_array_equal(results[1], results[0])
        np.testing.assert_array_equal(results[2], results[0])
    assert len(readies) == 4 and all(0 < ready < n for ready in readies)


DECODED_SPECS = (
    QuantSpec("mxfp4"),
    QuantSpec("mxfp4", tile=(1, 16)),
    QuantSpec("mxfp4", tile=(1, 128)),
    QuantSpec("nvfp4"),
    INT4.replace(tile=(1, 64)),
    INT4.replace(tile=(1, 64), symmetric=False),
    INT4.replace(tile=(1, 128), symmetric=False, scale_dtype="float16"),
    INT4.replace(tile="channel"),
    INT4.replace(tile="channel", symmetric=False),
    INT8.replace(tile="channel"),
    INT8.replace(tile="channel", symmetric=False),
    INT8.replace(tile=(1, 128), symmetric=False),
)


@pytest.mark.parametrize("spec", DECODED_SPECS, ids=name)
def test_weights_are_decoded_by_the_warps_that_multiply(
    many: Any, spec: QuantSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums within their bound; the bits of weights that are expanded beside the products."""
    monkeypatch.setattr(weight_only, "_OVERLAP_ROWS", 0)
    monkeypatch.setattr(weight_only, "_SWIZZLE", 1 if emulated(many) else 8)
    sizes = [(70, 410, 640), (200, 140, 256), (65, 40, 128)]
    for i, (m, n, k) in enumerate(sizes if emulated(many) else [(900, 4136, 4096), *sizes[1:]]):
        dtype, out = (("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"))[i]
        x, w = activations((m, k), dtype), weights(spec, (n, k), i)
        if (table := weight_only._scales_or_zero_points(w)[0]) is not None:
            of_row = w.spec.tile == "channel" or (not spec.symmetric and table.shape[1] == 1)
            whole = of_row or table.shape[1] % 4 == 0
            assert decodes_in_gemm(w, m) is whole
            if not whole:  # words of four scales or zero points
                continue
        if i == 1 and not spec.row.tensor_scale and spec.is_mx:
            w.scales[:] = np.random.default_rng(0).choice([9, 100, 136, 137, 200], w.scales.shape)
        done, stored = [], sent(w, many)
        # Whole, in parts of K of which the last is shorter, expanded first, and beside.
        schedules: list[Any] = [(128, None), (64, Split(-(-k // 256), 4)), None, None]
        for schedule in schedules:
            with monkeypatch.context() as patch:
                if schedule is None:
                    patch.setattr(weight_only, "decodes_in_gemm", lambda w, rows: False)
                patch.setattr(
                    partition, "decoding_schedule", lambda *shape, schedule=schedule: schedule
                )
                made = weight_only_matmul(many.asarray(x), stored, out, many)
            assert isinstance(made, Product) and made.path == (DECODED if schedule else EXPANDED)
            share = k * 2.0**-22 + w.scales.shape[1] * 2.0**-24 + 2.0**-20
            check_product(made.out, x.astype(np.float64), exact(w), share)
            done.append(made.out.get())
        if i == 0:
            np.testing.assert_array_equal(done[0], done[3])


@pytest.mark.parametrize(("form", "nan"), [("mxfp4", 255), ("nvfp4", 127)])
def test_a_scale_that_is_nan_makes_its_row_nan_and_no_other(many: Any, form: str, nan: int) -> None:
    """And the other rows keep their bits, although scales are not folded then."""
    x, w = activations((70, 256), "bfloat16"), weights(QuantSpec(form), (40, 256))
    broken = replace(w, scales=w.scales.copy())
    broken.scales.view(np.uint8)[7, 3] = nan
    results = []
    for stored in (w, broken):
        made = weight_only_matmul(many.asarray(x), sent(stored, many), "float32", many)
        assert isinstance(made, Product) and made.path == DECODED
        results.append(made.out.get())
    assert np.isnan(results[1][:, 7]).all() and np.isfinite(results[0]).all()
    others = np.arange(40) != 7
    np.testing.assert_array_equal(results[1][:, others], results[0][:, others])


def test_few_tiles_are_cut_along_k() -> None:
    for n, k, m, group in ((8192, 8192, 128, 0), (1024, 4096, 96, 64), (512, 1280, 70, 128)):
        _, split = partition.decoding_schedule(n, k, m, group, 4)
        assert split is not None and (split.count - 1) * split.stages < k // 64
        assert split.stages * split.count >= k // 64
        assert split.stages % max(2, group // 32) == 0
    assert partition.decoding_schedule(28672, 8192, 8192, 0, 8)[1] is None


FLOAT_SCALED = (
    INT4,
    INT4.replace(tile=(1, 64), scale_dtype="float16", symmetric=False),
    INT4.replace(tile=(1, 128), scale_dtype="float16"),
    INT4.replace(tile="channel", symmetric=False),
    INT8,
    INT8.replace(tile="tensor", symmetric=False),
    INT8.replace(tile=(1, 192), symmetric=False),
    QuantSpec("fp8_e4m3"),
    QuantSpec("fp8_e5m2", tile="channel"),
    QuantSpec("fp8_e4m3", tile=(1, 128)),
    QuantSpec("fp8_e4m3", tile=(128, 128)),
    QuantSpec("fp8_e4m3", tile=(1000, 64)),  # more rows than there are
)


@pytest.mark.parametrize("spec", FLOAT_SCALED, ids=name)
def test_many_rows_leave_float_scales_apart(many: Any, spec: QuantSpec) -> None:
    for i, (m, n, k) in enumerate(((70, 33, 300), (65, 150, 640), (66, 40, 277))):
        dtype, out = (("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"))[i]
        x, w = activations((m, k), dtype), weights(spec, (n, k), i)
        assert weight_only_gap(x, w, "90") is None
        done = weight_only_matmul(many.asarray(x), sent(w, many), out, many)
        path = DECODED if decodes_in_gemm(w, m) else EXPANDED
        assert isinstance(done, Product) and done.path == path
        share = k * 2.0**-22 + w.scales.shape[1] * 2.0**-24 + 2.0**-20
        check_product(done.out, x.astype(np.float64), exact(w), share, k * 2.0**-126)


@pytest.mark.parametrize("spec", FLOAT_SCALED, ids=name)
def test_codes_less_their_zero_points_are_exact(many: Any, spec: QuantSpec) -> None:
    """Every code, at both ends of the zero points."""
    bits, length = spec.row.element.bits, 1 << spec.row.element.bits
    w = weights(spec, (3, 640 if length < 640 else length))
    w.codes[...] = np.resize(
        np.arange(256, dtype=np.uint8) if bits == 8 else np.arange(256, dtype=np.uint8)[::-1],
        w.codes.shape,
    )
    if w.zero_points is not None:
        least = -(1 << (bits - 1))
        w.zero_points[...] = np.resize([least, -least - 1, 0], w.zero_points.shape)
    made = as_bf16(sent(w, many), many)
    held = (np.asarray(made.codes.get()).astype(np.uint32) << 16).view(np.float32)
    ones = replace(w, scales=np.ones_like(w.scales))
    np.testing.assert_array_equal(held, exact(ones))
    scales = w.scales.astype(np.float32).repeat(tile_extent(w.spec, w.shape)[0], axis=0)[:3]
    if made.scale.blocks is None:
        assert made.scale.factor is not None
        factors = np.broadcast_to(made.scale.factor.get(), len(scales))
        np.testing.assert_array_equal(factors, scales[:, 0])
    else:
        np.testing.assert_array_equal(made.scale.blocks.get()[: scales.shape[1], :3], scales.T)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("every", [32, 64, 128])
def test_no_product_under_group_scales_spills(every: int) -> None:
    for columns in (128, 176, 192):
        for out in ("bfloat16", "float32"):
            config = configure("bf16", 128, columns, out, scale_group_k=every)
            check_compiles(gemm_source(config.replace(tile_n=columns)), "sm_90a")


BESIDE = (QuantSpec("mxfp4"), QuantSpec("nvfp4"), QuantSpec("mxfp8_e4m3"), *FLOAT_SCALED[:4])


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", BESIDE, ids=name)
def test_no_product_that_expands_spills(spec: QuantSpec) -> None:
    """The warps that expand have 40 registers."""
    w = weights(spec, (64, 256))
    every = scale_group_k(w)
    config = configure("bf16", 8192, 2048, "bfloat16", scale_group_k=every)
    factors = spec.format != "mxfp4" and spec.format != "mxfp8_e4m3" and not every
    config = config.replace(out_transposed=True, factors=factors)
    check_compiles(gemm_source(config.replace(expands=bf16_program(w).macros)), "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", DECODED_SPECS, ids=name)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_no_product_that_decodes_spills(
    spec: QuantSpec, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weights(spec, (64, 1024))
    group = scale_group_k(w)
    for tile in partition.decoding_tiles(spec.row.element.bits, group):
        monkeypatch.setattr(partition, "decoding_schedule", lambda *shape, tile=tile: (tile, None))
        for folds in (True, False)[: 1 if spec.has_float_scales else 2]:
            monkeypatch.setitem(weight_only._CAN_FOLD, w, folds)
            factors = spec.row.tensor_scale or spec.tile == "channel"
            config = weight_only._decoding_config(w, 256, out)[0].replace(factors=factors)
            for split in (True, False):
                config = config.replace(split_k=split, out="float32" if split else out)
                check_compiles(gemm_source(config), "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", FLOAT_SCALED[::3], ids=name)
def test_no_expansion_of_codes_spills(spec: QuantSpec) -> None:
    for whole in (False, True):
        source = expand_source(spec.replace(axis=1).resolve(2), "bf16", 0, True, whole)
        check_compiles(source, "sm_90a")


def test_what_many_rows_do_not_cover_is_named() -> None:
    x = activations((70, 256), "float32")
    cases = ((INT4, "80", "70 rows"), (INT4.replace(tile=(1, 96)), "90", "groups of 96"))
    for spec, capability, words in cases:
        assert words in str(weight_only_gap(x, weights(spec, (32, 256)), capability))
    assert "70 rows" in str(weight_only_gap(x, weights(QuantSpec("mxfp4"), (32, 256)), "80"))
