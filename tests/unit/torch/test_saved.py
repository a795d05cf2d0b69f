"""What a GPU's forward pass saves for the backward pass, on a CPU backend that saves likewise."""

from __future__ import annotations

import copy
import importlib
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.backends import registry
from extensor.backends.generic.matmul import FloatPreparation

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")
importlib.import_module("torch.utils.checkpoint")

from torch import nn  # noqa: E402

from extensor.torch import operators, saved  # noqa: E402
from tests.unit.torch.test_compile import OPERATORS, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code
ROWS = 8
"""A smaller matrix is left to one operand after the other, as a GPU leaves small products."""


class Operand(np.ndarray):
    """Values with the one allocation that holds them."""

    buffer: Any


class Preparation(FloatPreparation):
    """Operands that are worth keeping."""

    made: list[tuple[int, ...]]

    @property
    def compact(self) -> bool:  # type: ignore[override]
        return len(self.x) >= ROWS

    def run(self) -> Any:
        found = []
        for spec, (values, counts) in zip(self.specs, super().run(), strict=True):
            if spec.axis == 0 and not isinstance(values, str):
                self.made.append(self.x.shape)
                values = np.ascontiguousarray(values).view(Operand)
                values.buffer = values.view(np.ndarray).reshape(-1).view(np.uint8)
            found.append((values, counts))
        return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The matrices whose columns were quantized, on a CPU that saves as a GPU does."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(Preparation, "made", found, raising=False)
    backend = registry.get("cpu")

    def prepare(self: Any, x: Any, specs: Any, streams: Any, *rest: Any) -> Any:
        return Preparation(self, x, specs, streams)

    def restored(buffer: Any, x: Any, spec: Any, stream: Any, xp: Any) -> Any:
        return buffer.view(np.float32).reshape(x.shape[1], -1)

    fake = types.SimpleNamespace(
        kind_of=lambda spec: 2 if spec.rebased else 1,
        REBASED=2,
        nbytes=lambda kind, rows, k: 4 * rows * k,
        restored=restored,
    )
    monkeypatch.setattr(type(backend), "prepare", prepare)
    monkeypatch.setattr(saved, "_fused", lambda: fake)
    saved._kind.cache_clear()
    usual = operators._saves

    def saves(x: Any, weight: Any) -> int:
        assert usual(x, weight) == 0  # nothing on the CPU
        grad = torch.is_grad_enabled()
        return grad and saved.INPUT * weight.requires_grad | saved.WEIGHT * x.requires_grad

    monkeypatch.setattr(operators, "_saves", saves)
    yield found
    saved._kind.cache_clear()


def network(recipe: str = "mxfp4_all", saved_input: Any = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return ext.quantize_(
        model, replace(et.RECIPES[recipe], saved_input=saved_input), seed=1, rules={"*": recipe}
    )


def batches(*rows: int) -> list[Any]:
    torch.manual_seed(1)
    return [torch.randn(n, 32) for n in rows]


def expected(monkeypatch: pytest.MonkeyPatch, xs: list[Any], recipe: str) -> list[Any]:
    """The same steps with nothing saved."""
    with monkeypatch.context() as patch:
        patch.setattr(operators, "_saves", lambda x, weight: 0)
        model = network(recipe)
        return run(model, model, xs)


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp8_rebased"])
@pytest.mark.parametrize("how", ["eager", "checkpoint", "compile", "copy"])
def test_saving_changes_no_bit(
    made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, how: str, recipe: str
) -> None:
    """Batches of several sizes, one of them too small to save anything."""
    xs = batches(16, 16, 24, 40, ROWS - 1)
    without = expected(monkeypatch, xs, recipe)
    model = network(recipe)
    function: Any = model
    if how == "compile":
        torch._dynamo.reset()
        count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        function = torch.compile(model, fullgraph=True, backend=count)
    elif how == "checkpoint":
        function = lambda x: torch.utils.checkpoint.checkpoint(  # noqa: E731
            model, x, use_reentrant=False
        )
    elif how == "copy":
        model = function = copy.deepcopy(model)
    made.clear()
    assert equal(without, run(model, function, xs))
    if how == "compile":
        assert count.frame_count <= 2


def test_a_recipe_that_saves_memory_promises_what_is_never_read(
    made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward pass makes no operand of the backward pass, and a compiled one knows that."""
    xs = batches(16, 16)
    without = expected(monkeypatch, xs, "mxfp4_all")
    torch._dynamo.reset()
    model = network(saved_input="packed")
    assert equal(without, run(model, torch.compile(model, backend="aot_eager"), xs))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_backward_pass_quantizes_neither_input_nor_weight(
    made: list[tuple[int, ...]], compiled: bool
) -> None:
    torch._dynamo.reset()
    model = network()
    function = torch.compile(model, backend="aot_eager") if compiled else model
    (x,) = batches(16)
    y = function(x.requires_grad_())
    forward = list(made)
    assert forward.count((16, 32)) == forward.count((16, 64)) == 1
    y.square().mean().backward()
    gradients = made[len(forward) :]
    of_weights = [(32, 64), (64, 32)] if compiled else []  # on a CPU compiled passes leave them
    assert sorted(gradients) == [(16, 32), (16, 64), *of_weights]  # of the two results


@pytest.mark.parametrize(("recipe", "kept"), [("mxfp4_all", True), ("mxfp8_rebased", False)])
def test_an_input_is_let_go_where_its_operand_serves(
    made: list[tuple[int, ...]], recipe: str, kept: bool
) -> None:
    """Backward then reads the operand alone; of a small matrix, which has none, the input."""
    layer = ext.Linear(32, 48, recipe=recipe)
    for rows, stays in ((16, kept), (ROWS - 1, True)):
        addresses: set[int] = set()

        def pack(t: Any, addresses: set[int] = addresses) -> Any:
            addresses.add(t.data_ptr())
            return t

        (x,) = batches(rows)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(x.requires_grad_())
        assert (x.data_ptr() in addresses) == stays
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(dx, again.detach())
        with pytest.raises(RuntimeError, match="once|again"):
            again.sum().backward()


def test_nothing_is_saved_without_gradients(made: list[tuple[int, ...]]) -> None:
    model, (x,) = network(), batches(16)
    with torch.no_grad():
        model(x)
    assert not made
    model.requires_grad_(False)
    model(x)
    assert not made


def test_operators_that_save_pass_opcheck(made: list[tuple[int, ...]]) -> None:
    layer = ext.Linear(32, 48, recipe="mxfp4")
    x = torch.randn(16, 32, requires_grad=True)
    saves = saved.savable(layer.quant_layer.number)
    numbers = layer.quant_clock, layer.quant_layer.number, torch.float32, False, saves
    torch.library.opcheck(OPERATORS.linear, (x, layer.weight, layer.bias, *numbers))
    out, *held = OPERATORS.linear(x.detach(), layer.weight.detach(), None, *numbers)
    assert [t.numel() for t in held] == [4 * 16 * 32, 4 * 48 * 32]
    operands = torch.randn_like(out), x.detach(), layer.weight.detach(), held
    torch.library.opcheck(OPERATORS.linear_backward, (*operands, *numbers, [True, True, True]))


def test_a_small_matrix_is_never_read_from_what_was_promised(made: list[tuple[int, ...]]) -> None:
    layer = ext.Linear(32, 48, recipe="mxfp4", bias=False)
    (x,) = batches(ROWS - 1)
    saves = saved.INPUT & saved.savable(layer.quant_layer.number)
    numbers = layer.quant_clock, layer.quant_layer.number, torch.float32, False, saves
    out, held = OPERATORS.linear(x, layer.weight.detach(), None, *numbers)
    assert held.eq(255).all()
    _, dw = OPERATORS.linear_backward(
        torch.ones_like(out), x, layer.weight.detach(), [held], *numbers, [True, True, False]
    )
    assert dw.isfinite().all()


def test_what_an_operator_returns_is_fixed_by_its_arguments(made: list[tuple[int, ...]]) -> None:
    """Compiled code is kept on disk; another program's layer of that number has another recipe."""
    layers = [ext.Linear(32, 48, recipe=recipe) for recipe in ("mxfp4_all", "mxfp4_tseng")]
    one, two = (layer.quant_layer.number for layer in layers)
    assert saved.savable(one) != saved.savable(two)
    x = torch.randn(16, 32)
    rest = layers[0].quant_clock, two, torch.float32, False, saved.savable(one)
    out = OPERATORS.linear(x, layers[0].weight.detach(), None, *rest)
    assert [t.numel() for t in out[1:]] == [4 * 16 * 32, 4 * 48 * 32]
