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
    """The learning rate of each step, relative to each group's base learning rate.

    >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.5)
    >>> schedule = et.optim.Warmup(steps=4)
    >>> [schedule.apply(optimizer, step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> optimizer.groups[0].options["lr"]
    0.5
    """

    @abstractmethod
    def factor(self, step: int) -> float:
        """The multiplier for an optimizer step.

        Args:
            step: counted from 0.

        Returns:
            What each group's base learning rate is multiplied by.

        >>> et.optim.Exponential(gamma=0.5).factor(3)
        0.125
        """

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set every group's ``lr`` to its ``base_lr`` times the factor; call it before each step.

        Args:
            optimizer: its groups are set.
            step: counted from 0.

        Returns:
            The factor.

        Raises:
            ValueError: if ``step`` is not an int, 0 or more.

        >>> optimizer = et.optim.SGD([et.nn.Parameter([1.0])], lr=0.5)
        >>> et.optim.Step(every=10, gamma=0.5).apply(optimizer, step=25)
        0.25
        >>> optimizer.groups[0].options["lr"]
        0.125
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
    """gamma ** (step // every).

    Args:
        every: steps between two changes, 1 or more.
        gamma: the factor of each change, in [0, 1].

    Raises:
        ValueError: for an argument out of range.

    >>> schedule = et.optim.Step(every=2, gamma=0.5)
    >>> [schedule.factor(step) for step in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _whole("every", self.every, 1)
        _within("gamma", self.gamma, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """See :meth:`extensor.optim.Schedule.factor`."""
        return float(self.gamma ** (step // self.every))


@dataclass(frozen=True)
class MultiStep(Schedule):
    """gamma to the number of milestones that ``step`` has reached.

    Args:
        milestones: increasing steps.
        gamma: the factor at each, in [0, 1].

    Raises:
        ValueError: for an argument out of range, or milestones that do not increase.

    >>> schedule = et.optim.MultiStep(milestones=(1, 4), gamma=0.5)
    >>> [schedule.factor(step) for step in range(5)]
    [1.0, 0.5, 0.5, 0.5, 0.25]
    """

    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        for milestone in self.milestones:
            _whole("milestones", milestone, 0)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones: expected increasing steps, got {self.milestones}")
        _within("gamma", self.gamma, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """See :meth:`extensor.optim.Schedule.factor`."""
        return float(self.gamma ** bisect.bisect_right(self.milestones, step))


@dataclass(frozen=True)
class Exponential(Schedule):
    """gamma ** step.

    Args:
        gamma: in [0, 1].

    Raises:
        ValueError: for a gamma out of range.

    >>> schedule = et.optim.Exponential(gamma=0.5)
    >>> [schedule.factor(step) for step in range(3)]
    [1.0, 0.5, 0.25]
    """

    gamma: float

    def __post_init__(self) -> None:
        _within("gamma", self.gamma, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """See :meth:`extensor.optim.Schedule.factor`."""
        return float(self.gamma**step)


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 down to ``final`` along half a cosine over ``total`` steps (arXiv 1608.03983, eq. 5).

    Args:
        total: steps, 1 or more.
        final: the factor from step ``total`` on, in [0, 1].

    Raises:
        ValueError: for an argument out of range.

    >>> schedule = et.optim.Cosine(total=4, final=0.1)
    >>> [round(schedule.factor(step), 3) for step in range(6)]
    [1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """

    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _whole("total", self.total, 1)
        _within("final", self.final, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """See :meth:`extensor.optim.Schedule.factor`."""
        return _cosine(1.0, self.final, step / self.total)


@dataclass(frozen=True)
class Linear(Schedule):
    """From ``start`` to ``final`` in a straight line over ``total`` steps.

    Args:
        total: steps, 1 or more.
        start: the factor of step 0, 0 or more.
        final: the factor from step ``total`` on, 0 or more.

    Raises:
        ValueError: for an argument out of range.

    >>> schedule = et.optim.Linear(total=4)
    >>> [schedule.factor(step) for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    total: int
    start: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _whole("total", self.total, 1)
        _within("start", self.start, 0.0, math.inf)
        _within("final", self.final, 0.0, math.inf)

    def factor(self, step: int) -> float:
        """See :meth:`extensor.optim.Schedule.factor`."""
        return _line(self.start, self.final, step / self.total)


@dataclass(frozen=True)
class Warmup(Schedule):
    """Up to 1 in ``steps`` equal steps, the last of which is 1, then another schedule or 1.

    The factor of step s is (s + 1) / steps: no step is lost to a learning rate of zero.

    Args:
        steps: of the warm-up, 0 or more.
        then: the schedule after it, which counts its own steps from there; None stays at 1.

    Raises:
        ValueError: for ``steps`` below 0.

    >>> schedule = et.optim.Warmup(2, then=et.optim.Linear(total=2))
    >>> [schedule.factor(step) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    steps: int
    then: Schedule | None = None

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 0)

    def factor(self, step: int) -> float:
        """See :meth:`extensor.optim.Schedule.factor`."""
        if step < self.steps:
            return (step + 1) / self.steps
        return self.then.factor(step - self.steps) if self.then else 1.0


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """A warm-up of ``warmup`` steps, then a cosine down to ``final`` at step ``total``.

    Args:
        warmup: steps of the `Warmup`, 0 or more.
        total: steps of both, more than ``warmup``.
        final: the factor from step ``total`` on, in [0, 1].

    Raises:
        ValueError: for an argument out of range.

    >>> schedule = et.optim.WarmupCosine(warmup=2, total=4)
    >>> [round(schedule.factor(step), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    warmup: int
    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _whole("warmup", self.warmup, 0)
        _whole("total", self.total, self.warmup + 1)
        _within("final", self.final, 0.0, 1.0)

    def factor(self, step: int) -> float:
        """See :meth:`extensor.optim.Schedule.factor`."""
        return Warmup(self.warmup, Cosine(self.total - self.warmup, self.final)).factor(step)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up from 1 / ``start_divisor`` to 1, then down to far below the start (arXiv 1708.07120).

    Rise and fall follow half a cosine. The last factor is the first one over ``final_divisor``.

    Args:
        total: steps, 1 or more.
        warm: the share of them that the rise takes, in [0, 1].
        start_divisor: 1 or more.
        final_divisor: 1 or more.

    Raises:
        ValueError: for an argument out of range.

    >>> schedule = et.optim.OneCycle(total=10, warm=0.3)
    >>> [round(schedule.factor(step), 2) for step in range(10)]
    [0.04, 0.52, 1.0, 0.95, 0.81, 0.61, 0.39, 0.19, 0.05, 0.0]
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
        """See :meth:`extensor.optim.Schedule.factor`."""
        start = 1.0 / self.start_divisor
        top, last = self.warm * self.total - 1, self.total - 1
        if step <= top:
            return _cosine(start, 1.0, step / top if top else 1.0)
        rest = max(last - max(top, 0.0), 0.0)
        share = (step - max(top, 0.0)) / rest if rest else 1.0
        return _cosine(1.0, start / self.final_divisor, share)


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm up, stay at 1, decay over the last ``decay`` of ``total`` steps (arXiv 2405.18392).

    Args:
        warmup: steps of the `Warmup`, 0 or more.
        total: steps in all, at least ``warmup`` + ``decay``.
        decay: steps of the decay, 1 or more.
        final: the factor from step ``total`` on, in [0, 1].
        shape: ``"linear"``; or ``"sqrt"``, 1 - sqrt(share of the decay).

    Raises:
        ValueError: for an argument out of range.

    >>> schedule = et.optim.WSD(warmup=2, total=6, decay=2)
    >>> [schedule.factor(step) for step in range(7)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
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
        """See :meth:`extensor.optim.Schedule.factor`."""
        share = (step - (self.total - self.decay)) / self.decay
        if share <= 0:
            return Warmup(self.warmup).factor(step)
        return _line(1.0, self.final, share if self.shape == "linear" else math.sqrt(share))


@dataclass
class ReduceLROnPlateau(Schedule):
    """Multiply by ``gamma`` when a metric has not improved for more than ``patience`` readings.

    Unlike the other schedules it has a state: keep `state_dict` in the checkpoint.

    Args:
        mode: whether a smaller (``"min"``) or a larger (``"max"``) metric is better.
        gamma: the factor of each cut, in [0, 1].
        patience: readings without improvement that are allowed in a row, 0 or more.
        threshold: a reading improves if it is better than the best by more than this share of
            the best's magnitude.
        cooldown: readings after a cut that are not counted as bad.
        minimum: the factor never falls below it.

    Raises:
        ValueError: for an argument out of range.

    >>> schedule = et.optim.ReduceLROnPlateau(gamma=0.5, patience=1)
    >>> [schedule.observe(loss) for loss in (1.0, 1.0, 1.0, 0.5)]
    [1.0, 1.0, 0.5, 0.5]
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
        """Take one reading of the metric, such as the loss of an evaluation.

        Args:
            metric: a finite number.

        Returns:
            The factor from now on.

        Raises:
            ValueError: if the metric is not finite: a diverged run is no plateau.

        >>> et.optim.ReduceLROnPlateau(mode="max").observe(0.9)
        1.0
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
        """See :meth:`extensor.optim.Schedule.factor`.

        The multiplier in force, whatever the step.
        """
        return self.current

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: the best metric, the counts and the factor.

        Returns:
            Plain scalars by name.

        >>> et.optim.ReduceLROnPlateau().state_dict()
        {'best': None, 'bad': 0, 'cooling': 0, 'current': 1.0}
        """
        names = ("best", "bad", "cooling", "current")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Args:
            state: plain scalars by name.

        Raises:
            ValueError: if the names differ from `state_dict`'s; nothing is changed.

        >>> schedule = et.optim.ReduceLROnPlateau()
        >>> schedule.load_state_dict({"best": 0.5, "bad": 2, "cooling": 0, "current": 0.1})
        >>> schedule.factor(0)
        0.1
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
