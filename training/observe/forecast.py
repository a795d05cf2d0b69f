"""How long runs will take, by what finished ones took and by the rates of `--rates`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .alone import alone
from .cost import Cost
from .entry import Entry

__all__ = ["expected_seconds", "schedule"]


def expected_seconds(
    entries: Sequence[Entry], rates: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """Wall-clock seconds that each open run still needs, by its name, as far as that is known.

    It is the median of the same arm's finished runs. Without those, its labels at the rate that
    `--rates` measured, times how much longer finished arms took than at theirs. Without a rate, its
    steps at the median pace of finished runs of its kind.
    """
    by_arm: dict[tuple[str, str], list[float]] = {}
    by_kind: dict[str, list[float]] = {}
    longer: list[float] = []
    for entry in entries:
        if entry.state == "finished" and (seconds := Cost.read(entry.cost_file).seconds):
            by_arm.setdefault((entry.kind, entry.job.config.recipe), []).append(seconds)
            by_kind.setdefault(entry.kind, []).append(seconds / _steps(entry))
            if entry.kind == "arm" and (training := _training_seconds(entry, rates)):
                longer.append(seconds / training)
    factor = statistics.median(longer) if longer else 1.0
    pace = {kind: statistics.median(found) for kind, found in by_kind.items()}
    needed: dict[str, float] = {}
    for entry in entries:
        if entry.state == "finished":
            continue
        same = by_arm.get((entry.kind, entry.job.config.recipe))
        training = _training_seconds(entry, rates)
        if same:
            whole = statistics.median(same)
        elif training is not None:
            whole = factor * training
        elif pace:
            whole = _steps(entry) * pace.get(entry.kind, max(pace.values()))
        else:
            continue
        needed[entry.name] = max(whole - Cost.read(entry.cost_file).seconds, 0.0)
    return needed


def _steps(entry: Entry) -> int:
    """Of a run; epochs where their steps are the data's."""
    return entry.job.config.epochs * max(entry.job.config.epoch_steps, 1)


def _training_seconds(entry: Entry, rates: Mapping[str, Mapping[str, Any]]) -> float | None:
    """All of a run's labels at its rate alone; None where one is not known."""
    config = entry.job.config
    rate = alone(config.recipe, rates)
    if rate is None or not config.epoch_steps:
        return None
    epoch = config.epoch_steps * config.batch_size * config.context
    if entry.kind == "trunk":
        return float(entry.epochs * epoch / rate["per_second"])
    before = 0.0 if entry.trunk is None else _training_seconds(entry.trunk, rates)
    if before is None:
        return None
    return float(config.epochs * epoch / rate["per_second"]) - before


def schedule(
    entries: Sequence[Entry], needed: Mapping[str, float], seconds: float, places: int
) -> list[str]:
    """The plan for so many seconds on so many places: a line for each run that begins in them."""
    free, lines = [0.0] * places, []
    for entry in entries:
        start = min(free)
        if start >= seconds:
            break
        end = start + needed[entry.name]
        free[free.index(start)] = end
        note = "" if end <= seconds else ", which the time ends"
        lines.append(
            f"from minute {start / 60:.1f}: {entry.name}, {needed[entry.name] / 60:.1f} minutes"
            + note
        )
    return lines
