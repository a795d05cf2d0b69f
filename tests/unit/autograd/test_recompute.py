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
from extensor.autograd.storage import ArrayStore, SavedStorage
from extensor.backends import registry
from extensor.quant.recipe import Rule, SavedRule
from extensor.quant.recipes import RECIPES
from extensor.quant.replay import RunLog
from extensor.quant.saved import parse_saved
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
@pytest.mark.parametrize("around", [False, True])
def test_what_is_cheap_is_made_again_with_the_same_bits(around: bool) -> None:
    """GELU keeps its input alone, a quarter less of the block; also in a part that runs again."""
    want = steps(build("mxfp4_all")[0], (2, 24, 64))
    x = et.randn((2, 24, 64), seed=0, requires_grad=True) * 1.0
    models = [build("mxfp4_all")[0] for _ in range(2)]
    for model in models:
        for block in list(model)[:2]:
            block.recomputed = "cheap"
    assert kept(models[0], x) == kept(build("mxfp4_all")[0], x) - 2 * 2 * 24 * 256 * 4
    models[1].recomputed = around
    assert steps(models[1], (2, 24, 64)) == want


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


class DecodedAtOnce(ArrayStore):
    """A float array of what storage would give back, and no storage."""

    def store(self, array: Any, backend: Any) -> Any:
        stored = super().store(array, backend)
        return array if stored is array else stored.values(backend)


class Reference(SavedStorage):
    """The exact reference: what is kept is replaced by its decoded values in the forward pass."""

    def pack(self, node: Any) -> None:
        before = list(node.arrays)
        super().pack(node)
        if node.primitive.name == "gelu_exact" and node.arrays[0] is not before[0]:
            x = node.backend.cast(node.arrays[0], node.compute or node.arrays[0].dtype)
            node.saved = node.backend.gelu(x)[1]


def llama_block(saved: tuple[SavedRule, ...]) -> nn.Module:
    """RMS norms, rotary grouped queries and a gated unit, layers in float32 but two in MXFP4."""
    model = nn.TransformerBlock(
        nn.MultiheadAttention(64, 4, kv_heads=2, causal=True, rotary=1e4, rng=0),
        nn.FeedForward(64, 128, "swiglu", rng=1),
        norm="rms",
    )
    dense = Rule("feed_forward.*", RECIPES["fp32"].layers)
    recipe = replace(RECIPES["mxfp4_all"], rules=(dense,), saved=saved)
    nn.apply_recipe(model, recipe, seed=3)
    return model


def gpt_blocks(saved: tuple[SavedRule, ...]) -> nn.Module:
    return build("mxfp4_all", saved)[0]


STOCHASTIC = QuantSpec("mxfp4", rounding="stochastic")


@pytest.mark.parametrize(
    "rules",
    [
        (SavedRule("*", "mxfp8"),),
        (SavedRule("*", "bfloat16"),),
        (SavedRule("*", STOCHASTIC),),
        (SavedRule("*", "bfloat16", "norm"), SavedRule("*", "mxfp6", "[qkvo]*"),
         SavedRule("*.feed_forward", "float32"), SavedRule("*", STOCHASTIC)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [llama_block, gpt_blocks])
@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_gradients_are_those_at_what_is_stored(
    rules: tuple[SavedRule, ...], make: Any, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte: norms with their input's own mean and deviation, all else at decoded values.

    In a Llama-like block "*.feed_forward" matches nothing, so the glob is of the block itself.
    """
    if make is llama_block:
        rules = tuple(replace(r, match=r.match.replace("*.", "")) for r in rules)

    def gradients() -> list[str]:
        x = et.randn((2, 24, 64), seed=5).to(activations)
        x.requires_grad = True
        model = make(rules)
        (model(x * 1.0) * et.randn((2, 24, 64), seed=6)).sum().backward()
        return [digest(x.grad.to("float32")), *(digest(p.grad) for p in model.parameters())]

    found = gradients()
    monkeypatch.setattr("extensor.nn.recipe.ArrayStore", DecodedAtOnce)
    monkeypatch.setattr("extensor.nn.recipe.SavedStorage", Reference)
    assert gradients() == found
    monkeypatch.setattr(DecodedAtOnce, "store", lambda self, array, backend: array)
    assert gradients() != found


def test_an_array_of_several_operations_is_stored_once() -> None:
    x = et.randn((4, 64, 64), seed=0, requires_grad=True) * 1.0
    state = nn.apply_recipe(nn.Linear(8, 8), "fp32")
    store = ArrayStore(QuantSpec("mxfp8_e4m3"), state)
    rules = [SavedRule("*", "mxfp8", slot) for slot in ("activation", "input")]
    MODE.storage = SavedStorage([(rule, store) for rule in rules], state)
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
    with pytest.raises(ValueError, match="no saved slot named 'gates'"):
        SavedRule("*", "mxfp8", "gates")


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        (SavedRule("*", "mxfp8", "gate"), "activation"),
        (SavedRule("*.feed_forward.up", "mxfp8"), "a quantized layer's own operand"),
        (SavedRule("1.norm1", "mxfp8"), "norm"),  # the rule before it decides
    ],
)
def test_a_rule_that_decides_nothing_is_an_error_of_the_first_step(
    rule: SavedRule, seen: str
) -> None:
    model, _ = build("mxfp4_all", (SavedRule("*", "bfloat16", "norm"), rule))
    before = model[0].norm1.weight.numpy().copy()
    model(et.randn((2, 24, 64), seed=0)).sum().backward()
    with pytest.raises(ValueError, match=f"decides about nothing .* in these slots: .*{seen}"):
        et.optim.SGD(model.parameters(), lr=0.1).step()
    assert (model[0].norm1.weight.numpy() == before).all()


def test_rules_as_text() -> None:
    found = parse_saved("norm=bfloat16, blocks.*:[qkvo]=mxfp8~,mxfp4")
    assert found == (
        SavedRule("*", "bfloat16", "norm"),
        SavedRule("blocks.*", QuantSpec("mxfp8_e4m3", rounding="stochastic"), "[qkvo]"),
        SavedRule("*", "mxfp4"),
    )
    for text in ("norm=bfloat16~", "nrm=mxfp8", "norm=mxfp7", ""):
        with pytest.raises(ValueError):
            parse_saved(text)


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


def test_gelu_may_pack_its_input_as_it_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the gradients of packing it afterwards; nothing is left over without gradients."""
    rule = replace(RECIPES["mxfp4"], saved=parse_saved("activation=mxfp8"))
    made: list[tuple[int, ...]] = []
    honest = registry.get("cpu").pack

    def pack(x: Any, spec: Any, stream: Any = None) -> Any:
        made.append(x.shape)
        return honest(x, spec, stream)

    def gelu_and_pack(x: Any, spec: Any) -> Any:
        return pack(x.reshape(-1), spec), registry.get("cpu").gelu(x)[0]

    found = []
    monkeypatch.setattr(registry.get("cpu"), "pack", pack)
    for both in (None, gelu_and_pack):
        model = nn.FeedForward(32, 128, rng=0)
        nn.apply_recipe(model, rule)
        if both is not None:
            monkeypatch.setattr(registry.get("cpu"), "gelu_and_pack", both)
        made.clear()
        model(et.randn((64, 32), seed=1)).square().sum().backward()
        assert made.count((64 * 128,)) == 1
        found.append([p.grad.numpy() for p in model.parameters()])
        with et.no_grad():
            model(et.randn((64, 32), seed=1))
        assert made.count((64 * 128,)) == 1
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * np.abs(theirs).max())
