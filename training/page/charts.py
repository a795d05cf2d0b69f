"""Charts of what a run recorded: by epoch, and by step where it kept telemetry."""

from __future__ import annotations

from typing import Any

from training.callbacks import NOISE_RATIO
from training.page.facts import Facts
from training.svg import Line, lines

__all__ = ["curves", "telemetry"]

MOST_LINES = 8


def curves(facts: Facts) -> str:
    if not facts.epochs:
        return ""
    at = [e["epoch"] for e in facts.epochs]

    def curve(name: str, key: str, factor: float = 1.0) -> Line:
        values = [e.get(key) for e in facts.epochs]
        return Line(name, at, [None if v is None else factor * v for v in values])

    held = ["val"] if facts.config.val_share else []
    names = {"train": "training", "test": "test", "val": "validation"}
    shown = ("train", "test", *held)
    parts = [
        lines("loss", [curve(names[key], f"{key}_loss") for key in shown], "epoch"),
        lines("accuracy, %", [curve(names[key], f"{key}_accuracy", 100) for key in shown], "epoch"),
        _rates(facts, curve("learning rate", "lr")),
        lines("seconds an epoch", [curve("training alone", "seconds")], "epoch"),
    ]
    if any(e["saturated"] is not None for e in facts.epochs):
        shares = [curve("saturated", "saturated", 100), curve("flushed to zero", "flushed", 100)]
        parts.append(lines("quantized values, %", shares, "epoch"))
    return f'<div class="charts">{"".join(parts)}</div>'


def _rates(facts: Facts, by_epoch: Line) -> str:
    steps = [record["step"] for record in facts.telemetry]
    if steps:
        rates = Line("learning rate", steps, [r["lr"] for r in facts.telemetry])
        return lines("learning rate", [rates], "step")
    return lines("learning rate at the epoch's end", [by_epoch], "epoch")


def telemetry(records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    steps = [r["step"] for r in records]
    paths = list(dict.fromkeys(path for r in records for path in r["layers"]))

    def collect(key: str, factor: float = 1.0) -> list[Line]:
        found = []
        for path in paths:
            values = [r["layers"].get(path, {}).get(key) for r in records]
            if any(v is not None for v in values):
                found.append(Line(path, steps, [None if v is None else factor * v for v in values]))
        return found

    def of_slots(share: str) -> list[Line]:
        found = []
        for path in paths:
            values: list[float | None] = []
            for r in records:
                slots = r["layers"].get(path, {}).get("slots", {})
                known = [s[share] for s in slots.values() if s[share] is not None]
                values.append(100 * max(known) if known else None)
            if any(v is not None for v in values):
                found.append(Line(path, steps, values))
        return found

    loss = Line("loss", steps, [r["loss"] for r in records])
    ratios = collect("gradient_over_noise")
    parts = [
        lines("loss of the batch", [loss], "step"),
        lines("gradient norm by layer", _few(collect("gradient_norm"), True), "step", log=True),
        lines(
            "gradient over its quantization noise",
            _few(ratios, False),
            "step",
            log=True,
            threshold=(NOISE_RATIO, "√3: below, training gains little"),
        )
        if ratios
        else "",
        lines("flushed to zero, worst operand, %", _few(of_slots("flushed"), True), "step"),
        lines("saturated, worst operand, %", _few(of_slots("saturated"), True), "step"),
        lines("weight codes that changed, %", _few(collect("changed", 100), True), "step"),
        lines("weight codes that turned back, %", _few(collect("turned", 100), True), "step"),
    ]
    return f'<div class="charts">{"".join(parts)}</div>'


def _few(found: list[Line], highest: bool) -> list[Line]:
    """At most `MOST_LINES`: those with the highest (lowest) values, in the model's order."""

    def mean(line: Line) -> float:
        known = [y for y in line.y if y is not None]
        return sum(known) / len(known)

    chosen = sorted(found, key=mean, reverse=highest)[:MOST_LINES]
    return [line for line in found if line in chosen]
