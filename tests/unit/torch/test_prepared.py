"""On a GPU: passes that are launched as a list have the bits, counts and memory of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from extensor.backends import registry

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

from torch import nn  # noqa: E402

from extensor_cuda.matmul import tuned  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and registry.available("cuda")),
    reason="needs an NVIDIA GPU, torch with CUDA, and the extra cuda13",
)
RECIPES = ("mxfp4", "mxfp4_all", "mxfp8_rebased", "mxfp8", "nvfp4_nvidia", "mxfp4_tseng")
PREPARED = ("mxfp4_all", "mxfp8_rebased")
"""Recipes whose passes launch this project's kernels alone."""


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    """Kernels at every size, as large layers have them."""
    with tuned.always():
        yield


def prepared(layer: Any) -> list[Any]:
    from extensor.torch.prepared import PreparedPass

    return [p for p in layer.quant_layer.prepared.values() if isinstance(p, PreparedPass)]


def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    from extensor.torch import prepared

    monkeypatch.setattr(prepared, "_KINDS", 0)


def steps(
    recipe: str, bias: bool, dtype: Any, rows: tuple[int, ...], wide: int = -1
) -> tuple[list[Any], dict[Any, Any], Any]:
    """Results, gradients and weights of training steps, what was counted, and the layer."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 320, bias=bias, device="cuda", dtype=dtype)
    layer = ext.quantize_(layer, recipe, seed=1, rules={"*": recipe})
    optimizer, found = torch.optim.SGD(layer.parameters(), 0.1), []
    for step, count in enumerate(rows):
        x = torch.randn(2, count // 2, 256, device="cuda", dtype=dtype)
        if step == wide:  # E5M2 does not hold it: the product falls back
            x *= 2.0 ** torch.linspace(-60, 30, 256, device="cuda")
        x.requires_grad_()
        optimizer.zero_grad()
        out = layer(x)
        out.backward(torch.randn_like(out))
        optimizer.step()
        found += [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        found += [p.detach().clone() for p in layer.parameters()]
    return found, ext.telemetry(layer), layer


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_and_counts_are_those_of_passes_that_are_not_prepared(
    recipe: str, bias: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (256, 256, 256, 128, 128, 128, 256)
    found, counts, layer = steps(recipe, bias, dtype, rows, wide=4)
    reasons = [p for p in layer.quant_layer.prepared.values() if isinstance(p, str)]
    if recipe in PREPARED:
        assert len(prepared(layer)) == 4, reasons
    unprepared(monkeypatch)
    expected, its_counts, other = steps(recipe, bias, dtype, rows, wide=4)
    assert not prepared(other)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert counts == its_counts


@pytest.mark.parametrize("recipe", PREPARED)
def test_a_weights_operands_are_kept_until_it_is_written(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[list[Any], Any, Any]:
        torch.manual_seed(0)
        layer = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
        layer, found = ext.quantize_(layer, recipe, seed=1, rules={"*": recipe}), []
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for step in range(12):
            x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            out = layer(x)
            out.backward(torch.ones_like(out))
            found += [out.detach(), x.grad]
            if step % 3 == 2:
                found.append(layer.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
            if step == 7:
                with torch.no_grad():
                    layer.weight.mul_(2)
        return found, ext.telemetry(layer), layer

    found, counts, layer = run()
    assert len(prepared(layer)) == 2
    assert counts["", "fprop.w"].count == (1 + 5) * 256 * 256  # passes 0, 1, 3, 6, 8 and 9
    unprepared(monkeypatch)
    expected, its_counts, _ = run()
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    for slot in counts:
        assert slot[1].endswith(".w") or counts[slot] == its_counts[slot]


@pytest.mark.parametrize("recipe", PREPARED)
def test_no_memory_stays_and_streams_and_threads_may_change(recipe: str) -> None:
    layer = ext.quantize_(nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16), recipe)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn_like(x)

    def call() -> Any:
        layer.zero_grad()
        out = layer(x)
        out.backward(g)
        return out.detach()

    for _ in range(3):
        expected = call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        call()
    assert torch.cuda.memory_allocated() == before
    found: list[Any] = []

    def elsewhere() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            found.append(call())
        stream.synchronize()

    threads = [threading.Thread(target=elsewhere) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    stochastic = layer.quant_clock is not None
    assert len(found) == 2
    if not stochastic:
        assert all(torch.equal(one, expected) for one in found)


@pytest.mark.filterwarnings("error:extensor.torch. a graph is captured")
def test_counters_are_left_for_a_capture_after_passes_are_prepared() -> None:
    layers = [nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    model = ext.quantize_(nn.Sequential(*layers), "mxfp4_all", rules={"*": "mxfp4_all"})
    for rows in (128, 256, 384):  # lists take counters for each
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            model(x).sum().backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).sum().backward()
        ext.reset_telemetry(model)
        graph.replay()
        graph.replay()
        assert ext.telemetry(model)["1", "fprop.x"].count == 2 * rows * 256


def test_what_a_list_does_not_read_runs_as_it_is() -> None:
    layer = ext.quantize_(nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16), "mxfp4_all")
    whole = torch.randn(256, 257, device="cuda", dtype=torch.bfloat16)
    x = whole[:, :256]  # strided
    for _ in range(4):
        layer(x)
    assert not prepared(layer)
    with torch.no_grad():
        for _ in range(4):
            layer(x.contiguous())
    assert len(prepared(layer)) == 1
    graph = torch.cuda.CUDAGraph()
    static = x.contiguous()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(static)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(out, layer(static))
