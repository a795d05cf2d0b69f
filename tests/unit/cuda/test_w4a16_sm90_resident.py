"""Products of up to 16 tokens with packed E2M1 weights on Hopper: emulated, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from extensor.backends import registry
from extensor.backends.generic import GenericBackend
from extensor.quant.array import tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.backend import ROUTES
from extensor_cuda.dispatch import routed
from extensor_cuda.kernels.weight_only import w4a16_sm90_resident
from extensor_cuda.matmul import partition, weight_only
from extensor_cuda.runtime import driver
from tests.unit.cuda import weight_only_cases
from tests.unit.cuda.bounds import sent
from tests.unit.cuda.places import PLACES
from tests.unit.cuda.test_compile import check_compiles
from tests.unit.cuda.weight_only_cases import WEIGHTS, activations, check, name, weights


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return weight_only_cases.placed(request, monkeypatch)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", WEIGHTS[:4], ids=name)
def test_no_kernel_for_few_tokens_spills(spec: QuantSpec) -> None:
    w = weights(spec, (16, 8192))
    for rows, dtype in ((1, "float32"), (5, "float32"), (1, "bfloat16"), (16, "bfloat16")):
        check_compiles(w4a16_sm90_resident.source(w, rows, dtype, dtype), "sm_90a")


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
        if not w4a16_sm90_resident.supports(w, m * (3 if dtype == "float32" else 1)):
            assert k // tile_extent(w.spec, w.shape)[1] % 4
            continue
        check(activations((m, k), dtype), w, ("float32", "bfloat16")[m % 2], xp)


def test_every_cut_of_few_tokens(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound, the same bits each time, counters left at zero."""
    x, w = activations((3, 1664), "bfloat16"), weights(QuantSpec("mxfp4"), (150, 1664))
    schedules = [one for _, one in partition.resident_schedules(150, 1664, 3, 32)]
    assert {(schedule.slices, schedule.split) for schedule in schedules} == {
        (1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1)
    }  # fmt: skip
    for schedule in schedules:
        monkeypatch.setattr(partition, "resident_schedule", lambda *shape, one=schedule: one)
        first = check(x, w, "float32", xp)
        np.testing.assert_array_equal(check(x, w, "float32", xp), first)


@pytest.mark.parametrize("slices", [1, 2])
def test_every_warp_has_tiles(xp: Any, monkeypatch: pytest.MonkeyPatch, slices: int) -> None:
    """Little of x, too, which then is not all threads' to load."""
    for m, k in ((1, 1024), (1, 2048), (2, 1024)):
        x, w = activations((m, k), "bfloat16"), weights(QuantSpec("mxfp4"), (16 * 17, k))
        slice_length = k // slices
        schedule = next(
            c for _, c in partition.resident_schedules(272, slice_length, m, 32) if c.split == 1
        )
        schedule = replace(
            schedule,
            slices=slices,
            slice_length=slice_length,
            groups=1,
            shared=driver.SHARED_BYTES // 2,
        )
        monkeypatch.setattr(partition, "resident_schedule", lambda *shape, one=schedule: one)
        check(x, w, "float32", xp)


@pytest.mark.parametrize(
    ("tokens", "shape", "slices", "split"),
    [
        (4, (6144, 4096), 1, 8),
        (4, (4096, 4096), 1, 4),
        (4, (4096, 14336), 4, 1),
        (16, (6144, 4096), 4, 1),
        (16, (4096, 4096), 4, 1),
        (16, (4096, 14336), 4, 1),
        (16, (128256, 4096), 2, 1),
    ],
)
def test_cuts_that_were_measured(
    tokens: int, shape: tuple[int, int], slices: int, split: int
) -> None:
    """The fastest on an H100, or within two hundredths of it."""
    schedule = partition.resident_schedule(*shape, tokens, 32)
    assert (schedule.slices, schedule.split) == (slices, split)


@pytest.mark.parametrize(("rows", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (1, "float32")])
def test_few_rows_of_weights(xp: Any, rows: int, dtype: str) -> None:
    """As for a projection of keys: K in many slices, whose blocks have tiles for every warp."""
    w = weights(QuantSpec("mxfp4"), (800, 8192))
    assert partition.resident_schedule(800, 8192, 3, 32).slice_length == 512
    check(activations((rows, 8192), dtype), w, "float32", xp)


@pytest.mark.parametrize("tokens", [1, 5])
def test_matrices_below_each_other_are_one_launch(xp: Any, tokens: int) -> None:
    """The columns of a product with one matrix of all their rows."""
    spec = QuantSpec("mxfp4")
    whole = weights(spec, (160, 1024))
    x = xp.asarray(activations((tokens, 1024), "bfloat16"))
    for rows in ((96, 32, 32), (64, 96)):
        ends = np.cumsum(rows)
        parts = []
        for n, e in zip(rows, ends, strict=True):
            codes, scales = (part[e - n : e] for part in (whole.codes, whole.scales))
            parts.append(sent(replace(whole, codes=codes, scales=scales, shape=(n, 1024)), xp))
        expected = weight_only.weight_only_matmul(x, sent(whole, xp), "bfloat16", xp).out.get()
        made = weight_only.weight_only_matmuls(x, parts, "bfloat16", xp)
        assert made, made
        for n, e, part in zip(rows, ends, made, strict=True):
            want = expected[:, e - n : e].view(np.uint16)
            np.testing.assert_array_equal(part.get().view(np.uint16), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "n", "limit"), [(1, 48, None), (5, 48, 2.0), (3, 2176, 0.5)])
def test_a_gate_and_what_it_multiplies_are_one_launch(
    xp: Any, tokens: int, n: int, limit: float | None, dtype: str
) -> None:
    """What two products give, rounded, and then SwiGLU; with slices of K, too."""
    x = xp.asarray(activations((tokens, 1024), "bfloat16"))
    whole = weights(QuantSpec("mxfp4"), (2 * n, 1024))
    halves = [slice(0, n), slice(n, None)]
    pair = [
        sent(replace(whole, codes=whole.codes[h], scales=whole.scales[h], shape=(n, 1024)), xp)
        for h in halves
    ]
    sides = [weight_only.weight_only_matmul(x, w, dtype, xp).out.get() for w in pair]
    expected = GenericBackend.gated_silu(registry.get("cpu"), *map(np.asarray, sides), 1.5, limit)
    method = routed("weight_only_gated", ROUTES["weight_only_gated"])
    assert weight_only.weight_only_gated(x, pair, dtype, (1.5, limit), xp)
    made = method(SimpleNamespace(xp=xp), x, pair, dtype, 1.5, limit)
    got = np.asarray(made.get()).astype(np.float64)
    off, (a, b) = np.abs(got - expected.astype(np.float64)), [np.abs(np.asarray(s)) for s in sides]
    size = (a.astype(np.float64) + 1) * (b.astype(np.float64) + 1)  # sums differ in their order
    assert (off <= (2.0**-7 if dtype == "bfloat16" else 2.0**-20) * size).all()
