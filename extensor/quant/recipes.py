"""The table of recipes: published ones, baselines, and ablations that change one thing.

Sources: arXiv 2506.08027 (mxfp8_nvidia), 2502.20586 (mxfp4_tseng), 2509.25149
(nvfp4_nvidia), 2512.02010 (nvfp4_4over6), 2412.19437 (fp8_block), 2505.14669 (quartet), 2601.22813
(quartet2), 2605.09825 (mxfp4_hadamard).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from extensor.errors import Rows, unknown_name
from extensor.quant.recipe import FloatName, Gemm, LayerRecipe, Recipe, Rule
from extensor.quant.recipe_file import MOST_BYTES, parse_recipe
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.schema import printable

__all__ = [
    "ALIASES", "FILE_SUFFIX", "FP4_RECIPE", "RECIPES", "get_recipe", "parse_named", "read_recipe",
    "with_rules",
]  # fmt: skip

FILE_SUFFIX = ".toml"
"""What the name of a recipe's file ends in."""

FP4_RECIPE = "mxfp4"
"""What training in FP4 begins with."""


def _uniform(dtype: FloatName) -> LayerRecipe:
    return LayerRecipe.uniform(dtype)


_BF16 = _uniform("bfloat16")
_FIRST, _LAST = Rule("@first", _BF16), Rule("@last", _BF16)
_LANGUAGE_ENDS = (Rule("@embedding", _BF16), Rule("@head", _BF16))
_ENDS = (_FIRST, _LAST, *_LANGUAGE_ENDS)


def _layer(x: QuantSpec, w: QuantSpec, g: QuantSpec) -> LayerRecipe:
    """One spec for each of x, w and g, the same in every GEMM."""
    return LayerRecipe(Gemm(x, w), Gemm(g, w), Gemm(g, x))


def _mx(name: str, rule: str, block: int = 32) -> QuantSpec:
    return QuantSpec(name, scale_rule=rule, tile=(1, block))


def _mx_layer(
    x: str, g: str, rule: str, block: int = 32, stochastic_gradients: bool = False
) -> LayerRecipe:
    gradient = _mx(g, rule, block)
    if stochastic_gradients:
        gradient = gradient.replace(rounding="stochastic")
    return _layer(_mx(x, rule, block), _mx(x, rule, block), gradient)


def _mxfp4(rule: str = "rceil", block: int = 32, stochastic: bool = True) -> LayerRecipe:
    return _mx_layer("mxfp4", "mxfp4", rule, block, stochastic)


def _tseng() -> LayerRecipe:
    operand = QuantSpec(
        "mxfp4",
        scale_rule="floor",
        rounding="stochastic",
        transform=Hadamard(64, "per_step"),
        element_scale=0.75,
    )
    backward = Gemm(operand, operand, output_scale=16 / 9)
    return LayerRecipe(Gemm("bfloat16", "bfloat16"), backward, backward)


def _nvfp4(rule: str, form: str = "nvfp4") -> LayerRecipe:
    x = QuantSpec(form, scale_rule=rule)
    w = x.replace(tile=(16, 16))
    g = QuantSpec(form, rounding="stochastic")
    rotated = Hadamard(16, "fixed")
    wgrad = Gemm(g.replace(transform=rotated), x.replace(transform=rotated))
    return LayerRecipe(Gemm(x, w), Gemm(g, w), wgrad)


def _quartet() -> LayerRecipe:
    x = QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32, "none"))
    g = QuantSpec(
        "mxfp4",
        scale_rule="floor",
        rounding="stochastic",
        transform=Hadamard(32, "per_step"),
        element_scale=0.75,
    )
    backward = Gemm(g, g, output_scale=16 / 9)
    return LayerRecipe(Gemm(x, x), backward, backward, clip_gradient=True, requantize=True)


def _quartet2(rule: str) -> LayerRecipe:
    x = QuantSpec("nvfp4", scale_rule=rule)
    g = QuantSpec("nvfp4", rounding="stochastic", transform=Hadamard(128, "per_step"), eden=True)
    return LayerRecipe(Gemm(x, x), Gemm(g, g), Gemm(g, g), requantize=True)


def _wgrad_hadamard(signs: Literal["none", "random", "per_step"], stochastic: bool) -> LayerRecipe:
    """MXFP4 in all slots, a Hadamard-32 transform in wgrad alone."""
    x = _mx("mxfp4", "rceil")
    g = x.replace(rounding="stochastic") if stochastic else x
    rotated = Hadamard(32, signs)
    wgrad = Gemm(g.replace(transform=rotated), x.replace(transform=rotated))
    return LayerRecipe(Gemm(x, x), Gemm(g, x), wgrad)


def _fp8_block() -> LayerRecipe:
    x = QuantSpec("fp8_e4m3", tile=(1, 128))
    return _layer(x, x.replace(tile=(128, 128)), x)


_INT8 = QuantSpec("int8", tile="channel")
_SR_NVFP4 = QuantSpec("nvfp4", rounding="stochastic")
_NVFP4_STOCHASTIC = Gemm(_SR_NVFP4, _SR_NVFP4)

_ROWS = (
    Recipe("fp32", "float32 everywhere: the baseline", _uniform("float32")),
    Recipe("bf16", "operands rounded to bfloat16, products summed in float32", _BF16),
    Recipe(
        "mxfp8_nvidia",
        "MXFP8 E4M3 in all six slots, rceil scales (arXiv 2506.08027)",
        _mx_layer("mxfp8_e4m3", "mxfp8_e4m3", "rceil"),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "mxfp8_ocp",
        "mxfp8_nvidia with the OCP floor scales, for contrast",
        _mx_layer("mxfp8_e4m3", "mxfp8_e4m3", "floor"),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "mxfp8_e5m2g",
        "mxfp8_nvidia with E5M2 gradients",
        _mx_layer("mxfp8_e4m3", "mxfp8_e5m2", "rceil"),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "mxfp8_rebased",
        "mxfp8_nvidia rebased to one scale for each 128x128 tile, which FP8 tensor cores multiply",
        _mx_layer("mxfp8_e4m3", "mxfp8_e4m3", "rceil").rebased(),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "mxfp6",
        "MXFP6: E2M3 activations and weights, E3M2 gradients, rceil scales",
        _mx_layer("mxfp6_e2m3", "mxfp6_e3m2", "rceil"),
    ),
    Recipe("mxint8", "MXINT8 in all six slots", _mx_layer("mxint8", "mxint8", "rceil")),
    Recipe(
        "fp8_tensor",
        "one float32 scale per tensor: E4M3 activations and weights, E5M2 gradients",
        _layer(QuantSpec("fp8_e4m3"), QuantSpec("fp8_e4m3"), QuantSpec("fp8_e5m2")),
    ),
    Recipe("fp8_block", "E4M3, 1x128 activations and gradients, 128x128 weights", _fp8_block()),
    Recipe(
        "int8",
        "INT8 per channel, stochastic gradients",
        _layer(_INT8, _INT8, _INT8.replace(rounding="stochastic")),
    ),
    Recipe(
        "mxfp4",
        "FP4 weights, activations and gradients: rceil, stochastic gradients, ends in bf16",
        _mxfp4(),
        _ENDS,
    ),
    Recipe("mxfp4_all", "mxfp4 in every layer, first and last included", _mxfp4()),
    Recipe("mxfp4_all_floor", "mxfp4_all with floor scales", _mxfp4("floor")),
    Recipe(
        "mxfp4_tseng",
        "bf16 forward; MXFP4 backward, Hadamard-64, stochastic, scaled by 3/4 (arXiv 2502.20586)",
        _tseng(),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "nvfp4_nvidia",
        "NVFP4: 16x16 weights, stochastic gradients, Hadamard-16 wgrad (arXiv 2509.25149)",
        _nvfp4("amax"),
        _ENDS,
    ),
    Recipe(
        "nvfp4_4over6",
        "nvfp4_nvidia choosing 6 or 4 as each block's top value (arXiv 2512.02010)",
        _nvfp4("four_over_six"),
        _ENDS,
    ),
    Recipe(
        "nvfp4_fp8exact",
        "nvfp4_nvidia with block scales that FP8 multiplies exactly, by least squared error",
        _nvfp4("least_error", "nvfp4_fp8exact"),
        _ENDS,
    ),
    Recipe(
        "quartet",
        "MXFP4: Hadamard-32 and QuEST clipping forward, stochastic backward (arXiv 2505.14669)",
        _quartet(),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "quartet2",
        "NVFP4: 1x16 forward, MS-EDEN on Hadamard-128 backward (arXiv 2601.22813)",
        _quartet2("amax"),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "quartet2_4over6",
        "quartet2 choosing 6 or 4 as each forward block's top value",
        _quartet2("four_over_six"),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "mxfp4_hadamard",
        "MXFP4, nearest rounding, a deterministic Hadamard-32 in wgrad (arXiv 2605.09825)",
        _wgrad_hadamard("none", stochastic=False),
        _ENDS,
    ),
    Recipe(
        "mxfp4_hadamard_random",
        "mxfp4_hadamard with random signs and stochastic gradients",
        _wgrad_hadamard("random", stochastic=True),
        _ENDS,
    ),
    Recipe(
        "mxfp4_hadamard_per_step",
        "mxfp4_hadamard_random with signs drawn in each step",
        _wgrad_hadamard("per_step", stochastic=True),
        _ENDS,
    ),
    Recipe(
        "nvfp4_forward",
        "NVFP4 1x16 in the forward GEMM alone, gradients in bf16",
        LayerRecipe(Gemm(QuantSpec("nvfp4"), QuantSpec("nvfp4")), _BF16.dgrad, _BF16.wgrad),
        _LANGUAGE_ENDS,
    ),
    Recipe(
        "nvfp4_backward",
        "NVFP4 1x16, stochastic, in both backward GEMMs alone, forward in bf16",
        LayerRecipe(_BF16.fprop, _NVFP4_STOCHASTIC, _NVFP4_STOCHASTIC),
        _LANGUAGE_ENDS,
    ),
    # Ablations of mxfp4: each changes one thing.
    Recipe("mxfp4_nearest", "mxfp4 with nearest-even gradients", _mxfp4(stochastic=False), _ENDS),
    Recipe("mxfp4_floor", "mxfp4 with floor scales", _mxfp4("floor"), _ENDS),
    Recipe("mxfp4_even", "mxfp4 with even scales", _mxfp4("even"), _ENDS),
    Recipe("mxfp4_ceil", "mxfp4 with ceil scales", _mxfp4("ceil"), _ENDS),
    Recipe(
        "mxfp4_adaptive",
        "mxfp4_floor whose scaler may turn saturating tensors to rceil",
        _mxfp4("floor"),
        _ENDS,
        adaptive_scale_rule=True,
    ),
    Recipe(
        "mxfp4_last_bf16",
        "mxfp4 with only the last layer in bf16",
        _mxfp4(),
        (_LAST, *_LANGUAGE_ENDS),
    ),
    Recipe(
        "mxfp4_first_bf16",
        "mxfp4 with only the first layer in bf16",
        _mxfp4(),
        (_FIRST, *_LANGUAGE_ENDS),
    ),
    Recipe("mxfp4_block16", "mxfp4 in blocks of 16", _mxfp4(block=16), _ENDS),
    Recipe("mxfp4_block64", "mxfp4 in blocks of 64", _mxfp4(block=64), _ENDS),
    Recipe("mxfp4_block128", "mxfp4 in blocks of 128", _mxfp4(block=128), _ENDS),
    Recipe("mxfp4_one", "a direct cast to FP4, no scale: how it fails", _mxfp4("one"), _ENDS),
)

RECIPES: MappingProxyType[str, Recipe] = MappingProxyType(Rows("recipe", _ROWS))
"""Every recipe, by name."""

ALIASES = MappingProxyType({"mxfp8": "mxfp8_nvidia", "nvfp4": "nvfp4_nvidia"})
"""Short names for the recipe of record of a format."""


def get_recipe(name: str) -> Recipe:
    """A recipe by name or alias, or from a file.

    Args:
        name: in `RECIPES` or `ALIASES`, or a path that ends in ``.toml``.

    Returns:
        The recipe.

    Raises:
        ValueError: for a name that is neither, where the message lists similar ones; for a file
            that cannot be read, or describes no recipe.

    >>> from extensor.quant.recipes import get_recipe
    >>> get_recipe("mxfp8").name
    'mxfp8_nvidia'
    """
    if name.endswith(FILE_SUFFIX):
        return read_recipe(name)
    full = ALIASES.get(name, name)
    if full not in RECIPES:
        message = unknown_name("recipe", name, [*RECIPES, *ALIASES])
        if any(mark in name for mark in "/\\."):
            message += f"; a recipe of your own is a file that ends in {FILE_SUFFIX}"
        raise ValueError(message)
    return RECIPES[full]


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    r"""A recipe of your own, from a TOML file.

    Args:
        path: of the file. `docs/how-to/add-a-recipe.md` describes what stands in it;
            ``extensor recipe NAME`` prints any recipe in that form.

    Returns:
        The recipe, named after the file if the file names none. Files that it names are looked for
        beside it.

    Raises:
        ValueError: for a file that cannot be read, describes no recipe, or is its own parent; for
            another recipe under the name of one of the library.

    >>> import pathlib, tempfile
    >>> from extensor.quant.recipes import read_recipe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "wide.toml"
    ...     written = path.write_text('parent = "mxfp4"\n[layers]\nx = { block_size = 64 }')
    ...     read_recipe(path)
    Recipe(name='wide', doc='mxfp4 with changes', rules=['@first', '@last', '@embedding', '@head'])
    """
    return _read(Path(path), ())


def _read(path: Path, readers: tuple[str, ...]) -> Recipe:
    """The recipe in a file; ``readers``: real paths of the files that are read because of it."""

    def known(name: str) -> Recipe:
        if name.endswith(FILE_SUFFIX):
            return _read(path.parent / name, (*readers, real))
        return get_recipe(name)

    shown = printable(str(path))
    try:
        if (real := os.path.realpath(path)) in readers:
            raise ValueError("names itself, by way of its parent or a use; name another there")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        return parse_named(content.decode("utf-8-sig"), path.stem, known)  # Windows writes a BOM
    except OSError as error:
        raise ValueError(f"recipe {shown}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"recipe {shown}: expected text in UTF-8, got: {error}; save it as UTF-8 (in "
            "PowerShell: extensor recipe NAME | Out-File -Encoding utf8 FILE)"
        ) from None
    except ValueError as error:
        raise ValueError(f"recipe {shown}: {printable(str(error))}") from None


def parse_named(text: str, name: str, known: Callable[[str], Recipe] = get_recipe) -> Recipe:
    """A recipe from TOML whose name no recipe of the library has, unless it is the same.

    Args:
        text: as in a recipe's file.
        name: the recipe's name where the text gives none.
        known: gives the recipes that the text names.

    Returns:
        The recipe.

    Raises:
        ValueError: for what is no such text, or for such a name.

    >>> from extensor.quant.recipes import parse_named
    >>> parse_named('parent = "mxfp4_all"', "mine").layers == et.RECIPES["mxfp4_all"].layers
    True
    """
    recipe = parse_recipe(text, name, known)
    if not re.fullmatch(r"[\w.+-]+", recipe.name):
        raise ValueError(
            f"name: expected letters, digits, '_', '.', '+' and '-', got {recipe.name!r}; give one "
            "in the file, as in name = 'mine'"
        )
    if recipe.name in ALIASES or RECIPES.get(recipe.name, recipe) != recipe:
        raise ValueError(
            f"name: {recipe.name!r} is another recipe of the library; the way out: a name of its "
            f"own, as in name = '{recipe.name}_mine'"
        )
    return recipe


def with_rules(
    caller: str, recipe: Recipe | str, rules: Mapping[str, str | LayerRecipe] | None
) -> Recipe:
    """A recipe with rules before its own.

    Args:
        caller: names the function in errors.
        recipe: a recipe or the name of one.
        rules: by glob on a layer's path or by role, a `LayerRecipe` or the name of a recipe, whose
            own rules do not count.

    Returns:
        The recipe.

    Raises:
        TypeError: for what is no recipe, or no rule.
        ValueError: for an unknown name or role.

    >>> from extensor.quant.recipes import with_rules
    >>> [rule.match for rule in with_rules("f", "mxfp4", {"blocks.0.*": "mxfp8"}).rules][:2]
    ['blocks.0.*', '@first']
    """
    if not isinstance(recipe, (Recipe, str)):
        raise TypeError(
            f"{caller}: expected a Recipe or the name of one, got {recipe!r}; names: "
            f"{', '.join(RECIPES)}; by path: rules={{'blocks.*': 'mxfp4'}}"
        )
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    added = []
    given: Any = {} if rules is None else rules
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{caller}: rules: expected a dict such as {{'blocks.*': 'mxfp4'}}, got "
            f"{type(given).__name__}"
        )
    for match, use in given.items():
        if not isinstance(use, (str, LayerRecipe)):
            raise TypeError(
                f"{caller}: rule {match!r}: expected the name of a recipe or a LayerRecipe, got "
                f"{type(use).__name__}"
            )
        added.append(Rule(match, get_recipe(use).layers if isinstance(use, str) else use))
    return replace(recipe, rules=(*added, *recipe.rules)) if added else recipe
