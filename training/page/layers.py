"""The layers: their errors beside float32, worst first, and their operands on their grids."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from extensor.quant.recipe import SLOTS
from training.callbacks.progress import percent
from training.page.cells import table
from training.page.facts import Facts
from training.snapshot import Operands, Seen
from training.svg import bars

__all__ = ["histograms", "worst"]

LOW_DB = 15.0
SLOT_TITLES = {"fprop.w": "weights", "fprop.x": "activations", "dgrad.g": "gradients"}


def worst(facts: Facts) -> str:
    if not facts.rows:
        return ""
    health: dict[str, list[dict[str, Any]]] = {}
    for row in (facts.result or {}).get("health", []):
        health.setdefault(row["layer"], []).append(row)
    inner = [row for row in facts.rows if row.layer != "(output)"]
    if all(row.sqnr_db == math.inf for row in inner):
        return "<p>Every layer computes in float32: there is no quantization error.</p>"
    lines_ = []
    for row in sorted(inner, key=lambda r: math.inf if math.isnan(r.sqnr_db) else r.sqnr_db):
        slots = sorted(health.get(row.layer, []), key=lambda s: SLOTS.index(s["slot"]))
        alarms = [f"{s['slot']} {s['verdict']}" for s in slots if s["verdict"] != "ok"]
        lines_.append(
            (
                f"<code>{escape(row.layer)}</code>",
                escape(row.kind),
                _meter(row.sqnr_db),
                f"{row.cosine:.5f}",
                f"{row.mse:.2e}",
                "" if row.clipped is None else percent(row.clipped),
                "" if row.flushed is None else percent(row.flushed),
                escape("; ".join(alarms)) or "ok",
            )
        )
    head = ("layer", "kind", "signal to noise", "cosine", "MSE", "clipped", "flushed", "last epoch")
    output = facts.rows[-1]
    note = (
        "Each layer beside float32 with the same weights and inputs, so an error is its own, on "
        f"test data. The model's output as a whole: {_decibels(output.sqnr_db)}, cosine "
        f"{output.cosine:.5f}."
    )
    return f"<p>{escape(note)}</p>" + table(head, lines_)


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else "NaN" if math.isnan(value) else f"{value:.1f} dB"


def _meter(value: float) -> str:
    width = 100.0 if value == math.inf else max(0.0, min(100.0, 100 * value / 50.0 or 0.0))
    width = 0.0 if math.isnan(value) else width
    kind = "low" if width < 2 * LOW_DB else ""
    return f'<span class="meter {kind}"><i style="width:{width:.0f}%"></i></span>{_decibels(value)}'


def histograms(seen: Operands) -> str:
    if not seen:
        return ""
    note = (
        "One training batch at the last checkpoint. Filled: the values before rounding, in units "
        "of their block's scale. Stems: how often each code of the grid is what a value becomes."
    )
    parts = [f"<p>{escape(note)}</p>"]
    for path, slots in seen.items():
        charts = "".join(_histogram(SLOT_TITLES[slot], row) for slot, row in slots.items())
        parts.append(f'<h3><code>{escape(path)}</code></h3><div class="three">{charts}</div>')
    return "".join(parts)


def _histogram(title: str, seen: Seen) -> str:
    top = max((abs(v) for v, _ in seen.grid), default=0.0)
    few = [v for v, _ in seen.grid if abs(v) in (0.0, top) or v in (-top / 2, top / 2)]
    return bars(
        title,
        f"{seen.format}, {seen.zeros:.0%} zeros apart" if seen.zeros > 0.005 else seen.format,
        seen.edges,
        seen.counts,
        seen.axis,
        stems=seen.grid,
        marks=seen.marks,
        x_ticks=few or None,
    )
