"""Models: one folder each, with `model.py` (`build`) and `configs.py` (`CONFIGS`, frozen records).

A folder is found by being there; nothing lists it. The package's name is `extensor.models`; its
files are in the repository's folder `models/`.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from importlib import import_module
from typing import Any

import numpy as np

from extensor.errors import unknown_name
from extensor.nn import Module

__all__ = ["build", "config", "names"]


def names() -> list[str]:
    """The models, by folder name."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg)


def config(model: str, variant: str | None = None, **changes: Any) -> Any:
    """A model's configuration: a row of its CONFIGS, the first by default, with changes.

    Raises:
        ValueError: on an unknown model, variant or setting (near ones are listed), or values the
            configuration refuses.
    """
    if model not in names():
        raise ValueError(unknown_name("model", model, names()))
    rows: dict[str, Any] = import_module(f".{model}.configs", __name__).CONFIGS
    variant = next(iter(rows)) if variant is None else variant
    if variant not in rows:
        raise ValueError(unknown_name(f"variant of {model}", variant, rows))
    known = [field.name for field in dataclasses.fields(rows[variant])]
    for name in changes:
        if name not in known:
            raise ValueError(unknown_name(f"setting of {model}", name, known))
    return dataclasses.replace(rows[variant], **changes)


def build(model: str, config: Any, rng: np.random.Generator) -> Module:
    """A model with fresh weights drawn from ``rng``.

    Raises:
        ValueError: on an unknown model.
        TypeError: on a configuration of another model.
    """
    if model not in names():
        raise ValueError(unknown_name("model", model, names()))
    expected = type(next(iter(import_module(f".{model}.configs", __name__).CONFIGS.values())))
    if not isinstance(config, expected):
        raise TypeError(
            f"build: expected a {expected.__name__} for {model}, got {type(config).__name__}; "
            f"models.config({model!r}) makes one"
        )
    made: Module = import_module(f".{model}.model", __name__).build(config, rng)
    return made
