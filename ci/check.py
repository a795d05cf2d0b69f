"""The one check command: lint, types, imports, docs, tests of several kinds, then what passed.

    python ci/check.py                      everything but what builds the core anew
    python ci/check.py --quick              lint, imports and the tests of the library's parts
    python ci/check.py --only sanitize --only mutants --only kernels      that: sanitizers, planted
                                            mistakes, every CUDA kernel (extra nvrtc, no GPU)
    python ci/check.py --only lint --only types
    python ci/check.py --only tests -- tests/unit -k matmul

Arguments after ``--`` go to pytest. A line before each step says how many there
are and how long the check has run. The documentation is built beside the other steps
and told of after them. Exits 1 if anything failed. The last line is
pytest's own closing line (of the last pytest run), so that a log's tail says how
many tests ran.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PYTEST_CLOSING = re.compile(r"^=+ .*\bin \d[\d.]*s\b.* =+$")
NUMBER_TESTS = (
    *(f"tests/unit/quant/test_{name}.py" for name in ("affine", "stochastic", "weight_cache")),
    *("tests/unit/nn", "tests/unit/ops"),
)
"""What is run a second time on the pure numpy path: layers and quantized products.

The tests of formats and of quant's reference ask no backend: they would only repeat themselves.
"""

SITE = ("--keep-going", "-b", "html", "docs", "docs/_build")
"""The documentation site: its gallery is run, its reference written; a warning fails it."""

TORCH_EXAMPLE = ("docs/how-to/torch_gpt.py", "--steps", "40", "--text", "README.md")
"""The script of docs/how-to/torch.md, shorter and without a download."""

QUICK = ("lint", "imports", "tests")
"""Groups of `--quick`."""

QUICK_PARTS = ("autograd", "dtypes", "formats", "inspect", "io", "nn", "ops", "optim", "quant")
QUICK_TESTS = ("tests/test_architecture.py", *(f"tests/unit/{part}" for part in QUICK_PARTS))

ON_REQUEST = ("sanitize", "mutants", "kernels")
"""Groups that run only where `--only` names them: minutes of compiling. CI names the first two."""

NOT_RUN = 77
"""Exit code of a step that this machine has not the tools for; it says which."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Test workers share the CPUs; a BLAS pool in each would fight over them."""


@dataclass(frozen=True)
class Step:
    """One command of the check.

    ``group`` is what ``--only`` selects; ``environment`` is added to the process's own. A step
    that needs one CPU for long runs ``beside`` the others.
    """

    name: str
    group: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    beside: bool = False


@dataclass(frozen=True)
class Outcome:
    """How one step ended; ``closing`` is pytest's last line, empty for other tools."""

    step: Step
    seconds: float
    exit_code: int
    closing: str

    @property
    def passed(self) -> bool:
        """Whether the command succeeded, or said that it cannot run on this machine."""
        return self.exit_code in (0, NOT_RUN)


def pytest_step(name: str, arguments: Sequence[str], environment: dict[str, str]) -> Step:
    """A pytest run on several worker processes, unless the arguments say how many."""
    given = any(a.startswith(("-n", "--numprocesses")) for a in arguments)
    workers = () if given else ("-n", jobs())
    slowest = ("--durations=30", "--durations-min=3")
    command = (sys.executable, "-m", "pytest", *workers, *slowest, *arguments)
    return Step(name, "tests", command, ONE_THREAD | environment)


def jobs() -> str:
    """How many test processes to run: one per CPU that this process may use, four at most."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(min(cpus, 4))


def steps(pytest_arguments: Sequence[str]) -> list[Step]:
    """Every step, cheapest first; given pytest arguments, the numpy-only run is left out."""
    python = (sys.executable, "-m")
    listed = [
        Step("ruff check", "lint", (*python, "ruff", "check", ".")),
        Step("ruff format", "lint", (*python, "ruff", "format", "--check", ".")),
        Step("clang-format", "lint", (*CLANG_FORMAT, "--dry-run", "--Werror", *cpp_sources())),
        Step("mypy", "types", (*python, "mypy")),
        Step("lint-imports", "imports", (sys.executable, "-c", LINT_IMPORTS)),
    ]
    listed.append(Step("docs", "docs", (*python, "sphinx", "-q", "-W", *SITE), beside=True))
    if find_spec("torch") is not None:  # an extra; its CPU wheel is enough
        listed.append(Step("PyTorch example", "docs", (sys.executable, *TORCH_EXAMPLE)))
    if not pytest_arguments:
        listed.append(pytest_step("pytest, numpy path", NUMBER_TESTS, {"EXTENSOR_CORE": "0"}))
        # Both build the core anew.
        listed.append(
            Step("sanitizers", "sanitize", (sys.executable, "ci/sanitize.py"), ONE_THREAD)
        )
        sample = (sys.executable, "ci/mutants.py", "--sample", "4")
        listed.append(Step("mutants, a sample", "mutants", sample, ONE_THREAD))
        sample = (sys.executable, "ci/python_mutants.py", "--sample", "30")
        listed.append(Step("mutants of Python, a sample", "mutants", sample, ONE_THREAD))
        listed.append(kernels_step())
    environment = {"EXTENSOR_REQUIRE_CORE": "1"}
    listed.append(pytest_step("pytest", pytest_arguments, environment))
    return listed


def kernels_step() -> Step:
    """Every CUDA kernel compiled; without NVRTC a line that says what is missing."""
    name = "CUDA kernels compile"
    if find_spec("cuda") is None:
        missing = f"print({INSTALL_NVRTC!r}); raise SystemExit({NOT_RUN})"
        return Step(name, "kernels", (sys.executable, "-c", missing))
    return replace(pytest_step(name, ("-m", "nvrtc", "tests/unit/cuda"), {}), group="kernels")


INSTALL_NVRTC = "NVRTC is not installed; pip install -e '.[nvrtc]'"

CLANG_FORMAT = (sys.executable, "-c", "from clang_format import clang_format; clang_format()")


def cpp_sources() -> list[str]:
    """C++ and CUDA C++ that clang-format holds to the repository's `.clang-format`."""
    folders = (ROOT / name for name in ("extensor/_core", "extensor_cuda", "tests/unit/cuda"))
    suffixes = (".cpp", ".hpp", ".cu", ".cuh")
    found = (path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes)
    return sorted(str(path.relative_to(ROOT)) for path in found)


# The console script may not be on the PATH of a virtual environment that is not activated.
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def run(step: Step, out: TextIO) -> Outcome:
    """Run one step, its output passed through as it comes."""
    started = time.perf_counter()
    closing = ""
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=os.environ | step.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            out.flush()
            if PYTEST_CLOSING.match(line):
                closing = line.rstrip()
    return Outcome(step, time.perf_counter() - started, process.returncode, closing)


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table, then pytest's closing line, which stays the last."""
    table = Table(title="extensor checks")
    table.add_column("check")
    table.add_column("result")
    table.add_column("seconds", justify="right")
    for outcome in outcomes:
        result = "[green]passed" if outcome.passed else f"[red]failed (exit {outcome.exit_code})"
        result = "[yellow]not run, see above" if outcome.exit_code == NOT_RUN else result
        table.add_row(outcome.step.name, result, f"{outcome.seconds:.1f}")
    console.print(table)
    closing = [outcome.closing for outcome in outcomes if outcome.closing]
    if closing:
        print(closing[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks asked for; 0 if all passed, 1 otherwise."""
    parser = argparse.ArgumentParser(
        description="extensor's checks: lint, types, imports, docs, tests"
    )
    groups = ["lint", "types", "imports", "docs", "sanitize", "mutants", "kernels", "tests"]
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", action="append", choices=groups, help="may be repeated")
    which.add_argument("--quick", action="store_true", help="what takes less than three minutes")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    chosen = parser.parse_args(argv)
    requested = chosen.only or [group for group in groups if group not in ON_REQUEST]
    if chosen.quick:
        requested, chosen.pytest = list(QUICK), [*QUICK_TESTS, *chosen.pytest]
    console, started = Console(), time.perf_counter()
    ahead = [step for step in steps(chosen.pytest) if step.group in requested]
    told = sorted(ahead, key=lambda step: step.beside)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor() as pool:
        texts = {step.name: io.StringIO() for step in told if step.beside}
        ends = {s.name: pool.submit(run, s, texts[s.name]) for s in told if s.beside}
        for number, step in enumerate(told, start=1):
            minutes, seconds = divmod(round(time.perf_counter() - started), 60)
            progress = f"{number} of {len(told)}, after {minutes}:{seconds:02}"
            console.rule(f"[bold]{progress}: {step.name}", align="left")
            outcomes.append(ends[step.name].result() if step.beside else run(step, sys.stdout))
            if step.beside:
                sys.stdout.write(texts[step.name].getvalue())
    report(outcomes, console)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
