"""Weight-only products of few rows: on the emulator (mma too) and on a GPU, within the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda import bf16, decode, dense, expansion
from extensor_cuda import weights as packed
from extensor_cuda.kernels import decode_few, decode_hopper
from extensor_cuda.kernels.gemm import Config, configure, gemm, gemm_source
from tests.product_cases import exact
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

INT4, INT8 = QuantSpec("int4"), QuantSpec("int8")
WEIGHTS = (
    QuantSpec("mxfp4"),
    QuantSpec("mxfp4", tile=(1, 16)),
    QuantSpec("mxfp4", tile=(1, 128)),
    QuantSpec("nvfp4"),
    QuantSpec("nvfp4", scale_rule="four_over_six"),
    INT4,
    INT4.replace(tile=(1, 64), scale_dtype="float16"),
    INT4.replace(tile=(1, 128), symmetric=False),
    INT4.replace(tile="channel", symmetric=False),
    INT8,
    INT8.replace(symmetric=False),
    INT8.replace(tile="tensor", symmetric=False),
    INT8.replace(tile=(1, 32)),
    INT8.replace(tile=(1, 128), scale_dtype="float16", symmetric=False),
)
INTEGERS = (
    INT4.replace(tile="channel"),
    INT4.replace(tile="channel", symmetric=False),
    INT4.replace(tile=(1, 128)),
    INT4.replace(tile=(1, 128), symmetric=False, scale_dtype="float16"),
    INT4.replace(tile=(1, 256), symmetric=False),
    INT4.replace(tile="tensor", symmetric=False, scale_dtype="float16"),
    INT8,
    INT8.replace(symmetric=False, scale_dtype="float16"),
    INT8.replace(tile="tensor", symmetric=False),
    INT8.replace(tile=(1, 128), symmetric=False, scale_dtype="float16"),
    INT8.replace(tile=(1, 256), scale_dtype="float16"),
)
"""What `decode_hopper.cu` has of integers."""
SHAPES = ((1, 70, 96), (2, 17, 600), (3, 5, 33))


def name(value: object) -> str:
    if not isinstance(value, QuantSpec):
        return str(value)
    return f"{value.format}-{value.tile}-{value.rule}-{value.scale_name}-{value.symmetric}"


def weights(spec: QuantSpec, shape: tuple[int, int], seed: int = 0) -> QuantArray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, shape)) + 0.3
    return reference.quantize(x.astype(np.float32), spec.replace(axis=1).resolve(2))[0]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", WEIGHTS, ids=name)
def test_no_kernel_spills(spec: QuantSpec) -> None:
    w = weights(spec, (64, 256))
    cases = ((1, "float32"), (5, "float32"), (32, "bfloat16"), (64, "bfloat16"))
    for i, (rows, dtype) in enumerate(cases):
        source = decode.decode_source(w, rows, dtype, dtype)
        for arch in ("sm_80", "sm_90a")[i % 2 :]:
            check_compiles(source, arch)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", WEIGHTS[:4], ids=name)
def test_no_kernel_for_few_tokens_spills(spec: QuantSpec) -> None:
    w = weights(spec, (16, 8192))
    for rows, dtype in ((1, "float32"), (5, "float32"), (1, "bfloat16"), (16, "bfloat16")):
        check_compiles(decode_few.decode_source(w, rows, dtype, dtype), "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "spec", [*WEIGHTS[:2], WEIGHTS[3], *INTEGERS[1:6], *INTEGERS[7::2]], ids=name
)
def test_no_kernel_for_hopper_spills(spec: QuantSpec) -> None:
    """Each number of tokens' registers, each division that they leave room for."""
    w, bits = weights(spec, (16, 1024)), spec.row.element.bits
    for rows, dtype in ((1, "float32"), (21, "float32"), (16, "bfloat16"), (64, "bfloat16")):
        ways = decode_hopper.cuts(16, 1024, rows * decode_few.PARTS[dtype], dtype, bits)
        for made in {way.split: way for _, way in ways}.values():
            source = decode_hopper.decode_source(w, rows, dtype, dtype, made)
            check_compiles(source, "sm_90a")


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    decode._counters.cache_clear()
    return place(request, monkeypatch, [decode, decode_few], hopper=False, products=[decode_hopper])


@pytest.fixture
def many(xp: Any, monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    """The array module, where products of many rows run too."""
    if isinstance(xp, emulation.Cupy):
        for module in (dense, expansion):
            monkeypatch.setattr(module, "launch", request.getfixturevalue("emulator"))
    elif xp.cuda.Device().compute_capability != "90":
        pytest.skip("the GPU is not a Hopper: no wgmma")
    return xp


def sent(q: QuantArray, xp: Any) -> QuantArray:
    return replace(q, **{part: xp.asarray(array) for part, array in q.parts.items()})


def activations(shape: tuple[int, int], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(shape[1])
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def check(x: np.ndarray, w: QuantArray, out: str, xp: Any) -> np.ndarray:
    assert decode.reason(x, w, "80") is None
    got = decode.product(xp.asarray(x), sent(w, xp), out, xp)
    a, b = x.astype(np.float64), exact(w)
    k = x.shape[1]
    want, size = a @ b.T, np.abs(a) @ np.abs(b).T
    groups = w.scales.shape[1] if w.spec.scale_name.startswith("float") else 0
    splits = 64  # at most, of these shapes
    bound = (k * 2.0**-22 + (splits + groups + 8) * 2.0**-24) * size + k * 2.0**-126
    if out == "bfloat16":
        bound = bound * 2 + 2.0**-8 * np.abs(want)
    result = np.asarray(got.get())
    assert result.shape == want.shape and result.dtype.name == out
    error = np.abs(result.astype(np.float64) - want)
    assert (error <= bound).all(), (error / np.maximum(bound, 1e-300)).max()
    return result


@pytest.mark.parametrize("spec", WEIGHTS, ids=name)
def test_products_are_within_the_bound(xp: Any, spec: QuantSpec) -> None:
    for i, (m, n, k) in enumerate(SHAPES):
        w = weights(spec, (n, k), i)
        dtype, out = (("bfloat16", "float32"), ("float32", "float32"), ("float32", "bfloat16"))[
            i % 3
        ]
        check(activations((m, k), dtype), w, out, xp)


@pytest.mark.parametrize("rows", [16, 33, 64])
def test_more_tokens(xp: Any, rows: int) -> None:
    check(
        activations((rows, 160), "bfloat16"), weights(QuantSpec("mxfp4"), (20, 160)), "float32", xp
    )
    if rows < 22:
        check(activations((rows, 160), "float32"), weights(INT4, (20, 160)), "float32", xp)


@pytest.mark.parametrize("spec", WEIGHTS[:5], ids=name)
def test_few_tokens(xp: Any, spec: QuantSpec) -> None:
    """K of a block and in slices; ends of chunks, tiles and tokens; both ways to copy scales."""
    for m, n, k, dtype in (
        (1, 200, 1024, "bfloat16"),
        (5, 33, 2560, "float32"),
        (16, 40, 5632, "bfloat16"),  # in slices
        (3, 16, 640, "float32"),
        (9, 50, 2176, "bfloat16"),
    ):
        w = weights(spec, (n, k))
        if not decode_few.taken(w, m * (3 if dtype == "float32" else 1)):
            assert k // tile_extent(w.spec, w.shape)[1] % 4
            continue
        check(activations((m, k), dtype), w, ("float32", "bfloat16")[m % 2], xp)


def test_every_cut_of_few_tokens(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound, the same bits each time, counters left at zero."""
    x, w = activations((3, 1664), "bfloat16"), weights(QuantSpec("mxfp4"), (150, 1664))
    ways = [way for _, way in decode_few.cuts(150, 1664, 3, 32)]
    assert {(way.slices, way.parts) for way in ways} == {
        (1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1)
    }  # fmt: skip
    for way in ways:
        monkeypatch.setattr(decode_few, "cut", lambda *shape, way=way: way)
        first = check(x, w, "float32", xp)
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)


@pytest.fixture
def many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens take the program for more."""
    monkeypatch.setattr(decode_few, "taken", lambda w, tokens: False)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("spec", WEIGHTS[:5], ids=name)
def test_more_tokens_on_hopper(xp: Any, spec: QuantSpec) -> None:
    """Ends of segments, pieces, tiles and tokens."""
    for m, n, k, dtype in (
        (1, 150, 1024, "bfloat16"),
        (5, 33, 384, "float32"),
        (21, 20, 128, "float32"),
        (24, 40, 640, "bfloat16"),
        (64, 65, 128, "bfloat16"),
    ):
        w = weights(spec, (n, k))
        if decode_hopper.taken(w):
            check(activations((m, k), dtype), w, ("float32", "bfloat16")[m % 2], xp)
        else:
            assert spec.tile == (1, 128)


@pytest.mark.parametrize("spec", INTEGERS, ids=name)
def test_integers_on_hopper(xp: Any, spec: QuantSpec) -> None:
    """Ends of segments, pieces, groups, rows, tiles and tokens; one row, and one of a pair."""
    for i, (m, n, k, dtype) in enumerate(
        (
            (1, 150, 1024, "bfloat16"),
            (5, 36, 384, "float32"),
            (21, 20, 128, "float32"),
            (24, 76, 640, "bfloat16"),
            (64, 68, 384, "bfloat16"),
        )
    ):
        w = weights(spec, (n, k), i)
        assert decode_hopper.taken(w)
        check(activations((m, k), dtype), w, ("float32", "bfloat16")[m % 2], xp)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_division(xp: Any, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound, the same bits each time, counters left at zero."""
    rows, lines, columns = 3, 258, 1664
    x, w = activations((rows, columns), "bfloat16"), weights(QuantSpec("mxfp4"), (lines, columns))
    ways = [way for _, way in decode_hopper.cuts(lines, columns, rows, "bfloat16")]
    ways = [way for way in ways if way.split == split and way.slices in (1, 3, 13)]
    assert [way.slices for way in ways] == [1, 3, 13][: 3 if split == 1 else 2]
    for way in ways:
        monkeypatch.setattr(decode_hopper, "cut", lambda *shape, way=way: way)
        first = check(x, w, "float32", xp)
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("spec", [INTEGERS[4], INTEGERS[7]], ids=name)
def test_every_division_of_integers(
    xp: Any, spec: QuantSpec, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above; slices that end inside of groups, warpgroups without a segment."""
    rows, lines, columns = 3, 260, 1408
    x, w = activations((rows, columns), "bfloat16"), weights(spec, (lines, columns))
    bits = spec.row.element.bits
    ways = [way for _, way in decode_hopper.cuts(lines, columns, rows, "bfloat16", bits)]
    ways = [way for way in ways if way.split == split and way.slices in (1, 3)]
    assert len(ways) == 2
    for way in ways:
        monkeypatch.setattr(decode_hopper, "cut", lambda *shape, way=way: way)
        first = check(x, w, "float32", xp)
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)


@pytest.mark.parametrize(
    "spec",
    [*INTEGERS[3:5], *INTEGERS[7:10], WEIGHTS[8], WEIGHTS[13].replace(tile=(1, 64))],
    ids=name,
)
def test_each_code_less_each_zero_point(xp: Any, spec: QuantSpec) -> None:
    """Each element of w alone, with one as its scale, comes out as it is."""
    bits, rows = spec.row.element.bits, 5
    lines = 3 << bits
    w = weights(spec, (lines, 256 if bits == 4 else 128))
    codes = np.arange(lines)[:, None] % (1 << bits) + np.arange(w.shape[1])
    if bits == 4:
        codes = codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4
    w.codes[...] = codes.astype(np.uint8)
    w.scales[...] = 1
    assert w.zero_points is not None
    least = -(1 << (bits - 1))
    points = np.repeat([least, -least - 1, 0], 1 << bits)[:, None]
    w.zero_points[...] = points if len(w.zero_points) == lines else least
    x = np.zeros((rows, w.shape[1]), ml_dtypes.bfloat16)
    places = [0, 37, 66, 101, 127]
    x[range(rows), places] = 1
    got = decode.product(xp.asarray(x), sent(w, xp), "float32", xp).get()
    np.testing.assert_array_equal(got, exact(w).T[places])


@pytest.mark.parametrize("spec", [INTEGERS[0], INTEGERS[3], INTEGERS[4], INTEGERS[9]], ids=name)
def test_scales_that_are_no_numbers_stay_in_their_row(xp: Any, spec: QuantSpec) -> None:
    """Of the last group too, behind which a warpgroup may have nothing; infinity stays one."""
    w = weights(spec, (40, 640))
    w.scales[7, 0], w.scales[12, -1] = np.nan, np.inf
    x = np.abs(activations((3, 640), "float32"))
    got = decode.product(xp.asarray(x), sent(w, xp), "float32", xp).get()
    assert np.isnan(got[:, 7]).all() and np.isinf(got[:, 12]).all()
    assert np.isfinite(np.delete(got, [7, 12], axis=1)).all()
    x[1, 5], x[2, 9] = np.nan, np.inf
    got = np.delete(
        decode.product(xp.asarray(x), sent(w, xp), "float32", xp).get(), [7, 12], axis=1
    )
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all() and not np.isfinite(got[2]).any()


def test_zero_points_need_not_be_aligned(xp: Any) -> None:
    w = sent(weights(INTEGERS[4], (36, 512)), xp)
    assert w.zero_points is not None
    held = xp.empty(w.zero_points.size + 1, dtype=np.int8)
    held[1:] = w.zero_points.ravel()
    x = xp.asarray(activations((3, 512), "bfloat16"))
    odd = replace(w, zero_points=held[1:].reshape(w.zero_points.shape))
    np.testing.assert_array_equal(
        decode.product(x, odd, "float32", xp).get(), decode.product(x, w, "float32", xp).get()
    )


def test_what_the_other_programs_take(xp: Any) -> None:
    """Columns that are not whole segments, few rows, integers, long blocks."""
    w = weights(QuantSpec("mxfp4"), (20, 256))
    assert decode_few.taken(w, 16) and not decode_few.taken(w, 17) and decode_hopper.taken(w)
    assert not decode_few.taken(weights(QuantSpec("mxfp4"), (15, 256)), 1)
    for other in (
        weights(QuantSpec("mxfp4"), (20, 160)),
        weights(QuantSpec("mxfp4", tile=(1, 64)), (20, 256)),
        weights(INT4, (20, 256)),
        weights(INT4.replace(tile=(1, 64)), (20, 256)),
        weights(
            INT4.replace(tile=(1, 128)), (21, 256)
        ),  # scales and zero points are copied by fours
        weights(INT8, (20, 160)),
        weights(INT8.replace(tile=(1, 200)), (20, 128)),  # rows of 200 bytes
    ):
        assert not decode_hopper.taken(other)
    assert not decode_few.taken(weights(INT4, (20, 256)), 1)


@pytest.mark.parametrize("rows", [1, 17])
def test_scales_that_are_not_decoded_at_once(xp: Any, rows: int) -> None:
    """Above 2^9, beside others in a warp's rows; NaN stays in its row."""
    w = weights(QuantSpec("mxfp4"), (20, 256))
    w.scales[3, 1], w.scales[5, 2], w.scales[6, 0] = 137, 200, 240
    x = activations((rows, 256), "bfloat16")
    check(x, w, "float32", xp)
    w.scales[3, 1] = 255
    got = decode.product(xp.asarray(x), sent(w, xp), "float32", xp).get()
    assert np.isnan(got[:, 3]).all() and np.isfinite(np.delete(got, 3, axis=1)).all()


def test_stretches_of_k_are_added_in_order_and_leave_the_counters_at_zero(xp: Any) -> None:
    x, w = activations((1, 2100), "float32"), weights(QuantSpec("mxfp4"), (70, 2100))
    assert decode.stretches(70, 2100, 128)[0] > 8
    first = check(x, w, "float32", xp)
    for _ in range(2):
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)
    held = decode._counters(xp, xp.cuda.runtime.getDevice(), xp.cuda.get_current_stream().ptr, 2)
    assert not held.get().any()


def test_how_k_is_cut() -> None:
    assert decode.stretches(8192, 8192, 128) == (8, 1024)
    assert decode.stretches(28672, 8192, 128) == (2, 4096)
    assert decode.stretches(10**6, 100, 64) == (1, 128)
    for lines, columns in ((1, 100_000), (64, 1), (9000, 5000)):
        count, each = decode.stretches(lines, columns, 128)
        assert (count - 1) * each < columns <= count * each and each % 128 == 0


def test_nan_and_infinity_stay_in_their_row(xp: Any) -> None:
    spec = QuantSpec("mxfp4")
    w = weights(spec, (40, 128))
    w.scales[7, 2] = 255
    x = activations((3, 128), "float32")
    x[1, 5], x[2, 9] = np.nan, np.inf
    got = decode.product(xp.asarray(x), sent(w, xp), "float32", xp).get()
    assert np.isnan(got[:, 7]).all() and np.isnan(got[1]).all()
    assert np.isfinite(np.delete(got[0], 7)).all()
    assert not np.isfinite(got[2]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "mxfp8_e4m3", "mxfp6_e2m3"])
def test_many_rows_expand_the_weights(many: Any, form: str, dtype: str) -> None:
    x, w = activations((70, 300), dtype), weights(QuantSpec(form), (33, 300))
    x[3, 4] = 0
    assert packed.reason(x, w, "90") is None
    for out in ("float32", "bfloat16"):
        done = packed.product(many.asarray(x), sent(w, many), out, many)
        assert not isinstance(done, str) and done[1] == packed.EXPANDED
        a, b = x.astype(np.float64), exact(w)
        want, size = a @ b.T, np.abs(a) @ np.abs(b).T
        bound = (300 * 2.0**-22 + 2.0**-20) * size + (2.0**-8 * np.abs(want) + 1e-4 * size) * (
            out == "bfloat16"
        )
        assert (np.abs(done[0].get().astype(np.float64) - want) <= bound).all()


def emulated(xp: Any) -> bool:
    return isinstance(xp, emulation.Cupy)


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
    assert not isinstance(done, str) and done[1] == packed.EXPANDED
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
    rows, n, tall = (70, 700, 1) if emulated(many) else (2048, 2560 + 40, 16)
    readies = []

    def multiplied(*arguments: Any, packed: Any, **options: Any) -> None:
        readies.append(packed.ready)
        gemm(*arguments, packed=packed, **options)

    monkeypatch.setattr(bf16, "gemm", multiplied)
    for k in (340, 40) if emulated(many) else (1300, 300):
        x = many.asarray(activations((rows, k), dtype))
        w = sent(weights(spec, (n, k)), many)
        results = []
        for together in (1 << 20, tall, tall):
            monkeypatch.setattr(bf16, "_TALL", together)
            made = packed.product(x, w, dtype, many)
            assert not isinstance(made, str)
            results.append(made[0].get())
        np.testing.assert_array_equal(results[1], results[0])
        np.testing.assert_array_equal(results[2], results[0])
    assert len(readies) == 4 and all(0 < ready < n for ready in readies)


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
)


@pytest.mark.parametrize("spec", FLOAT_SCALED, ids=name)
def test_many_rows_leave_float_scales_apart(many: Any, spec: QuantSpec) -> None:
    for i, (m, n, k) in enumerate(((70, 33, 300), (65, 150, 640), (66, 40, 277))):
        dtype, out = (("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"))[i]
        x, w = activations((m, k), dtype), weights(spec, (n, k), i)
        assert packed.reason(x, w, "90") is None
        done = packed.product(many.asarray(x), sent(w, many), out, many)
        assert not isinstance(done, str) and done[1] == packed.EXPANDED
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
    for columns, patches in ((128, 2), (176, 2), (192, 2)):
        promote = max(every // 64, 1)
        config = Config("bf16", "bf16", columns, promote, patches=patches, every=every)
        check_compiles(gemm_source(replace(config, out="bfloat16")), "sm_90a")


BESIDE = (QuantSpec("mxfp4"), QuantSpec("nvfp4"), QuantSpec("mxfp8_e4m3"), *FLOAT_SCALED[:4])


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", BESIDE, ids=name)
def test_no_product_that_expands_spills(spec: QuantSpec) -> None:
    """The warps that expand have 40 registers."""
    w = weights(spec, (64, 256))
    every = bf16._every(w)
    config = configure("bf16", 2048, 8192, "bfloat16", every=every)
    factors = spec.format != "mxfp4" and spec.format != "mxfp8_e4m3" and not every
    check_compiles(
        gemm_source(replace(config, expands=bf16._source(w).macros, factors=factors)), "sm_90a"
    )


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


@pytest.mark.parametrize(
    ("x", "spec", "words"),
    [
        (np.ones((65, 64), ml_dtypes.bfloat16), QuantSpec("mxfp4"), "65 rows"),
        (np.ones((22, 64), np.float32), QuantSpec("mxfp4"), "22 rows"),
        (np.ones((2, 64), np.float16), QuantSpec("mxfp4"), "float16 activations"),
        (np.ones((2, 64), np.float32), QuantSpec("mxfp8_e4m3"), "mxfp8_e4m3 in blocks"),
        (np.ones((2, 64), np.float32), QuantSpec("fp8_e4m3"), "e4m3 under float scales"),
        (np.ones((2, 64), np.float32), QuantSpec("nvfp4", tile=(16, 16)), "tiles (16, 16)"),
        (np.ones((2, 64), np.float32), INT4.replace(tile=(1, 24)), "groups of 24"),
        (np.ones((2, 64), np.float32), QuantSpec("mxfp4", transform=Hadamard(16)), "Hadamard"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_the_kernel_does_not_cover_is_named(x: Any, spec: QuantSpec, words: str) -> None:
    w = weights(spec, (32, 64))
    assert words in str(decode.reason(x, w, "90"))
    assert "compute capability 75" in str(decode.reason(x, w, "75"))
