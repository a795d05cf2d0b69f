"""Which kernels the products of `et` reach on CUDA: emulated, as device "cuda", and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.autograd.tensor import wrap
from extensor.backends import registry
from extensor.quant import reference, views
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.prepare import cast_bf16
from extensor_cuda.kernels.prepare import expand as expand_kernel
from extensor_cuda.kernels.weight_only import (
    w4a16_sm90_resident,
    w4w8a16_sm80,
    w4w8a16_sm90_wgmma,
)
from extensor_cuda.matmul import grouped, weight_only
from extensor_cuda.matmul.grouped import grouped_gap, grouped_matmul
from extensor_cuda.matmul.product import Product
from extensor_cuda.matmul.stored import stored_gap
from extensor_cuda.matmul.weight_only import DECODED, EXPANDED
from extensor_cuda.runtime import counters
from tests.kernels.matmul_cases import exact
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.weight_only_cases import sent

K = 192


@pytest.fixture(params=PLACES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend, as device "cuda"; nothing but a product of its own may decode."""
    counters._zeros.cache_clear()
    xp = place(
        request,
        monkeypatch,
        [w4w8a16_sm80, w4a16_sm90_resident, cast_bf16, expand_kernel],
        products=[w4w8a16_sm90_wgmma],
    )
    if request.param == "on a GPU":
        made = registry.get("cuda")
    else:
        made, usual = CudaBackend(xp), registry._made
        monkeypatch.setattr(registry, "_made", lambda d: made if d == "cuda" else usual(d))

    def refuse(*args: Any) -> None:
        raise AssertionError("an operand was dequantized")

    monkeypatch.setattr(CudaBackend, "dequantize", refuse)
    return made


def stored(spec: QuantSpec, *shape: int) -> QuantArray:
    x = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    return reference.quantize(x, spec.resolve(len(shape)))[0]


def check(got: Any, a: np.ndarray, b: np.ndarray, unit: float) -> None:
    expected, size = a @ b.swapaxes(-1, -2), np.abs(a) @ np.abs(b).swapaxes(-1, -2)
    assert got.dtype == np.float32 and got.shape == expected.shape
    assert (np.abs(got.get().astype(np.float64) - expected) <= unit * size + 2.0**-126).all()


BF16 = K * 2.0**-22 + 64 * 2.0**-24 + 2.0**-20
FP8 = K * 34 / 32 * 2.0**-13 + 2.0**-20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lead", [(3,), (2, 40), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "int8"])
def test_activations_reach_the_kernels_in_their_own_dtype(
    backend: Any, dtype: str, lead: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(x: Any, *rest: Any) -> Any:
        seen.append((x.dtype.name, x.shape))
        return gap_of(x, *rest)

    gap_of = weight_only.few_tokens_gap
    monkeypatch.setattr(weight_only, "few_tokens_gap", spy)
    values = np.random.default_rng(0).standard_normal((*lead, K)).astype(np.float32)
    rows = int(np.prod(lead))
    w = stored(QuantSpec(name), 33, K)
    x = et.from_numpy(values).to(dtype).to("cuda")
    on_gpu = sent(w, backend.xp)
    weight = wrap(on_gpu, backend)
    y = et.linear(x, weight)
    expected = DECODED if rows <= 21 or (dtype == "bfloat16" and rows <= 64) else None
    assert seen == [(dtype, (rows, K))]
    path = backend.path("weight_only_matmul", x.data.reshape(rows, K), on_gpu)
    assert path == (expected or EXPANDED)
    check(y.data, x.to("cpu").to("float64").numpy(), exact(w), BF16)


BATCHES = (
    ("mxfp4", None, "FP8 tensor cores"),
    ("mxfp8_e4m3", None, "bf16 tensor cores: FP8 does not hold mxfp8_e4m3"),
    ("nvfp4", None, "bf16 tensor cores: FP8 does not hold nvfp4"),
    ("fp8_e4m3", "tensor", "FP8 tensor cores"),
    ("fp8_e4m3", "channel", "FP8 tensor cores"),
    ("int8", "channel", "int8 tensor cores"),
)


def pair(name: str, tile: Any, *shapes: tuple[int, ...]) -> list[QuantArray]:
    return [stored(QuantSpec(name, tile=tile), *shape) for shape in shapes]


def decoded(q: QuantArray) -> np.ndarray:
    return np.asarray(reference.dequantize(q)).astype(np.float64)


@pytest.mark.parametrize("lead", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize(("name", "tile", "expected"), BATCHES, ids=str)
def test_a_batch_is_one_launch(
    backend: Any,
    name: str,
    tile: Any,
    expected: str,
    lead: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped, "multiply_stored", None)  # one after the other
    a, b = pair(name, tile, (*lead, 20, K), (*lead, 33, K))
    left, right = (wrap(sent(q, backend.xp), backend) for q in (a, b))
    y = left @ right.swapaxes(-1, -2)
    flat = [views.reshape(sent(q, backend.xp), (int(np.prod(lead)), *q.shape[-2:])) for q in (a, b)]
    assert backend.path("block_scaled_matmul", *flat) == expected
    check(y.data, decoded(a), decoded(b), FP8 if expected.startswith("FP8") else BF16)


@pytest.mark.parametrize(
    ("name", "tile", "why"),
    [
        ("mxfp4", (16, 32), "tiles (16, 32) that do not divide the rows of each matrix"),
        ("fp8_e4m3", (1, 64), "one scale along K"),
        ("int4", (1, 32), "int4 under float scales"),
    ],
    ids=["tiles", "groups", "int4"],
)
def test_what_is_no_single_launch_is_one_product_after_the_other(
    backend: Any, name: str, tile: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair(name, tile, (3, 20, K), (3, 33, K))
    left, right = (sent(q, backend.xp) for q in (a, b))
    seen = []

    def host(q: QuantArray) -> np.ndarray:
        return decoded(replace(q, **{name: part.get() for name, part in q.parts.items()}))

    def each(one: QuantArray, other: QuantArray, *rest: Any) -> Product:
        seen.append((one.shape, other.shape))
        out = backend.xp.asarray((host(one) @ host(other).T).astype(np.float32))
        return Product(out, "")

    path = backend.path("block_scaled_matmul", left, right)
    assert path.startswith("one after the other: ") and why in path
    monkeypatch.setattr(grouped, "multiply_stored", each)
    monkeypatch.setattr(grouped, "stored_gap", lambda *given: None)
    got = backend.block_scaled_matmul(left, right)
    assert seen == [((20, K), (33, K))] * 3
    check(got, decoded(a), decoded(b), BF16)


def test_reasons_do_not_raise() -> None:
    a, b = pair("int8", None, (6, K), (6, K))
    assert grouped_gap(a, b, "90") is None
    zeros = stored(QuantSpec("int8", symmetric=False), 6, K)
    assert "zero points" in str(grouped_gap(a, zeros, "90"))
    assert "compute capability 80" in str(grouped_gap(a, b, "80"))
    groups = stored(QuantSpec("fp8_e4m3", tile=(1, 128)), 6, 2 * K)
    assert "one scale along K" in str(grouped_gap(groups, groups, "90"))


def test_tensors_are_refused_with_what_to_pass() -> None:
    q = et.ones((4, 64)).to_mxfp4()
    calls = (
        lambda: stored_gap(q, q, "90"),
        lambda: stored_gap(q.data, q, "90"),
        lambda: grouped_matmul(q, q, np.zeros(2, np.int32), np),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"got an ExTensor of mxfp4; pass q\.data"):
            call()
