"""Putting a recipe on a model: what fits, and that a model is untouched by what does not."""

from __future__ import annotations

import re

import pytest

from extensor import RECIPES, nn
from extensor.nn.recipe import gemm_layers
from extensor.quant.array import QuantStats
from extensor.quant.recipe import SLOTS, LayerRecipe, Recipe, Rule
from extensor.quant.recipe_state import counts_from_rows
from extensor.schema import SchemaError

LAYERS = RECIPES["mxfp4"].layers


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))


def test_every_layer_gets_its_place_and_the_first_and_last_their_own():
    net = model()
    state = nn.apply_recipe(net, "mxfp4", seed=3)
    assert list(state.layers) == ["0", "1", "2"]
    assert [layer.quant.layer is LAYERS for _, layer in gemm_layers(net)] == [False, True, False]
    assert state.seed == 3


def test_a_role_may_match_nothing():
    nn.apply_recipe(model(), Recipe("r", "a test", LAYERS, (Rule("@embedding", LAYERS),)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("mxpf4",), ValueError, "no recipe named 'mxpf4'; did you mean 'mxfp4'"),
        ((3,), TypeError, "expected a Recipe or the name of one, got 3; names: fp32"),
        ((None,), TypeError, "expected a Recipe or the name of one, got None"),
        (({"blocks.*": "mxfp4"},), TypeError, "; by path: rules={'blocks.*': 'mxfp4'}"),
        (("mxfp4", -1), ValueError, "seed: expected an int in 0..2**64 - 1, got -1"),
        (("mxfp4", 1.5), ValueError, "seed: expected an int in 0..2**64 - 1, got 1.5"),
        (
            (Recipe("r", "a test", LAYERS, (Rule("head.*", LAYERS),)),),
            ValueError,
            "recipe 'r': rule 'head.*' matches no layer; the model's layers: 0, 1, 2",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(arguments, error, message):
    net = model()
    with pytest.raises(error, match=re.escape(message)):
        nn.apply_recipe(net, *arguments)
    assert all(layer.quant is None for _, layer in gemm_layers(net))


def test_rules_mix_recipes_by_path():
    net = model()
    state = nn.apply_recipe(net, "mxfp4", rules={"0": "mxfp8", "2": LAYERS})
    formats = [state.layers[path].layer.fprop.a for path in "01"]
    assert [spec.format for spec in formats] == ["mxfp8_e4m3", "mxfp4"]
    assert state.layers["2"].layer is LAYERS
    again = model()
    with pytest.raises(ValueError, match="rule 'head' matches no layer"):
        nn.apply_recipe(again, "mxfp4", rules={"head": "bf16"})
    with pytest.raises(TypeError, match="rule '0': expected the name of a recipe or a LayerRec"):
        nn.apply_recipe(again, "mxfp4", rules={"0": None})
    assert all(layer.quant is None for _, layer in gemm_layers(again))


def test_a_recipe_goes_on_a_model():
    with pytest.raises(TypeError, match="apply_recipe: expected a Module, got int"):
        nn.apply_recipe(3, "mxfp4")
    with pytest.raises(ValueError, match="no role named '@frist'; did you mean '@first'"):
        nn.apply_recipe(model(), Recipe("r", "a test", LAYERS, (Rule("@frist", LAYERS),)))


def test_the_first_rule_that_matches_decides():
    dense, other = LayerRecipe.uniform("bfloat16"), LayerRecipe.uniform("float32")
    for rules, expected in (
        ((Rule("1", dense), Rule("*", other)), [other, dense, other]),
        ((Rule("@last", dense), Rule("*", other)), [other, other, dense]),
        ((Rule("*", other), Rule("1", dense)), [other, other, other]),
    ):
        net = model()
        nn.apply_recipe(net, Recipe("r", "a test", LAYERS, rules))
        assert [layer.quant.layer for _, layer in gemm_layers(net)] == expected


def test_no_two_operands_draw_the_same_bits():
    """Of a slot, a direction, a layer, a use, a step, a micro-batch; but a weight of each use."""
    state = nn.apply_recipe(model(), "mxfp4_all", seed=1)
    drawn = set()
    for step, micro_batch in ((0, 0), (1, 0), (0, 1)):
        state.step, state.micro_batch = step, micro_batch
        for context in state.layers.values():
            for use in (context.next_use(), context.next_use()):
                for slot in SLOTS:
                    for column in (False, True):
                        s = use.stream(slot, column)
                        drawn.add((s.seed, s.step, s.tensor, s.slot, s.column))
                        assert not slot.endswith(".w") or (s.seed, s.tensor) == (1, use.index)
    inputs, weights = 3 * 3 * 2 * 4 * 2, 2 * 3 * 2 * 2
    assert len(drawn) == inputs + weights


def test_counts_of_a_checkpoint_are_of_layers_and_slots_that_are_there():
    found = counts_from_rows(
        [["a", "fprop.x", 64], ["b", "dgrad.g", 5, 1, 2]], ["a", "b"], "counts"
    )
    assert found == {("a", "fprop.x"): QuantStats(64), ("b", "dgrad.g"): QuantStats(5, 1, 2)}
    for row in (["c", "fprop.x", 1], ["a", "fprop.y", 1], ["a", "fprop.x"], [1, "fprop.x", 1],
                ["a", "fprop.x", *range(6)]):  # fmt: skip
        with pytest.raises(SchemaError, match=r"counts\[1\]: expected a layer of this model"):
            counts_from_rows([["a", "fprop.x", 1], row], ["a", "b"], "counts")
    with pytest.raises(SchemaError, match="expected counts of 0 or more"):
        counts_from_rows([["a", "fprop.x", -1]], ["a"], "counts")
