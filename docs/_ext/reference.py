"""Writes the API reference's pages from the package, so that no public name can be missing.

A page per module, its names grouped by the file that declares them. A class shows the methods of
bases that have no entry of their own. `tests/test_docstrings.py` checks what is written here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from extensor.dtypes import DType

ROOMS = {
    "extensor": "Tensors and operations",
    "extensor.linalg": "Matrices",
    "extensor.fft": "Fourier transforms",
    "extensor.nn": "Layers",
    "extensor.nn.init": "Initializers",
    "extensor.optim": "Optimizers and schedules",
    "extensor.quant.recipe": "Recipes",
    "extensor.dtypes": "Data types",
    "extensor.formats": "Formats",
    "extensor.generation": "Writing text",
    "extensor.torch": "Inside PyTorch",
    "extensor.distributed": "Several ranks",
    "extensor.random": "Random bits",
    "extensor.io": "Files",
    "extensor.io.layouts": "Checkpoint layouts",
    "extensor.inspect": "Looking at quantization",
    "extensor.testing": "Testing",
    "extensor.errors": "Errors",
    "extensor.config": "Environment variables",
}

OPTIONAL = {"extensor.torch": "torch"}
"""Modules that need a package which is not always installed: without it their page says so."""

FIRST = (
    "extensor.autograd.tensor",
    "extensor.autograd.creation.filled",
    "extensor.autograd.creation.like",
    "extensor.autograd.creation.random",
    "extensor.autograd.creation.foreign",
    "extensor.io.tensors",
    "extensor.quant.spec",
    "extensor.nn.module",
    "extensor.optim.optimizer",
)
"""Modules that a reader of a page looks for first."""

POINTER = re.compile(r"See :meth:`[^`]*`\.")
BACK = re.compile(r'(class="viewcode-back" href="[^"#]*/)([\w.]+)\.html#([\w.]+)"')


def lacks(room: str) -> bool:
    """Whether the package that a module needs is not installed."""
    return room in OPTIONAL and importlib.util.find_spec(OPTIONAL[room]) is None


def public(room: str) -> dict[str, Any]:
    """A room's public names and what they stand for, without modules and plain values."""
    if lacks(room):
        return {}
    module = pkgutil.resolve_name(room)
    default = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == room]
    names = [n for n in getattr(module, "__all__", default) if not n.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    ours = {name: value for name, value in found.items() if within(value)}
    return {name: value for name, value in ours.items() if callable(value)}


def within(value: object) -> bool:
    """Whether something is declared in extensor."""
    return origin(value).startswith("extensor")


def origin(value: object) -> str:
    """The module that declares something; objects (an op is one) answer through their class."""
    declared = getattr(value, "__module__", None) or type(value).__module__
    return str(declared)


def grouped(names: dict[str, Any]) -> dict[str, list[str]]:
    """Names by the module that declares them: FIRST, then by name, the array standard's last."""
    groups: dict[str, list[str]] = {}
    for name, value in names.items():
        groups.setdefault(origin(value), []).append(name)
    first = [module for module in FIRST if module in groups]
    others = sorted(groups.keys() - first, key=lambda m: (m.startswith("extensor.array_api"), m))
    return {module: groups[module] for module in (*first, *others)}


def heading(module: str) -> Iterator[str]:
    """A module's last name, and the first line of its docstring."""
    yield f"## {module.rpartition('.')[2].replace('_', ' ').capitalize()}"
    yield ""
    yield (inspect.getdoc(importlib.import_module(module)) or "").partition("\n")[0]
    yield ""


@functools.cache
def entries() -> frozenset[str]:
    """The names of all classes that have an entry."""
    found = (value for room in ROOMS for value in public(room).values())
    return frozenset(value.__name__ for value in found if inspect.isclass(value))


def directive(room: str, name: str, value: object) -> Iterator[str]:
    """One documented object, as an autodoc directive inside Markdown."""
    kind = "class" if inspect.isclass(value) else "function"
    yield "```{eval-rst}"
    yield f".. auto{kind}:: {room}.{name}"
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__mro__[1:]]
        ours = entries().intersection(bases)
        stop = ours | {base.__name__ for base in value.__mro__ if not within(base)}
        yield f"   :inherited-members: {', '.join(sorted(stop))}"
        fields = {name for base in value.__mro__[1:] for name in inspect.get_annotations(base)}
        if fields:  # the class's docstring describes them
            yield f"   :exclude-members: {', '.join(sorted(fields))}"
        if ours:
            yield "   :show-inheritance:"
    yield "```"
    yield ""


def constants(room: str) -> Iterator[tuple[str, str]]:
    """A module's public values that are not callable, with their docstrings."""
    module = pkgutil.resolve_name(room)
    for name in sorted(getattr(module, "__all__", ())):
        value = getattr(module, name)
        if name.startswith("_") or callable(value) or inspect.ismodule(value):
            continue
        if doc := written_doc(name, value):
            yield name, doc


def written_doc(name: str, value: object) -> str:
    """The string below the assignment of a value, in the module of extensor that makes it."""
    for title, module in sorted(sys.modules.items()):
        written = title.startswith("extensor.") and str(module.__file__).endswith(".py")
        if written and vars(module).get(name) is value:
            source = ModuleAnalyzer.for_module(title)
            source.analyze()
            if lines := source.attr_docs.get(("", name)):
                return " ".join(lines).strip()
    return f"The dtype ``{value!r}``." if isinstance(value, DType) else ""


def page(room: str, title: str) -> Iterator[str]:
    """A room's page."""
    names = public(room)
    yield f"# {title}"
    yield ""
    if package := OPTIONAL.get(room):
        yield f"Examples assume `import {package}`, and `nn` for `{package}.nn`."
        yield ""
    if lacks(room):
        yield f"This site was built without {package}, which `{room}` needs: its names are not"
        yield f"listed here. `python -c 'import {room}; help({room})'` shows them."
        return
    yield f"`{room}`: {inspect.getdoc(pkgutil.resolve_name(room)) or ''}".split("\n\n")[0]
    yield ""
    groups = grouped(names)
    for module, members in groups.items():
        if len(groups) > 1:
            yield from heading(module)
        for name in sorted(members):
            yield from directive(room, name, names[name])
    values = list(constants(room))
    if values:
        yield "## Values"
        yield ""
    for name, doc in values:
        yield "```{eval-rst}"
        yield f".. py:data:: {room}.{name}"
        yield ""
        yield f"   {doc}"
        yield "```"
        yield ""


def index(rooms: Iterable[str]) -> Iterator[str]:
    """The reference's first page."""
    yield "# API reference"
    yield ""
    yield "Every public name, from its docstring. Examples assume `import extensor as et`, and"
    yield "`nn` and `optim` for `et.nn` and `et.optim`."
    yield ""
    yield "```{toctree}"
    yield ":maxdepth: 1"
    yield ""
    yield from rooms
    yield "```"


def write(app: Sphinx) -> None:
    """Write the pages that changed."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    pages = {room: page(room, title) for room, title in ROOMS.items()}
    for name, lines in {**pages, "index": index(ROOMS)}.items():
        path, expected = folder / f"{name}.md", "\n".join(lines) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != expected:
            path.write_text(expected, encoding="utf-8")


def public_bases(app: Sphinx, name: str, value: type, options: Any, bases: list[type]) -> None:
    """Name a class's public bases: those of a private base in its place."""
    for i, base in enumerate(bases):
        if base.__name__.startswith("_"):
            bases[i] = next(one for one in base.__mro__ if not one.__name__.startswith("_"))


def skip_pointers(
    app: Sphinx, what: str, name: str, value: object, skip: bool, options: Any
) -> bool | None:
    """Leave out a method whose docstring only points to the method that it overrides."""
    doc = getattr(value, "__doc__", None) or ""
    return True if what == "class" and POINTER.fullmatch(doc.strip()) else None


def point_back(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Lead the links of a source page to entries that exist.

    viewcode takes the page of an object's last entry and the name of a module's first.
    """
    entries = app.env.get_domain("py").objects

    def link(found: re.Match[str]) -> str:
        start, room, name = found.groups()
        if name in entries:
            room = entries[name].docname.rpartition("/")[2]
        words = name.split(".")
        names = [name, *(".".join([room, *words[i:]]) for i in range(1, len(words)))]
        return f'{start}{room}.html#{next(name for name in names if name in entries)}"'

    if page.startswith("_modules/"):
        context["body"] = BACK.sub(link, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx's entry point."""
    app.connect("builder-inited", write)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-skip-member", skip_pointers)
    app.connect("html-page-context", point_back)
    return {"parallel_read_safe": True}
