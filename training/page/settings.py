"""What was asked for: the recipe, slot by slot, and every setting; the versions that ran it."""

from __future__ import annotations

import dataclasses
from html import escape

from extensor.quant.recipe import SLOTS, LayerRecipe
from extensor.quant.recipes import get_recipe
from extensor.quant.spec import QuantSpec
from training.page.cells import table
from training.page.facts import Facts

__all__ = ["recipe", "settings"]


def recipe(name: str, activations: str | None) -> str:
    row = get_recipe(name)
    parts = [f"<p><b>{escape(row.name)}</b>: {escape(row.doc)}</p>"]
    parts.append(f"<p>results of layers: {activations or row.activations}</p>")
    parts.append(_slots("every other layer" if row.rules else "every layer", row.layers))
    parts += [_slots(rule.match, rule.use) for rule in row.rules]
    return "".join(parts)


def _slots(title: str, layer: LayerRecipe) -> str:
    plain = {layer.slot(slot) for slot in SLOTS}
    if len(plain) == 1 and isinstance(next(iter(plain)), str):
        only = escape(str(next(iter(plain))))
        return f"<p><code>{escape(title)}</code>: {only} in all six slots</p>"
    rows: list[tuple[str, ...]] = []
    for slot in SLOTS:
        operand = layer.slot(slot)
        if isinstance(operand, QuantSpec):
            spec = operand.resolve(2)
            rows.append((slot, spec.format, str(spec.tile), spec.rule, spec.rounding, _rest(spec)))
        else:
            rows.append((slot, operand, "", "", "", ""))
    cells = [[f"<code>{escape(r[0])}</code>", *map(escape, r[1:])] for r in rows]
    head = ("slot", "format", "block", "scale rule", "rounding", "further")
    return f"<p><code>{escape(title)}</code></p>" + table(head, cells)


def _short(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _rest(spec: QuantSpec) -> str:
    """The fields that are not the defaults."""
    shown = ("format", "axis", "tile", "scale_rule", "rounding")
    default = {f.name: f.default for f in dataclasses.fields(QuantSpec)}
    values = {name: getattr(spec, name) for name in default if name not in shown}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != default[name])


def settings(facts: Facts) -> str:
    config = [(k, str(v)) for k, v in facts.config.as_dict().items()]
    groups = [("settings", config)]
    if facts.result is not None:
        groups.append(("versions", [(k, str(v)) for k, v in facts.result["versions"].items()]))
        keys = ("steps", "skipped_steps", "best_epoch", "stopped_early", "peak_rss_mb", "device")
        groups.append(("run", [(k, _short(facts.result.get(k))) for k in keys]))
    tables = "".join(
        f"<div><h3>{escape(title)}</h3>"
        + "".join(
            f"<dl><dt>{escape(name)}</dt><dd>{escape(value)}</dd></dl>" for name, value in rows
        )
        + "</div>"
        for title, rows in groups
    )
    return f'<div class="settings">{tables}</div>'
