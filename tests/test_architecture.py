"""The house rules that no linter knows: what an import costs, where names may stand, what is said.

Every check reads the repository's own files, so a new file is covered the day it is written.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import extensor
from extensor import config
from extensor.autograd.methods import OpMethods
from extensor.autograd.primitive import OPS
from extensor.dtypes import BLOCKED, DENSE
from extensor.formats import DIALECTS, ELEMENTS, FORMATS, SCALES

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "extensor"
LOADED_WHEN_NEEDED = (
    "cupy",
    "extensor_cuda",
    "matplotlib",
    "rich",
    "safetensors",
    "sklearn",
    "tensorboardX",
    "torch",
    "tyro",
)

MAY_NAME_FORMATS = (
    "formats/",
    "quant/recipes.py",
    "quant/schemes.py",
    "autograd/blocked.py",
    "io/",
)
"""The table; the recipes and schemes, which are about formats; the sugar methods (`to_mxfp4`); the
adapters to foreign checkpoints, each of which stores one format."""

SCALE_GRIDS = {("quant/codec_types.py", "e4m3"), ("_core/rows.py", "e4m3")}
"""The element grid that holds NVFP4's scales."""

DENSE_NAMES = {"int8"}
"""Format names that are also a dense dtype's, and so say nothing."""


def python_files(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# ---- what importing costs


def test_import_stays_light() -> None:
    code = (
        "import json, sys, extensor; "
        f"print(json.dumps([m for m in {LOADED_WHEN_NEEDED!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []


PARTS = """
import importlib, sys
parts = ("extensor.models", "extensor.training")
for name in sys.argv[1:]:
    for loaded in [module for module in sys.modules if module.startswith(parts)]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


def test_every_module_of_training_can_be_the_first_to_be_imported() -> None:
    """Modules that import each other in a circle work in one order only."""
    names = [
        module_name(path)
        for room in ("models", "training")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.name != "__main__.py"
    ]
    assert len(names) > 60
    subprocess.run([sys.executable, "-c", PARTS, *names], cwd=ROOT, check=True)


def test_formats_need_only_the_standard_library() -> None:
    allowed = sys.stdlib_module_names
    for path in python_files("extensor/formats"):
        for node in ast.walk(tree_of(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            for name in names:
                own = name.startswith("extensor.formats") or name == "extensor.errors"
                assert own or name.split(".")[0] in allowed, f"{relative(path)} imports {name}"


# ---- import circles

ROOMS = ("extensor", "extensor_cuda", "models", "training", "ci")


PARTS_OF_EXTENSOR = ("models", "training")
"""Folders beside `extensor` whose modules are imported as its parts (docs/adr/0017)."""


def module_name(path: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    prefix = ("extensor",) if parts[0] in PARTS_OF_EXTENSOR else ()
    return ".".join((*prefix, *parts)).removesuffix(".__init__")


def imports_of(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules of ``trees`` each of them imports: on top, in functions, and for types only.

    ``import_module(".name", ...)`` counts, too.

    ``from package import name`` counts as an import of the module ``package.name`` if there is one.
    """
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = imported_module(name, node, trees)
                inner = (f"{module}.{alias.name}" for alias in node.names)
                found.update(i if i in trees else module for i in inner)
            elif (
                isinstance(node, ast.Call)
                and node.args
                and "import_module" in ast.unparse(node.func)
            ):
                named = node.args[0]
                if isinstance(named, ast.Constant) and str(named.value).startswith("."):
                    beside = ast.ImportFrom(str(named.value)[1:], [], 1)
                    found.add(imported_module(name, beside, trees))
        graph[name] = (found & trees.keys()) - {name}
    return graph


def imported_module(name: str, node: ast.ImportFrom, trees: dict[str, ast.Module]) -> str:
    """The module that ``from ... import`` names in the module ``name``; relative ones resolved."""
    if not node.level:
        return str(node.module)
    package = any(other.startswith(f"{name}.") for other in trees)
    parts = name.split(".")[: len(name.split(".")) + package - node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of two modules or more."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set(), [start]
        while stack:
            for module in graph[stack.pop()] - seen:
                seen.add(module)
                stack.append(module)
        reached[start] = seen
    return {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }


def test_no_file_imports_itself_in_a_circle() -> None:
    found = circles(imports_of(all_trees()))
    assert not found, f"files that import one another: {[sorted(circle) for circle in found]}"


def all_trees() -> dict[str, ast.Module]:
    return {module_name(path): tree_of(path) for path in python_files(*ROOMS)}


@pytest.mark.parametrize("room", ["extensor/quant", "training"])
def test_the_index_of_a_room_has_each_of_its_files(room: str) -> None:
    lines = re.findall(r"^# (.*?):", (ROOT / room / "__init__.py").read_text(), re.MULTILINE)
    named = sorted(name for line in lines for name in line.split(", "))
    found = (ROOT / room).iterdir()
    files = {f.stem for f in found if f.suffix == ".py" or (f / "__init__.py").exists()}
    assert named == sorted(files - {"__init__", "__main__"})


def test_the_floors_in_the_docs_are_those_that_are_enforced() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {row["id"]: row for row in settings["tool"]["importlinter"]["contracts"]}
    rows, inside = [], {"extensor": "floors", "extensor_cuda": "cuda_floors"}
    for package in contracts["packages"]["layers"]:
        rows.append(package)
        if package in inside:
            rows += [f"    {row}" for row in contracts[inside[package]]["layers"]]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "\n".join(["```", *rows, "```"]) in page


def test_models_and_training_have_one_name() -> None:
    """`import training` would make a second copy of what is `extensor.training` elsewhere."""
    found = []
    for path in python_files(*ROOMS, "tests", "docs"):
        inside = path.relative_to(ROOT).parts[0] in PARTS_OF_EXTENSOR
        for node in ast.walk(tree_of(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert inside or not node.level, f"{relative(path)}: a relative import"
                names = [] if node.level else [str(node.module)]
            bare = [name for name in names if name.partition(".")[0] in PARTS_OF_EXTENSOR]
            found += [f"{relative(path)}:{node.lineno}: {name}" for name in bare]
    assert not found, "import extensor.models and extensor.training: " + "; ".join(found)


def floor(name: str) -> int:
    """The library is below models, models below training; import-linter sees the library only."""
    part = name.removeprefix("extensor.").partition(".")[0]
    return PARTS_OF_EXTENSOR.index(part) + 1 if part in PARTS_OF_EXTENSOR else 0


def test_the_library_needs_neither_models_nor_training() -> None:
    """The package itself may name them: it imports them when they are asked for."""
    for name, imported in imports_of(all_trees()).items():
        if name.startswith("extensor") and name != "extensor":
            above = sorted(other for other in imported if floor(other) > floor(name))
            assert not above, f"{name} imports {above}"


def test_an_import_circle_is_noticed() -> None:
    sources = {
        "p": "from p import a",
        "p.a": "def f():\n    from p.b import g",
        "p.b": "if TYPE_CHECKING:\n    import p.c",
        "p.c": "from p import a",
        "p.d": "import p.a",
        "p.q": "",
        "p.q.x": "from .y import g",
        "p.q.y": "from ..q import x",
        "p.r": "",
        "p.r.x": "import p.r.y",
        "p.r.y": "def f():\n    return import_module('.x', __package__)",
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    assert circles(imports_of(trees)) == {
        frozenset({"p.a", "p.b", "p.c"}),
        frozenset({"p.q.x", "p.q.y"}),
        frozenset({"p.r.x", "p.r.y"}),
    }


# ---- one place per fact


def strings_in_code(node: ast.AST) -> Iterator[ast.Constant]:
    """String constants, without those of samples and bad inputs: they are tests beside the code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    for child in ast.iter_child_nodes(node):
        declared = isinstance(child, ast.keyword) and child.arg in ("samples", "errors")
        if not (declared or "samples" in (getattr(child, "name", None) or "")):
            yield from strings_in_code(child)


def test_format_names_stand_in_the_table_only() -> None:
    names = (set(FORMATS) | set(ELEMENTS)) - DENSE_NAMES
    found = []
    for path in python_files("extensor"):
        place = path.relative_to(LIBRARY).as_posix()
        if place.startswith(MAY_NAME_FORMATS):
            continue
        for node in strings_in_code(tree_of(path)):
            if node.value in names and (place, node.value) not in SCALE_GRIDS:
                found.append(f"{relative(path)}:{node.lineno}: {node.value!r}")
    assert not found, "format names outside the table: " + "; ".join(found)


def test_a_format_name_in_code_is_noticed() -> None:
    code = "@op(samples=lambda rng: ['mxfp4'])\ndef f(x): return x == 'nvfp4'\n"
    assert [node.value for node in strings_in_code(ast.parse(code))] == ["nvfp4"]


@pytest.mark.parametrize("table", [ELEMENTS, FORMATS, SCALES, DIALECTS])
def test_rows_are_filed_under_their_own_name(table: dict[str, object]) -> None:
    assert table
    for name, row in table.items():
        assert row.name == name
        assert row.doc


def test_every_grid_is_used() -> None:
    assert {row.element.name for row in FORMATS.values()} == set(ELEMENTS)


def test_every_format_is_a_public_dtype() -> None:
    assert {dtype.format.name for dtype in BLOCKED.values() if dtype.format} == set(FORMATS)
    for name, dtype in {**BLOCKED, **DENSE}.items():
        public = "bool_" if name == "bool" else name
        assert getattr(extensor, public) is dtype


for _room in ("extensor.ops", "extensor.array_api"):  # the registry is complete with them
    for _module in pkgutil.walk_packages(importlib.import_module(_room).__path__, f"{_room}."):
        importlib.import_module(_module.name)

METHODS = {"quantize", "dequantize", "getitem", "sum_to"}
"""Operations called through ExTensor (`x.quantize`, `x[...]`) or by the engine."""


def test_public_names_are_complete() -> None:
    """Every name in `extensor.__all__` is there, and every operation is among them."""
    assert len(set(extensor.__all__)) == len(extensor.__all__)
    for name in extensor.__all__:
        assert hasattr(extensor, name), name
    public = {name for name, op in OPS.items() if not op.function.__name__.startswith("_")}
    assert public >= METHODS
    named = {*extensor.__all__, *extensor.linalg.__all__}
    assert sorted(public - METHODS - named) == []


def test_what_is_imported_when_asked_for_is_what_type_checkers_see() -> None:
    block = next(n for n in tree_of(LIBRARY / "__init__.py").body if isinstance(n, ast.If))
    typed = {alias.name for node in block.body for alias in node.names}
    assert typed == extensor._MODULES.keys() | extensor._LAZY.keys()


def test_methods_bear_the_names_of_operations() -> None:
    names = {name for name in vars(OpMethods) if not name.startswith("_")}
    assert len(names) > 60
    assert names - OPS.keys() == {"T", "mT", "unsqueeze"}


def test_every_operation_is_checked() -> None:
    """An operation has samples, and either a gradient or a reason for having none."""
    assert len(OPS) > 100
    for name, op in OPS.items():
        assert op.function.__doc__, name
        assert list(op.samples(np.random.default_rng(0))), f"{name} has no samples"
        if op.primitive is not None:
            assert op.primitive.differentiable or op.primitive.no_vjp, name


def test_every_flag_used_is_in_the_table() -> None:
    """EXTENSOR_* names that occur anywhere in the code are rows of config.FLAGS, and back."""
    pattern = re.compile(r"\bEXTENSOR_[A-Z][A-Z_]*\b")
    here = Path(__file__).resolve()
    used = {
        name
        for path in python_files("extensor", "models", "training", "ci", "tests", "docs")
        if path != here
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }
    known = {flag.name for flag in config.FLAGS.values()}
    assert used == known
    assert len(known) <= 10


# ---- what is said


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and methods of a module, by dotted name."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, definitions) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, definitions) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def is_overload(node: ast.AST) -> bool:
    marks = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(mark.endswith(("overload", ".setter")) for mark in marks)


def test_public_definitions_have_docstrings() -> None:
    found = []
    for path in python_files("extensor"):
        tree = tree_of(path)
        if not ast.get_docstring(tree):
            found.append(f"{relative(path)}: module")
        for name, node in public_definitions(tree):
            if not is_overload(node) and not ast.get_docstring(node):
                found.append(f"{relative(path)}:{node.lineno}: {name}")
    assert not found, "no docstring: " + "; ".join(found)


def test_cuda_families_include_their_own_headers_common_or_codec() -> None:
    kernels = ROOT / "extensor_cuda" / "kernels"
    include = re.compile(r'^ *# *include "([^"/]*)/?([^"]*)"', re.MULTILINE)
    found, wrong = 0, []
    for path in sorted(kernels.rglob("*.cu*")):
        for family, name in include.findall(path.read_text(encoding="utf-8")):
            found += 1
            shared = "codec" if path.parent.name != "common" else "common"
            exists = (kernels / family / name).is_file()
            if family not in (path.parent.name, "common", shared) or not exists:
                wrong.append(f"{relative(path)}: {family}/{name}")
    assert found and not wrong, "includes another family: " + "; ".join(wrong)


def test_no_loose_ends() -> None:
    """No unfinished marks: what is written works, what does not is not there."""
    marks = re.compile(
        "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise Not" + "Implemented"))
    )
    found = [
        f"{relative(path)}:{number}"
        for path in python_files("extensor", "models", "training", "ci", "tests", "docs")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]
    assert not found, "unfinished: " + "; ".join(found)


TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".cpp", ".hpp", ".cu", ".txt", ".json", ".svg", ""}
NOT_OURS = {"build", "dist", "runs", "__pycache__", "_build"}


def repository_texts() -> Iterator[Path]:
    """Text files of the repository: no build outputs, no hidden folders other than `.ci`."""
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name == ".ci" or not (name.startswith(".") or name in NOT_OURS)
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in TEXT and (path.suffix or path.parent.name == ".ci"):
                yield path


def test_no_machine_paths() -> None:
    """Nothing names a home directory or a place of the machine it was written on."""
    here = Path(__file__).resolve()
    machine = re.compile(r"(?<![\w.$~}])/(?:home|root|Users|work|mnt|opt)/\w")
    found = [
        f"{relative(path)}:{number}: {line.strip()[:80]}"
        for path in repository_texts()
        if path != here
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if machine.search(line)
    ]
    assert not found, "machine paths: " + "; ".join(found)


def test_relative_links_of_the_docs_resolve() -> None:
    link = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    assert pages
    broken = [
        f"{relative(page)} -> {target}"
        for page in pages
        for target in link.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken, "broken links: " + "; ".join(broken)
