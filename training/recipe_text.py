"""Recipes from files, in a run: their text is kept in the run's settings, so that it goes on alike.

A run's ``recipe_text`` holds each file that ``--recipe`` and ``--operands`` name, as
`extensor.quant.recipe_file.recipe_toml` writes it: comments are gone, and no parent is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from extensor.quant.recipe import Recipe
from extensor.quant.recipe_file import recipe_toml
from extensor.quant.recipes import FILE_SUFFIX, get_recipe, parse_named

__all__ = ["collect", "files_named", "join", "lookup", "own_lines", "read_again", "split"]

_HEAD = "# file: "


def files_named(*settings: str) -> list[str]:
    """The recipes' files in ``--recipe`` and ``--operands``, each once."""
    words = [word for text in settings for word in re.split(r"[,@=]", text)]
    return list(dict.fromkeys(w.strip() for w in words if w.strip().endswith(FILE_SUFFIX)))


def split(text: str) -> dict[str, str]:
    """The files of a ``recipe_text`` by name.

    Raises:
        ValueError: for another text.
    """
    if not text:
        return {}
    if not text.startswith(_HEAD):
        raise ValueError(
            f"recipe_text: expected files that begin with {_HEAD!r}, got {text[:40]!r}"
        )
    parts = re.split(rf"^{_HEAD}(.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def join(files: Mapping[str, str]) -> str:
    """The ``recipe_text`` of such files."""
    return "".join(f"{_HEAD}{name}\n{text}" for name, text in files.items())


def collect(names: list[str], text: str) -> str:
    """A ``recipe_text`` of the files named: those in ``text`` as they are, others are read.

    Raises:
        ValueError: for a file that cannot be read, or describes no recipe.
    """
    kept = split(text)
    return join({n: kept[n] if n in kept else recipe_toml(get_recipe(n)) for n in names})


def read_again(text: str, names: list[str]) -> str:
    """A ``recipe_text`` in which such files are as they are now; they may be new in it.

    Raises:
        ValueError: for a file that cannot be read, or describes no recipe.
    """
    files = split(text)
    others = join({name: files[name] for name in files if name not in names})
    return collect(list(dict.fromkeys([*files, *names])), others)


def own_lines(text: str, *others: str) -> list[str]:
    """The lines of a ``recipe_text`` that one of the others lacks."""
    return [line for line in text.splitlines() if any(line not in o.splitlines() for o in others)]


def lookup(text: str) -> Callable[[str], Recipe]:
    """A function that gives a recipe by name, from a ``recipe_text`` before any other place."""
    files = split(text)

    def known(name: str) -> Recipe:
        return parse_named(files[name], Path(name).stem) if name in files else get_recipe(name)

    return known
