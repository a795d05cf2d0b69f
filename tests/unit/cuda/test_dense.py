"""Linear layers of bfloat16 on a GPU: one product on the tensor cores, or float32 sums."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor_cuda.matmul.dense import dense_product

HALF = ml_dtypes.bfloat16


def case(m: int, n: int, k: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(m)
    return tuple(rng.standard_normal(shape).astype(HALF) for shape in ((m, k), (n, k), (n,)))


def check(got: Any, x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> None:
    """Half a unit of bfloat16 of the exact value, and what float32 sums lose."""
    x, w, bias = (a.astype(np.float64) for a in (x, w, bias))
    expected, size = x @ w.T + bias, np.abs(x) @ np.abs(w).T + np.abs(bias)
    bound = np.abs(expected) * 2.0**-8 + x.shape[1] * 2.0**-22 * size
    assert (np.abs(got.astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1000, 512), (40, 130, 264), (300, 72, 1024)])
def test_a_layer_of_bfloat16_rounds_float32_sums_once(gpu: Any, m: int, n: int, k: int) -> None:
    x, w, bias = case(m, n, k)
    there = [et.from_numpy(a).to("cuda") for a in (x, w, bias)]
    out = et.linear(*there)
    assert out.dtype.name == "bfloat16"
    check(out.numpy(), x, w, bias)


def test_a_hopper_gpu_multiplies_bfloat16_as_it_lies(hopper_gpu: Any) -> None:
    x, w, _ = case(3, 130, 264)
    there = [hopper_gpu.xp.asarray(a) for a in (x, w)]
    made = dense_product(there[0], there[1].T, None, hopper_gpu.xp)
    assert made is not None and made.dtype == HALF
    check(made.get(), x, w, np.zeros(130))
    refused = dense_product(there[0], there[1][:, :33].T[:33], None, hopper_gpu.xp)
    assert not refused and "16 bytes" in refused.reason


def test_gradients_of_a_layer_of_bfloat16(gpu: Any) -> None:
    x, w, bias = case(40, 72, 264)
    tensors = {}
    for device in ("cpu", "cuda"):
        tensors[device] = [et.from_numpy(a.astype(np.float32)) for a in (x, w, bias)]
        given = [t.to("bfloat16").to(device).detach() for t in tensors[device]]
        for one in given:
            one.requires_grad = True
        et.linear(*given).to("float32").sum().backward()
        tensors[device] = [one.grad.to("float32").to("cpu").numpy() for one in given]
    for one, two in zip(*tensors.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=2.0**-7, atol=1e-2)
