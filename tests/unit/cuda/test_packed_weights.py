"""Products of many rows with packed weights: emulated, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from extensor_cuda.weights import DECODED, EXPANDED

from extensor.quant.array import tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda import bf16, decoded, dense, expansion
from extensor_cuda import weights as packed
from extensor_cuda.kernels.gemm.gemm_sm90 import Split, configure, gemm, gemm_source
from tests.product_cases import exact
from tests.unit.cuda import decoding
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda.decoding import (
    INT4,
    INT8,
    activations,
    emulated,
    name,
    sent,
    weights,
)
from tests.unit.cuda.places import PLACES
from tests.unit.cuda.test_compile import check_compiles


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return decoding.placed(request, monkeypatch)


@pytest.fixture
def many(xp: Any, monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    """The array module, where products of many rows run too."""
    if isinstance(xp, emulation.Cupy):
        for module in (dense, expansion):
            monkeypatch.setattr(module, "launch", request.getfixturevalue("emulator"))
    elif xp.cuda.Device().compute_capability != "90":
        pytest.skip("the GPU is not a Hopper: no wgmma")
    return xp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "mxfp8_e4m3", "mxfp6_e2m3"])
def test_many_rows_expand_the_weights(many: Any, form: str, dtype: str) -> None:
    x, w = activations((70, 300), dtype), weights(QuantSpec(form), (33, 300))
    x[3, 4] = 0
    assert packed.reason(x, w, "90") is None
    for out in ("float32", "bfloat16"):
        done = packed.product(many.asarray(x), sent(w, many), out, many)
        assert not isinstance(done, str) and done[1] == EXPANDED
        a, b = x.astype(np.float64), exact(w)
        want, size = a @ b.T, np.abs(a) @ np.abs(b).T
        bound = (300 * 2.0**-22 + 2.0**-20) * size + (2.0**-8 * np.abs(want) + 1e-4 * size) * (
            out == "bfloat16"
        )
        assert (np.abs(done[0].get().astype(np.float64) - want) <= bound).all()


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
        packed.product(x, w, "bfloat16", many)
    monkeypatch.setattr(emulation.Device, "get", refuse)
    done = packed.product(x, w, "bfloat16", many)
    assert not isinstance(done, str) and done[1] == EXPANDED
    if form == "mxfp4":
        with pytest.raises(AssertionError, match="read on the host"):
            packed.product(x, replace(w), "bfloat16", many)


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
        done = packed.product(x, stored, "float32", many)
        assert isinstance(done, str) is not fits
        if isinstance(done, str):
            assert done == "values that bfloat16 does not hold"
        assert bf16._FITS[stored] is False
    twice = sent(w, many)
    assert (bf16.whole([twice, twice], many) is not None) is fits
    assert bf16._FITS[twice] is False


def test_activations_are_multiplied_as_they_lie(many: Any) -> None:
    x = many.asarray(activations((70, 320), "bfloat16"))
    for view, copied in ((x, False), (x[:, :300], False), (x[:, 8:], False), (x[:, 1:], True)):
        parts = packed.pitched(view.view(np.uint16), many)
        assert (parts.data.ptr != view.data.ptr) is copied
        np.testing.assert_array_equal(parts.get(), view.view(np.uint16).get())


def test_the_parts_of_a_float32_add_up_to_it(many: Any) -> None:
    x = activations((9, 40), "float32")
    x[0, :4] = np.inf, -np.inf, np.nan, -0.0
    x[1, 0] = np.uint32(0x7F800001).view(np.float32)  # NaN by its last bit alone
    parts = dense.thirds(many.asarray(x), many).get()
    values = (np.asarray(parts).astype(np.uint32) << 16).view(np.float32).reshape(3, 9, 40)
    with np.errstate(invalid="ignore"):  # of the signaling NaN
        want = x.astype(np.float64)
    np.testing.assert_array_equal(values.astype(np.float64).sum(axis=0), want)


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

    def multiplied(*arguments: Any, packed: Any, **options: Any) -> None:
        readies.append(packed.ready)
        gemm(*arguments, packed=packed, **options)

    monkeypatch.setattr(bf16, "gemm", multiplied)
    for k in (340, 40) if emulated(many) else (1300, 300):
        x = many.asarray(activations((rows, k), dtype))
        w = sent(weights(spec, (n, k)), many)
        results = []
        for beside in (1 << 20, 0, 0):
            monkeypatch.setattr(bf16, "_BESIDE", beside)
            monkeypatch.setattr(bf16, "_GROUP", 1 if emulated(many) else 8)
            made = packed.product(x, w, dtype, many)
            assert not isinstance(made, str)
            results.append(made[0].get())
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
    monkeypatch.setattr(bf16, "_BESIDE", 0)
    monkeypatch.setattr(bf16, "_GROUP", 1 if emulated(many) else 8)
    sizes = [(70, 410, 640), (200, 140, 256), (65, 40, 128)]
    for i, (m, n, k) in enumerate(sizes if emulated(many) else [(900, 4136, 4096), *sizes[1:]]):
        dtype, out = (("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"))[i]
        x, w = activations((m, k), dtype), weights(spec, (n, k), i)
        if (beside := decoded._beside(w)[0]) is not None:
            of_row = w.spec.tile == "channel" or (not spec.symmetric and beside.shape[1] == 1)
            whole = of_row or beside.shape[1] % 4 == 0
            assert decoded.taken(w, m) is whole
            if not whole:  # words of four scales or zero points
                continue
        if i == 1 and not spec.row.tensor_scale and spec.is_mx:
            w.scales[:] = np.random.default_rng(0).choice([9, 100, 136, 137, 200], w.scales.shape)
        done, stored = [], sent(w, many)
        # Whole, in parts of K of which the last is shorter, expanded first, and beside.
        cuts: list[Any] = [(128, None), (64, Split(-(-k // 256), 4)), None, None]
        for cut in cuts:
            with monkeypatch.context() as patch:
                if cut is None:
                    patch.setattr(decoded, "taken", lambda w, rows: False)
                patch.setattr(decoded, "cut", lambda *shape, cut=cut: cut)
                made = packed.product(many.asarray(x), stored, out, many)
            assert not isinstance(made, str) and made[1] == (DECODED if cut else EXPANDED)
            done.append(made[0].get().astype(np.float64))
        a, b = x.astype(np.float64), exact(w)
        want, size = a @ b.T, np.abs(a) @ np.abs(b).T
        bound = (k * 2.0**-22 + w.scales.shape[1] * 2.0**-24 + 2.0**-20) * size
        bound += 2.0**-8 * np.abs(want) + bound if out == "bfloat16" else 0
        assert all((np.abs(result - want) <= bound).all() for result in done)
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
        made = packed.product(many.asarray(x), sent(stored, many), "float32", many)
        assert not isinstance(made, str) and made[1] == DECODED
        results.append(made[0].get())
    assert np.isnan(results[1][:, 7]).all() and np.isfinite(results[0]).all()
    others = np.arange(40) != 7
    np.testing.assert_array_equal(results[1][:, others], results[0][:, others])


def test_few_tiles_are_cut_along_k() -> None:
    for lines, k, rows, group in ((8192, 8192, 128, 0), (1024, 4096, 96, 64), (512, 1280, 70, 128)):
        _, split = decoded.cut(lines, k, rows, group, 4)
        assert split is not None and (split.parts - 1) * split.stages < k // 64
        assert split.stages * split.parts >= k // 64
        assert split.stages % max(2, group // 32) == 0
    assert decoded.cut(28672, 8192, 8192, 0, 8)[1] is None


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
        assert packed.reason(x, w, "90") is None
        done = packed.product(many.asarray(x), sent(w, many), out, many)
        way = DECODED if decoded.taken(w, m) else EXPANDED
        assert not isinstance(done, str) and done[1] == way
        a, b = x.astype(np.float64), exact(w)
        want, size = a @ b.T, np.abs(a) @ np.abs(b).T
        bound = (k * 2.0**-22 + w.scales.shape[1] * 2.0**-24 + 2.0**-20) * size + k * 2.0**-126
        bound += 2.0**-8 * np.abs(want) + bound if out == "bfloat16" else 0
        error = np.abs(done[0].get().astype(np.float64) - want)
        assert done[0].shape == (m, n) and (error <= bound).all(), (i, (error / size).max())


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
    made = bf16.as_bf16(sent(w, many), many)
    held = (np.asarray(made.codes.get()).astype(np.uint32) << 16).view(np.float32)
    ones = replace(w, scales=np.ones_like(w.scales))
    np.testing.assert_array_equal(held, exact(ones))
    scales = w.scales.astype(np.float32).repeat(tile_extent(w.spec, w.shape)[0], axis=0)[:3]
    if made.scales is None:
        assert made.factor is not None
        factors = np.broadcast_to(made.factor.get(), len(scales))
        np.testing.assert_array_equal(factors, scales[:, 0])
    else:
        np.testing.assert_array_equal(made.scales.get()[: scales.shape[1], :3], scales.T)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("every", [32, 64, 128])
def test_no_product_under_group_scales_spills(every: int) -> None:
    for columns in (128, 176, 192):
        for out in ("bfloat16", "float32"):
            config = configure("bf16", 128, columns, out, every=every)
            check_compiles(gemm_source(replace(config, tile_n=columns)), "sm_90a")


BESIDE = (QuantSpec("mxfp4"), QuantSpec("nvfp4"), QuantSpec("mxfp8_e4m3"), *FLOAT_SCALED[:4])


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", BESIDE, ids=name)
def test_no_product_that_expands_spills(spec: QuantSpec) -> None:
    """The warps that expand have 40 registers."""
    w = weights(spec, (64, 256))
    every = bf16.every(w)
    config = configure("bf16", 8192, 2048, "bfloat16", every=every)
    factors = spec.format != "mxfp4" and spec.format != "mxfp8_e4m3" and not every
    config = replace(config, c_down=True, factors=factors)
    check_compiles(gemm_source(replace(config, expands=bf16._source(w).macros)), "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", DECODED_SPECS, ids=name)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_no_product_that_decodes_spills(
    spec: QuantSpec, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weights(spec, (64, 1024))
    group = bf16.every(w)
    for tile in decoded.tiles_of(spec.row.element.bits, group):
        monkeypatch.setattr(decoded, "cut", lambda *shape, tile=tile: (tile, None))
        for folds in (True, False)[: 1 if bf16.is_float_scaled(spec) else 2]:
            monkeypatch.setitem(decoded._FOLDS, w, folds)
            factors = spec.row.tensor_scale or spec.tile == "channel"
            config = replace(decoded._config(w, 256, out)[0], factors=factors)
            for split in (True, False):
                config = replace(config, split=split, out="float32" if split else out)
                check_compiles(gemm_source(config), "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", FLOAT_SCALED[::3], ids=name)
def test_no_expansion_of_codes_spills(spec: QuantSpec) -> None:
    for whole in (False, True):
        source = expansion.expand_source(spec.replace(axis=1).resolve(2), "bf16", 0, True, whole)
        check_compiles(source, "sm_90a")


def test_what_many_rows_do_not_cover_is_named() -> None:
    x = activations((70, 256), "float32")
    cases = ((INT4, "80", "70 rows"), (INT4.replace(tile=(1, 96)), "90", "groups of 96"))
    for spec, capability, words in cases:
        assert words in str(packed.reason(x, weights(spec, (32, 256)), capability))
    assert "70 rows" in str(packed.reason(x, weights(QuantSpec("mxfp4"), (32, 256)), "80"))
