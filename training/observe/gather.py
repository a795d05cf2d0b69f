"""Gathers the finished runs of an experiment: one row for each arm, with standard errors.

Runs of one seed share first weights and batches, so gaps are taken seed by seed and then averaged;
their standard error is that of the mean over seeds.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..comparison import Finished
from ..rundir import METRICS, read_epochs, read_telemetry
from .alone import alone, at_equal_time, read_rates, times_alone
from .entry import Entry
from .queue import Queue

__all__ = ["gather"]

Pair = tuple[Entry, Finished]


def gather(queue: Queue) -> dict[str, Any]:
    """What results.json holds: the trials, a row for each arm that has a finished run, curves."""
    experiment, metric = queue.experiment, queue.metric
    done = [(e, f) for e in queue.entries() if (f := e.job.finished()) is not None]
    arms: dict[str, list[Pair]] = {arm: [] for arm in experiment.arms}
    for entry, finished in done:
        if entry.kind == "arm":
            arms[finished.recipe].append((entry, finished))
    rates = read_rates(queue.folder)
    base = {f.seed: f for _, f in arms[experiment.baseline]}
    rows = [_row(queue, arm, pairs, base, rates) for arm, pairs in arms.items() if pairs]
    at_equal_time(rows)
    return {
        "experiment": experiment.doc,
        "baseline": experiment.baseline,
        "metric": metric.title,
        "gap_unit": metric.gap,
        "digits": metric.digits,
        "higher_is_better": metric.higher_is_better,
        "learning_rate": queue.rate(),
        "seeds": experiment.seeds,
        "unit": "tokens" if experiment.runs(1e-3)[0].epoch_steps else "images",
        "trials": [
            {"learning_rate": e.job.config.lr, "value": _value(queue, f)}
            for e, f in done
            if e.kind == "rate"
        ],
        "arms": rows,
        "pairs": [
            _pair(queue, one, other, arms[one], arms[other])
            for one, other in experiment.pairs
            if arms[one] and arms[other]
        ],
        "rates": rates,
    }


def _value(queue: Queue, finished: Finished) -> float | None:
    value = finished.result[queue.metric.key]
    return None if value is None else queue.metric.scale * float(value)


def _row(
    queue: Queue,
    arm: str,
    pairs: list[Pair],
    base: dict[int, Finished],
    rates: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    values = [_value(queue, f) for _, f in pairs]
    both = [_differences(queue, f, base[f.seed]) for _, f in pairs if f.seed in base]
    known = [(gap, train_gap) for gap, train_gap in both if gap is not None]
    costs = [entry.cost for entry, _ in pairs]
    curves = [_curve(queue, f) for _, f in pairs]
    gap_curves = [
        [
            None if None in (a, b) else queue.metric.difference(a, b)
            for a, b in zip(c, other, strict=False)
        ]
        for c, (_, f) in zip(curves, pairs, strict=True)
        if f.seed in base
        for other in [_curve(queue, base[f.seed])]
    ]
    mean, error = _mean(values)
    gap, gap_error = _mean([gap for gap, _ in known])
    train_gap, train_gap_error = _mean([train_gap for _, train_gap in known])
    joules = [c.joules for c in costs]
    curve, gap_curve = (
        [_mean(values)[0] for values in zip(*columns, strict=False)]
        for columns in (curves, gap_curves)
    )
    by_itself = alone(arm, rates)
    labels = [report.per_second * report.seconds for report in read_epochs(pairs[0][0].job.folder)]
    ends = list(itertools.accumulate(labels[: len(curve)]))
    times = [] if by_itself is None else times_alone(arm, rates, ends)
    return {
        "arm": arm,
        "runs": len(pairs),
        "run_seeds": [f.seed for _, f in pairs],
        "values": values,
        "mean": mean,
        "standard_error": error,
        "gap": gap,
        "gap_standard_error": gap_error,
        "train_loss": _mean([f.result["train_loss"] for _, f in pairs])[0],
        "train_gap": train_gap,
        "train_gap_standard_error": train_gap_error,
        "seconds": statistics.median(f.result["seconds"] for _, f in pairs),
        "per_second": _median([_per_second(e) for e, _ in pairs]),
        "joules": _median(joules),
        "peak_bytes": max((c.peak_bytes for c in costs if c.peak_bytes), default=None),
        "diverged": sum(f.result["diverged"] is not None for _, f in pairs),
        "fallbacks": _mean([_fallbacks(*pair) for pair in pairs])[0],
        "curve": curve,
        "gap_curve": gap_curve,
        "alone": by_itself,
        "times": times,
        "health": _health(*pairs[0]),
    }


def _pair(
    queue: Queue, arm: str, other: str, ones: list[Pair], others: list[Pair]
) -> dict[str, Any]:
    """How much worse an arm is than another, by the seeds that both have."""
    of_seed = {finished.seed: finished for _, finished in others}
    found = [_differences(queue, f, of_seed[f.seed]) for _, f in ones if f.seed in of_seed]
    gaps, train_gaps = [gap for gap, _ in found], [train_gap for _, train_gap in found]
    (gap, error), (train_gap, train_error) = _mean(gaps), _mean(train_gaps)
    return {
        "arm": arm,
        "other": other,
        "gaps": gaps,
        "gap": gap,
        "gap_standard_error": error,
        "train_gap": train_gap,
        "train_gap_standard_error": train_error,
    }


def _differences(queue: Queue, one: Finished, other: Finished) -> tuple[float | None, float | None]:
    """How much worse a run is than another: by the metric, and its training loss in per cent."""
    value, start = _value(queue, one), _value(queue, other)
    train, trained = one.result["train_loss"], other.result["train_loss"]
    return (
        None if value is None or start is None else queue.metric.difference(value, start),
        100 * (train - trained) / trained if train and trained else None,
    )


def _curve(queue: Queue, finished: Finished) -> list[Any]:
    """The metric after each epoch, as people read it; None where it is not finite."""
    scale = queue.metric.scale
    return [None if value is None else scale * value for value in finished.curve]


def _mean(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard error; None where a value is missing, and for the error of one."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return None, None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return statistics.fmean(known), error


def _median(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _per_second(entry: Entry) -> float | None:
    """Labels a second in training alone, the median over epochs."""
    path = entry.job.folder / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return _median([json.loads(line)["per_second"] for line in lines])


def _fallbacks(entry: Entry, finished: Finished) -> float | None:
    """The share of a run's products, in its last epoch, that fell back from FP8 to bfloat16."""
    steps = entry.job.config.epoch_steps
    rows = [r for r in finished.result["health"] if r["slot"] in ("fprop.x", "dgrad.g", "wgrad.g")]
    if not rows or not steps:
        return None
    return float(sum(row.get("fallbacks", 0) for row in rows) / (steps * len(rows)))


def _health(entry: Entry, finished: Finished) -> list[dict[str, Any]]:
    """Each layer of the first seed: the last record of telemetry, else shares of the last epoch."""
    records = [record for record in read_telemetry(entry.job.folder) if record["layers"]]
    if not records:
        slots: dict[str, dict[str, Any]] = {}
        for row in finished.result["health"]:
            slots.setdefault(row["layer"], {})[row["slot"]] = row
        return [_layer(name, {"slots": found}) for name, found in slots.items()]
    return [_layer(name, values) for name, values in records[-1]["layers"].items()]


def _layer(name: str, values: dict[str, Any]) -> dict[str, Any]:
    slots = values.get("slots", {}).values()
    return {
        "layer": name,
        "gradient_over_noise": values.get("gradient_over_noise"),
        "turned": values.get("turned"),
        "flushed": max((s["flushed"] or 0.0 for s in slots), default=None),
        "saturated": max((s["saturated"] or 0.0 for s in slots), default=None),
    }
