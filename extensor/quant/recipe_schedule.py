"""A schedule of recipes: which one a run trains with from which step on.

A run may spend its last steps in higher precision, so that the weights settle where their gradient
is exact (Quartet, arXiv 2505.14669, and NVIDIA's NVFP4 recipe, arXiv 2509.25149, appendix, switch
so near the end), or begin in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from extensor.quant.recipe import Recipe
from extensor.quant.recipes import get_recipe

__all__ = ["Phase", "RecipeSchedule"]

_PHASE = re.compile(r"(?P<name>[^,@]*[^,@\s])(?:@(?P<start>[0-9]+(?:\.[0-9]+)?)(?P<unit>%?))?")


@dataclass(frozen=True)
class Phase:
    """A recipe, and where it begins.

    Attributes:
        recipe: from that step on.
        start: the first step, from 0; or, under ``percent``, the share of all steps before it.
        percent: whether ``start`` is in per cent.

    >>> from extensor.quant.recipe_schedule import Phase
    >>> Phase(et.RECIPES["bf16"], 90, percent=True).first_step(1000)
    900
    """

    recipe: Recipe
    start: Fraction | int = 0
    percent: bool = False

    def first_step(self, steps: int) -> int:
        """The first step of a run of so many: the least number that is not before the start.

        Args:
            steps: of the whole run.

        Returns:
            A step from 0 on.

        >>> from extensor.quant.recipe_schedule import Phase
        >>> Phase(et.RECIPES["bf16"], 50, percent=True).first_step(5)
        3
        """
        start = Fraction(self.start) * steps / 100 if self.percent else Fraction(self.start)
        return -(-start.numerator // start.denominator)


@dataclass(frozen=True)
class RecipeSchedule:
    """Recipes in the order in which a run trains with them.

    Attributes:
        phases: the first begins at step 0; starts ascend.

    Raises:
        ValueError: without a phase, for a first one that begins later, or starts that do not
            ascend as far as they can be compared.

    >>> from extensor.quant.recipe_schedule import RecipeSchedule
    >>> schedule = RecipeSchedule.parse("mxfp4,bf16@90%")
    >>> [schedule.at(step, steps=100).name for step in (0, 89, 90)]
    ['mxfp4', 'mxfp4', 'bf16']
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not self.phases or self.phases[0].start != 0:
            raise ValueError(
                "recipe schedule: expected a recipe from step 0 on, then others with a start, as "
                f"in 'mxfp4,bf16@90%', got {[p.recipe.name for p in self.phases]}"
            )
        for before, after in zip(self.phases, self.phases[1:], strict=False):
            alike = before.percent == after.percent or before.start == 0
            if after.start == 0 or (alike and after.start <= before.start):
                raise ValueError(
                    f"recipe schedule: expected {after.recipe.name} to begin after "
                    f"{before.recipe.name}, got {before.start} and {after.start}"
                )

    @classmethod
    def parse(cls, text: str, known: Callable[[str], Recipe] = get_recipe) -> RecipeSchedule:
        """Read ``RECIPE[,RECIPE@START]...``: START is a step, or per cent of all steps with ``%``.

        Args:
            text: as in "mxfp4,bf16@90%" or "bf16,mxfp4@200,bf16@1800"; one name is a schedule too.
            known: gives a recipe by name.

        Returns:
            The schedule.

        Raises:
            ValueError: for anything else, or an unknown recipe.

        >>> from extensor.quant.recipe_schedule import RecipeSchedule
        >>> str(RecipeSchedule.parse("bf16, mxfp4@200"))
        'bf16,mxfp4@200'
        """
        phases: list[Phase] = []
        for part in text.split(","):
            found = _PHASE.fullmatch(part.strip())
            if found is None or (bool(phases) != (found["start"] is not None)):
                raise ValueError(
                    f"recipe: expected RECIPE[,RECIPE@START]..., START a step or per cent, as in "
                    f"'mxfp4,bf16@90%', got {text!r}"
                )
            start, percent = Fraction(found["start"] or 0), found["unit"] == "%"
            if (percent and start >= 100) or (not percent and start.denominator != 1):
                raise ValueError(
                    f"recipe: expected a whole step, or below 100%, as the start of "
                    f"{found['name']}, got {part.strip()!r}"
                )
            phases.append(Phase(known(found["name"]), start, percent))
        return cls(tuple(phases))

    def __str__(self) -> str:
        words = [self.phases[0].recipe.name]
        for phase in self.phases[1:]:
            number = f"{float(phase.start):g}" + ("%" if phase.percent else "")
            words.append(f"{phase.recipe.name}@{number}")
        return ",".join(words)

    def at(self, step: int, steps: int) -> Recipe:
        """The recipe of a step.

        Args:
            step: from 0.
            steps: of the whole run.

        Returns:
            The recipe of the last phase that has begun.

        >>> from extensor.quant.recipe_schedule import RecipeSchedule
        >>> RecipeSchedule.parse("bf16,mxfp4@200").at(200, steps=1000).name
        'mxfp4'
        """
        begun = [p for p in self.phases if p.first_step(steps) <= step]
        return begun[-1].recipe
