"""Charts of what a run recorded: by epoch, by step where it kept telemetry, and of its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from ..callbacks import NOISE_RATIO
from ..histograms import Histograms, OperandHistogram
from ..operand_noise import quantile_exponent
from ..svg import Line, bars, lines
from .facts import Facts

__all__ = ["curves", "memory", "operands", "scales", "telemetry"]

MAX_LINES = 8
SLOT_TITLES = {"fprop.w": "weights", "fprop.x": "activations", "dgrad.g": "gradients"}


def _drawn(charts: list[str]) -> list[Markup]:
    return [Markup(chart) for chart in charts if chart]


def _scaled(values: list[float | None], factor: float) -> list[float | None]:
    return [None if v is None else factor * v for v in values]


def curves(facts: Facts) -> list[Markup]:
    """What metrics.jsonl holds, by epoch."""
    if not facts.epochs:
        return []
    at = [e["epoch"] for e in facts.epochs]

    def curve(name: str, key: str, factor: float = 1.0) -> Line:
        return Line(name, at, _scaled([e.get(key) for e in facts.epochs], factor))

    parts = {"train": "training", "test": "test"}
    parts |= {"val": "validation"} if facts.config.val_share else {}
    rate = lines("learning rate at the epoch's end", [curve("learning rate", "lr")], "epoch")
    if facts.telemetry:
        steps = [record["step"] for record in facts.telemetry]
        rates = Line("learning rate", steps, [r["lr"] for r in facts.telemetry])
        rate = lines("learning rate", [rates], "step")
    shares = []
    if any(e["saturated"] is not None for e in facts.epochs):
        shares = [curve("saturated", "saturated", 100), curve("flushed to zero", "flushed", 100)]
    accuracies = [curve(name, f"{key}_accuracy", 100) for key, name in parts.items()]
    return _drawn(
        [
            lines("loss", [curve(name, f"{key}_loss") for key, name in parts.items()], "epoch"),
            lines("accuracy, %", accuracies, "epoch"),
            rate,
            lines("seconds an epoch", [curve("training alone", "seconds")], "epoch"),
            lines("quantized values, %", shares, "epoch"),
        ]
    )


def telemetry(records: list[dict[str, Any]]) -> list[Markup]:
    """What telemetry.jsonl holds, by step."""
    records = [r for r in records if r["layers"]]
    if not records:
        return []
    steps = [r["step"] for r in records]
    paths = list(dict.fromkeys(path for r in records for path in r["layers"]))

    def collect(key: str, factor: float = 1.0, highest: bool = True) -> list[Line]:
        rows = {path: [r["layers"].get(path, {}).get(key) for r in records] for path in paths}
        return few({path: _scaled(values, factor) for path, values in rows.items()}, highest)

    def worst_slot(share: str) -> list[Line]:
        def worst(layer: dict[str, Any]) -> float | None:
            known = [s[share] for s in layer.get("slots", {}).values() if s[share] is not None]
            return 100 * max(known) if known else None

        return few({p: [worst(r["layers"].get(p, {})) for r in records] for p in paths}, True)

    def operand(value: Callable[[dict[str, Any]], float | None]) -> list[Line]:
        """The largest over a layer's operands."""

        def largest(layer: dict[str, Any]) -> float | None:
            seen = [value(row) for row in layer.get("operands", {}).values()]
            return max((v for v in seen if v is not None), default=None)

        return few({p: [largest(r["layers"].get(p, {})) for r in records] for p in paths}, True)

    def few(rows: dict[str, list[float | None]], highest: bool) -> list[Line]:
        """At most `MAX_LINES`: those with the highest (lowest) means, in the model's order."""
        known = {path: [v for v in values if v is not None] for path, values in rows.items()}
        means = {path: sum(values) / len(values) for path, values in known.items() if values}
        chosen = sorted(means, key=lambda path: means[path], reverse=highest)[:MAX_LINES]
        return [Line(path, steps, rows[path]) for path in means if path in chosen]

    return _drawn(
        [
            lines("loss of the batch", [Line("loss", steps, [r["loss"] for r in records])], "step"),
            lines("gradient norm by layer", collect("gradient_norm"), "step", log=True),
            lines(
                "gradient over its quantization noise",
                collect("gradient_over_noise", highest=False),
                "step",
                log=True,
                threshold=(NOISE_RATIO, "√3: below, training gains little"),
            ),
            lines(
                "quantization noise, noisiest operand: squared error over squared values",
                operand(lambda row: row["noise"]["now"]),
                "step",
                log=True,
            ),
            lines("block scales, widest operand: binades of 98% of them", operand(_width), "step"),
            lines("flushed to zero, worst operand, %", worst_slot("flushed"), "step"),
            lines("saturated, worst operand, %", worst_slot("saturated"), "step"),
            lines("weight codes that changed, %", collect("changed", 100), "step"),
            lines("weight codes that turned back, %", collect("turned", 100), "step"),
        ]
    )


def _width(operand: dict[str, Any]) -> float | None:
    scales = operand.get("scales")
    if scales is None:
        return None
    return quantile_exponent(scales, 0.99) - quantile_exponent(scales, 0.01)


def scales(records: list[dict[str, Any]]) -> list[tuple[str, list[Markup]]]:
    """Histograms of each layer's block scales in the last record."""
    records = [r for r in records if r["layers"]]
    found = []
    for path in records[-1]["layers"] if records else ():
        last = records[-1]["layers"][path].get("operands", {})
        drawn = [
            _scales(SLOT_TITLES[slot], f"step {records[-1]['step']:,}", last[slot]["scales"])
            for slot in SLOT_TITLES
            if "scales" in last.get(slot, {})
        ]
        if drawn:
            found.append((path, _drawn(drawn)))
    return found


def _scales(title: str, note: str, scales: dict[str, Any]) -> str:
    low, counts = scales["low"], scales["counts"]
    edges = [float(low + i) for i in range(len(counts) + 1)]
    return bars(title, note, edges, counts, "log2 of block scales")


def memory(found: dict[str, Any] | None) -> list[Markup]:
    """The first step's memory over time, all of it and by kind."""
    if found is None:
        return []
    rows = {"all": found["timeline"], **found["timelines"]}
    series = [
        Line(name, [100 * i / len(values) for i in range(len(values))], [v / 1e6 for v in values])
        for name, values in rows.items()
        if any(values)
    ]
    title = f"memory of the first step, MB; at most {found['peak'] / 1e6:.1f}"
    return _drawn([lines(title, series, "arrays taken and given back so far, %")])


def operands(seen: Histograms) -> list[tuple[str, list[Markup]]]:
    """Histograms of each layer's operands on their grids."""
    return [
        (path, _drawn([_histogram(SLOT_TITLES[slot], row) for slot, row in slots.items()]))
        for path, slots in seen.items()
    ]


def _histogram(title: str, seen: OperandHistogram) -> str:
    top = max((abs(v) for v, _ in seen.grid), default=0.0)
    few = [v for v, _ in seen.grid if abs(v) in (0.0, top) or v in (-top / 2, top / 2)]
    return bars(
        title,
        f"{seen.format}, {seen.zeros:.0%} zeros, not drawn" if seen.zeros > 0.005 else seen.format,
        seen.edges,
        seen.counts,
        seen.axis,
        stems=seen.grid,
        marks=seen.marks,
        x_ticks=few or None,
    )
