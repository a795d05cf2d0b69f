"""The operators are what torch's compiler expects of a custom operator."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import extensor as et
from extensor.quant.recipe import Gemm, LayerRecipe

torch = pytest.importorskip("torch")
importlib.import_module("torch._dynamo.testing")
importlib.import_module("torch.utils.checkpoint")
ext = pytest.importorskip("extensor.torch")

from torch import nn  # noqa: E402

OPERATORS = torch.ops.extensor
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code


def arguments(layer: Any, x: Any, *window: Any) -> tuple[Any, ...]:
    clock = layer.quant_clock
    number = layer.quant_layer.number
    return x, layer.weight, layer.bias, clock, number, torch.float32, True, 0, *window


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_nvidia", "mxfp8_rebased"])
def test_operators_pass_opcheck(recipe: str) -> None:
    torch.manual_seed(0)
    layer = ext.Linear(32, 48, recipe=recipe)
    x = torch.randn(4, 32, requires_grad=True)
    torch.library.opcheck(OPERATORS.linear, arguments(layer, x))
    conv = ext.Conv2d(4, 6, 3, recipe=recipe)
    image = torch.randn(2, 4, 8, 8, requires_grad=True)
    window = (1, 1), (1, 1), (1, 1), 1
    torch.library.opcheck(OPERATORS.conv2d, arguments(conv, image, *window))
    needs = [True, False, True]
    g = torch.randn(4, 48)
    number = layer.quant_layer.number
    tail = ([], layer.quant_clock, number, torch.float32, True, 0, needs)
    torch.library.opcheck(OPERATORS.linear_backward, (g, x.detach(), layer.weight.detach(), *tail))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x: Any) -> Any:
        x = self.conv(x).flatten(2)
        return x + self.down(torch.relu(self.up(x)))


def run(model: Any, function: Any, batches: list[Any]) -> list[Any]:
    """Losses, gradients and clocks of training steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for x in batches:
        optimizer.zero_grad()
        loss = function(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*found, *(b.clone() for b in model.buffers())]


def block(recipe: str = "mxfp4_all") -> Any:
    torch.manual_seed(0)
    return ext.quantize_(Block(), recipe, seed=1)


def test_compiled_steps_have_the_bits_of_eager_ones() -> None:
    """One graph, also for batches of other sizes, which compile once more at most."""
    torch._dynamo.reset()
    batches = [torch.randn(n, 4, 8, 8) for n in (2, 2, 3, 5, 6)]
    model, other = block(), block()
    count = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    eager = run(model, model, batches)
    compiled = run(other, torch.compile(other, fullgraph=True, backend=count), batches)
    assert count.frame_count <= 2
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_exported_programs_hold_the_operator() -> None:
    model = ext.quantize_(nn.Sequential(nn.Linear(32, 32)), "mxfp8")
    x = torch.randn(4, 32)
    exported = torch.export.export(model, (x,))
    assert "extensor.linear" in str(exported.graph)
    assert torch.equal(exported.module()(x), model(x))


STOCHASTIC = et.QuantSpec("mxfp4", rounding="stochastic")
STOCHASTIC_EVERYWHERE = replace(
    et.RECIPES["mxfp4_all"], name="random", layers=LayerRecipe(*[Gemm(STOCHASTIC, STOCHASTIC)] * 3)
)
"""Stochastic rounding in all three products; the recipes round the forward pass to nearest."""


class Checkpointed(nn.Module):
    """One layer in two regions of torch.utils.checkpoint."""

    def __init__(self, *contexts: dict[str, Any] | None) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.contexts = contexts

    def forward(self, x: Any) -> Any:
        region = torch.utils.checkpoint.checkpoint
        for how in self.contexts:
            called = self.linear if how is None else partial(region, self.layer, **how)
            x = x + torch.relu(called(x))
        return x

    def layer(self, x: Any) -> Any:
        return self.linear(x)


FREE: dict[str, Any] = {"use_reentrant": False}
KEPT = {**FREE, "context_fn": ext.checkpoint_contexts}


def checkpointed(recipe: Any, *contexts: dict[str, Any] | None) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return ext.quantize_(Checkpointed(*contexts), recipe, rules={"*": STOCHASTIC_EVERYWHERE.layers})


@pytest.mark.parametrize("compiled", ["the model", "the region"])
def test_a_compiled_checkpoint_changes_no_bit(compiled: str) -> None:
    """Its second run draws the bits of the first."""
    if torch.cuda.is_available():
        torch.cuda.init()  # the compiler does so, which torch refuses within a region
    batches = [torch.randn(8, 32, requires_grad=True) for _ in range(2)]
    plain = checkpointed(STOCHASTIC_EVERYWHERE, None, None)
    expected = run(plain, plain, batches)
    how = KEPT if compiled == "the model" else FREE
    model = checkpointed(STOCHASTIC_EVERYWHERE, how, how)
    if compiled == "the model":
        found = run(model, torch.compile(model, fullgraph=True, backend="aot_eager"), batches)
    else:
        model.layer = torch.compile(model.layer, backend="aot_eager")
        found = run(model, model, batches)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("contexts", [(FREE,), (KEPT, FREE)])
def test_a_compiled_checkpoint_that_keeps_no_readings_is_refused(contexts: Any) -> None:
    compiled = torch.compile(checkpointed(STOCHASTIC_EVERYWHERE, *contexts), backend="aot_eager")
    with pytest.raises(Exception, match="context_fn=extensor.torch.checkpoint_contexts"):
        compiled(torch.randn(8, 32))


def test_a_compiled_checkpoint_without_random_bits_needs_nothing() -> None:
    torch._dynamo.reset()
    model = ext.quantize_(Checkpointed(FREE), "mxfp4_nearest", rules={"*": "mxfp4_nearest"})
    torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(8, 32)).sum().backward()
