"""Kept for backward in few bits, or not at all: `Recipe.saved` and `checkpoint`.

Oracle of a checkpoint: the same step without it, byte for byte. Oracle of stored values: the
operation's own gradient at values that are quantized by hand.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.autograd.mode import MODE
from extensor.autograd.storage import QuantizedStorage
from extensor.quant.recipe import SavedRule
from extensor.quant.recipes import RECIPES
from extensor.quant.replay import RunLog
from extensor.quant.spec import QuantSpec

needs_core = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)


def build(recipe: str, saved: tuple[SavedRule, ...] = ()) -> tuple[nn.Module, Any]:
    blocks = [
        nn.TransformerBlock(
            nn.MultiheadAttention(64, 4, causal=True, rng=i), nn.FeedForward(64, 256, rng=9 + i)
        )
        for i in range(2)
    ]
    model = nn.Sequential(*blocks, nn.Dropout(0.2, rng=0))
    return model, nn.apply_recipe(model, replace(RECIPES[recipe], saved=saved), seed=3)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, rng=0), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3, rng=1)
    )


def digest(x: et.ExTensor) -> str:
    """A few letters for all bytes: pytest compares long byte strings for minutes to show how
    they differ."""
    return sha256(x.numpy().tobytes()).hexdigest()[:16]


def steps(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """Gradients of two micro-batches and of the step after, and the buffers."""
    made: list[str] = []
    by = et.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        x = et.randn(shape, seed=number)
        x.requires_grad = True
        model(x).square().mean().backward()
        made += [digest(x.grad), *(digest(p.grad) for p in model.parameters())]
        if number:
            by.step()
            by.zero_grad()
    return [*made, *(digest(b) for b in model.buffers())]


@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp4_tseng", "fp32"])
def test_a_checkpoint_repeats_every_bit(recipe: str) -> None:
    plain, expected = build(recipe)
    want = steps(plain, (2, 24, 64))
    model, state = build(recipe)
    for module in (*list(model)[:2], model):  # blocks, and all around them
        module.recomputed = True
    assert steps(model, (2, 24, 64)) == want
    assert dict(state.telemetry) == dict(expected.telemetry)


def test_running_means_move_once_and_dropout_draws_once() -> None:
    want = steps(images(), (4, 3, 8, 8))
    model = images()
    model.recomputed = True
    assert steps(model, (4, 3, 8, 8)) == want


def test_a_second_run_that_draws_anew_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLog, "repeating", lambda self: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        test_a_checkpoint_repeats_every_bit("mxfp4_all")
    with pytest.raises(AssertionError):
        test_running_means_move_once_and_dropout_draws_once()


def kept(model: nn.Module, x: et.ExTensor) -> int:
    with et.inspect.memory_ledger(model) as ledger:
        y = model(x)
        report = ledger.report()
    del y
    return sum(one.nbytes for one in report.at(-1) if one.kind == "saved")


@needs_core
def test_a_checkpoint_keeps_its_input_alone() -> None:
    model, _ = build("mxfp4_all")
    list(model)[1].recomputed = True
    only = nn.Sequential(list(model)[1])
    x = et.randn((2, 24, 64), seed=0, requires_grad=True) * 1.0
    assert kept(only, x) == x.nbytes


@needs_core
def test_rules_say_what_is_kept_in_how_many_bits() -> None:
    """A GELU keeps its input and what it can make again: 64 bits a value, or 8.25."""
    values = 64 * 256
    for rules, bits in (
        ((), 64),
        ((SavedRule("0", "mxfp8"),), 8.25),
        ((SavedRule("*", "mxfp4"),), 4.25),
    ):
        model = nn.Sequential(nn.GELU())
        state = nn.apply_recipe(nn.Sequential(nn.Linear(8, 8)), replace(RECIPES["fp32"]))
        state.recipe = replace(state.recipe, saved=rules)
        nn.recipe.store_saved(model, state)
        x = et.randn((64, 256), seed=0, requires_grad=True) * 1.0
        assert kept(model, x) == values * bits / 8


@needs_core
def test_a_float_layer_and_the_relu_before_it_store_one_array() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(256, 8, rng=0))
    nn.apply_recipe(model, replace(RECIPES["fp32"], saved=(SavedRule("*", "mxfp8"),)))
    x = et.randn((64, 256), seed=0, requires_grad=True) * 1.0
    assert kept(model, x) == 64 * 256 * 8.25 / 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gelu", "relu", "layer_norm", "softmax"])
def test_gradients_are_those_at_what_is_stored(name: str, dtype: str) -> None:
    spec = QuantSpec("mxfp8_e4m3")
    x = (et.randn((40, 64), seed=1) * 2.0).to(dtype)
    g = et.randn((40, 64), seed=2).to(dtype)
    ones, zeros = et.ones(64), et.zeros(64)
    call = {
        "gelu": et.gelu,
        "relu": et.relu,
        "softmax": et.softmax,
        "layer_norm": lambda x: et.layer_norm(x, ones, zeros),
    }[name]
    state = nn.apply_recipe(nn.Linear(8, 8), "fp32")

    def stored(values: et.ExTensor) -> et.ExTensor:
        flat = values.reshape(-1).quantize(spec).dequantize().to(values.dtype)
        return flat.reshape(values.shape)

    leaf = x.detach()
    leaf.requires_grad = True
    MODE.storage = QuantizedStorage(spec, state)
    try:
        y = call(leaf * 1.0)
    finally:
        MODE.storage = None
    y.backward(g.to(y.dtype))
    if name in ("relu", "softmax"):  # their gradients read the output
        out = stored(call(x)).to("float32")
        wide = g.to("float32")
        want = wide * (out > 0.0) if name == "relu" else out * (wide - (wide * out).sum(-1, True))
        close = {"rtol": 1e-2 if dtype == "bfloat16" else 1e-5, "atol": 1e-5}
    else:
        at = stored(x)
        at.requires_grad = True
        call(at).backward(g.to(y.dtype))
        want, close = at.grad, {"rtol": 1e-2, "atol": 1e-5}
        if name == "layer_norm":  # mean and deviation are the input's own
            close = {"rtol": 0.1, "atol": 0.1}
    np.testing.assert_allclose(leaf.grad.to("float32").numpy(), want.to("float32").numpy(), **close)


def test_an_array_of_several_operations_is_stored_once() -> None:
    x = et.randn((4, 64, 64), seed=0, requires_grad=True) * 1.0
    state = nn.apply_recipe(nn.Linear(8, 8), "fp32")
    MODE.storage = QuantizedStorage(QuantSpec("mxfp8_e4m3"), state)
    try:
        y = x.relu()
        z = y * y
    finally:
        MODE.storage = None
    assert y.node.out is z.node.arrays[0] is z.node.arrays[1]


def test_stochastic_storage_repeats_with_the_step() -> None:
    rules = (SavedRule("*", QuantSpec("mxfp4", rounding="stochastic")),)
    first, second = (steps(build("mxfp4_all", rules)[0], (2, 24, 64)) for _ in range(2))
    assert first == second


def test_rules_that_match_nothing_and_unknown_formats_are_errors() -> None:
    with pytest.raises(ValueError, match=r"saved rule 'head\.\*' matches no module"):
        build("mxfp4_all", (SavedRule("head.*", "mxfp8"),))
    with pytest.raises(ValueError, match="mxfp7"):
        SavedRule("*", "mxfp7")


def test_a_checkpoint_takes_tensors_and_gives_one() -> None:
    x = et.ones((2, 2), requires_grad=True)
    with pytest.raises(TypeError, match="expected tensors after the function, got float"):
        et.checkpoint(lambda x, by: x * by, x, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gives one tensor, got tuple"):
        et.checkpoint(lambda x: (x, x), x)  # type: ignore[arg-type, return-value]
    y = et.checkpoint(et.exp, x)
    with et.no_grad():
        x.copy_(x * 2.0)
    with pytest.raises(RuntimeError, match="written in place"):
        y.sum().backward()


def test_second_derivatives_of_a_checkpoint_are_refused() -> None:
    x = et.ones((2, 2), requires_grad=True)
    (g,) = (et.grad(et.checkpoint(et.exp, x).sum(), x, create_graph=True),)
    with pytest.raises(RuntimeError, match="without et.checkpoint"):
        et.grad(g.sum(), x)
