"""The optimizer and the learning-rate schedule that a run's settings name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from extensor.nn import gemm_layers
from extensor.optim import AdamW, Muon, Optimizer, Schedule, Warmup

from .choices import OPTIMIZERS, SCHEDULES, parse_options
from .settings import Settings

__all__ = ["make_optimizer", "make_schedule"]

DECAYS_MATRICES_ONLY = ("adamw", "lion", "lars")
"""Optimizers whose weight decay leaves out biases, norms and other vectors."""


def make_optimizer(model: Any, settings: Settings) -> Any:
    """The optimizer that the settings name, on a model's parameters."""
    cls: Any = OPTIMIZERS[settings.optimizer]
    provided = {
        "lr": settings.lr,
        "momentum": settings.momentum,
        "betas": (settings.beta1, settings.beta2),
        "weight_decay": settings.weight_decay,
        "states": settings.optimizer_states,
        "masters": False,  # --weights says what the weights themselves are
    }
    known = inspect.signature(cls).parameters
    options = {name: value for name, value in provided.items() if name in known}
    options |= parse_options("optimizer", settings.optimizer, settings.optimizer_options)
    if cls is Muon:
        return MuonWithAdamW(model, options, provided)
    named: list[Any] = list(model.named_parameters())
    if settings.optimizer in DECAYS_MATRICES_ONLY:
        named = decayed(named, settings.weight_decay)
    return cls(named, **options)


def decayed(named: list[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and vectors (biases, norms), which do not."""
    matrices = [(name, p) for name, p in named if p.ndim > 1]
    vectors = [(name, p) for name, p in named if p.ndim <= 1]
    groups = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": group, "weight_decay": decay} for group, decay in groups if group]


class MuonWithAdamW:
    """Muon for the weights of hidden layers, AdamW for all else, stepped as one optimizer.

    All else is biases, norms, embeddings and the head (the last layer, if none has that role).
    AdamW's learning rate stands to Muon's as the two classes' own defaults do.
    """

    def __init__(self, model: Any, options: dict[str, Any], provided: dict[str, Any]) -> None:
        layers = list(gemm_layers(model))
        plain = [f"{path}.weight" for path, layer in layers if layer.role is None]
        if all(layer.role != "head" for _, layer in layers):
            plain = plain[:-1]
        named = list(model.named_parameters())
        hidden = [(name, p) for name, p in named if name in set(plain)]
        rest = [(name, p) for name, p in named if name not in set(plain)]
        if not hidden:
            raise ValueError(
                "--optimizer muon: expected a hidden layer, got a model of one layer; the way out: "
                "another optimizer"
            )
        adamw = {name: provided[name] for name in ("betas", "states", "masters")}
        default = {c: inspect.signature(c).parameters["lr"].default for c in (AdamW, Muon)}
        rate = provided["lr"] * default[AdamW] / default[Muon]
        groups = decayed(rest, provided["weight_decay"])
        self.parts: dict[str, Optimizer] = {
            "muon": Muon(hidden, **options),
            "adamw": AdamW(groups, lr=rate, **adamw),
        }
        self.groups = [group for part in self.parts.values() for group in part.groups]

    @property
    def params(self) -> list[Any]:
        """Every parameter."""
        return [param for part in self.parts.values() for param in part.params]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored between steps."""
        return sum(part.nbytes for part in self.parts.values())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self.parts.values():
            part.zero_grad()

    def step_unless(self, bad: Any) -> None:
        """One step of both, or of neither; see `Optimizer.step_unless`."""
        for part in self.parts.values():
            part.step_unless(bad)

    def state_dict(self) -> dict[str, Any]:
        """The states of both optimizers, their names in front."""
        return {
            f"{name}.{key}": value
            for name, part in self.parts.items()
            for key, value in part.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for name, part in self.parts.items():
            start = f"{name}."
            mine = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
            part.load_state_dict(mine)


def make_schedule(settings: Settings, epoch_steps: int) -> Schedule:
    """The schedule that the settings name; at least one step is not warm-up.

    A schedule without a warm-up of its own comes after one.
    """
    name = settings.schedule
    cls = SCHEDULES[name]
    total = settings.epochs * epoch_steps
    warmup = min(round(settings.warmup_epochs * epoch_steps), total - 1)
    known = inspect.signature(cls).parameters
    wrapped = not known.keys() & {"warmup", "warm", "steps"}
    provided = {
        "total": total - warmup if wrapped else total,
        "final": settings.final_lr,
        "warmup": warmup,
        "steps": warmup,
        "warm": warmup / total,
        "mode": "min",
    }
    options = {key: value for key, value in provided.items() if key in known}
    options |= parse_options("schedule", name, settings.schedule_options, epoch_steps)
    made = cls(**options)
    return Warmup(warmup, made) if wrapped else made
