"""Learning-rate schedules as functions of the optimizer step.

A schedule is a frozen record. Its `factor(step)` multiplies the base learning rate in a step (from
0) and depends on nothing else, so that a resumed run needs no schedule state. After its last step a
schedule keeps its last factor. `ReduceLROnPlateau` alone reads a metric and has a state.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from extensor.optim.optimizer import Optimizer

__all__ = [
    "WSD",
    "Cosine",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "ReduceLROnPlateau",
    "Schedule",
    "Step",
    "Warmup",
    "WarmupCosine",
]


class Schedule(ABC):
    """The learning rate of each step, relative to each group's base learning rate."""

    @abstractmethod
    def factor(self, step: int) -> float:
        """The multiplier for optimizer step ``step``, counted from 0."""

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set every group's ``lr`` to its ``base_lr`` times the factor; returns the factor.

        Raises:
            ValueError: if ``step`` is not an int, 0 or more.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step: expected an int, 0 or more, got {step!r}")
        factor = self.factor(step)
        for group in optimizer.groups:
            group.options["lr"] = group.base_lr * factor
            group.lookahead = partial(self._rate, group.base_lr, step)
        return factor

    def _rate(self, base: float, step: int, ahead: int) -> float:
        return base * self.factor(step + ahead)


@dataclass(frozen=True)
class Step(Schedule):
    """gamma ** (step // every)."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _whole("every", self.every, 1)
        _within("gamma", self.gamma, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        return float(self.gamma ** (step // self.every))


@dataclass(frozen=True)
class MultiStep(Schedule):
    """gamma to the number of milestones that ``step`` has reached."""

    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        for milestone in self.milestones:
            _whole("milestones", milestone, 0)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones: expected increasing steps, got {self.milestones}")
        _within("gamma", self.gamma, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        return float(self.gamma ** bisect.bisect_right(self.milestones, step))


@dataclass(frozen=True)
class Exponential(Schedule):
    """gamma ** step."""

    gamma: float

    def __post_init__(self) -> None:
        _within("gamma", self.gamma, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        return float(self.gamma**step)


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 down to ``final`` along half a cosine over ``total`` steps (arXiv 1608.03983)."""

    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _whole("total", self.total, 1)
        _within("final", self.final, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        return _cosine(1.0, self.final, step / self.total)


@dataclass(frozen=True)
class Linear(Schedule):
    """From ``start`` to ``final`` in a straight line over ``total`` steps."""

    total: int
    start: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _whole("total", self.total, 1)
        _within("start", self.start, 0.0, math.inf)
        _within("final", self.final, 0.0, math.inf)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        return _line(self.start, self.final, step / self.total)


@dataclass(frozen=True)
class Warmup(Schedule):
    """Up to 1 in ``steps`` equal steps, the last of which is 1, then another schedule or 1.

    The factor of step s is (s + 1) / steps: no step is lost to a learning rate of zero. The
    schedule in ``then`` counts its own steps from the end of the warm-up.
    """

    steps: int
    then: Schedule | None = None

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 0)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        if step < self.steps:
            return (step + 1) / self.steps
        return self.then.factor(step - self.steps) if self.then else 1.0


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """A warm-up of ``warmup`` steps, then a cosine down to ``final`` at step ``total``."""

    warmup: int
    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _whole("warmup", self.warmup, 0)
        _whole("total", self.total, self.warmup + 1)
        _within("final", self.final, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        return Warmup(self.warmup, Cosine(self.total - self.warmup, self.final)).factor(step)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up from 1 / ``start_divisor`` to 1, then down to far below the start (arXiv 1708.07120).

    The rise takes the share ``warm`` of the ``total`` steps. Rise and fall follow half a cosine.
    The last factor is the first one over ``final_divisor``.
    """

    total: int
    warm: float = 0.3
    start_divisor: float = 25.0
    final_divisor: float = 1e4

    def __post_init__(self) -> None:
        _whole("total", self.total, 1)
        _within("warm", self.warm, 0.0, 1.0)
        _within("start_divisor", self.start_divisor, 1.0, math.inf)
        _within("final_divisor", self.final_divisor, 1.0, math.inf)

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        start = 1.0 / self.start_divisor
        top, last = self.warm * self.total - 1, self.total - 1
        if step <= top:
            return _cosine(start, 1.0, step / top if top else 1.0)
        rest = max(last - max(top, 0.0), 0.0)
        share = (step - max(top, 0.0)) / rest if rest else 1.0
        return _cosine(1.0, start / self.final_divisor, share)


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm up, stay at 1, decay over the last ``decay`` of ``total`` steps.

    ``shape`` is ``"linear"`` or ``"sqrt"``, 1 - sqrt(share of the decay) (arXiv 2405.18392).
    """

    warmup: int
    total: int
    decay: int
    final: float = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        _whole("warmup", self.warmup, 0)
        _whole("decay", self.decay, 1)
        _whole("total", self.total, self.warmup + self.decay)
        _within("final", self.final, 0.0, 1.0)
        if self.shape not in ("linear", "sqrt"):
            raise ValueError(f"shape: expected 'linear' or 'sqrt', got {self.shape!r}")

    def factor(self, step: int) -> float:
        """The multiplier for ``step``."""
        share = (step - (self.total - self.decay)) / self.decay
        if share <= 0:
            return Warmup(self.warmup).factor(step)
        return _line(1.0, self.final, share if self.shape == "linear" else math.sqrt(share))


@dataclass
class ReduceLROnPlateau(Schedule):
    """Multiply by ``gamma`` when a metric has not improved for more than ``patience`` readings.

    A reading improves if it is better than the best by more than ``threshold`` of the best's
    magnitude. After a cut, ``cooldown`` readings are not counted as bad. The factor never falls
    below ``minimum``. Keep `state_dict` in the checkpoint.
    """

    mode: Literal["min", "max"] = "min"
    gamma: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    cooldown: int = 0
    minimum: float = 0.0
    best: float | None = field(default=None, init=False)
    bad: int = field(default=0, init=False)
    cooling: int = field(default=0, init=False)
    current: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode: expected 'min' or 'max', got {self.mode!r}")
        _within("gamma", self.gamma, 0.0, 1.0)
        _whole("patience", self.patience, 0)
        _within("threshold", self.threshold, 0.0, math.inf)
        _whole("cooldown", self.cooldown, 0)
        _within("minimum", self.minimum, 0.0, 1.0)

    def observe(self, metric: float) -> float:
        """Take one reading of the metric; returns the factor from now on.

        Raises:
            ValueError: if the metric is not finite: a diverged run is no plateau.
        """
        metric = float(metric)
        if not math.isfinite(metric):
            raise ValueError(
                f"metric: expected a finite number, got {metric}; the run has diverged"
            )
        self.cooling = max(self.cooling - 1, 0)
        if self._improves(metric):
            self.best, self.bad = metric, 0
        elif not self.cooling:
            self.bad += 1
        if self.bad > self.patience:
            self.current = max(self.current * self.gamma, self.minimum)
            # One more, since the next reading starts by counting down.
            self.bad, self.cooling = 0, self.cooldown + 1 if self.cooldown else 0
        return self.current

    def _improves(self, metric: float) -> bool:
        if self.best is None:
            return True
        margin = self.threshold * abs(self.best)
        return metric < self.best - margin if self.mode == "min" else metric > self.best + margin

    def factor(self, step: int) -> float:
        """The multiplier in force, whatever the step."""
        return self.current

    def state_dict(self) -> dict[str, Any]:
        """Plain scalars for a checkpoint."""
        names = ("best", "bad", "cooling", "current")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: if the names differ from `state_dict`'s; nothing is changed.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"state: expected {sorted(self.state_dict())}, got {sorted(state)}")
        for name, value in state.items():
            setattr(self, name, value)


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))


def _line(start: float, end: float, share: float) -> float:
    return start + (end - start) * min(share, 1.0)


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an int, {least} or more, got {value!r}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        raise ValueError(f"{name}: expected a number in [{low}, {high}], got {value!r}")
