"""What a quantized layer keeps for backward: the packed operand, in the bytes that arithmetic says.

Oracle of values: the same step that keeps the inputs (`Recipe.saved_input="input"`), byte for byte.
Oracle of bytes: bits a value and a scale for each block, counted by hand here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.backends import registry
from extensor.backends.generic.matmul import FloatPreparation
from extensor.formats import DIALECTS, FORMATS
from extensor.quant import reference
from extensor.quant.kept import kept_nbytes
from extensor.quant.recipes import RECIPES
from extensor.quant.round_to_odd import odd_bits, round_to_odd
from extensor.quant.scale_rules import E8M0_RULES
from extensor.quant.spec import QuantSpec
from tests.recipes import DISTINCT

F32 = np.dtype(np.float32)

needs_core = pytest.mark.skipif(
    et.ones(1).backend.core is None, reason="the C++ core keeps the ledger's log"
)


class Shared(nn.Module):
    """Three layers of one input, as q, k and v."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (nn.Linear(64, n, rng=n) for n in (64, 32, 32))
        self.out = nn.Linear(128, 64, rng=3)

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        x = x * 2.0
        joined = et.concatenate([self.q(x), self.k(x), self.v(x)], axis=-1)
        return self.out(joined * 1.5)


def step(recipe: Any, saved: str, dtype: str = "float32", rows: int = 70) -> list[Any]:
    """Gradients of two micro-batches, and the counts."""
    model = Shared()
    state = nn.apply_recipe(model, replace(recipe, saved_input=saved), seed=5)
    for number in range(2):
        x = et.randn((2, rows // 2, 64), seed=number).to(dtype)
        x.requires_grad = True
        model(x).square().mean().backward()
    return [x.grad.numpy(), *(p.grad.numpy() for p in model.parameters()), dict(state.telemetry)]


@pytest.mark.parametrize("name", DISTINCT)
def test_gradients_and_counts_are_those_of_inputs_that_are_kept(name: str) -> None:
    for dtype, rows in (("float32", 70), ("bfloat16", 6)):
        kept, packed = (step(RECIPES[name], how, dtype, rows) for how in ("input", "packed"))
        assert kept[-1] == packed[-1]
        for a, b in zip(kept[:-1], packed[:-1], strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_packed_operand_of_another_axis_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FloatPreparation.pack

    def planted(self: Any) -> Any:
        spec = self.specs[0]
        wrong = replace(self, specs=[spec.replace(axis=1)])
        found, counts = honest(wrong)
        return replace(found, stored=replace(found.stored, spec=spec)), counts

    monkeypatch.setattr(FloatPreparation, "pack", planted)
    with pytest.raises((AssertionError, ValueError)):
        test_gradients_and_counts_are_those_of_inputs_that_are_kept("mxfp8_nvidia")


def saved_by(model: nn.Module, x: et.ExTensor) -> Counter[str]:
    """Bytes that a forward pass keeps for backward, by layer."""
    with et.inspect.memory_ledger(model) as ledger:
        y = model(x)
        x = et.ones(1)  # the last reference to the input is not ours
        report = ledger.report()
    del y
    found = Counter[str]()
    last = report.at(len(report.timeline) - 1)
    for one in last:
        if one.kind == "saved":
            found[one.layer] += one.nbytes
    return found


@needs_core
@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recipes_keep_what_their_formula_says(name: str, dtype: str) -> None:
    layers = RECIPES[name].layers
    layer = nn.Linear(96, 64, bias=False, rng=0)
    nn.apply_recipe(layer, replace(RECIPES[name], rules=()))
    x = et.randn((70, 96), seed=0).to(dtype) + et.ones(1).to(dtype)
    assert saved_by(layer, x) == {"": kept_nbytes(layers, (70, 96), (64, 96), dtype)}


BITS = {"mxfp4": 4.25, "mxfp8_e4m3": 8.25, "mxfp6_e2m3": 6.25, "nvfp4": 4.5, "int8": 8}


@needs_core
@pytest.mark.parametrize("name", BITS)
def test_bits_a_value_are_the_formats(name: str) -> None:
    spec = QuantSpec("int8", tile="channel") if name == "int8" else QuantSpec(name)
    rows, width = 256, 512
    layer = nn.Linear(width, 128, bias=False, rng=0)
    recipe = replace(RECIPES["mxfp4_all"], layers=et.quant.recipe.LayerRecipe.uniform(spec))
    nn.apply_recipe(layer, recipe)
    expected = rows * width * BITS[name] / 8
    expected += {"nvfp4": 4, "int8": 4 * width}.get(name, 0)  # a tensor's scale; the channels'
    assert saved_by(layer, et.randn((rows, width), seed=0) + 1.0) == {"": expected}


@needs_core
def test_a_recipe_keeps_what_its_layers_formats_add_up_to() -> None:
    """MXFP4 of a hidden layer, bfloat16 of the first and last: 4.25 and 16 bits a value."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, rng=i) for i in range(3)))
    nn.apply_recipe(model, "mxfp4")
    values = 64 * 256
    kept = saved_by(model, et.randn((64, 256), seed=0))
    assert kept == {"0": 2 * values, "1": values * 4.25 / 8, "2": 2 * values}


@needs_core
def test_an_input_of_several_layers_is_kept_once() -> None:
    model = Shared()
    nn.apply_recipe(model, "mxfp4_all")
    kept = saved_by(model, et.randn((64, 64), seed=0, requires_grad=True))
    assert kept["q"] + kept["k"] + kept["v"] == 64 * 64 * 4.25 / 8


def test_an_input_that_was_written_is_quantized_anew() -> None:
    model = Shared()
    nn.apply_recipe(model, "mxfp4_all")
    x = et.randn((32, 64), seed=0) * 1.0
    before = model.q(x)
    with et.no_grad():
        x.copy_(x * 3.0)
    after = model.q(x)
    assert not np.array_equal(before.numpy(), after.numpy())


def test_the_input_is_let_go() -> None:
    layer = nn.Linear(64, 32, rng=0)
    nn.apply_recipe(layer, "mxfp4_all")
    x = et.randn((32, 64), seed=0, requires_grad=True) * 2.0
    gone = weakref.ref(x.data)
    y = layer(x)
    del x
    assert gone() is None
    y.sum().backward()


def test_a_frozen_weight_needs_no_input() -> None:
    layer = nn.Linear(64, 32, rng=0)
    nn.apply_recipe(layer, "mxfp4_all")
    layer.weight.requires_grad = False
    x = et.randn((32, 64), seed=0, requires_grad=True)
    y = layer(x * 2.0)
    assert y.node.saved.x is None and y.node.saved.released == (0,)
    y.sum().backward()
    assert x.grad is not None


def test_an_input_that_another_operation_keeps_is_not_kept_twice() -> None:
    layer = nn.Linear(64, 32, rng=0)
    nn.apply_recipe(layer, "mxfp4_all")
    y = layer(et.randn((32, 64), seed=0, requires_grad=True).softmax())  # its gradient reads it
    assert y.node.saved.x is None and not y.node.saved.released


@needs_core
def test_a_relu_keeps_a_bit_a_value_for_a_layer_that_lets_its_result_go() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(64, 32, bias=False, rng=0))
    nn.apply_recipe(model, "mxfp4_all")
    kept = saved_by(model, et.randn((32, 64), seed=0, requires_grad=True) * 1.0)
    assert kept == {"0": 32 * 64 / 8, "1": 32 * 64 * 4.25 / 8}


# --- images ------------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions of all kinds; two of one input."""

    def __init__(self) -> None:
        self.first = nn.Conv2d(3, 8, 3, padding=1, rng=0)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2, bias=False, rng=1)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2, bias=False, rng=2)

    def forward(self, x: et.ExTensor) -> et.ExTensor:
        x = self.norm(self.first(x * 1.5)).relu()
        return self.second(x) + self.shortcut(x).relu()


def image_step(recipe: Any, saved: str, dtype: str) -> list[Any]:
    model = Images()
    state = nn.apply_recipe(model, replace(recipe, saved_input=saved), seed=5)
    for number in range(2):
        x = et.randn((2, 3, 7, 6), seed=number).to(dtype)
        x.requires_grad = True
        model(x).square().mean().backward()
    return [x.grad.numpy(), *(p.grad.numpy() for p in model.parameters()), dict(state.telemetry)]


def images_are_the_same(name: str, dtype: str) -> None:
    recipe = RECIPES[name]
    if recipe.layers.uses_forward_operands:
        pytest.skip("takes no groups")
    kept, packed = (image_step(recipe, how, dtype) for how in ("input", "packed"))
    assert kept[-1] == packed[-1]
    for a, b in zip(kept[:-1], packed[:-1], strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_images_are_those_of_images_that_are_kept(name: str, dtype: str) -> None:
    images_are_the_same(name, dtype)


def test_floats_that_are_cut_and_not_rounded_to_odd_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = registry.get("cpu")
    honest = backend.odd_values

    def planted(kept: Any) -> Any:
        words = honest(kept).view(np.uint32)
        return (words & ~np.uint32(1 << 20)).view(np.float32)

    monkeypatch.setattr(backend, "odd_values", planted)
    with pytest.raises(AssertionError):
        images_are_the_same("mxfp4_all", "float32")


@needs_core
@pytest.mark.parametrize("name", ["mxfp4_all", "mxfp8_nvidia", "nvfp4_nvidia", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_image_takes_the_bits_that_its_formula_says(name: str, dtype: str) -> None:
    layers = RECIPES[name].layers
    layer = nn.Conv2d(4, 6, 3, bias=False, rng=0)
    nn.apply_recipe(layer, replace(RECIPES[name], rules=()))
    x = et.randn((2, 4, 9, 7), seed=0).to(dtype) + et.ones(1).to(dtype)
    assert saved_by(layer, x) == {"": kept_nbytes(layers, x.shape, layer.weight.shape, dtype)}


def test_an_image_of_two_layers_is_kept_once_and_a_subnormal_value_keeps_it_whole() -> None:
    layers = [nn.Conv2d(4, 6, k, rng=k) for k in (1, 3)]
    nn.apply_recipe(nn.Sequential(*layers), "mxfp4_all")
    x = et.randn((2, 4, 5, 5), seed=0, requires_grad=True) * 1.0
    first, second = (layer(x).node.saved for layer in layers)
    assert first.x is second.x and first.x.nbytes == x.size * 1.5
    with et.no_grad():
        x[0, 0, 0, 0] = 1e-40
    saved = layers[0](x).node.saved
    assert saved.x is None and not saved.released


@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if odd_bits(QuantSpec(n), F32)])
@pytest.mark.parametrize(
    ("dialect", "rule"), [*(("ocp", rule) for rule in E8M0_RULES), *((d, None) for d in DIALECTS)]
)
def test_what_is_rounded_to_odd_is_quantized_to_the_same_bytes(
    name: str, dialect: str, rule: str | None
) -> None:
    spec = QuantSpec(name, scale_rule=rule, dialect=dialect, tile=(1, 4)).resolve(2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 64)).astype(np.float32)
    x *= np.exp2(rng.integers(-126, 120, (64, 1))).astype(np.float32)
    x[np.abs(x) < 2.0**-126] = 0
    ties = rng.integers(0, 64, (64, 64)).astype(np.float32)  # at, above and below each tie
    edges = np.concatenate([np.nextafter(ties, np.float32(s)) for s in (0, 99)] + [ties])
    special = np.float32([[np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, 2.0**-126, 1.0] * 8])
    values = np.concatenate([x, -edges, special])
    values[np.abs(values) < 2.0**-126] = 0
    kept = round_to_odd(values, odd_bits(spec, values.dtype) or 0, np)
    assert kept is not None
    (a, counts), (b, again) = (reference.quantize(v, spec) for v in (values, kept.values(np)))
    assert counts == again
    assert a.codes.tobytes() == b.codes.tobytes() and a.scales.tobytes() == b.scales.tobytes()
