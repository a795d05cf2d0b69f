"""Transforms and traces of torch give a layer's own results, or say that they cannot."""

from __future__ import annotations

import io
import itertools
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

from torch.autograd import forward_ad  # noqa: E402

from extensor.torch import handles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch calls some of them deprecated


def layers() -> list[tuple[Any, Any]]:
    """Layers and inputs of theirs."""
    torch.manual_seed(0)
    conv = ext.Conv2d(4, 8, 3, recipe="mxfp4_nearest")
    linear = ext.Linear(32, 48, recipe="mxfp4_nearest")
    return [(linear, torch.randn(8, 32)), (conv, torch.randn(2, 4, 9, 9))]


def test_tangents_are_refused_and_not_zero() -> None:
    for layer, x in layers():
        with pytest.raises(RuntimeError, match=r"torch\.func's jvp is not supported.*backward\(\)"):
            torch.func.jvp(layer, (x,), (x,))
        for mode in (torch.no_grad, torch.enable_grad):
            with mode(), forward_ad.dual_level():
                with pytest.raises(RuntimeError, match="forward-mode differentiation is not"):
                    layer(forward_ad.make_dual(x, x))
                assert torch.equal(layer(x), layer(x.clone()))  # without tangents


@pytest.mark.parametrize("recipe", ["mxfp4_nearest", "mxfp4_all"])
def test_transforms_of_functions_say_that_they_are_not_supported(recipe: str) -> None:
    layer, x = ext.Linear(32, 48, recipe=recipe), torch.randn(8, 32)
    weights = dict(layer.named_parameters())

    def loss(weights: Any) -> Any:
        return torch.func.functional_call(layer, weights, (x,)).sum()

    for named, call in (
        ("grad", lambda: torch.func.grad(loss)(weights)),
        ("vmap", lambda: torch.func.vmap(layer)(x[None])),
        ("grad", lambda: torch.func.jacrev(layer)(x)),
    ):
        with pytest.raises(RuntimeError, match=rf"torch\.func's {named} is not supported"):
            call()


def test_gradients_in_batches_say_that_they_are_not_supported() -> None:
    match = "_backward: gradient: expected a tensor with memory of its own.*is_grads_batched"
    for layer, x in layers():
        y = layer(x.requires_grad_())
        with pytest.raises(RuntimeError, match=match):
            torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="to_blocked: expected a tensor with memory of its own"):
        torch.func.vmap(lambda t: ext.to_blocked(t, "mxfp4").codes)(torch.ones(2, 4, 32))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_trace_computes_and_keeps_no_constant(recorded: bool) -> None:
    for layer, x in layers():
        with torch.set_grad_enabled(recorded):
            traced = torch.jit.trace(layer, x, check_trace=False)
        assert torch.equal(traced(-2 * x), layer(-2 * x))


def test_a_graph_of_fx_has_quantized_layers_as_torch_s_own() -> None:
    for layer, x in layers():
        model = torch.nn.Sequential(layer, torch.nn.ReLU())
        graph = torch.fx.symbolic_trace(model)
        assert [node.op for node in graph.graph.nodes][1:-1] == ["call_module"] * 2
        assert torch.equal(graph(x), model(x))
        with pytest.raises(RuntimeError, match=r"as torch\.nn\.Sequential\(layer\)"):
            torch.fx.symbolic_trace(layer)


def test_scripting_says_what_works_instead() -> None:
    for layer, _ in layers():
        for model in (layer, torch.nn.Sequential(layer)):
            with pytest.raises(RuntimeError, match=r"cannot hold a recipe; use torch\.compile"):
                torch.jit.script(model)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_layers_without_features_compute_as_torch_s(sizes: tuple[int, int]) -> None:
    layer, like = ext.Linear(*sizes, recipe="mxfp4_all"), torch.nn.Linear(*sizes)
    like.load_state_dict(layer.state_dict(), strict=False)
    found = []
    for module in (layer, like):
        x = torch.ones(2, 4, sizes[0], requires_grad=True)
        y = module(x)
        y.sum().backward()
        found.append((y, x.grad, module.weight.grad, module.bias.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_an_exported_program_finds_its_layer_in_another_process_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never a layer of another recipe that is the first there, too."""

    def process(recipe: str) -> Any:
        monkeypatch.setattr(handles, "_numbers", itertools.count(2))
        monkeypatch.setattr(handles, "_LAYERS", weakref.WeakValueDictionary())
        torch.manual_seed(0)
        return ext.Linear(32, 48, recipe=recipe)

    layer, x, file = process("mxfp8"), torch.randn(4, 32), io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    expected = layer(x)
    program = torch.export.load(file).module()
    other = process("mxfp4_nearest")
    assert other.quant_layer.number != layer.quant_layer.number
    with pytest.raises(RuntimeError, match="exported or traced in another process"):
        program(x)
    again = process("mxfp8")
    assert torch.equal(program(x), expected) and torch.equal(again(x), expected)
