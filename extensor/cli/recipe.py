"""``extensor recipe``: training recipes as text to change, and side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated

from tyro.conf import Positional, arg

from extensor.cli.printing import show
from extensor.cli.sheet import CommandError, Sheet
from extensor.quant.recipe import SLOTS, LayerRecipe, Recipe, operand_text
from extensor.quant.recipe_file import recipe_toml
from extensor.quant.recipes import ALIASES, RECIPES, get_recipe

__all__ = ["recipe", "recipe_sheet"]

HEAD = """\
# The recipe {name} as a file of your own: change it, and give its path as --recipe.
# The file's name is the recipe's name. With `parent = "{name}"` a file needs to hold only what
# differs. Keys: docs/how-to/add-a-recipe.md.
"""


def recipe(names: Annotated[Positional[tuple[str, ...]], arg(metavar="RECIPE...")] = ()) -> None:
    """Print a recipe as a TOML file to change; or several of them side by side.

    `extensor recipe mxfp4 > mine.toml` begins a recipe of your own, which `--recipe mine.toml`
    trains with; `extensor recipe mxfp4 mine.toml` shows what differs. Without names it lists the
    recipes.

    Args:
        names: Names of recipes, or files that end in .toml.
    """
    try:
        found = [get_recipe(name) for name in names]
    except ValueError as error:
        raise CommandError(error) from None
    if not found:
        short = {full: alias for alias, full in ALIASES.items()}
        rows = [(name, short.get(name, ""), row.doc) for name, row in RECIPES.items()]
        show([Sheet("Recipes", ("recipe", "alias", ""), tuple(rows))])
    elif len(found) == 1:
        text = recipe_toml(dataclasses.replace(found[0], name=""))
        print(HEAD.format(name=names[0]) + text, end="")
    else:
        show([recipe_sheet(found)])


def recipe_sheet(recipes: Sequence[Recipe]) -> Sheet:
    """Operands, rules and settings of recipes; rows in which all agree come last."""
    columns = [dict(_facts(each)) for each in recipes]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [(key, *(column.get(key, "-") for column in columns)) for key in keys]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    return Sheet("Recipes side by side", ("", *(each.name for each in recipes)), tuple(rows))


def _facts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    yield from ((slot, operand_text(recipe.layers.slot(slot))) for slot in SLOTS)
    for gemm in ("fprop", "dgrad", "wgrad"):
        yield f"{gemm} output scale", f"{getattr(recipe.layers, gemm).output_scale:.6g}"
    for name in ("clip_gradient", "requantize"):
        yield name, str(getattr(recipe.layers, name)).lower()
    for rule in recipe.rules:
        yield f"rule {rule.match}", _brief(rule.use)
    for change in recipe.operands:
        yield f"operands {change.match} {change.slots}", _brief(change.use)
    for kept in recipe.saved:
        use = kept.use if isinstance(kept.use, str) else operand_text(kept.use)
        yield f"saved {kept.match} {kept.slot}", use
    yield "activations", recipe.activations
    yield "adaptive scale rule", str(recipe.adaptive_scale_rule).lower()
    yield "saved input", recipe.saved_input or "packed"


def _brief(layers: LayerRecipe) -> str:
    """One operand's text where all six are alike, else each GEMM's two."""
    texts = [operand_text(layers.slot(slot)) for slot in SLOTS]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{slot}: {text}" for slot, text in zip(SLOTS, texts, strict=True))
