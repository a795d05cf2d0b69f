"""Planted mistakes in quantizers, products and training kernels, which the tests must catch.

    python ci/mutants.py                        all of them
    python ci/mutants.py --only tie --jobs 2    those with "tie" in their name
    python ci/mutants.py --sample 6             six that take little building, others every day
    python ci/mutants.py --list

Every mutant is a row of ci/mutants.toml: one replacement of text in a scratch copy of the
repository (see ci/scratch.py), which is rebuilt where the text is C++; then the tests that judge
that part run until the first failure. Caught: a test failed. A mutant whose text is no longer
there is an error, not a pass.
The full run writes ci/bench/results/<date>-mutants.json; exit code 1 unless all are caught.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "ci" / "bench" / "results"
TABLE = ROOT / "ci" / "mutants.toml"
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", re.MULTILINE)
LIMIT = 900  # seconds; a mutant that hangs is caught


@dataclass(frozen=True)
class Mutant:
    """One mistake: ``old`` occurs once in ``file`` (under extensor/) and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    vector: bool = False  # shows only above the scalar level: build them all
    tests: str = "quantizers"  # which of `CORE_TESTS` judge it

    @property
    def language(self) -> str:
        """The numpy path, or the core: what of Python decides about the core counts as C++."""
        python = self.file.endswith(".py") and self.tests == "quantizers"
        return "numpy" if python else "C++"


def read_mutants() -> tuple[Mutant, ...]:
    """The table in ci/mutants.toml."""
    with open(TABLE, "rb") as file:
        return tuple(Mutant(**entry) for entry in tomllib.load(file)["mutant"])


# Without the slow search for counterexamples: the tables must catch them.
NUMPY_TESTS = (
    "tests/unit/formats",
    "tests/unit/quant",
    "tests/test_every_format.py",
    "--ignore=tests/unit/quant/test_quantize_properties.py",
)
CORE_TESTS = {
    "quantizers": (
        "tests/test_every_kernel.py",
        "tests/test_exhaustive.py",
        "tests/unit/backends/test_quantize.py",
        "tests/test_every_spec.py",
        "-k",
        "quantize or operand or samples or shapes or spec",
    ),
    "convolutions": ("tests/test_every_kernel.py", "-k", "conv2d"),
    "products": ("tests/unit/backends", "-k", "test_matmul"),
    "training": (
        "tests/test_every_kernel.py",
        "-k",
        "gelu or softmax or entropy or norm or adam or training or relu or bfloat16 or sgd "
        "or channel",
    ),
}
QUICK = ("-x", "-q", "--no-header", "-p", "no:randomly")


@dataclass
class Outcome:
    """What became of one mutant; ``by`` is the test that failed first."""

    name: str
    file: str
    language: str
    outcome: str  # caught, survived or broken
    by: str
    seconds: float


def judge(mutant: Mutant, folder: Path) -> Outcome:
    """Plant one mutant in the copy in ``folder`` and run the tests on it."""
    started = time.perf_counter()
    command = [sys.executable, str(ROOT / "ci" / "scratch.py")]
    if mutant.language == "numpy":
        command += [str(folder / "numpy"), "--no-core"]
    else:
        # Light optimization compiles faster; the bits must not depend on it anyway.
        command += [str(folder / ("vector" if mutant.vector else "scalar"))]
        command += ["--define", "OPTIMIZE=-O1"]
        command += ["--define", f"VECTOR_LEVELS={'ON' if mutant.vector else 'OFF'}"]
    command += ["--replace", f"extensor/{mutant.file}", mutant.old, mutant.new, "--", *QUICK]
    command += NUMPY_TESTS if mutant.language == "numpy" else CORE_TESTS[mutant.tests]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
            env=os.environ | one_thread,
        )
    except subprocess.TimeoutExpired:
        outcome, by = "caught", f"over {LIMIT} s"
    else:
        found = FIRST_FAILURE.search(done.stdout)
        if done.returncode == 0:
            outcome, by = "survived", ""
        elif found and done.returncode in (1, 2):
            outcome, by = "caught", found.group(1)
        elif done.returncode < 0 or done.returncode > 128:
            outcome, by = "caught", "a crash"
        else:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            outcome, by = "broken", " / ".join(lines[-3:])
    seconds = time.perf_counter() - started
    return Outcome(mutant.name, mutant.file, mutant.language, outcome, by, round(seconds, 1))


def judge_all(mutants: Sequence[Mutant], work: Path, jobs: int, console: Console) -> list[Outcome]:
    """All of them, ``jobs`` at a time, each job in its own folder; in the order of the table."""
    folders: Queue[Path] = Queue()
    for number in range(jobs):
        folders.put(work / f"job{number}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()

    def one(mutant: Mutant) -> Outcome:
        folder = folders.get()
        try:
            outcome = judge(mutant, folder)
        finally:
            folders.put(folder)
        line = f"{outcome.outcome:8} {outcome.language:5} {mutant.name} ({outcome.seconds:.0f} s)"
        console.print(f"{line} {outcome.by}", markup=False, highlight=False, soft_wrap=True)
        progress.advance(bar)
        return outcome

    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):
        bar = progress.add_task("mutants", total=len(mutants))
        return list(pool.map(one, mutants))


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the mutants asked for; 0 if all were caught."""
    parser = argparse.ArgumentParser(description="planted mistakes that the tests must catch")
    parser.add_argument("--only", action="append", help="text in the name, file or language")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--folder", type=Path, help="for the copies; kept, so that builds are reused"
    )
    parser.add_argument("--out", type=Path, help="result file, else by date in ci/bench/results")
    parser.add_argument("--sample", type=int, help="this many, other ones every day")
    parser.add_argument("--list", action="store_true", help="only list them")
    chosen = parser.parse_args(argv)
    console = Console()
    mutants = [
        mutant
        for mutant in read_mutants()
        if not chosen.only
        or any(o in f"{mutant.language} {mutant.file} {mutant.name}" for o in chosen.only)
    ]
    if not mutants:
        parser.error(f"--only: no mutant has {' or '.join(chosen.only)} in its name")
    if chosen.sample:
        light = [mutant for mutant in mutants if not mutant.vector]
        mutants = random.Random(date.today().toordinal()).sample(light, chosen.sample)
    if chosen.list:
        for mutant in mutants:
            console.print(f"{mutant.language:5} {mutant.file}: {mutant.name}", highlight=False)
        return 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="extensor-mutants-") as temporary:
        work = chosen.folder.resolve() if chosen.folder else Path(temporary)
        outcomes = judge_all(mutants, work, chosen.jobs, console)
    seconds = time.perf_counter() - started
    counts = {
        kind: sum(outcome.outcome == kind for outcome in outcomes)
        for kind in ("caught", "survived", "broken")
    }
    console.print(f"{len(outcomes)} mutants: {counts}, {seconds:.0f} s")
    if chosen.out or not (chosen.only or chosen.sample):
        path = chosen.out or RESULTS / f"{date.today()}-mutants.json"
        result = {
            "command": " ".join(
                ["python ci/mutants.py", *(sys.argv[1:] if argv is None else argv)]
            ),
            "date": str(date.today()),
            "seconds": round(seconds, 1),
            **counts,
            "mutants": [asdict(outcome) for outcome in outcomes],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {path}")
    return 0 if counts["caught"] == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
