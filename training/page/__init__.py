"""`extensor report RUN`: one page about a run that needs nothing but a browser.

What a run has not got yet is left out with a word on why. The page itself is page.html, a template.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from extensor.inspect.health import MANY_FLUSHED, MANY_REBASE_CHANGED, MANY_SATURATED
from extensor.quant.recipe import SLOTS, LayerRecipe
from extensor.quant.spec import QuantSpec

from ..callbacks.progress import percent
from ..runs import RUNS
from ..settings import ACTIVATIONS
from ..tasks import TASKS
from . import charts
from .facts import Facts, read_facts
from .template import render

__all__ = ["ReportArgs", "write_page"]

HOLDERS = 12
"""Of the memory's largest holders on the page."""


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Flags of `report`: the run."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, finished or not."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The page; by default report.html in the run's folder."""

    @property
    def path(self) -> Path:
        """Where the page goes."""
        return self.out or self.run / "report.html"


def write_page(args: ReportArgs) -> Path:
    """Write the page; returns its path.

    Raises:
        UsageError: if the folder holds no run, or its files cannot be read.
    """
    facts = read_facts(args.run)
    recipe = facts.config.resolved_recipe
    groups = [("every other layer" if recipe.rules else "every layer", recipe.layers)]
    groups += [(rule.match, rule.use) for rule in recipe.rules]
    page = render(
        **_head(facts),
        **_layers(facts),
        said=facts.answers,
        missing=facts.missing or "",
        curves=charts.curves(facts),
        operands=charts.operands(facts.histograms),
        telemetry=charts.telemetry(facts.telemetry),
        scales=charts.scales(facts.telemetry),
        recorder=_recorder(facts.telemetry),
        memory=charts.memory(facts.memory),
        holders=(facts.memory or {}).get("holders", [])[:HOLDERS],
        recipe=recipe,
        activations=ACTIVATIONS[facts.config.activations] or recipe.activations,
        recipe_slots=[(title, *_slots(layer)) for title, layer in groups],
        settings=_settings(facts),
        percent=percent,
    )
    args.path.write_text(page, encoding="utf-8")
    return args.path


def _head(facts: Facts) -> dict[str, Any]:
    """The title, the run's state and the most important figures."""
    config, result, task = facts.config, facts.result, TASKS[RUNS[facts.config.model].task]
    metric = task.metric
    state, kind = f"unfinished, {len(facts.epochs)} of {config.epochs} epochs", "wait"
    if result is not None:
        state, kind = ("diverged", "bad") if result["diverged"] else ("finished", "good")
    cards: list[tuple[str, str, str]] = []
    if facts.epochs:
        last = facts.epochs[-1]
        shown = metric.show(last[f"test_{metric.key}"]).removeprefix(f"{metric.key} ")
        note = f"after epoch {last['epoch']}"
        cards.append((f"test {metric.key}", shown.removeprefix("is "), note))
        if metric.key != "loss":
            cards.append(("test loss", _number(last["test_loss"]), "nats"))
        if last.get("test_perplexity") is not None:
            cards.append(("perplexity", _number(last["test_perplexity"]), "test"))
        seconds = sum(e["seconds"] for e in facts.epochs)
        cards.append(("training time", _duration(seconds), f"{last['step']:,} steps"))
        cards.append((f"{task.unit} a second", f"{last['per_second']:,.0f}", "last epoch"))
        if last["saturated"] is not None:
            cards.append(("saturated", percent(last["saturated"]), "of quantized values"))
            cards.append(("flushed to zero", percent(last["flushed"]), "of quantized values"))
    if result is not None:
        cards.append(("weights", f"{result['parameters']:,}", "trained"))
    doc = RUNS[config.model].doc
    return {
        "label": config.label,
        "doc": f"{doc}, on {config.dataset}, recipe {config.recipe}, seed {config.seed}",
        "state": state,
        "kind": kind,
        "alarm": (result or {}).get("diverged"),
        "cards": cards,
    }


def _layers(facts: Facts) -> dict[str, Any]:
    """Each layer beside float32, worst first, with the slots that the last epoch warns about."""
    alarms: dict[str, list[dict[str, Any]]] = {}
    for row in (facts.result or {}).get("health", []):
        if row["verdict"] != "ok":
            alarms.setdefault(row["layer"], []).append(row)
    inner = [row for row in facts.rows if row.layer != "(output)"]
    inner.sort(key=lambda row: math.inf if math.isnan(row.sqnr_db) else row.sqnr_db)
    rows = []
    for row in inner:
        found = sorted(alarms.get(row.layer, []), key=lambda s: SLOTS.index(s["slot"]))
        rows.append((row, [_alarm(slot) for slot in found]))
    return {
        "rows": rows,
        "many_flushed": MANY_FLUSHED,
        "many_saturated": MANY_SATURATED,
        "output": facts.rows[-1] if rows else None,
        "exact": all(row.sqnr_db == math.inf for row in inner),
    }


def _alarm(row: dict[str, Any]) -> str:
    """An operand and the shares of its values that are above their limits."""
    limits = (
        ("flushed", MANY_FLUSHED, "flushed"),
        ("saturated", MANY_SATURATED, "saturated"),
        ("rebase_changed", MANY_REBASE_CHANGED, "changed when rebased"),
    )
    over = [f"{percent(row[key])} {word}" for key, limit, word in limits if row[key] > limit]
    return f"{row['slot']}: {', '.join(over)}"


def _recorder(records: list[dict[str, Any]]) -> list[str]:
    """What telemetry says once: its cost, and where values first overflowed."""
    said = []
    shares = [r["recording_share"] for r in records if r.get("recording_share") is not None]
    if shares:
        said.append(f"Recording took {statistics.median(shares):.1%} of the training's time.")
    overflows = [r for r in records if "overflow" in r]
    if overflows:
        first = overflows[0]["overflow"]
        layer = f" of {first['layer']}" if first["layer"] else ""
        said.append(
            f"{len(overflows)} steps had values that were not finite, first in step "
            f"{overflows[0]['step']:,}: {first['where']}{layer}."
        )
    return said


def _slots(layer: LayerRecipe) -> tuple[str | None, list[tuple[str, ...]]]:
    """The dense format of all slots, or None and a row for each slot."""
    plain = {layer.slot(slot) for slot in SLOTS}
    if len(plain) == 1 and isinstance(only := next(iter(plain)), str):
        return only, []
    rows: list[tuple[str, ...]] = []
    for slot in SLOTS:
        operand = layer.slot(slot)
        if isinstance(operand, QuantSpec):
            spec = operand.resolve(2)
            rows.append((slot, spec.format, str(spec.tile), spec.rule, spec.rounding, _rest(spec)))
        else:
            rows.append((slot, operand, "", "", "", ""))
    return None, rows


def _rest(spec: QuantSpec) -> str:
    """The fields of a spec that have no column of their own and are not the defaults."""
    shown = ("format", "axis", "tile", "scale_rule", "rounding")
    values = {f.name: (getattr(spec, f.name), f.default) for f in dataclasses.fields(QuantSpec)}
    return ", ".join(f"{n}={v}" for n, (v, d) in values.items() if n not in shown and v != d)


def _settings(facts: Facts) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every setting; the versions and the figures of a finished run."""
    groups: list[tuple[str, dict[str, Any]]] = [("settings", facts.config.as_dict())]
    if facts.result is not None:
        keys = ("steps", "skipped_steps", "best_epoch", "best_by", "stopped_early", "peak_rss_mb")
        run = {key: facts.result.get(key) for key in (*keys, "device")}
        run = {k: f"{v:.0f}" if isinstance(v, float) else v for k, v in run.items()}
        groups += [("versions", facts.result["versions"]), ("run", run)]
    return [(title, [(k, str(v)) for k, v in rows.items()]) for title, rows in groups]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
