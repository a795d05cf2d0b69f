"""A schedule of recipes: read, refused, and trained with, also across an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from extensor import nn
from extensor.quant.recipe_schedule import RecipeSchedule
from extensor.quant.recipes import RECIPES
from extensor.training.callbacks import Callback, SaveCheckpoint
from extensor.training.loop import Interrupted, Trainer
from extensor.training.records import StepReport
from extensor.training.rundir import LAST
from tests.unit.training.conftest import Make, weights
from tests.unit.training.test_loop import InterruptAt


class Recipes(Callback):
    """Notes the recipe of each step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.names.append(trainer.quant.recipe.name)


def test_starts_are_steps_or_shares() -> None:
    schedule = RecipeSchedule.parse("bf16,mxfp4@3,fp32@90%")
    names = [schedule.at(step, 20).name for step in (0, 2, 3, 17, 18, 19)]
    assert names == ["bf16", "bf16", "mxfp4", "mxfp4", "fp32", "fp32"]
    assert str(schedule) == "bf16,mxfp4@3,fp32@90%"
    assert RecipeSchedule.parse("mxfp4,bf16@12.5%").at(2, 16).name == "bf16"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mxfp4@3", "expected RECIPE"),
        ("mxfp4,bf16", "expected RECIPE"),
        ("mxfp4,bf16@100%", "below 100%"),
        ("mxfp4,bf16@2.5", "a whole step"),
        ("mxfp4,bf16@9,fp32@9", "begin after bf16"),
        ("mxfp4,bf16@0", "begin after mxfp4"),
        ("mxfp4,nonsense@9", "nonsense"),
        ("", "expected RECIPE"),
    ],
)
def test_what_is_no_schedule(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RecipeSchedule.parse(text)


@pytest.mark.parametrize("stop", [4, 6, 7])
def test_a_run_changes_its_recipe_and_resumes_to_the_same_bits(
    small: Make, tmp_path: Path, stop: int
) -> None:
    """Interrupted before, at and after the change; and other weights than without one."""
    plain = small(recipe="mxfp4_all", train_limit=96, epochs=2)
    config = small(recipe="mxfp4_all,bf16@50%", train_limit=96, epochs=2)
    seen = Recipes()
    whole, constant = Trainer(config, tmp_path / "a", callbacks=[seen]), Trainer(plain, tmp_path)
    for trainer in (whole, constant):
        trainer.out.mkdir(exist_ok=True)
        trainer.fit()
    steps = whole.position.step
    assert steps == 12
    assert seen.names == ["mxfp4_all"] * 6 + ["bf16"] * 6
    assert weights(whole) != weights(constant)
    out = tmp_path / "b"
    out.mkdir()
    with pytest.raises(Interrupted):
        Trainer(config, out, callbacks=[InterruptAt(stop), SaveCheckpoint()]).fit()
    resumed = Trainer(config, out)
    resumed.load(out / LAST)
    assert resumed.quant.recipe.name == ("bf16" if stop > 6 else "mxfp4_all")
    resumed.fit()
    assert weights(resumed) == weights(whole)


def test_a_switch_is_all_or_nothing() -> None:
    from dataclasses import replace

    from extensor.quant.recipe import LayerRecipe, Rule, SavedRule

    model = nn.Sequential(nn.Linear(32, 32, rng=0))
    state = nn.apply_recipe(model, "mxfp4_all")
    before = state.layers["0"].layer
    for change in (
        {"rules": (Rule("nowhere.*", LayerRecipe.uniform("bfloat16")),)},
        {"saved": (SavedRule("nowhere.*", "mxfp8"),)},
    ):
        with pytest.raises(ValueError, match="matches no"):
            nn.switch_recipe(model, state, replace(RECIPES["bf16"], **change))
        assert state.recipe.name == "mxfp4_all" and state.layers["0"].layer is before
    assert not nn.switch_recipe(model, state, RECIPES["mxfp4_all"])
