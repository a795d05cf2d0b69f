"""Models by name: a folder with `configs.py` and `model.py` is one, and nothing lists it."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
from importlib import import_module
from typing import Any

import numpy as np

from extensor.errors import unknown_name
from extensor.nn import Module

__all__ = ["build", "config", "names"]


def names() -> list[str]:
    """The models, by folder name.

    Returns:
        The names, in alphabetical order.

    >>> import models
    >>> "lenet" in models.names()
    True
    """
    return sorted(m.name for m in pkgutil.iter_modules([os.path.dirname(__file__)]) if m.ispkg)


def config(model: str, variant: str | None = None, **changes: Any) -> Any:
    """A model's configuration, with changes.

    Args:
        model: one of `names`.
        variant: a row of the model's ``CONFIGS``; None, the first.
        changes: settings that differ from the row's.

    Returns:
        A frozen record of the model's own class.

    Raises:
        ValueError: on an unknown model, variant or setting (near ones are listed), or values the
            configuration refuses.

    >>> import models
    >>> models.config("gpt", "nano", layers=2)
    GPTConfig(vocab=65, context=64, layers=2, heads=4, width=128, bias=False)
    """
    if model not in names():
        raise ValueError(unknown_name("model", model, names()))
    rows: dict[str, Any] = import_module(f".{model}.configs", __package__).CONFIGS
    variant = next(iter(rows)) if variant is None else variant
    if variant not in rows:
        raise ValueError(unknown_name(f"variant of {model}", variant, rows))
    known = [field.name for field in dataclasses.fields(rows[variant])]
    for name in changes:
        if name not in known:
            raise ValueError(unknown_name(f"setting of {model}", name, known))
    return dataclasses.replace(rows[variant], **changes)


def build(model: str, config: Any, rng: np.random.Generator | None) -> Module:
    """A model with fresh weights drawn from ``rng``.

    Args:
        model: one of `names`.
        config: what `config` gives for it.
        rng: draws the weights, and the masks of dropout. None, for language models that
            `from_pretrained` reads: no memory for weights, which a loader fills.

    Returns:
        The model, in training mode.

    Raises:
        ValueError: on an unknown model.
        TypeError: on a configuration of another model.

    >>> import models
    >>> import numpy as np
    >>> lenet = models.build("lenet", models.config("lenet"), np.random.default_rng(0))
    >>> lenet(et.zeros((2, 1, 28, 28))).shape
    (2, 10)
    """
    if model not in names():
        raise ValueError(unknown_name("model", model, names()))
    expected = type(next(iter(import_module(f".{model}.configs", __package__).CONFIGS.values())))
    if not isinstance(config, expected):
        raise TypeError(
            f"build: expected a {expected.__name__} for {model}, got {type(config).__name__}; "
            f"models.config({model!r}) makes one"
        )
    made: Module = import_module(f".{model}.model", __package__).build(config, rng)
    return made
