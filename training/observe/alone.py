"""What an arm's run would take alone on the machine, by the rates that `--rates` measured."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from extensor.quant.recipe_schedule import RecipeSchedule

__all__ = ["RATES", "alone", "at_equal_time", "read_rates", "recipe_names", "times_alone"]

Row = dict[str, Any]
RATES = "rates.json"


def read_rates(folder: Path) -> dict[str, Row]:
    """By arm: ``per_second``, ``joules`` (a label's) and ``bytes``; or its ``problem``."""
    path = folder / RATES
    found: dict[str, Row] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def recipe_names(arm: str) -> list[str]:
    """The recipes of an arm, as `--rates` knows them."""
    return [part.partition("@")[0] for part in arm.split(",")]


def alone(arm: str, rates: Mapping[str, Mapping[str, Any]]) -> Row | None:
    """Labels a second, joules a label and bytes of an arm; None where one of its parts has none.

    A schedule's time and joules are those of its recipes, each for its share of the labels, where
    the shares are given in per cent.
    """
    found = []
    for name, share in _shares(arm):
        rate = rates.get(name, {})
        if "per_second" not in rate:
            return None
        found.append((share, rate))
    if not found:
        return None
    joules = [rate["joules"] for _, rate in found]
    held = [rate["bytes"] for _, rate in found if rate["bytes"] is not None]
    return {
        "per_second": 1 / sum(share / rate["per_second"] for share, rate in found),
        "joules": None if None in joules else sum(share * rate["joules"] for share, rate in found),
        "bytes": max(held, default=None),
    }


def times_alone(
    arm: str, rates: Mapping[str, Mapping[str, Any]], ends: Sequence[float]
) -> list[float]:
    """Seconds until so many labels are trained on, the last of them all, each recipe at its rate.

    They are of an arm that `alone` knows.
    """
    found = []
    for end in ends:
        begun, seconds = 0.0, 0.0
        for name, share in _shares(arm):
            labels = min(max(end - begun * ends[-1], 0.0), share * ends[-1])
            seconds, begun = seconds + labels / rates[name]["per_second"], begun + share
        found.append(seconds)
    return found


def _shares(arm: str) -> list[tuple[str, float]]:
    """The recipes of an arm with their shares of its steps; none where these are not known."""
    if "," not in arm:
        return [(arm, 1.0)]
    phases = RecipeSchedule.parse(arm).phases
    if any(phase.start and not phase.percent for phase in phases):
        return []
    starts = [*(float(phase.start) / 100 for phase in phases), 1.0]
    return [(n, b - a) for n, (a, b) in zip(recipe_names(arm), pairwise(starts), strict=True)]


def at_equal_time(rows: Sequence[Row]) -> None:
    """Add to each arm ``at_equal_time``: its value when the arm that ends first has ended.

    Between two evaluations it is on the straight line. An arm that ends later is in the middle of
    its learning-rate schedule then, which counts against it.
    """
    ends = [row["times"][-1] for row in rows if row["times"]]
    for row in rows:
        times, curve = row["times"], row["curve"]
        row["at_equal_time"] = _between(times, curve, min(ends)) if times else None


def _between(times: Sequence[float], curve: Sequence[float | None], now: float) -> float | None:
    place = bisect_left(times, now)
    if place == 0 or place == len(times):
        return curve[min(place, len(times) - 1)] if now in times else None
    low, high = curve[place - 1], curve[place]
    if low is None or high is None:
        return None
    share = (now - times[place - 1]) / (times[place] - times[place - 1])
    return low + share * (high - low)
