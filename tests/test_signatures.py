"""Every public callable takes what it took, and every table holds what it held.

tests/signatures.txt has parameters, their order and kind, and defaults; tests/constants.txt has
formats, recipes, schemes, models, runs and other constants, of long ones the checksum, and what
operations declare. `python tests/test_signatures.py` writes them anew. A line that changes is a
change that users see: the changelog says so.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any
from zlib import crc32

import pytest

from extensor.autograd.primitive import OPS, Primitive
from extensor.quant.recipe import Recipe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.test_docstrings import documented

HERE = Path(__file__).parent
ROOMS = ["formats", "quant", "nn", "optim", "io", "models", "training", "generation", "inspect"]
"""Packages whose constants count."""
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


def files() -> Iterator[tuple[str, Path]]:
    """The modules of `ROOMS`."""
    for room in ROOMS:
        folder = Path(str(importlib.import_module(f"extensor.{room}").__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[-1] != "__main__":
                yield ".".join(["extensor", room, *(p for p in parts if p != "__init__")]), path


def constants() -> list[str]:
    """A line for each public constant, of a table for each row, where modules assign them."""
    found = []
    for name, path in files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
            if isinstance(target, ast.Name) and re.fullmatch("[A-Z][A-Z0-9_]+", target.id):
                value = getattr(importlib.import_module(name), target.id)
                if isinstance(value, Mapping):
                    found += [f"{name}.{target.id}[{key!r}] = {text(value[key])}"
                              for key in value]  # fmt: skip
                else:
                    found.append(f"{name}.{target.id} = {text(value)}")
    importlib.import_module("extensor.ops.prequantized")  # which completes the registry
    for name, op in sorted(OPS.items()):
        if op.primitive is not None:
            declared = {
                f.name: getattr(op.primitive, f.name) for f in dataclasses.fields(Primitive)
            }
            plain = {k: v for k, v in declared.items() if isinstance(v, bool | str | tuple)}
            found.append(f"{name} = {text({k: v for k, v in plain.items() if v and k != 'vjps'})}")
    return [line for line in found if str(HERE.parent) not in line and str(Path.home()) not in line]


def text(value: Any) -> str:
    """A constant as it is printed, without descriptions; a long one's checksum."""
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    whole = f"{value!r} {value.layers!r}" if isinstance(value, Recipe) else repr(value)
    whole = re.sub(r" at 0x\w+|doc=('[^']*'|\"[^\"]*\")(, )?", "", whole)
    return whole if len(whole) < 120 and "\n" not in whole else f"{crc32(whole.encode()):08x}"


TABLES: dict[str, Callable[[], list[str]]] = {"signatures": lines, "constants": constants}


@pytest.mark.parametrize("table", TABLES)
def test_nothing_changed(table: str) -> None:
    stored = (HERE / f"{table}.txt").read_text(encoding="utf-8").splitlines()
    now = TABLES[table]()
    gone, new = sorted(set(stored) - set(now)), sorted(set(now) - set(stored))
    assert (gone, new) == ([], []), "meant? python tests/test_signatures.py writes them anew"


if __name__ == "__main__":
    for table, made in TABLES.items():
        (HERE / f"{table}.txt").write_text("".join(f"{line}\n" for line in made()), "utf-8")
