"""Weight-only products of few rows: on the emulator (mma too) and on a GPU, within the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda.kernels.weight_only import (
    w4a16_sm90_resident,
    w4w8a16_sm80,
    w4w8a16_sm90_wgmma,
)
from extensor_cuda.matmul import partition
from extensor_cuda.matmul.weight_only import few_tokens_gap
from extensor_cuda.runtime import counters
from tests.unit.cuda import weight_only_cases
from tests.unit.cuda.places import PLACES
from tests.unit.cuda.test_compile import check_compiles
from tests.unit.cuda.weight_only_cases import (
    INT4,
    INT8,
    WEIGHTS,
    activations,
    check,
    name,
    product_of,
    weights,
)

SHAPES = ((1, 70, 96), (2, 17, 600), (3, 5, 33))


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return weight_only_cases.placed(request, monkeypatch)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", WEIGHTS, ids=name)
def test_no_kernel_spills(spec: QuantSpec) -> None:
    w = weights(spec, (64, 256))
    cases = ((1, "float32"), (5, "float32"), (32, "bfloat16"), (64, "bfloat16"))
    for i, (rows, dtype) in enumerate(cases):
        source = w4w8a16_sm80.source(w, rows, dtype, dtype)
        for arch in ("sm_80", "sm_90a")[i % 2 :]:
            check_compiles(source, arch)


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


def test_what_the_other_programs_take(xp: Any) -> None:
    """Columns that are not whole segments, few rows, integers, long blocks."""
    w = weights(QuantSpec("mxfp4"), (20, 256))
    assert (
        w4a16_sm90_resident.supports(w, 16)
        and not w4a16_sm90_resident.supports(w, 17)
        and w4w8a16_sm90_wgmma.supports(w)
    )
    most = 1 << 28  # rows, since 32 bits count tiles times blocks
    assert w4a16_sm90_resident.supports(replace(w, shape=(most - 1, 1024)), 4)
    assert not w4a16_sm90_resident.supports(replace(w, shape=(most, 1024)), 4)
    assert not w4a16_sm90_resident.supports(weights(QuantSpec("mxfp4"), (15, 256)), 1)
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
        assert not w4w8a16_sm90_wgmma.supports(other)
    assert not w4a16_sm90_resident.supports(weights(INT4, (20, 256)), 1)


@pytest.mark.parametrize("rows", [1, 17])
def test_scales_that_are_not_decoded_at_once(xp: Any, rows: int) -> None:
    """Above 2^9, beside others in a warp's rows; NaN stays in its row."""
    w = weights(QuantSpec("mxfp4"), (20, 256))
    w.scales[3, 1], w.scales[5, 2], w.scales[6, 0] = 137, 200, 240
    x = activations((rows, 256), "bfloat16")
    check(x, w, "float32", xp)
    w.scales[3, 1] = 255
    got = product_of(x, w, "float32", xp).get()
    assert np.isnan(got[:, 3]).all() and np.isfinite(np.delete(got, 3, axis=1)).all()


def test_splits_of_k_are_added_in_order_and_leave_the_counters_at_zero(xp: Any) -> None:
    x, w = activations((1, 2100), "float32"), weights(QuantSpec("mxfp4"), (70, 2100))
    assert partition.split_k_sizes(70, 2100, 128)[0] > 8
    first = check(x, w, "float32", xp)
    for _ in range(2):
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)
    held = counters._zeros(xp, xp.cuda.runtime.getDevice(), xp.cuda.get_current_stream().ptr, 2)
    assert not held.get().any()


def test_how_k_is_cut() -> None:
    assert partition.split_k_sizes(8192, 8192, 128) == (8, 1024)
    assert partition.split_k_sizes(28672, 8192, 128) == (2, 4096)
    assert partition.split_k_sizes(10**6, 100, 64) == (1, 128)
    for n, columns in ((1, 100_000), (64, 1), (9000, 5000)):
        count, each = partition.split_k_sizes(n, columns, 128)
        assert (count - 1) * each < columns <= count * each and each % 128 == 0


def test_nan_and_infinity_stay_in_their_row(xp: Any) -> None:
    spec = QuantSpec("mxfp4")
    w = weights(spec, (40, 128))
    w.scales[7, 2] = 255
    x = activations((3, 128), "float32")
    x[1, 5], x[2, 9] = np.nan, np.inf
    got = product_of(x, w, "float32", xp).get()
    assert np.isnan(got[:, 7]).all() and np.isnan(got[1]).all()
    assert np.isfinite(np.delete(got[0], 7)).all()
    assert not np.isfinite(got[2]).any()


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
    assert words in str(few_tokens_gap(x, w, "90"))
    assert "compute capability 75" in str(few_tokens_gap(x, w, "75"))
