"""``extensor tune``: from which size on each way of multiplying pays on this GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from extensor.cli.sheet import CommandError, Sheet, show

__all__ = ["tune"]

MODULE = "extensor_cuda.tune"


def tune(
    plot: Path | None = None, sizes: tuple[int, ...] = (), hadamard: Path | None = None
) -> None:
    """Measure products on this GPU; the choice between kernels and cupy follows what is found.

    Args:
        plot: an SVG file for the curve; its numbers go to a JSON file of the same name.
        sizes: sides of the cubes to measure; none: 128 to 4096.
        hadamard: measure what Hadamard transforms cost layers of growing width too; an SVG file.
    """
    if any(size < 16 for size in sizes):
        raise CommandError(f"--sizes: wanted sides of 16 or more, got {min(sizes)}")
    try:
        module = importlib.import_module(MODULE)
        path, timings, costs = module.tune(plot, sizes or module.SIZES, hadamard)
    except (RuntimeError, ImportError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error

    def rows(found: list[Any]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (t.way, str(t.size), f"{t.ours * 1e3:.3f}", f"{t.other * 1e3:.3f}", f"{t.ratio:.3f}x")
            for t in found
        )

    least = tuple(
        (way, "never" if work == module.NEVER else f"{work:,}")
        for way, work in module.crossovers(timings).items()
    )
    sheets = [
        Sheet("Products", ("way", "size", "ours, ms", "cupy, ms", "ratio"), rows(timings)),
        Sheet(f"Taken from (M N K), in {path}", ("way", "least"), least),
    ]
    if costs:
        columns = ("recipe", "width", "without, ms", "with, ms", "ratio")
        sheets.append(Sheet("Hadamard transforms", columns, rows(costs)))
    show(sheets)
