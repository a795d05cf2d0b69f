"""Which tests judge a mutant of ci/python_mutants.py, and what they say.

The map of a package says which tests run a line. They judge a mutant of it in a fork of a process
that has collected them, or in one that imports it; see `ci.mutant_plugin`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent
MAPS = ROOT / "build" / "mutants"
HANGS = 200.0
"""Seconds after which pytest is ended, if its own limits on CPU time have not done it."""

WHOLE = (0, 1)
"""Exit codes of a pytest that ran its tests; a test that failed, or took too long, is no judge."""

SHARE = 16
"""Mutants that a process judges where there are many for each."""

FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)

PACKAGES = {
    "autograd": ("extensor/autograd", "every_primitive", "every_reference", "array_api"),
    "ops": ("extensor/ops", "every_primitive", "every_reference", "array_api"),
    "nn": ("extensor/nn", "every_layer", "every_copy"),
    "optim": ("extensor/optim", "every_optimizer", "every_copy", "unit/cuda/test_graph",
              "unit/cuda/test_graph_training"),
    "quant": ("extensor/quant", "every_format", "every_spec", "unit/nn/test_recipe",
              "unit/nn/test_ptq", "unit/ops/test_saved_operands",
              "unit/training/test_recipe_schedule", "unit/autograd/test_blocked"),
    "io": ("extensor/io",),
    "training": ("training",),
    "models": ("models",),
}  # fmt: skip
"""Where a package lies, and what judges it beside tests/unit/<package> and what judges all."""

ALL = ("docstrings", "bad_input", "signatures")

ALWAYS = ["tests/test_signatures.py::test_nothing_changed"]
"""They judge what imports run."""


def tests_of(package: str) -> list[str]:
    """The files and folders of tests that judge a package."""
    names = (*PACKAGES[package][1:], *ALL)
    files = (name if "/" in name else f"test_{name}" for name in names)
    return [f"tests/unit/{package}", *(f"tests/{name}.py" for name in files)]


@dataclass
class Mutant:
    """Lines of a file that become others; ``by`` is the test that notices, empty if none does."""

    file: str
    line: int
    old: str
    new: str
    by: str = ""
    reason: str = ""

    @property
    def package(self) -> str:
        """The package whose folder holds the file."""
        return next(name for name, row in PACKAGES.items() if self.file.startswith(f"{row[0]}/"))

    def original(self) -> str:
        """The file; nothing if it is gone."""
        path = ROOT / self.file
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def found(self) -> tuple[int, int] | None:
        """Line and character of the old text that is nearest to the line; None if it is gone."""
        text = self.original()
        begins = [0, *(found.end() for found in re.finditer("\n", text))]
        places = [n for n, at in enumerate(begins) if text.startswith(self.old, at)]
        if not places:
            return None
        nearest = min(places, key=lambda n: abs(n + 1 - self.line))
        return nearest + 1, begins[nearest]

    def source(self) -> str | None:
        """The file with the mistake; None if the old text is gone."""
        found, text = self.found(), self.original()
        return (
            None
            if found is None
            else text[: found[1]] + self.new + text[found[1] + len(self.old) :]
        )


def map_lines(packages: Sequence[str], jobs: int) -> None:
    """Run the packages' tests and note which lines each runs; each package's in equal shares."""
    MAPS.mkdir(parents=True, exist_ok=True)
    number = max(1, jobs // len(packages))
    shares = {
        package: [MAPS / f"{package}.{share}.json" for share in range(number)]
        for package in packages
    }

    def map_share(package: str, share: int) -> None:
        out = shares[package][share]
        out.unlink(missing_ok=True)
        done = run([*PYTEST, *tests_of(package)], MUTANT_MAP=str(out),
                   MUTANT_SHARE=f"{share}/{number}")  # fmt: skip
        if done.returncode not in WHOLE or not out.exists():
            said = (done.stdout + done.stderr)[-2000:]
            raise SystemExit(f"no map of {package}: pytest ended with {done.returncode}: {said}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda pair: map_share(*pair), product(packages, range(number))))
    for package, paths in shares.items():
        whole = joined([json.loads(path.read_text()) for path in paths])
        (MAPS / f"{package}.json").write_text(json.dumps(whole))
        for path in paths:
            path.unlink()


def joined(maps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One map of several of the same package, whose tests differ."""
    tests: dict[str, float] = {}
    lines: dict[str, dict[str, list[int]]] = {}
    texts: dict[str, int] = {}
    for found in maps:
        first = len(tests)
        for file, rows in found["lines"].items():
            mine = lines.setdefault(file, {})
            for line, numbers in rows.items():
                moved = {number + first if number >= 0 else number for number in numbers}
                mine[line] = sorted(moved.union(mine.get(line, ())))
        tests |= found["tests"]
        texts |= found["texts"]
    return {"tests": tests, "lines": lines, "texts": texts}


def statement(text: str, line: int) -> tuple[ast.AST, range]:
    """The innermost statement at a line, and its lines; of one with a body, those before it."""
    best: tuple[ast.AST, range] = ast.Pass(), range(line, line + 2)  # an else, or a case
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt | ast.excepthandler):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or first
            if first <= line <= max(first, last):
                best = node, range(first, max(first, last) + 1)
    return best


def bound(node: ast.AST) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = getattr(node, "targets", None) or [getattr(node, "target", ast.Pass())]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def keys_at(text: str, line: int) -> set[str]:
    """The texts under which a dictionary has what stands at a line, or a name that it binds.

    Tests name their cases by them.
    """
    names = bound(statement(text, line)[0])
    dicts = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict))
    pairs = (pair for node in dicts for pair in zip(node.keys, node.values, strict=True))
    return {
        str(key.value)
        for key, value in pairs
        if isinstance(key, ast.Constant)
        and (
            key.lineno <= line <= (value.end_lineno or line)
            or names & {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        )
    }


def classes_at(text: str, line: int) -> set[str]:
    """The names of the classes around a line."""
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return {node.name for node in classes if node.lineno <= line <= (node.end_lineno or line)}


Timed = list[tuple[str, float]]
"""Tests, each with its seconds."""

Chosen = tuple[Timed, bool]
"""The tests that judge a mutant, and whether imports run its line."""


class Judges:
    """A package's map: which tests run which lines, and for how long."""

    def __init__(self, package: str, limit: float) -> None:
        path = MAPS / f"{package}.json"
        if not path.exists():
            raise SystemExit(f"{path}: not there; run ci/python_mutants.py --map first")
        found = json.loads(path.read_text())
        self.times: list[tuple[str, float]] = list(found["tests"].items())
        self.lines: dict[str, dict[str, list[int]]] = found["lines"]
        self.texts: dict[str, int] = found["texts"]
        self.limit = limit

    def of(self, mutant: Mutant) -> Chosen:
        """The tests that judge a mutant, each with its seconds, and whether imports run its line.

        Of a line that imports alone run, the tests that name what it binds, and those of the lines
        that do.
        """
        now = crc32(mutant.original().encode())
        if now != self.texts.get(mutant.file, now):  # a file that no test reads is not in the map
            raise SystemExit(f"{mutant.file} is not the file of the map; run --map again")
        node, span = statement(mutant.original(), mutant.line)
        rows = self.lines.get(mutant.file, {})
        numbers = {number for line in span for number in rows.get(str(line), ())}
        imported = numbers == {-1}  # imports alone run it
        numbers.discard(-1)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):  # a default or a decorator
            body = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            numbers = {number for line in body for number in rows.get(str(line), ())} - {-1}
        if not numbers and (names := bound(node)):
            named = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
            for file, others in self.lines.items():
                texts = (ROOT / file).read_text(encoding="utf-8").splitlines()
                for line, text in enumerate(texts, 1):
                    if named.search(text):
                        numbers.update(others.get(str(line), ()))
        if not numbers:
            numbers = {number for tests in rows.values() for number in tests}
        numbers.discard(-1)
        near = set()
        if imported:
            near = self.naming(bound(node) | classes_at(mutant.original(), mutant.line))
        keyed = self.cases(keys_at(mutant.original(), mutant.line))
        of_function: Counter[str] = Counter()
        ranked = []
        for number in sorted(numbers | near | keyed, key=lambda n: self.times[n][1]):
            test, seconds = self.times[number]
            rank = -1 if number in near else of_function[test.partition("[")[0]]
            ranked.append((-2 if number in keyed else rank, seconds, test))
            of_function[test.partition("[")[0]] += 1
        chosen, left = [], self.limit
        for _, seconds, test in sorted(ranked):
            if seconds <= left:
                left -= seconds
                chosen.append((test, seconds))
        return chosen, imported

    def cases(self, keys: set[str]) -> set[int]:
        """The tests whose case, or whose function, names one of these."""
        numbered = ((n, test.partition("[")[2]) for n, (test, _) in enumerate(self.times))
        cases = {number for number, case in numbered if any(key in case for key in keys)}
        return cases | (self.naming(keys) if keys else set())

    def naming(self, names: set[str]) -> set[int]:
        """The tests whose own functions name one of these: what imports run needs no other line."""
        named = re.compile(rf"\b(?:{'|'.join(map(re.escape, names or {'-'}))})\b")
        found = set()
        for number, (test, _) in enumerate(self.times):
            file, *_, function = test.partition("[")[0].split("::")
            if named.search(functions_of(file).get(function, "")):
                found.add(number)
        return found


@cache
def functions_of(file: str) -> dict[str, str]:
    """The functions of a file of tests, with their decorators, as text."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    return {node.name: ast.unparse(node) for node in functions}


PYTEST = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider",
          "-p", "no:randomly", "-p", "no:xdist", "-p", "ci.mutant_plugin")  # fmt: skip
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}


def run(
    command: Sequence[str], timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """pytest, in the repository.

    It writes to files: a pipe is not at its end while a process lives that a test left behind.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | variables, stdout=out,
                              stderr=errors, check=False, timeout=timeout)  # fmt: skip
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, out.read(), errors.read())


def killed(mutant: Mutant, tests: Sequence[str]) -> str:
    """The first of the tests that fails where the mutant is imported; empty if all pass."""
    source = mutant.source()
    if source is None or not tests:
        return ""
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as file:
        file.write(source)
        file.flush()
        planted = f"{ROOT / mutant.file}:{file.name}"
        try:
            done = run([*PYTEST, "-x", *tests], HANGS, MUTANT=planted)
        except subprocess.TimeoutExpired:
            return tests[0]
    if done.returncode == 0:
        return ""
    first = FIRST_FAILURE.search(done.stdout)
    name = first.group(1) if first else tests[0]
    return next((test for test in tests if test.startswith(name)), tests[0])  # a file, if it alone


@cache
def sound(file: str, test: str) -> bool:
    """Whether a test passes where a file is imported as it is."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return not killed(Mutant(file, 1, text, text), [test])


def by_import(mutant: Mutant, tests: Sequence[str]) -> str:
    """The first of the tests that fails on the mutant where it is imported, and passes without."""
    while by := killed(mutant, tests):
        if sound(mutant.file, by):
            return by
        tests = [test for test in tests if test != by]
    return ""


def in_forks(mutants: Sequence[Mutant], tests: Sequence[Timed]) -> list[str | None]:
    """The test that fails on each mutant, "" for none; None if it must be imported to be judged."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "mutants.json"
        rows = [
            {"file": m.file, "old": m.original(), "new": m.source(), "tests": t}
            for m, t in zip(mutants, tests, strict=True)
        ]
        work.write_text(json.dumps(rows))
        files = sorted({test.partition("::")[0] for timed in tests for test, _ in timed})
        done = run([*PYTEST, "-s", "--basetemp", f"{folder}/tests", *files], MUTANTS=str(work))
        found = work.with_suffix(".out")
        lines = found.read_text().splitlines() if found.exists() else []
        if len(lines) < len(rows):
            raise SystemExit(f"{len(lines)} of {len(rows)} mutants judged: {done.stdout[-2000:]}")
        return [json.loads(line) for line in lines]


def judge_new(mutants: Sequence[Mutant], limit: float, jobs: int) -> Iterator[list[Mutant]]:
    """Find out which tests notice: first in forks, then, where imports run the line, by an import.

    Mutants come in shares of a package, as they are judged, and packages in the order in which
    they stand.
    """
    shares: list[tuple[Judges, list[Mutant]]] = []
    for package in dict.fromkeys(mutant.package for mutant in mutants):
        of_package = [mutant for mutant in mutants if mutant.package == package]
        size = min(SHARE, -(-len(of_package) // jobs))
        judges = Judges(package, limit)
        shares += [(judges, of_package[at : at + size]) for at in range(0, len(of_package), size)]
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(judge_share, *share) for share in shares]):
            yield done.result()


def judge_share(judges: Judges, mutants: list[Mutant]) -> list[Mutant]:
    """Judge mutants of one package."""
    chosen = [judges.of(mutant) for mutant in mutants]
    found = in_forks(mutants, [timed for timed, _ in chosen])
    for mutant, (timed, imported), by in zip(mutants, chosen, found, strict=True):
        mutant.by = by or ""
        if by is None or (not by and imported):
            mutant.by = by_import(mutant, [*ALWAYS, *(test for test, _ in timed)])
    return mutants


def judge_known(mutants: Sequence[Mutant], jobs: int) -> Iterator[Mutant]:
    """Each by the test that noticed it."""
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, by in zip(mutants, pool.map(lambda m: killed(m, [m.by]), mutants), strict=True):
            mutant.by = by
            yield mutant
