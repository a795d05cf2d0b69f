"""Optimizers and learning-rate schedules by name: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from extensor.optim import SGD, Adam, AdamW, Lion, Optimizer, Schedule, Warmup, WarmupCosine

if TYPE_CHECKING:
    from training.config import Settings

__all__ = ["OPTIMIZERS", "SCHEDULES", "make_optimizer", "make_schedule"]

OPTIMIZERS: dict[str, Callable[[list[Any], Settings], Optimizer]] = {
    "sgd": lambda params, c: SGD(
        params,
        lr=c.lr,
        momentum=c.momentum,
        weight_decay=c.weight_decay,
        states=c.optimizer_states,
    ),
    "adam": lambda params, c: Adam(
        params,
        lr=c.lr,
        betas=(c.beta1, c.beta2),
        weight_decay=c.weight_decay,
        states=c.optimizer_states,
    ),
    "adamw": lambda params, c: AdamW(
        decayed(params, c), lr=c.lr, betas=(c.beta1, c.beta2), states=c.optimizer_states
    ),
    "lion": lambda params, c: Lion(
        decayed(params, c), lr=c.lr, betas=(c.beta1, c.beta2), states=c.optimizer_states
    ),
}
"""Makes an optimizer of (name, parameter) pairs."""

SCHEDULES: dict[str, Callable[[int, int, float], Schedule]] = {
    "cosine": WarmupCosine,
    "constant": lambda warmup, total, final: Warmup(warmup),
}
"""Makes a schedule of (warm-up steps, steps in all, final share of the peak)."""


def decayed(params: list[Any], settings: Settings) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and vectors (biases, norms), which do not."""
    matrices = [(name, p) for name, p in params if p.ndim > 1]
    vectors = [(name, p) for name, p in params if p.ndim <= 1]
    groups = ((matrices, settings.weight_decay), (vectors, 0.0))
    return [{"params": group, "weight_decay": decay} for group, decay in groups if group]


def make_optimizer(model: Any, settings: Settings) -> Optimizer:
    """The optimizer that the settings name, on a model's parameters."""
    return OPTIMIZERS[settings.optimizer](list(model.named_parameters()), settings)


def make_schedule(settings: Settings, steps_per_epoch: int) -> Schedule:
    """The schedule that the settings name; at least one step is not warm-up."""
    total = settings.epochs * steps_per_epoch
    warmup = min(round(settings.warmup_epochs * steps_per_epoch), total - 1)
    return SCHEDULES[settings.schedule](warmup, total, settings.final_lr)
