"""Every public callable takes what it took: parameters, their order and kind, and defaults.

`python tests/test_signatures.py` writes tests/signatures.txt anew. A line that changes is a change
that users see: the changelog says so.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.test_docstrings import documented

STORED = Path(__file__).with_name("signatures.txt")
APPLICATIONS = ("extensor.models", "extensor.training")
"""Packages without a page in the API reference."""


def applications() -> Iterator[tuple[str, Any]]:
    """The public functions and classes that they declare."""
    for package in map(importlib.import_module, APPLICATIONS):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                names = vars(importlib.import_module(module.name)).items()
                for name, value in names:
                    here = getattr(value, "__module__", "") == module.name
                    if here and not name.startswith("_") and isinstance(value, type | FunctionType):
                        yield f"{module.name}.{name}", value


class Default:
    """A parameter's default as it is printed: plain values whole, of others the name or type."""

    def __init__(self, value: Any) -> None:
        plain = isinstance(value, bool | int | float | str | tuple | None)
        named = getattr(value, "__name__", type(value).__name__)
        self.text = repr(value) if plain or dataclasses.is_dataclass(value) else named

    def __repr__(self) -> str:
        return self.text


def signature(value: Any) -> str:
    """Parameters without annotations; of a record how it is compared and whether it changes."""
    try:
        whole = inspect.signature(value)
    except (TypeError, ValueError):
        return "()"
    bare = [
        p.replace(
            annotation=p.empty, default=p.empty if p.default is p.empty else Default(p.default)
        )
        for p in whole.parameters.values()
    ]
    text = str(whole.replace(parameters=bare, return_annotation=whole.empty))
    if dataclasses.is_dataclass(value) and isinstance(value, type):
        options = value.__dataclass_params__  # type: ignore[attr-defined]
        text += f" frozen={options.frozen} eq={options.eq} order={options.order}"
    return text


def lines() -> list[str]:
    """A line for each that takes anything, by name."""
    found = {
        name: signature(value)
        for name, value in (*documented().items(), *applications())
        if not isinstance(value, property) and not name.startswith("extensor.torch.")
    }
    return [f"{name}{text}" for name, text in sorted(found.items()) if "=" in text]


def test_nothing_changed() -> None:
    stored, now = STORED.read_text(encoding="utf-8").splitlines(), lines()
    gone, new = sorted(set(stored) - set(now)), sorted(set(now) - set(stored))
    assert (gone, new) == ([], []), "meant? python tests/test_signatures.py writes them anew"


def test_annotations_can_be_read_while_a_program_runs() -> None:
    """As tyro and type checkers at run time do; of the optional matplotlib alone not."""
    for name, value in documented().items():
        called = value.__init__ if isinstance(value, type) else value
        plain = inspect.isfunction(called) or inspect.ismethod(called)
        if plain and not name.startswith(("extensor.torch.", "extensor.inspect.plot")):
            typing.get_type_hints(called)


if __name__ == "__main__":
    STORED.write_text("".join(f"{line}\n" for line in lines()), "utf-8")
