"""What one run is: a frozen record that checks itself when it is made, and that TOML can hold.

`RunConfig` adds the model, the recipe and the seed to `Settings`. Where a run lies (`--out`) is no
part of what it is, so a finished run may be moved.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from extensor.quant.recipe import OperandRule, Recipe
from extensor.quant.recipe_schedule import RecipeSchedule
from extensor.quant.saved import parse_saved

from .recipe_text import collect, files_named, lookup
from .settings import ACTIVATIONS, SEED, Settings, setting

__all__ = ["RunConfig"]

_OPERAND = re.compile(r"([^/=\s]+)/([^/=\s]+)=([^=\s]+)")
"""A part of ``--operands``: layers, slots, the recipe that has them."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """One training run of a model, a row of `RUNS`."""

    model: str
    recipe: str = setting(
        "Recipe (listed above), or a file of your own that ends in .toml (extensor recipe prints "
        "one): the precision of each GEMM operand. Several, each with its first step or per cent "
        "of all steps, make a schedule: mxfp4,bf16@90%.",
        "fp32",
    )
    operands: str = setting(
        "Single operands of layers, each as another recipe has it, separated by commas: "
        "LAYER/SLOT=RECIPE with globs, as in blocks.*/fprop.x=mxfp8,@head/*=mxfp6. "
        "`extensor advise RUN` writes such a list.",
        "",
    )
    seed: int = setting(
        "Seed of the weights, the order of the images and the stochastic rounding.", 0, check=SEED
    )
    recipe_text: str = ""
    """The files that ``recipe`` and ``operands`` name, read when the run is first made."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model(self.model)
        text = collect(files_named(self.recipe, self.operands), self.recipe_text)
        object.__setattr__(self, "recipe_text", text)
        _ = self.resolved_recipe

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The `Recipe` that the run begins with."""
        return self.recipe_at(0, 1)

    @cached_property
    def recipe_schedule(self) -> RecipeSchedule:
        """Which recipe the run trains with from which step on."""
        return RecipeSchedule.parse(self.recipe, lookup(self.recipe_text))

    def recipe_at(self, step: int, steps: int) -> Recipe:
        """The recipe of a step of a run of so many."""
        recipe = self.recipe_schedule.at(step, steps)
        changes: dict[str, Any] = {}
        if self.saved != "float32":
            changes["saved"] = parse_saved(self.saved)
        if self.operands:
            changes["operands"] = _operand_rules(self.operands, lookup(self.recipe_text))
        if (activations := ACTIVATIONS[self.activations]) is not None:
            changes["activations"] = activations
        return dataclasses.replace(recipe, **changes) if changes else recipe

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """The settings whose values are not equal, with this run's and the other's."""
        names = [field.name for field in dataclasses.fields(self)]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def sharded_checkpoint(self) -> bool:
        """Whether ranks keep something of their own, which each writes: a folder, not a file."""
        return self.shard != "none" or self.error_feedback

    @property
    def label(self) -> str:
        """Short name of the run."""
        return f"{self.model}-{self.dataset}-{self.recipe_label}-s{self.seed}"

    @property
    def recipe_label(self) -> str:
        """The recipe, or the schedule, as part of a file's name."""
        known = lookup(self.recipe_text)
        names = {file: known(file).name for file in files_named(self.recipe)}
        words = re.split("([,@])", self.recipe)
        label = "".join(names.get(word.strip(), word) for word in words)
        return label.replace(",", "+").replace("%", "pc").replace(" ", "")

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)


def _operand_rules(text: str, known: Callable[[str], Recipe]) -> tuple[OperandRule, ...]:
    """What ``--operands`` says, of recipes that ``known`` gives by name.

    Raises:
        ValueError: for anything else than LAYER/SLOT=RECIPE, or an unknown recipe.
    """
    rules = []
    for part in text.split(","):
        found = _OPERAND.fullmatch(part.strip())
        if found is None:
            raise ValueError(
                "--operands: expected LAYER/SLOT=RECIPE, several separated by commas, as in "
                f"blocks.*/fprop.x=mxfp8, got {part.strip()!r}"
            )
        rules.append(OperandRule(found[1], found[2], known(found[3]).layers))
    return tuple(rules)
