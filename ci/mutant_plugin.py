"""pytest plugin of ci/python_mutants.py: it maps lines to tests, or judges mutants.

`MUTANT_MAP=FILE` writes which tests run each line, and how long each test takes; with
`MUTANT_SHARE=K/N` of the tests K, K + N, K + 2 N and so on alone.
`MUTANT=FILE:SOURCE` makes the import of FILE compile the text in SOURCE instead.
`MUTANTS=FILE` collects the tests once and judges each mutant of FILE in a fork of that process.
There the functions of the mutated file get new code; what only runs at import stays as it is.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from zlib import crc32

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("extensor", "models", "training")
SLOW = 2.0
"""Seconds of CPU after which a test is no judge: the map stops it."""

HANGS = 3 * SLOW
"""Seconds of CPU after which an imported mutant has hung in a test: its judges take under SLOW."""

WAITS = 120
"""Seconds after which a fork has hung in a test, however little it computes."""

MEMORY = 6 << 30
"""Bytes that a mutant may take."""

PEERS = ("torch", "torchao", "transformers", "gguf", "mpi4py", "cupy", "cupyx", "sentencepiece")
"""Packages that CI's sample does without: tests that ask for them are skipped."""


class Hidden(PathFinder):
    """Finds no package of `PEERS`."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name in PEERS else super().find_spec(name, path, target)


def import_mutant(path: str, source: str) -> None:
    """Compile ``source`` where the file ``path`` is imported; its cached bytecode is not read."""
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) != path:
            return original(self, fullname)
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def stop(number: int, frame: FrameType | None) -> None:
    """End the test that runs."""
    pytest.fail("out of time")


class Hangs:
    """Ends each test that takes many times what a judge takes; so a loop without end is noticed."""

    def __init__(self) -> None:
        signal.signal(signal.SIGPROF, stop)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_PROF, HANGS)
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return result


# ---- which tests run a line


class Map:
    """Records the lines that each test runs; those of imports and of collection have no test."""

    def __init__(self, out: str) -> None:
        import coverage

        self.out = out
        self.tests: dict[str, float] = {}
        self.failed: set[str] = set()
        rooms = [f"{ROOT / room}/*" for room in ROOMS]
        self.coverage = coverage.Coverage(data_file=f"{out}.coverage", include=rooms)
        self.coverage.erase()
        self.coverage.start()
        signal.signal(signal.SIGPROF, stop)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests of Hypothesis are no judges: they take long, and differ from run to run."""
        items[:] = [i for i in items if not hasattr(getattr(i, "obj", None), "hypothesis")]
        first, _, step = os.environ.get("MUTANT_SHARE", "0/1").partition("/")
        items[:] = items[int(first) :: int(step)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SLOW)
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.tests[item.nodeid] = round(time.process_time() - began, 4)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        numbers = {test: n for n, test in enumerate(self.tests) if test not in self.failed}
        lines, texts = {}, {}
        for file in sorted(data.measured_files()):
            rows, name = data.contexts_by_lineno(file), str(Path(file).relative_to(ROOT))
            texts[name] = crc32(Path(file).read_bytes())
            lines[name] = {
                line: [-1] * ("" in tests) + sorted(numbers[t] for t in tests if t in numbers)
                for line, tests in rows.items()
            }
        found = {"tests": self.tests, "lines": lines, "texts": texts}
        Path(self.out).write_text(json.dumps(found))
        self.coverage.erase()


# ---- mutants in forks


def parts(code: CodeType) -> list[CodeType]:
    """The code objects directly within one."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def own(code: CodeType) -> tuple[Any, ...]:
    """What a code object does, apart from those within and from its place in the file."""
    constants = [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]
    return (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars,
            code.co_cellvars, code.co_flags, code.co_exceptiontable, len(parts(code)))  # fmt: skip


def differing(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions that differ, with those around them; None if code that runs at import does."""
    function = bool(old.co_flags & 2)  # CO_OPTIMIZED: no module and no class
    found: list[tuple[CodeType, CodeType]] = []
    same = own(old) == own(new)
    if not same and not function:
        return None
    for before, after in zip(parts(old), parts(new), strict=False):
        inner = differing(before, after)
        if inner is None:
            return None
        found += inner
    if function and (found or not same):
        found.append((old, new))
    return found


def place(code: CodeType) -> tuple[str, str, int]:
    """What tells a code object from others."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


class Forks:
    """Judges mutants, each in a fork of the process that collected the tests.

    Args:
        work: a file of the mutants: ``file``, ``old`` and ``new`` text, ``tests`` and their
            seconds. Beside it, with the suffix ``.out``, a line for each: the test that failed,
            "" for none, null where the mutant must be imported.
    """

    def __init__(self, work: str) -> None:
        self.mutants = json.loads(Path(work).read_text())
        self.out = Path(work).with_suffix(".out")
        self.now = Path(work).with_suffix(".now")
        self.sound: dict[str, bool] = {}
        self.forked = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType):
                self.functions.setdefault(place(thing.__code__), []).append(thing)
        gc.freeze()
        with self.out.open("w", encoding="utf-8") as out:
            for mutant in self.mutants:
                print(json.dumps(self.judge(mutant, items)), file=out, flush=True)
        return True

    def judge(self, mutant: dict[str, Any], items: dict[str, pytest.Item]) -> str | None:
        """The first test that fails on the mutant, and passes without it."""
        path = str(ROOT / mutant["file"])
        old = compile(mutant["old"], path, "exec", dont_inherit=True)
        pairs = differing(old, compile(mutant["new"], path, "exec", dont_inherit=True))
        if pairs is None or any(a.co_freevars != b.co_freevars for a, b in pairs):
            return None
        tests = [
            (items[t], s) for t, s in mutant["tests"] if t in items and self.sound.get(t, True)
        ]
        while by := self.fork(tests, pairs, path, mutant["new"]):
            if by not in self.sound:
                alone = [t for t in tests if t[0].nodeid == by]
                self.sound[by] = not self.fork(alone, [], path, mutant["old"])
            if self.sound[by]:
                return by
            tests = [t for t in tests if t[0].nodeid != by]
        return ""

    def fork(
        self,
        tests: Sequence[tuple[pytest.Item, float]],
        pairs: Sequence[tuple[CodeType, CodeType]],
        path: str,
        text: str,
    ) -> str:
        """Run tests in a fork where functions have other code; the first that fails, or hangs.

        A file that a test is the first to import is compiled from the text.
        """
        self.now.write_text("")
        child = os.fork()
        if not child:
            self.forked = True
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            import_mutant(os.path.realpath(path), text)
            for old, new in pairs:
                for function in self.functions.get(place(old), ()):
                    function.__code__ = new
            following = [item for item, _ in tests[1:]] + [None]
            for (item, seconds), then in zip(tests, following, strict=True):
                self.now.write_text(item.nodeid)
                signal.setitimer(signal.ITIMER_PROF, 3 + 5 * seconds)
                signal.setitimer(signal.ITIMER_REAL, WAITS)
                item.ihook.pytest_runtest_protocol(item=item, nextitem=then)
            os._exit(0)
        return self.now.read_text() if os.waitpid(child, 0)[1] else ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.forked and report.failed:
            os._exit(1)


def pytest_configure(config: pytest.Config) -> None:
    if out := os.environ.get("MUTANT_MAP"):
        config.pluginmanager.register(Map(out))
    if work := os.environ.get("MUTANTS"):
        config.pluginmanager.register(Forks(work))
    if "MUTANT" in os.environ:
        config.pluginmanager.register(Hangs())


if {"MUTANT", "MUTANTS", "MUTANT_MAP"} & os.environ.keys():
    sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
if "MUTANT" in os.environ:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, 10 * HANGS)  # for imports and collection; it ends pytest
    _path, _, _source = os.environ["MUTANT"].partition(":")
    import_mutant(os.path.realpath(_path), Path(_source).read_text(encoding="utf-8"))
