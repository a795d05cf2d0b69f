"""pytest plugin of ci/python_mutants.py: one file is imported as a mutant, or calls are recorded.

`MUTANT=FILE:SOURCE` makes the import of FILE compile the text in SOURCE instead.
`MUTANT_CALLS=FILE` writes which functions each test calls, and how long each test takes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("extensor", "models", "training")


def import_mutant(path: str, source: str) -> None:
    """Compile ``source`` where the file ``path`` is imported; its cached bytecode is not read."""
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) != path:
            return original(self, fullname)
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


class Calls:
    """Records the functions that each test calls, by file and first line."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.names: dict[CodeType, str | None] = {}
        self.now: set[CodeType] = set()
        self.tests: dict[str, float] = {}
        self.calls: dict[str, list[int]] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> None:
        self.now.add(frame.f_code)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.now, began = set(), time.process_time()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        yield
        sys.settrace(None)
        number = len(self.tests)
        self.tests[item.nodeid] = round(time.process_time() - began, 4)
        for code in self.now:
            if code not in self.names:
                path = Path(code.co_filename)
                ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS
                name = f"{path.relative_to(ROOT)}:{code.co_firstlineno}" if ours else None
                self.names[code] = name
            if (known := self.names[code]) is not None:
                tests = self.calls.setdefault(known, [])
                if not tests or tests[-1] != number:
                    tests.append(number)

    def pytest_sessionfinish(self) -> None:
        Path(self.out).write_text(json.dumps({"tests": self.tests, "calls": self.calls}))


def pytest_configure(config: pytest.Config) -> None:
    if out := os.environ.get("MUTANT_CALLS"):
        config.pluginmanager.register(Calls(out))


if "MUTANT" in os.environ:
    _path, _, _source = os.environ["MUTANT"].partition(":")
    import_mutant(os.path.realpath(_path), Path(_source).read_text(encoding="utf-8"))
