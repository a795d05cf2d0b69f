"""Products of up to 64 tokens with packed weights on wgmma: emulated, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only import w4a16_sm90_resident, w4w8a16_sm90_wgmma
from extensor_cuda.kernels.weight_only.program import TOKENS_PER_ROW
from extensor_cuda.matmul import partition
from extensor_cuda.matmul.weight_only import weight_only_matmul
from tests.kernels.matmul_cases import exact
from tests.unit.cuda import weight_only_cases
from tests.unit.cuda.bounds import sent
from tests.unit.cuda.places import PLACES
from tests.unit.cuda.test_compile import check_compiles
from tests.unit.cuda.weight_only_cases import (
    INTEGERS,
    WEIGHTS,
    activations,
    check,
    name,
    product_of,
    weights,
)


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return weight_only_cases.placed(request, monkeypatch)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "spec", [*WEIGHTS[:2], WEIGHTS[3], *INTEGERS[1:6], *INTEGERS[7::2]], ids=name
)
def test_no_kernel_for_hopper_spills(spec: QuantSpec) -> None:
    """Each number of tokens' registers, each division that they leave room for."""
    w, bits = weights(spec, (16, 1024)), spec.row.element.bits
    for rows, dtype in ((1, "float32"), (21, "float32"), (16, "bfloat16"), (64, "bfloat16")):
        schedules = partition.wgmma_schedules(16, 1024, rows * TOKENS_PER_ROW[dtype], dtype, bits)
        for made in {schedule.split: schedule for _, schedule in schedules}.values():
            source = w4w8a16_sm90_wgmma.source(w, rows, dtype, dtype, made)
            check_compiles(source, "sm_90a")


@pytest.fixture
def many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens take the program for more."""
    monkeypatch.setattr(w4a16_sm90_resident, "supports", lambda w, tokens: False)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("spec", WEIGHTS[:5], ids=name)
def test_more_tokens_on_hopper(xp: Any, spec: QuantSpec) -> None:
    """Ends of segments, chunks, tiles and tokens."""
    for m, n, k, dtype in (
        (1, 150, 1024, "bfloat16"),
        (5, 33, 384, "float32"),
        (21, 20, 128, "float32"),
        (24, 40, 640, "bfloat16"),
        (64, 65, 128, "bfloat16"),
    ):
        w = weights(spec, (n, k))
        if w4w8a16_sm90_wgmma.supports(w):
            check(activations((m, k), dtype), w, ("float32", "bfloat16")[m % 2], xp)
        else:
            assert spec.tile == (1, 128)


@pytest.mark.parametrize("spec", INTEGERS, ids=name)
def test_integers_on_hopper(xp: Any, spec: QuantSpec) -> None:
    """Ends of segments, chunks, groups, rows, tiles and tokens; one row, and one of a pair."""
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
        assert w4w8a16_sm90_wgmma.supports(w)
        check(activations((m, k), dtype), w, ("float32", "bfloat16")[m % 2], xp)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_division(xp: Any, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound, the same bits each time, counters left at zero."""
    rows, n, columns = 3, 258, 1664
    x, w = activations((rows, columns), "bfloat16"), weights(QuantSpec("mxfp4"), (n, columns))
    schedules = [
        schedule for _, schedule in partition.wgmma_schedules(n, columns, rows, "bfloat16", 4)
    ]
    schedules = [
        schedule
        for schedule in schedules
        if schedule.split == split and schedule.slices in (1, 3, 13)
    ]
    assert [one.slices for one in schedules] == [1, 3, 13][: 3 if split == 1 else 2]
    for schedule in schedules:
        monkeypatch.setattr(partition, "wgmma_schedule", lambda *shape, one=schedule: one)
        first = check(x, w, "float32", xp)
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("spec", [INTEGERS[4], INTEGERS[7]], ids=name)
def test_every_division_of_integers(
    xp: Any, spec: QuantSpec, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above; slices that end inside of groups, warpgroups without a segment."""
    rows, n, columns = 3, 260, 1408
    x, w = activations((rows, columns), "bfloat16"), weights(spec, (n, columns))
    bits = spec.row.element.bits
    schedules = [
        schedule for _, schedule in partition.wgmma_schedules(n, columns, rows, "bfloat16", bits)
    ]
    schedules = [
        schedule for schedule in schedules if schedule.split == split and schedule.slices in (1, 3)
    ]
    assert len(schedules) == 2
    for schedule in schedules:
        monkeypatch.setattr(partition, "wgmma_schedule", lambda *shape, one=schedule: one)
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
    n = 3 << bits
    w = weights(spec, (n, 256 if bits == 4 else 128))
    codes = np.arange(n)[:, None] % (1 << bits) + np.arange(w.shape[1])
    if bits == 4:
        codes = codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4
    w.codes[...] = codes.astype(np.uint8)
    w.scales[...] = 1
    assert w.zero_points is not None
    least = -(1 << (bits - 1))
    points = np.repeat([least, -least - 1, 0], 1 << bits)[:, None]
    w.zero_points[...] = points if len(w.zero_points) == n else least
    x = np.zeros((rows, w.shape[1]), ml_dtypes.bfloat16)
    places = [0, 37, 66, 101, 127]
    x[range(rows), places] = 1
    got = product_of(x, w, "float32", xp).get()
    np.testing.assert_array_equal(got, exact(w).T[places])


@pytest.mark.parametrize("spec", [INTEGERS[0], INTEGERS[3], INTEGERS[4], INTEGERS[9]], ids=name)
def test_scales_that_are_no_numbers_stay_in_their_row(xp: Any, spec: QuantSpec) -> None:
    """Of the last group too, behind which a warpgroup may have nothing; infinity stays one."""
    w = weights(spec, (40, 640))
    w.scales[7, 0], w.scales[12, -1] = np.nan, np.inf
    x = np.abs(activations((3, 640), "float32"))
    got = product_of(x, w, "float32", xp).get()
    assert np.isnan(got[:, 7]).all() and np.isinf(got[:, 12]).all()
    assert np.isfinite(np.delete(got, [7, 12], axis=1)).all()
    x[1, 5], x[2, 9] = np.nan, np.inf
    got = np.delete(product_of(x, w, "float32", xp).get(), [7, 12], axis=1)
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all() and not np.isfinite(got[2]).any()


def test_zero_points_need_not_be_aligned(xp: Any) -> None:
    w = sent(weights(INTEGERS[4], (36, 512)), xp)
    assert w.zero_points is not None
    held = xp.empty(w.zero_points.size + 1, dtype=np.int8)
    held[1:] = w.zero_points.ravel()
    x = xp.asarray(activations((3, 512), "bfloat16"))
    odd = replace(w, zero_points=held[1:].reshape(w.zero_points.shape))
    np.testing.assert_array_equal(
        weight_only_matmul(x, odd, "float32", xp).out.get(),
        weight_only_matmul(x, w, "float32", xp).out.get(),
    )
