"""Which optimizers and schedules a run may name, and the options that each takes.

Both tables are read from `extensor.optim`, and options from the signatures of its classes, so that
nothing is listed twice. A parameter that a setting of its own provides (`--momentum`) is no option.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from extensor import optim
from extensor.errors import unknown_name

__all__ = ["OPTIMIZERS", "SCHEDULES", "describe", "option_rows", "parse_options"]


def _classes(base: type, name_of: Callable[[str], str]) -> dict[str, Any]:
    found = {name: getattr(optim, name) for name in optim.__all__}
    return {
        name_of(name): cls
        for name, cls in found.items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base
    }


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


OPTIMIZERS: dict[str, type[optim.Optimizer]] = _classes(optim.Optimizer, str.lower)
"""By the name that ``--optimizer`` takes."""

SCHEDULES: dict[str, Callable[..., optim.Schedule]] = {
    **_classes(optim.Schedule, _snake_case),
    "constant": optim.Warmup,
}
"""By the name that ``--schedule`` takes."""

FROM_SETTINGS = {
    "optimizer": ("params", "lr", "betas", "momentum", "weight_decay", "states", "masters"),
    "schedule": ("total", "final", "warmup", "warm", "steps", "then", "mode"),
}
"""Parameters whose values come from other settings, or from the run."""


def option_rows(cls: Callable[..., Any], kind: str) -> dict[str, inspect.Parameter]:
    """The parameters that ``--optimizer-options`` (``--schedule-options``) may name, in order."""
    parameters = inspect.signature(cls).parameters
    return {name: row for name, row in parameters.items() if name not in FROM_SETTINGS[kind]}


def describe(cls: Callable[..., Any], kind: str) -> str:
    """What a class does, and its options with their defaults, as one line of a help text."""
    doc = (cls.__doc__ or "").partition("\n")[0].replace("`", "").removesuffix(".")
    options = [
        f"{name} (required)" if row.default is row.empty else f"{name}={row.default}"
        for name, row in option_rows(cls, kind).items()
    ]
    return f"{doc} [{', '.join(options)}]" if options else doc


def parse_options(kind: str, name: str, text: str, epoch_steps: int = 1) -> dict[str, Any]:
    """The values of ``NAME=VALUE,...`` as the class that ``name`` stands for takes them.

    Args:
        kind: "optimizer" or "schedule".
        name: a row of `OPTIMIZERS` or `SCHEDULES`.
        text: what the user gave.
        epoch_steps: what a count ending in "ep" is multiplied by.

    Raises:
        ValueError: for an option that the class does not have, one that is missing, or a value of
            another type.
    """
    cls: Any = (OPTIMIZERS if kind == "optimizer" else SCHEDULES)[name]
    flag, rows = f"--{kind}-options", option_rows(cls, kind)
    hints, values = typing.get_type_hints(cls.__init__), {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        option, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"{flag}: expected NAME=VALUE, got {part!r}")
        if option not in rows:
            raise ValueError(f"{flag}: {unknown_name(f'option of {name}', option, rows)}")
        try:
            values[option] = _value(hints[option], value, epoch_steps)
        except ValueError as error:
            raise ValueError(f"{flag}: {option}: {error}") from None
    missing = [n for n, row in rows.items() if row.default is row.empty and n not in values]
    if missing:
        raise ValueError(f"--{kind} {name} needs {flag} {','.join(f'{n}=...' for n in missing)}")
    return values


def _value(kind: Any, text: str, epoch_steps: int) -> Any:
    """Parse a text as a value of an annotated type."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"expected true or false, got {text!r}")
        return text.lower() == "true"
    if typing.get_origin(kind) is tuple:  # of counts
        return tuple(
            _value(typing.get_args(kind)[0], word, epoch_steps) for word in text.split("+")
        )
    if kind is int:
        number = text.removesuffix("ep")
        try:
            return int(text) if number == text else round(float(number) * epoch_steps)
        except ValueError:
            raise ValueError(f"expected a count such as 30 or 3ep, got {text!r}") from None
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"expected a number, got {text!r}") from None
    return text
