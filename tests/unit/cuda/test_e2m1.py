"""Pairs of bfloat16 to e2m1: every value under every scale of a few, counted and not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.quantize import quantize as kernels
from tests.oracle.compare import same_bytes
from tests.unit.cuda.places import PLACES, place


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, (), hopper=False, quantizing=(kernels,))


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("axis", [1, 0])
def test_every_bfloat16(xp: Any, axis: int, stats: bool) -> None:
    """In blocks of neighbours, beside a largest that is up to 2**9 as large, and beside NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 32)
    near, apart = bits.copy(), bits.copy()
    apart[:, 7] = np.minimum((apart[:, 7] & 0x7FFF) + (np.arange(2048) % 9 << 7), 0x7F7F)
    poisoned = 0x3F00 + (bits % 0x300)  # 0.5 to 2**5; NaN in a third of the blocks, in every half
    poisoned[::3, 3] = 0x7FC0
    x = np.concatenate([near, apart, poisoned]).astype(np.uint16).view(ml_dtypes.bfloat16)
    x = x.reshape(-1, 256) if axis else x.reshape(-1, 256, 32).swapaxes(1, 2).reshape(-1, 256)
    x = np.ascontiguousarray(x)
    for rule in ("floor", "one", "rceil"):
        spec = QuantSpec("mxfp4", axis=axis, scale_rule=rule).resolve(2)
        plan = kernels.plan_of(spec, x.shape)
        assert isinstance(plan, kernels.Plan)
        done = kernels.quantize_raw(xp.asarray(x), plan, None, xp, stats=stats)
        expected, counts = reference.quantize(x, spec)
        assert done.q is not None
        for name in ("codes", "scales"):
            same_bytes(name, done.q.parts[name].get(), expected.parts[name], f"{rule}, axis {axis}")
        if stats:
            assert done.stats(plan.count)() == counts


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("axis", [1, 0])
@pytest.mark.parametrize("dialect", ["ocp", "nvidia", "torchao"])
def test_infinities(xp: Any, dialect: str, axis: int, stats: bool) -> None:
    """A block of NaN, or one that saturates, as the dialect says; beside values of every size."""
    x = np.exp2(np.arange(-128, 128, dtype=np.float32)).reshape(8, 32).repeat(8, axis=0)
    x[::3, 5], x[1::3, 20] = np.inf, -np.inf
    x = np.ascontiguousarray(x.reshape(-1, 128) if axis else x.reshape(-1, 128).T)
    spec = QuantSpec("mxfp4", axis=axis, dialect=dialect).resolve(2)
    plan = kernels.plan_of(spec, x.shape)
    assert isinstance(plan, kernels.Plan)
    expected, counts = reference.quantize(x.astype(ml_dtypes.bfloat16), spec)
    done = kernels.quantize_raw(
        xp.asarray(x.astype(ml_dtypes.bfloat16)), plan, None, xp, stats=stats
    )
    assert done.q is not None and (counts.saturated > 0 or dialect != "nvidia")
    for name in ("codes", "scales"):
        same_bytes(name, done.q.parts[name].get(), expected.parts[name], f"{dialect}, axis {axis}")
    if stats:
        assert done.stats(plan.count)() == counts
