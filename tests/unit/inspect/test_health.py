"""Telemetry as rows and as a table."""

import pytest

from extensor.inspect import SlotHealth, Table, health_table, slot_health
from extensor.quant.array import QuantStats
from extensor.quant.recipe import LayerRecipe, Recipe
from extensor.quant.recipe_state import LayerContext, RecipeState
from extensor.quant.spec import QuantSpec


def state():
    layer = LayerRecipe.uniform(QuantSpec("mxfp4")).with_slot("wgrad.x", "bfloat16")
    made = RecipeState(Recipe("test", "a test", layer))
    for index, path in enumerate(("first", "second")):
        made.layers[path] = LayerContext(path, index, layer, made)
    return made


def test_rows_follow_the_model_whatever_ran_first():
    made = state()
    made.layers["second"].record("fprop.w", QuantStats(10, 1, 5))
    made.layers["first"].record("dgrad.g", QuantStats(100, 3, 0))
    made.layers["first"].record("fprop.x", QuantStats(100, 0, 10))
    made.layers["first"].record("fprop.x", QuantStats(100, 2, 0))
    made.layers["second"].record("wgrad.g", QuantStats(10, 0, 2, 2))
    made.layers["second"].record("wgrad.x", QuantStats(0, 0, 0))
    rows = slot_health(made, {("first", "dgrad.g")})
    assert rows == (
        SlotHealth("first", "fprop.x", "mxfp4", "floor", 200, 0.01, 0.05),
        SlotHealth("first", "dgrad.g", "mxfp4", "floor", 100, 0.03, 0.0, True),
        SlotHealth("second", "fprop.w", "mxfp4", "floor", 10, 0.1, 0.5),
        SlotHealth("second", "wgrad.g", "mxfp4", "floor", 10, 0.0, 0.2, False, 0.2),
        SlotHealth("second", "wgrad.x", None, None, 0, 0.0, 0.0),
    )
    verdicts = ["ok", "saturates", "saturates and flushes", "changes when rebased", "ok"]
    assert [row.verdict for row in rows] == verdicts


def test_the_table_as_text():
    made = state()
    made.layers["first"].record("fprop.x", QuantStats(2000, 100, 0))
    made.layers["second"].record("wgrad.x", QuantStats(3, 0, 0))
    text = str(health_table(slot_health(made, {("first", "fprop.x")})))
    assert text.splitlines() == [
        "layer      slot  format              rule  values  saturated  flushed  rebased    verdict",
        "first   fprop.x   mxfp4  floor (switched)   2,000     5.000%   0.000%   0.000%  saturates",
        "second  wgrad.x       -                 -       3     0.000%   0.000%   0.000%         ok",
    ]
    assert str(health_table(())).startswith("layer")


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="expected 2 cells"):
        Table(("a", "b"), (("1",),))
