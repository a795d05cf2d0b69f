"""Recipes as TOML: a recipe's text, and the recipe that a text describes.

A file may name a ``parent`` and then holds only what differs from it. `docs/how-to/add-a-recipe.md`
describes the keys.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, NotRequired, TypedDict

from extensor.errors import unknown_name
from extensor.quant.recipe import (
    FLOAT_NAMES,
    SLOTS,
    Gemm,
    LayerRecipe,
    OperandRule,
    OperandSpec,
    Recipe,
    Rule,
    SavedRule,
)
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.schema import SchemaError, check, parse_toml, toml_string

__all__ = ["parse_recipe", "recipe_toml"]

MOST_BYTES = 1 << 20
"""A recipe's text is refused above this size."""

_GEMMS = {"fprop": "xw", "dgrad": "gw", "wgrad": "gx"}
"""The operands of each GEMM, in the order of `Gemm.a` and `Gemm.b`."""
_FLAGS = ("clip_gradient", "requantize")
_FIELDS = [field.name for field in dataclasses.fields(QuantSpec) if field.name != "axis"]
_TRANSFORM = ("size", "signs", "seed")

_Operand = str | dict[str, Any]


class _Rule(TypedDict):
    match: str
    use: str | dict[str, Any]


class _OperandRule(TypedDict):
    match: str
    slots: str
    use: str | dict[str, Any]


class _Saved(TypedDict):
    use: _Operand
    match: NotRequired[str]
    slot: NotRequired[str]


class _Content(TypedDict):
    parent: NotRequired[str]
    name: NotRequired[str]
    doc: NotRequired[str]
    layers: NotRequired[dict[str, Any]]
    rules: NotRequired[list[_Rule]]
    operands: NotRequired[list[_OperandRule]]
    saved: NotRequired[list[_Saved]]
    adaptive_scale_rule: NotRequired[bool]
    activations: NotRequired[str]
    saved_input: NotRequired[str]


def parse_recipe(text: str, name: str, known: Callable[[str], Recipe]) -> Recipe:
    r"""The recipe that a text describes.

    Args:
        text: TOML.
        name: the recipe's name where the text gives none.
        known: gives a recipe by name: the parent, and those that rules name.

    Returns:
        The recipe.

    Raises:
        ValueError: for what is no such text; the message says where.

    >>> from extensor.quant.recipe_file import parse_recipe
    >>> wide = parse_recipe(
    ...     'parent = "mxfp4"\n[layers]\nx = { block_size = 64 }', "wide", et.RECIPES.__getitem__
    ... )
    >>> wide.layers.slot("wgrad.x").tile, wide.layers.slot("fprop.w").tile
    ((1, 64), (1, 32))
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"expected a recipe of at most {MOST_BYTES:,} bytes, got {len(text):,}")
    table = parse_toml(text)
    _only(table, list(_Content.__annotations__), "")
    try:
        content: _Content = check(table, _Content)
    except SchemaError as error:
        raise ValueError(str(error)) from None
    parent = known(content["parent"]) if "parent" in content else None
    if parent is None and "layers" not in content:
        raise ValueError("expected a parent (a recipe's name) or a table [layers], got neither")
    changes: dict[str, Any] = {"name": content.get("name", name)}
    changes |= {key: value for key, value in content.items() if key in ("doc", *_PLAIN)}
    layers = _layers(content.get("layers", {}), parent.layers if parent else None, "layers")
    if "rules" in content:
        changes["rules"] = tuple(
            Rule(rule["match"], _use(rule["use"], known, f"rules[{n}].use"))
            for n, rule in enumerate(_each(content["rules"], _Rule, "rules"))
        )
    if "operands" in content:
        changes["operands"] = tuple(
            OperandRule(
                rule["match"], rule["slots"], _use(rule["use"], known, f"operands[{n}].use")
            )
            for n, rule in enumerate(_each(content["operands"], _OperandRule, "operands"))
        )
    if "saved" in content:
        changes["saved"] = tuple(
            _saved(rule, f"saved[{n}]")
            for n, rule in enumerate(_each(content["saved"], _Saved, "saved"))
        )
    if parent is not None:
        changes.setdefault("doc", f"{parent.name} with changes")
        return dataclasses.replace(parent, layers=layers, **changes)
    return Recipe(**{"doc": "", **changes}, layers=layers)


_PLAIN = ("adaptive_scale_rule", "activations", "saved_input")


def _each(rows: list[Any], kind: Any, at: str) -> Iterator[Any]:
    for number, row in enumerate(rows):
        _only(row, list(kind.__annotations__), f"{at}[{number}]")
        yield row


def _only(table: Mapping[str, Any], names: list[str], at: str) -> None:
    """Refuse keys that have no meaning."""
    for key in table:
        if key not in names:
            _fail(at, unknown_name("key", key, names))


def _fail(at: str, text: object) -> NoReturn:
    raise ValueError(f"{at}: {text}" if at else str(text))


def _use(use: str | dict[str, Any], known: Callable[[str], Recipe], at: str) -> LayerRecipe:
    """What a rule gives: a float dtype in all slots, a recipe's layers, or a table of its own."""
    if isinstance(use, dict):
        return _layers(use, None, at)
    for name in FLOAT_NAMES:
        if use == name:
            return LayerRecipe.uniform(name)
    return known(use).layers


def _saved(rule: _Saved, at: str) -> SavedRule:
    use = rule["use"]
    spec = use if isinstance(use, str) else _operand(use, None, f"{at}.use")
    return SavedRule(rule.get("match", "*"), spec, rule.get("slot", "*"))


def _layers(table: dict[str, Any], parent: LayerRecipe | None, at: str) -> LayerRecipe:
    """The six operands: ``x``, ``w`` and ``g`` for both of their GEMMs, then each GEMM's own."""
    _only(table, ["x", "w", "g", *_GEMMS, *_FLAGS], at)
    made: dict[str, Gemm] = {}
    for gemm, sides in _GEMMS.items():
        own = table.get(gemm, {})
        if not isinstance(own, dict):
            _fail(f"{at}.{gemm}", f"expected a table of operands, got {own!r}")
        _only(own, [*sides, "output_scale"], f"{at}.{gemm}")
        old: Gemm | None = getattr(parent, gemm) if parent else None
        pair: list[OperandSpec] = []
        for side, letter in zip("ab", sides, strict=True):
            operand = getattr(old, side) if old else None
            for where, given in ((at, table), (f"{at}.{gemm}", own)):
                if letter in given:
                    operand = _operand(given[letter], operand, f"{where}.{letter}")
            if operand is None:
                _fail(
                    f"{at}.{gemm}.{letter}",
                    f"no operand: give {letter} in [{at}] or in [{at}.{gemm}]",
                )
            pair.append(operand)
        scale = own.get("output_scale", old.output_scale if old else 1.0)
        if type(scale) not in (int, float) or not abs(scale) <= sys.float_info.max:
            _fail(f"{at}.{gemm}.output_scale", f"expected a finite number, got {scale!r}")
        try:
            made[gemm] = Gemm(pair[0], pair[1], float(scale))
        except ValueError as error:
            _fail(f"{at}.{gemm}", error)
    flags = {name: table.get(name, getattr(parent, name, False)) for name in _FLAGS}
    for name, value in flags.items():
        if type(value) is not bool:
            _fail(f"{at}.{name}", f"expected true or false, got {value!r}")
    try:
        return LayerRecipe(made["fprop"], made["dgrad"], made["wgrad"], **flags)
    except ValueError as error:
        _fail(at, error)


def _operand(value: Any, parent: OperandSpec | None, at: str) -> OperandSpec:
    """An operand: a table with a format is one of its own, one without changes the parent's."""
    if isinstance(value, str):
        if value not in FLOAT_NAMES:
            _fail(at, unknown_name("float dtype", value, FLOAT_NAMES))
        return value
    if not isinstance(value, dict):
        _fail(
            at, f"expected a table such as {{ format = 'mxfp4' }}, or a float dtype, got {value!r}"
        )
    fields = dict(value)
    _only(fields, [*_FIELDS, "block_size"], at)
    if isinstance(fields.get("transform"), dict):
        _only(fields["transform"], list(_TRANSFORM), f"{at}.transform")
    if "tile" in fields and "block_size" in fields:
        _fail(at, "expected tile or block_size, got both")
    if "block_size" in fields:
        fields["tile"] = [1, fields.pop("block_size")]
    if "format" not in fields:
        if not isinstance(parent, QuantSpec):
            _fail(at, "expected a format, as in { format = 'mxfp4' }: no quantized one to change")
        old = {name: getattr(parent, name) for name in _FIELDS}
        fields = {**old, **fields}
    try:
        return QuantSpec.from_dict(fields)
    except (TypeError, ValueError) as error:
        _fail(at, error)


def recipe_toml(recipe: Recipe) -> str:
    """A recipe as TOML that names no parent, so that it says all.

    Args:
        recipe: any; a name or a line that is empty is left out.

    Returns:
        Text from which `parse_recipe` makes an equal recipe.

    >>> from extensor.quant.recipe_file import recipe_toml
    >>> print(recipe_toml(et.RECIPES["mxfp6"]))
    name = "mxfp6"
    doc = "MXFP6: E2M3 activations and weights, E3M2 gradients, rceil scales"
    <BLANKLINE>
    [layers]
    x = { format = "mxfp6_e2m3", scale_rule = "rceil", tile = [1, 32] }
    w = { format = "mxfp6_e2m3", scale_rule = "rceil", tile = [1, 32] }
    g = { format = "mxfp6_e3m2", scale_rule = "rceil", tile = [1, 32] }
    <BLANKLINE>
    """
    texts = {"name": recipe.name, "doc": recipe.doc}
    lines = [f"{key} = {_value(text)}" for key, text in texts.items() if text]
    for field in dataclasses.fields(Recipe):
        value = getattr(recipe, field.name)
        if field.name in _PLAIN and value != field.default:
            lines.append(f"{field.name} = {_value(value)}")
    lines += _layer_lines(recipe.layers, "layers")
    for rule in recipe.rules:
        lines += ["", "[[rules]]", f"match = {_value(rule.match)}"]
        lines += _use_lines(rule.use, "rules.use")
    for change in recipe.operands:
        lines += ["", "[[operands]]"]
        lines += [f"match = {_value(change.match)}", f"slots = {_value(change.slots)}"]
        lines += _use_lines(change.use, "operands.use")
    for kept in recipe.saved:
        lines += ["", "[[saved]]", f"match = {_value(kept.match)}", f"slot = {_value(kept.slot)}"]
        lines += [f"use = {_value(kept.use)}"]
    return "\n".join(lines) + "\n"


def _use_lines(use: LayerRecipe, at: str) -> list[str]:
    for name in FLOAT_NAMES:
        if use == LayerRecipe.uniform(name):
            return [f"use = {_value(name)}"]
    return _layer_lines(use, at)


def _layer_lines(layers: LayerRecipe, at: str) -> list[str]:
    """The tables of a `LayerRecipe`: an operand that is the same in both GEMMs stands once."""
    where = {letter: [s for s in SLOTS if s.endswith(letter)] for letter in "xwg"}
    shared = {
        letter: layers.slot(slots[0])
        for letter, slots in where.items()
        if layers.slot(slots[0]) == layers.slot(slots[1])
    }
    lines = ["", f"[{at}]"]
    lines += [f"{letter} = {_value(operand)}" for letter, operand in shared.items()]
    lines += [f"{name} = true" for name in _FLAGS if getattr(layers, name)]
    for gemm, sides in _GEMMS.items():
        own = [
            f"{letter} = {_value(layers.slot(f'{gemm}.{letter}'))}"
            for letter in sides
            if letter not in shared
        ]
        if (scale := getattr(layers, gemm).output_scale) != 1.0:
            own.append(f"output_scale = {scale!r}")
        if own:
            lines += ["", f"[{at}.{gemm}]", *own]
    return lines


def _value(value: Any) -> str:
    """A value in TOML; of a spec and a transform what differs from the defaults, and what it is."""
    if isinstance(value, QuantSpec | Hadamard):
        names, always = (
            (_FIELDS, "format") if isinstance(value, QuantSpec) else (_TRANSFORM, "size")
        )
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
        held = {name: getattr(value, name) for name in names}
        inside = [f"{n} = {_value(v)}" for n, v in held.items() if n == always or v != defaults[n]]
        return "{ " + ", ".join(inside) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return toml_string(value)
    return json.dumps(value) if isinstance(value, bool) else repr(value)
