"""Every float32 there is through every element grid: codes, values and counts against the oracle.

    python ci/exhaustive.py                          all 2**32 inputs, the best instruction set
    python ci/exhaustive.py --only e2m1 --levels scalar avx2 avx512
    python ci/exhaustive.py --reduced                what the tests run, in seconds

Rounding to a grid is monotonic, so a grid is known by its breakpoints: for each code the smallest
magnitude that gets it. The scalar oracle (tests/oracle, exact integers) fixes them by bisection;
the quantizer under test must then be constant between them and right at them. It is called as
everybody calls it, with ``scale_rule="one"``, which makes every block scale 1. ml_dtypes' casts
are compared beside it: they must agree with the oracle but for the table `DIFFERENCES`.

The full run writes ci/bench/results/<date>-exhaustive.json; exit code 1 on any mismatch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from extensor.backends.cpu import make_backend
from extensor.backends.generic import GenericBackend
from extensor.quant.spec import QuantSpec

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "ci" / "bench" / "results"
Array = Any

INFINITY = 0x7F800000
SIGN = 0x80000000
CHUNK = 1 << 17  # inputs at a time: they and what becomes of them stay in the cache
UNIT = 1 << 27  # inputs of one piece of work; its sign does not change
COLUMNS = 1024
LOW_HALVES = (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)
"""Lower halves of the reduced run: the ends, and both sides of a tie of the upper half."""


@dataclass(frozen=True)
class Case:
    """One element grid as one format reaches it, with what its dialect does to ties."""

    element: str
    format: str
    dialect: str = "ocp"
    ties: str = "even"

    @property
    def name(self) -> str:
        return f"{self.element} {self.ties} ({self.format})"

    @property
    def spec(self) -> QuantSpec:
        tile = (1, 32)
        return QuantSpec(self.format, tile=tile, scale_rule="one", dialect=self.dialect)


# An MX format takes its dialect's scale rule, so other ties are reached through the float scales
# (ties towards zero by mxfp4 alone; tests/unit/quant/test_rounding.py has them all).
CASES = (
    Case("e2m1", "mxfp4"),
    Case("e2m3", "mxfp6_e2m3"),
    Case("e3m2", "mxfp6_e3m2"),
    Case("e4m3", "mxfp8_e4m3"),
    Case("e5m2", "mxfp8_e5m2"),
    Case("int8_mx", "mxint8"),
    Case("e4m3", "fp8_e4m3"),
    Case("e5m2", "fp8_e5m2"),
    Case("int8", "int8"),
    Case("int4", "int4"),
    Case("int5", "int5"),
    Case("int6", "int6"),
    Case("e4m3", "fp8_e4m3", "microxcaling", "away"),
    Case("e5m2", "fp8_e5m2", "microxcaling", "away"),
    Case("int8", "int8", "microxcaling", "away"),
    Case("int4", "int4", "microxcaling", "away"),
)

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
"""The casts that round to the same grids; ml_dtypes' integers truncate and are not comparable."""


@dataclass(frozen=True)
class Difference:
    """Magnitudes (as bits, first and last) on which an ml_dtypes cast does not saturate.

    Its code is ``positive`` for a positive input and ``negative`` for a negative one.
    """

    first: int
    last: int
    positive: int
    negative: int
    why: str


NAN_BITS = INFINITY + 1, SIGN - 1
DIFFERENCES = {
    "e2m1": (Difference(*NAN_BITS, 0x08, 0x00, "NaN becomes a zero of the opposite sign"),),
    "e2m3": (Difference(*NAN_BITS, 0x20, 0x00, "NaN becomes a zero of the opposite sign"),),
    "e3m2": (Difference(*NAN_BITS, 0x20, 0x00, "NaN becomes a zero of the opposite sign"),),
    "e4m3": (
        Difference(0x43E80001, INFINITY, 0x7F, 0xFF, "above 464 it overflows to NaN"),
        Difference(*NAN_BITS, 0x7F, 0xFF, "NaN stays NaN"),
    ),
    "e5m2": (
        Difference(0x47700000, INFINITY, 0x7C, 0xFC, "from 61440 it overflows to Inf"),
        Difference(*NAN_BITS, 0x7E, 0xFE, "NaN stays NaN"),
    ),
}
"""Where ml_dtypes' casts differ; everywhere else, Inf included, they saturate and agree."""


# ---- what the oracle says


@cache
def oracle() -> Any:
    """tests/oracle/grid.py, which is not part of the installed package."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("tests.oracle.grid")


@dataclass(frozen=True)
class Grid:
    """A grid's breakpoints: ``starts[k]`` is the smallest magnitude (bits) with code ``codes[k]``.

    The last of them is infinity, whose block is NaN: its codes are 0.
    """

    bits: int
    starts: Array
    codes: Array  # (2, k): of positive and of negative inputs
    values: Array  # (2, k): float32 bits of what the codes stand for
    saturates: int  # the smallest magnitude that saturates


@cache
def grid_of(element: str, ties: str) -> Grid:
    """Breakpoints by bisection over magnitudes, on the oracle's exact rounding."""
    exact = oracle()

    def rounds_to(bits: int, sign: int = 0) -> tuple[int, bool]:
        code, saturated = exact.encode(exact.from_bits(bits + sign), element, ties=ties)
        return code, saturated

    def first(reached: Any) -> int:
        low, high = 0, INFINITY  # infinity saturates
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if reached(rounds_to(middle)) else (middle + 1, high)
        return low

    table = exact.GRIDS[element]
    count = len(table.values)
    starts = [first(lambda r, k=k: r[0] >= k) for k in range(count)]
    negative = [rounds_to(bits, SIGN)[0] for bits in starts]
    codes = np.array([[*range(count), 0], [*negative, 0]], np.uint8)
    values = [[exact.decode(int(code), element) for code in row[:-1]] for row in codes]
    expected = np.array([[*row, np.nan] for row in values], np.float32)
    ends = np.array([*starts, INFINITY], np.uint32)
    return Grid(table.bits, ends, codes, expected.view(np.uint32), first(lambda r: r[1]))


def pack(codes: Array, bits: int) -> Array:
    """Codes -> packed bytes, lowest bits first; a multiple of eight codes."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[0::2] | codes[1::2] << 4
    ones = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(ones.reshape(-1), bitorder="little")


@lru_cache(maxsize=4)
def repeated(code: int, bits: int, count: int) -> Array:
    """One code ``count`` times, packed."""
    return np.tile(pack(np.full(8, code, np.uint8), bits), count // 8)


# ---- one chunk


def check(case: Case, backend: Any, x: Array, bits: Array) -> str | None:
    """What is wrong with the backend's answer for inputs of one sign, ascending; None if nothing.

    ``bits`` are x's as float32. A block of 32 holds either finite values or none.
    """
    grid, spec = grid_of(case.element, case.ties), case.spec
    sign, magnitude = int(bits[0] >= SIGN), bits & np.uint32(SIGN - 1)
    lowest, highest = np.searchsorted(grid.starts, magnitude[[0, -1]], side="right") - 1
    if lowest == highest:  # between two breakpoints: one code
        segment: Any = lowest
        codes = repeated(int(grid.codes[sign, lowest]), grid.bits, x.size)
    else:
        segment = np.searchsorted(grid.starts, magnitude, side="right") - 1
        codes = pack(grid.codes[sign, segment], grid.bits)
    x = x.reshape(-1, COLUMNS)
    q, stats = backend.quantize(x, spec)
    values, same = backend.fake_quantize(x, spec)
    finite = magnitude.reshape(-1, 32)[:, 0] < INFINITY
    one = np.where(finite, 127, 255) if spec.is_mx else np.where(finite, np.float32(1), np.nan)
    got = values.reshape(-1).view(np.uint32)
    nan = magnitude >= INFINITY
    expected = grid.values[sign, segment]
    marks = np.array([1, grid.starts[1], grid.saturates, INFINITY], np.uint32)
    ends = np.searchsorted(magnitude, marks)
    counts = x.size, int(ends[3] - ends[2]), int(ends[1] - ends[0])
    checks = {
        "codes": (q.codes.reshape(-1) == codes).all(),
        "scales": np.array_equal(q.scales.reshape(-1), one, equal_nan=not spec.is_mx),
        "values": ((got == expected) | (nan & np.isnan(values.reshape(-1)))).all()
        if nan[-1]
        else (got == expected).all(),
        "counts": (stats.count, stats.saturated, stats.flushed) == counts and same == stats,
    }
    bad = [name for name, holds in checks.items() if not holds]
    return f"{', '.join(bad)} in bits {bits[0]:08x}..{bits[-1]:08x}" if bad else None


def check_ml_dtypes(element: str, x: Array, bits: Array) -> str | None:
    """What ml_dtypes does otherwise than the oracle and `DIFFERENCES` say; None if nothing."""
    grid = grid_of(element, "even")
    sign, magnitude = int(bits[0] >= SIGN), bits & np.uint32(SIGN - 1)
    with np.errstate(all="ignore"):
        codes = x.astype(ML_DTYPES[element]).view(np.uint8)
    # Infinity itself saturates in a cast; here that is the code before the last breakpoint's.
    starts = [*grid.starts[:-1].tolist()]
    expected = [*grid.codes[sign, :-1].tolist()]
    for row in DIFFERENCES[element]:
        keep = [k for k, start in enumerate(starts) if start < row.first]
        starts, expected = [starts[k] for k in keep], [expected[k] for k in keep]
        starts.append(row.first)
        expected.append(row.negative if sign else row.positive)
    segment = np.searchsorted(np.array(starts, np.uint32), magnitude[[0, -1]], side="right") - 1
    if segment[0] != segment[1]:
        segment = np.searchsorted(np.array(starts, np.uint32), magnitude, side="right") - 1
    else:
        segment = segment[:1]
    if (codes == np.array(expected, np.uint8)[segment]).all():
        return None
    return f"ml_dtypes {element} in bits {bits[0]:08x}..{bits[-1]:08x}"


# ---- all chunks


@cache
def backend_of(level: str) -> Any:
    """The numpy path, or the core at one level and on one thread."""
    if level == "numpy":
        return GenericBackend("numpy", np)
    backend = make_backend()
    assert backend.core is not None, backend.core_missing
    backend.core.set_threads(1)
    return backend


def run_unit(case: Case | None, what: str, start: int, size: int) -> list[str]:
    """Check one range of bits: a case at level ``what``, or without one ml_dtypes' element."""
    bits = np.arange(start, start + min(CHUNK, size), dtype=np.uint32)
    step = np.uint32(CHUNK)
    found = []
    if case is not None and what != "numpy":
        backend_of(what).core.set_level(what)
    for done in range(0, size, CHUNK):
        if done:
            bits += step
        x = bits.view(np.float32)
        if case is None:
            wrong = check_ml_dtypes(what, x, bits)
        else:
            wrong = check(case, backend_of(what), x, bits)
        if wrong:
            found.append(f"{case.name if case else ''} {what}: {wrong}".strip())
    return found[:4]


def samples() -> Iterator[tuple[Array, Array]]:
    """Inputs and their float32 bits, one sign at a time.

    All upper halves with a few lower ones; all of bfloat16; all of float16.
    """
    halves = np.arange(1 << 16, dtype=np.uint32).reshape(2, -1)
    for half in halves:
        bits = (half[:, None] << np.uint32(16) | np.array(LOW_HALVES, np.uint32)).reshape(-1)
        yield bits.view(np.float32), bits
        for dtype in (ml_dtypes.bfloat16, np.float16):
            x = half.astype(np.uint16).view(dtype)
            yield x, np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def run_reduced(levels: Sequence[str], cases: Sequence[Case] = CASES) -> list[str]:
    """Check the samples at each level, and ml_dtypes; what is wrong."""
    found = []
    for x, bits in samples():
        if x.dtype == np.float32:
            found += [w for e in ML_DTYPES if (w := check_ml_dtypes(e, x, bits))]
        for level in levels:
            backend = backend_of(level)
            before = None if level == "numpy" else backend.core.level()
            if before:
                backend.core.set_level(level)
            try:
                for case in cases:
                    if wrong := check(case, backend, x, bits):
                        found.append(f"{case.name} {level} {x.dtype}: {wrong}")
            finally:
                if before:
                    backend.core.set_level(before)
    return found


def run_all(cases: Sequence[Case], levels: Sequence[str], jobs: int, console: Console) -> list[str]:
    """Every input through every case at every level, in processes; what is wrong."""
    elements = [e for e in ML_DTYPES if any(case.element == e for case in cases)]
    tasks: list[tuple[Case | None, str]] = [(case, level) for case in cases for level in levels]
    tasks += [(None, element) for element in elements]
    units = [(*task, start, UNIT) for task in tasks for start in range(0, 1 << 32, UNIT)]
    found: list[str] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        bar = progress.add_task("2**27 inputs each", total=len(units))
        for future in as_completed([pool.submit(run_unit, *unit) for unit in units]):
            found += future.result()
            progress.advance(bar)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description="every float32 through every element grid")
    parser.add_argument("--only", action="append", help="an element grid; may be repeated")
    parser.add_argument("--levels", nargs="+", help="instruction sets, else the best; or numpy")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="result file, else by date in ci/bench/results")
    parser.add_argument("--reduced", action="store_true", help="samples only; writes nothing")
    chosen = parser.parse_args(argv)
    console = Console()
    known = [*backend_of("").core.levels(), "numpy"]
    levels = chosen.levels or (known[:-1] if chosen.reduced else known[-2:-1])
    if unknown := set(levels) - set(known):
        parser.error(f"--levels: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    cases = [case for case in CASES if not chosen.only or case.element in chosen.only]
    if not cases:
        parser.error(f"--only: expected one of {', '.join(sorted({c.element for c in CASES}))}")
    started = time.perf_counter()
    if chosen.reduced:
        found = run_reduced([*levels, "numpy"], cases)
    else:
        found = run_all(cases, levels, chosen.jobs, console)
    seconds = time.perf_counter() - started
    for wrong in found:
        console.print(f"wrong: {wrong}")
    console.print(f"{len(cases)} cases x {len(levels)} levels, {len(found)} wrong, {seconds:.0f} s")
    if not chosen.reduced:
        path = chosen.out or RESULTS / f"{date.today()}-exhaustive.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record(cases, levels, found, seconds, argv), indent=1) + "\n")
        console.print(f"written: {path}")
    return 1 if found else 0


def record(
    cases: Sequence[Case],
    levels: Sequence[str],
    found: list[str],
    seconds: float,
    argv: Sequence[str] | None,
) -> dict[str, Any]:
    """What the result file holds."""
    arguments = sys.argv[1:] if argv is None else argv
    return {
        "command": " ".join(["python ci/exhaustive.py", *arguments]),
        "date": str(date.today()),
        "seconds": round(seconds, 1),
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__},
        "inputs_per_case": 1 << 32,
        "levels": list(levels),
        "cases": [case.name for case in cases],
        "cases_per_element": Counter(case.element for case in cases),
        "ml_dtypes_differs": {
            element: [
                f"{row.first:08x}..{row.last:08x} -> {row.positive:#04x}, negative "
                f"{row.negative:#04x}: {row.why}"
                for row in rows
            ]
            for element, rows in DIFFERENCES.items()
            if any(case.element == element for case in cases)
        },
        "wrong": found,
    }


if __name__ == "__main__":
    sys.exit(main())
