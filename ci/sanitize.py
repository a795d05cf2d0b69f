"""The core's tests under the address and undefined-behaviour sanitizers.

    python ci/sanitize.py                                  the kernel and format tests
    python ci/sanitize.py -- tests/unit/ops -k conv        other tests

The core is built with its CMake option SANITIZE in a scratch copy (see ci/scratch.py) and loaded
into this Python with the sanitizer preloaded. Any finding ends the process, with its report and
exit code 1. Needs g++ or clang with libasan, cmake, ninja and pybind11; exits with 77 where this
machine cannot: no compiler, no sanitizer libraries, or a Python that they do not start in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = 77
TESTS = (
    "tests/test_every_kernel.py",
    "tests/test_every_spec.py",
    "tests/test_exhaustive.py",
    "tests/test_fuzz_files.py",
    "tests/unit/backends",
    "tests/unit/quant/test_quantize_by_hand.py",
    "tests/unit/ops/test_quantized.py",
    "-q",
    "-n",
    str(min(len(os.sched_getaffinity(0)), 4)),
)
# CPython keeps what it allocates to the end, and a big array may be asked for and refused.
ADDRESS = "detect_leaks=0:allocator_may_return_null=1:halt_on_error=1:exitcode=99"
UNDEFINED = "print_stacktrace=1:halt_on_error=1"


def not_run(why: str) -> NoReturn:
    """End with the exit code that ci/check.py shows as not run."""
    print(f"sanitizers: not run: {why}")
    raise SystemExit(NOT_RUN)


def library(compiler: str, name: str) -> str:
    """The full path of a library as the compiler would link it."""
    if not shutil.which(compiler):
        not_run(f"expected a C++ compiler, found no {compiler}; see --compiler")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        not_run(f"{compiler} has no {name}; install its sanitizer libraries")
    return str(Path(path).resolve())


def check_that_python_starts(preload: str) -> None:
    """Some machines have no room for the sanitizer's shadow memory."""
    environment = os.environ | {"LD_PRELOAD": preload, "ASAN_OPTIONS": ADDRESS}
    command = [sys.executable, "-c", "pass"]
    start = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if start.returncode:
        not_run(f"with the sanitizer preloaded Python ends with {start.returncode}: {start.stderr}")


def main(argv: Sequence[str] | None = None) -> int:
    """Build, preload, test; 0 if nothing was found and every test passed."""
    parser = argparse.ArgumentParser(description="tests under address and UB sanitizers")
    parser.add_argument("--compiler", default="g++", help="the one CMake finds, for its libraries")
    parser.add_argument("--folder", type=Path, help="for the copy; kept, so that it is reused")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    chosen = parser.parse_args(argv)
    # An exception that C++ throws passes through the sanitizer, which must find the C++ library.
    preload = " ".join(library(chosen.compiler, name) for name in ("libasan.so", "libstdc++.so"))
    check_that_python_starts(preload)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="extensor-sanitize-") as temporary:
        command = [sys.executable, str(ROOT / "ci" / "scratch.py")]
        reports = Path(temporary) / "report"  # pytest would swallow what a worker prints last
        command += [str(chosen.folder or Path(temporary) / "copy"), "--define", "SANITIZE=ON"]
        command += ["--define", "OPTIMIZE=-O1"]
        for entry in (
            f"LD_PRELOAD={preload}",
            f"ASAN_OPTIONS={ADDRESS}:log_path={reports}",
            f"UBSAN_OPTIONS={UNDEFINED}:log_path={reports}",
            "PYTHONMALLOC=malloc",  # so that a small overrun is not hidden in Python's arenas
            "OPENBLAS_NUM_THREADS=1",
            "FUZZ_SECONDS=60",
        ):
            command += ["--env", entry]
        code = subprocess.run([*command, "--", *(chosen.pytest or TESTS)], check=False).returncode
        for report in sorted(reports.parent.glob("report.*")):
            print(report.read_text(errors="replace"))
    print(
        f"sanitizers: {'clean' if code == 0 else 'failed'}, {time.perf_counter() - started:.0f} s"
    )
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
