"""Optimizers and learning-rate schedules by name: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from extensor.optim import SGD, Adam, AdamW, Optimizer, Schedule, Warmup, WarmupCosine

if TYPE_CHECKING:
    from training.config import Settings

__all__ = ["OPTIMIZERS", "SCHEDULES", "make_optimizer", "make_schedule"]

OPTIMIZERS: dict[str, Callable[[list[Any], Settings], Optimizer]] = {
    "sgd": lambda named, c: SGD(named, lr=c.lr, momentum=c.momentum, weight_decay=c.weight_decay),
    "adam": lambda named, c: Adam(named, lr=c.lr, weight_decay=c.weight_decay),
    "adamw": lambda named, c: AdamW(named, lr=c.lr, weight_decay=c.weight_decay),
}
"""Makes an optimizer of (name, parameter) pairs."""

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "cosine": WarmupCosine,
    "constant": lambda warmup, total: Warmup(warmup),
}
"""Makes a schedule of (warm-up steps, steps in all)."""


def make_optimizer(model: Any, settings: Settings) -> Optimizer:
    """The optimizer that the settings name, on a model's parameters."""
    return OPTIMIZERS[settings.optimizer](list(model.named_parameters()), settings)


def make_schedule(settings: Settings, steps_per_epoch: int) -> Schedule:
    """The schedule that the settings name; at least one step is not warm-up."""
    total = settings.epochs * steps_per_epoch
    warmup = min(round(settings.warmup_epochs * steps_per_epoch), total - 1)
    return SCHEDULES[settings.schedule](warmup, total)
