"""The operators are what torch's compiler expects of a custom operator."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

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


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


def test_a_compiled_checkpoint_with_random_bits_is_refused() -> None:
    """Its second run would read a clock that has advanced."""
    x = torch.randn(8, 32)
    for recipe, refused in (("mxfp4_nearest", False), ("mxfp4_all", True)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ext.quantize_(Checkpointed(), recipe, rules={"*": recipe})
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        if refused:
            with pytest.raises(Exception, match="leave out torch.compile or"):
                compiled(x)
        else:
            compiled(x).sum().backward()
