"""Experts that run together on a GPU, emulated and real, against one after the other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor.autograd.tensor import wrap
from extensor.backends import registry
from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import GatedExperts
from extensor.models.llama.configs import ExpertsConfig
from extensor.models.llama.model import mixture
from extensor.nn import linear
from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.experts import rows
from extensor_cuda.kernels.nn import topk as best
from extensor_cuda.kernels.prepare import expand as expanding
from extensor_cuda.matmul import experts as module
from tests.unit.cuda.bounds import sent
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

HALF = ml_dtypes.bfloat16


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, [rows, best, expanding])


@pytest.mark.usefixtures("nvrtc")
def test_no_kernel_spills() -> None:
    for source in (
        rows.route_source(256),
        rows.rows_source(True, 1),
        rows.rows_source(False, 0),
        best.source(1, 1024),
    ):
        check_compiles(source, "sm_90a")


@pytest.mark.parametrize(("experts", "count"), [(1, 5), (6, 3000), (32, 64), (256, 2500)])
def test_choices_are_sorted_stably(xp: Any, experts: int, count: int) -> None:
    """As numpy sorts them; experts that none chose, too."""
    chosen = np.random.default_rng(count).integers(0, max(experts - 2, 1), (count, 1))
    made = rows.route(xp.asarray(chosen), experts, xp)
    offsets, source, places = (np.asarray(a.get()) for a in made)
    order = np.argsort(chosen.ravel(), kind="stable")
    np.testing.assert_array_equal(source, order)
    np.testing.assert_array_equal(places[order], np.arange(count))
    counts = np.bincount(chosen.ravel(), minlength=experts)
    np.testing.assert_array_equal(offsets, [0, *np.cumsum(counts)])


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 4), (33, 33), (1000, 7)])
def test_largest_values_are_those_of_a_stable_sort(xp: Any, n: int, k: int, dtype: Any) -> None:
    rng = np.random.default_rng(n)
    x = rng.integers(-9, 9, (3, 5, n)).astype(dtype)  # many are equal
    x[0, 0, 0], x[0, 1, n // 2], x[1, 0] = -0.0, np.nan, -np.inf
    expected = GenericBackend.topk(registry.get("cpu"), x, k)
    for got, want in zip(best.topk(xp.asarray(x), k, xp), expected, strict=True):
        np.testing.assert_array_equal(
            np.asarray(got.get()).astype(np.float64), want.astype(np.float64)
        )


def packed(shape: tuple[int, int], rng: np.random.Generator, spec: str = "mxfp4") -> Any:
    w = rng.standard_normal(shape).astype(np.float32)
    return reference.quantize(w, QuantSpec(spec, axis=1).resolve(2))[0]


def made(bias: bool, rng: np.random.Generator, n: int = 96, k: int = 64) -> GatedExperts:
    matrices = [[packed(shape, rng) for _ in range(5)] for shape in ((n, k), (n, k), (k, n))]
    biases = tuple([rng.standard_normal(w).astype(HALF) for _ in range(5)] for w in (n, n, k))
    return GatedExperts(*matrices, biases if bias else None, 1.702, 7.0 if bias else None)


def there(experts: GatedExperts, xp: Any) -> GatedExperts:
    layers = [[sent(w, xp) for w in layer] for layer in experts.layers]
    biases = experts.biases and tuple([xp.asarray(b) for b in each] for each in experts.biases)
    return GatedExperts(*layers, biases, experts.alpha, experts.limit)


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("bias", [False, True])
def test_they_give_what_each_gives(
    xp: Any, bias: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within three roundings to bfloat16 of each choice; expert 3 is not chosen."""
    rng = np.random.default_rng(4)
    experts, x = made(bias, rng), rng.standard_normal((150, 64)).astype(HALF)
    chosen = np.array([rng.permutation([0, 1, 2, 4])[:3] for _ in range(150)])
    weights = rng.uniform(0.1, 1, chosen.shape).astype(dtype)
    expected = GenericBackend.gated_experts(registry.get("cpu"), x, weights, chosen, experts)
    held = there(experts, xp)
    capture = SimpleNamespace(kept=(), keep=lambda *arrays: setattr(capture, "kept", arrays))
    monkeypatch.setattr(module, "current_capture", lambda: capture)
    for _ in range(2):  # the second time nothing is asked of the weights
        call = module.gated_experts(xp, *map(xp.asarray, (x, weights, chosen)), held)
        assert call, call
        got = np.asarray(call().get()).astype(np.float64)
    assert len(capture.kept) == (4 if bias else 2)  # tables of addresses, which a graph keeps
    size = np.abs(expected.astype(np.float64)).max()
    assert np.abs(got - expected.astype(np.float64)).max() <= 2.0**-6 * size
    off = np.linalg.norm(got - expected.astype(np.float64)) / np.linalg.norm(expected.astype(float))
    assert off < 2.0**-8


def test_sums_of_choices_have_the_generic_bits(xp: Any) -> None:
    rng = np.random.default_rng(0)
    y, weights = rng.standard_normal((21, 16)).astype(HALF), rng.random((7, 3)).astype(np.float32)
    places, chosen = rng.permutation(21).astype(np.int32), rng.integers(0, 2, (7, 3))
    total = np.zeros((7, 16), np.float32)
    for a in range(3):
        total += weights[:, a, None] * y[places.reshape(7, 3)[:, a]].astype(np.float32)
    got = rows.from_places(*map(xp.asarray, (y, places, chosen, weights)), None, xp)
    np.testing.assert_array_equal(np.asarray(got.get()), total)


def test_what_kernels_do_not_run_says_why(xp: Any) -> None:
    rng = np.random.default_rng(1)
    experts, x = made(True, rng), np.ones((4, 64), HALF)
    weights, chosen = np.ones((4, 1), np.float32), np.zeros((4, 1), np.int64)

    def reason(changed: GatedExperts, rows_of: Any = x) -> str:
        given = *map(xp.asarray, (rows_of, weights, chosen)), there(changed, xp)
        call = module.gated_experts(xp, *given)
        assert not call
        return call.reason

    assert "float32 activations" in reason(experts, x.astype(np.float32))
    wide = experts._replace(gates=[*experts.gates[:4], packed((104, 64), rng)])
    assert "several formats or shapes" in reason(wide)
    assert "nvfp4" in reason(experts._replace(gates=[packed((96, 64), rng, "nvfp4")] * 5))
    biases = tuple([b.astype(np.float32) for b in each] for each in experts.biases or ())
    assert "biases of another dtype" in reason(experts._replace(biases=biases))
    many = SimpleNamespace(shape=(1 << 25, 4), dtype=HALF, size=1 << 27)  # 32 bits count no more
    call = module.gated_experts(xp, SimpleNamespace(shape=(1 << 25, 128), dtype=HALF, size=1),
                                many, chosen, experts)  # fmt: skip
    assert not call and "choices of up to 128 values" in call.reason
    vast = packed((96, 64), rng)
    vast.scales[0, 0] = 254
    assert "does not hold" in reason(experts._replace(ups=[vast] * 5))


def test_experts_on_a_gpu_have_the_gradients_of_a_cpu(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the input and of what is tuned around packed experts, which run in three calls."""
    calls: list[int] = []
    together = linear.grouped_weight_only_linear

    def counted(*given: Any) -> Any:
        calls.append(len(given[1]))
        return together(*given)

    monkeypatch.setattr(linear, "grouped_weight_only_linear", counted)
    rng, config = np.random.default_rng(0), ExpertsConfig(4, 2, 64, bias=True)
    experts = et.quantize_model(mixture(32, config, rng), "mxfp4_weights")
    x, sign = (rng.standard_normal((80, 32)).astype(np.float32) for _ in range(2))

    def gradients(device: str) -> list[Any]:
        experts.to(device)
        experts.zero_grad()
        rows = et.ExTensor(x, device=device, requires_grad=True)
        (experts(rows) * et.ExTensor(sign, device=device)).sum().backward()
        tuned: list[Any] = [rows, *experts.parameters()]
        return [one.grad.to("cpu").numpy() for one in tuned]

    expected = gradients("cpu")
    assert not calls
    for got, wanted in zip(gradients("cuda"), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max())
    assert calls == [4, 4, 4]


def test_weights_that_are_written_in_place_are_asked_again(xp: Any) -> None:
    """Products keep what they found out about a matrix's values: here, that bfloat16 holds them."""
    experts = made(False, np.random.default_rng(1))
    x, weights, chosen = np.ones((4, 64), HALF), np.ones((4, 1), np.float32), np.zeros((4, 1), int)
    backend: Any = SimpleNamespace(xp=xp, capturing=None)
    up, good = wrap(sent(experts.ups[0], xp), backend), experts.ups[0]
    vast = replace(good, scales=np.full_like(good.scales, 254))
    held, codes = there(experts, xp), up.data.codes
    for values, expected in ((good, True), (vast, False), (good, True)):
        up.assign_(sent(values, xp))
        given = *map(xp.asarray, (x, weights, chosen)), held._replace(ups=[up.data] * 5)
        assert bool(module.gated_experts(xp, *given)) is expected
    assert up.data.codes is codes  # what a captured step reads
