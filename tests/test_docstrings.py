"""Every public callable is documented: what it takes, gives and raises, with an example that runs.

The public names are those of the API reference's pages. A method that calls the operation of its
name points to it (``See :func:`extensor.sum`.``) and repeats nothing.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import extensor as et

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
reference = pytest.importorskip("reference", reason="the API reference's pages need sphinx")

POINTER = re.compile(r"See :(?:func|meth|class):`~?(extensor[\w.]*)`")
NAMES = {"et": et, "nn": et.nn, "optim": et.optim}
"""What every example may use without importing it; `docs/_ext/reference.py` says so."""


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """A class's own public methods, those of its bases included; properties without the rest."""
    for name, value in inspect.getmembers_static(cls):
        function = getattr(value, "__func__", value)  # of class and static methods
        documented = inspect.isfunction(function) or isinstance(function, property)
        module = getattr(getattr(function, "fget", function), "__module__", "") or ""
        if documented and not name.startswith("_") and module.startswith("extensor"):
            yield name, function


@cache
def documented() -> dict[str, Any]:
    """Every public callable and property once, by its name in the reference."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for room in reference.ROOMS:
        for name, value in reference.public(room).items():
            if not isinstance(value, type) and inspect.ismethod(value):
                value = value.__func__
            if id(value) in seen:
                continue
            seen.add(id(value))
            found[f"{room}.{name}"] = value
            for method, function in members(value) if inspect.isclass(value) else ():
                if id(function) not in seen:
                    seen.add(id(function))
                    found[f"{room}.{name}.{method}"] = function
    return found


def parameters(value: Any) -> list[str]:
    """The parameters that a docstring must name."""
    if getattr(value, "_is_protocol", False):
        return []  # nobody makes one
    if inspect.isclass(value) and "__init__" not in vars(value) and not issubclass(value, tuple):
        inherited = [base for base in value.__mro__[1:] if "__init__" in vars(base)]
        if inherited and not hasattr(value, "__dataclass_fields__"):
            return []  # the base's docstring says it
    try:
        names = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def raises(function: Any) -> bool:
    """Whether a function's own body raises an error, inner functions left out."""
    inner = inspect.unwrap(function)
    if not inspect.isfunction(inner):
        return False
    tree: ast.AST = ast.parse(textwrap.dedent(inspect.getsource(inner))).body[0]
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False


def gives(function: Any) -> bool:
    """Whether a function returns something, by its annotation."""
    returned = getattr(inspect.unwrap(function), "__annotations__", {}).get("return", "None")
    return returned not in ("None", "NoReturn", None)


def missing(value: Any) -> list[str]:
    """The parts of the rule that a docstring lacks."""
    is_class, is_property = inspect.isclass(value), isinstance(value, property)
    text = inspect.getdoc(value) or ""
    if not text.strip():
        return ["a docstring"]
    if is_property:
        return []
    if pointer := POINTER.match(text):
        return [] if explains(pointer.group(1)) else [f"{pointer.group(1)} to point to"]
    lacks = []
    for name in parameters(value):
        if not re.search(rf"^\s+\*{{0,2}}{name}\b[^:\n]*:", text, re.MULTILINE):
            lacks.append(f"Args: {name}")
    if not is_class and gives(value) and not re.search(r"^(Returns|Yields):", text, re.MULTILINE):
        lacks.append("Returns:")
    if not is_class and raises(value) and not re.search(r"^Raises:", text, re.MULTILINE):
        lacks.append("Raises:")
    if ">>>" not in text:
        lacks.append("an example")
    return lacks


def explains(name: str) -> bool:
    """Whether a name that a pointer gives has a docstring that follows the rule itself."""
    try:
        target = pkgutil.resolve_name(name)
    except AttributeError:
        return False
    return not POINTER.match(inspect.getdoc(target) or "") and not missing(target)


def test_every_callable_is_documented() -> None:
    lacking = {name: parts for name, value in documented().items() if (parts := missing(value))}
    assert not lacking, "\n".join(f"{name}: {', '.join(p)}" for name, p in lacking.items())


def examples() -> list[doctest.DocTest]:
    parser = doctest.DocTestParser()
    found = []
    for name, value in documented().items():
        text = inspect.getdoc(value) or ""
        if ">>>" in text and not name.startswith("extensor.torch."):  # tests/unit/torch runs those
            found.append(parser.get_doctest(text, dict(NAMES), name, None, None))
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_examples_run(example: doctest.DocTest) -> None:
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert not told, "".join(told)


def tally() -> str:
    """How many public callables have an example, in words; `python tests/test_docstrings.py`."""
    values = [value for value in documented().values() if not isinstance(value, property)]
    texts = [inspect.getdoc(value) or "" for value in values]
    own = sum(">>>" in text for text in texts)
    pointing = sum(">>>" not in text and bool(POINTER.match(text)) for text in texts)
    return (
        f"{len(values)} public callables: {own} have an example of their own, {pointing} point to "
        f"the operation of their name, which has one, {len(values) - own - pointing} have none"
    )


def test_the_rule_can_fail() -> None:
    def bare(x: int) -> int:
        """Add one."""
        if x < 0:
            raise ValueError
        return x + 1

    def lost(x: int) -> int:
        """See :func:`extensor.no_such_name`."""
        return x

    assert missing(bare) == ["Args: x", "Returns:", "Raises:", "an example"]
    assert missing(lost) == ["extensor.no_such_name to point to"]


if __name__ == "__main__":
    print(tally())
