"""A weight's operands: made once for all uses of the same values, and never used for others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn, optim
from extensor.backends import registry
from extensor.backends.generic.matmul import FloatPreparation
from extensor.ops import recipe_operands
from extensor.ops.quantized import quantized_matmul
from extensor.quant.recipe import LayerRecipe
from extensor.quant.spec import QuantSpec

RECIPES = ["mxfp4_all", "nvfp4_nvidia", "mxfp8_nvidia", "mxfp4_tseng", "bf16"]
STOCHASTIC = QuantSpec("mxfp4", rounding="stochastic")


def build(recipe: str) -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(nn.Linear(64, 96, rng=0), nn.ReLU(), nn.Linear(96, 32, rng=1))
    return model, nn.apply_recipe(model, recipe, seed=3)


def batch(number: int, rows: int = 24) -> et.ExTensor:
    rng = np.random.default_rng(number)
    return et.from_numpy(rng.standard_normal((rows, 64)).astype(np.float32))


class Made(list[Any]):
    """Shapes of the matrices that were quantized or rounded, in order."""

    def of(self, layer: Any) -> int:
        """How often the layer's weight was."""
        return sum(shape == layer.weight.shape for shape in self)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made()
    honest = FloatPreparation.run

    def counted(self: Any) -> Any:
        found.append(self.x.shape)
        return honest(self)

    monkeypatch.setattr(FloatPreparation, "run", counted)
    return found


def accumulate(recipe: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two steps of three micro-batches, an evaluation between them."""
    with monkeypatch.context() as patch:
        if not kept:
            patch.setattr(recipe_operands, "version_of", lambda tensor: None)
        model, state = build(recipe)
        by = optim.SGD(model.named_parameters(), lr=0.1)
        found: list[Any] = []
        for step in range(2):
            state.step = step
            by.zero_grad()
            for number in range(3):
                model(batch(number)).square().mean().backward()
            found += [param.grad.numpy().copy() for param in model.parameters()]
            by.step()
            with et.no_grad():
                found.append(model(batch(9)).numpy().copy())
        return [*found, dict(state.telemetry)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_reuse_them_to_the_bit_and_the_count(
    recipe: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = accumulate(recipe, True, monkeypatch)
    ours_made = list(made)
    made.clear()
    theirs = accumulate(recipe, False, monkeypatch)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b
    # The first layer's in forward passes: twice in the first step, because float32 operands are
    # kept from their second use on; and once in each evaluation, whose the second step finds. The
    # second layer's also in backward passes: twice in the first step, once in the second.
    weights = [(96, 64), (32, 96)]
    assert [ours_made.count(shape) for shape in weights] == [4, 7]
    assert [made.count(shape) for shape in weights] == [8, 14]
    assert len(made) - len(ours_made) == 4 + 7


def test_a_step_with_one_micro_batch_keeps_no_floats() -> None:
    model, state = build("mxfp4_all")
    by = optim.SGD(model.named_parameters(), lr=0.1)

    def kept() -> list[bool]:
        return [one.stored for one in state.weight_cache._operands.values()]

    for _ in range(3):
        model(batch(0)).square().mean().backward()
        by.step()
        assert not any(kept())
    with et.no_grad():
        for number in range(3):
            model(batch(number))
    assert sum(kept()) == 2  # evaluation uses both weights again
    for _ in range(2):
        by.step()
        model(batch(0)).square().mean().backward()
    assert not any(kept())  # and the values after those are used once


def _rewrite(model: nn.Sequential) -> dict[str, Callable[[], object]]:
    layer = model[0]
    weight = layer.weight
    fresh = np.random.default_rng(5).standard_normal(weight.shape).astype(np.float32)

    def update(kind: Any, **options: Any) -> Callable[[], object]:
        def step() -> None:
            matrices = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
            by = kind(matrices, lr=0.1, **options)
            by.step()

        return step

    def quiet(write: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            with et.no_grad():
                write()

        return call

    return {
        "SGD": update(optim.SGD),
        "AdamW": update(optim.AdamW),
        "states in blocks": update(optim.AdamW, states="bfloat16"),
        "Muon": update(optim.Muon),
        "assign_": quiet(lambda: weight.assign_(fresh)),
        "copy_": quiet(lambda: weight.copy_(et.from_numpy(fresh))),
        "an index": quiet(lambda: weight.__setitem__((0, slice(4)), 3.0)),
        "a view": quiet(lambda: weight.detach().reshape(-1).__setitem__(5, 3.0)),
        "loading": lambda: model.load_state_dict(
            {name: a + 1 for name, a in model.state_dict().items()}
        ),
        "another library": lambda: np.from_dlpack(weight.detach()).fill(0.5),
        "a move": lambda: model.to("cpu"),
        "other memory": lambda: setattr(weight, "data", fresh),
        "another parameter": lambda: setattr(layer, "weight", nn.Parameter(fresh)),
        "another recipe": lambda: setattr(
            layer.quant, "layer", LayerRecipe.uniform(QuantSpec("mxfp8_e4m3"))
        ),
    }


@pytest.mark.parametrize("write", _rewrite(build("mxfp4_all")[0]))
def test_whatever_changes_a_weight_makes_them_anew(
    write: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build("mxfp4_all")
    model(batch(0)).square().mean().backward()
    made.clear()
    _rewrite(model)[write]()
    ours = model(batch(1))
    assert made.of(model[0]) == 1
    monkeypatch.setattr(recipe_operands, "version_of", lambda tensor: None)
    np.testing.assert_array_equal(ours.numpy(), model(batch(1)).numpy())


def test_random_weights_are_drawn_anew_with_each_step(made: Made) -> None:
    layer = nn.Linear(64, 96, rng=0)
    state = nn.apply_recipe(layer, "mxfp4_all")
    assert layer.quant is not None
    layer.quant.layer = layer.quant.layer.with_slot("fprop.w", STOCHASTIC)
    found = []
    for step, recorded in ((0, True), (0, True), (0, False), (1, False), (1, True)):
        if step != state.step:
            state.step = step
        with et.enable_grad() if recorded else et.no_grad():
            found.append(layer(batch(0)).numpy())
    assert made.of(layer) == 3
    for a, b, equal in ((0, 1, True), (0, 2, True), (0, 3, False), (3, 4, True)):
        assert np.array_equal(found[a], found[b]) == equal


def test_weights_that_are_results_are_not_kept(made: Made) -> None:
    layer = nn.Linear(64, 96, rng=0)
    state = nn.apply_recipe(layer, "mxfp4_all")
    assert layer.quant is not None
    for _ in range(2):
        quantized_matmul(batch(0), layer.weight * 2.0, layer.quant)
    assert made.of(layer) == 2
    assert not state.weight_cache


def test_memory_that_others_write_to_is_asked_each_time() -> None:
    context = nn.Linear(64, 96, rng=0)
    nn.apply_recipe(context, "mxfp4_all")
    assert context.quant is not None
    for take in (et.from_numpy, et.from_dlpack):
        own = np.random.default_rng(1).standard_normal((96, 64)).astype(np.float32)
        weight = take(own)
        first = quantized_matmul(batch(0), weight, context.quant).numpy()
        own *= 2
        np.testing.assert_array_equal(
            quantized_matmul(batch(0), weight, context.quant).numpy(), 2 * first
        )


def test_what_another_thread_forgets_meanwhile_is_not_missed() -> None:
    class Forgetful(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            """Gone as soon as it is there."""

    model, state = build("mxfp4_all")
    with et.no_grad():
        expected = model(batch(0)).numpy()
        state.weight_cache._operands = Forgetful()
        np.testing.assert_array_equal(model(batch(0)).numpy(), expected)


def test_other_sizes_make_them_anew(made: Made) -> None:
    """How a product is made depends on its size, and so do its operands."""
    model, _ = build("mxfp4_all")
    with et.no_grad():
        for rows in (24, 8, 8):
            model(batch(0, rows))
    assert made.of(model[0]) == 3


def test_nothing_is_held_of_a_weight_that_is_gone() -> None:
    import gc
    import weakref

    model, _ = build("mxfp4_all")
    model(batch(0))
    old = weakref.ref(model[0].weight.data)
    with et.no_grad():
        model[0].weight.assign_(model[0].weight.data + 1)
    gc.collect()
    assert old() is None


def test_copies_begin_without_them(made: Made) -> None:
    model, state = build("mxfp4_all")
    with et.no_grad():
        expected = model(batch(0)).numpy()
        assert state.weight_cache
        made.clear()
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not again[0].quant.state.weight_cache
            assert np.array_equal(again(batch(0)).numpy(), expected)
    assert len(made) == 2 * 4


@pytest.fixture
def batching(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The CPU as a device that makes operands of several matrices at once; shapes of each call."""
    calls: list[list[Any]] = []
    kind = type(registry.get("cpu"))

    def run_batch(self: Any, preparations: Any) -> Any:
        calls.append([one.x.shape for one in preparations])
        return [one.run() for one in preparations]

    monkeypatch.setattr(kind, "run_batch", run_batch)
    monkeypatch.setattr(FloatPreparation, "batch_key", property(lambda self: tuple(self.specs)))
    monkeypatch.setattr(FloatPreparation, "compact", True)
    return calls


def test_weights_that_changed_are_made_with_the_first_that_is_asked_for(
    batching: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = accumulate("mxfp4_all", True, monkeypatch)
    # The first forward pass meets them one by one. Evaluation asks for rows alone, the next step
    # for columns too, and the next evaluation for rows again: an update moves weights in place.
    assert batching == [[(96, 64), (32, 96)]] * 3
    theirs = accumulate("mxfp4_all", False, monkeypatch)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def test_weights_that_did_not_change_are_not_made_again(batching: list[list[Any]]) -> None:
    model, _ = build("mxfp4_all")
    with et.no_grad():
        model(batch(0))
        model[2].weight.copy_(model[2].weight + 1)
        model(batch(0))
        model[0].weight.copy_(model[0].weight + 1)
        model(batch(0))
    assert batching == []


def test_a_state_is_equal_to_itself_alone() -> None:
    """Its layers refer to it: a comparison of fields would never end."""
    (model, state), (_, other) = build("mxfp4_all"), build("mxfp4_all")
    assert state == state and state != other
    assert model[0].quant == state.layers["0"] != other.layers["0"]
    assert {state: 1}[state] == 1
